"use strict";
// What the planner answers: figures with their intervals, memory, the step, what would help, every device, every cap.

const COST_TOKENS = [1e9, "billion tokens"];

function drawAnswer() {
  const view = planner.answer?.view;
  if (!view) return;
  const isRefused = view.kind === "refused";
  byId("plan-cards").replaceChildren(...(isRefused ? [refusedCard(view)] : answerCards(view)));
  drawSearching();
  for (const name of ["plan-memory", "plan-step", "plan-strategies"]) byId(name).hidden = isRefused;
  if (!isRefused) {
    drawPlanMemory(view);
    drawPlanStep(view);
    drawStrategies(view);
  }
  byId("title").textContent = isRefused ? "Plan" : `${view.model} on ${view.devices > 1 ? `${countWords(view.devices)} × ` : ""}${view.hardware}`;
  byId("about").textContent = isRefused ? "" : "How fast it trains, what it takes, what would be faster.";
  drawWhy(view);
  drawCommand(view);
  drawAround();
  drawCaps();
  drawPins();
  if (!byId("ask").contains(document.activeElement)) drawControls();
  else refreshOutputs();
}

/** While a control is held its own element stays: only words beside the others change. */
function refreshOutputs() {
  const held = document.activeElement;
  const fresh = make("form", {}, (plannerData().grid ? gridControls(plannerData().grid) : liveControls()).filter(Boolean));
  for (const output of fresh.querySelectorAll("output")) {
    const old = byId("ask").querySelector(`output[for="${output.getAttribute("for")}"]`);
    if (output.getAttribute("for") && old) old.textContent = output.textContent;
  }
  if (byId("ask").contains(held)) held.setAttribute("aria-valuetext", byId("ask").querySelector(`output[for="${held.id}"]`)?.textContent ?? "");
}

// -- figures ---------------------------------------------------------------------------------------------------------

function answerCards(view) {
  const { words, fit } = view,
    how = view.kind === "planned" ? "planned" : "predicted";
  const card = (label, main, ...under) =>
    make("div", { class: "card" }, make("span", { class: "label" }, label), make("b", {}, main), ...under.filter(Boolean).map((each) => make("span", { class: "faint" }, each)));
  const sign = { good: "✓ fits", warn: "✓ fits", bad: "✗ does not fit" }[fit.tone];
  const fits = make(
    "div",
    { class: "card" },
    make("span", { class: "label" }, "does it fit?"),
    make("b", { class: fit.tone }, sign),
    make("span", { class: "faint" }, `${fit.of}, ${fit.words}`),
  );
  return [
    card(`speed, ${how}`, words.speed, words.speed_range ? `${words.speed_range}` : "", words.evidence),
    card("MFU", words.mfu, words.mfu_range, `HFU ${words.hfu} · bound by ${view.bound}`),
    card("step", words.step, words.step_range, `${countWords(view.batch_tokens)} tokens`),
    fits,
    costCard(view),
  ];
}

function costCard(view) {
  const price = planner.prices[hardwareOf(planner.question)],
    label = make("span", { class: "label" }, "cost");
  if (!price)
    return make(
      "div",
      { class: "card" },
      label,
      make("b", {}, UNKNOWN),
      make("span", { class: "faint" }, "give a price, and it says what tokens cost"),
    );
  const per = (rate) => costWords((price * view.devices * COST_TOKENS[0]) / (3600 * rate));
  const range = view.low_tokens_per_s ? `${per(view.high_tokens_per_s)} to ${per(view.low_tokens_per_s)}` : "";
  return make(
    "div",
    { class: "card" },
    label,
    make("b", {}, per(view.tokens_per_s)),
    make("span", { class: "faint" }, `a billion tokens${range ? `; ${range}` : ""}`),
    make("span", { class: "faint" }, `${rateWords(tokensPerDollar(view, price), "")} tokens a dollar`),
  );
}
function tokensPerDollar(view, price) {
  return (view.tokens_per_s * 3600) / (price * view.devices);
}
function costWords(dollars) {
  return `$${dollars >= 100 ? Math.round(dollars).toLocaleString("en-GB") : significant(dollars)}`;
}

function refusedCard(view) {
  return make(
    "div",
    { class: "card refused", role: "alert" },
    make("b", { class: "bad" }, `✗ ${view.what}`),
    view.why ? make("p", {}, view.why) : null,
    view.hint ? make("p", { class: "faint" }, ...withCode(view.hint)) : null,
  );
}

