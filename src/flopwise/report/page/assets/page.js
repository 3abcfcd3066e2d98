"use strict";
// Puts the page together, and keeps it up to date where it is served.

const EVERY_MS = 3000;
let fetchedAt = Date.now(),
  isQuiet = true;

// -- what is selected ------------------------------------------------------------------------------------------------

function findRow(key) {
  return (
    state.rows.find((row) => row.key === key) ??
    state.rows.find((row) => row.run !== null && Number(row.run) === Number(key)) ??
    null
  );
}

/** Without a choice: the fastest run that has been profiled, else that has details, else the first row. */
function usualRow() {
  const told = state.rows.filter((row) => row.run && state.details.has(row.run));
  const profiled = told.filter((row) => state.details.get(row.run).is_profiled);
  return (
    d3.greatest(profiled.length ? profiled : told, (row) => row.tokens_per_s ?? 0) ?? bestRow() ?? state.rows[0] ?? null
  );
}
function bestRow() {
  return (
    d3.greatest(
      state.rows.filter((row) => speed(row)),
      (row) => speed(row).value,
    ) ?? null
  );
}

function selectRow(row, scroll = false) {
  state.selected = row;
  choose({ run: row.key });
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
    placeholder: "any word",
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
}

function drawOverview() {
  drawCards(state.shown);
  drawHeatmap(state.shown);
  drawAccuracy(state.shown);
  markSelected();
}

// -- the whole page --------------------------------------------------------------------------------------------------

function drawAll() {
  const rows = state.rows,
    profiled = [...state.details.values()].filter((detail) => detail.is_profiled).length;
  const counts = [
    countOf(rows.length, "row"),
    countOf(new Set(rows.map((row) => row.model).filter(Boolean)).size, "model"),
    profiled && !LIVE ? `${countOf(profiled, "profiled run")}` : null,
  ];
  byId("title").textContent = state.page.title;
  byId("about").textContent =
    `${LIVE ? "As of" : "Made"} ${whenWords(state.page.created)} · ${counts.filter(Boolean).join(" · ")}`;
  // One run alone comes first: there is nothing to compare it with.
  byId("tab-runs").classList.toggle("single", rows.length === 1);
  drawCompared(state.page);
  state.shown = filtered();
  state.selected = (state.hash.run && findRow(state.hash.run)) || usualRow();
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
  addTab("runs", { title: "Runs", isThere: () => true, entries: hashEntries, open: drawAll });
  openTab(tabOfAddress());
  const opened = shownTab === "runs" && state.hash.run;
  if (opened && state.selected) reveal(Math.max(0, table.rows.indexOf(state.selected)));
  if (opened && state.selected?.key === state.hash.run) requestAnimationFrame(() => byId("run").scrollIntoView());
  addEventListener("hashchange", () => {
    readHash();
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

// -- live ------------------------------------------------------------------------------------------------------------

async function fetchDetail(row, again = false) {
  if (!LIVE || !row.run || (state.details.has(row.run) && !again)) return;
  try {
    const answer = await fetch(`run/${encodeURIComponent(row.run)}.json`, { cache: "no-store" });
    if (!answer.ok) return;
    state.details.set(row.run, await answer.json());
    if (state.selected?.run === row.run) drawRun();
  } catch {
    /* The next round asks again. */
  }
}

async function update() {
  if (document.hidden) return;
  try {
    const answer = await fetch("data.json", {
      cache: "no-store",
      headers: state.etag ? { "If-None-Match": state.etag } : {},
    });
    isQuiet = answer.ok || answer.status === 304;
    if (isQuiet) fetchedAt = Date.now();
    if (answer.status === 200) {
      state.etag = answer.headers.get("ETag");
      showNew(await answer.json());
    }
  } catch {
    isQuiet = false;
  }
}

/** New data with the same choices: selection, filters, scroll and focus stay. */
function showNew(page) {
  const key = state.selected?.key,
    top = table.scroller?.scrollTop ?? 0,
    focus = document.activeElement?.id;
  const typed = document.activeElement?.id === "filter-q" ? document.activeElement.selectionStart : null;
  const down = scrollY;
  const isShown = shownTab === "runs";
  // Details of other runs may have changed too: they are fetched again when they are asked for.
  for (const name of [...state.details.keys()]) if (name !== state.selected?.run) state.details.delete(name);
  loadPage(page);
  const chosen = state.hash.run;
  // What is hidden is drawn when it is opened.
  if (!isShown) return;
  if (key && !chosen) state.hash.run = key;
  drawAll();
  state.hash.run = chosen;
  table.scroller.scrollTop = top;
  drawWindow(true);
  scrollTo(0, down);
  if (focus) byId(focus)?.focus({ preventScroll: true });
  if (typed !== null) byId("filter-q").setSelectionRange(typed, typed);
  if (state.selected) fetchDetail(state.selected, true);
}

function follow() {
  const told = byId("updated");
  told.hidden = false;
  byId("network").textContent = "It asks nobody but the machine that serves it.";
  setInterval(update, EVERY_MS);
  const tell = () => {
    const seconds = Math.round((Date.now() - fetchedAt) / 1000);
    const ago = seconds < 5 ? "just now" : seconds < 120 ? `${seconds} s ago` : `${Math.round(seconds / 60)} min ago`;
    const words = isQuiet ? `updated ${ago}` : `no answer; last updated ${ago}`;
    if (told.textContent !== words) told.textContent = words;
  };
  setInterval(tell, 1000);
  tell();
}

start();
