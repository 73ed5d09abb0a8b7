// Two curves over the strength: how likely each answer is.

import { make, shown } from "./dom.js";

const PLACE = { left: 52, right: 24, top: 48, bottom: 46 };
const HEIGHT = 280;

// Draw what /sweep found, as wide as its place so that its type is never smaller than the page's.
export function chart({ curves, strengths, flip }, strength, width) {
  const [low, high] = [strengths[0], strengths.at(-1)];
  const x = (s) => PLACE.left + ((s - low) / (high - low)) * (width - PLACE.left - PLACE.right);
  const y = (p) => PLACE.top + (1 - p) * (HEIGHT - PLACE.top - PLACE.bottom);
  const parts = [];
  for (const p of [0, 0.25, 0.5, 0.75, 1]) {
    parts.push(line("grid", x(low), y(p), x(high), y(p)), label(PLACE.left - 6, y(p) + 4, `${100 * p} %`, "end"));
  }
  for (let s = Math.ceil(low); s <= high; s += 1) parts.push(label(x(s), y(0) + 18, s, "middle"));
  parts.push(label((x(low) + x(high)) / 2, HEIGHT - 8, "strength (1 is as tuned)", "middle"));
  if (flip !== null) {
    // Beside the line where its middle would leave the chart.
    const anchor = x(flip) < PLACE.left + 60 ? "start" : x(flip) > width - PLACE.right - 60 ? "end" : "middle";
    parts.push(line("mark", x(flip), y(0), x(flip), y(1)), label(x(flip), y(1) - 6, `flips at ${flip.toFixed(2)}`, anchor));
  }
  parts.push(line("now", x(strength), y(0), x(strength), y(1)));
  curves.forEach((curve, k) => {
    const kind = k ? "context" : "memory";
    const points = curve.probabilities.map((p, i) => `${x(strengths[i]).toFixed(1)},${y(p).toFixed(1)}`);
    parts.push(make("svg:polyline", { class: kind, points: points.join(" ") }));
    const at = k ? PLACE.left + (width - PLACE.left - PLACE.right) / 2 : PLACE.left;
    const name = label(at, 16, `${k ? "┄" : "—"} ${short(shown(curve.text))}`, "start");
    name.setAttribute("class", kind);
    parts.push(name);
  });
  const text = `Probability of ${curves.map((own) => `“${own.text.trim()}”`).join(" and ")} at strength ${low} to ${high}`;
  return make("svg:svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": text }, ...parts);
}

const short = (text) => (text.length > 18 ? `${text.slice(0, 17)}…` : text);

function line(kind, x1, y1, x2, y2) {
  return make("svg:line", { class: kind, x1, y1, x2, y2 });
}

function label(x, y, text, anchor) {
  return make("svg:text", { x, y, "text-anchor": anchor, text: String(text) });
}
