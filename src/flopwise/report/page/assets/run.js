"use strict";
// The run that is selected: where its time went, and its steps.

function drawRun() {
  const row = state.selected,
    detail = row?.run ? state.details.get(row.run) : null;
  byId("run-title").textContent = row ? (state.page.of_profiles ? rowName(row) : capital(rowName(row))) : "One run";
  const about = byId("run-about");
  about.replaceChildren();
  if (row) {
    about.append(
      make("span", { class: `state ${stateClass(row.state)}` }, stateWords(row.state)),
      ` · ${runWords(row)}`,
    );
    const found = speed(row);
    if (found) about.append(` · ${speedWords(found.value)} tok/s${found.predicted ? " predicted" : ""}`);
    if (number(row.mfu) !== null) about.append(` · ${shareWords(row.mfu)} MFU`);
    if (row.started) about.append(` · ${whenWords(row.started)}`);
    if (row.reason) about.append(make("span", { class: "reason" }, cut(row.reason, 600)));
  }
  document.title = `${row && state.hash.run ? `${rowName(row)} · ` : ""}${state.page.title} · flopwise`;
  drawProgress(row);
  showPanels(row, detail);
  drawMemory(row, detail);
  drawProfile(row, detail);
  drawTimeline(row, detail);
  drawRoofline(row, detail);
  drawSteps(row, detail);
  drawTables(detail);
  drawAbout(row, detail);
}

// -- tables of words -------------------------------------------------------------------------------------------------

/** Of profiles: what follows from them together, and how their figures differ. No sweep is there to look across. */
function drawCompared(page) {
  for (const id of ["answer", "across", "steps"]) byId(id).hidden = Boolean(page.of_profiles);
  const isShown = Boolean(page.of_profiles && page.tables?.length);
  byId("compared").hidden = !isShown;
  if (isShown)
    fill("changes", "What changes from one to the next?", page.said.filter(Boolean).join(" "), ...(page.lines ?? []).map((line) => make("div", { class: "plot" }, fittedLine(line, widthOf("changes")))), ...page.tables.map(wordTable));
}

/** Device times over the batch with the line through them: dotted where it leaves small batches out. */
function fittedLine(line, width) {
  const points = line.points.map(([batch, seconds, name]) => ({ batch, seconds, name })),
    most = d3.max(points, (point) => point.batch),
    at = (batch) => ({ batch, seconds: line.fixed_s + line.per_sequence_s * batch });
  const plot = Plot.plot({
    width: Math.min(width, 900),
    height: 300,
    marginLeft: 68,
    marginBottom: 42,
    style: PLOT_STYLE,
    x: { label: "sequences of a batch", labelAnchor: "center", labelArrow: "none", zero: true, domain: [0, 1.04 * most], ticks: 8 },
    y: { label: "device time", labelArrow: "none", grid: true, ticks: 5, domain: [0, 1.06 * d3.max([...points, at(most)], (point) => point.seconds)], tickFormat: (value) => (value ? secondsWords(value) : "0") },
    marks: [
      Plot.line([at(0), at(line.least_batch)], { x: "batch", y: "seconds", stroke: "var(--c0)", strokeDasharray: "2,4", strokeWidth: 2 }),
      Plot.line([at(line.least_batch), at(most)], { x: "batch", y: "seconds", stroke: "var(--c0)", strokeWidth: 2 }),
      Plot.dot(points, { x: "batch", y: "seconds", r: 4.5, fill: "var(--c1)", stroke: "var(--panel)", title: (point) => `${point.name}: ${secondsWords(point.seconds)}` }),
    ],
  });
  return described(plot, line.words);
}

function drawTables(detail) {
  const tables = detail?.tables ?? [];
  byId("tables").hidden = !tables.length;
  if (tables.length) fill("tables", "What are the figures?", "Each with where it comes from.", ...tables.map(wordTable));
  // A profile that does not know a thing has no run that would tell.
  if (state.page.of_profiles)
    for (const id of ["memory", "timeline", "roofline"]) byId(id).hidden = byId(id).classList.contains("empty");
}

