"use strict";
// Plan: what is asked, by controls and in the address; who answers, a server or what this file holds; and in which order.

const PLANNER_NAMES = [
  ...["model", "on", "gpus", "seq", "batch_tokens", "device_mem", "host_mem", "precision", "recompute", "optimizer"],
  ...["stack", "lora", "base", "micro", "batch"],
];
const SETTLE_MS = { around: 150, plan: 350 };

const planner = {
  question: {},
  config: null, // { name, text } of a dropped file
  prices: {},
  pins: [],
  answer: null, // what is shown, and of which question
  around: null,
  caps: null, // cells of the map, by their two caps
  searching: null, // the search that goes on
  asking: {}, // what is being asked of each kind
  view: { from: 0, to: 1, chosen: null },
  asked: 0,
};

function plannerData() {
  return state.page.planner ?? null;
}
function isAsking() {
  return LIVE && !plannerData().grid;
}

// -- questions -------------------------------------------------------------------------------------------------------

function usualQuestion() {
  return { ...plannerData().question };
}

function keyOf(question) {
  return JSON.stringify([...PLANNER_NAMES.map((name) => question[name] ?? ""), planner.config?.text ?? ""]);
}

/** What is asked, without what goes without saying. */
function wordsOf(question) {
  const usual = plannerData().usual;
  const said = Object.entries(question).filter(([name, value]) => value !== null && value !== "" && value !== usual[name]);
  return planner.config ? [...said.filter(([name]) => name !== "model"), ["config", planner.config.text]] : said;
}

/** Changes of the question, of which the page then shows the answer. */
function change(changes, isHeld = false) {
  for (const [name, value] of Object.entries(changes)) planner.question[name] = value;
  if ("model" in changes) planner.config = null;
  if ("batch_tokens" in changes && changes.batch_tokens !== "auto") planner.question.batch = "auto";
  if ("batch" in changes && changes.batch !== "auto") planner.question.batch_tokens = "auto";
  if ("on" in changes && !("device_mem" in changes)) planner.question.device_mem = "auto";
  writeAddress();
  // What is held stays as it is until it is let go.
  if (isHeld) refreshOutputs();
  else drawControls();
  ask();
}

function plannerEntries() {
  const usual = usualQuestion();
  const said = PLANNER_NAMES.filter((name) => (planner.question[name] ?? "") !== (usual[name] ?? "")).map((name) => [name, planner.question[name]]);
  const prices = Object.entries(planner.prices).map(([name, price]) => `${name}:${price}`);
  if (prices.length) said.push(["price", prices.join(",")]);
  const { from, to, chosen } = planner.view;
  if (from > 0 || to < 1) said.push(["t", `${Number(from.toPrecision(9))}-${Number(to.toPrecision(9))}`]);
  if (chosen !== null) said.push(["task", String(chosen)]);
  return said;
}

function readPlannerAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  planner.question = usualQuestion();
  for (const name of PLANNER_NAMES) if (given.get(name)) planner.question[name] = given.get(name);
  planner.prices = { ...plannerData().prices };
  for (const part of (given.get("price") ?? "").split(",")) {
    const [name, price] = part.split(":");
    if (name && Number(price) > 0) planner.prices[name] = Number(price);
  }
  const [from, to] = (given.get("t") ?? "").split("-").map(Number);
  const isView = from >= 0 && to <= 1 && from < to;
  const task = given.get("task");
  planner.view = { from: isView ? from : 0, to: isView ? to : 1, chosen: task !== null && /^\d+$/.test(task) ? Number(task) : null };
}

// -- answers ---------------------------------------------------------------------------------------------------------

/** Of each kind only the last question counts: an earlier one is given up, which ends its search. */
async function fetchAnswer(kind, question) {
  planner.asking[kind]?.abort();
  const control = new AbortController();
  planner.asking[kind] = control;
  const words = new URLSearchParams(wordsOf(question));
  try {
    const answer = await fetch(`${kind}?${words}`, { cache: "no-store", signal: control.signal });
    const found = await answer.json();
    return control.signal.aborted ? null : found;
  } catch (error) {
    if (control.signal.aborted || error.name === "AbortError") return null;
    return { kind: "refused", command: "", what: "no answer", why: "the server has ended, or is busy", hint: "`flopwise serve`" };
  } finally {
    if (planner.asking[kind] === control) delete planner.asking[kind];
  }
}

