"use strict";
// One step of one run: its tasks as predicted above as they ran.

const STREAMS = ["compute", "copy-in", "copy-out", "host", "network"];
const LANE = 15;
const view = { run: null, from: 0, to: 1 };

/** Why a panel has nothing to show of this row, and what to run to get it. */
function noDetail(row, what) {
  if (!row) return "There is no run to show yet. Train one: `flopwise train plan.toml --profile`.";
  if (!row.run) {
    const why =
      row.state === "planned"
        ? "has only been planned"
        : row.state === "running"
          ? "is being tried, and has no run yet"
          : `ended with ${stateWord(row.state)} and left no run`;
    return `${capital(rowName(row))} ${why}: there ${what}. A run of it tells: \`flopwise train plan.toml --profile\`.`;
  }
  if (state.details.get(row.run)?.is_profiled) {
    return `In the profile of run ${row.run} there ${what}: \`flopwise train\` with a plan for one device writes them.`;
  }
  if (state.details.get(row.run)?.will_be_profiled)
    return `Run ${row.run} goes on and is profiled: there ${what} until it ends.`;
  if (state.details.has(row.run)) {
    return `Run ${row.run} was not profiled: there ${what}. To get it: \`flopwise train plan.toml --profile\`.`;
  }
  if (LIVE) return "Fetching this run …";
  const why = state.page.left_out ? "There was no room for details of every run" : "Only this row is known here";
  return `${why}: there ${what}. A page of its own may tell more: \`flopwise report ${row.run} -o html\`.`;
}

