// The status page: asks /metrics again and again, and hands what it says to what draws it.

import { CARDS, POLL_MS, byId, makeCard, showCapacity, showEngines, showLayers } from "./draw.js";
import { growth, parseMetrics, reading, sum } from "./figures.js";
import "./ask.js";

function showTrouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

function showState(className, text) {
  const pill = byId("state");
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = `pill ${className}`;
}

const cards = CARDS.map(makeCard);
let before = null;

async function poll() {
  try {
    const [answer, health] = await Promise.all([fetch("/metrics"), fetch("/health")]);
    if (!answer.ok || !health.ok) throw new Error(`the server answers with status ${answer.status}`);
    const metrics = parseMetrics(await answer.text());
    const { status, detail } = await health.json();
    const probes = sum(metrics, "hotset_probe");
    showTrouble(probes ? "An engine runs as a benchmark probe: no bytes are fetched, and every answer is wrong." : "");
    showState(status === "ok" ? "good" : "", status === "ok" ? "serving" : status);
    const now = reading(metrics);
    for (const card of cards) card(before && growth(before, now), now);
    before = now;
    showCapacity(metrics);
    showEngines(metrics);
    showLayers(metrics);
    byId("detail").textContent = detail;
  } catch (error) {
    showState("bad", "out of reach");
    showTrouble(`No figures: ${error.message}. This page goes on asking.`);
    before = null;
  }
  setTimeout(poll, POLL_MS);
}

poll();
