"use strict";
// The page's data and what is chosen of it. Text of a record only ever becomes text: nothing here parses HTML.

const LIVE = document.documentElement.dataset.live === "true";

/** What is shown; `hash` holds what the address keeps. */
const state = {
  page: null,
  rows: [],
  shown: [],
  selected: null,
  details: new Map(),
  etag: null,
  hash: {},
  constants: [],
};

const HASH_NAMES = ["run", "q", "state", "model", "hardware", "sort", "cols", "marked", "x", "y", "value", "t", "task"];

function byId(id) {
  return document.getElementById(id);
}

/** An element with attributes and children; strings become text, null is left out. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

// -- rows ------------------------------------------------------------------------------------------------------------

function columnReader(column) {
  if (column === null) return () => null;
  if ("same" in column) return () => column.same;
  if ("words" in column) return (index) => column.words[column.at[index]];
  return (index) => column.values[index];
}

/** Rows of `data.json`: each reads its columns when it is asked. */
function readRows(page) {
  const readers = page.columns.map(columnReader);
  const prototype = {};
  page.names.forEach((name, place) => {
    Object.defineProperty(prototype, name, {
      get() {
        return readers[place](this.index);
      },
      enumerable: true,
    });
  });
  return Array.from({ length: page.count }, (_, index) => {
    const row = Object.create(prototype);
    row.index = index;
    // What is known of a row that nobody has run.
    row.foreseen = page.foreseen?.[index] ?? null;
    row.key = row.run ?? (row.cell ? `cell-${row.cell}${row.attempt ? `-${row.attempt}` : ""}` : `row-${index + 1}`);
    return row;
  });
}

/** A finite number, else null: a loss may be the word "nan". */
function number(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** Tokens a second as measured, else as predicted of what has not been run; between which ends four of five steps lie. */
function speed(row) {
  const measured = row.state === "running" ? null : number(row.tokens_per_s);
  if (measured !== null) return { value: measured, predicted: false, low: number(row.tokens_per_s_p20), high: number(row.tokens_per_s_p80) };
  const foreseen = row.state === "planned" ? number(row.predicted_tokens_per_s) : null;
  if (foreseen === null || row.predicted_fits === false) return null;
  return { value: foreseen, predicted: true, low: number(row.foreseen?.low_tokens_per_s), high: number(row.foreseen?.high_tokens_per_s) };
}

/** As measured, else as predicted of what has not been run. */
function mfuOf(row) {
  return number(row.mfu) ?? (speed(row)?.predicted ? number(row.foreseen?.mfu) : null);
}

/** How far the predicted speed is off the measured one. */
function predictionError(row) {
  if (number(row.prediction_error) !== null) return row.prediction_error;
  const measured = number(row.tokens_per_s),
    predicted = number(row.predicted_tokens_per_s);
  return measured && predicted ? predicted / measured - 1 : null;
}

/** Whether it ran to its end: the few steps of one that was stopped say little. */
function isMeasured(row) {
  return row.state === "ok" && row.source !== "predicted" && number(row.tokens_per_s) !== null;
}

function loadPage(page) {
  state.page = page;
  state.rows = readRows(page);
  for (const [name, detail] of Object.entries(page.details ?? {})) state.details.set(name, detail);
  for (const row of state.rows) if (row.state === "running") addProgress(row);
  state.constants = constantColumns();
}

/** Columns of the table in which every row says the same, with more than a few rows to say it. */
function constantColumns() {
  if (state.rows.length < 3) return [];
  return CONSTANT_NAMES.filter((name) => {
    const column = state.page.columns[state.page.names.indexOf(name)];
    return column !== null && "same" in column;
  });
}
const CONSTANT_NAMES = [
  "model",
  "hardware",
  "devices",
  "sequence_tokens",
  "batch_sequences",
  "micro_batch_sequences",
  "precision",
  "optimizer",
  "device_cap_bytes",
  "host_cap_bytes",
];

// -- the address -----------------------------------------------------------------------------------------------------

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  state.hash = {};
  for (const name of HASH_NAMES) if (given.get(name)) state.hash[name] = given.get(name);
}

/** What the address keeps of the runs. */
function hashEntries() {
  return HASH_NAMES.filter((name) => state.hash[name]).map((name) => [name, state.hash[name]]);
}

function choose(changes) {
  Object.assign(state.hash, changes);
  writeAddress();
}
