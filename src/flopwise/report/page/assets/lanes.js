"use strict";
// Tasks on lanes over time, drawn on a canvas: wheel, drag, search, details, memory below. A million of them stay smooth,
// since what is narrower than a pixel is found by halving and drawn once.

const LANE_HEIGHT = 24,
  LANE_GAP = 8,
  MEMORY_HEIGHT = 120,
  LEAST_LABEL = 60;
/** Of a whole: nearer than this nobody can tell tasks apart, as they are whole nanoseconds. */
const LEAST_SHARE = 1e-7;

/** A lane's tasks by columns, sorted by their start; `ids` are what the page calls them. */
function laneOf(name, side, tasks) {
  const order = Array.from(tasks.keys()).sort((left, right) => tasks[left].start - tasks[right].start);
  const lane = {
    name,
    side,
    start: Float64Array.from(order, (place) => tasks[place].start),
    end: Float64Array.from(order, (place) => tasks[place].end),
    kind: Uint16Array.from(order, (place) => tasks[place].kind),
    ids: Uint32Array.from(order, (place) => tasks[place].id),
  };
  return withReach(lane);
}

/** The latest end so far and the time taken so far, by which a moment and a stretch are found by halving. */
function withReach(lane) {
  const count = lane.start.length;
  lane.reach = new Float64Array(count);
  lane.spent = new Float64Array(count + 1);
  let latest = -Infinity;
  for (let place = 0; place < count; place += 1) {
    latest = Math.max(latest, lane.end[place]);
    lane.reach[place] = latest;
    lane.spent[place + 1] = lane.spent[place] + (lane.end[place] - lane.start[place]);
  }
  return lane;
}

const firstAfter = d3.bisector((value) => value).right;

// -- pens ------------------------------------------------------------------------------------------------------------

/** Draws on a canvas. */
function canvasPen(context) {
  return {
    rect(x, y, width, height, fill, opacity = 1) {
      context.globalAlpha = opacity;
      context.fillStyle = fill;
      context.fillRect(x, y, width, height);
      context.globalAlpha = 1;
    },
    frame(x, y, width, height, stroke) {
      context.strokeStyle = stroke;
      context.lineWidth = 2;
      context.strokeRect(x, y, width, height);
    },
    line(x1, y1, x2, y2, stroke, width = 1) {
      context.strokeStyle = stroke;
      context.lineWidth = width;
      context.beginPath();
      context.moveTo(x1, y1);
      context.lineTo(x2, y2);
      context.stroke();
    },
    text(x, y, words, fill, { align = "left", weight = 400, size = 12 } = {}) {
      context.fillStyle = fill;
      context.font = `${weight} ${size}px system-ui, sans-serif`;
      context.textAlign = align;
      context.fillText(words, x, y);
    },
    area(points, fill) {
      context.fillStyle = fill;
      context.beginPath();
      points.forEach(([x, y], place) => (place ? context.lineTo(x, y) : context.moveTo(x, y)));
      context.closePath();
      context.fill();
    },
  };
}

/** Draws the same as SVG, to be saved. */
function svgPen(svg) {
  const put = (tag, attributes, words) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (words !== undefined) element.textContent = words;
    svg.append(element);
  };
  const near = (value) => Math.round(value * 100) / 100;
  return {
    rect: (x, y, width, height, fill, opacity = 1) =>
      put("rect", { x: near(x), y: near(y), width: near(width), height: near(height), fill, ...(opacity < 1 ? { "fill-opacity": near(opacity) } : {}) }),
    frame: (x, y, width, height, stroke) =>
      put("rect", { x: near(x), y: near(y), width: near(width), height: near(height), fill: "none", stroke, "stroke-width": 2 }),
    line: (x1, y1, x2, y2, stroke, width = 1) =>
      put("line", { x1: near(x1), y1: near(y1), x2: near(x2), y2: near(y2), stroke, "stroke-width": width }),
    text: (x, y, words, fill, { align = "left", weight = 400, size = 12 } = {}) =>
      put(
        "text",
        { x: near(x), y: near(y), fill, "font-size": size, "font-weight": weight, "font-family": "system-ui, sans-serif", "text-anchor": { left: "start", center: "middle", right: "end" }[align] },
        words,
      ),
    area: (points, fill) => put("polygon", { points: points.map((point) => point.map(near).join(",")).join(" "), fill }),
  };
}