// -- the search ------------------------------------------------------------------------------------------------------

function drawSearching() {
  const bar = byId("plan-searching"),
    answer = planner.answer;
  if (!answer) return;
  const button = (words, act) => make("button", { type: "button", click: act }, words);
  if (planner.searching) {
    bar.replaceChildren(make("span", { class: "busy" }, "predicted; searching for the fastest plan …"), button("stop", stopSearch));
  } else if (answer.refused) {
    bar.replaceChildren(make("span", { class: "bad" }, `✗ ${answer.refused.what}. ${capital(answer.refused.why)}${answer.refused.hint ? `. Try ${answer.refused.hint}` : ""}`));
  } else if (answer.view.kind === "planned") {
    bar.replaceChildren(make("span", {}, `✓ planned${answer.view.searched ? `: the fastest of ${answer.view.searched}` : ""}`));
  } else if (isAsking() && answer.stopped) {
    bar.replaceChildren(make("span", {}, "predicted; the search was stopped"), button("search", () => {
      answer.stopped = false;
      search(answer.question, answer.key);
    }));
  } else bar.replaceChildren(make("span", { class: "faint" }, answer.view.kind === "predicted" ? "predicted" : ""));
}

// -- memory and the step ---------------------------------------------------------------------------------------------

function drawPlanMemory(view) {
  const bars = view.bars.map((bar) => ({
    place: bar.place,
    pieces: bar.owners.map((owner, place) => ({ owner, bytes: bar.bytes[place], words: bar.words[place] })),
    cap: bar.cap,
    capWords: bar.cap_words,
  }));
  const told = view.bars.map((bar) => `${bytesWords(d3.sum(bar.bytes))} on the ${bar.place}${bar.cap ? ` of ${bar.cap_words}` : ""}`);
  const words = `${{ good: "Yes", warn: "Yes, just", bad: "No" }[view.fit.tone]}: ${listWords(told)}; ${view.fit.words}.`;
  const svg = described(memoryBars(bars, widthOf("plan-memory")), `Memory by owner: ${view.bars.map((bar) => `${bar.place}: ${bar.owners.map((owner, place) => `${owner} ${bar.words[place]}`).join(", ")}`).join("; ")}.`);
  fill("plan-memory", "Does it fit?", words, make("div", { class: "plot" }, svg), ownersLegend(view.bars));
}

function ownersLegend(bars) {
  const owners = [...new Set(bars.flatMap((bar) => bar.owners))];
  const sizes = (owner) => bars.map((bar) => [bar.place, bar.words[bar.owners.indexOf(owner)]]).filter(([, words]) => words).map(([place, words]) => `${words} ${place}`);
  return legend(owners.map((owner) => [ownerColour(owner, Math.max(0, bars[0].owners.indexOf(owner))), `${owner}: ${sizes(owner).join(", ")}`]));
}

function drawPlanStep(view) {
  const question = "Where does the step go?";
  if (!view.step) {
    const longest = [...view.parts].sort((left, right) => right[1] - left[1]).slice(0, 2);
    const words = `${view.words.step}, bound by ${view.bound}${longest.length ? `; most of it is ${listWords(longest.map(([name, , , share]) => `${name} (${share})`))}` : ""}.`;
    fill("plan-step", question, words, make("div", { class: "plot" }, partsBar(view)), partsTable(view));
    return;
  }
  const { step } = view,
    waits = d3.sum(step.waits, ([from, to]) => to - from);
  const told = view.parts.filter(([name]) => name.startsWith("waits")).map(([name, , words]) => `${words} ${name.replace("waits for ", "for ")}`);
  const words = `${view.words.step}, bound by ${view.bound}. ${waits ? `It waits ${listWords(told.slice(0, 3))}, which is red below.` : "It waits for nothing."}`;
  const chart = stepChart("plan-step", step, planner.view, () => writeAddress());
  fill("plan-step", question, words, make("div", { class: "plot" }, chart.element), stepLegend(step), step.note ? make("p", { class: "faint" }, step.note) : null);
  chart.redraw();
}