function giveUp(...kinds) {
  for (const kind of kinds) {
    planner.asking[kind]?.abort();
    clearTimeout(planner.asking[`${kind} later`]);
  }
  if (kinds.includes("plan")) planner.searching = null;
}

/** Ask what stands in the controls: at once a prediction, then what lies around it, then a search for a plan. */
async function ask() {
  if (!isAsking()) snapToGrid();
  const question = { ...planner.question },
    key = keyOf(question);
  planner.asked += 1;
  giveUp("plan", "around", "caps");
  if (!isAsking()) {
    const cell = gridCell(question);
    planner.around = cell.around ? { ...cell.around, key } : null;
    showAnswer(key, question, cell);
    return;
  }
  markBusy(true);
  const found = await fetchAnswer("predict", question);
  if (found === null) return;
  showAnswer(key, question, found);
  later("around", async () => {
    const around = await fetchAnswer("around", question);
    if (around === null || key !== keyOf(planner.question)) return;
    planner.around = { ...around, key };
    drawAround();
  });
  if (found.kind === "refused" && !found.needed) return;
  later("plan", () => search(question, key));
}

function later(kind, act) {
  clearTimeout(planner.asking[`${kind} later`]);
  planner.asking[`${kind} later`] = setTimeout(act, SETTLE_MS[kind]);
}

async function search(question, key) {
  planner.searching = key;
  drawSearching();
  const found = await fetchAnswer("plan", question);
  if (planner.searching === key) planner.searching = null;
  if (found !== null && key === keyOf(planner.question)) {
    // What fits no cap is said, beside what was predicted without one.
    if (found.kind === "refused") planner.answer.refused = found;
    else planner.answer = { key, question, view: found, predicted: planner.answer.view };
    drawAnswer();
  }
  drawSearching();
}

function stopSearch() {
  giveUp("plan");
  planner.answer.stopped = true;
  drawSearching();
}

function showAnswer(key, question, view) {
  planner.answer = { key, question, view, predicted: view };
  if (view.whole) planner.whole = view.whole;
  planner.caps = planner.caps?.key === capsKey(question) ? planner.caps : null;
  markBusy(false);
  drawAnswer();
}

/** Whether what is shown answers what stands in the controls. */
function isCurrent() {
  return planner.answer?.key === keyOf(planner.question);
}

function markBusy(isBusy) {
  byId("plan-answer").setAttribute("aria-busy", String(isBusy));
}

// -- what a file holds -----------------------------------------------------------------------------------------------

/** An address may name what this file does not hold: its axes stand where they stood, or at the same value in other words. */
function snapToGrid() {
  const sized = (word) => bytesOf(word) ?? tokensOf(word);
  for (const { name, values, at } of plannerData().grid.axes) {
    const asked = planner.question[name];
    if (values.includes(asked)) continue;
    planner.question[name] = values.find((value) => sized(value) !== null && sized(value) === sized(asked ?? "")) ?? values[at];
  }
}

/** The cell of the file's own grid: its axes are the controls that move. */
function gridCell(question) {
  const grid = plannerData().grid;
  const place = grid.axes.map((axis) => {
    const found = axis.values.indexOf(question[axis.name]);
    return found < 0 ? axis.at : found;
  });
  return grid.cells[place.reduce((sum, at, number) => sum * grid.axes[number].values.length + at, 0)];
}

// -- controls --------------------------------------------------------------------------------------------------------

const POWERS = Array.from({ length: 14 }, (_, place) => 2 ** (7 + place));
const BATCHES = Array.from({ length: 27 }, (_, place) => (place % 2 ? 3 * 2 ** ((place - 1) / 2 + 10) : 2 ** (place / 2 + 11)));
const DEVICES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];

function tokensWord(value) {
  for (const [unit, size] of [["M", 2 ** 20], ["k", 1024]]) if (value % size === 0) return `${value / size}${unit}`;
  return String(value);
}
function tokensOf(word) {
  const found = /^([\d.]+)\s*([kKmMgG]?)$/.exec(String(word).trim());
  return found ? Number(found[1]) * { "": 1, k: 1024, m: 2 ** 20, g: 2 ** 30 }[found[2].toLowerCase()] : null;
}
function bytesOf(word) {
  const found = /^([\d.]+)\s*(B|KiB|MiB|GiB|TiB)?$/.exec(String(word).trim());
  return found ? Number(found[1]) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].indexOf(found[2] ?? "B") : null;
}

