"use strict";
// Memory by owner, as planned and as it was, under the cap.

/** Bars where there are no details: what the row says was foreseen and taken in all. */
function rowMemory(row) {
  return ["device", "host"]
    .map((place) => {
      const planned = number(row[`predicted_${place}_bytes`]),
        taken = number(row[`${place}_bytes`]),
        cap = number(row[`${place}_cap_bytes`]);
      if (!planned && !taken) return null;
      return {
        place,
        owners: ["in all"],
        planned_bytes: planned ? [planned] : null,
        measured_bytes: taken ? [taken] : null,
        cap_bytes: cap,
        spare_bytes: cap === null ? null : cap - (taken ?? planned),
        unaccounted_bytes: null,
      };
    })
    .filter(Boolean);
}

function drawMemory(row, detail) {
  const question = "Does it fit?";
  if (!detail?.memory?.length && row?.foreseen?.bars) {
    drawForeseenMemory(row.foreseen);
    return;
  }
  const bars = detail?.memory?.length ? detail.memory : row ? rowMemory(row) : [];
  if (!bars.length) {
    const why =
      row?.state === "oom"
        ? `No: ${rowName(row)} went out of memory${row.reason ? ` (${cut(row.reason, 200)})` : ""}. `
        : "";
    fill(
      "memory",
      question,
      `${why}${row?.run || why ? "What each owner takes is not known: a run that ends is measured by owner (`flopwise train plan.toml`)." : noDetail(row, "is no memory to show")}`,
    );
    return;
  }
  const curve = detail?.memory_over_time?.length ? memoryCurve(detail) : [];
  fill("memory", question, memorySentence(row, bars), ...bars.map(memoryBar), memoryTable(bars), ...curve);
}

/** Bytes over time; memory stays as it is until the next change. */
function memoryCurve(detail) {
  const base = { x: "0", y: "1", curve: "step-after" };
  const plot = Plot.plot({
    width: widthOf("memory"),
    height: 130,
    marginLeft: 68,
    style: PLOT_STYLE,
    x: { label: null, ticks: 4, tickFormat: (value) => secondsWords(value) },
    y: { label: null, ticks: 3, grid: true, zero: true, tickFormat: (value) => (value ? bytesWords(value) : "0") },
    marks: [
      Plot.areaY(detail.memory_over_time, { ...base, fill: "var(--c0)", fillOpacity: 0.3 }),
      Plot.lineY(detail.memory_over_time, { ...base, stroke: "var(--c0)" }),
    ],
  });
  return [
    make("h4", {}, "Over time"),
    make("p", { class: "faint" }, detail.memory_words),
    make("div", { class: "plot" }, described(plot, detail.memory_words)),
  ];
}

function taken(bar) {
  return d3.sum(bar.measured_bytes ?? bar.planned_bytes);
}

function memorySentence(row, bars) {
  const over = bars.find((bar) => bar.cap_bytes && taken(bar) > bar.cap_bytes);
  const parts = bars.map(
    (bar) => `${bytesWords(taken(bar))} on the ${bar.place}${bar.cap_bytes ? ` of ${capWords(bar.cap_bytes)}` : ""}`,
  );
  const verb = bars.some((bar) => bar.measured_bytes) ? "takes" : "is planned to take";
  const spare = bars
    .filter((bar) => bar.spare_bytes > 0)
    .map((bar) => `${bytesWords(bar.spare_bytes)} of ${bar.place} memory`);
  const first =
    row.state === "oom"
      ? "No: it went out of memory"
      : over
        ? `No: the ${over.place} is over its cap`
        : row.state === "ok"
          ? "Yes"
          : row.predicted_fits === false
            ? "No"
            : "As planned, yes";
  const stray = d3.sum(bars, (bar) => Math.max(0, bar.unaccounted_bytes ?? 0));
  const whose = bars.some((bar) => bar.unaccounted_bytes !== null)
    ? stray
      ? ` ${bytesWords(stray)} is unaccounted for.`
      : " Nothing is unaccounted for."
    : "";
  return `${first}. It ${verb} ${listWords(parts)}${spare.length && !over && row.state !== "oom" ? `; ${listWords(spare)} ${spare.length > 1 ? "are" : "is"} spare` : ""}.${whose}`;
}

