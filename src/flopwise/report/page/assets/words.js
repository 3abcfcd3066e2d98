"use strict";
// Numbers and states as people read them: three digits, binary bytes, always a word beside a colour.

const UNKNOWN = "–";
/** Between a figure and its unit, so that they stay on one line. */
const FIRM = "\u00a0";

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(Number(value.toPrecision(digits)))));
  if (size >= 15) return value.toPrecision(digits);
  return value.toLocaleString("en-GB", {
    minimumFractionDigits: Math.max(0, digits - 1 - size),
    maximumFractionDigits: Math.max(0, digits - 1 - size),
  });
}

function scaledWords(value, step, units, digits = 3) {
  let place = 0;
  // As it is, and as it will be printed: 1024 has four digits.
  while (place < units.length - 1 && Math.max(Math.abs(value), Math.abs(Number(value.toPrecision(digits)))) >= step) {
    value /= step;
    place += 1;
  }
  return `${significant(value, digits)}${FIRM}${units[place]}`.trim();
}

function bytesWords(value) {
  if (number(value) === null) return UNKNOWN;
  return `${value < 0 ? "−" : ""}${scaledWords(Math.abs(value), 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"])}`;
}
function rateWords(value, unit, digits = 3) {
  return scaledWords(
    value,
    1000,
    ["", "k", "M", "G", "T", "P", "E"].map((prefix) => prefix + unit),
    digits,
  );
}
function countWords(value) {
  return number(value) === null ? UNKNOWN : value.toLocaleString("en-GB");
}
function speedWords(value) {
  if (number(value) === null) return UNKNOWN;
  if (value >= 1e9) return rateWords(value, "");
  return value >= 1000 ? Math.round(Number(value.toPrecision(4))).toLocaleString("en-GB") : significant(value);
}
function shareWords(value) {
  return number(value) === null ? UNKNOWN : `${(100 * value).toFixed(1)}${FIRM}%`;
}
function aboutWords(value) {
  return `${(100 * value).toFixed(Math.abs(value) >= 0.0995 || value === 0 ? 0 : 1)}${FIRM}%`;
}
function errorWords(value) {
  if (number(value) === null) return UNKNOWN;
  if (value >= 10) return `×${speedWords(1 + value)}`;
  return `${value < 0 ? "−" : "+"}${Math.abs(100 * value).toFixed(1)}${FIRM}%`;
}
function secondsWords(value) {
  if (number(value) === null) return UNKNOWN;
  if (value === 0) return "0 s";
  for (const [limit, scale, unit] of [
    [1e-3, 1e-6, "µs"],
    [1, 1e-3, "ms"],
    [600, 1, "s"],
    [36000, 60, "min"],
  ]) {
    if (Math.abs(value) < limit) return `${significant(value / scale)}${FIRM}${unit}`;
  }
  return `${significant(value / 3600)}${FIRM}h`;
}
function whenWords(moment) {
  return typeof moment === "string" ? moment.slice(0, 16).replace("T", " ") : UNKNOWN;
}
function plainWords(value) {
  return value === null || value === undefined || value === "" ? UNKNOWN : String(value);
}
function countOf(count, one, many = `${one}s`) {
  return `${countWords(count)} ${count === 1 ? one : many}`;
}
function listWords(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
}
function cut(text, longest) {
  return text.length <= longest ? text : `${text.slice(0, longest - 1)}…`;
}

function cutMiddle(text, longest) {
  const tail = Math.floor((longest - 1) / 2);
  return text.length <= longest ? text : `${text.slice(0, longest - 1 - tail)}…${text.slice(-tail)}`;
}

/** What is capped or counted in powers of two reads as it was typed: 64 GiB, 8k. */
function capWords(value) {
  const gib = value / 2 ** 30;
  return Number.isInteger(gib) ? `${gib.toLocaleString("en-GB")}${FIRM}GiB` : bytesWords(value);
}