/** A slider over words: `auto` first, then each value as it would be typed. */
function slider(name, title, values, shown, auto) {
  const now = planner.question[name] ?? "auto",
    words = auto === null ? values : ["auto", ...values],
    sized = (word) => bytesOf(word) ?? tokensOf(word) ?? -1;
  // A value of the address or of a chip that is no step of the slider becomes one.
  const all = words.includes(now) ? words : [...words, now].sort((left, right) => sized(left) - sized(right)),
    at = all.indexOf(now);
  const valueWords = now === "auto" ? (auto ?? "auto") : shown(now),
    told = make("output", { for: `ask-${name}` }, valueWords);
  return make(
    "label",
    { class: "control", for: `ask-${name}` },
    make("span", {}, title),
    told,
    make("input", {
      type: "range",
      id: `ask-${name}`,
      min: "0",
      max: String(all.length - 1),
      step: "1",
      value: String(at),
      "aria-valuetext": valueWords,
      input: (event) => change({ [name]: all[Number(event.target.value)] }, true),
      change: drawControls,
    }),
  );
}

function choice(name, title, options, note = "") {
  const now = planner.question[name] ?? "auto";
  const all = options.some(([value]) => value === now) ? options : [...options, [now, now]];
  return make(
    "label",
    { class: "control", for: `ask-${name}` },
    make("span", {}, title),
    make("output", {}, note),
    select(`ask-${name}`, all, now, (value) => change({ [name]: value })),
  );
}

function deviceCaps() {
  const whole = planner.answer?.view.fit?.cap ?? 0,
    most = Math.max(planner.whole ?? 0, whole) || 192 * 2 ** 30;
  const gib = Math.floor(most / 2 ** 30);
  const stride = Math.max(1, Math.round(gib / 40));
  return d3.range(stride, gib + 1, stride).map((size) => `${size}GiB`);
}

function drawControls() {
  const focus = document.activeElement?.id;
  const grid = plannerData().grid;
  byId("ask").replaceChildren(...(grid ? gridControls(grid) : liveControls()).filter(Boolean));
  if (focus?.startsWith("ask-")) byId(focus)?.focus({ preventScroll: true });
}

function liveControls() {
  const { models, hardware, precisions, recomputes, optimizers, stacks } = plannerData().options;
  const found = planner.answer?.view,
    setup = found?.setup,
    words = (names) => names.map((name) => [name, name]);
  const isOwn = isOwnPlan();
  const dropped = planner.config ? [["", planner.config.name]] : [];
  const modelChoice = choice("model", "model", [...dropped, ...words(models)], found?.parameters ?? planner.answer?.predicted?.parameters ?? "");
  if (planner.config) modelChoice.querySelector("select").value = "";
  return [
    modelChoice,
    dropZone(),
    choice("on", "on", words(hardware)),
    slider("gpus", "devices", DEVICES.map(String), (value) => countWords(Number(value)), null),
    slider("seq", "sequence", POWERS.map(tokensWord), (value) => countWords(tokensOf(value)), setup ? `(${countWords(setup.sequence_tokens)})` : "auto"),
    slider("batch_tokens", "batch, tokens", BATCHES.map(tokensWord), (value) => countWords(tokensOf(value)), found?.batch_tokens ? `(${countWords(found.batch_tokens)})` : "auto"),
    slider("device_mem", "device cap", deviceCaps(), (value) => capWords(bytesOf(value)), found?.fit ? `(${bytesWords(planner.whole)})` : "none"),
    isOwn ? slider("host_mem", "host cap", ["0GiB", ...d3.range(4, 41).map((place) => `${Math.round(2 ** (place / 4))}GiB`).filter((each, place, all) => all.indexOf(each) === place)], (value) => (bytesOf(value) ? capWords(bytesOf(value)) : "none of it"), "(most of it)") : null,
    choice("precision", "precision", words(["auto", ...precisions]), setup && planner.question.precision === "auto" ? setup.precision : ""),
    choice("recompute", "recompute", words(["auto", ...recomputes]), setup && planner.question.recompute === "auto" ? cut(setup.recompute, 22) : ""),
    choice("optimizer", "optimizer", words(optimizers)),
    choice("lora", "adapters", [["auto", "none: all is trained"], ...[4, 8, 16, 32, 64, 128].map((rank) => [String(rank), `LoRA of rank ${rank}`])]),
    planner.question.lora !== "auto" ? choice("base", "frozen weights", words(["auto", "bf16", "int8", "nf4"])) : null,
    choice("stack", "framework", words(stacks)),
    priceControl(),
    make("p", { class: "faint" }, "Figures follow at once; a search for the fastest plan runs behind them."),
    make("button", { type: "button", id: "ask-reset", click: () => change(usualQuestion()) }, "start again"),
  ];
}

