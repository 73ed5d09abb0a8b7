// Three answers side by side, each token coloured by where it comes from.

import { events, post } from "./api.js";
import { at, fill, make, shown } from "./dom.js";
import { headSets, question, sampling } from "./question.js";

const TITLES = { parametric: "Memory", none: "Unsteered", context: "Context" };
const SAYS = {
  parametric: "steered toward what the model remembers",
  none: "as the model is",
  context: "steered toward what it was given",
};
// A token's log-probability with the context less that without it, in nats.
const THRESHOLD = 1;
export const ORDER = ["parametric", "none", "context"];

let columns = {};

// Run the question three ways; `choose(target, tokens, i)` is called for a token that is clicked.
export async function compare(signal, choose) {
  const body = { ...question(), ...sampling(), ...headSets(), gate: at("gate").value, logprobs: true, top: 10 };
  columns = {};
  fill(at("columns"), ...ORDER.map((target) => column(target, choose)));
  fill(at("legend"));
  fill(at("verdict"));
  let last;
  for await (const event of events("/compare", body, signal)) {
    if (event.target) columns[event.target].add(event);
    else last = event;
  }
  for (const target of ORDER) columns[target].finish(last.answers[target]);
  at("verdict").textContent = verdict(last);
  markParting();
  await colour(signal);
  return { body, answers: Object.fromEntries(ORDER.map((own) => [own, columns[own].tokens])) };
}

function column(target, choose) {
  const answer = make("div", { class: "answer", role: "group", "aria-label": `${TITLES[target]}: the answer` });
  const note = make("p", { class: "said", text: "…" });
  const own = { tokens: [], buttons: [], text: "" };
  columns[target] = own;
  own.add = ({ text, logprobs }) => {
    own.text += text;
    for (const token of logprobs) {
      const i = own.tokens.push(token) - 1;
      const button = make("button", {
        type: "button",
        class: "token",
        text: token.token,
        tabindex: i ? -1 : 0,
        title: `${shown(token.token)}: ${Math.exp(token.logprob).toFixed(3)}`,
        onclick: () => choose(target, own.tokens, i),
        onkeydown: (event) => move(event, own.buttons, i),
      });
      own.buttons.push(button);
      answer.append(button);
    }
  };
  own.finish = (answered) => {
    // The token that ends an answer is not in its text.
    const written = own.tokens.slice(0, -1).map((token) => token.token).join("");
    if (own.tokens.length && written === own.text) {
      own.tokens.pop();
      own.buttons.pop().remove();
    }
    note.textContent = answered ? said(answered) : "there is no head set for this target";
    if (answered?.finish_reason === "length") answer.append(" …");
  };
  return make("article", { class: `of-${target}` }, make("h2", { text: TITLES[target] }), make("p", { class: "said", text: SAYS[target] }), answer, note);
}

// Arrow keys go from token to token, so that each answer is one stop of the Tab key.
function move(event, buttons, i) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const next = step && buttons[i + step];
  if (!next) return;
  event.preventDefault();
  for (const own of buttons) own.tabIndex = own === next ? 0 : -1;
  next.focus();
}

function said({ steering }) {
  if (steering.target === "none") return "no heads are steered";
  const gate = steering.gate && gateSays(steering.gate);
  if (!steering.applied) return gate ?? "not steered";
  const how = `${steering.n_heads} heads of ${steering.head_set}, strength ${steering.strength}`;
  return [how, gate, ...steering.warnings].filter(Boolean).join("; ");
}

function gateSays({ signal, steers, value, threshold }) {
  const found = {
    memory: "how sure the model is without the context",
    steered: "how sure the steered model is",
    copied: "how likely it copies what it was given",
  }[signal];
  return `the gate ${steers ? "steers" : "leaves it as it is"}: ${found} is ${value.toFixed(2)}, ${steers ? "at least" : "less than"} ${threshold.toFixed(2)}`;
}

function verdict({ answers, disagree }) {
  const texts = ORDER.map((own) => answers[own] && columns[own].text.trim());
  const [memory, none, context] = texts;
  if (disagree === null) return "One of the two targets has no head set of its name; see Options.";
  if (!disagree) return "Memory and context say the same: there is no conflict here, or none that these heads decide.";
  if (none === context) return "Unsteered, this model believes what it was given here.";
  if (none === memory) return "Unsteered, this model trusts its memory here.";
  return "Unsteered, this model says something else than either.";
}

// The first token in which Memory and Context differ.
function parting() {
  const [one, other] = [columns.parametric, columns.context];
  const n = Math.min(one.tokens.length, other.tokens.length);
  let i = 0;
  while (i < n && one.tokens[i].id === other.tokens[i].id) i += 1;
  return i < n ? i : null;
}

function markParting() {
  const i = parting();
  if (i === null) return;
  for (const own of [columns.parametric, columns.context]) {
    own.buttons[i].classList.add("parts");
    own.buttons[i].title += "; here memory and context part";
  }
}

async function colour(signal) {
  const asked = question();
  const some = ORDER.filter((own) => columns[own].tokens.length);
  if (!asked.context) {
    at("legend").textContent = "Without a context, nothing can come from it: tokens have no colour.";
    return;
  }
  const answers = some.map((own) => columns[own].tokens.map((token) => token.id));
  const { origins } = await post("/origins", { ...asked, answers }, signal);
  some.forEach((own, k) => {
    origins[k].forEach((token, i) => {
      const gain = token.with_context - token.without_context;
      const button = columns[own].buttons[i];
      if (gain > THRESHOLD) button.classList.add("from-context");
      if (gain < -THRESHOLD) button.classList.add("from-memory");
      button.title += `; ${gain >= 0 ? "+" : ""}${gain.toFixed(2)} by the context`;
    });
  });
  fill(
    at("legend"),
    make("span", { class: "from-context", text: "likelier with the context" }),
    " ",
    make("span", { class: "from-memory", text: "likelier without it" }),
    ` by more than ${THRESHOLD} nat, read unsteered. The line `,
    make("span", { class: "parts" }),
    " is where memory and context part. Choose a token to look inside.",
  );
}

// The two tokens between which it is decided where the columns part, the steered one first.
export function rivals(toward, i) {
  if (i !== parting()) return undefined;
  const both = toward === "context" ? ["context", "parametric"] : ["parametric", "context"];
  return both.map((own) => columns[own].tokens[i].id);
}

// The target that changes the unsteered answer.
export function turning() {
  return columns.none.text === columns.context.text ? "parametric" : "context";
}

export function press(target, i) {
  for (const own of Object.values(columns)) {
    for (const button of own.buttons) button.setAttribute("aria-pressed", "false");
  }
  columns[target]?.buttons[i]?.setAttribute("aria-pressed", "true");
}
