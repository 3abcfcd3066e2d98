"use strict";
// Which rows are shown: by lists, by words, and by figures as `tok/s>1e5`.

const FILTERS = ["state", "model", "hardware"];
const SEARCHED = ["run", "cell", "state", "reason", "model", "hardware", "precision", "optimizer", "recompute", "bound", "card", "sequence_tokens", "batch_sequences"];

/** What people call a column → its field; any field's own name is known too. */
const SHORT_NAMES = {
  "tok/s": "tokens_per_s",
  speed: "tokens_per_s",
  seq: "sequence_tokens",
  sequence: "sequence_tokens",
  batch: "batch_sequences",
  micro: "micro_batch_sequences",
  gpus: "devices",
  step: "step_s",
  error: "prediction_error",
  predicted: "predicted_tokens_per_s",
  loss: "last_loss",
  memory: "device_bytes",
  device: "device_bytes",
  host: "host_bytes",
  cap: "device_cap_bytes",
  power: "power_w",
  "tok/$": "tokens_per_dollar",
  params: "n_params",
};
const COMPARED = /^([\w/$]+)(>=|<=|!=|>|<|=|:)(.+)$/;
const FIGURE = /^(-?[\d.]+(?:e[+-]?\d+)?)(%|k|m|g|t|gib|mib|tib|ms|s|us)?$/i;
const SCALES = { "%": 0.01, k: 1e3, m: 1e6, g: 1e9, t: 1e12, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40, s: 1, ms: 1e-3, us: 1e-6 };
/** What is counted in powers of two is meant so: `seq=8k` is 8,192. */
const BINARY = { k: 2 ** 10, m: 2 ** 20, g: 2 ** 30 };

function figureOfWord(word, field) {
  const found = FIGURE.exec(word);
  if (!found) return null;
  const unit = (found[2] ?? "").toLowerCase(),
    isCount = /_(tokens|sequences)$/.test(field) && unit in BINARY;
  return Number(found[1]) * (unit ? (isCount ? BINARY[unit] : SCALES[unit]) : 1);
}

/** A word of the field `find` as a test of a row. */
function testOfWord(word) {
  const found = COMPARED.exec(word),
    field = found && (SHORT_NAMES[found[1]] ?? found[1]);
  if (!found || !state.page.names.includes(field)) return (row) => searchText(row).includes(word);
  const sign = found[2],
    limit = figureOfWord(found[3], field);
  const value = (row) => (field === "prediction_error" ? predictionError(row) : field === "tokens_per_s" ? (speed(row)?.value ?? null) : field === "mfu" ? mfuOf(row) : row[field]);
  if (limit === null || sign === ":") {
    const wanted = found[3];
    const same = (row) => String(value(row) ?? "").toLowerCase() === wanted;
    if (sign === "!=") return (row) => !same(row);
    return sign === ":" ? (row) => String(value(row) ?? "").toLowerCase().includes(wanted) : same;
  }
  const holds = {
    ">": (one) => one > limit,
    "<": (one) => one < limit,
    ">=": (one) => one >= limit,
    "<=": (one) => one <= limit,
    "=": (one) => Math.abs(one - limit) <= 1e-9 * Math.abs(limit),
    "!=": (one) => Math.abs(one - limit) > 1e-9 * Math.abs(limit),
  }[sign];
  // What is not known is never more or less than anything.
  return (row) => number(value(row)) !== null && holds(value(row));
}

function filtered() {
  const chosen = FILTERS.filter((name) => state.hash[name]).map((name) => [name, state.hash[name]]);
  const tests = (state.hash.q ?? "").toLowerCase().split(/\s+/).filter(Boolean).map(testOfWord);
  return state.rows.filter((row) => chosen.every(([name, value]) => String(row[name] ?? "") === value) && tests.every((test) => test(row)));
}

function searchText(row) {
  row.text ??= SEARCHED.map((name) => row[name] ?? "")
    .join(" ")
    .toLowerCase();
  return row.text;
}

function isFiltered() {
  return FILTERS.some((name) => state.hash[name]) || Boolean(state.hash.q);
}