/** A simulated step as the chart of lanes takes it. */
function stepChart(panel, step, view, changed) {
  const tasks = step.start_ns.map((start, place) => ({ start: start / 1e9, end: step.end_ns_of[place] / 1e9, kind: step.kind[place], id: place, stream: step.stream[place] }));
  const nameOf = (id) => `${step.kinds[step.kind[id]]}${step.label[id] ? ` ${step.label[id]}` : ""}`;
  const colour = kindColours(kindsByTime(step));
  const spec = {
    lanes: step.streams.map((stream, place) => laneOf(stream, "", tasks.filter((task) => task.stream === place))),
    end: step.end_ns / 1e9,
    kinds: step.kinds,
    colours: step.kinds.map(colour),
    waits: step.waits.map(([from, to, what]) => [from / 1e9, to / 1e9, what]),
    memory: step.memory.at_ns.length ? { ...step.memory, at: step.memory.at_ns.map((moment) => moment / 1e9) } : null,
    nameOf,
    spanOf: (id) => tasks[id],
    find: (word) => tasks.filter((task) => nameOf(task.id).toLowerCase().includes(word)).map((task) => task.id),
    detailOf: (id) => {
      const task = tasks[id];
      if (!task) return "";
      const size = step.bytes[id] ? ` · ${bytesWords(step.bytes[id])}${task.end > task.start ? ` at ${rateWords(step.bytes[id] / (task.end - task.start), "B/s")}` : ""}` : "";
      return `${nameOf(id)} · ${step.streams[task.stream].replace("-", " ")} · round ${step.round[id] + 1} · ${secondsWords(task.end - task.start)} from ${secondsWords(task.start)}${size}`;
    },
  };
  const end = secondsWords(spec.end);
  return lanesChart(panel, spec, view, changed, `The simulated step of ${end}: ${listWords(step.streams.map((stream) => stream.replace("-", " ")))}, waits in red${spec.memory ? ", and device memory by owner below" : ""}.`);
}

function kindsByTime(step) {
  const spent = step.kinds.map(() => 0);
  step.kind.forEach((kind, place) => (spent[kind] += step.end_ns_of[place] - step.start_ns[place]));
  return step.kinds.map((kind, place) => [kind, spent[place]]).sort((left, right) => right[1] - left[1]).slice(0, 8).map(([kind]) => kind);
}

function stepLegend(step) {
  const kinds = kindsByTime(step),
    colour = kindColours(kinds);
  const others = step.kinds.length - kinds.length;
  return legend([
    ["var(--bad)", "the device waits"],
    ...kinds.map((kind) => [colour(kind), kind]),
    ...(others > 0 ? [["var(--faint)", countOf(others, "other kind")]] : []),
  ]);
}

/** The parts of a step in one bar. */
function partsBar(view) {
  const width = widthOf("plan-step"),
    scale = d3.scaleLinear([0, view.step_s], [0, width]),
    svg = drawing(width, 58);
  let begin = 0;
  partsShown(view).forEach(([name, seconds], number) => {
    const x = scale(begin),
      wide = scale(seconds);
    begin += seconds;
    svg.append("rect").attr("class", "part").attr("x", x).attr("y", 4).attr("width", Math.max(0.8, wide - 1)).attr("height", 28).attr("fill", partColour(name, number));
    if (roughWidth(name) + 8 < wide)
      svg.append("text").attr("x", x + wide / 2).attr("y", 22.5).attr("text-anchor", "middle").style("fill", partInk(name, number)).text(name);
  });
  const ticks = scale.ticks(width < 480 ? 3 : 7);
  axisBelow(svg, scale, 36, ticks, (value) => momentWords(value, view.step_s), width);
  return described(svg.node(), `The step of ${view.words.step}: ${view.parts.map(([name, , words]) => `${name} ${words}`).join(", ")}.`);
}
const MOST_PARTS = 7;
function partsShown(view) {
  const sorted = [...view.parts].sort((left, right) => right[1] - left[1]),
    rest = d3.sum(sorted.slice(MOST_PARTS), ([, seconds]) => seconds);
  return rest > 0 ? [...sorted.slice(0, MOST_PARTS), ["others", rest]] : sorted;
}
function partColour(name, number) {
  return name === "others" ? "var(--faint)" : name.startsWith("wait") ? "var(--bad)" : COLOURS[number];
}
function partInk(name, number) {
  return name === "others" || name.startsWith("wait") ? "var(--panel)" : `var(--c${number}-ink)`;
}

