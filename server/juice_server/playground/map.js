// The map of all heads of the model: the scores by which a head set was chosen, and what it costs.

import { get } from "./api.js";
import { at, fill, make, table } from "./dom.js";

const CELL = 22;
const LEFT = 52;

export async function drawMaps(name, signal) {
  for (const id of ["maps", "cell", "map_legend", "map_table"]) fill(at(id));
  if (!name) {
    at("cost").textContent = "No head set fits this model.";
    return;
  }
  const set = await get(`/v1/head_sets/${encodeURIComponent(name)}`, signal);
  at("cost").textContent = cost(set);
  if (!set.scores) {
    at("map_legend").textContent = "This head set has no scores; only those that `juice identify` makes have.";
    return;
  }
  const { plus, minus } = set.heads;
  const all = [...plus.map((head) => [...head, "plus"]), ...minus.map((head) => [...head, "minus"])];
  const maps = mirrored(set.scores) ? [["plus", "all heads", all]] : [
    ["plus", "as + heads", all.slice(0, plus.length)],
    ["minus", "as − heads", all.slice(plus.length)],
  ];
  const drawn = maps.map(([sign, title, chosen]) => ({ title, chosen, scores: mean(set.scores[sign]) }));
  fill(at("maps"), ...drawn.map((own) => map(own, set)));
  fill(at("map_legend"), ...legend(set));
  fill(at("map_table"), ...drawn.map((own) => asTable(own)));
}

// Scores that say the same of both signs.
const mirrored = ({ plus, minus }) => mean(plus).flat().every((score, i) => Math.abs(score + mean(minus).flat()[i]) < 1e-6);

function mean(byType) {
  return byType[0].map((layer, i) => layer.map((_, j) => byType.reduce((sum, own) => sum + own[i][j], 0) / byType.length));
}

// The colours of what a positive score, and a negative one, brings forward.
const colours = ({ target }) => (target === "context" ? ["context", "memory"] : ["memory", "context"]);
const WINS = { context: "the context", memory: "memory" };

function legend(set) {
  const [more, less] = colours(set);
  const types = set.scores.conflict_types.join(", ").replace(/, (?=[^,]*$)/, " and ");
  return [
    `Scores: ${set.scores.meaning}, mean over ${types}. `,
    make("span", { class: `bar for-${more}` }),
    ` above zero, toward ${WINS[more]}; `,
    make("span", { class: `bar for-${less}` }),
    ` below zero, toward ${WINS[less]}. Outlined: the heads that are chosen, to be added (solid) or taken away (dashed). `,
    make("span", { class: "parts" }),
    " Layers in which the clean run goes along.",
  ];
}

function cost(set) {
  const heads = `${set.n_heads} heads steer toward ${set.target === "context" ? "the context" : "memory"}. `;
  if (set.extra_rows === null) return `${heads}The set has no betas, so what it costs depends on those of a request.`;
  if (!set.window) return `${heads}They need no second run, so a steered request costs what any other does.`;
  const [low, high] = set.window;
  const n = high - low + 1;
  return `${heads}In layers ${low} to ${high} a second run goes along in the same pass: ${n} of the model's ${at("model").dataset.layers} layers work twice, ` +
    `${(100 * set.extra_rows).toFixed(0)} % more work in the layers for a request that this set steers.`;
}

function map({ scores, title, chosen }, set) {
  const most = Math.max(...scores.flat().map(Math.abs), 1e-9);
  const width = LEFT + 4 + scores[0].length * CELL;
  const height = 36 + scores.length * CELL;
  const parts = [text(0, 0, "layer", { transform: `translate(12 ${(scores.length * CELL) / 2}) rotate(-90)` })];
  scores.forEach((layer, i) => {
    parts.push(text(LEFT - 12, 15 + i * CELL, i, { "text-anchor": "end" }));
    layer.forEach((score, j) => parts.push(cell(score, most, i, j, colours(set))));
  });
  if (set.window) {
    const [low, high] = set.window;
    parts.push(make("svg:line", { class: "window", x1: LEFT - 5, x2: LEFT - 5, y1: low * CELL + 1, y2: (high + 1) * CELL - 1 }));
  }
  for (const [layer, head, sign] of chosen) {
    parts.push(make("svg:rect", { class: `chosen ${sign}`, x: LEFT + 1 + head * CELL, y: 1 + layer * CELL, width: CELL - 2, height: CELL - 2 }));
  }
  scores[0].forEach((_, j) => parts.push(text(LEFT + (j + 0.5) * CELL, scores.length * CELL + 14, j)));
  parts.push(text(LEFT + (scores[0].length * CELL) / 2, height - 4, "head"));
  const label = `Layers by heads, ${title}. Chosen: ${chosen.map(([layer, head]) => `layer ${layer} head ${head}`).join(", ") || "none"}`;
  const drawn = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, ...parts);
  const place = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `The map of ${title}` }, drawn);
  return make("figure", {}, make("figcaption", { text: `Layers by heads: ${title}` }), place);
}

function text(x, y, words, properties = {}) {
  return make("svg:text", { x, y, "text-anchor": "middle", ...properties, text: String(words) });
}

function cell(score, most, layer, head, [more, less]) {
  const rect = make("svg:rect", { x: LEFT + head * CELL, y: layer * CELL, width: CELL, height: CELL });
  const strength = Math.abs(score) / most;
  rect.style.fill = `color-mix(in srgb, var(--${score >= 0 ? more : less}) ${(100 * strength).toFixed(0)}%, var(--panel))`;
  rect.style.stroke = "var(--line)";
  const words = `layer ${layer}, head ${head}: ${score.toPrecision(3)}`;
  rect.append(make("svg:title", { text: words }));
  rect.addEventListener("pointerenter", () => (at("cell").textContent = words));
  return rect;
}

// The same numbers for those who cannot point at a cell, the chosen heads marked.
function asTable({ scores, title, chosen }) {
  const marks = new Map(chosen.map(([layer, head, sign]) => [`${layer} ${head}`, sign === "plus" ? " (+)" : " (−)"]));
  const rows = scores.map((layer, i) => [`layer ${i}`, ...layer.map((score, j) => score.toPrecision(3) + (marks.get(`${i} ${j}`) ?? ""))]);
  const names = ["", ...scores[0].map((_, j) => `head ${j}`)];
  return make("details", {}, make("summary", { text: `As a table: ${title}` }), table(names, rows, `Scores, ${title}`));
}
