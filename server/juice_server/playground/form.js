// The form: examples to pick, what is served to choose from, and what goes wrong in a field.

import { at, fill, make } from "./dom.js";

let examples = [];
let touched = false;

export const isTouched = () => touched;

export function showExamples(found) {
  examples = found;
  const names = found.map((own, i) => make("option", { value: i, text: own.name }));
  fill(at("example"), ...names, make("option", { value: "", text: "your own" }));
  if (touched) ownText();
  else takeExample();
}

export function takeExample() {
  const kind = examples[at("example").value]?.[at("kind").value];
  at("kind").disabled = !kind;
  if (!kind) return;
  at("chat").checked = false;
  at("context").value = kind.context;
  at("prompt").value = kind.prompt;
  ask();
}

// The text is the user's own, not that of an example.
export function ownText() {
  touched = true;
  at("example").value = "";
  at("kind").disabled = true;
}

// How the prompt is read.
export function ask() {
  at("asked_how").textContent = at("chat").checked ? "(the user's message)" : "(it continues this text)";
}

// Offer the head sets that are served; those that were chosen stay.
export function showServed(info, sets) {
  const { name, n_layers, n_heads, device } = info.model;
  at("model").textContent = `${name}, ${n_layers} layers of ${n_heads} heads, ${device}`;
  Object.assign(at("model").dataset, { name, layers: n_layers });
  at("chat").disabled = !info.model.has_chat_template;
  for (const target of ["parametric", "context"]) {
    const own = sets.filter((set) => set.target === target).map((set) => set.name);
    const usual = own.includes(target) ? `${target} (the default)` : "none by default";
    const others = own.filter((set) => set !== target);
    refill(at(`set_${target}`), make("option", { value: "", text: usual }), ...others.map(option));
  }
  const beside = sets.map(({ name, target }) => make("option", { value: JSON.stringify({ target, head_set: name }), text: name }));
  refill(at("set_beside"), make("option", { value: "", text: "no other set" }), ...beside);
  refill(at("map_set"), ...sets.map((set) => option(set.name)));
}

const option = (name) => make("option", { value: name, text: name });

function refill(select, ...options) {
  const chosen = select.value;
  fill(select, ...options);
  if (options.some((own) => own.value === chosen)) select.value = chosen;
}

export function listen() {
  for (const id of ["example", "kind"]) at(id).addEventListener("change", takeExample);
  for (const id of ["context", "prompt"]) at(id).addEventListener("input", ownText);
  at("chat").addEventListener("change", ask);
  // A field cannot say what is wrong with it where it is folded away.
  at("ask").addEventListener("invalid", ({ target }) => {
    for (let own = target.closest("details"); own; own = own.parentElement.closest("details")) own.open = true;
  }, true);
}
