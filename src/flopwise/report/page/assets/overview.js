"use strict";
// What the rows say together: cards, heat map, accuracy. All of it follows the filters.

// -- cards -----------------------------------------------------------------------------------------------------------

function card(label, figure, beneath, style = "") {
  return make(
    "div",
    { class: "card" },
    make("span", { class: "label" }, label),
    make("b", { class: style }, figure),
    make("span", { class: "faint" }, beneath),
  );
}

function drawCards(rows) {
  byId("cards").replaceChildren(bestCard(rows), fitsCard(rows), errorCard(rows), boundCard(rows));
}

/** Why there is nothing: the filters, where they leave no row. */
function nothing(rows, words) {
  return state.rows.length && !rows.length ? "the filters leave no row" : words;
}

/** Of several models the highest use of the hardware: a small model's tokens are no better than a large one's. */
function bestCard(rows) {
  const known = rows.map((row) => ({ row, ...speed(row) })).filter((each) => each.value !== undefined && (each.predicted || each.row.state === "ok"));
  // What ran stands before what is only foreseen.
  const ran = known.filter((each) => !each.predicted),
    some = ran.length ? ran : known;
  if (!some.length) return card("best speed", UNKNOWN, nothing(rows, "no run has been measured or foreseen yet"));
  const byUse = new Set(some.map((each) => each.row.model)).size > 1 && some.some((each) => mfuOf(each.row) !== null);
  const best = d3.greatest(some, (each) => (byUse ? mfuOf(each.row) ?? 0 : each.value));
  const use = mfuOf(best.row),
    kind = best.predicted ? " predicted" : "";
  const figure = byUse ? make("span", {}, shareWords(use), make("small", {}, kind)) : make("span", {}, `${speedWords(best.value)} `, make("small", {}, `tok/s${kind}`));
  const beside = byUse ? ` · ${speedWords(best.value)} tok/s` : use !== null ? ` · ${shareWords(use)} MFU` : "";
  const link = make("button", { class: "link", type: "button", click: () => selectRow(best.row, true) }, rowName(best.row));
  return card(byUse ? "best MFU" : "best speed", figure, make("span", {}, link, ` · ${cut(plainWords(best.row.model), 30)}${beside}`));
}

/** Whether a row's set-up fits: as it ran, else as foreseen; null where nobody knows. */
function fits(row) {
  if (row.state === "ok") return true;
  if (row.state === "oom") return false;
  // What broke says nothing of memory, whatever was foreseen, unless it was not to fit.
  if (!["planned", "running"].includes(row.state)) return row.predicted_fits === false ? false : null;
  return typeof row.predicted_fits === "boolean" ? row.predicted_fits : null;
}

function fitsCard(rows) {
  const known = rows.map(fits).filter((answer) => answer !== null);
  const fitting = known.filter(Boolean).length;
  const others = d3
    .rollups(
      rows.filter((row) => row.state !== "ok"),
      (group) => group.length,
      (row) => row.state,
    )
    .map(([name, count]) => `${countWords(count)} ${stateWord(name)}`);
  const beneath = others.length ? others.join(" · ") : known.length ? "all of them ran" : nothing(rows, "no run has ended yet");
  const figure = known.length
    ? make("span", {}, `${countWords(fitting)} `, make("small", {}, `of ${countWords(known.length)}`))
    : UNKNOWN;
  return card("fits", figure, beneath, known.length && fitting === known.length && !others.length ? "good" : "");
}

function errorCard(rows) {
  const errors = rows
    .filter(isMeasured)
    .map(predictionError)
    .filter((error) => error !== null);
  if (!errors.length) return card("prediction is off by", UNKNOWN, nothing(rows, "nothing is both predicted and measured"));
  const middle = d3.median(errors, Math.abs);
  const furthest = errors.reduce((most, error) => (Math.abs(error) > Math.abs(most) ? error : most), 0);
  return card(
    "prediction is off by",
    errorWords(middle).replace("+", ""),
    `median of ${countOf(errors.length, "run")} · at most ${errorWords(furthest)}`,
    // Nobody plans for the processor that a small model is tried on.
    middle <= 0.1 ? "good" : rows.every((row) => row.hardware === "this-cpu") ? "" : "warn",
  );
}

/** Of what ran; of what is foreseen only where nothing has. */
function boundCard(all) {
  const known = all.filter((row) => row.bound),
    ran = known.filter((row) => row.run),
    rows = ran.length ? ran : known;
  const bounds = d3.rollups(
    rows,
    (group) => group.length,
    (row) => cut(boundWords(row.bound), 26),
  );
  bounds.sort((left, right) => right[1] - left[1]);
  if (!bounds.length) return card("bound by", UNKNOWN, withCode(nothing(all, "profile a run to know: `flopwise train --profile`")));
  const total = d3.sum(bounds, (pair) => pair[1]);
  const rest = bounds.slice(1, 3).map(([word, count]) => `${word} ${countWords(count)}`);
  const beneath = `${countWords(bounds[0][1])} of ${countOf(total, ran.length ? "run" : "prediction")}${rest.length ? ` · ${rest.join(" · ")}` : ""}`;
  return card("bound by", bounds[0][0], beneath);
}

// -- accuracy --------------------------------------------------------------------------------------------------------

const MOST_POINTS = 600;
const BAND = 0.1;
/** What is printed as 10.0 % counts as within it, however the last bit fell. */
function isWithin(error) {
  return Math.abs(error) <= BAND + 1e-9;
}