function partsTable(view) {
  const shown = new Map(partsShown(view).map(([name], number) => [name, partColour(name, number)]));
  const row = ([name, , words, share]) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, make("i", { class: "dot", style: `--swatch:${shown.get(name) ?? "var(--faint)"}` }), name),
      make("td", { class: "number" }, words),
      make("td", { class: "number" }, share),
    );
  const head = make("tr", {}, make("th", { scope: "col" }, "part"), make("th", { scope: "col", class: "number" }, "time"), make("th", { scope: "col", class: "number" }, "share"));
  return make("details", {}, make("summary", {}, `All ${countOf(view.parts.length, "part")}`), scrolling("Parts of the step", make("table", { class: "small" }, make("thead", {}, head), make("tbody", {}, view.parts.map(row)))));
}

function scrolling(words, table) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": words }, table);
}

function drawStrategies(view) {
  const panel = byId("plan-strategies"),
    found = view.strategies;
  panel.hidden = !found;
  if (!found) return;
  const left = new Set(["strategy", "recompute", "where"]);
  const head = make("tr", {}, found.columns.map((name) => make("th", { scope: "col", class: left.has(name) ? "left" : "number" }, name)));
  const rows = found.rows.map((row) => make("tr", {}, row.map((cell, place) => make("td", { class: left.has(found.columns[place]) ? "left" : "number" }, cell || UNKNOWN))));
  fill("plan-strategies", "Why not otherwise?", `${view.setup.parallel} is the fastest of ${view.searched}; this is how the next ones lose.`, scrolling("Strategies", make("table", { class: "small words" }, make("thead", {}, head), make("tbody", {}, rows))));
}

/** What was chosen and why, what the interval leaves out, and notes. */
function drawWhy(view) {
  const panel = byId("plan-why"),
    notes = [...(view.notes ?? []), ...(view.words?.outside ? [`Beyond the data, so the interval is wider: ${view.words.outside}.`] : [])];
  const chosen = view.chosen ?? [];
  panel.hidden = !notes.length && !chosen.length;
  if (panel.hidden) return;
  const list = make("dl", { class: "reasons" }, chosen.map(([what, why]) => make("div", {}, make("dt", {}, what), make("dd", {}, why))));
  panel.replaceChildren(
    make("details", {}, make("summary", {}, make("h3", { id: "plan-why-title" }, "What was chosen, and why")), chosen.length ? list : null, notes.map((note) => make("p", { class: "faint" }, capital(note)))),
  );
}

// -- what would help, and elsewhere ----------------------------------------------------------------------------------

function drawAround() {
  const around = planner.around,
    view = planner.answer?.view;
  drawHelps(view, around);
  // Of the question before: it stays in its place, faint, until the new ones are there.
  const isStale = Boolean(around) && around.key !== planner.answer?.key;
  for (const name of ["plan-helps", "plan-devices"]) {
    byId(name).classList.toggle("stale", isStale);
    byId(name).setAttribute("aria-busy", String(isStale));
  }
  const panel = byId("plan-devices");
  panel.hidden = !around?.devices?.length;
  if (!panel.hidden) drawDevices(around.devices);
}

function drawHelps(view, around) {
  const panel = byId("plan-helps");
  const chips = [...(view?.helps ?? []).map((chip) => ({ ...chip, isPlan: true })), ...(around?.helps ?? [])];
  panel.hidden = !chips.length;
  if (!chips.length) return;
  const isMade = isAsking();
  const button = (chip) => {
    const gain = `${chip.gain >= 0 ? "+" : "−"}${aboutWords(Math.abs(chip.gain))}`;
    const tone = !chip.fits ? "bad" : chip.gain >= 0 ? "good" : "bad";
    return make(
      "button",
      { type: "button", class: "chip", disabled: !isMade, click: () => change(chip.change) },
      `${chip.words} → `,
      make("b", { class: tone }, chip.fits ? gain : `${gain}, does not fit`),
    );
  };
  fill("plan-helps", "What would help?", isMade ? "Each is applied by a click. More memory by the search's estimate, the rest by prediction, of the speed of all devices together." : "As it is; `flopwise serve` applies them by a click.", make("div", { class: "chips" }, chips.map(button)));
}