// -- drawing ---------------------------------------------------------------------------------------------------------

/** What a chart is made of.
 *
 *  `lanes` of `laneOf`; `end` of the time axis in seconds; `colours` and `inks` by kind; `nameOf(id)`, the words in a bar;
 *  `waits` `[from, to, what]` drawn red on the first lane, or `{ start, end, lane }`; `memory` `{ owners, at, bytes, cap }` or null.
 */
function drawLanes(pen, spec, view, width, colours) {
  const left = lanesLeft(spec, width),
    right = width - 8;
  const scale = d3.scaleLinear([view.from * spec.end, view.to * spec.end], [left, right]);
  spec.lanes.forEach((lane, place) => drawLane(pen, spec, lane, laneTop(place), scale, left, right, view, colours));
  if (spec.lanes.length) drawWaits(pen, spec, scale, left, right, colours);
  const bottom = laneTop(spec.lanes.length) + 2;
  if (spec.memory) drawMemoryTrack(pen, spec.memory, scale, bottom + 8, left, right, colours);
  drawTimeAxis(pen, scale, lanesHeight(spec) - 24, left, right, colours);
}

function laneTop(place) {
  return place * (LANE_HEIGHT + LANE_GAP) + 4;
}
function lanesHeight(spec) {
  return laneTop(spec.lanes.length) + (spec.memory ? MEMORY_HEIGHT + 26 : 0) + 28;
}
function lanesLeft(spec, width) {
  const words = d3.max(spec.lanes, (lane) => roughWidth(laneWords(lane, width))) ?? 0;
  return Math.max(spec.memory ? 62 : 0, 1.08 * words + 14);
}
function laneWords(lane, width) {
  const name = lane.name.replace("-", " ");
  return lane.side && width > 560 ? `${name}, ${lane.side}` : lane.side ? `${name} ${lane.side[0]}.` : name;
}

function drawLane(pen, spec, lane, top, scale, left, right, view, colours) {
  pen.text(0, top + 16, laneWords(lane, right), colours.ink, { weight: 600 });
  pen.rect(left, top, right - left, LANE_HEIGHT, colours.line, 0.35);
  drawSpans(pen, spec, lane, top, scale, left, right, colours.kinds, colours);
}

/** The tasks of a lane that are in view: each where it is wide enough to be seen, else all of a pixel as one line. */
function drawSpans(pen, spec, lane, top, scale, left, right, fills, colours) {
  const [from, to] = scale.domain(),
    perPixel = (to - from) / (right - left),
    count = lane.start.length;
  let place = firstAfter(lane.reach, from);
  while (place < count && lane.start[place] < to) {
    const begin = Math.max(left, scale(lane.start[place])),
      end = Math.min(right, scale(lane.end[place])),
      kind = lane.kind[place],
      id = lane.ids[place];
    if (end - begin >= 1) {
      // A hair between neighbours, where there is room for one.
      const wide = end - begin > 3 ? end - begin - 0.7 : end - begin;
      const isDim = spec.isDim?.(id);
      pen.rect(begin, top, wide, LANE_HEIGHT, fills[kind], isDim ? 0.2 : 1);
      if (colours.inks && wide >= LEAST_LABEL && !isDim) {
        const words = [spec.nameOf(id), spec.kinds[kind]].find((each) => roughWidth(each) + 10 < wide);
        if (words) pen.text(begin + wide / 2, top + 16, words, colours.inks[kind], { align: "center" });
      }
      if (colours.inks && spec.chosen === id) pen.frame(begin + 1, top + 1, Math.max(1, wide - 2), LANE_HEIGHT - 2, colours.ink);
      place += 1;
      continue;
    }
    // All that begins within this pixel is one line of it, as strong as the share of the time that is taken.
    const column = Math.floor(begin),
      next = Math.max(place + 1, firstAfter(lane.start, scale.invert(column + 1), place, count));
    const share = (lane.spent[next] - lane.spent[place]) / perPixel;
    const isDim = spec.isDim && !d3.some(d3.range(place, Math.min(next, place + 16)), (each) => !spec.isDim(lane.ids[each]));
    pen.rect(column, top, 1, LANE_HEIGHT, fills[longestKind(lane, place, next)], isDim ? 0.12 : Math.min(1, Math.max(0.25, share)));
    place = next;
  }
}

