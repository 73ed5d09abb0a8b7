// The page: what is asked goes to the server, and each view shows a part of what comes back.

import { get, useKey } from "./api.js";
import * as batch from "./batch.js";
import { compare, pieceOf, press, turning } from "./compare.js";
import * as dial from "./dial.js";
import { at } from "./dom.js";
import * as form from "./form.js";
import * as heads from "./heads.js";
import { drawMaps } from "./map.js";
import { fillForm, fromAddress, isSame, read, toAddress } from "./question.js";
import * as snippets from "./snippets.js";
import * as tabs from "./tabs.js";
import { doing, isRunning, pause, stop } from "./work.js";

const TURNED_MS = 250;
let asked = null; // at the last Run; the views are about it, whatever the form says since
let chosen = null; // the token that is explained: the target of its column, and its number there
let isTargetChosen = false;
let linked = fromAddress();

async function run() {
  asked = read();
  chosen = null;
  stop("dial", "explanation");
  dial.forget();
  heads.forget();
  snippets.forget();
  snippets.draw(tabs.current());
  at("compare_hint").hidden = true;
  changed();
  const finished = await doing("run", "running…", async (signal) => {
    const { body, answers, verdict } = await compare(asked, signal, choose);
    snippets.keep("compare", "/compare", body, answers.context ? "context" : "parametric");
    snippets.draw(tabs.current());
    if (!isTargetChosen) at("dial_target").value = turning();
    return `Done. ${verdict}`;
  });
  if (finished) await opened(tabs.current());
  return finished;
}

// Say so where the form asks something else than what is shown.
function changed() {
  at("stale").hidden = asked === null || isSame(asked, read());
}

function sweep() {
  return doing("dial", "turning the dial…", async (signal) => {
    snippets.keep("dial", "/sweep", await dial.sweep(asked, signal));
    await dial.answer(signal);
    return at("flip").textContent;
  });
}

function turn() {
  dial.draw();
  if (!dial.isDrawn()) return;
  doing("dial", "turning the dial…", async (signal) => {
    await pause(TURNED_MS, signal);
    await dial.answer(signal);
  });
}

function choose(column, piece) {
  chosen = { target: column.target, i: column.pieces.indexOf(piece) };
  press(piece);
  tabs.select("heads", true);
  const toward = column.target === "none" ? at("dial_target").value : column.target;
  return doing("explanation", "leaving out each head…", async (signal) => {
    const { body, found } = await heads.explain(asked, toward, column, piece, signal);
    snippets.keep("heads", "/explain", body);
    const set = found.steering.head_set;
    if (at("map_set").value !== set) {
      at("map_set").value = set;
      showMap();
    }
    return at("difference").textContent;
  });
}

const showMap = () => doing("map", "", (signal) => drawMaps(at("map_set").value, signal));

function opened(view) {
  snippets.draw(view);
  at("dial_hint").hidden = asked !== null && !isRunning("run");
  if (view !== "dial") return undefined;
  dial.draw();
  return asked === null || isRunning("run") || isRunning("dial") || dial.isDrawn() ? undefined : sweep();
}

// What a key is needed for; the form stays as it is.
function load() {
  return doing("load", "asking what is served…", async (signal) => {
    const [info, sets] = await Promise.all([get("/info", signal), get("/v1/head_sets", signal)]);
    form.showServed(info, sets.data);
    showMap();
  }).then((finished) => {
    if (finished && linked) follow();
  });
}

// Show what a link says.
async function follow() {
  const state = linked;
  linked = null;
  fillForm(state);
  form.ownText();
  form.ask();
  dial.follow(state);
  isTargetChosen = typeof state.toward === "string";
  tabs.select(tabs.VIEWS.includes(state.view) ? state.view : "compare");
  if (!at("ask").reportValidity() || !(await run()) || !state.token) return;
  const [column, piece] = pieceOf(state.token.target, state.token.i);
  if (piece) choose(column, piece);
}

async function share(button) {
  const link = toAddress(asked ?? read(), { view: tabs.current(), ...(asked ? dial.state() : {}), ...(chosen ? { token: chosen } : {}) });
  if (await snippets.copy(link, button)) return;
  at("link").hidden = false;
  at("link").value = link;
  at("link").select();
}

function listen() {
  form.listen();
  batch.listen();
  tabs.listen(opened);
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  for (const kind of ["input", "change"]) at("ask").addEventListener(kind, changed);
  at("stop").addEventListener("click", () => stop());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
  });
  at("key").addEventListener("input", () => useKey(at("key").value));
  at("key").addEventListener("change", load);
  at("key").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    load();
  });
  at("dial_strength").addEventListener("input", turn);
  at("dial_target").addEventListener("change", () => {
    isTargetChosen = true;
    if (asked !== null && !isRunning("run")) sweep();
  });
  for (const id of ["answer_memory", "answer_context"]) {
    at(id).addEventListener("change", () => asked !== null && !isRunning("run") && dial.isPairChanged() && sweep());
  }
  new ResizeObserver(dial.draw).observe(at("curves"));
  at("map_set").addEventListener("change", showMap);
  for (const own of document.querySelectorAll(".copy")) {
    own.addEventListener("click", async () => {
      if (!(await snippets.copy(at(own.dataset.of).textContent, own))) getSelection().selectAllChildren(at(own.dataset.of));
    });
  }
  at("share").addEventListener("click", ({ target }) => share(target));
  addEventListener("hashchange", () => {
    linked = fromAddress();
    if (linked) follow();
  });
}

listen();
if (linked) form.ownText();
doing("load", "", async (signal) => form.showExamples(await get("/playground/examples.json", signal))).then(load);