function memoryBar(bar) {
  const width = widthOf("memory"),
    sides = [
      ["planned", bar.planned_bytes],
      ["measured", bar.measured_bytes],
    ].filter(([, sizes]) => sizes && d3.sum(sizes) > 0);
  const most = d3.max(sides, ([, sizes]) => d3.sum(sizes)),
    cap = bar.cap_bytes;
  const isNear = cap !== null && cap < 6 * most,
    end = isNear ? Math.max(cap, most) * 1.04 : most * 1.08,
    isSmall = isNear && cap < 0.25 * end;
  const pieces = sides.flatMap(([side, sizes]) => {
    let begin = 0;
    return sizes
      .map((size, place) => {
        const piece = { side, owner: bar.owners[place], size, from: begin, to: begin + Math.max(0, size), place };
        begin = piece.to;
        return piece;
      })
      .filter((piece) => piece.to > piece.from);
  });
  const spare = isNear
    ? sides.map(([side, sizes]) => ({ side, from: d3.sum(sizes), to: cap })).filter((piece) => piece.to > piece.from)
    : [];
  const divisor = 1024 ** Math.max(0, Math.floor(Math.log(most) / Math.log(1024))),
    unit = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][Math.round(Math.log(divisor) / Math.log(1024))];
  const plot = Plot.plot({
    width,
    height: 44 + 30 * sides.length,
    marginLeft: 68,
    marginRight: 10,
    marginTop: 18,
    marginBottom: 26,
    style: PLOT_STYLE,
    x: {
      domain: [0, end],
      label: null,
      ticks: d3.ticks(0, end / divisor, width < 420 ? 4 : 6).map((tick) => tick * divisor),
      tickFormat: (value) => `${value / divisor}${value ? ` ${unit}` : ""}`,
    },
    y: { domain: sides.map(([side]) => side), label: null, tickSize: 0, padding: 0.18 },
    marks: [
      Plot.barX(spare, {
        x1: "from",
        x2: "to",
        y: "side",
        fill: "none",
        stroke: "var(--faint)",
        strokeDasharray: "3,3",
        strokeOpacity: 0.7,
        className: "spare",
        title: (piece) => `spare: ${bytesWords(piece.to - piece.from)}`,
      }),
      Plot.barX(pieces, {
        x1: "from",
        x2: "to",
        y: "side",
        fill: (piece) => ownerColour(piece.owner, piece.place),
        className: "owner",
        insetRight: 0.6,
        title: (piece) => `${piece.owner}: ${bytesWords(piece.size)} ${piece.side}`,
      }),
      ...(isNear
        ? [
            Plot.ruleX([cap], { stroke: "var(--bad)", strokeWidth: 2 }),
            Plot.text([cap], {
              x: (value) => value,
              text: () => `cap ${capWords(cap)}`,
              frameAnchor: "top",
              // A small cap stands at the left, where the bar's own name is.
              textAnchor: isSmall ? "start" : "end",
              dy: -14,
              dx: isSmall ? 14 : 6,
              fill: "var(--bad)",
              fontWeight: 600,
            }),
          ]
        : []),
      Plot.text([bar], {
        text: () => `${bar.place}${cap !== null && !isNear ? ` · cap ${capWords(cap)}, far beyond` : ""}`,
        frameAnchor: "top-left",
        dy: -14,
        dx: -68,
        textAnchor: "start",
        fontWeight: 600,
        fill: "var(--ink)",
      }),
      ...(width > 380
        ? [
            Plot.text(spare.slice(-1), {
              x: (piece) => (piece.from + piece.to) / 2,
              y: "side",
              text: (piece) =>
                (piece.to - piece.from) / end > 0.24 ? `${bytesWords(piece.to - piece.from)} spare` : "",
              fill: "var(--faint)",
            }),
          ]
        : []),
    ],
  });
  described(
    plot,
    `${capital(bar.place)} memory by owner: ${bar.owners.map((owner, place) => `${owner} ${bytesWords((bar.measured_bytes ?? bar.planned_bytes)[place])}`).join(", ")}${cap ? `; cap ${capWords(cap)}` : ""}.`,
  );
  return make("div", { class: "plot" }, plot);
}

function memoryTable(bars) {
  const owners = [...new Set(bars.flatMap((bar) => bar.owners))].sort(
    (left, right) => (left === "unaccounted") - (right === "unaccounted"),
  );
  const head = make(
    "tr",
    {},
    make("th", { scope: "col" }, "owner"),
    bars.flatMap((bar) => [
      make("th", { scope: "col", class: "number" }, `${bar.place} planned`),
      bar.measured_bytes ? make("th", { scope: "col", class: "number" }, "measured") : null,
    ]),
  );
  const size = (sizes, place) =>
    make("td", { class: "number" }, place < 0 || !sizes ? UNKNOWN : bytesWords(sizes[place]));
  const body = owners.map((owner) =>
    make(
      "tr",
      {},
      make(
        "th",
        { scope: "row" },
        make("i", {
          class: "dot",
          style: `--swatch:${ownerColour(owner, Math.max(0, bars[0].owners.indexOf(owner)))}`,
        }),
        owner,
      ),
      bars.flatMap((bar) => {
        const place = bar.owners.indexOf(owner);
        return [size(bar.planned_bytes, place), bar.measured_bytes ? size(bar.measured_bytes, place) : null];
      }),
    ),
  );
  const total = make(
    "tr",
    { class: "total" },
    make("th", { scope: "row" }, "total"),
    bars.flatMap((bar) => [
      make("td", { class: "number" }, bar.planned_bytes ? bytesWords(d3.sum(bar.planned_bytes)) : UNKNOWN),
      bar.measured_bytes ? make("td", { class: "number" }, bytesWords(d3.sum(bar.measured_bytes))) : null,
    ]),
  );
  return make(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Memory by owner" },
    make("table", { class: "small" }, make("thead", {}, head), make("tbody", {}, body, total)),
  );
}
