// Drawing: cards with lines, bars, the table of engines, and bars of layers. What is drawn is put in as text and numbers.

import { bytes, milliseconds, number, percent, share, sum } from "./figures.js";

export const POLL_MS = 2000;
const KEPT = 60;
export const byId = (id) => document.getElementById(id);

/** The cards: title, what a poll adds to its line, how a value is written, the line's upper end, whether it stays
 * where nothing new came, and what stands below. */
export const CARDS = [
  { title: "Hit rate", of: (grown) => share(grown.hits, grown.chosen), text: percent, top: 1,
    note: (now) => { const all = share(now.hits, now.chosen); return all === null ? "" : `${percent(all)} since the start`; } },
  { title: "Time per token", of: (grown) => share(grown.between, grown.tokens), text: milliseconds,
    note: (now) => { const all = share(now.between, now.tokens); return all === null ? "" : `${milliseconds(all)} since the start`; } },
  { title: "Tokens a second", of: (grown) => grown.generated / grown.seconds, text: (value) => number(value, value < 100 ? 1 : 0),
    note: (now) => (now.generated === null ? "" : `${number(now.generated)} since the start`) },
  { title: "First token after", of: (grown) => share(grown.first, grown.firsts), text: milliseconds, held: true,
    note: (now) => { const all = share(now.first, now.firsts); return all === null ? "" : `${milliseconds(all)} since the start`; } },
  { title: "From the host", of: (grown) => grown.bytes / grown.seconds, text: (value) => `${bytes(value)}/s`,
    note: (now) => { const all = share(now.bytes, now.generated); return all === null ? "" : `${bytes(all)} a token so far`; } },
  { title: "Inside resolve", of: (grown) => share(grown.resolve, grown.step), text: percent, top: 1,
    note: () => "of step time" },
];

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function vector(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** A card with its line; `add` takes the next value, null for none. */
export function makeCard(card) {
  const box = element("article", "card");
  const value = element("p", "value still", "–");
  const note = element("p", "small", "");
  const picture = vector("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img" });
  box.append(element("h3", "", card.title), value, note, picture);
  byId("cards").append(box);
  const values = [];
  return (grown, now) => {
    const came = grown ? card.of(grown) : null;
    if (grown) values.push(came === null && card.held && values.length ? values[values.length - 1] : came);
    if (values.length > KEPT) values.shift();
    const known = values.filter((one) => one !== null);
    const last = values.length ? values[values.length - 1] : null;
    value.classList.toggle("still", last === null);
    if (known.length) value.textContent = card.text(last === null ? known[known.length - 1] : last);
    note.textContent = card.note(now);
    drawLine(picture, values, card.top || Math.max(...known, 0) * 1.1 || 1);
    const told = known.length ? `between ${card.text(Math.min(...known))} and ${card.text(Math.max(...known))}` : "nothing yet";
    picture.setAttribute("aria-label", `${card.title}, the last ${Math.round((values.length * POLL_MS) / 1000)} seconds: ${told}`);
  };
}

function drawLine(picture, values, top) {
  const place = (value, index) => [100 - (values.length - 1 - index) * (100 / (KEPT - 1)), 29 - (27 * Math.min(value, top)) / top];
  const parts = [vector("line", { class: "base", x1: 0, x2: 100, y1: 29.5, y2: 29.5 })];
  let run = [];
  for (const [index, value] of [...values, null].entries()) {
    if (value !== null) { run.push(place(value, index)); continue; }
    if (run.length) {
      if (run.length === 1) run.push([run[0][0] + 1.5, run[0][1]]);
      const points = run.map((point) => point.map((one) => one.toFixed(2)).join(",")).join(" ");
      parts.push(vector("polygon", { class: "area", points: `${run[0][0]},29.5 ${points} ${run[run.length - 1][0]},29.5` }));
      parts.push(vector("polyline", { class: "line", points }));
    }
    run = [];
  }
  picture.replaceChildren(...parts);
}

/** A bar, made when it is first told of. */
const meters = new Map();
function showMeter(title, part, whole, text) {
  if (part === null || !(whole > 0)) return;
  if (!meters.has(title)) {
    const box = element("div", "card");
    const head = element("div", "meter-head");
    const told = element("span");
    const track = element("div", "track");
    const fill = element("div", "fill");
    head.append(element("span", "", title), told);
    track.append(fill);
    track.setAttribute("role", "meter");
    track.setAttribute("aria-label", title);
    track.setAttribute("aria-valuemin", "0");
    box.append(head, track);
    byId("meters").append(box);
    meters.set(title, { told, track, fill });
  }
  const { told, track, fill } = meters.get(title);
  told.textContent = text(part, whole);
  track.setAttribute("aria-valuenow", String(part));
  track.setAttribute("aria-valuemax", String(whole));
  track.setAttribute("aria-valuetext", text(part, whole));
  fill.style.width = `${Math.min(100, (100 * part) / whole)}%`;
}

