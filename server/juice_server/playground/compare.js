// Three answers side by side, each token coloured by where it comes from.

import { events, post } from "./api.js";
import { column, said } from "./column.js";
import { at, fill, make } from "./dom.js";

// A token's log-probability with the context less that without it, in nats.
const THRESHOLD = 1;
export const ORDER = ["parametric", "none", "context"];

let columns = {};

// Run what is asked three ways; `choose(column, piece)` is called for a token that is chosen.
// Return the request, and what it shows in a sentence.
export async function compare(asked, signal, choose) {
  const { question, sampling, headSets, gate } = asked;
  const body = { ...question, ...sampling, ...headSets, ...gate, logprobs: true, top: 10, explain: "effect" };
  const own = Object.fromEntries(ORDER.map((target) => [target, column(target, choose)]));
  columns = own;
  fill(at("columns"), ...ORDER.map((target) => own[target].article));
  fill(at("legend"));
  fill(at("verdict"));
  fill(at("beside"));
  let last;
  try {
    for await (const event of events("/compare", body, signal)) {
      if (event.target) own[event.target].add(event);
      else last = event;
    }
  } catch (error) {
    for (const target of ORDER) own[target].finish(error.name === "AbortError" ? "stopped" : "cut off");
    throw error;
  }
  for (const target of ORDER) {
    const answer = last.answers[target];
    own[target].finish(answer ? said(answer) : "there is no head set for this target", answer?.finish_reason === "length");
  }
  const beside = await another(asked, last.answers, signal);
  const found = verdict(last, sampling.temperature) + beside;
  at("verdict").textContent = found;
  markParting();
  await colour(own, question, signal);
  return { body: { ...body, stream: true }, answers: last.answers, verdict: found };
}

// The answer by one more head set, in a column below; return what it says beside the set of its target.
async function another({ question, sampling, gate, beside }, answers, signal) {
  if (!beside) return "";
  const { target, head_set } = beside;
  const body = { ...question, ...sampling, columns: [{ ...beside, ...gate }], logprobs: true, explain: "effect" };
  const [answer] = (await post("/compare", body, signal)).answers;
  const own = column(target, () => {}, head_set);
  own.add(answer);
  own.finish(said(answer), answer.finish_reason === "length");
  fill(at("beside"), own.article);
  const [usual, words] = [answers[target], ` The head set ${head_set} says`];
  if (!usual || usual.steering.head_set === head_set) return `${words} “${answer.text.trim()}”.`;
  const same = columns[target].text.trim() === answer.text.trim() ? "the same as" : "something other than";
  return `${words} ${same} ${usual.steering.head_set}.`;
}

function verdict({ answers, disagree }, temperature) {
  const [memory, none, context] = ORDER.map((own) => answers[own] && columns[own].text.trim());
  const drawn = temperature > 0 ? ` At temperature ${temperature} the answers are drawn: another run may say otherwise.` : "";
  const found = () => {
    if (disagree === null) return "One of the two targets has no head set of its name; see Options.";
    if (!disagree) return "Memory and context say the same: there is no conflict here, or none that these heads decide.";
    if (none === context) return "Unsteered, this model believes what it was given here.";
    if (none === memory) return "Unsteered, this model trusts its memory here.";
    return "Unsteered, this model says something other than either.";
  };
  return found() + drawn;
}

// The first token in which Memory and Context differ.
function parting() {
  const [one, other] = [columns.parametric, columns.context];
  const n = Math.min(one.tokens.length, other.tokens.length);
  let i = 0;
  while (i < n && one.tokens[i].id === other.tokens[i].id) i += 1;
  return i < n ? i : null;
}

const holds = ({ first, last }, i) => i !== null && first <= i && i <= last;

function markParting() {
  const i = parting();
  for (const own of [columns.parametric, columns.context]) {
    const piece = own.pieces.find((one) => holds(one, i));
    if (!piece) continue;
    piece.span.classList.add("parts");
    piece.span.title += "; here memory and context part";
  }
}

async function colour(own, question, signal) {
  if (!question.context) {
    at("legend").textContent = "Without a context, nothing can come from it: tokens have no colour. Choose one to look inside.";
    return;
  }
  const some = ORDER.map((target) => own[target]).filter(({ tokens }) => tokens.length);
  const answers = some.map(({ tokens }) => tokens.map((token) => token.id));
  const { origins } = await post("/origins", { ...question, answers }, signal);
  some.forEach(({ pieces }, k) => {
    for (const { first, last, span } of pieces) {
      const gain = origins[k].slice(first, last + 1).reduce((sum, one) => sum + one.with_context - one.without_context, 0);
      if (gain > THRESHOLD) span.classList.add("from-context");
      if (gain < -THRESHOLD) span.classList.add("from-memory");
      span.title += `; ${gain >= 0 ? "+" : "−"}${Math.abs(gain).toFixed(2)} by the context`;
    }
  });
  fill(
    at("legend"),
    make("span", { class: "from-context", text: "likelier with the context" }),
    " ",
    make("span", { class: "from-memory", text: "likelier without it" }),
    ` by more than ${THRESHOLD} nat, as the unsteered model reads it. The line `,
    make("span", { class: "parts" }),
    " is where memory and context part. Choose a token to look inside.",
  );
}

// Which token of a piece to explain, and where the columns part the two that are to be compared,
// that of `toward` first.
export function decision(toward, own, piece) {
  const i = parting();
  const begins = own.tokens.slice(0, i ?? 0).every((token, k) => token.id === columns.context.tokens[k].id);
  if (!holds(piece, i) || !begins) return { at: piece.first };
  const both = toward === "context" ? ["context", "parametric"] : ["parametric", "context"];
  return { at: i, tokens: both.map((own) => columns[own].tokens[i].id) };
}

// The target that changes the unsteered answer.
export function turning() {
  return columns.none.text === columns.context.text ? "parametric" : "context";
}

// The token that a link names: the number of a piece in a column.
export const pieceOf = (target, i) => [columns[target], columns[target]?.pieces[i]];

export function press(chosen) {
  for (const { pieces } of Object.values(columns)) {
    for (const piece of pieces) piece.span.setAttribute("aria-pressed", String(piece === chosen));
  }
}