/** Whether flopwise itself would run it: one device, and no word of a framework's. */
function isOwnPlan() {
  const { gpus, recompute, micro, stack } = planner.question,
    usual = plannerData().usual;
  return [["gpus", gpus], ["recompute", recompute], ["micro", micro], ["stack", stack]].every(([name, value]) => (value ?? usual[name]) === usual[name]);
}

function gridControls(grid) {
  const count = (value) => countWords(tokensOf(value)),
    size = (value) => capWords(bytesOf(value));
  const shown = { seq: count, batch: count, batch_tokens: count, micro: count, gpus: count, device_mem: size, host_mem: size };
  const titles = { seq: "sequence", batch: "batch, sequences", batch_tokens: "batch, tokens", micro: "micro-batch", gpus: "devices", device_mem: "device cap", host_mem: "host cap" };
  const { model, on } = plannerData().question,
    moving = grid.axes.map((axis) => axis.name),
    fixed = [["model", model], ["on", on]].filter(([name]) => !moving.includes(name));
  return [
    ...fixed.map(([name, value]) => make("p", { class: "control fixed" }, make("span", {}, name), make("b", {}, value))),
    ...grid.axes.map((axis) =>
      shown[axis.name]
        ? slider(axis.name, titles[axis.name], axis.values, shown[axis.name], null)
        : choice(axis.name, titles[axis.name] ?? axis.name, axis.values.map((value) => [value, value])),
    ),
    priceControl(),
    make("p", { class: "faint" }, "This file holds the answers to all of these. For every other question: ", make("code", {}, "flopwise serve")),
  ];
}

function priceControl() {
  const on = hardwareOf(planner.question);
  return make(
    "label",
    { class: "control", for: "ask-price" },
    make("span", {}, "price, $ an hour"),
    make("output", {}),
    make("input", {
      type: "number",
      id: "ask-price",
      min: "0",
      step: "any",
      placeholder: `of ${on}`,
      value: planner.prices[on] ?? "",
      change: (event) => setPrice(on, Number(event.target.value)),
    }),
  );
}

function hardwareOf(question) {
  return question.on ?? planner.answer?.view.hardware ?? "";
}

function setPrice(name, price) {
  if (price > 0) planner.prices[name] = price;
  else delete planner.prices[name];
  writeAddress();
  drawControls();
  drawAnswer();
  drawAround();
}

const MOST_CONFIG = 48 * 1024;

/** A `config.json` of the hub, dropped or chosen: it is read here, and only its text is sent to this machine's server. */
function dropZone() {
  const told = make("span", { class: "faint", "aria-live": "polite" }, planner.dropped || "or drop one here");
  const read = async (file) => {
    const text = file ? await file.text() : "";
    const found = file && readConfig(text);
    planner.dropped = found?.problem ?? "";
    if (!found?.text) {
      told.textContent = planner.dropped;
      return;
    }
    planner.config = { name: file.name, text: found.text };
    planner.question.model = "";
    planner.dropped = null;
    drawControls();
    ask();
  };
  const zone = make(
    "div",
    { class: "drop" },
    make("label", { class: "link", for: "ask-file" }, "config.json"),
    make("input", { type: "file", id: "ask-file", accept: ".json,application/json", class: "hidden", change: (event) => read(event.target.files[0]) }),
    told,
  );
  zone.addEventListener("dragover", (event) => event.preventDefault());
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    read(event.dataTransfer.files[0]);
  });
  return zone;
}

/** The configuration without what is no part of a network. */
function readConfig(text) {
  try {
    const table = JSON.parse(text);
    if (table === null || typeof table !== "object" || Array.isArray(table)) return { problem: "that is no config.json" };
    delete table.task_specific_params;
    const short = JSON.stringify(table);
    return short.length > MOST_CONFIG ? { problem: "that is too long for a config.json" } : { text: short };
  } catch {
    return { problem: "that is no JSON" };
  }
}