export function showCapacity(metrics) {
  const pool = (name) => {
    const used = sum(metrics, name, { state: "used" });
    return [used, used === null ? 0 : used + sum(metrics, name, { state: "free" })];
  };
  const counts = (part, whole) => `${number(part)} of ${number(whole)}`;
  showMeter("Rows", ...pool("hotset_rows"), (part, whole) => {
    const waiting = sum(metrics, "hotset_requests_waiting") || 0;
    return counts(part, whole) + (waiting ? `, ${number(waiting)} waiting` : "");
  });
  showMeter("Hot slots", ...pool("hotset_hot_slots"), counts);
  showMeter("Device pages", ...pool("hotset_device_pages"), counts);
  showMeter("Arena pages", sum(metrics, "hotset_host_pages_held"), sum(metrics, "hotset_arena_pages"), counts);
  const registered = sum(metrics, "hotset_arena_bytes", { state: "registered" });
  const rest = sum(metrics, "hotset_arena_bytes", { state: "unregistered" });
  const onGpu = (metrics.get("hotset_engine_info") || []).some(({ labels }) => labels.device.startsWith("cuda"));
  if (registered > 0 || onGpu) {
    showMeter("Arena that the GPU reaches", registered, registered + rest, (part, whole) => `${bytes(part)} of ${bytes(whole)}`);
  }
}

export function showEngines(metrics) {
  const rows = (metrics.get("hotset_engine_ready") || []).map(({ labels: { engine }, value }) => {
    const info = (metrics.get("hotset_engine_info") || []).find(({ labels }) => labels.engine === engine);
    const told = info ? info.labels : {};
    const row = element("tr");
    const state = element("td");
    state.append(element("span", value ? "pill good" : "pill", value ? "serving" : "starting"));
    const lives = 1 + (sum(metrics, "hotset_engine_restarts_total", { engine }) || 0);
    row.append(element("td", "", engine), state, element("td", "", told.device || "–"),
      element("td", "", told.kv_mode ? `${told.kv_mode}, ${told.dtype}` : "–"), element("td", "", number(lives)));
    return row;
  });
  byId("engine-rows").replaceChildren(...rows);
}

/** Where the bars of layers may begin, so that they differ to the eye. */
const FLOORS = [0.95, 0.9, 0.8, 0.5];

let layersBefore = new Map();
export function showLayers(metrics) {
  const by = new Map();
  for (const [name, field] of [["hotset_hot_buffer_chosen_total", 0], ["hotset_hot_buffer_hits_total", 1]]) {
    for (const { labels, value } of metrics.get(name) || []) {
      const layer = Number(labels.layer);
      if (!by.has(layer)) by.set(layer, [0, 0]);
      by.get(layer)[field] += value;
    }
  }
  const recent = [...by.keys()].sort((left, right) => left - right).map((layer) => {
    const [chosen, hits] = by.get(layer);
    const [chosenBefore, hitsBefore] = layersBefore.get(layer) || [0, 0];
    return { layer, rate: share(hits - hitsBefore, chosen - chosenBefore) };
  }).filter(({ rate }) => rate !== null);
  if (!recent.length) return;
  layersBefore = by;
  const lowest = recent.reduce((least, one) => (one.rate < least.rate ? one : least));
  const highest = recent.reduce((most, one) => (one.rate > most.rate ? one : most));
  const floor = FLOORS.find((one) => lowest.rate > one + (1 - one) / 10) || 0;
  byId("layer-bars").replaceChildren(...recent.map(({ layer, rate }) => {
    const bar = element("div");
    bar.style.height = `${Math.max(0, (100 * (rate - floor)) / (1 - floor))}%`;
    bar.title = `layer ${layer}: ${percent(rate)}`;
    return bar;
  }));
  const told = `from ${percent(lowest.rate)} in layer ${lowest.layer} to ${percent(highest.rate)} in layer ${highest.layer}`;
  byId("layer-bars").setAttribute("aria-label", told);
  byId("layer-note").textContent = `${told}; bars begin at ${percent(floor)}`;
}
