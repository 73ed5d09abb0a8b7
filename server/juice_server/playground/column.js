// One answer, as text that is made of tokens: each can be coloured, marked and chosen.

import { make, shown } from "./dom.js";

export const TITLES = { parametric: "Memory", none: "Unsteered", context: "Context" };
const SAYS = {
  parametric: "steered toward what the model remembers",
  none: "as the model is",
  context: "steered toward what it was given",
};

// A piece is text that one token, or the tokens of one character, add: those from first to last.
export function column(target, choose, title = TITLES[target]) {
  const answer = make("div", { class: "answer", role: "group", "aria-label": `${title}: the answer` });
  const note = make("p", { class: "said", text: "…" });
  const own = { target, tokens: [], pieces: [], text: "" };
  own.article = make("article", { class: `of-${target}` }, make("h2", { text: title }), make("p", { class: "said", text: SAYS[target] }), answer, note);

  own.add = ({ text, logprobs }) => {
    own.text += text;
    for (const token of logprobs) {
      own.tokens.push(token);
      if (token.text) answer.append(add(own, token.text));
    }
  };

  // End the answer: from now on its tokens can be chosen.
  own.finish = (words, isCut = false) => {
    note.textContent = words;
    if (isCut) answer.append(" …");
    own.pieces.forEach(({ span }, i) => {
      span.setAttribute("role", "button");
      span.tabIndex = i ? -1 : 0;
    });
    answer.addEventListener("click", ({ target: span }) => {
      const chosen = own.pieces.find((piece) => piece.span === span);
      if (chosen) choose(own, chosen);
    });
    answer.addEventListener("keydown", (event) => onKey(event, own, choose));
  };
  return own;
}

function add(own, text) {
  const first = own.pieces.length ? own.pieces.at(-1).last + 1 : 0;
  const tokens = own.tokens.slice(first);
  const p = Math.exp(tokens.reduce((sum, token) => sum + token.logprob, 0));
  const blank = text.trim() ? {} : { "aria-label": text.includes("\n") ? "line end" : "space" };
  const span = make("span", { class: "token", text, title: `${shown(text)}: ${p.toFixed(3)}`, ...blank });
  own.pieces.push({ first, last: own.tokens.length - 1, text, span });
  return span;
}

// Arrow keys go from token to token, so that each answer is one stop of the Tab key.
function onKey(event, own, choose) {
  const i = own.pieces.findIndex((piece) => piece.span === event.target);
  if (i < 0) return;
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const isChosen = event.key === "Enter" && !event.ctrlKey && !event.metaKey;
  if (isChosen || event.key === " ") {
    event.preventDefault();
    choose(own, own.pieces[i]);
  } else if (own.pieces[i + step]) {
    event.preventDefault();
    for (const { span } of own.pieces) span.tabIndex = -1;
    own.pieces[i + step].span.tabIndex = 0;
    own.pieces[i + step].span.focus();
  }
}

// How an answer was steered, and what that changed, in words.
export function said({ steering }) {
  const { target, applied, head_set, n_heads, strength, effect, warnings } = steering;
  const gate = steering.gate && gateSays(steering.gate);
  const how = applied ? `${n_heads} heads of ${head_set}, strength ${strength}` : target === "none" ? "no heads are steered" : null;
  const first = effect && (applied ? changed(effect) : target === "none" && withoutContext(effect));
  return [how, gate ?? (applied || how ? null : "not steered"), first, ...warnings].filter(Boolean).join("; ");
}

const chance = ({ text, probability }) => `“${shown(text)}” (${Math.round(100 * probability)} %)`;

function changed({ unsteered, steered }) {
  return unsteered.id === steered.id
    ? `it begins with ${chance(steered)}, as unsteered (${Math.round(100 * unsteered.probability)} %)`
    : `it begins with ${chance(steered)} instead of ${chance(unsteered)}`;
}

function withoutContext({ without_context }) {
  return without_context && `without the context it would begin with ${chance(without_context)}`;
}

function gateSays({ signal, steers, value, threshold }) {
  const found = {
    memory: "the model's certainty without the context",
    steered: "the steered model's certainty",
    copied: "the chance that it copies what it was given",
  }[signal];
  const than = steers ? "at least" : "less than";
  return `the gate ${steers ? "steers" : "does not steer"}: ${found} is ${value.toFixed(2)}, ${than} ${threshold.toFixed(2)}`;
}