function capital(words) {
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** Tasks as objects, in seconds; streams in the usual order. */
function readTasks(tasks) {
  const times = (place, side) => {
    const start = tasks[`${side}_start_ns`][place],
      end = tasks[`${side}_end_ns`][place];
    return start === null ? null : { start: start / 1e9, end: end / 1e9 };
  };
  return tasks.name.map((name, place) => ({
    name,
    kind: tasks.kinds[tasks.kind[place]],
    stream: tasks.streams[tasks.stream[place]],
    predicted: times(place, "predicted"),
    measured: times(place, "measured"),
  }));
}

/** Spans joined where they touch. */
function union(spans) {
  const joined = [];
  for (const span of spans.slice().sort((left, right) => left.start - right.start)) {
    const last = joined[joined.length - 1];
    if (last && span.start <= last.end) last.end = Math.max(last.end, span.end);
    else joined.push({ ...span });
  }
  return joined;
}
function lengthOf(spans) {
  return d3.sum(spans, (span) => span.end - span.start);
}

/** Copies, and the part of them that no computation hides. */
function exposure(tasks, side) {
  const of = (test) => union(tasks.filter((task) => task[side] && test(task.stream)).map((task) => task[side]));
  const copies = of((stream) => stream.startsWith("copy") || stream === "network"),
    computing = of((stream) => stream === "compute");
  const both = lengthOf(union([...copies, ...computing]));
  return {
    copies: lengthOf(copies),
    exposed: Math.max(0, both - lengthOf(computing)),
    end: d3.max(tasks, (task) => task[side]?.end ?? 0),
  };
}

function timelineSentence(tasks) {
  const measured = exposure(tasks, "measured"),
    predicted = exposure(tasks, "predicted");
  const ran = measured.end > 0 ? measured : predicted;
  const verb = measured.end > 0 ? "takes" : "is predicted to take";
  const beside = measured.end > 0 && predicted.end > 0 ? ` (predicted ${secondsWords(predicted.end)})` : "";
  if (ran.copies === 0)
    return `There is nothing to hide: no task of this step copies. It ${verb} ${secondsWords(ran.end)}${beside}.`;
  const hidden = 1 - ran.exposed / ran.copies;
  const answer = hidden > 0.95 ? "Yes" : hidden > 0.6 ? "Mostly" : "No";
  return `${answer}: of ${secondsWords(ran.copies)} in which something is copied, ${secondsWords(ran.exposed)} has no computation beside it, so ${aboutWords(hidden)} is hidden. The step ${verb} ${secondsWords(ran.end)}${beside}.`;
}

function drawTimeline(row, detail) {
  const question = "Is the copying hidden?";
  if (!detail?.tasks) {
    fill("timeline", question, noDetail(row, "are no times of tasks"));
    return;
  }
  const tasks = readTasks(detail.tasks);
  if (view.run !== row.key) Object.assign(view, { run: row.key, from: 0, to: 1 });
  const kinds = d3
    .rollups(
      tasks,
      (group) =>
        d3.sum(group, (task) => {
          const span = task.measured ?? task.predicted;
          return span.end - span.start;
        }),
      (task) => task.kind,
    )
    .sort((left, right) => right[1] - left[1])
    .map(([kind]) => kind);
  const colour = kindColours(kinds.slice(0, 8));
  const holder = make("div", { class: "plot" });
  const redraw = () => holder.replaceChildren(timelineSvg(tasks, colour, redraw));
  const step = (words, title, change) =>
    make(
      "button",
      {
        type: "button",
        title,
        "aria-label": title,
        click: () => {
          change();
          redraw();
        },
      },
      words,
    );
  const zoom = (factor) => () => {
    const middle = (view.from + view.to) / 2,
      half = Math.min(0.5, Math.max(0.002, ((view.to - view.from) * factor) / 2));
    setView(middle - half, middle + half);
  };
  const move = (share) => () => {
    const by = share * (view.to - view.from);
    setView(view.from + by, view.to + by);
  };
  const tools = make(
    "div",
    { class: "tools", role: "group", "aria-label": "Part of the step" },
    step("−", "Zoom out", zoom(2)),
    step("+", "Zoom in", zoom(0.5)),
    step("←", "Earlier", move(-0.5)),
    step("→", "Later", move(0.5)),
    step("whole step", "Show the whole step", () => setView(0, 1)),
    make("span", { class: "faint" }, "or drag over a part"),
  );
  const shown = kinds.slice(0, 8).map((kind) => [colour(kind), kind]);
  if (kinds.length > 8) shown.push(["var(--faint)", `${countOf(kinds.length - 8, "other kind")}`]);
  const note = detail.tasks.note ? make("p", { class: "faint" }, detail.tasks.note) : null;
  fill("timeline", question, timelineSentence(tasks), tools, holder, legend(shown), note);
  redraw();
}

/** The usual colour of a kind, another one where that is taken, grey for the shortest. */
function kindColours(kinds) {
  const free = new Set(COLOURS.keys()),
    chosen = new Map();
  for (const kind of kinds) {
    const usual = KIND_COLOURS[kind];
    if (free.delete(usual)) chosen.set(kind, usual);
  }
  for (const kind of kinds) {
    if (chosen.has(kind)) continue;
    const next = free.values().next().value;
    free.delete(next);
    chosen.set(kind, next);
  }
  return (kind) => (chosen.has(kind) ? COLOURS[chosen.get(kind)] : "var(--faint)");
}
const KIND_COLOURS = {
  forward: 0,
  backward: 7,
  attention: 5,
  head: 3,
  optimize: 2,
  "load weights": 1,
  "store gradients": 6,
  "load activations": 4,
};

function setView(from, to) {
  const width = Math.min(1, to - from);
  const start = Math.min(1 - width, Math.max(0, from));
  Object.assign(view, { from: start, to: start + width });
}

function timelineSvg(tasks, colour, redraw) {
  const width = widthOf("timeline"),
    narrow = width < 560;
  const left = narrow ? 66 : 150,
    end = d3.max(tasks, (task) => Math.max(task.measured?.end ?? 0, task.predicted?.end ?? 0));
  const known = [...new Set(tasks.map((task) => task.stream))];
  const streams = [
    ...STREAMS.filter((name) => known.includes(name)),
    ...known.filter((name) => !STREAMS.includes(name)),
  ];
  const block = 2 * LANE + 14,
    height = streams.length * block + 34;
  const scale = d3.scaleLinear([view.from * end, view.to * end], [left, width - 8]);
  const svg = d3
    .create("svg")
    .attr("width", width)
    .attr("height", height)
    .attr("viewBox", `0 0 ${width} ${height}`)
    .attr("class", "timeline");
  const [begin, stop] = scale.domain();
  svg
    .append("clipPath")
    .attr("id", "timeline-clip")
    .append("rect")
    .attr("x", left)
    .attr("width", width - 8 - left)
    .attr("height", height);
  svg
    .append("g")
    .attr("class", "axis")
    .attr("transform", `translate(0,${streams.length * block + 4})`)
    .call(
      d3
        .axisBottom(scale)
        .ticks(narrow ? 4 : 8)
        .tickFormat((value) => (value === 0 ? "0" : secondsWords(value)))
        .tickSizeOuter(0),
    );
  streams.forEach((stream, place) => {
    const top = place * block + 4;
    svg
      .append("text")
      .attr("x", 0)
      .attr("y", narrow ? top + LANE : top + LANE + 5)
      .attr("class", "stream")
      .text(stream.replace("-", " "));
    for (const [line, side] of ["predicted", "measured"].entries()) {
      const y = top + line * (LANE + 2);
      if (!narrow)
        svg
          .append("text")
          .attr("x", left - 8)
          .attr("y", y + 11)
          .attr("class", "side")
          .attr("text-anchor", "end")
          .text(side);
      svg
        .append("rect")
        .attr("class", "lane")
        .attr("x", left)
        .attr("width", width - 8 - left)
        .attr("y", y)
        .attr("height", LANE);
      const drawn = tasks.filter(
        (task) => task.stream === stream && task[side] && task[side].end >= begin && task[side].start <= stop,
      );
      const marks = svg
        .append("g")
        .attr("class", `tasks ${side}`)
        .attr("clip-path", "url(#timeline-clip)")
        .selectAll("rect")
        .data(drawn)
        .join("rect")
        .attr("x", (task) => scale(task[side].start))
        .attr("y", y)
        .attr("height", LANE)
        .attr("width", (task) => Math.max(0.6, scale(task[side].end) - scale(task[side].start) - 0.4))
        .attr("fill", (task) => colour(task.kind));
      marks.append("title").text((task) => taskTitle(task));
    }
  });
  dragToZoom(svg, scale, end, left, width, streams.length * block, redraw);
  const words = `${streams.length} streams from ${secondsWords(begin)} to ${secondsWords(stop)}, each as predicted above as measured: ${listWords(streams)}.`;
  return described(svg.node(), words);
}

function taskTitle(task) {
  const words = (span) =>
    span ? `${secondsWords(span.end - span.start)} at ${secondsWords(span.start)}` : "not known";
  return `${task.name} (${task.stream})\npredicted ${words(task.predicted)}\nmeasured ${words(task.measured)}`;
}

function dragToZoom(svg, scale, end, left, width, height, redraw) {
  let from = null;
  const band = svg.append("rect").attr("class", "band").attr("height", height).attr("y", 0).attr("width", 0);
  const across = (event) => Math.min(width - 8, Math.max(left, d3.pointer(event, svg.node())[0]));
  svg
    .on("pointerdown", (event) => {
      if (event.button === 0 && event.pointerType !== "touch") {
        from = across(event);
        event.preventDefault();
      }
    })
    .on("pointermove", (event) => {
      if (from !== null) band.attr("x", Math.min(from, across(event))).attr("width", Math.abs(across(event) - from));
    })
    .on("pointerup", (event) => {
      if (from === null) return;
      const [low, high] = [from, across(event)].sort(d3.ascending);
      from = null;
      band.attr("width", 0);
      if (high - low > 6) {
        setView(scale.invert(low) / end, scale.invert(high) / end);
        redraw();
      }
    })
    .on("pointerleave", () => {
      from = null;
      band.attr("width", 0);
    })
    .on("dblclick", () => {
      setView(0, 1);
      redraw();
    });
}