function wordTable(table) {
  const cell = (tag, words, place) =>
    make(tag, { class: table.left.includes(table.columns[place]) ? "left" : "number" }, words);
  return make(
    "div",
    { class: "words" },
    table.title ? make("h4", {}, table.title) : null,
    scrolling(
      `${table.title || "Figures"}: ${table.columns.slice(0, 2).join(", ")}`,
      make(
        "table",
        { class: "small" },
        make("thead", {}, make("tr", {}, table.columns.map((name, place) => cell("th", name, place)))),
        make("tbody", {}, table.rows.map((row) => make("tr", {}, row.map((words, place) => cell("td", words, place))))),
      ),
    ),
    table.note ? make("p", { class: "faint" }, table.note) : null,
  );
}

// -- where the time went ---------------------------------------------------------------------------------------------

const CLASS_COLOURS = {
  gemm: 0,
  attention: 3,
  norm: 5,
  pointwise: 2,
  optimizer: 4,
  other: 7,
  communication: 6,
  copy: 1,
};
function classColour(name) {
  return name === "idle" ? "var(--line)" : COLOURS[CLASS_COLOURS[name] ?? 7];
}

function drawProfile(row, detail) {
  const question = "Where did the time go?";
  if (!row?.run && row?.foreseen?.words) {
    drawForeseenStep(row, row.foreseen);
    return;
  }
  if (!detail?.is_profiled) {
    fill("profile", question, noDetail(row, "is no telling where the time went"));
    return;
  }
  const parts = [];
  if (detail.classes.length)
    parts.push(shareStack(detail.classes, detail.span_s), shareBars(detail.classes, classColour));
  const busy = detail.engines.filter((each) => each.seconds > 0);
  if (busy.length)
    parts.push(
      make("h4", {}, "Engines, which run beside each other"),
      shareBars(busy, () => "var(--accent)"),
    );
  if (detail.idle.length)
    parts.push(
      make("h4", {}, "Why it was idle"),
      shareBars(detail.idle, () => "var(--faint)"),
    );
  if (detail.traffic.length)
    parts.push(
      make("h4", {}, "Traffic and use, of a step"),
      make(
        "dl",
        { class: "figures" },
        detail.traffic.map(([what, figure, meaning]) =>
          make("div", { title: meaning }, make("dt", {}, what), make("dd", {}, figure)),
        ),
      ),
    );
  if (detail.verdicts.length) parts.push(make("h4", {}, "What limits it"), verdictList(detail.verdicts));
  if (detail.notes.length)
    parts.push(
      make(
        "details",
        {},
        make("summary", {}, `${countOf(detail.notes.length, "note")} on how this was measured`),
        make(
          "ul",
          {},
          detail.notes.map((note) => make("li", { class: "faint" }, cut(note, 400))),
        ),
      ),
    );
  fill("profile", question, profileSentence(detail), ...parts);
}

function profileSentence(detail) {
  const ordered = detail.classes.filter((each) => each.share !== null).sort((left, right) => right.share - left.share);
  const top = ordered.slice(0, 3).map((each) => `${aboutWords(each.share)} ${each.name}`);
  const limits = detail.verdicts.filter((verdict) => !verdict.is_invalid);
  const verdict = limits.length ? ` First verdict: ${limits[0].title}.` : " No rule finds a limit.";
  if (!top.length) return `${detail.why.split(". ").slice(0, 2).join(". ")}`;
  const of = detail.span_s ? ` of the device's ${secondsWords(detail.span_s)}` : " of the device's time";
  return `${listWords(top)}${of}.${verdict}`;
}

function shareStack(rows, whole) {
  // What no class is charged for stays empty.
  const total = Math.max(
    whole ?? 0,
    d3.sum(rows, (each) => each.seconds),
  );
  const bar = make("div", {
    class: "stack",
    role: "img",
    "aria-label": `Shares: ${rows.map((each) => `${each.name} ${each.share === null ? "" : aboutWords(each.share)}`).join(", ")}`,
  });
  for (const each of rows) {
    if (each.seconds > 0)
      bar.append(
        make("span", {
          style: `flex:${each.seconds / total} 0 0;background:${classColour(each.name)}`,
          title: `${each.name}: ${secondsWords(each.seconds)}`,
        }),
      );
  }
  return bar;
}

