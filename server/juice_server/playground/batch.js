// Many prompts under the three settings, a few at a time, those in conflict first.

import { post } from "./api.js";
import { at, fill, make, table } from "./dom.js";
import { question, read } from "./question.js";
import { rowsOf } from "./rows.js";
import { doing, stop } from "./work.js";

const AT_ONCE = 4;
const WAYS = ["none", "parametric", "context"];
let rows = [];
let results = [];

// Take the prompts of a file in place of what was there.
function take(file) {
  stop("batch");
  rows = [];
  results = [];
  show();
  at("batch").open = true;
  at("batch_progress").hidden = true;
  at("batch_stop").hidden = true;
  at("batch_count").textContent = "";
  at("batch_run").disabled = true;
  return doing("batch", "", async () => {
    rows = await rowsOf(file);
    at("batch_count").textContent = `${rows.length} prompt${rows.length === 1 ? "" : "s"} in ${file.name}`;
    at("batch_run").disabled = rows.length === 0;
  });
}

// Run all rows as the options say now; what is done when it is cancelled stays.
async function run() {
  const { sampling, headSets, gate, form } = read();
  const own = rows;
  const done = (results = []);
  Object.assign(at("batch_progress"), { value: 0, max: own.length, hidden: false });
  at("batch_run").disabled = true;
  at("batch_stop").hidden = false;
  let next = 0;
  let failure = null;
  const finished = await doing("batch", "", async (signal) => {
    const work = async () => {
      while (next < own.length && !failure) {
        const i = next++;
        const row = { row: i + 1, ...own[i] };
        const asked = question(row.prompt, row.context ?? "", form.chat);
        try {
          const { answers, disagree } = await post("/compare", { ...asked, ...sampling, ...headSets, ...gate }, signal);
          done.push({ ...row, answers: Object.fromEntries(WAYS.map((way) => [way, answers[way]?.text ?? ""])), disagree });
        } catch (error) {
          const isOfTheRow = error.status !== undefined && error.status !== 401;
          if (isOfTheRow) done.push({ ...row, error: error.message });
          else failure ??= error;
        }
        if (done === results) count(done, own.length);
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
    if (failure) throw failure;
  });
  if (done !== results) return; // another file has come
  at("batch_progress").hidden = true;
  at("batch_stop").hidden = true;
  at("batch_run").disabled = false;
  const how = at("batch_problem").hidden ? "cancelled" : "ended";
  if (!finished) at("batch_count").textContent = `${how} after ${done.length} of ${own.length}`;
  show();
}

function count(done, n) {
  const refused = done.filter((own) => own.error).length;
  at("batch_progress").value = done.length;
  at("batch_count").textContent = `${done.length} of ${n} done${refused ? `, ${refused} refused` : ""}`;
}

const rank = (own) => (own.disagree ? 0 : own.error ? 1 : 2);

function show() {
  results.sort((one, other) => rank(one) - rank(other) || one.row - other.row);
  const names = ["row", "prompt", "context", "unsteered", "toward memory", "toward context", "memory and context"];
  const cells = results.map((own) => {
    const they = own.error ? make("span", { class: "bad refused", text: `refused: ${own.error}` }) : own.disagree ? "differ" : "agree";
    return [own.row, clipped(own.prompt), clipped(own.context ?? ""), ...WAYS.map((way) => clipped(own.answers?.[way] ?? "")), they];
  });
  fill(at("batch_table"), ...(cells.length ? [table(names, cells, "Results")] : []));
  at("batch_save").hidden = results.length === 0;
}

const clipped = (text) => make("div", { class: "clipped", title: text, text });

function save() {
  const lines = results.map((own) => JSON.stringify(own)).join("\n");
  const url = URL.createObjectURL(new Blob([`${lines}\n`], { type: "application/x-ndjson" }));
  make("a", { href: url, download: "juice-batch.jsonl" }).click();
  URL.revokeObjectURL(url);
}

export function listen() {
  at("file").addEventListener("change", ({ target }) => target.files[0] && take(target.files[0]));
  // So that the same file can be taken again, changed.
  at("file").addEventListener("click", ({ target }) => (target.value = ""));
  // A file is taken wherever on the page it is dropped.
  const holdsFile = ({ dataTransfer }) => [...(dataTransfer?.types ?? [])].includes("Files");
  document.addEventListener("dragover", (event) => holdsFile(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!holdsFile(event)) return;
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
  at("batch_run").addEventListener("click", run);
  at("batch_stop").addEventListener("click", () => stop("batch"));
  at("batch_save").addEventListener("click", save);
}
