// One token: what could have come, which heads decided. And the map of all heads.

import { get, post } from "./api.js";
import { at, fill, make, percent, shown } from "./dom.js";
import { ORDER, rivals } from "./compare.js";
import { headSet, question } from "./question.js";

const TITLES = { parametric: "Memory", none: "Unsteered", context: "Context" };
const CELL = 22;

// Explain token i of an answer under a way of steering.
export async function explain(target, tokens, i, signal) {
  const toward = target === "none" ? at("dial_target").value : target;
  const answer = tokens.slice(0, i).map((token) => token.id);
  const body = { ...question(), target: toward, head_set: headSet(toward), answer, tokens: rivals(toward, i) };
  const found = await post("/explain", body, signal);
  const before = tokens.slice(0, i).map((token) => token.token).join("");
  at("token_hint").hidden = true;
  at("explanation").hidden = false;
  at("explained").textContent = before ? `After “${before.trim()}”` : "At the first token";
  fill(at("candidates"), ...ORDER.filter((way) => found.candidates[way]).map((way) => candidates(way, found.candidates[way])));
  const [one, other] = found.tokens.map((token) => `“${shown(token.token)}”`);
  at("difference").textContent =
    `Steered toward ${toward === "context" ? "the context" : "memory"}, ${one} leads ${other} by ${found.steered.toFixed(2)} (logits); unsteered by ${found.unsteered.toFixed(2)}. ` +
    "Each bar is how much of that lead goes when this head alone is left out.";
  fill(at("effects"), effects(found.heads));
  return body;
}

function candidates(way, tokens) {
  const rows = tokens.slice(0, 6).map((token) => {
    const p = Math.exp(token.logprob);
    return make("tr", {}, make("td", { text: shown(token.token) }), make("td", { text: percent(p) }), make("td", {}, bar(p, 44, "")));
  });
  const head = make("tr", {}, ...["token", "probability", ""].map((text) => make("th", { scope: "col", text })));
  return make("article", { class: `of-${way}` }, make("h3", { text: TITLES[way] }), make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function effects(heads) {
  const most = Math.max(...heads.map((own) => Math.abs(own.effect)), 1e-9);
  const rows = heads.map((own) =>
    make(
      "tr",
      {},
      make("th", { scope: "row", text: `layer ${own.layer}, head ${own.head}` }),
      make("td", { text: `${own.beta > 0 ? "+" : "−"}${Math.abs(own.beta)} times its own output` }),
      make("td", { text: `${own.effect >= 0 ? "+" : "−"}${Math.abs(own.effect).toFixed(2)}` }),
      make("td", {}, bar(Math.abs(own.effect) / most, 160, own.effect >= 0 ? "for-one" : "for-other")),
    ),
  );
  const head = make("tr", {}, ...["head", "is added", "effect", ""].map((text) => make("th", { scope: "col", text })));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

// The page's policy allows no inline style in its text; a property of an element is none.
function bar(share, width, kind) {
  const own = make("span", { class: `bar ${kind}`, "aria-hidden": "true" });
  own.style.width = `${Math.max(1, share * width)}px`;
  return own;
}

export async function drawMaps(name) {
  fill(at("maps"));
  if (!name) {
    at("cost").textContent = "No head set fits this model.";
    return;
  }
  const set = await get(`/v1/head_sets/${encodeURIComponent(name)}`);
  at("cost").textContent = cost(set);
  if (!set.scores) {
    at("cell").textContent = "This head set has no scores; only those that `juice identify` makes have.";
    return;
  }
  const { plus, minus } = set.heads;
  const all = [...plus.map((head) => [...head, "plus"]), ...minus.map((head) => [...head, "minus"])];
  const maps = mirrored(set.scores) ? [["plus", "all heads", all]] : [
    ["plus", "as + heads", all.slice(0, plus.length)],
    ["minus", "as − heads", all.slice(plus.length)],
  ];
  fill(at("maps"), ...maps.map(([sign, title, chosen]) => map(mean(set.scores[sign]), title, chosen, set)));
  at("cell").textContent = `Colour: ${set.scores.meaning}, mean over ${set.scores.conflict_types.join(" and ")}; amber is more, blue is less than nothing. Outlined: heads that are added (solid) or taken away (dashed). Red: the layers of the second row.`;
}

// Scores that say the same of both signs.
const mirrored = ({ plus, minus }) => mean(plus).flat().every((score, i) => Math.abs(score + mean(minus).flat()[i]) < 1e-6);

function mean(byType) {
  return byType[0].map((layer, i) => layer.map((_, j) => byType.reduce((sum, own) => sum + own[i][j], 0) / byType.length));
}

function cost(set) {
  const heads = `${set.n_heads} heads steer toward ${set.target === "context" ? "the context" : "memory"}.`;
  if (!set.window) return `${heads} They need no second run, so steering costs nothing.`;
  const [low, high] = set.window;
  return `${heads} The clean run goes along in layers ${low} to ${high}, beside the steered one: ${(100 * set.extra_rows).toFixed(0)} % more rows for a steered request, and no second pass.`;
}

function map(scores, title, chosen, set) {
  const most = Math.max(...scores.flat().map(Math.abs), 1e-9);
  const width = 40 + scores[0].length * CELL;
  const height = 34 + scores.length * CELL;
  const parts = [];
  scores.forEach((layer, i) => {
    parts.push(make("svg:text", { x: 26, y: 15 + i * CELL, "text-anchor": "end", text: String(i) }));
    layer.forEach((score, j) => parts.push(cell(score, most, i, j)));
  });
  if (set.window) {
    const [low, high] = set.window;
    parts.push(make("svg:line", { class: "window", x1: 33, x2: 33, y1: low * CELL + 1, y2: (high + 1) * CELL - 1 }));
  }
  for (const [layer, head, sign] of chosen) {
    parts.push(make("svg:rect", { class: `chosen ${sign}`, x: 37 + head * CELL, y: 1 + layer * CELL, width: CELL - 2, height: CELL - 2 }));
  }
  scores[0].forEach((_, j) => parts.push(make("svg:text", { x: 36 + (j + 0.5) * CELL, y: scores.length * CELL + 14, "text-anchor": "middle", text: String(j) })));
  parts.push(make("svg:text", { x: 36 + (scores[0].length * CELL) / 2, y: height - 3, "text-anchor": "middle", text: "head" }));
  const label = `Layers by heads, ${title}. Chosen: ${chosen.map(([layer, head]) => `layer ${layer} head ${head}`).join(", ") || "none"}`;
  const drawn = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": label }, ...parts);
  return make("figure", {}, make("figcaption", { text: `Layers by heads: ${title}` }), drawn);
}

function cell(score, most, layer, head) {
  const rect = make("svg:rect", { x: 36 + head * CELL, y: layer * CELL, width: CELL, height: CELL });
  const strength = Math.abs(score) / most;
  rect.style.fill = `color-mix(in srgb, var(${score >= 0 ? "--memory" : "--context"}) ${(100 * strength).toFixed(0)}%, var(--panel))`;
  rect.style.stroke = "var(--line)";
  const text = `layer ${layer}, head ${head}: ${score.toPrecision(3)}`;
  rect.append(make("svg:title", { text }));
  rect.addEventListener("pointerenter", () => (at("cell").textContent = text));
  return rect;
}
