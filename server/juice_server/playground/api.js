// The server's routes, with the key that the page keeps in memory and nowhere else.

let key = "";

export function useKey(value) {
  key = value.trim();
}

export const hasKey = () => key !== "";

// An answer that is an error, in the server's words.
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error?.code;
  }
}

async function asked(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch(new URL(path.slice(1), document.baseURI), { headers, signal, ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer; is it running?");
  }
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  throw new Refused(answer.status, found?.error);
}

async function whole(answer, signal) {
  const found = await answer.json();
  signal?.throwIfAborted();
  return found;
}

export async function get(path, signal) {
  return whole(await asked(path, undefined, signal), signal);
}

export async function post(path, body, signal) {
  return whole(await asked(path, body, signal), signal);
}

// Yield the events of a stream. One that ends without [DONE] has failed.
export async function* events(path, body, signal) {
  const answer = await asked(path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("the connection to the server was lost");
    }
    if (part.done) throw new Error("the connection to the server was lost");
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refused(200, event.error);
      yield event;
    }
  }
}
