// What is asked: the form, as the fields of requests and as a part of the page's address.

import { at } from "./dom.js";

const FIELDS = ["context", "prompt", "max_tokens", "temperature", "seed", "gate", "set_parametric", "set_context", "set_beside"];

// What the form asks now. It never changes: whatever shows an answer keeps what it answers.
export function read() {
  const form = Object.fromEntries(FIELDS.map((name) => [name, at(name).value]));
  form.chat = at("chat").checked;
  const sets = { parametric: form.set_parametric, context: form.set_context };
  const named = Object.fromEntries(Object.entries(sets).filter(([, name]) => name));
  return Object.freeze({
    form: Object.freeze(form),
    question: Object.freeze(question(form.prompt, form.context.trim(), form.chat)),
    sampling: Object.freeze({
      max_tokens: Number(form.max_tokens),
      temperature: Number(form.temperature),
      ...(form.seed === "" ? {} : { seed: Number(form.seed) }),
    }),
    headSets: Object.freeze(Object.keys(named).length ? { head_sets: named } : {}),
    gate: Object.freeze(form.gate ? { gate: form.gate } : {}),
    beside: form.set_beside ? Object.freeze(JSON.parse(form.set_beside)) : null,
  });
}

export const isSame = (one, other) => JSON.stringify(one.form) === JSON.stringify(other.form);

// The fields of a question: a prompt or a chat, and its context.
export function question(prompt, context, isChat) {
  const asked = isChat ? { messages: [{ role: "user", content: prompt.trim() }] } : { prompt };
  return context ? { ...asked, context } : asked;
}

// An address that shows the same again. What comes after # never leaves the browser.
export function toAddress(asked, more) {
  const state = Object.entries({ ...asked.form, ...more }).filter(([, own]) => own !== "" && own !== false);
  return `${location.origin}${location.pathname}#${encodeURIComponent(JSON.stringify(Object.fromEntries(state)))}`;
}

// What the address says, null where it says nothing.
export function fromAddress() {
  try {
    const state = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    return typeof state === "object" ? state : null;
  } catch {
    return null;
  }
}

// Fill the form with what an address says; what it leaves out is as at the beginning.
export function fillForm(state) {
  for (const name of FIELDS) {
    at(name).value = typeof state[name] === "string" ? state[name] : (at(name).defaultValue ?? "");
  }
  at("chat").checked = state.chat === true;
}