function shareBars(rows, colour) {
  const list = make("ul", { class: "shares" });
  for (const each of rows) {
    const share = Math.min(1, Math.max(0, each.share ?? 0));
    list.append(
      make(
        "li",
        {},
        make("span", { class: "name" }, each.name),
        make("span", { class: "number" }, secondsWords(each.seconds)),
        make("span", { class: "number" }, each.share === null ? UNKNOWN : aboutWords(each.share)),
        make(
          "span",
          { class: "track", "aria-hidden": "true" },
          make("span", {
            style: `width:${(100 * share).toFixed(2)}%;background:${colour(each.name) === "var(--line)" ? "var(--faint)" : colour(each.name)}`,
          }),
        ),
      ),
    );
  }
  return list;
}

function verdictList(verdicts) {
  return make(
    "ol",
    { class: "verdicts" },
    verdicts.map((verdict) =>
      make(
        "li",
        {},
        make("b", { class: verdict.is_invalid ? "warn" : "" }, verdict.title),
        verdict.share === null ? null : ` · up to ${verdict.stake} of the time`,
        make("span", { class: "faint" }, verdict.evidence),
        verdict.advice ? make("span", {}, `→ ${verdict.advice}`) : null,
      ),
    ),
  );
}

// -- steps -----------------------------------------------------------------------------------------------------------

