// Many prompts under the three settings, a few at a time, those in conflict first.

import { post } from "./api.js";
import { at, fill, make } from "./dom.js";
import { headSets, sampling } from "./question.js";

const AT_ONCE = 4;
const WAYS = ["none", "parametric", "context"];
let rows = [];
let results = [];

export async function read(file) {
  const text = await file.text();
  rows = /\.csv$/i.test(file.name) ? fromCsv(text) : fromLines(text);
  at("batch_count").textContent = `${rows.length} prompts`;
  at("batch_run").disabled = rows.length === 0;
}

// Lines of JSON, a list in JSON, or one prompt a line.
function fromLines(text) {
  const whole = text.trim();
  if (whole.startsWith("[")) return JSON.parse(whole).map(asked);
  const lines = whole.split(/\r?\n/).filter((line) => line.trim());
  return lines.map((line, i) => {
    if (!line.startsWith("{")) return { prompt: line };
    try {
      return asked(JSON.parse(line), i);
    } catch (error) {
      throw new Error(`line ${i + 1}: ${error.message}`);
    }
  });
}

function asked(row, i) {
  const { prompt, context } = row ?? {};
  if (typeof prompt !== "string") throw new Error(`row ${i + 1} has no prompt that is text`);
  return typeof context === "string" && context ? { prompt, context } : { prompt };
}

// Comma-separated values as RFC 4180 has them: quotes hold commas, line ends and doubled quotes.
export function fromCsv(text) {
  const table = [[""]];
  let quoted = false;
  for (let i = 0; i < text.length; i += 1) {
    const sign = text[i];
    const row = table.at(-1);
    if (quoted) {
      if (sign === '"' && text[i + 1] === '"') row[row.length - 1] += text[++i];
      else if (sign === '"') quoted = false;
      else row[row.length - 1] += sign;
    } else if (sign === '"') quoted = true;
    else if (sign === ",") row.push("");
    else if (sign === "\n") table.push([""]);
    else if (sign !== "\r") row[row.length - 1] += sign;
  }
  const [head, ...body] = table.filter((row) => row.length > 1 || row[0] !== "");
  if (!head?.includes("prompt")) throw new Error(`the columns are ${head?.join(", ") ?? "none"}; expected prompt, and perhaps context`);
  return body.map((row, i) => asked(Object.fromEntries(head.map((name, k) => [name, row[k]])), i));
}

// Run all rows; what is done when it is cancelled stays.
export async function run(signal) {
  results = [];
  let next = 0;
  const progress = at("batch_progress");
  Object.assign(progress, { value: 0, max: rows.length, hidden: false });
  const work = async () => {
    while (next < rows.length && !signal.aborted) {
      const i = next++;
      const row = { ...rows[i], row: i + 1 };
      try {
        const { answers, disagree } = await post("/compare", { ...rows[i], ...sampling(), ...headSets() }, signal);
        const said = Object.fromEntries(WAYS.map((way) => [way, answers[way]?.text ?? ""]));
        results.push({ ...row, answers: said, disagree });
      } catch (error) {
        if (error.name === "AbortError") return;
        if (error.status === undefined || error.status === 401) throw error;
        results.push({ ...row, error: error.message });
      }
      progress.value = results.length;
      at("batch_count").textContent = `${results.length} of ${rows.length} done`;
    }
  };
  try {
    await Promise.all(Array.from({ length: AT_ONCE }, work));
  } finally {
    progress.hidden = true;
    show();
  }
  if (signal.aborted) at("batch_count").textContent = `cancelled after ${results.length} of ${rows.length}`;
}

function show() {
  results.sort((one, other) => Boolean(other.disagree) - Boolean(one.disagree) || one.row - other.row);
  const names = ["row", "prompt", "context", "unsteered", "toward memory", "toward context", "they"];
  const head = make("tr", {}, ...names.map((text) => make("th", { scope: "col", text })));
  const body = results.map((own) => {
    const they = own.error ?? (own.disagree ? "differ" : "agree");
    const said = WAYS.map((way) => own.answers?.[way] ?? "");
    const cells = [own.row, own.prompt, own.context ?? "", ...said, they];
    return make("tr", {}, ...cells.map((text) => make("td", { text })));
  });
  fill(at("batch_table"), make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
  at("batch_table").hidden = results.length === 0;
  at("batch_save").hidden = results.length === 0;
}

export function save() {
  const lines = results.map((own) => JSON.stringify(own)).join("\n");
  const url = URL.createObjectURL(new Blob([`${lines}\n`], { type: "application/x-ndjson" }));
  make("a", { href: url, download: "juice-batch.jsonl" }).click();
  URL.revokeObjectURL(url);
}
