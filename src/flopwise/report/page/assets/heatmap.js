"use strict";
// Two settings against each other: the best cell's figure of each pair, or the word of what went wrong.

const AXES = {
  device_cap_bytes: ["device memory cap", capWords],
  host_cap_bytes: ["host memory cap", capWords],
  sequence_tokens: ["sequence", countWords],
  batch_sequences: ["batch", countWords],
  model: ["model", plainWords],
  micro_batch_sequences: ["micro-batch", countWords],
  hardware: ["hardware", plainWords],
  devices: ["devices", countWords],
  precision: ["precision", plainWords],
  optimizer: ["optimizer", plainWords],
};
const MEASURES = {
  tokens_per_s: ["tok/s", (row) => speed(row)],
  mfu: ["MFU", (row) => (mfuOf(row) === null || !speed(row) ? null : { value: mfuOf(row), predicted: speed(row).predicted })],
  prediction_error: [
    "error of the prediction",
    (row) => (predictionError(row) === null ? null : { value: Math.abs(predictionError(row)), predicted: false }),
  ],
};
const NARROW = { OOM: "OOM", timeout: "time", unreadable: "unread", running: "run", planned: "plan", skipped: "skip" };
const MOST_TICKS = 24,
  LEAST_ROOM = 34;
const SHORT_STATE = {
  oom: "OOM",
  timeout: "timeout",
  failed: "failed",
  skipped: "skipped",
  running: "running",
  interrupted: "stopped",
  unreadable: "unreadable",
  planned: "planned",
};

/** Axes that more than one value stands on, the values of each in order. */
function axisValues(rows) {
  const found = new Map();
  for (const name of Object.keys(AXES)) {
    const values = [...new Set(rows.map((row) => row[name]).filter((value) => value !== null && value !== undefined))];
    if (values.length > 1 && values.length <= MOST_TICKS) {
      found.set(name, values.sort(typeof values[0] === "number" ? d3.ascending : wordOrder(name, rows)));
    }
  }
  return found;
}

/** Models by their size where it is known, other words by the alphabet. */
function wordOrder(name, rows) {
  const sizes = new Map(
    name === "model" ? rows.filter((row) => row.n_params).map((row) => [row.model, row.n_params]) : [],
  );
  return (left, right) =>
    d3.ascending(sizes.get(left) ?? 0, sizes.get(right) ?? 0) || d3.ascending(String(left), String(right));
}

/** Both caps where there are such; else the two settings whose pairs fill most of their map; else as chosen. */
function chosenAxes(values, rows) {
  const names = [...values.keys()];
  let [across, up] =
    values.has("device_cap_bytes") && values.has("host_cap_bytes")
      ? ["device_cap_bytes", "host_cap_bytes"]
      : fullestPair(values, rows);
  if (values.has(state.hash.x)) across = state.hash.x;
  if (values.has(state.hash.y)) up = state.hash.y;
  if (up === across) up = names.find((name) => name !== across);
  return [across, up];
}

/** Settings that a plan often chooses by itself are the last that a map is about. */
const CHOSEN_BY_PLANS = { micro_batch_sequences: 0.1, batch_sequences: 0.4 };

function fullestPair(values, rows) {
  const names = [...values.keys()],
    some = rows.filter((_, place) => place % Math.ceil(rows.length / 1000) === 0);
  const pairs = names.flatMap((across, place) =>
    names.slice(place + 1).map((up) => {
      const filled = new Set(
        some.filter((row) => row[across] !== null && row[up] !== null).map((row) => `${row[across]}\n${row[up]}`),
      ).size;
      const weight = (CHOSEN_BY_PLANS[across] ?? 1) * (CHOSEN_BY_PLANS[up] ?? 1);
      return { across, up, score: (weight * filled * filled) / (values.get(across).length * values.get(up).length) };
    }),
  );
  const best = d3.greatest(pairs, (pair) => pair.score);
  return best ? [best.across, best.up] : [names[0], undefined];
}

function cellOf(row) {
  return row.cell ?? row.key;
}

/** Of each cell the median of its runs; the run in the middle stands for them. */
function cellMedians(valued) {
  return d3
    .groups(valued, (each) => cellOf(each.row))
    .map(([, runs]) => {
      const value = d3.median(runs, (run) => run.found.value);
      const middle = d3.least(runs, (run) => Math.abs(run.found.value - value)) ?? runs[0];
      return { row: middle.row, runs: runs.length, found: { ...middle.found, value } };
    });
}

