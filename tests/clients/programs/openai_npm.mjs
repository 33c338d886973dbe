// What OpenAI's package for Node.js makes of a server, as JSON. Read from standard input, in that package's directory.
import OpenAI from "openai";

const asked = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: `${asked.url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const chat = {
  model: asked.model,
  messages: [{ role: "user", content: asked.question }],
  temperature: 0,
  max_completion_tokens: asked.max_tokens,
};
const text = { model: asked.model, prompt: asked.prompt, temperature: 0, max_tokens: asked.max_tokens };
const counts = (usage) => [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens];
const seen = { models: [] };
for await (const model of client.models.list()) seen.models.push(model.id);
seen.retrieved = (await client.models.retrieve(asked.model)).id;

const whole = await client.chat.completions.create(chat);
seen.chat = whole.choices[0].message.content;
seen.finish = whole.choices[0].finish_reason;
seen.usage = counts(whole.usage);

seen.pieces = [];
const options = { stream: true, stream_options: { include_usage: true } };
for await (const piece of await client.chat.completions.create({ ...chat, ...options })) {
  if (piece.choices.length) seen.pieces.push(piece.choices[0].delta.content ?? "");
  if (piece.usage) seen.streamed_usage = counts(piece.usage);
}
seen.at_once = (await Promise.all([1, 2, 3].map(() => client.chat.completions.create(chat)))).map(
  (one) => one.choices[0].message.content,
);

const stopped = (await client.chat.completions.create({ ...chat, stop: asked.stop })).choices[0];
seen.stopped = [stopped.message.content, stopped.finish_reason];
const telling = await client.chat.completions.create({ ...chat, logprobs: true, top_logprobs: 2 });
const told = telling.choices[0].logprobs.content;
seen.logprobs = told.map((one) => [one.token, one.logprob]);
seen.likeliest = told.map((one) => one.top_logprobs[0].token);

seen.completion = (await client.completions.create(text)).choices[0].text;
seen.completion_pieces = [];
for await (const part of await client.completions.create({ ...text, stream: true }))
  seen.completion_pieces.push(part.choices[0].text);

try {
  await client.chat.completions.create({ ...chat, model: "another" });
} catch (error) {
  if (!(error instanceof OpenAI.NotFoundError)) throw error;
  seen.wrong_model = [error.constructor.name, error.status, error.message];
}
const tool = { type: "function", function: { name: "look", parameters: { type: "object" } } };
try {
  await client.chat.completions.create({ ...chat, tools: [tool] });
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
  seen.tools = [error.constructor.name, error.status, error.message];
}
console.log(JSON.stringify(seen));
