// How likely two answers are against the strength, and the answer where the dial stands.

import { events, post } from "./api.js";
import { at, fill, make, percent, shown } from "./dom.js";
import { headSet, question, sampling } from "./question.js";

const SIZE = { width: 640, height: 260, left: 46, right: 90, top: 26, bottom: 36 };
const TURNED_MS = 250;

let found = null;
let current = new AbortController();
let timer;

const target = () => at("dial_target").value;
const strength = () => Number(at("dial_strength").value);

export async function sweep(signal) {
  const body = { ...question(), target: target(), head_set: headSet(target()) };
  found = await post("/sweep", body, signal);
  draw();
  await answer();
  return body;
}

// Draw again where the dial stands now, and answer when it rests.
export function turn(report) {
  at("dial_value").textContent = strength();
  if (!found) return;
  draw();
  clearTimeout(timer);
  timer = setTimeout(() => answer().catch(report), TURNED_MS);
}

export function forget() {
  current.abort();
  found = null;
  fill(at("curves"));
  fill(at("flip"));
  fill(at("dial_answer"));
}

async function answer() {
  current.abort();
  const mine = (current = new AbortController());
  const steer = { target: target(), strength: strength(), gate: "off" };
  if (headSet(target())) steer.head_set = headSet(target());
  const asked = question();
  const body = { ...sampling(), steer, temperature: 0 };
  let text = "";
  try {
    if (asked.messages) {
      const chat = { ...body, ...asked, model: undefined };
      for await (const event of events("/v1/chat/completions", chat, mine.signal)) {
        text += event.choices[0]?.delta.content ?? "";
        at("dial_answer").textContent = text;
      }
    } else {
      for await (const event of events("/generate", { ...body, ...asked }, mine.signal)) {
        text += event.text ?? "";
        at("dial_answer").textContent = text;
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

function draw() {
  const { curves, strengths, flip, after } = found;
  if (!curves.length) {
    fill(at("curves"));
    at("flip").textContent = `Memory and context say the same${after ? ` (“${after.trim()}”)` : ""}: there is nothing to choose between.`;
    return;
  }
  const [low, high] = [strengths[0], strengths.at(-1)];
  const x = (s) => SIZE.left + ((s - low) / (high - low)) * (SIZE.width - SIZE.left - SIZE.right);
  const y = (p) => SIZE.top + (1 - p) * (SIZE.height - SIZE.top - SIZE.bottom);
  const parts = [];
  for (const p of [0, 0.25, 0.5, 0.75, 1]) {
    parts.push(line("grid", x(low), y(p), x(high), y(p)), label(SIZE.left - 6, y(p) + 4, `${100 * p} %`, "end"));
  }
  for (let s = Math.ceil(low); s <= high; s += 1) parts.push(label(x(s), y(0) + 18, s, "middle"));
  parts.push(label((x(low) + x(high)) / 2, SIZE.height - 2, "strength", "middle"));
  if (flip !== null) parts.push(line("mark", x(flip), y(0), x(flip), y(1)), label(x(flip), y(1) - 8, `flips at ${flip.toFixed(2)}`, "middle"));
  parts.push(line("now", x(strength()), y(0), x(strength()), y(1)));
  curves.forEach((curve, k) => {
    const kind = k ? "context" : "memory";
    const points = curve.probabilities.map((p, i) => `${x(strengths[i]).toFixed(1)},${y(p).toFixed(1)}`);
    parts.push(make("svg:polyline", { class: kind, points: points.join(" ") }));
    const own = label(x(high) + 8, SIZE.top + 12 + 18 * k, `${k ? "┄" : "—"} ${shown(curve.text)}`, "start");
    own.setAttribute("class", kind);
    parts.push(own);
  });
  const text = `Probability of ${curves.map((c) => `“${c.text.trim()}”`).join(" and ")} at strength 0 to ${high}`;
  fill(at("curves"), make("svg:svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": text }, ...parts), table(found));
  const [one, other] = curves.map((c) => `“${shown(c.text)}”`);
  const said = after ? `After “${after.trim()}”, ` : "";
  at("flip").textContent = flip === null
    ? `${said}${one} and ${other} do not change places between ${low} and ${high}.`
    : `${said}${one} (memory) and ${other} (context) change places at strength ${flip.toFixed(2)}; 1 is as tuned.`;
}

function line(kind, x1, y1, x2, y2) {
  return make("svg:line", { class: kind, x1, y1, x2, y2 });
}

function label(x, y, text, anchor) {
  return make("svg:text", { x, y, "text-anchor": anchor, text: String(text) });
}

// The same numbers for those who do not see the curves.
function table({ curves, strengths }) {
  const rows = strengths.map((s, i) =>
    make("tr", {}, make("th", { scope: "row", text: s }), ...curves.map((c) => make("td", { text: percent(c.probabilities[i]) }))),
  );
  const head = make("tr", {}, make("th", { scope: "col", text: "strength" }), ...curves.map((c) => make("th", { scope: "col", text: shown(c.text) })));
  return make("details", {}, make("summary", { text: "As a table" }), make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}
