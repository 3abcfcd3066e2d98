"use strict";
// What every drawing shares: colours from little to much, bars with words in them, time axes, figures saved as files.

/** Colours from little to much, as `report/palette.py` names them. */
const HEAT = Array.from({ length: 9 }, (_, place) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--h${place}`).trim(),
);
const heatAt = d3.piecewise(d3.interpolateRgb, HEAT);
/** The least and the most values, as a share of all, that may lie beyond the ends of the colours. */
const OUTLIERS = 0.05;
/** Colours cover at least this share of the highest value: small differences should not look like large ones. */
const LEAST_SPAN = 0.1;

/** Where colours begin and end: one value far from the others does not make them all one colour. */
function colourRange(values) {
  const sorted = values.filter((value) => number(value) !== null).sort(d3.ascending);
  if (!sorted.length) return [0, 0];
  const high = d3.quantileSorted(sorted, 1 - OUTLIERS);
  return [Math.min(d3.quantileSorted(sorted, OUTLIERS), (1 - LEAST_SPAN) * high), high];
}

/** The colour of a value, and black or white to write on it. */
function heatColour(value, [low, high]) {
  const share = high > low ? (value - low) / (high - low) : 0.5;
  return d3.color(heatAt(Math.min(1, Math.max(0, share)))).formatHex();
}
function inkOn(colour) {
  const { r, g, b } = d3.rgb(colour);
  const [red, green, blue] = [r, g, b].map((part) =>
    part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4,
  );
  const behind = 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05;
  return 1.05 / behind > behind / 0.05 ? "#ffffff" : "#000000";
}

/** The colours with the words of their ends; `≤` and `≥` where values lie beyond. */
function heatLegend(range, values, words) {
  const [low, high] = range;
  const below = d3.min(values) < low ? "≤ " : "",
    above = d3.max(values) > high ? "≥ " : "";
  return make(
    "p",
    { class: "heat-legend" },
    make("span", {}, `${below}${words(low)}`),
    make("span", { class: "ramp", "aria-hidden": "true" }),
    make("span", {}, `${above}${words(high)}`),
  );
}

// -- bars ------------------------------------------------------------------------------------------------------------

const OWNER_COLOURS = {
  "in all": 0,
  "planned in all": 0,
  weights: 0,
  gradients: 1,
  optimizer: 2,
  activations: 3,
  residual: 6,
  stream: 5,
  context: 6,
  head: 4,
  logits: 4,
  workspace: 7,
};
function ownerPlace(owner, place) {
  return OWNER_COLOURS[owner] ?? (place + 4) % 8;
}
function ownerColour(owner, place) {
  return owner === "unaccounted" ? "var(--faint)" : COLOURS[ownerPlace(owner, place)];
}
function ownerInk(owner, place) {
  return owner === "unaccounted" ? "var(--panel)" : `var(--c${ownerPlace(owner, place)}-ink)`;
}

/** About how wide words are, without asking the browser: digits and small letters of the page's 12 px. */
function roughWidth(words, size = 12) {
  return 0.56 * size * words.length;
}

/** Ticks of bytes: round in the unit that the largest needs. */
function byteTicks(end, count) {
  const power = Math.max(0, Math.floor(Math.log(Math.max(1, end)) / Math.log(1024))),
    divisor = 1024 ** power,
    unit = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power];
  return {
    values: d3.ticks(0, end / divisor, count).map((tick) => tick * divisor),
    words: (value) => `${(value / divisor).toLocaleString("en-GB")}${value ? ` ${unit}` : ""}`,
  };
}

/** Memory by owner, a bar for each place, all on one scale: words in the bars, a line at each cap.
 *
 *  `bars`: `{ place, pieces: [{ owner, bytes, words }], cap, capWords }`; a place without a cap has null there.
 */
function memoryBars(bars, width) {
  const left = Math.max(62, ...bars.map((bar) => roughWidth(bar.place) + 14)),
    right = 14,
    lane = 58,
    height = bars.length * lane + 26;
  const used = (bar) => d3.sum(bar.pieces, (piece) => piece.bytes);
  const end = 1.02 * d3.max(bars, (bar) => Math.max(used(bar), bar.cap && bar.cap < 8 * used(bar) ? bar.cap : 0));
  const scale = d3.scaleLinear([0, end || 1], [left, width - right]);
  const svg = drawing(width, height);
  bars.forEach((bar, place) => {
    const top = place * lane + 20;
    svg.append("text").attr("x", 0).attr("y", top + 19).attr("class", "row-name").text(bar.place);
    let begin = 0;
    bar.pieces.forEach((piece, number) => {
      const x = scale(begin),
        wide = scale(begin + piece.bytes) - x;
      begin += piece.bytes;
      if (wide <= 0) return;
      const group = svg.append("g").attr("class", "owner");
      group.append("title").text(`${piece.owner}: ${piece.words}`);
      group
        .append("rect")
        .attr("x", x)
        .attr("y", top)
        .attr("width", Math.max(0.8, wide - 1))
        .attr("height", 28)
        .attr("fill", ownerColour(piece.owner, number));
      const label = [`${piece.owner} ${piece.words}`, piece.owner, piece.words].find(
        (words) => roughWidth(words) + 8 < wide,
      );
      if (label)
        group
          .append("text")
          .attr("x", x + wide / 2)
          .attr("y", top + 18.5)
          .attr("text-anchor", "middle")
          .style("fill", ownerInk(piece.owner, number))
          .text(label);
    });
    if (bar.cap && bar.cap <= end) capLine(svg, scale(bar.cap), top, `cap ${bar.capWords}`, left, width);
    else if (bar.cap)
      svg
        .append("text")
        .attr("x", width - right)
        .attr("y", top - 5)
        .attr("text-anchor", "end")
        .attr("class", "soft")
        .text(`cap ${bar.capWords}, beyond this scale`);
  });
  const ticks = byteTicks(end || 1, width < 480 ? 3 : 6);
  axisBelow(svg, scale, bars.length * lane + 2, ticks.values, ticks.words, width);
  return svg.node();
}

function capLine(svg, x, top, words, left, width) {
  svg
    .append("line")
    .attr("x1", x)
    .attr("x2", x)
    .attr("y1", top - 4)
    .attr("y2", top + 32)
    .attr("stroke", "var(--bad)")
    .attr("stroke-width", 2);
  const half = roughWidth(words) / 2;
  svg
    .append("text")
    .attr("x", Math.min(width - half - 2, Math.max(left + half, x)))
    .attr("y", top - 7)
    .attr("text-anchor", "middle")
    .attr("class", "cap")
    .text(words);
}

// -- axes ------------------------------------------------------------------------------------------------------------

/** Paper of that size to draw on. */
function drawing(width, height) {
  return d3
    .create("svg")
    .attr("xmlns", "http://www.w3.org/2000/svg")
    .attr("width", width)
    .attr("height", height)
    .attr("viewBox", `0 0 ${width} ${height}`)
    .attr("class", "kit");
}

/** An axis under a drawing: every tick has its label, and none is cut at either end. */
function axisBelow(svg, scale, y, values, words, width) {
  const [from, to] = scale.range();
  const axis = svg.append("g").attr("class", "axis").attr("transform", `translate(0,${y})`);
  axis.append("line").attr("x1", from).attr("x2", to);
  for (const value of values) {
    const x = scale(value),
      label = words(value),
      half = roughWidth(label, 11) / 2;
    axis.append("line").attr("x1", x).attr("x2", x).attr("y2", 4);
    axis
      .append("text")
      .attr("x", Math.min(width - half, Math.max(half, x)))
      .attr("y", 16)
      .attr("text-anchor", "middle")
      .text(label);
  }
}

// -- figures as files ------------------------------------------------------------------------------------------------

const SAVED_STYLES = [
  ...["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity", "stroke-opacity"],
  ...["font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline", "font-variant-numeric"],
];

/** The figures of a panel below each other as one SVG that needs nothing else: colours are written out. */
function figureOf(drawings) {
  const whole = drawing(0, 0).node();
  let width = 0,
    height = 0;
  for (const each of drawings) {
    // What was drawn only to be saved has no place on the page.
    const box = each.isConnected ? each.getBoundingClientRect() : { width: Number(each.getAttribute("width")), height: Number(each.getAttribute("height")) };
    const copy = withStyles(each);
    copy.setAttribute("x", 0);
    copy.setAttribute("y", height);
    copy.setAttribute("width", box.width);
    copy.setAttribute("height", box.height);
    whole.append(copy);
    width = Math.max(width, box.width);
    height += box.height + 6;
  }
  const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of [["width", width], ["height", height], ["fill", cssColour("--panel")]])
    paper.setAttribute(name, value);
  whole.prepend(paper);
  whole.setAttribute("width", width);
  whole.setAttribute("height", height);
  whole.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return { text: new XMLSerializer().serializeToString(whole), width, height };
}

function cssColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function withStyles(svg) {
  const copy = svg.cloneNode(true),
    before = [svg, ...svg.querySelectorAll("*")],
    after = [copy, ...copy.querySelectorAll("*")];
  before.forEach((element, place) => {
    const style = getComputedStyle(element);
    // A style of its own would come before the attributes.
    after[place].removeAttribute("style");
    for (const name of SAVED_STYLES) {
      const value = style.getPropertyValue(name);
      if (value) after[place].setAttribute(name, value);
    }
  });
  return copy;
}

function download(name, address) {
  make("a", { href: address, download: name }).click();
}

function saveSvg(drawings, name) {
  const address = URL.createObjectURL(new Blob([figureOf(drawings).text], { type: "image/svg+xml" }));
  download(`${name}.svg`, address);
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Drawn at twice the size, so that it is sharp in a slide too. */
function savePng(drawings, name) {
  const { text, width, height } = figureOf(drawings),
    picture = new Image(),
    canvas = make("canvas", { width: 2 * width, height: 2 * height });
  picture.addEventListener("load", () => {
    const paper = canvas.getContext("2d");
    paper.scale(2, 2);
    paper.drawImage(picture, 0, 0, width, height);
    download(`${name}.png`, canvas.toDataURL("image/png"));
  });
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

/** Buttons that save what a panel has drawn; a panel without a figure has none. */
function saveTools(panel) {
  const drawings = () => [...panel.querySelectorAll("svg[role=img], canvas[role=img]")].map((each) => each.figure?.() ?? each);
  const save = (words, what) =>
    make(
      "button",
      { type: "button", "aria-label": `Save this figure as ${words}`, click: () => what(drawings(), `flopwise-${panel.id}`) },
      words,
    );
  return make("div", { class: "save" }, save("SVG", saveSvg), save("PNG", savePng));
}