/** One square of the map: the median of its best cell, or the word of those that have none. */
function squares(rows, across, up, measure) {
  const groups = d3.groups(
    rows.filter((row) => row[across] !== null && (!up || row[up] !== null)),
    (row) => row[across],
    (row) => (up ? row[up] : ""),
  );
  return groups.flatMap(([x, inner]) =>
    inner.map(([y, group]) => {
      const valued = group.map((row) => ({ row, found: MEASURES[measure][1](row) })).filter((each) => each.found);
      const better = measure === "prediction_error" ? d3.least : d3.greatest;
      const ran = valued.filter((each) => !each.found.predicted);
      const best = better(cellMedians(ran.length ? ran : valued), (each) => each.found.value);
      const row = best?.row ?? group[0];
      return {
        x,
        y,
        row,
        count: new Set(group.map(cellOf)).size,
        runs: best?.runs ?? 0,
        value: best?.found.value ?? null,
        predicted: best?.found.predicted ?? false,
        word: SHORT_STATE[row.state] ?? (row.state === "ok" ? UNKNOWN : plainWords(row.state)),
      };
    }),
  );
}

function squareWords(square, measure, room) {
  const roomy = room > 64;
  if (square.value === null) return roomy ? square.word : (NARROW[square.word] ?? cut(square.word, 5));
  const short = (value) => rateWords(value, "", room > 44 ? 3 : 2).replace(FIRM, "");
  const share = (value) => `${(100 * value).toFixed(roomy ? 1 : 0)}${FIRM}%`;
  const words =
    measure !== "tokens_per_s" ? share(square.value) : roomy ? speedWords(square.value) : short(square.value);
  return square.predicted ? `~${words}` : words;
}

/** A value on an axis, as short as the room asks for: 16k where 16,384 does not fit. */
function axisWords(name, value, room) {
  const isRound = name === "sequence_tokens" && room < 50 && value % 1024 === 0 && value > 0;
  return isRound ? `${value / 1024}k` : cut(AXES[name][1](value), Math.max(4, Math.floor(room / 6.4)));
}

const QUESTIONS = {
  device_cap_bytes: "What does more memory buy?",
  host_cap_bytes: "What does more memory buy?",
  sequence_tokens: "What does a longer sequence cost?",
  batch_sequences: "What does a larger batch buy?",
  devices: "What do more devices buy?",
};

/** Tokens a second of different models say nothing beside each other: of those it is how well the hardware is used. */
function usualMeasure(rows) {
  const known = rows.filter((row) => speed(row));
  const isMixed = ["model", "hardware"].some((name) => new Set(known.map((row) => row[name])).size > 1);
  return isMixed && known.filter((row) => mfuOf(row) !== null).length > known.length / 2 ? "mfu" : "tokens_per_s";
}

/** Stripes over what is only foreseen; a pattern of the drawing itself. */
const HATCH = "url(#foreseen)";
function hatch(plot) {
  const svg = d3.select(plot.tagName === "svg" ? plot : plot.querySelector("svg"));
  const pattern = svg.append("defs").append("pattern").attr("id", "foreseen").attr("width", 7).attr("height", 7).attr("patternUnits", "userSpaceOnUse").attr("patternTransform", "rotate(45)");
  pattern.append("rect").attr("width", 1.6).attr("height", 7).attr("fill", "#ffffff").attr("fill-opacity", 0.38);
}

