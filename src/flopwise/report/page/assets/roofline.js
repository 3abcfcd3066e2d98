"use strict";
// The operators of one step below the roofs of their device.

const ROOFS = {
  memory: ["device memory", "var(--c5)"],
  link: ["link", "var(--c4)"],
  network: ["network", "var(--c3)"],
};
const BOUND_COLOURS = {
  compute: "var(--c0)",
  memory: "var(--c5)",
  link: "var(--c4)",
  network: "var(--c3)",
  overhead: "var(--c1)",
};
const BOUND_NAMES = {
  compute: "bound by compute",
  memory: "bound by device memory",
  link: "bound by the link",
  network: "bound by the network",
  overhead: "under a quarter of its roof: overhead",
};

/** Operators with their work known, what bounds each, and their share of the time. */
function readOperators(operators, roofs) {
  const peak = roofs.find((roof) => roof.kind === "compute")?.per_s,
    bandwidth = roofs.find((roof) => roof.kind === "memory")?.per_s;
  const total = d3.sum(operators.seconds);
  return operators.name.map((name, place) => {
    const seconds = operators.seconds[place],
      flops = operators.flops[place],
      bytes = operators.bytes[place],
      kind = operators.kind[place];
    const computing = peak && flops ? flops / peak : 0,
      moving = bandwidth && bytes ? bytes / bandwidth : 0,
      roof = Math.max(computing, moving);
    let bound = computing >= moving ? "compute" : "memory";
    if (roof / seconds < 0.25) bound = "overhead";
    if (kind === "copy") bound = "link";
    if (kind === "communication") bound = "network";
    return {
      name,
      kind,
      seconds,
      share: seconds / total,
      flops,
      bytes,
      bound,
      ofRoof: roof / seconds,
      intensity: flops / bytes,
      rate: flops / seconds,
      count: operators.count[place],
    };
  });
}

function drawRoofline(row, detail) {
  const question = "What bounds each operator?";
  if (!detail?.operators) {
    fill("roofline", question, noDetail(row, "are no times of operators"));
    return;
  }
  const all = readOperators(detail.operators, detail.roofs),
    peak = detail.roofs.find((roof) => roof.kind === "compute");
  const known = all.filter((each) => each.flops > 0 && each.bytes > 0);
  if (!known.length || !peak) {
    const why = peak
      ? "no operator's FLOPs and bytes are both known"
      : "the device's peak is not known (`flopwise ls` names hardware whose peak is)";
    fill(
      "roofline",
      question,
      `The longest is ${all[0].name} with ${aboutWords(all[0].share)} of the operators' time; there are no roofs to hold it against: ${why}.`,
    );
    return;
  }
  const sentence = rooflineSentence(all, known);
  const width = widthOf("roofline"),
    height = Math.min(400, Math.max(280, width * 0.7));
  const moving = detail.roofs.filter((roof) => roof.kind !== "compute");
  const ridges = moving.filter((roof) => roof.kind === "memory").map((roof) => peak.per_s / roof.per_s);
  const xs = [...known.map((each) => each.intensity), ...ridges.map((ridge) => ridge * 1.2)],
    ys = [...known.map((each) => each.rate), peak.per_s];
  const x = decades(d3.min(xs) / 1.5, d3.max(xs) * 1.5),
    y = [d3.min(ys) / 2, d3.max(ys) * 2.2];
  const lines = moving.map((roof) => ({
    roof,
    points: [x[0], peak.per_s / roof.per_s, x[1]]
      .filter((value) => value >= x[0] && value <= x[1])
      .sort(d3.ascending)
      .map((value) => ({ x: value, y: Math.min(peak.per_s, value * roof.per_s) })),
  }));
  const margins = { left: 54, right: 12, top: 12, bottom: 44 };
  const across = d3.scaleLog(x, [margins.left, width - margins.right]),
    up = d3.scaleLog(y, [height - margins.bottom, margins.top]);
  const radius = (each) => 3.5 + 15 * Math.sqrt(each.share);
  const labels = placeLabels(known, across, up, radius, width);
  const plot = Plot.plot({
    width,
    height,
    marginLeft: margins.left,
    marginRight: margins.right,
    marginTop: margins.top,
    marginBottom: margins.bottom,
    style: PLOT_STYLE,
    x: {
      type: "log",
      domain: x,
      label: "FLOP a byte of device memory",
      labelAnchor: "center",
      labelArrow: "none",
      ticks: decadeTicks(...x),
      tickFormat: tickWords,
      grid: true,
    },
    y: { type: "log", domain: y, label: null, ticks: decadeTicks(...y), tickFormat: tickWords, grid: true },
    r: { type: "identity" },
    marks: [
      Plot.line(
        [
          { x: x[0], y: peak.per_s },
          { x: x[1], y: peak.per_s },
        ],
        { x: "x", y: "y", stroke: "var(--ink)", strokeWidth: 1.6 },
      ),
      ...lines.map(({ roof, points }) =>
        Plot.line(points, {
          x: "x",
          y: "y",
          stroke: ROOFS[roof.kind][1],
          strokeWidth: 1.8,
          strokeDasharray: roof.kind === "memory" ? null : "5,3",
          clip: true,
        }),
      ),
      Plot.text([{ x: x[1], y: peak.per_s }], {
        x: "x",
        y: "y",
        text: () => `${rateWords(peak.per_s, "FLOP/s")} · ${peak.words}`,
        textAnchor: "end",
        dy: -8,
        fill: "var(--ink)",
        stroke: "var(--panel)",
        strokeWidth: 3,
      }),
      Plot.dot(known, {
        x: "intensity",
        y: "rate",
        r: radius,
        fill: (each) => BOUND_COLOURS[each.bound],
        fillOpacity: 0.75,
        stroke: "var(--panel)",
        className: "operator",
        title: operatorTitle,
      }),
      ...labels.map((each) =>
        Plot.text([each], {
          x: "intensity",
          y: "rate",
          text: "label",
          dx: each.dx,
          textAnchor: "start",
          fill: "var(--ink)",
          stroke: "var(--panel)",
          strokeWidth: 3,
          fontSize: 11,
        }),
      ),
    ],
  });
  described(plot, `Roofline: FLOP/s over FLOPs a byte of ${countOf(known.length, "operator")}. ${sentence}`);
  const bounds = [...new Set(known.map((each) => each.bound))].map((bound) => [
    BOUND_COLOURS[bound],
    BOUND_NAMES[bound],
    "dot round",
  ]);
  const roofs = moving.map((roof) => [ROOFS[roof.kind][1], `${roof.words}: ${rateWords(roof.per_s, "B/s")}`, "dash"]);
  const notes = [detail.operators.note, "Size is the share of time."].filter(Boolean).join(" ");
  fill(
    "roofline",
    question,
    sentence,
    make("p", { class: "axis-name" }, "FLOP/s"),
    make("div", { class: "plot" }, plot),
    legend([...bounds, ...roofs]),
    make("p", { class: "faint" }, notes),
  );
}

