// The prompt box: streams an answer from the chat route, with a key where the server wants one.
// What a model says is appended as text; nothing of it becomes markup.

import { byId } from "./draw.js";
import { milliseconds, number } from "./figures.js";

const headers = () => {
  const key = byId("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

/** The name of the model that is served; empty until the server told it. */
let model = "";

/** Asks for the model's name, and for a key where the server wants one. */
async function askModel() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (answer.status === 401) {
      byId("key-row").hidden = false;
      return;
    }
    const [card] = (await answer.json()).data;
    model = card.id;
    byId("model").textContent = model;
    document.title = `${model} - hotset`;
    const most = byId("max-tokens");
    if (card.max_model_len) most.max = card.max_model_len;
    if (card.max_model_len && Number(most.value) > card.max_model_len) most.value = Math.ceil(card.max_model_len / 2);
  } catch { /* the poll says what is wrong */ }
}

let stopping = null;

/** The JSON of every event of a streamed answer. */
async function* events(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the server broke the answer off");
    rest += decoder.decode(value, { stream: true });
    const whole = rest.split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const text = event.replace(/^data: /, "");
      if (text === "[DONE]") return;
      yield JSON.parse(text);
    }
  }
}

async function send(submit) {
  submit.preventDefault();
  const answer = byId("answer");
  answer.textContent = "";
  answer.className = "";
  answer.setAttribute("aria-busy", "true");
  byId("timing").textContent = "";
  byId("send").disabled = true;
  byId("stop").disabled = false;
  stopping = new AbortController();
  const began = performance.now();
  let first = null;
  let tokens = 0;
  try {
    if (!model) await askModel();
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), signal: stopping.signal,
      body: JSON.stringify({
        model, temperature: 0,
        messages: [{ role: "user", content: byId("prompt").value }],
        max_tokens: Number(byId("max-tokens").value), stream: true, stream_options: { include_usage: true },
      }),
    });
    if (response.status === 401) byId("key-row").hidden = false;
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      for (const { delta } of event.choices) {
        if (!delta.content) continue;
        first = first === null ? performance.now() : first;
        answer.append(delta.content); // a string is appended as text
      }
    }
    const whole = (performance.now() - began) / 1000;
    byId("timing").textContent = `${number(tokens)} tokens in ${milliseconds(whole)}`
      + (first === null ? "" : `, the first after ${milliseconds((first - began) / 1000)}`);
  } catch (error) {
    if (error.name === "AbortError") byId("timing").textContent = "stopped";
    else {
      answer.className = "wrong";
      answer.append(`${answer.textContent ? "\n\n" : ""}${error.message}`);
    }
  } finally {
    answer.setAttribute("aria-busy", "false");
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

byId("ask").addEventListener("submit", send);
byId("stop").addEventListener("click", () => stopping.abort());
byId("key").addEventListener("change", askModel);
byId("prompt").addEventListener("keydown", (press) => {
  if (press.key === "Enter" && (press.ctrlKey || press.metaKey)) byId("ask").requestSubmit();
});
askModel();
