"use strict";
// Runs beside each other: what differs in set-up and result, losses and step times over each other, memory, one time axis.

const MOST_MARKED = 6;
const compareView = { from: 0, to: 1, chosen: null };

/** Keys of the rows that are ticked; as the page begins, those that it is about. */
function marks() {
  return (state.hash.marked ?? (state.page.marked ?? []).join(",")).split(",").filter(Boolean);
}
function isMarked(row) {
  return marks().includes(row.key);
}
function mark(row, isOn) {
  const kept = marks().filter((key) => key !== row.key);
  choose({ marked: [...kept, ...(isOn ? [row.key] : [])].slice(-MOST_MARKED).join(",") });
  drawMarked();
  drawWindow(true);
}

function drawMarked() {
  const count = marks().length,
    button = byId("compare-marked");
  if (!button) return;
  button.textContent = count ? `compare ${countWords(count)} ticked` : "compare";
  button.disabled = count < 2;
}

function compareMarked() {
  openTab("compare");
  writeAddress();
}

function canCompare() {
  return (LIVE || plannerData() === null) && !state.page.of_profiles && state.rows.length > 1;
}
function compareEntries() {
  return state.hash.marked ? [["marked", state.hash.marked]] : [];
}

/** What is compared: rows that are ticked, else the two that were made last. */
function comparedRows() {
  const ticked = marks().map(findRow).filter(Boolean);
  if (ticked.length > 1) return ticked;
  const ran = sortedRows(state.rows).filter((row) => row.run && number(row.step_s) !== null);
  return [...ticked, ...ran.filter((row) => !ticked.includes(row))].slice(0, 2);
}

async function openCompare() {
  const rows = comparedRows();
  byId("title").textContent = "Compare";
  byId("about").textContent = rows.length ? `${listWords(rows.map(rowName))}; tick others in the table of runs.` : "";
  drawCompare(rows);
  if (!LIVE) return;
  await Promise.all(rows.map((row) => fetchDetail(row)));
  if (shownTab === "compare") drawCompare(rows);
}

/** New data has come: runs that go on have more steps by now. */
async function followCompared() {
  const rows = comparedRows();
  await Promise.all(rows.map((row) => fetchDetail(row, true)));
  if (shownTab === "compare") drawCompare(rows);
}

function drawCompare(rows) {
  const known = rows.map((row) => ({ row, name: rowName(row), detail: row.run ? (state.details.get(row.run) ?? null) : null }));
  if (state.page.said?.length || state.page.tables?.length) {
    byId("compare-said").hidden = false;
    fill("compare-said", "What changed?", (state.page.said ?? []).filter(Boolean).join(" "), ...(state.page.tables ?? []).map(wordTable));
  }
  if (known.length < 2) {
    for (const id of ["compare-curves", "compare-memory", "compare-steps"]) byId(id).hidden = true;
    fill("compare-changes", "What differs?", "There are no two runs to compare yet: tick some in the table of runs.");
    return;
  }
  drawDifferences(known);
  drawCurves(known);
  drawComparedMemory(known);
  drawComparedSteps(known);
}

// -- what differs ----------------------------------------------------------------------------------------------------

/** [field, whether more is better, null where neither is]. */
const RESULTS = [
  ["tokens_per_s", true],
  ["mfu", true],
  ["hfu", null],
  ["step_s", false],
  ["device_bytes", null],
  ["host_bytes", null],
  ["last_loss", null],
  ["power_w", null],
  ["energy_j_per_token", false],
  ["tokens_per_dollar", true],
  ["prediction_error", null],
  ["bound", null],
  ["state", null],
];
const NO_SETTINGS = ["cell", "run", "attempt", "repeat", "reason", "source", "started", "predicted_fits", ...RESULTS.map(([name]) => name)];