function decades(low, high) {
  return [10 ** Math.floor(Math.log10(low) + 0.0001), 10 ** Math.ceil(Math.log10(high) - 0.0001)];
}

function operatorTitle(each) {
  return `${each.name} (${each.kind})\n${secondsWords(each.seconds)} a step, ${aboutWords(each.share)} of the operators' time\n${rateWords(each.rate, "FLOP/s")}, ${significant(each.intensity)} FLOP/B\n${aboutWords(each.ofRoof)} of its roof: ${BOUND_NAMES[each.bound]}`;
}

/** Names of the longest operators, where they lie over no other name and within the drawing. */
function placeLabels(known, across, up, radius, width) {
  const taken = [],
    placed = [];
  for (const each of known
    .slice()
    .sort((left, right) => right.seconds - left.seconds)
    .slice(0, 8)) {
    const label = cutMiddle(each.name.replace(/^aten::_*/, ""), 24),
      size = 6.2 * label.length;
    const middle = across(each.intensity),
      y = up(each.rate);
    const fitsRight = middle + radius(each) + 4 + size < width - 8;
    const left = fitsRight ? middle + radius(each) + 4 : middle - radius(each) - 4 - size;
    const box = [left, y - 8, left + size, y + 8];
    if (
      left < 56 ||
      taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])
    )
      continue;
    taken.push(box);
    placed.push({ ...each, label, dx: left - middle });
  }
  return placed;
}

function rooflineSentence(all, known) {
  const total = d3.sum(all, (each) => each.share);
  const shares = d3
    .rollups(
      known,
      (group) => d3.sum(group, (each) => each.share),
      (each) => each.bound,
    )
    .sort((left, right) => right[1] - left[1]);
  const words = shares.map(
    ([bound, share]) =>
      `${aboutWords(share / total)} ${bound === "overhead" ? "is far below its roof" : BOUND_NAMES[bound]}`,
  );
  const unknown = 1 - d3.sum(shares, (pair) => pair[1]) / total;
  const rest = unknown > 0.005 ? ` The FLOPs or bytes of the other ${aboutWords(unknown)} are not known.` : "";
  const first = all[0];
  return `Of the operators' time, ${listWords(words)}.${rest} The longest is ${cut(first.name, 50)} with ${aboutWords(first.share)}${first.flops && first.bytes ? `, at ${aboutWords(first.ofRoof)} of its roof` : ""}.`;
}
