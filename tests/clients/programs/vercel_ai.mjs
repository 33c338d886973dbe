// What Vercel's `ai` with `@ai-sdk/openai-compatible` makes of a server, as JSON. Read from standard input, in their directory.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, jsonSchema, streamText, tool } from "ai";

const asked = JSON.parse(process.argv[2]);
const provider = createOpenAICompatible({
  name: "hotset",
  baseURL: `${asked.url}/v1`,
  apiKey: "none",
  includeUsage: true,
});
const settings = { temperature: 0, maxOutputTokens: asked.max_tokens, maxRetries: 0 };
const chat = { ...settings, model: provider.chatModel(asked.model), prompt: asked.question };
const text = { ...settings, model: provider.completionModel(asked.model), prompt: asked.prompt };
const counts = (usage) => [usage.inputTokens, usage.outputTokens, usage.totalTokens];
const gathered = async (stream) => {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return pieces;
};
const seen = {};

const whole = await generateText(chat);
seen.chat = whole.text;
seen.finish = whole.finishReason;
seen.usage = counts(whole.usage);

const streaming = streamText(chat);
seen.pieces = await gathered(streaming.textStream);
seen.streamed_usage = counts(await streaming.usage);
seen.at_once = (await Promise.all([1, 2, 3].map(() => generateText(chat)))).map((one) => one.text);

const stopped = await generateText({ ...chat, stopSequences: [asked.stop] });
seen.stopped = [stopped.text, stopped.finishReason];

seen.raw_completion = (await generateText(text)).text;
seen.raw_completion_pieces = await gathered(streamText(text).textStream);

const failure = async (more) => {
  try {
    await generateText({ ...chat, ...more });
  } catch (error) {
    if (!APICallError.isInstance(error)) throw error;
    return [error.name, error.statusCode, error.message];
  }
};
seen.wrong_model = await failure({ model: provider.chatModel("another") });
const look = tool({ inputSchema: jsonSchema({ type: "object", properties: {} }) });
seen.tools = await failure({ tools: { look } });
console.log(JSON.stringify(seen));
