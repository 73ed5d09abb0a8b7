// One token: what could have come in its place, and which heads decided.

import { post } from "./api.js";
import { TITLES } from "./column.js";
import { ORDER, decision } from "./compare.js";
import { at, bar, fill, make, percent, shown, table } from "./dom.js";

const WINNER = { context: "the context", parametric: "memory" };
const KIND = { context: "context", parametric: "memory" };

export function forget() {
  at("explanation").hidden = true;
  at("token_hint").hidden = false;
}

// Explain a piece of an answer, toward a target; return the request and what was found.
export async function explain(asked, toward, column, piece, signal) {
  const { at: i, tokens } = decision(toward, column, piece);
  const answer = column.tokens.slice(0, i).map((token) => token.id);
  const body = { ...asked.question, target: toward, ...asked.headSets, answer, tokens };
  const found = await post("/explain", body, signal);
  const before = column.pieces.filter(({ last }) => last < i).map(({ text }) => text).join("").trim();
  at("token_hint").hidden = true;
  at("explanation").hidden = false;
  at("explained").textContent = before ? `After “${before}”` : "At the first token";
  fill(at("candidates"), ...ORDER.filter((way) => found.candidates[way]).map((way) => candidates(way, found.candidates[way])));
  at("difference").textContent = difference(toward, found);
  fill(at("effects"), effects(found.heads, toward));
  const [own, other] = toward === "context" ? ["context", "memory"] : ["memory", "context"];
  fill(
    at("effects_legend"),
    make("span", { class: `bar for-${own}` }),
    ` helps ${WINNER[toward]} here, and so makes the lead larger. `,
    make("span", { class: `bar for-${other}` }),
    " works against it.",
  );
  at("explained").focus();
  return { body, found };
}

function difference(toward, { tokens, steered, unsteered }) {
  const [one, other] = tokens.map((token) => `“${shown(token.token)}”`);
  const leads = (by) => (by < 0 ? "trails" : "leads");
  return (
    `Steered toward ${WINNER[toward]}, ${one} ${leads(steered)} ${other} by ${Math.abs(steered).toFixed(2)} (a difference of logits); ` +
    `unsteered it ${leads(unsteered)} by ${Math.abs(unsteered).toFixed(2)}. ` +
    "Each bar is by how much that lead shrinks when this head alone is left out; its factor is how many times its own output steering adds."
  );
}

function candidates(way, tokens) {
  const rows = tokens.slice(0, 6).map((token) => {
    const p = Math.exp(token.logprob);
    return [shown(token.token), percent(p), bar(p, `for-${KIND[way] ?? "none"}`)];
  });
  const title = make("h3", { text: TITLES[way] });
  return make("article", { class: `of-${way}` }, title, table(["token", "probability", ""], rows));
}

function effects(heads, toward) {
  const most = Math.max(...heads.map((own) => Math.abs(own.effect)), 1e-9);
  const against = toward === "context" ? "memory" : "context";
  const rows = heads.map(({ layer, head, beta, effect }) => [
    `layer ${layer}, head ${head}`,
    signed(beta, String(Math.abs(beta))),
    signed(effect, Math.abs(effect).toFixed(2)),
    bar(Math.abs(effect) / most, `for-${effect >= 0 ? KIND[toward] : against}`),
  ]);
  return table(["head", "factor", "effect", ""], rows);
}

const signed = (value, text) => `${value >= 0 ? "+" : "−"}${text}`;