function drawSteps(row, detail) {
  const question = "Is every step alike?",
    steps = detail?.steps;
  const points = (steps?.step ?? [])
    .map((step, place) => ({
      step,
      seconds: number(steps.step_s[place]),
      predicted: number(steps.predicted_s?.[place]),
      loss: number(steps.loss[place]),
    }))
    .filter((point) => point.seconds !== null);
  if (points.length < 2) {
    fill(
      "steps",
      question,
      !detail
        ? noDetail(row, "are no steps")
        : points.length
          ? "Only one step has been done so far; two or more are drawn."
          : `Run ${row.run} has written down no steps: it ended before the first, or has just begun.`,
    );
    return;
  }
  // One time of a step on the whole page: that of the measurement, where there is one.
  const later = points.length > 4 ? points.slice(2) : points;
  const middle = number(detail.step_s) ?? d3.median(later, (point) => point.seconds),
    spread = number(detail.step_s_p20) !== null ? [detail.step_s_p20, detail.step_s_p80] : [0.2, 0.8].map((share) => d3.quantile(later, share, (point) => point.seconds));
  const isTraced = (point) => detail.traced && point.step >= detail.traced[0] && point.step <= detail.traced[1];
  const longest = d3.greatest(later.filter((point) => !isTraced(point)), (point) => point.seconds) ?? later[0],
    wide = (spread[1] - spread[0]) / middle;
  const traced = detail.traced ? ` ${detail.traced[0] === detail.traced[1] ? `Step ${countWords(detail.traced[0])} was` : `Steps ${countWords(detail.traced[0])} to ${countWords(detail.traced[1])} were`} traced, which slows them down; they do not count.` : "";
  const losses = points.filter((point) => point.loss !== null);
  const column = (name, at, as) => (steps[at] ?? []).map((step, place) => ({ step, [as]: number(steps[name]?.[place]) })).filter((point) => point[as] !== null);
  const evaluated = column("eval_loss", "eval_step", "loss"),
    rates = column("learning_rate", "step", "rate");
  const trend =
    losses.length > 1
      ? ` The loss goes from ${significant(losses[0].loss, 4)} to ${significant(losses[losses.length - 1].loss, 4)}.`
      : "";
  const answer = wide < 0.05 ? "Nearly" : wide < 0.2 ? "Roughly" : "No";
  const sentence = `${answer}: a step takes ${secondsWords(middle)} (p20–p80 ${secondsWords(spread[0])}–${secondsWords(spread[1])}), at most ${secondsWords(longest.seconds)} in step ${countWords(longest.step)}.${traced}${trend}`;
  const width = widthOf("steps"),
    cap = Math.max(d3.quantile(points, 0.98, (point) => point.seconds) * 1.3, middle * 1.4);
  const base = { width, marginLeft: 64, marginRight: 12, style: PLOT_STYLE };
  const ticks = width < 420 ? 4 : 7,
    whole = (value) => (Number.isInteger(value) ? countWords(value) : "");
  const times = Plot.plot({
    ...base,
    height: 170,
    marginBottom: losses.length > 1 ? 22 : 40,
    x: {
      label: losses.length > 1 ? null : "step",
      ticks,
      tickFormat: whole,
      labelAnchor: "center",
      labelArrow: "none",
    },
    y: {
      domain: [0, cap],
      label: "time",
      labelArrow: "none",
      ticks: 4,
      grid: true,
      tickFormat: (value) => (value ? secondsWords(value) : "0"),
      clamp: true,
    },
    marks: [
      Plot.line(
        points.filter((point) => point.predicted !== null),
        { x: "step", y: "predicted", stroke: "var(--faint)", strokeDasharray: "4,3" },
      ),
      Plot.line(points, { x: "step", y: "seconds", stroke: "var(--c0)", strokeWidth: 1.6 }),
      points.length < 80
        ? Plot.dot(points, {
            x: "step",
            y: "seconds",
            r: 2.5,
            fill: "var(--c0)",
            className: "step",
            title: (point) => `step ${point.step}: ${secondsWords(point.seconds)}`,
          })
        : null,
    ].filter(Boolean),
  });
  described(times, `Seconds of ${countOf(points.length, "step")}. ${sentence}`);
  const parts = [make("div", { class: "plot" }, times)];
  if (losses.length > 1) {
    const loss = Plot.plot({
      ...base,
      height: 190,
      marginBottom: rates.length > 1 ? 22 : 40,
      x: { label: rates.length > 1 ? null : "step", ticks, tickFormat: whole, labelAnchor: "center", labelArrow: "none" },
      y: { label: "loss", labelArrow: "none", ticks: 4, grid: true, nice: true },
      marks: [
        // Many steps are noisy: their mean over a twentieth of the run is what one looks for.
        Plot.line(losses, { x: "step", y: "loss", stroke: "var(--c3)", strokeWidth: losses.length > 60 ? 0.8 : 1.6, strokeOpacity: losses.length > 60 ? 0.4 : 1 }),
        losses.length > 60 ? Plot.line(losses, Plot.windowY({ k: Math.ceil(losses.length / 20), x: "step", y: "loss", stroke: "var(--c3)", strokeWidth: 2 })) : null,
        Plot.dot(evaluated, { x: "step", y: "loss", r: 4.5, fill: "var(--c2)", stroke: "var(--panel)", title: (point) => `evaluation after step ${countWords(point.step)}: ${significant(point.loss, 4)}` }),
      ].filter(Boolean),
    });
    parts.push(make("div", { class: "plot" }, described(loss, `Loss over ${countOf(losses.length, "step")}.${trend}`)));
  }
  if (rates.length > 1) {
    const curve = Plot.plot({
      ...base,
      height: 100,
      marginBottom: 40,
      x: { label: "step", ticks, tickFormat: whole, labelAnchor: "center", labelArrow: "none" },
      y: { label: "learning rate", labelArrow: "none", ticks: 2, grid: true, zero: true, tickFormat: (value) => (value ? value.toExponential(0) : "0") },
      marks: [Plot.line(rates, { x: "step", y: "rate", stroke: "var(--c4)", strokeWidth: 1.6 })],
    });
    parts.push(make("div", { class: "plot" }, described(curve, "Learning rate over the steps.")));
  }
  const entries = [
    ["var(--c0)", "time of a step", "dash"],
    points.some((point) => point.predicted !== null) ? ["var(--faint)", "predicted", "dash"] : null,
    losses.length > 1 ? ["var(--c3)", "loss", "dash"] : null,
    evaluated.length ? ["var(--c2)", "loss of the evaluation", "dot round"] : null,
    rates.length > 1 ? ["var(--c4)", "learning rate", "dash"] : null,
  ].filter(Boolean);
  fill("steps", question, sentence, ...parts, legend(entries));
}