function drawDifferences(known) {
  const value = ({ row }, name) => (name === "tokens_per_s" ? (speed(row)?.value ?? null) : name === "mfu" ? mfuOf(row) : row[name]);
  const results = RESULTS.filter(([name]) => known.some((each) => value(each, name) !== null && value(each, name) !== undefined));
  const first = known[0];
  const cell = (each, name, isBetter) => {
    const now = value(each, name),
      before = value(first, name);
    const isNumber = each !== first && name !== "prediction_error" && number(now) !== null && number(before);
    const gain = isNumber ? now / before - 1 : null;
    const tone = gain === null || isBetter === null || Math.abs(gain) < 0.005 ? "faint" : gain > 0 === isBetter ? "good" : "bad";
    return make("td", { class: "number" }, name === "state" ? stateWords(now) : name === "bound" ? boundWords(now) : fieldWords(name, now), gain === null ? null : make("span", { class: `gain ${tone}` }, ` ${errorWords(gain)}`));
  };
  const fields = state.page.names.filter((name) => !NO_SETTINGS.includes(name) && !/^(step_s|tokens_per_s|predicted|padded|samples|model_flops|steps$)/.test(name));
  const settings = settingRows(known, fields);
  const line = (title, cells) => make("tr", {}, make("th", { scope: "row" }, title), cells);
  const head = make("tr", {}, make("th", { scope: "col" }, make("span", { class: "hidden" }, "what")), known.map((each, place) => make("th", { scope: "col", class: "number" }, make("i", { class: "dot", style: `--swatch:${COLOURS[place]}` }), make("button", { class: "link", type: "button", click: () => showOne(each.row) }, each.name))));
  const group = (words) => make("tr", { class: "group" }, make("th", { colspan: known.length + 1, scope: "colgroup" }, words));
  const body = make(
    "tbody",
    {},
    group("result"),
    results.map(([name, isBetter]) => line(fieldTitle(name), known.map((each) => cell(each, name, isBetter)))),
    group(settings.length ? "set-up, where it differs" : "set-up: nothing differs"),
    settings.map(([title, words]) => line(title, words.map((each) => make("td", { class: "number", title: each.length > 28 ? each : null }, cutMiddle(each, 28))))),
  );
  fill("compare-changes", "What differs?", differenceSentence(known, settings), scrolling("Differences", make("table", { class: "small words compared" }, make("thead", {}, head), body)));
}

function showOne(row) {
  state.selected = row;
  state.hash.run = row.key;
  openTab("runs");
  writeAddress();
  showRun();
}

/** Where the data was kept, which is no setting. */
const HOUSEKEEPING = new Set(["cache", "fingerprint"]);

/** Settings that are not the same in all: of the rows, then of what was asked for and of the versions. */
function settingRows(known, fields) {
  const ofRow = (name) => [fieldTitle(name), known.map(({ row }) => fieldWords(name, row[name]))];
  const asked = fields.slice(0, fields.indexOf("n_params") + 1),
    found = asked.map(ofRow);
  const seen = new Set(fields);
  for (const part of ["setup", "row", "versions"]) {
    if (part === "row") found.push(...fields.filter((name) => !asked.includes(name)).map(ofRow));
    const tables = known.map(({ detail }) => new Map(detail?.[part] ?? []));
    for (const name of new Set(tables.flatMap((table) => [...table.keys()]))) {
      if (seen.has(name) || HOUSEKEEPING.has(name) || !tables.every((table, place) => known[place].detail)) continue;
      seen.add(name);
      found.push([name.replaceAll("_", " "), tables.map((table) => table.get(name) ?? UNKNOWN)]);
    }
  }
  return found.filter(([, words]) => new Set(words).size > 1);
}

function differenceSentence(known, settings) {
  const [first, second] = known,
    before = speed(first.row),
    after = speed(second.row);
  const what = settings.slice(0, 3).map(([title]) => title),
    more = settings.length > 3 ? [`${countWords(settings.length - 3)} more`] : [];
  const differs = settings.length ? `They differ in ${listWords([...what, ...more])}.` : "They have the same set-up.";
  if (!before || !after) return differs;
  if (before.predicted !== after.predicted) return `${differs} One is measured and the other only predicted: their speeds are not compared.`;
  const ratio = after.value / before.value;
  const overlap = before.low !== null && after.low !== null && before.low <= after.high && after.low <= before.high;
  const words = Math.abs(ratio - 1) < 0.005 ? "as fast as" : `${aboutWords(Math.abs(ratio - 1))} ${ratio > 1 ? "faster" : "slower"} than`;
  return `${capital(second.name)} is ${words} ${first.name}${overlap && Math.abs(ratio - 1) >= 0.005 ? ", which is within how far single steps vary" : ", by the medians of their steps"}. ${differs}`;
}

// -- curves ----------------------------------------------------------------------------------------------------------

function curvePoints(known, name, at = "step") {
  return known.flatMap(({ detail }, place) =>
    (detail?.steps?.[at] ?? []).map((step, index) => ({ step, place, value: number(detail.steps[name]?.[index]) })).filter((point) => point.value !== null),
  );
}