const STATES = {
  ok: ["✓", "ok", "good"],
  oom: ["✗", "OOM", "bad"],
  failed: ["✗", "failed", "bad"],
  timeout: ["✗", "timeout", "warn"],
  unreadable: ["✗", "unreadable", "bad"],
  interrupted: ["‖", "interrupted", "warn"],
  skipped: ["–", "skipped", "faint"],
  planned: ["○", "planned", "faint"],
  running: ["▸", "running", "accent"],
};
function stateWords(name) {
  const found = STATES[name];
  return found ? `${found[0]} ${found[1]}` : plainWords(name);
}
function stateWord(name) {
  return STATES[name]?.[1] ?? plainWords(name);
}
function stateClass(name) {
  return STATES[name]?.[2] ?? "";
}

const BOUNDS = {
  compute_bound: "compute",
  memory_bound: "device memory",
  host_bound: "the host",
  data_movement_bound: "copies",
  communication_bound: "communication",
  spill_bound: "spills",
  layout_overhead: "changes of layout",
  matrix_underfilled: "an underfilled matrix unit",
  throttled: "throttling",
  capacity: "memory's size",
};
function boundWords(word) {
  return word ? (BOUNDS[word] ?? String(word).replaceAll("_", " ")) : UNKNOWN;
}

/** A run in a few words: model, sequence, batch, caps. */
function runWords(row) {
  const parts = [row.model];
  if (row.hardware && row.hardware !== "-") parts.push(`${row.devices > 1 ? `${row.devices} × ` : ""}${row.hardware}`);
  if (row.sequence_tokens) parts.push(`sequence ${countWords(row.sequence_tokens)}`);
  if (row.batch_sequences) parts.push(`batch ${countWords(row.batch_sequences)}`);
  if (row.precision && row.precision !== "-") parts.push(row.precision);
  if (row.device_cap_bytes) parts.push(`device ${capWords(row.device_cap_bytes)}`);
  if (row.host_cap_bytes) parts.push(`host ${capWords(row.host_cap_bytes)}`);
  return parts
    .filter(Boolean)
    .map((part) => cut(String(part), 40))
    .join(" · ");
}
function rowName(row) {
  if (state.page.of_profiles) return plainWords(row.run);
  return row.run ? `run ${row.run}` : row.cell ? `cell ${row.cell}` : `row ${row.index + 1}`;
}

// -- panels ----------------------------------------------------------------------------------------------------------

/** Text with what stands between backticks as code. */
function withCode(sentence) {
  const parts = sentence.split("`");
  // A lone backtick, of a name, means nothing.
  if (parts.length % 2 === 0) return [sentence];
  return parts.map((part, place) => (place % 2 ? make("code", {}, part) : part));
}

/** Fill a panel: a question, the sentence that answers it, and what it draws. */
function fill(id, question, sentence, ...content) {
  const panel = byId(id);
  panel.replaceChildren(
    make("h3", { id: `${id}-title` }, question),
    make("p", { class: "answer" }, withCode(sentence)),
    ...content.filter(Boolean),
  );
  panel.classList.toggle("empty", content.filter(Boolean).length === 0);
  if (panel.querySelector("svg[role=img], canvas[role=img]")) panel.prepend(saveTools(panel));
  return panel;
}

/** A drawing that says in words what it shows. */
function described(svg, words) {
  svg.setAttribute("role", "img");
  // A picture is one thing: what its parts are called is for nobody.
  svg.querySelectorAll("[aria-label]").forEach((part) => part.removeAttribute("aria-label"));
  svg.setAttribute("aria-label", words);
  return svg;
}

function widthOf(id) {
  const style = getComputedStyle(byId(id));
  return Math.max(240, byId(id).clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
}

function legend(entries) {
  return make(
    "ul",
    { class: "legend" },
    entries.map(([colour, words, shape]) =>
      make("li", {}, make("i", { class: shape ?? "dot", style: `--swatch:${colour}` }), words),
    ),
  );
}

function labelled(words, control) {
  return make("label", {}, make("span", {}, words), control);
}

function select(id, options, chosen, changed) {
  const control = make("select", { id, change: (event) => changed(event.target.value) });
  for (const [value, words] of options) {
    control.append(make("option", { value, selected: value === chosen }, words));
  }
  return control;
}

const PLOT_STYLE = {
  background: "transparent",
  color: "var(--ink)",
  fontFamily: "inherit",
  fontSize: "12px",
  overflow: "visible",
};
const COLOURS = Array.from({ length: 8 }, (_, place) => `var(--c${place})`);