function drawHeatmap(rows) {
  const values = axisValues(rows);
  if (!values.size) {
    const why =
      rows.length < 2
        ? `There ${rows.length ? "is one row" : "are no rows"} to compare`
        : "All of these runs have the same set-up";
    fill(
      "heatmap",
      "What does more memory buy?",
      state.rows.length && !rows.length
        ? "The filters leave no row."
        : `${why}. To see how speed changes with memory, sequence or batch, run several set-ups: \`flopwise sweep --device-mem 24,40GiB --host-mem 64,128GiB\`.`,
    );
    return;
  }
  const [across, up] = chosenAxes(values, rows);
  const measure = state.hash.value in MEASURES ? state.hash.value : usualMeasure(rows);
  const cells = squares(rows, across, up, measure);
  const width = widthOf("heatmap"),
    columns = values.get(across),
    lines = up ? values.get(up) : [""];
  const longest = up ? d3.max(lines, (value) => cut(AXES[up][1](value), 16).length) : 0;
  const marginLeft = up ? Math.min(130, 14 + 7.2 * longest) : 4;
  const room = Math.max(LEAST_ROOM, (width - marginLeft - 4) / columns.length);
  const whole = marginLeft + 4 + room * columns.length;
  const numbers = cells.map((cell) => cell.value).filter((value) => value !== null);
  const high = d3.max(numbers),
    range = colourRange(numbers);
  const wrong = new Set(["OOM", "failed", "timeout", "unreadable"]);
  const plot = Plot.plot({
    width: whole,
    height: 58 + lines.length * (lines.length > 10 ? 28 : lines.length > 5 ? 40 : 56),
    marginLeft,
    marginRight: 4,
    marginTop: 8,
    marginBottom: 46,
    style: PLOT_STYLE,
    x: {
      domain: columns,
      type: "band",
      padding: 0.06,
      label: AXES[across][0],
      labelAnchor: "center",
      labelArrow: "none",
      tickSize: 0,
      tickFormat: (value) => axisWords(across, value, room),
      tickRotate: 0,
    },
    y: {
      domain: lines.slice().reverse(),
      type: "band",
      padding: 0.08,
      label: null,
      tickSize: 0,
      tickFormat: (value) => (up ? cut(AXES[up][1](value), 16) : ""),
    },
    marks: [
      Plot.cell(
        cells.filter((cell) => cell.value !== null),
        { x: "x", y: "y", fill: (cell) => heatColour(cell.value, range), rx: 4, className: "square" },
      ),
      Plot.cell(
        cells.filter((cell) => cell.value === null),
        {
          x: "x",
          y: "y",
          fill: (cell) => (wrong.has(cell.word) ? "var(--bad-paper)" : "var(--line)"),
          fillOpacity: 0.6,
          rx: 4,
          className: "square",
        },
      ),
      Plot.cell(
        cells.filter((cell) => cell.predicted),
        { x: "x", y: "y", fill: HATCH, rx: 4, className: "foreseen" },
      ),
      Plot.text(cells, {
        x: "x",
        y: "y",
        text: (cell) => squareWords(cell, measure, room),
        fill: (cell) =>
          cell.value !== null ? inkOn(heatColour(cell.value, range)) : wrong.has(cell.word) ? "var(--bad)" : "var(--ink)",
        fontWeight: (cell) => (cell.value !== null && cell.value === high ? 700 : 450),
        fontSize: room > 44 ? 12 : 10,
        fontVariant: "tabular-nums",
      }),
      Plot.cell(cells, {
        x: "x",
        y: "y",
        fill: "transparent",
        className: "target",
        title: (cell) => squareTitle(cell, measure),
        rx: 4,
      }),
    ],
  });
  if (cells.some((cell) => cell.predicted)) hatch(plot);
  wireMarks(
    plot,
    "target",
    cells.map((cell) => cell.row),
  );
  const sentence = heatmapSentence(cells, across, up, measure, rows);
  described(
    plot,
    `${sentence} ${cells.length} squares: ${across.replaceAll("_", " ")}${up ? ` by ${up.replaceAll("_", " ")}` : ""}.`,
  );
  const options = [...values.keys()].map((name) => [name, AXES[name][0]]);
  const controls = make(
    "div",
    { class: "controls" },
    labelled(
      "across",
      select("heat-x", options, across, (value) => {
        choose({ x: value, y: value === up ? across : up });
        drawHeatmap(state.shown);
        markSelected();
        byId("heat-x").focus();
      }),
    ),
    up
      ? labelled(
          "up",
          select(
            "heat-y",
            options.filter(([name]) => name !== across),
            up,
            (value) => {
              choose({ y: value, x: across });
              drawHeatmap(state.shown);
              markSelected();
              byId("heat-y").focus();
            },
          ),
        )
      : null,
    labelled(
      "figure",
      select(
        "heat-value",
        Object.entries(MEASURES).map(([name, [words]]) => [name, words]),
        measure,
        (value) => {
          choose({ value });
          drawHeatmap(state.shown);
          markSelected();
          byId("heat-value").focus();
        },
      ),
    ),
  );
  fill(
    "heatmap",
    QUESTIONS[across] ?? `How does ${measure === "mfu" ? "MFU" : "speed"} change with the ${AXES[across][0]}?`,
    sentence,
    controls,
    up ? make("p", { class: "axis-name" }, AXES[up][0]) : null,
    make(
      "div",
      whole > width + 1
        ? { class: "plot scroll", tabindex: "0", role: "region", "aria-label": "Heat map" }
        : { class: "plot" },
      plot,
    ),
    numbers.length > 1
      ? heatLegend(range, numbers, (value) => squareWords({ value, predicted: false }, measure, 100))
      : null,
  );
}

