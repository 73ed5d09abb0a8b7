// Work that takes a while, one of each kind at a time: what begins ends what went before it.

import { Refused } from "./api.js";
import { at } from "./dom.js";

// Where each kind says what went wrong; Stop ends those of the page's own place.
const PLACES = { load: "problem", run: "problem", dial: "problem", explanation: "problem", map: "problem", batch: "batch_problem" };
const STOPPED = ["run", "dial", "explanation"];
const running = new Map();
let last = ""; // what the work that ended last says

export const isRunning = (kind) => running.has(kind);

export function stop(...kinds) {
  for (const kind of kinds.length ? kinds : STOPPED) running.get(kind)?.controller.abort();
}

// Do some work, and say what comes of it, or goes wrong; return whether it was finished.
export async function doing(kind, words, work) {
  stop(kind);
  const mine = { controller: new AbortController(), words };
  const isCurrent = () => running.get(kind) === mine;
  running.set(kind, mine);
  at(PLACES[kind]).hidden = true;
  let said = "";
  show();
  try {
    said = (await work(mine.controller.signal)) ?? "";
    return isCurrent();
  } catch (error) {
    if (error.name === "AbortError") said = "stopped";
    else if (isCurrent()) report(error, PLACES[kind]);
    return false;
  } finally {
    if (isCurrent()) {
      running.delete(kind);
      if (STOPPED.includes(kind)) last = said;
      show();
    }
  }
}

export function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

function show() {
  const words = [...running.values()].map((own) => own.words).findLast(Boolean);
  at("stop").hidden = !STOPPED.some(isRunning);
  at("status").textContent = words ?? last;
  // What is said at the end stands in its view, too: here it is for those who listen.
  at("status").classList.toggle("spoken", words === undefined && last !== "stopped");
}

function report(error, place) {
  const needsKey = error instanceof Refused && error.status === 401;
  if (needsKey) at("key").closest("details").open = true;
  at(place).textContent = needsKey ? `${error.message} (Options, API key)` : error.message;
  at(place).hidden = false;
  at(place).scrollIntoView({ block: "nearest" });
}