function drawCurves(known) {
  const losses = curvePoints(known, "loss"),
    times = curvePoints(known, "step_s"),
    evaluated = curvePoints(known, "eval_loss", "eval_step");
  byId("compare-curves").hidden = !losses.length && !times.length;
  if (!losses.length && !times.length) return;
  const width = widthOf("compare-curves"),
    base = { width, height: 210, marginLeft: 64, marginRight: 70, style: PLOT_STYLE };
  const axis = { label: "step", labelAnchor: "center", labelArrow: "none", ticks: width < 420 ? 4 : 8, tickFormat: (value) => (Number.isInteger(value) ? countWords(value) : "") };
  const lines = (points, extra = []) => [
    ...known.map((_, place) => Plot.line(points.filter((point) => point.place === place), { x: "step", y: "value", stroke: COLOURS[place], strokeWidth: 1.7, clip: true })),
    // Which run it is stands at the end of its line.
    Plot.text(known.map((each, place) => ({ ...points.findLast((point) => point.place === place), name: each.row.run ?? each.name })).filter((point) => point.value !== undefined), { x: "step", y: "value", text: "name", textAnchor: "start", dx: 6, fill: "var(--ink)", stroke: "var(--panel)", strokeWidth: 4 }),
    ...extra,
  ];
  const parts = [];
  if (losses.length) {
    const dots = Plot.dot(evaluated, { x: "step", y: "value", r: 4, fill: (point) => COLOURS[point.place], stroke: "var(--panel)" });
    parts.push(described(Plot.plot({ ...base, x: { ...axis, label: null }, y: { label: evaluated.length ? "loss; dots: evaluation" : "loss", labelArrow: "none", ticks: 4, grid: true, nice: true }, marks: lines(losses, evaluated.length ? [dots] : []) }), "Losses of all over their steps."));
  }
  if (times.length) {
    const cap = 1.3 * (d3.quantile(times, 0.97, (point) => point.value) ?? 1);
    parts.push(described(Plot.plot({ ...base, marginBottom: 40, x: axis, y: { label: "time of a step", labelArrow: "none", ticks: 4, grid: true, domain: [0, cap], clamp: true, tickFormat: (value) => (value ? secondsWords(value) : "0") }, marks: lines(times) }), "Times of all steps."));
  }
  const ends = known.map((each) => [each, each.detail?.steps?.loss?.findLast((value) => number(value) !== null)]).filter(([, loss]) => loss !== undefined);
  const sentence = ends.length > 1 ? `In the end the losses are ${listWords(ends.map(([each, loss]) => `${significant(loss, 4)} (${each.name})`))}.` : "Those of which steps are written down.";
  fill("compare-curves", "Do they learn alike, and as fast?", sentence, ...parts.map((plot) => make("div", { class: "plot" }, plot)), legend(known.map((each, place) => [COLOURS[place], each.name, "dash"])));
}

// -- memory and the step ---------------------------------------------------------------------------------------------

function drawComparedMemory(known) {
  const bars = known.flatMap(({ row, name, detail }) => {
    const short = row.run ?? name;
    if (!detail?.memory?.length && row.foreseen?.bars) return foreseenBars(row.foreseen).map((bar) => ({ ...bar, place: `${short} ${bar.place}` }));
    return (detail?.memory?.length ? detail.memory : rowMemory(row)).map((bar) => ({
      place: `${short} ${bar.place}`,
      pieces: bar.owners.map((owner, place) => ({ owner, bytes: Math.max(0, (bar.measured_bytes ?? bar.planned_bytes)[place]), words: bytesWords((bar.measured_bytes ?? bar.planned_bytes)[place]) })),
      cap: bar.cap_bytes,
      capWords: bar.cap_bytes ? capWords(bar.cap_bytes) : "",
    }));
  });
  byId("compare-memory").hidden = !bars.length;
  if (!bars.length) return;
  const words = `${listWords(bars.map((bar) => `${bytesWords(d3.sum(bar.pieces, (piece) => piece.bytes))} (${bar.place})`))}.`;
  const owners = [...new Set(bars.flatMap((bar) => bar.pieces.map((piece) => piece.owner)))];
  const colourOf = (owner) => ownerColour(owner, Math.max(0, bars.find((bar) => bar.pieces.some((piece) => piece.owner === owner)).pieces.findIndex((piece) => piece.owner === owner)));
  fill("compare-memory", "What does each take?", words, make("div", { class: "plot" }, described(memoryBars(bars, widthOf("compare-memory")), `Memory by owner. ${words}`)), legend(owners.map((owner) => [colourOf(owner), owner])));
}

function drawComparedSteps(known) {
  const runs = known.filter(({ detail }) => detail?.tasks).map(({ row, name, detail }) => ({ name: row.run ?? name, tasks: readTasks(detail.tasks) }));
  byId("compare-steps").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const side = runs.every((run) => run.tasks.some((task) => task.measured)) ? "measured" : "predicted";
  const spec = tasksSpec(runs, [side]);
  const told = runs.map((run) => [run, exposure(run.tasks, side)]);
  const sentence = `One step of each, ${side}, on one axis: ${listWords(told.map(([run, { end, exposed }]) => `${run.name} ${secondsWords(end)}${exposed > 0 ? `, ${secondsWords(exposed)} of it copies in the open` : ""}`))}.`;
  const chart = lanesChart("compare-steps", spec, compareView, () => {}, sentence);
  fill("compare-steps", "Where do the steps part?", sentence, make("div", { class: "plot" }, chart.element), tasksLegend(spec));
  chart.redraw();
}