function longestKind(lane, from, to) {
  let found = from;
  for (let place = from + 1; place < Math.min(to, from + 8); place += 1)
    if (lane.end[place] - lane.start[place] > lane.end[found] - lane.start[found]) found = place;
  return lane.kind[found];
}

/** Waits as lanes of one kind, which lie over those that wait: the first one, where they do not say. */
function waitsLanes(waits) {
  const spans = waits.map((wait, place) => (Array.isArray(wait) ? { start: wait[0], end: wait[1], lane: 0, id: place } : { ...wait, id: place }));
  return d3.groups(spans, (span) => span.lane).map(([place, some]) => [place, laneOf("waits", "", some.map((span) => ({ ...span, kind: 0 })))]);
}

function drawWaits(pen, spec, scale, left, right, colours) {
  spec.waitsLanes ??= waitsLanes(spec.waits ?? []);
  for (const [place, lane] of spec.waitsLanes) drawSpans(pen, {}, lane, laneTop(place), scale, left, right, [colours.bad], {});
}

function drawMemoryTrack(pen, memory, scale, top, left, right, colours) {
  const totals = memory.at.map((_, place) => d3.sum(memory.bytes, (sizes) => sizes[place]));
  const most = Math.max(d3.max(totals) ?? 0, 1),
    isNear = memory.cap && memory.cap < 3 * most,
    high = 1.06 * Math.max(most, isNear ? memory.cap : 0);
  const y = d3.scaleLinear([0, high], [top + MEMORY_HEIGHT, top + 12]);
  const [from, to] = scale.domain();
  const first = Math.max(0, firstAfter(memory.at, from) - 1),
    last = Math.min(memory.at.length, firstAfter(memory.at, to) + 1);
  const base = new Float64Array(memory.at.length);
  memory.owners.forEach((owner, number) => {
    const above = [],
      below = [];
    for (let place = first; place < last; place += 1) {
      const begin = Math.min(right, Math.max(left, scale(memory.at[place]))),
        end = Math.min(right, Math.max(left, scale(memory.at[place + 1] ?? to)));
      const size = memory.bytes[number][place];
      above.push([begin, y(base[place] + size)], [end, y(base[place] + size)]);
      below.push([begin, y(base[place])], [end, y(base[place])]);
      base[place] += size;
    }
    pen.area([...above, ...below.reverse()], colours.owners(owner, number));
  });
  const ticks = byteTicks(high, 4);
  for (const value of ticks.values) {
    pen.line(left - 4, y(value), left, y(value), colours.faint);
    pen.text(left - 7, y(value) + 4, ticks.words(value), colours.faint, { align: "right", size: 11 });
  }
  pen.line(left, y(0), left, y(high), colours.faint);
  if (!isNear) return;
  pen.line(left, y(memory.cap), right, y(memory.cap), colours.bad, 2);
  pen.text(right, y(memory.cap) - 4, `device cap ${bytesWords(memory.cap)}`, colours.bad, { align: "right", weight: 600 });
}

function drawTimeAxis(pen, scale, top, left, right, colours) {
  pen.line(left, top, right, top, colours.faint);
  const ticks = scale.ticks(Math.max(2, Math.floor((right - left) / 110)));
  const span = scale.domain()[1] - scale.domain()[0];
  for (const value of ticks) {
    const x = scale(value),
      words = momentWords(value, span),
      half = roughWidth(words, 11) / 2;
    pen.line(x, top, x, top + 4, colours.faint);
    pen.text(Math.min(right - half + 8, Math.max(left + half - 8, x)), top + 16, words, colours.faint, { align: "center", size: 11 });
  }
}

