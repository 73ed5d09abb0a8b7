// How likely two answers are against the strength, and the answer where the dial stands.

import { events, post } from "./api.js";
import { chart } from "./chart.js";
import { at, fill, make, percent, shown, table } from "./dom.js";

const WIDEST = 640;

let found = null; // what /sweep says, with what was asked, and toward what

const strength = () => Number(at("dial_strength").value);
// Two answers of the user's own, or none.
function pair() {
  const own = [at("answer_memory").value, at("answer_context").value];
  return own.every((text) => text !== "") ? { answers: own } : {};
}

export const isDrawn = () => found !== null;
export const isPairChanged = () => JSON.stringify(pair().answers) !== JSON.stringify(found?.answers);

// Where the dial stands, as a link has it.
export const state = () => ({ strength: at("dial_strength").value, toward: at("dial_target").value, ...pair() });

export function follow({ strength = "1", toward, answers = ["", ""] }) {
  at("dial_strength").value = strength;
  if (toward) at("dial_target").value = toward;
  [at("answer_memory").value, at("answer_context").value] = answers;
}

export function forget() {
  found = null;
  for (const id of ["curves", "flip", "dial_answer", "dial_table"]) fill(at(id));
}

// Draw the curves of what was asked, toward where the dial points; return the request.
export async function sweep(asked, signal) {
  forget();
  const body = { ...asked.question, target: at("dial_target").value, ...asked.headSets, ...pair() };
  found = { asked, target: body.target, answers: body.answers, ...(await post("/sweep", body, signal)) };
  say();
  draw();
  return body;
}

// Answer at the strength where the dial stands; the likeliest tokens, as the curves are about them.
export async function answer(signal) {
  const { asked, target } = found;
  const head_set = asked.headSets.head_sets?.[target];
  const steer = { target, strength: strength(), gate: "off", ...(head_set ? { head_set } : {}) };
  const body = { ...asked.sampling, ...asked.question, steer, temperature: 0 };
  const [path, piece] = body.messages
    ? ["/v1/chat/completions", (event) => event.choices[0]?.delta.content]
    : ["/generate", (event) => event.text];
  let text = "";
  try {
    for await (const event of events(path, body, signal)) {
      text += piece(event) ?? "";
      at("dial_answer").textContent = text.trim();
    }
  } catch (error) {
    if (error.name === "AbortError" && text) at("dial_answer").textContent = `${text.trim()} … (stopped)`;
    throw error;
  }
}

// Draw the curves with the dial where it stands, as wide as there is room.
export function draw() {
  at("dial_value").textContent = strength();
  if (!found?.curves.length) return;
  const width = Math.max(260, Math.min(WIDEST, at("curves").clientWidth || WIDEST));
  fill(at("curves"), chart(found, strength(), width));
}

function say() {
  const { curves, strengths, flip, after } = found;
  if (!curves.length) {
    at("flip").textContent = `Memory and context say the same${after.trim() ? ` (“${after.trim()}”)` : ""}: there is nothing to choose between.`;
    return;
  }
  const [one, other] = curves.map((own) => `“${shown(own.text)}”`);
  const before = after.trim() ? `After “${after.trim()}”, ` : "";
  at("flip").textContent = flip === null
    ? `${before}${one} and ${other} do not change places between strength ${strengths[0]} and ${strengths.at(-1)}.`
    : `${before}${one} (memory) and ${other} (context) change places at strength ${flip.toFixed(2)}; 1 is as tuned.`;
  const rows = strengths.map((own, i) => [own, ...curves.map((curve) => percent(curve.probabilities[i]))]);
  const names = ["strength", ...curves.map((curve) => shown(curve.text))];
  fill(at("dial_table"), make("details", {}, make("summary", { text: "As a table" }), table(names, rows, "Probabilities by strength")));
}
