"use strict";
// One step of one run: its tasks as predicted above as they ran.

const STREAMS = ["compute", "copy-in", "copy-out", "copy", "host", "network"];
const view = { run: null, from: 0, to: 1, chosen: null };

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
    computing = of((stream) => stream.startsWith("compute"));
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
  const hidden = Math.max(0, 1 - ran.exposed / ran.copies);
  const answer = hidden > 0.95 ? "Yes" : hidden > 0.6 ? "Mostly" : "No";
  return `${answer}: of ${secondsWords(ran.copies)} in which something is copied, ${secondsWords(ran.exposed)} has no computation beside it, so ${aboutWords(hidden)} is hidden. The step ${verb} ${secondsWords(ran.end)}${beside}.`;
}

/** A step's tasks as the chart of lanes takes them: for each stream as predicted above as they ran.
 *
 *  `runs`: `{ name, tasks }` of `readTasks`; of several each lane says whose it is. `sides`: which of both are drawn.
 */
function tasksSpec(runs, sides) {
  const tasks = runs.flatMap((run, number) => run.tasks.map((task) => ({ ...task, run: number })));
  const spent = d3.rollups(tasks, (group) => d3.sum(group, spanLength), (task) => task.kind).sort((left, right) => right[1] - left[1]);
  const kinds = spent.map(([kind]) => kind),
    // Kernels of another tool's trace have the colours of their classes.
    colour = kinds.every((kind) => kind in CLASS_COLOURS) ? classColour : kindColours(kinds.slice(0, 8)),
    known = [...new Set(tasks.map((task) => task.stream))],
    streams = [...STREAMS.filter((name) => known.includes(name)), ...known.filter((name) => !STREAMS.includes(name))];
  // Of a task both times are drawn: which of them is in the last digit of what it is called here.
  const idOf = (place, side) => 2 * place + (side === "measured" ? 1 : 0);
  const placed = tasks.map((task, place) => ({ task, place }));
  const lanes = [],
    waits = [];
  for (const stream of streams)
    for (const [number, run] of runs.entries())
      for (const side of sides) {
        const there = placed.filter(({ task }) => task.stream === stream && task.run === number && task[side]);
        if (!there.length) continue;
        if (stream === "compute") waits.push(...exposedSpans(run.tasks, side).map((span) => ({ ...span, lane: lanes.length })));
        const name = runs.length > 1 ? `${run.name} ${stream}` : stream;
        lanes.push(laneOf(name, sides.length > 1 ? side : "", there.map(({ task, place }) => ({ ...task[side], kind: kinds.indexOf(task.kind), id: idOf(place, side) }))));
      }
  const taskOf = (id) => tasks[Math.floor(id / 2)],
    spanOf = (id) => taskOf(id)?.[id % 2 ? "measured" : "predicted"];
  const words = (span) => (span ? `${secondsWords(span.end - span.start)} from ${secondsWords(span.start)}` : "not known");
  return {
    lanes,
    end: d3.max(tasks, (task) => Math.max(...sides.map((side) => task[side]?.end ?? 0))) || 1,
    kinds,
    colours: kinds.map(colour),
    waits,
    memory: null,
    shown: kinds.slice(0, 8).map((kind) => [colour(kind), kind]),
    others: Math.max(0, kinds.length - 8),
    nameOf: (id) => taskOf(id).name,
    spanOf,
    find: (word) => placed.filter(({ task }) => task.name.toLowerCase().includes(word)).flatMap(({ task, place }) => sides.filter((side) => task[side]).map((side) => idOf(place, side))),
    detailOf: (id) => {
      const task = taskOf(id);
      if (!task) return "";
      const whose = runs.length > 1 ? `${runs[task.run].name} · ` : "";
      return `${whose}${task.name} · ${task.stream.replace("-", " ")} · ${sides.map((side) => `${side} ${words(task[side])}`).join(" · ")}`;
    },
  };
}

function spanLength(task) {
  const span = task.measured ?? task.predicted;
  return span.end - span.start;
}

/** When something is copied or handed over, and nothing is computed. */
function exposedSpans(tasks, side) {
  const of = (test) => union(tasks.filter((task) => task[side] && test(task.stream)).map((task) => task[side]));
  const computing = of((stream) => stream.startsWith("compute")),
    found = [];
  for (const copy of of((stream) => stream.startsWith("copy") || stream === "network")) {
    let from = copy.start;
    for (const span of computing) {
      if (span.end <= from) continue;
      if (span.start >= copy.end) break;
      if (span.start > from) found.push({ start: from, end: span.start });
      from = Math.max(from, span.end);
    }
    if (from < copy.end) found.push({ start: from, end: copy.end });
  }
  return found;
}

function tasksLegend(spec) {
  return legend([
    ...(spec.waits.length ? [["var(--bad)", "a copy with no computation beside it"]] : []),
    ...spec.shown,
    ...(spec.others ? [["var(--faint)", countOf(spec.others, "other kind")]] : []),
  ]);
}

function drawTimeline(row, detail) {
  const question = "Is the copying hidden?";
  if (!detail?.tasks) {
    fill("timeline", question, noDetail(row, "are no times of tasks"));
    return;
  }
  const tasks = readTasks(detail.tasks),
    sides = ["predicted", "measured"].filter((side) => tasks.some((task) => task[side]));
  if (view.run !== row.key) Object.assign(view, { run: row.key, from: 0, to: 1, chosen: null }, viewOfAddress(row));
  const spec = tasksSpec([{ name: rowName(row), tasks }], sides);
  const words = `One step of ${secondsWords(spec.end)}: ${spec.lanes.map((lane) => lane.name.replace("-", " ")).filter((name, place, all) => all.indexOf(name) === place).join(", ")}${sides.length > 1 ? ", as predicted above as measured" : ""}.`;
  const chart = lanesChart("timeline", spec, view, () => choose(addressOfView()), words);
  const note = [detail.tasks.note, detail.traced ? `It is one of the steps that were traced, which takes longer: the others take ${secondsWords(detail.step_s)}.` : ""].filter(Boolean).join(" ");
  fill("timeline", question, timelineSentence(tasks), make("div", { class: "plot" }, chart.element), tasksLegend(spec), note ? make("p", { class: "faint" }, note) : null);
  chart.redraw();
}

/** What the address keeps of the view: the part of the step, and the task that is told of. */
function addressOfView() {
  const isWhole = view.from <= 0 && view.to >= 1;
  return { run: view.run, t: isWhole ? null : `${Number(view.from.toPrecision(9))}-${Number(view.to.toPrecision(9))}`, task: view.chosen === null ? null : String(view.chosen) };
}
function viewOfAddress(row) {
  if (state.hash.run !== row.key) return {};
  const [from, to] = (state.hash.t ?? "").split("-").map(Number),
    isView = from >= 0 && to <= 1 && from < to;
  return { ...(isView ? { from, to } : {}), ...(/^\d+$/.test(state.hash.task ?? "") ? { chosen: Number(state.hash.task) } : {}) };
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