/** A moment with as many digits as tell it from its neighbours. */
function momentWords(value, span) {
  if (value === 0) return "0 s";
  const digits = Math.max(3, Math.ceil(Math.log10(Math.abs(value) / span)) + 3);
  for (const [limit, scale, unit] of [
    [1e-3, 1e-6, "µs"],
    [1, 1e-3, "ms"],
    [Infinity, 1, "s"],
  ])
    if (Math.abs(value) < limit) return `${Number((value / scale).toPrecision(digits)).toLocaleString("en-GB", { maximumFractionDigits: 6 })} ${unit}`;
  return "";
}

function laneColours(spec) {
  const known = (name) => cssColour(name);
  const resolve = (colour) => known(colour.slice(4, -1));
  return {
    ink: known("--ink"),
    faint: known("--faint"),
    line: known("--line"),
    bad: known("--bad"),
    kinds: spec.colours.map(resolve),
    inks: spec.colours.map((colour) => known(`${colour.slice(4, -1)}-ink`) || known("--panel")),
    owners: (owner, number) => resolve(ownerColour(owner, number)),
  };
}

// -- the chart and its handling --------------------------------------------------------------------------------------

/** A chart in `panel`: `view` `{ from, to, chosen }` is changed in place, and `changed()` told of it. */
function lanesChart(panel, spec, view, changed, words) {
  const canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": words }),
    told = make("p", { class: "told", "aria-live": "polite" }),
    found = make("span", { class: "faint", "aria-live": "polite" }),
    search = make("input", { type: "search", placeholder: "find a task", "aria-label": "Find a task", autocomplete: "off" });
  const chart = { canvas, spec, view, matches: [], at: -1 };
  const width = () => widthOf(panel);
  const redraw = () => {
    const ratio = devicePixelRatio || 1,
      wide = width(),
      high = lanesHeight(spec);
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    spec.chosen = view.chosen;
    drawLanes(canvasPen(context), spec, view, wide, laneColours(spec));
    told.textContent = view.chosen !== null && view.chosen !== undefined ? spec.detailOf(view.chosen) : "";
  };
  let isWaiting = false;
  // As often as the screen is drawn, and no oftener.
  const later = () => {
    changed();
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      redraw();
    });
  };
  const show = (from, to) => {
    const span = Math.min(1, Math.max(LEAST_SHARE, to - from)),
      start = Math.min(1 - span, Math.max(0, from));
    view.from = start;
    view.to = start + span;
    later();
  };
  const zoom = (factor, around = 0.5) => {
    const middle = view.from + around * (view.to - view.from),
      span = (view.to - view.from) * factor;
    show(middle - around * span, middle + (1 - around) * span);
  };
  const pan = (share) => {
    const by = share * (view.to - view.from);
    show(view.from + by, view.to + by);
  };
  const choose = (id) => {
    view.chosen = id;
    later();
  };
  const bring = (id) => {
    const span = spec.spanOf(id);
    view.chosen = id;
    const room = Math.max(3 * (span.end - span.start), Math.min(spec.end, 0.02 * spec.end), LEAST_SHARE * spec.end) / spec.end;
    const middle = (span.start + span.end) / 2 / spec.end;
    show(middle - Math.min(view.to - view.from, room) / 2, middle + Math.min(view.to - view.from, room) / 2);
  };
  const seek = () => {
    const word = search.value.trim().toLowerCase();
    chart.matches = word ? spec.find(word) : [];
    chart.at = -1;
    const there = new Set(chart.matches);
    spec.isDim = word ? (id) => !there.has(id) : null;
    found.textContent = word ? `${countWords(chart.matches.length)} found` : "";
    later();
  };
  search.addEventListener("input", seek);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && chart.matches.length) {
      chart.at = (chart.at + (event.shiftKey ? chart.matches.length - 1 : 1)) % chart.matches.length;
      found.textContent = `${countWords(chart.at + 1)} of ${countWords(chart.matches.length)}`;
      bring(chart.matches[chart.at]);
      event.preventDefault();
    } else if (event.key === "Escape") {
      search.value = "";
      seek();
      canvas.focus();
    }
  });
  onCanvas(canvas, chart, { show, zoom, pan, choose, bring, search, width });
  const button = (sign, title, act) => make("button", { type: "button", title, "aria-label": title, click: act }, sign);
  const tools = make(
    "div",
    { class: "tools", role: "group", "aria-label": "Part of the step" },
    button("−", "Zoom out", () => zoom(2)),
    button("+", "Zoom in", () => zoom(0.5)),
    button("←", "Earlier", () => pan(-0.5)),
    button("→", "Later", () => pan(0.5)),
    button("whole step", "Show the whole step", () => show(0, 1)),
    search,
    found,
    make("span", { class: "faint hint" }, "click a task for details · drag to move · ctrl and wheel, or a click and the wheel, to zoom · / to find"),
  );
  chart.redraw = redraw;
  chart.element = make("div", { class: "lanes" }, tools, canvas, told);
  canvas.figure = () => {
    const svg = drawing(width(), lanesHeight(spec));
    drawLanes(svgPen(svg.node()), spec, view, width(), laneColours(spec));
    return svg.node();
  };
  return chart;
}

