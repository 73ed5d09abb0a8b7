// What was just run, as lines to copy.

import { at } from "./dom.js";

const origin = location.origin;

// Show how to make the same request without this page.
export function show(path, body) {
  const sent = JSON.stringify(body, null, 2);
  const key = at("key").value ? " \\\n  -H 'authorization: Bearer KEY'" : "";
  at("curl").textContent = `curl -s ${origin}${path} \\\n  -H 'content-type: application/json'${key} -d '${sent.replaceAll("'", "'\\''")}'`;
  at("python").textContent = python(body);
}

// One way of it, through OpenAI's client.
function python(body) {
  const steer = { target: body.target ?? "context" };
  if (body.head_set ?? body.head_sets?.context) steer.head_set = body.head_set ?? body.head_sets.context;
  const chat = body.messages !== undefined;
  const given = chat ? `messages=${literal(body.messages)}` : `prompt=${literal(body.prompt)}`;
  const extra = { steer, ...(body.context ? { context: body.context } : {}) };
  const call = chat ? "chat.completions" : "completions";
  const text = chat ? "choices[0].message.content" : "choices[0].text";
  return [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key="${at("key").value ? "KEY" : "unused"}")`,
    `answer = client.${call}.create(`,
    `    model=${literal(at("model").dataset.name)},`,
    `    ${given},`,
    `    max_tokens=${Number(at("max_tokens").value)},`,
    `    temperature=${Number(at("temperature").value)},`,
    `    extra_body=${literal(extra)},`,
    ")",
    `print(answer.${text}, answer.steering["applied"])`,
  ].join("\n");
}

// JSON of texts, numbers, lists and objects is Python, too.
const literal = (value) => JSON.stringify(value);

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it and copy";
  }
  setTimeout(() => (button.textContent = before), 1500);
}
