// What is asked: the form, as the fields of a request and as a part of the page's address.

import { at } from "./dom.js";

const FIELDS = ["context", "prompt", "max_tokens", "temperature", "seed", "gate", "set_parametric", "set_context"];

// The fields of a question: a prompt or a chat, and its context.
export function question() {
  const context = at("context").value.trim();
  const prompt = at("prompt").value;
  const asked = at("chat").checked ? { messages: [{ role: "user", content: prompt.trim() }] } : { prompt };
  return context ? { ...asked, context } : asked;
}

export function sampling() {
  const seed = at("seed").value;
  return {
    max_tokens: Number(at("max_tokens").value),
    temperature: Number(at("temperature").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
  };
}

export const headSet = (target) => at(`set_${target}`).value || undefined;

// The names of the head sets, as /compare takes them.
export function headSets() {
  const chosen = {};
  for (const target of ["parametric", "context"]) {
    if (headSet(target)) chosen[target] = headSet(target);
  }
  return Object.keys(chosen).length ? { head_sets: chosen } : {};
}

// What comes after # never leaves the browser.
export function toAddress(more) {
  const state = { ...more, chat: at("chat").checked };
  for (const name of FIELDS) if (at(name).value !== "") state[name] = at(name).value;
  return `${location.origin}${location.pathname}#${encodeURIComponent(JSON.stringify(state))}`;
}

// Fill the form from the address; return what else it says, null where it says nothing.
export function fromAddress() {
  let state;
  try {
    state = JSON.parse(decodeURIComponent(location.hash.slice(1)));
  } catch {
    return null;
  }
  if (typeof state !== "object" || state === null) return null;
  for (const name of FIELDS) if (typeof state[name] === "string") at(name).value = state[name];
  at("chat").checked = state.chat === true;
  return state;
}
