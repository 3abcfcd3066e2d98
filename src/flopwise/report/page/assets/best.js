"use strict";
// Which set-up is best, of each model on each hardware: what ran and what is foreseen stand beside each other, and are
// never ranked with one another.

const GROUPED = ["model", "hardware", "devices", "sequence_tokens"];
const MOST_GROUPS = 16;

/** The best of each model × hardware × devices × sequence, measured and predicted apart; the fastest model first. */
function bestGroups(rows) {
  const known = rows.map((row) => ({ row, found: speed(row) })).filter(({ row, found }) => found && (found.predicted || row.state === "ok"));
  const groups = d3.groups(known, ({ row }) => JSON.stringify(GROUPED.map((name) => row[name])));
  return groups.map(([, some]) => {
    const of = (predicted) => d3.greatest(some.filter(({ found }) => found.predicted === predicted), ({ found }) => found.value) ?? null;
    const ran = of(false),
      foreseen = of(true);
    return { row: (ran ?? foreseen).row, best: ran ?? foreseen, ran, foreseen, count: some.length };
  });
}

/** Groups in the order of models, then from the highest use of the hardware. */
function orderedGroups(groups) {
  // FLOPs of a token tell the size of a model that only was foreseen.
  const size = ({ row }) => number(row.n_params) ?? (row.foreseen?.model_flops ? row.foreseen.model_flops / row.foreseen.batch_tokens / 6 : Infinity);
  return groups.slice().sort(
    (left, right) =>
      d3.ascending(size(left), size(right)) ||
      d3.ascending(String(left.row.model), String(right.row.model)) ||
      d3.descending(left.best.found.value / (left.row.devices || 1), right.best.found.value / (right.row.devices || 1)),
  );
}

function groupWords(row) {
  return [plainWords(row.model), `${row.devices > 1 ? `${countWords(row.devices)} × ` : ""}${plainWords(row.hardware)}`, row.sequence_tokens ? `sequence ${countWords(row.sequence_tokens)}` : ""].filter(Boolean).join(" · ");
}

/** What of a set-up was chosen within its group. */
function chosenWords(row) {
  const parts = [
    row.batch_sequences ? `batch ${countWords(row.batch_sequences)}` : null,
    row.micro_batch_sequences ? `micro ${countWords(row.micro_batch_sequences)}` : null,
    row.precision,
    row.recompute && row.recompute !== "none" ? `recompute ${row.recompute}` : null,
    row.device_cap_bytes ? `device ${capWords(row.device_cap_bytes)}` : null,
    row.host_cap_bytes ? `host ${capWords(row.host_cap_bytes)}` : null,
  ];
  return parts.filter(Boolean).map((part) => cut(String(part), 32)).join(" · ");
}

/** A figure with the ends between which it lies, on the scale of its model's. */
function whisker({ row, found }, scale) {
  const width = 150,
    svg = drawing(width, 22),
    x = (value) => Math.min(width - 5, Math.max(5, scale(value / (row.devices || 1))));
  svg.attr("aria-hidden", "true");
  svg.append("line").attr("x1", 5).attr("x2", width - 5).attr("y1", 11).attr("y2", 11).attr("stroke", "var(--line)");
  if (found.low !== null && found.high !== null) {
    svg.append("line").attr("x1", x(found.low)).attr("x2", x(found.high)).attr("y1", 11).attr("y2", 11).attr("stroke", "var(--c0)").attr("stroke-width", 3).attr("stroke-opacity", 0.55);
    for (const end of [found.low, found.high])
      svg.append("line").attr("x1", x(end)).attr("x2", x(end)).attr("y1", 6).attr("y2", 16).attr("stroke", "var(--c0)").attr("stroke-width", 1.5);
  }
  svg.append("circle").attr("cx", x(found.value)).attr("cy", 11).attr("r", 4.5).attr("fill", found.predicted ? "var(--panel)" : "var(--c0)").attr("stroke", "var(--c0)").attr("stroke-width", 2);
  return svg.node();
}

/** The command that goes on from a group: with words of the catalogue, or with the run's number. */
function nextCommand(group) {
  const { row } = group.best;
  // Of a file's rows nobody knows where the runs are.
  if (group.ran && row.run && (LIVE || state.details.has(row.run))) return { words: `flopwise why ${row.run}`, why: "what limits it" };
  const isKnown = state.page.known?.models?.includes(row.model) && state.page.known?.hardware?.includes(row.hardware);
  if (!isKnown) return null;
  const devices = row.devices > 1 ? ` --gpus ${row.devices}` : "",
    seq = row.sequence_tokens ? ` --seq ${row.sequence_tokens}` : "",
    batch = row.batch_sequences ? ` --batch ${row.batch_sequences}` : "";
  return { words: `flopwise plan ${row.model} --on ${row.hardware}${devices}${seq}${batch} -w plan.toml`, why: group.ran ? "a plan for it" : "the plan to train" };
}

