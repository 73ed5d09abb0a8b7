// What a view shows, as lines that get the same without this page.

import { hasKey } from "./api.js";
import { at } from "./dom.js";

// Where the server is, with the prefix of a proxy, if there is one.
const origin = new URL(".", document.baseURI).href.slice(0, -1);
const WINS = { context: "toward the context", parametric: "toward memory", none: "unsteered" };
const WHAT = {
  compare: "the three answers, as they stream",
  dial: "the curves and where they cross",
  heads: "the candidates and the effect of each head",
};
let shown = {};

// What stands here until something has been run.
export function forget() {
  shown = {};
}

// Keep the request of a view; `target` is the answer that OpenAI's client can ask for alone.
export function keep(view, path, body, target) {
  shown[view] = { path, body, target };
  draw(view);
}

// Show the lines of a view.
export function draw(view) {
  const own = shown[view];
  at("code_hint").hidden = Boolean(own);
  at("code_lines").hidden = !own;
  if (!own) return;
  at("curl_what").textContent = WHAT[view];
  at("curl").textContent = curl(own);
  at("python_what").textContent = own.target ? `the answer ${WINS[own.target]}` : WHAT[view];
  at("python").textContent = own.target ? answering(own) : posting(own);
}

function curl({ path, body }) {
  const sent = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = hasKey() ? " \\\n  -H 'authorization: Bearer KEY'" : "";
  return `curl -sN ${origin}${path} \\\n  -H 'content-type: application/json'${key} -d '${sent}'`;
}

const client = () => ["from openai import OpenAI", "", `client = OpenAI(base_url="${origin}/v1", api_key="${hasKey() ? "KEY" : "unused"}")`];

// One of the answers, by the routes that OpenAI's client knows.
function answering({ body, target }) {
  const head_set = body.head_sets?.[target];
  const steer = { target, ...(head_set ? { head_set } : {}), ...(body.gate ? { gate: body.gate } : {}) };
  const isChat = body.messages !== undefined;
  const fields = [
    ["model", at("model").dataset.name],
    isChat ? ["messages", body.messages] : ["prompt", body.prompt],
    ...["max_tokens", "temperature", "seed"].filter((name) => name in body).map((name) => [name, body[name]]),
    ["extra_body", { ...(body.context ? { context: body.context } : {}), steer: target === "none" ? "none" : steer }],
  ];
  return [
    ...client(),
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...fields.map(([name, value]) => `    ${name}=${literal(value)},`),
    ")",
    `print(answer.choices[0].${isChat ? "message.content" : "text"})`,
  ].join("\n");
}

// A route of this server's own.
function posting({ path, body }) {
  const fields = Object.entries(body).filter(([, value]) => value !== undefined);
  return [
    ...client(),
    `answer = client.post(`,
    `    "${origin}${path}",`,
    "    cast_to=object,",
    "    body={",
    ...fields.map(([name, value]) => `        ${literal(name)}: ${literal(value)},`),
    "    },",
    ")",
    "print(answer)",
  ].join("\n");
}

// JSON of texts, numbers, lists and objects is Python, too.
const literal = (value) => JSON.stringify(value);

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = before), 1500);
    return true;
  } catch {
    return false;
  }
}