/** All that are furthest off, and an even choice of the others. */
function thinned(points) {
  if (points.length <= MOST_POINTS) return points;
  const sorted = points.slice().sort((left, right) => Math.abs(right.error) - Math.abs(left.error));
  const kept = sorted.slice(0, MOST_POINTS / 3),
    rest = sorted.slice(MOST_POINTS / 3);
  const stride = rest.length / (MOST_POINTS - kept.length);
  for (let place = 0; place < rest.length; place += stride) kept.push(rest[Math.floor(place)]);
  return kept;
}

function accuracySentence(points) {
  const within = points.filter((point) => isWithin(point.error)).length;
  const middle = errorWords(d3.median(points, (point) => Math.abs(point.error))).replace("+", "");
  if (points.length === 1) return `The one run that is predicted and measured is off by ${middle}.`;
  const hopeful = d3.mean(points, (point) => point.error > 0);
  const lean = hopeful > 0.65 ? " It is mostly too hopeful." : hopeful < 0.35 ? " It is mostly too careful." : "";
  const count =
    within === points.length ? `All ${countWords(within)}` : `${countWords(within)} of ${countWords(points.length)}`;
  return `${count} runs are within 10 % of what was predicted; half are within ${middle}.${lean}`;
}

function drawAccuracy(rows) {
  const question = "How good is the prediction?";
  const points = rows
    .filter(isMeasured)
    .map((row) => ({
      row,
      predicted: number(row.predicted_tokens_per_s),
      measured: row.tokens_per_s,
      error: predictionError(row),
    }))
    .filter((point) => point.predicted > 0 && point.measured > 0 && point.error !== null);
  if (!points.length) {
    fill(
      "accuracy",
      question,
      rows.length || !state.rows.length ? "No row is both predicted and measured. Train with a plan, which predicts itself: `flopwise plan MODEL -w plan.toml`, then `flopwise train plan.toml`."
        : "The filters leave no row.",
    );
    return;
  }
  const sentence = accuracySentence(points);
  const drawn = thinned(points);
  const all = points.flatMap((point) => [point.predicted, point.measured]);
  const low = d3.min(all) / 1.25,
    top = d3.max(all) * 1.25,
    width = widthOf("accuracy");
  const line = [low, top].map((value) => ({ x: value, low: value / (1 + BAND), high: value / (1 - BAND) }));
  const isWide = top / low > 8;
  const ticks = isWide ? decadeTicks(low, top) : 5;
  const axis = (label) => ({
    type: isWide ? "log" : "linear",
    domain: [low, top],
    label,
    labelAnchor: "center",
    labelArrow: "none",
    grid: true,
    ticks,
    tickFormat: tickWords,
  });
  const plot = Plot.plot({
    width,
    height: Math.min(380, Math.max(260, width * 0.72)),
    marginLeft: 58,
    marginBottom: 44,
    marginTop: 10,
    marginRight: 14,
    style: PLOT_STYLE,
    x: axis("predicted tok/s"),
    y: axis("measured tok/s"),
    r: { range: [0, 5] },
    marks: [
      Plot.areaY(line, { x: "x", y1: "low", y2: "high", fill: "var(--good)", fillOpacity: 0.13, clip: true }),
      Plot.line(line, { x: "x", y: "x", stroke: "var(--faint)", strokeDasharray: "4,3", clip: true }),
      Plot.dot(drawn, {
        x: "predicted",
        y: "measured",
        r: drawn.length > 300 ? 3 : 4.5,
        symbol: (point) => (isWithin(point.error) ? "circle" : "triangle"),
        fill: (point) => (isWithin(point.error) ? "var(--c0)" : "var(--c1)"),
        fillOpacity: drawn.length > 300 ? 0.5 : 0.85,
        stroke: "var(--panel)",
        strokeWidth: 0.6,
        className: "point",
        title: (point) =>
          `${rowName(point.row)} · ${runWords(point.row)}\npredicted ${speedWords(point.predicted)}, measured ${speedWords(point.measured)} tok/s (${errorWords(point.error)})`,
      }),
    ],
  });
  wireMarks(
    plot,
    "point",
    drawn.map((point) => point.row),
  );
  described(plot, `Predicted against measured tokens a second. ${sentence}`);
  const entries = [
    ["var(--c0)", "within 10 %", "dot round"],
    ["var(--c1)", "further off", "dot triangle"],
    ["var(--faint)", "as predicted", "dash"],
    ["var(--good-paper)", "± 10 %"],
  ];
  const note =
    drawn.length < points.length
      ? make(
          "p",
          { class: "faint" },
          `${countWords(drawn.length)} of ${countWords(points.length)} points are drawn: all that are furthest off, and an even choice of the others.`,
        )
      : null;
  fill("accuracy", question, sentence, make("div", { class: "plot" }, plot), legend(entries), note);
}

/** `10k`, `0.1`: no digits that say nothing. */
function tickWords(value) {
  if (value < 1) return String(Number(value.toPrecision(3)));
  return rateWords(value, "")
    .replace(/(\.\d*?)0+(?=\D|$)/, "$1")
    .replace(/\.(?=\D|$)/, "")
    .replace(FIRM, "");
}

/** Ticks of a logarithmic axis: powers of ten, and 2 and 5 between them where there are few. */
function decadeTicks(low, high) {
  const powers = d3.range(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)) + 1);
  const steps = high / low < 200 ? [1, 2, 5] : [1],
    stride = Math.ceil(powers.length / 9);
  const ticks = powers
    .filter((_, place) => place % stride === 0)
    .flatMap((power) => steps.map((step) => step * 10 ** power));
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}