/** Of each model on each hardware the group that uses it best: what of many to begin with. */
function recommended(groups) {
  const use = (group) => mfuOf(group.best.row) ?? group.best.found.value / (group.row.devices || 1);
  // What ran comes before what is foreseen.
  const best = d3.rollups(groups, (some) => d3.greatest(some.some((group) => group.ran) ? some.filter((group) => group.ran) : some, use), (group) => `${group.row.model}\n${group.row.hardware}`);
  return best.map(([, group]) => group);
}

function drawBest(rows) {
  const panel = byId("best"),
    all = orderedGroups(bestGroups(rows));
  panel.hidden = !all.length;
  if (!all.length) return;
  const few = all.length > MOST_GROUPS ? recommended(all) : all,
    shown = state.allGroups ? all : few.slice(0, MOST_GROUPS);
  // Of one device, so that eight and sixty-four of them have a place on the same scale.
  const most = (group) => Math.max(group.best.found.value, group.best.found.high ?? 0) / (group.row.devices || 1);
  const scales = new Map(d3.groups(all, (group) => group.row.model).map(([model, some]) => [model, d3.scaleLinear([0, d3.max(some, most) || 1], [5, 145])]));
  const hasMoney = all.some((group) => number(group.best.row.tokens_per_dollar) !== null);
  const heads = [["model, hardware, sequence", ""], ["tok/s", "number"], ["", "left"], [rangeWords(shown), "number"], ["MFU", "number"], ["memory", "number"], ...(hasMoney ? [["tok/$", "number"]] : [])];
  const head = make("tr", {}, heads.map(([words, kind]) => make("th", { scope: "col", class: kind || null }, words || make("span", { class: "hidden" }, "range"))));
  const lines = (group) => {
    const { row, found } = group.best,
      next = nextCommand(group),
      taken = number(row.device_bytes) ?? number(row.predicted_device_bytes);
    const beside = group.ran && group.foreseen && group.foreseen.found.value > group.ran.found.value ? `; ${rowName(group.foreseen.row)} is foreseen at ${speedWords(group.foreseen.found.value)}` : "";
    return [
      make(
        "tr",
        { class: "first" },
        make("th", { scope: "row" }, make("button", { class: "link", type: "button", click: () => selectRow(row, true) }, groupWords(row))),
        make("td", { class: "number" }, make("b", {}, speedWords(found.value)), found.predicted ? make("span", { class: "faint" }, " predicted") : null),
        make("td", { class: "left" }, whisker(group.best, scales.get(row.model))),
        make("td", { class: "number" }, found.low !== null && found.high !== null ? `${speedWords(found.low)} to ${speedWords(found.high)}` : UNKNOWN),
        make("td", { class: "number" }, shareWords(mfuOf(row))),
        make("td", { class: "number" }, bytesWords(taken)),
        hasMoney ? make("td", { class: "number" }, number(row.tokens_per_dollar) === null ? UNKNOWN : rateWords(row.tokens_per_dollar, "")) : null,
      ),
      make("tr", { class: "second" }, make("td", { colspan: heads.length }, `${chosenWords(row)}${beside}`, next ? [` · ${next.why}: `, make("code", {}, next.words)] : null)),
    ];
  };
  const more = all.length > shown.length ? make("button", { type: "button", class: "chip", click: () => ((state.allGroups = true), drawBest(state.shown)) }, `all ${countWords(all.length)}`) : null;
  const table = make("table", { class: "small best" }, make("thead", {}, head), make("tbody", {}, shown.flatMap(lines)));
  fill("best", "Which set-up is best?", bestSentence(all, shown), scrolling("Best set-ups", table), more ? make("div", { class: "tools" }, more) : null);
}

/** What the ends of a figure are: of measured steps, or of an interval. */
function rangeWords(groups) {
  const kinds = new Set(groups.map((group) => group.best.found.predicted));
  return kinds.size > 1 ? "p20–p80, or 8 of 10" : kinds.has(true) ? "8 of 10 lie in" : "p20–p80";
}

function bestSentence(groups, shown) {
  const models = new Set(groups.map((group) => group.row.model)).size,
    ran = shown.filter((group) => group.ran).length;
  const how = ran === shown.length ? "as measured" : ran ? "as measured where it ran, hollow where it is only predicted" : "as predicted";
  const scale = models > 1 ? " Bars are of one device, on one scale within a model." : "";
  if (groups.length === 1) return `The fastest of ${countOf(groups[0].count, "row")}, ${how}.`;
  if (shown.length < groups.length) return `Of each model on each hardware the number of devices and the sequence that use it best, ${how}.${scale}`;
  return `Of each model on each hardware, with as many devices and as long sequences, the fastest, ${how}.${scale}`;
}
