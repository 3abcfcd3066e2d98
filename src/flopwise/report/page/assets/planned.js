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
  const told = view.bars.map((bar) => `${bytesWords(d3.sum(bar.bytes))} on the ${bar.place}${bar.cap ? ` of ${bar.cap_words}` : ""}`);
  const words = `${{ good: "Yes", warn: "Yes, just", bad: "No" }[view.fit.tone]}: ${listWords(told)}; ${view.fit.words}.`;
  const svg = described(memoryBars(foreseenBars(view), widthOf("plan-memory")), `Memory by owner: ${view.bars.map((bar) => `${bar.place}: ${bar.owners.map((owner, place) => `${owner} ${bar.words[place]}`).join(", ")}`).join("; ")}.`);
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
    fill("plan-step", question, words, make("div", { class: "plot" }, partsBar(view, "plan-step")), partsTable(view));
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
function partsBar(view, panel) {
  const width = widthOf(panel),
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
