// Figures: what /metrics says, how much of it is new since the last time, and how a number is written. Draws nothing.

/** Prometheus text -> Map of name -> [{labels, value}]. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const parts = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!parts) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
    }
    if (!found.has(parts[1])) found.set(parts[1], []);
    found.get(parts[1]).push({ labels, value: Number(parts[3]) });
  }
  return found;
}

/** Sum of a metric's samples whose labels are as wanted; null where there is none. */
export function sum(metrics, name, wanted = {}) {
  const samples = (metrics.get(name) || []).filter(({ labels }) =>
    Object.entries(wanted).every(([label, value]) => labels[label] === value));
  return samples.length ? samples.reduce((total, { value }) => total + value, 0) : null;
}

/** What is watched, by the name it has here. */
const COUNTERS = {
  chosen: "hotset_hot_buffer_chosen_total",
  hits: "hotset_hot_buffer_hits_total",
  bytes: "hotset_hot_buffer_fetched_bytes_total",
  generated: "hotset_generation_tokens_total",
  prompted: "hotset_prompt_tokens_total",
  between: "hotset_inter_token_seconds_sum",
  tokens: "hotset_inter_token_seconds_count",
  first: "hotset_time_to_first_token_seconds_sum",
  firsts: "hotset_time_to_first_token_seconds_count",
  resolve: "hotset_resolve_seconds_total",
  step: "hotset_step_seconds_total",
};

/** What the counters say now, with the time. */
export function reading(metrics) {
  const now = { at: performance.now() / 1000 };
  for (const [name, metric] of Object.entries(COUNTERS)) now[name] = sum(metrics, metric);
  return now;
}

/** How much each counter grew; a counter that fell began anew, and tells nothing this once. */
export function growth(before, after) {
  const grown = { seconds: after.at - before.at };
  for (const name of Object.keys(COUNTERS)) {
    const both = before[name] !== null && after[name] !== null && after[name] >= before[name];
    grown[name] = both ? after[name] - before[name] : 0;
  }
  return grown;
}

export const share = (part, whole) => (whole > 0 ? part / whole : null);

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  while (value >= 1023.5 && units.length > 1) { value /= 1024; units.shift(); }
  return `${Number(value.toPrecision(3))} ${units[0]}`;
}

export const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
export const percent = (value) => `${number(100 * value, 1)}%`;
export const milliseconds = (seconds) => (seconds < 1 ? `${number(1000 * seconds, seconds < 0.1 ? 1 : 0)} ms` : `${Number(seconds.toPrecision(3))} s`);