function squareTitle(cell, measure) {
  const lines = [`${rowName(cell.row)} · ${stateWord(cell.row.state)}`, runWords(cell.row)];
  if (cell.value !== null)
    lines.push(`${squareWords(cell, measure, 100)} ${MEASURES[measure][0]}${cell.predicted ? ", predicted" : ""}`);
  if (cell.runs > 1) lines.push(`median of ${cell.runs} runs`);
  if (cell.count > 1) lines.push(`best of ${cell.count} cells`);
  if (cell.row.reason) lines.push(cut(cell.row.reason, 160));
  return lines.join("\n");
}

function heatmapSentence(cells, across, up, measure, rows) {
  const known = cells.filter((cell) => cell.value !== null),
    ran = known.filter((cell) => !cell.predicted),
    // What ran is never ranked with what is only foreseen.
    valued = ran.length ? ran : known;
  const oom = cells.filter((cell) => cell.word === "OOM" && cell.value === null).length;
  const out = oom ? ` ${countOf(oom, "square")} went out of memory.` : "";
  if (!valued.length)
    return `None of these ${countOf(rows.length, "row")} has a figure for ${MEASURES[measure][0]} yet.${out}`;
  const better = measure === "prediction_error" ? d3.least : d3.greatest,
    worse = measure === "prediction_error" ? d3.greatest : d3.least;
  const best = better(valued, (cell) => cell.value),
    least = worse(valued, (cell) => cell.value);
  const place = (cell) =>
    [`${AXES[across][0]} ${AXES[across][1](cell.x)}`, up ? `${AXES[up][0]} ${AXES[up][1](cell.y)}` : null]
      .filter(Boolean)
      .join(" and ");
  const figure = (cell) => `${squareWords(cell, measure, 100)}${measure === "tokens_per_s" ? " tok/s" : ""}`;
  const bestOf = d3.max(cells, (cell) => cell.count) > 1 ? " A square shows its best cell." : "";
  const middleOf = d3.max(cells, (cell) => cell.runs) > 1 ? " Of several runs it shows the median." : "";
  const several = `${bestOf}${middleOf}`;
  const guess = known.some((cell) => cell.predicted) ? " Striped, with ~, is predicted and not run." : "";
  if (valued.length === 1 || best.value === least.value)
    return `${figure(best)} at ${place(best)}.${out}${several}${guess}`;
  const ratio = measure === "tokens_per_s" && least.value > 0 ? best.value / least.value : null;
  const other = `${figure(least)} at ${place(least)}`;
  const times =
    ratio === null
      ? `; the other end is ${other}`
      : ratio < 1.05
        ? `, hardly more than the least, ${other}`
        : `, ${significant(ratio, 2)} times the least, ${other}`;
  return `${measure === "prediction_error" ? "Least" : "Most"} is ${figure(best)} at ${place(best)}${times}.${out}${several}${guess}`;
}

/** Clicking a mark selects its row; the same rows can be reached by keyboard in the table. */
function wireMarks(plot, name, rows) {
  plot.querySelectorAll(`g.${name} > *`).forEach((mark) => {
    const row = rows[mark.__data__];
    if (!row) return;
    mark.rowKey = row.key;
    mark.style.cursor = "pointer";
    mark.addEventListener("click", () => selectRow(row, true));
  });
}

/** Rings around the marks of the row that is selected. */
function markSelected() {
  document.querySelectorAll("#heatmap .target > *, #accuracy .point > *").forEach((mark) => {
    mark.classList.toggle("chosen", mark.rowKey === state.selected?.key);
  });
}
