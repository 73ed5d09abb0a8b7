// The page: what is asked goes to the server, and each view shows a part of what comes back.

import { get, Refused, useKey } from "./api.js";
import * as batch from "./batch.js";
import { compare, press, turning } from "./compare.js";
import * as dial from "./dial.js";
import { at, fill, make } from "./dom.js";
import { drawMaps, explain } from "./heads.js";
import { fromAddress, toAddress } from "./question.js";
import { copy, show } from "./snippets.js";

const VIEWS = ["compare", "dial", "heads"];
let view = "compare";
let running = new AbortController();
let swept = false;
let examples = [];

// Do some work, and show what goes wrong in the server's words.
async function doing(status, work) {
  running.abort();
  const mine = (running = new AbortController());
  at("problem").hidden = true;
  at("status").textContent = status;
  at("stop").hidden = false;
  try {
    await work(mine.signal);
    if (mine === running) at("status").textContent = "";
  } catch (error) {
    if (error.name !== "AbortError") report(error);
    else if (mine === running) at("status").textContent = "stopped";
  } finally {
    if (mine === running) at("stop").hidden = true;
  }
}

function report(error) {
  at("status").textContent = "";
  at("problem").hidden = false;
  const needsKey = error instanceof Refused && error.status === 401;
  at("problem").textContent = needsKey ? `${error.message} (Options, API key)` : error.message;
  if (needsKey) at("key").closest("details").open = true;
}

function run() {
  swept = false;
  dial.forget();
  at("explanation").hidden = true;
  at("token_hint").hidden = false;
  return doing("running…", async (signal) => {
    const { body } = await compare(signal, choose);
    show("/compare", body);
    at("dial_target").value = turning();
    if (view === "dial") await sweep(signal);
  });
}

async function sweep(signal) {
  const body = await dial.sweep(signal);
  swept = true;
  show("/sweep", body);
}

function choose(target, tokens, i) {
  press(target, i);
  select("heads");
  return doing("leaving out each head…", async (signal) => {
    show("/explain", await explain(target, tokens, i, signal));
  });
}

function select(name, focus = false) {
  view = name;
  for (const own of VIEWS) {
    const tab = at(`tab-${own}`);
    tab.setAttribute("aria-selected", String(own === name));
    tab.tabIndex = own === name ? 0 : -1;
    at(own).hidden = own !== name;
    if (own === name && focus) tab.focus();
  }
  if (name === "dial" && !swept && at("prompt").value) doing("running…", sweep);
}

function keys(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  select(VIEWS[(VIEWS.indexOf(view) + step + VIEWS.length) % VIEWS.length], true);
}

function takeExample() {
  const own = examples[at("example").value];
  const kind = own?.[at("kind").value];
  if (!kind) return;
  at("chat").checked = false;
  at("context").value = kind.context;
  at("prompt").value = kind.prompt;
}

async function load() {
  const [info, sets, found] = await Promise.all([get("/info"), get("/v1/head_sets"), get("/playground/examples.json")]);
  at("model").textContent = `${info.model.name}, ${info.model.n_layers} layers of ${info.model.n_heads} heads, ${info.model.device}`;
  at("model").dataset.name = info.model.name;
  at("chat").disabled = !info.model.has_chat_template;
  for (const target of ["parametric", "context"]) {
    const own = sets.data.filter((set) => set.target === target);
    const options = own.map((set) => make("option", { value: set.name, text: set.name }));
    fill(at(`set_${target}`), make("option", { value: "", text: "the one of that name" }), ...options);
  }
  fill(at("map_set"), ...sets.data.map((set) => make("option", { value: set.name, text: set.name })));
  examples = found;
  fill(at("example"), ...found.map((own, i) => make("option", { value: i, text: own.name })), make("option", { value: "", text: "your own" }));
  const state = fromAddress();
  if (state === null) takeExample();
  else at("example").value = "";
  await drawMaps(at("map_set").value);
  if (VIEWS.includes(state?.view)) select(state.view);
}

function listen() {
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  at("stop").addEventListener("click", () => running.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
  });
  for (const id of ["example", "kind"]) at(id).addEventListener("change", takeExample);
  for (const id of ["context", "prompt"]) at(id).addEventListener("input", () => (at("example").value = ""));
  at("key").addEventListener("change", () => {
    useKey(at("key").value);
    start();
  });
  for (const own of VIEWS) {
    at(`tab-${own}`).addEventListener("click", () => select(own));
    at(`tab-${own}`).addEventListener("keydown", keys);
  }
  at("dial_strength").addEventListener("input", () => dial.turn(report));
  at("dial_target").addEventListener("change", () => doing("running…", sweep));
  at("map_set").addEventListener("change", () => drawMaps(at("map_set").value).catch(report));
  at("file").addEventListener("change", (event) => {
    const file = event.target.files[0];
    if (file) batch.read(file).catch(report);
  });
  at("batch_run").addEventListener("click", runBatch);
  at("batch_save").addEventListener("click", batch.save);
  for (const own of document.querySelectorAll(".copy")) {
    own.addEventListener("click", () => copy(at(own.dataset.of).textContent, own));
  }
  at("share").addEventListener("click", (event) => copy(toAddress({ view }), event.target));
}

async function runBatch() {
  const stop = at("batch_stop");
  const mine = new AbortController();
  const cancel = () => mine.abort();
  stop.addEventListener("click", cancel);
  stop.hidden = false;
  at("batch_run").disabled = true;
  try {
    await batch.run(mine.signal);
  } catch (error) {
    report(error);
  } finally {
    stop.removeEventListener("click", cancel);
    stop.hidden = true;
    at("batch_run").disabled = false;
  }
}

const start = () => doing("asking what is served…", load);

listen();
start();