function drawDevices(rows) {
  const price = (row) => planner.prices[row.name];
  const per = (row) => (price(row) && row.tokens_per_s ? (row.tokens_per_s * 3600) / (price(row) * row.devices) : null);
  const fitting = rows.filter((row) => row.fits),
    dearest = d3.greatest(fitting.filter(per), per);
  const chosen = hardwareOf(planner.question);
  const number = (words) => make("td", { class: "number" }, words);
  const line = (row) =>
    make(
      "tr",
      { "aria-current": row.name === chosen ? "true" : null },
      make("th", { scope: "row" }, isAsking() && row.name !== chosen ? make("button", { type: "button", class: "link", click: () => change({ on: row.name }) }, row.name) : row.name),
      make("td", { class: row.fits ? "good" : "bad" }, row.fit ? `${row.fits ? "✓" : "✗"} ${row.fit.of}` : `✗ ${cut(row.why ?? "", 60)}`),
      number(row.tokens_per_s === null ? UNKNOWN : row.words.speed.replace(" tok/s", "")),
      number(row.words?.speed_range || UNKNOWN),
      number(row.words?.mfu ?? UNKNOWN),
      make("td", { class: "left" }, row.bound ?? UNKNOWN),
      make("td", { class: "number" }, make("input", { type: "number", min: "0", step: "any", class: "price", "aria-label": `Price of ${row.name}, dollars an hour`, value: price(row) ?? "", placeholder: "$/h", change: (event) => setPrice(row.name, Number(event.target.value)) })),
      number(per(row) ? rateWords(per(row), "") : UNKNOWN),
    );
  const heads = [["device", ""], ["fits?", ""], ["tok/s", "number"], ["8 of 10 lie in", "number"], ["MFU", "number"], ["bound by", "left"], ["$/h", "number"], ["tok/$", "number"]];
  const head = make("tr", {}, heads.map(([words, kind]) => make("th", { scope: "col", class: kind }, words)));
  const best = fitting[0];
  const first = best ? `It fits ${countWords(fitting.length)} of ${countWords(rows.length)}; the fastest is ${best.name}, ${best.words.speed}${dearest ? `; a dollar buys the most tokens on ${dearest.name}` : ""}.` : "It fits none of them as it is.";
  fill("plan-devices", "Which devices would do?", `${first} By prediction, with all else as asked.`, scrolling("Every device", make("table", { class: "small words devices" }, make("thead", {}, head), make("tbody", {}, rows.map(line)))));
}

// -- the map of caps -------------------------------------------------------------------------------------------------

function capsKey(question) {
  return keyOf({ ...question, device_mem: "", host_mem: "" });
}

/** Device and host caps of the map: about five of each, round, up to what there is. */
function capAxes() {
  const view = planner.answer.view,
    whole = Math.floor((planner.whole ?? view.fit?.cap ?? 0) / 2 ** 30);
  const host = view.bars?.find((bar) => bar.place === "host")?.cap ?? 256 * 2 ** 30;
  const most = Math.floor(host / 2 ** 30);
  const of = (top, shares) => [...new Set(shares.map((share) => Math.max(1, Math.round(top * share))))].map((size) => `${size}GiB`);
  return { device: of(whole, [0.15, 0.25, 0.4, 0.6, 0.8, 1]), host: of(most, [0.25, 0.5, 1]) };
}

/** Cells of a file's own grid of caps, where it has one. */
function gridCaps() {
  const axes = plannerData().grid?.axes ?? [],
    names = axes.map((axis) => axis.name);
  if (!names.includes("device_mem") || !names.includes("host_mem")) return null;
  const device = axes[names.indexOf("device_mem")].values,
    host = axes[names.indexOf("host_mem")].values;
  const cells = new Map();
  for (const one of device) for (const other of host) cells.set(`${one} ${other}`, gridCell({ ...planner.question, device_mem: one, host_mem: other }));
  return { device, host, cells, isDone: true };
}

