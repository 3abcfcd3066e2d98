"use strict";
// Around an answer: what would help, the same on every device, and what memory buys.

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
