// Read one JSON job a line from standard input, run it with openai for Node, write its result.
import OpenAI from "openai";
import { createInterface } from "node:readline";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "unused", maxRetries: 0 });

async function collect(stream, piece) {
  const pieces = [];
  for await (const event of stream) {
    const own = piece(event);
    if (own) pieces.push(own);
  }
  return pieces;
}

const jobs = {
  async completion(body) {
    return (await client.completions.create(body)).choices[0].text;
  },
  async chat(body) {
    const { data, response } = await client.chat.completions.create(body).withResponse();
    const header = JSON.parse(response.headers.get("x-juice-steering"));
    return { message: data.choices[0].message, steering: data.steering, header };
  },
  async stream(body) {
    const stream = await client.chat.completions.create({ ...body, stream: true });
    return collect(stream, (chunk) => chunk.choices[0]?.delta?.content);
  },
  async helper(body) {
    const stream = client.chat.completions.stream(body);
    return (await stream.finalChatCompletion()).choices[0].message;
  },
  async response(body) {
    const response = await client.responses.create(body);
    return { text: response.output_text, output: response.output, steering: response.steering };
  },
  async responseStream(body) {
    const stream = await client.responses.create({ ...body, stream: true });
    return collect(stream, (event) =>
      event.type === "response.output_text.delta" ? event.delta : undefined,
    );
  },
  async models() {
    return collect(await client.models.list(), (model) => model.id);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { job, body } = JSON.parse(line);
  let result;
  try {
    result = { value: await jobs[job](body) };
  } catch (error) {
    result = { error: error.constructor.name, status: error.status, param: error.param };
  }
  console.log(JSON.stringify(result));
}