function drawCaps() {
  const panel = byId("plan-caps"),
    view = planner.answer?.view;
  const map = isAsking() ? (planner.caps ?? null) : gridCaps();
  panel.hidden = isAsking() ? !isOwnPlan() || !view || view.kind === "refused" : !map;
  if (panel.hidden) return;
  const question = "What does memory buy?";
  if (!map) {
    const axes = capAxes();
    fill("plan-caps", question, `A plan for each of ${axes.device.length * axes.host.length} pairs of caps, about a second each.`, make("div", { class: "tools" }, make("button", { type: "button", id: "map-caps", click: () => mapCaps(axes) }, "search them")));
    return;
  }
  const cells = [...map.cells].filter(([, cell]) => cell?.tokens_per_s),
    speeds = cells.map(([, cell]) => cell.tokens_per_s),
    range = colourRange(speeds),
    front = frontOf(map);
  const fastest = d3.greatest(cells, ([, cell]) => cell.tokens_per_s);
  const told = fastest ? `${fastest[1].words.speed} at most; with the least device memory that is within 1 % of it, ${capWords(bytesOf(leastOf(map, fastest[1].tokens_per_s * 0.99)))}. Framed: no less memory is as fast.` : "Nothing fits so far.";
  const square = (device, host) => {
    const cell = map.cells.get(`${device} ${host}`);
    if (cell === undefined) return make("td", { class: "faint" }, map.isDone ? UNKNOWN : "…");
    const isNow = planner.question.device_mem === device && planner.question.host_mem === host;
    const colour = cell.tokens_per_s ? heatColour(cell.tokens_per_s, range) : "";
    const words = cell.tokens_per_s ? [cell.words.speed.replace(" tok/s", ""), cell.words.mfu] : ["✗", "no fit"];
    return make(
      "td",
      {},
      make(
        "button",
        {
          type: "button",
          class: `cap-cell${front.has(`${device} ${host}`) ? " front" : ""}`,
          style: colour ? `background:${colour};color:${inkOn(colour)}` : "",
          "aria-pressed": String(isNow),
          "aria-label": `device ${device}, host ${host}: ${words.join(", ")}`,
          click: () => change({ device_mem: device, host_mem: host }),
        },
        make("b", {}, words[0]),
        make("span", {}, words[1]),
      ),
    );
  };
  const head = make("tr", {}, make("th", { scope: "col" }, "host \\ device"), map.device.map((cap) => make("th", { scope: "col" }, capWords(bytesOf(cap)))));
  const rows = map.host.map((host) => make("tr", {}, make("th", { scope: "row" }, bytesOf(host) === null ? host : capWords(bytesOf(host))), map.device.map((device) => square(device, host))));
  const busy = map.isDone ? null : make("p", { class: "busy" }, `searching, ${countWords(map.cells.size)} of ${countWords(map.device.length * map.host.length)} `, make("button", { type: "button", click: () => stopCaps() }, "stop"));
  fill("plan-caps", question, told, busy, scrolling("Caps", make("table", { class: "caps" }, make("thead", {}, head), make("tbody", {}, rows))), speeds.length ? heatLegend(range, speeds, (value) => `${speedWords(value)} tok/s`) : null);
}

/** Pairs of caps that no pair with no more of either memory equals: the Pareto front. */
function frontOf(map) {
  const cells = [...map.cells].filter(([, cell]) => cell?.tokens_per_s).map(([key, cell]) => ({ key, device: bytesOf(key.split(" ")[0]), host: bytesOf(key.split(" ")[1]) ?? 0, speed: cell.tokens_per_s }));
  const beats = (one, other) => one !== other && one.device <= other.device && one.host <= other.host && one.speed >= 0.999 * other.speed && (one.device < other.device || one.host < other.host);
  return new Set(cells.filter((cell) => !cells.some((other) => beats(other, cell))).map((cell) => cell.key));
}

function leastOf(map, speed) {
  const cells = [...map.cells].filter(([, cell]) => cell?.tokens_per_s >= speed).map(([key]) => key.split(" ")[0]);
  return d3.least(cells, bytesOf);
}

async function mapCaps(axes) {
  const question = { ...planner.question },
    map = { ...axes, key: capsKey(question), cells: new Map(), isDone: false };
  planner.caps = map;
  drawCaps();
  // The largest caps first: what they reach is what the others are held against.
  for (const host of [...axes.host].reverse())
    for (const device of [...axes.device].reverse()) {
      const found = await fetchAnswer("plan", { ...question, device_mem: device, host_mem: host });
      if (found === null || planner.caps !== map) {
        map.isDone = true;
        if (planner.caps === map) drawCaps();
        return;
      }
      map.cells.set(`${device} ${host}`, found);
      drawCaps();
    }
  map.isDone = true;
  drawCaps();
}

function stopCaps() {
  giveUp("plan");
}

// -- the command, the link, what is pinned ---------------------------------------------------------------------------