function onCanvas(canvas, chart, act) {
  const { spec, view } = chart;
  const across = (event) => {
    const left = lanesLeft(spec, act.width());
    return (event.offsetX - left) / (act.width() - 8 - left);
  };
  canvas.addEventListener(
    "wheel",
    (event) => {
      // The page scrolls until the chart is meant.
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) act.pan(event.deltaX / act.width());
      else act.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))), Math.min(1, Math.max(0, across(event))));
    },
    { passive: false },
  );
  let grasped = null,
    moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    grasped = { x: event.offsetX, from: view.from, to: view.to };
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!grasped) {
      const id = taskAt(chart, event.offsetX, event.offsetY, act.width());
      canvas.title = id === null ? "" : spec.detailOf(id);
      return;
    }
    moved = Math.max(moved, Math.abs(event.offsetX - grasped.x));
    if (moved < 4) return;
    const by = ((grasped.x - event.offsetX) / (act.width() - lanesLeft(spec, act.width()) - 8)) * (grasped.to - grasped.from);
    act.show(grasped.from + by, grasped.to + by);
  });
  const drop = (event) => {
    if (grasped && moved < 4) act.choose(taskAt(chart, event.offsetX, event.offsetY, act.width()));
    grasped = null;
  };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", () => (grasped = null));
  canvas.addEventListener("dblclick", (event) => {
    const id = taskAt(chart, event.offsetX, event.offsetY, act.width());
    if (id === null) act.show(0, 1);
    else act.bring(id);
  });
  const keys = {
    ArrowLeft: () => act.pan(-0.2),
    a: () => act.pan(-0.2),
    ArrowRight: () => act.pan(0.2),
    d: () => act.pan(0.2),
    "+": () => act.zoom(0.5),
    "=": () => act.zoom(0.5),
    w: () => act.zoom(0.5),
    "-": () => act.zoom(2),
    s: () => act.zoom(2),
    0: () => act.show(0, 1),
    Home: () => act.show(0, 1),
    Escape: () => act.choose(null),
    n: () => step(chart, act, 1),
    p: () => step(chart, act, -1),
    "/": () => act.search.focus(),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}

/** The next task of the lane on which the chosen one is, or the first one. */
function step(chart, act, by) {
  const { spec, view } = chart;
  for (const lane of spec.lanes) {
    const place = lane.ids.indexOf(view.chosen);
    if (place < 0) continue;
    const next = Math.min(lane.ids.length - 1, Math.max(0, place + by));
    act.bring(lane.ids[next]);
    return;
  }
  if (spec.lanes[0]?.ids.length) act.bring(spec.lanes[0].ids[0]);
}

/** What stands under the pointer; of tasks narrower than a pixel the nearest. */
function taskAt(chart, x, y, width) {
  const { spec, view } = chart,
    place = Math.floor((y - 4) / (LANE_HEIGHT + LANE_GAP)),
    lane = spec.lanes[place];
  if (!lane || y - laneTop(place) > LANE_HEIGHT || y < laneTop(place)) return null;
  const left = lanesLeft(spec, width),
    scale = d3.scaleLinear([left, width - 8], [view.from * spec.end, view.to * spec.end]);
  const from = scale(x - 1.5),
    to = scale(x + 1.5);
  const first = firstAfter(lane.reach, from);
  for (let each = first; each < lane.start.length && lane.start[each] <= to; each += 1) if (lane.end[each] >= from) return lane.ids[each];
  return null;
}
