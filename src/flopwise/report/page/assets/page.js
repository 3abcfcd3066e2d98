"use strict";
// Puts the page together, and keeps it up to date where it is served.

// -- what is selected ------------------------------------------------------------------------------------------------

/** Without a choice: what goes on, else the fastest run that has been profiled, else a run, else the first row. */
function usualRow(rows = state.rows) {
  const running = newestRunning();
  if (running && rows.includes(running)) return running;
  const ran = rows.filter((row) => row.run && isMeasured(row)),
    told = rows.filter((row) => row.run && state.details.has(row.run)),
    profiled = told.filter((row) => state.details.get(row.run).is_profiled);
  // Served, nobody knows yet which were profiled: the newest is what one has come for.
  if (LIVE && ran.length) return d3.greatest(ran, (left, right) => d3.ascending(left.started ?? "", right.started ?? ""));
  const some = [profiled, told, ran].find((each) => each.length) ?? [];
  return d3.greatest(some, (row) => row.tokens_per_s ?? 0) ?? bestRow(rows) ?? rows[0] ?? null;
}
function bestRow(rows = state.rows) {
  return (
    d3.greatest(
      rows.filter((row) => speed(row)),
      (row) => speed(row).value,
    ) ?? null
  );
}

function selectRow(row, scroll = false) {
  state.selected = row;
  choose({ run: row.key, t: null, task: null });
  drawWindow(true);
  markSelected();
  drawRun();
  fetchDetail(row);
  if (scroll) showRun();
}

function showRun() {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  byId("run").scrollIntoView({ behavior: still ? "auto" : "smooth", block: "start" });
  byId("run").focus({ preventScroll: true });
}

function runTools() {
  const go = (by) => () => {
    const place = table.rows.indexOf(state.selected),
      next = table.rows[Math.min(table.rows.length - 1, Math.max(0, place + by))];
    if (next) {
      selectRow(next);
      reveal(table.rows.indexOf(next));
    }
  };
  byId("run-nav").replaceChildren(
    make("button", { type: "button", click: go(-1) }, "← previous"),
    make("button", { type: "button", click: go(1) }, "next →"),
    make(
      "a",
      {
        href: "#runs",
        click: (event) => {
          event.preventDefault();
          byId("runs").scrollIntoView();
          byId("runs").focus({ preventScroll: true });
        },
      },
      "all runs",
    ),
  );
}

// -- filters ---------------------------------------------------------------------------------------------------------

function drawFilters() {
  const values = (name) =>
    [...new Set(state.rows.map((row) => row[name]).filter((value) => value !== null && value !== ""))]
      .map(String)
      .sort();
  const option = (value) => [value, cut(value, 40)];
  const changed = (name) => (value) => {
    choose({ [name]: value || null });
    refilter();
  };
  const text = make("input", {
    type: "search",
    id: "filter-q",
    placeholder: "words, tok/s>1e5",
    title: "Words, and figures: tok/s>1e5  mfu>=40%  seq=8k  device<40gib  state:oom  reason:memory",
    value: state.hash.q ?? "",
    autocomplete: "off",
    input: (event) => changed("q")(event.target.value),
  });
  const lists = FILTERS.map((name) =>
    labelled(
      name,
      select(
        `filter-${name}`,
        [["", "all"], ...values(name).map(name === "state" ? (value) => [value, stateWord(value)] : option)],
        state.hash[name] ?? "",
        changed(name),
      ),
    ),
  );
  byId("filters").replaceChildren(
    labelled("find", text),
    ...lists,
    make("button", { type: "button", id: "clear", click: clearFilters }, "clear"),
  );
  byId("clear").hidden = !isFiltered();
}

function clearFilters() {
  choose({ q: null, state: null, model: null, hardware: null });
  drawFilters();
  refilter();
  byId("filter-q").focus();
}

function refilter() {
  state.shown = filtered();
  byId("clear").hidden = !isFiltered();
  if (table.scroller) table.scroller.scrollTop = 0;
  drawOverview();
  drawTable();
  // What is shown below is one of those that are left.
  if (state.selected && state.shown.length && !state.shown.includes(state.selected)) selectRow(usualRow(state.shown));
}

function drawOverview() {
  drawCards(state.shown);
  drawBest(state.shown);
  drawHeatmap(state.shown);
  drawAccuracy(state.shown);
  markSelected();
}

// -- the whole page --------------------------------------------------------------------------------------------------

/** How many rows there are of what, and what of them goes on. */
function drawAboutPage() {
  const rows = state.rows,
    profiled = [...state.details.values()].filter((detail) => detail.is_profiled).length;
  const counts = [
    countOf(rows.length, "row"),
    countOf(new Set(rows.map((row) => row.model).filter(Boolean)).size, "model"),
    profiled && !LIVE ? `${countOf(profiled, "profiled run")}` : null,
    ...openWords(rows),
  ];
  byId("title").textContent = state.page.title;
  byId("about").textContent =
    `${LIVE ? "As of" : "Made"} ${whenWords(state.page.created)} · ${counts.filter(Boolean).join(" · ")}`;
}

function drawAll() {
  const rows = state.rows;
  drawAboutPage();
  // One run alone comes first: there is nothing to compare it with.
  byId("tab-runs").classList.toggle("single", rows.length === 1);
  // Without any there is one thing to say, and it is said once.
  byId("tab-runs").classList.toggle("nothing", !rows.length);
  drawCompared(state.page);
  state.shown = filtered();
  if (!state.rows.includes(state.selected)) state.selected = (state.hash.run && findRow(state.hash.run)) || usualRow();
  drawFilters();
  drawOverview();
  drawTable();
  runTools();
  drawRun();
  if (state.selected) fetchDetail(state.selected);
}

function start() {
  loadPage(JSON.parse(byId("data").textContent));
  readHash();
  addTab("plan", { title: "Plan", isThere: () => plannerData() !== null, entries: plannerEntries, open: openPlanner });
  addTab("runs", { title: "Runs", isThere: () => LIVE || plannerData() === null, entries: hashEntries, open: drawAll });
  addTab("compare", { title: "Compare", isThere: canCompare, entries: compareEntries, open: openCompare });
  if (plannerData()) startPlanner();
  openTab(tabOfAddress());
  const opened = shownTab === "runs" && state.hash.run;
  if (opened && state.selected) reveal(Math.max(0, table.rows.indexOf(state.selected)));
  if (opened && state.selected?.key === state.hash.run) requestAnimationFrame(() => byId("run").scrollIntoView());
  addEventListener("hashchange", () => {
    readHash();
    state.selected = null;
    openTab(tabOfAddress());
    if (shownTab === "runs" && state.hash.run) byId("run").scrollIntoView();
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("runs").focus();
    byId("runs").scrollIntoView();
  });
  redrawOnResize();
  if (LIVE) follow();
}

function redrawOnResize() {
  let width = innerWidth,
    timer = null;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (shownTab !== "runs") {
        tabs.get(shownTab).open();
        return;
      }
      drawOverview();
      drawWindow(true);
      drawRun();
    }, 120);
  });
}

start();