function drawCommand(view) {
  const copied = make("span", { class: "faint", "aria-live": "polite" });
  const copy = (words, what) =>
    make(
      "button",
      {
        type: "button",
        click: async () => {
          try {
            await navigator.clipboard.writeText(what());
            copied.textContent = `${words} copied`;
          } catch {
            copied.textContent = what();
          }
        },
      },
      `copy ${words}`,
    );
  const panel = byId("plan-command");
  panel.replaceChildren(
    make("h3", { id: "plan-command-title" }, "The same in a terminal"),
    view.command ? make("pre", { tabindex: "0", "aria-label": "Command" }, make("code", { id: "plan-line" }, view.command)) : null,
    make("div", { class: "tools" }, view.command ? copy("command", () => view.command) : null, planner.config ? null : copy("link", () => location.href), view.kind === "refused" ? null : make("button", { type: "button", id: "pin", click: pin }, "pin to compare"), copied),
  );
}

/** A few words of what was asked that tell it from other questions. */
function questionWords(answer) {
  const { view } = answer;
  const setup = view.setup;
  return [`${view.model} on ${view.devices > 1 ? `${countWords(view.devices)} × ` : ""}${view.hardware}`, `sequence ${countWords(setup.sequence_tokens)}`, `${countWords(view.batch_tokens)} tokens`, setup.precision, setup.recompute === "none" ? "" : `recompute ${setup.recompute}`, `cap ${capWords(view.fit.cap)}`].filter(Boolean).join(" · ");
}

const MOST_PINS = 6;

function pin() {
  if (!planner.answer || planner.pins.some((one) => one.key === planner.answer.key && one.view.kind === planner.answer.view.kind)) return;
  planner.pins = [...planner.pins, { ...planner.answer, hash: location.hash, price: planner.prices[hardwareOf(planner.question)] }].slice(-MOST_PINS);
  drawPins();
}

function drawPins() {
  const panel = byId("plan-pins"),
    now = planner.answer;
  panel.hidden = !planner.pins.length;
  if (panel.hidden) return;
  const rows = [...planner.pins, ...(now && now.view.kind !== "refused" && !planner.pins.some((one) => one.key === now.key && one.view.kind === now.view.kind) ? [{ ...now, isNow: true, price: planner.prices[hardwareOf(planner.question)] }] : [])];
  const first = rows[0].view;
  const number = (words) => make("td", { class: "number" }, words);
  const line = (row, place) =>
    make(
      "tr",
      {},
      make("th", { scope: "row", class: "left" }, row.isNow ? "shown now: " : "", questionWords(row)),
      make("td", {}, row.view.kind),
      number(row.view.words.speed),
      number(place ? errorWords(row.view.tokens_per_s / first.tokens_per_s - 1) : ""),
      number(row.view.words.speed_range || UNKNOWN),
      number(row.view.words.mfu),
      number(row.view.words.step),
      make("td", { class: row.view.fit.tone }, row.view.fit.of),
      number(row.price ? rateWords(tokensPerDollar(row.view, row.price), "") : UNKNOWN),
      make("td", {}, row.isNow ? null : make("button", { type: "button", class: "link", "aria-label": `Show ${questionWords(row)} again`, click: () => restore(row) }, "show"), " ", row.isNow ? null : make("button", { type: "button", class: "link", "aria-label": `Unpin ${questionWords(row)}`, click: () => unpin(row) }, "unpin")),
    );
  const heads = ["set-up", "", "speed", "against the first", "8 of 10 lie in", "MFU", "step", "memory", "tok/$", ""];
  const head = make("tr", {}, heads.map((words, place) => make("th", { scope: "col", class: place > 1 && place !== 7 && place !== 9 ? "number" : "left" }, words || make("span", { class: "hidden" }, place === 1 ? "how it is known" : "again"))));
  fill("plan-pins", "How do they compare?", "What was pinned, and what is shown now.", scrolling("Pinned set-ups", make("table", { class: "small words" }, make("thead", {}, head), make("tbody", {}, rows.map(line)))));
}

function unpin(row) {
  planner.pins = planner.pins.filter((one) => one !== row);
  drawPins();
}
function restore(row) {
  planner.question = { ...row.question };
  writeAddress();
  drawControls();
  ask();
}

// -- the tab ---------------------------------------------------------------------------------------------------------

function openPlanner() {
  readPlannerAddress();
  byId("title").textContent = "Plan";
  drawControls();
  if (planner.answer && isCurrent()) drawAnswer();
  else ask();
}

/** The tab from Python's side is one empty place for each panel. */
function startPlanner() {
  byId("ask").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || shownTab !== "plan" || ["INPUT", "TEXTAREA", "SELECT"].includes(document.activeElement?.tagName)) return;
    const search = byId("plan-step").querySelector("input[type=search]");
    if (!search) return;
    event.preventDefault();
    search.focus();
  });
}
