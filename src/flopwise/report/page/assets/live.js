"use strict";
// A training, or a sweep, that goes on: how far it is, and the page that follows it.

/** What a run that goes on has come to; null for all others. */
function progressOf(row) {
  return row?.run && row.state === "running" ? (state.page.progress?.[row.run] ?? null) : null;
}

/** Its row shows the figures of now: what is measured in the end is written when it ends. */
function addProgress(row) {
  const progress = progressOf(row);
  if (!progress) return;
  const now = { tokens_per_s: progress.tokens_per_s, step_s: progress.step_s, last_loss: progress.loss };
  for (const [name, value] of Object.entries(now)) if (value !== null) Object.defineProperty(row, name, { value });
}

/** Of a running row how many steps are done, else its state. */
function stateOfRow(row) {
  const progress = progressOf(row);
  return progress ? `▸ ${countWords(progress.step)}/${countWords(progress.steps)}` : stateWords(row.state);
}

function leftWords(seconds) {
  if (seconds < 90) return `${Math.round(seconds)}${FIRM}s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)}${FIRM}min`;
  const hours = Math.floor(seconds / 3600);
  return hours < 48 ? `${hours}${FIRM}h ${Math.round((seconds % 3600) / 60)}${FIRM}min` : `${Math.round(hours / 24)}${FIRM}days`;
}

/** What can be said already of a training that goes on. */
function verdictSoFar(progress) {
  const told = [];
  if (progress.predicted_s && progress.step_s) {
    const ratio = progress.step_s / progress.predicted_s;
    told.push(
      Math.abs(ratio - 1) <= BAND
        ? `a step takes the predicted ${secondsWords(progress.predicted_s)}`
        : ratio > 3
          ? `a step takes ${significant(ratio, 2)} times the predicted ${secondsWords(progress.predicted_s)}`
          : `a step takes ${aboutWords(Math.abs(ratio - 1))} ${ratio > 1 ? "longer" : "less"} than the predicted ${secondsWords(progress.predicted_s)}`,
    );
  }
  if (progress.exposed_share !== null && progress.exposed_share >= 0.02)
    told.push(`${aboutWords(progress.exposed_share)} of the time a copy is awaited`);
  return told.length ? ` So far: ${told.join("; ")}.` : "";
}

function drawProgress(row) {
  const panel = byId("progress"),
    progress = progressOf(row);
  panel.hidden = !progress;
  if (!progress) return;
  const share = Math.min(1, progress.step / progress.steps);
  const left = progress.left_s !== null ? `; about ${leftWords(progress.left_s)} left` : "";
  const figures = [
    ["loss", progress.loss === null ? null : significant(progress.loss, 4)],
    [
      "evaluation",
      progress.evaluation && number(progress.evaluation[1]) !== null
        ? `${significant(progress.evaluation[1], 4)} after step ${countWords(progress.evaluation[0])}`
        : null,
    ],
    ["learning rate", progress.learning_rate === null ? null : significant(progress.learning_rate)],
    ["speed", progress.tokens_per_s === null ? null : `${speedWords(progress.tokens_per_s)} tok/s`],
    ["MFU", progress.mfu === null ? null : shareWords(progress.mfu)],
    ["step", progress.step_s === null ? null : secondsWords(progress.step_s)],
    ["device memory", progress.device_bytes === null ? null : bytesWords(progress.device_bytes)],
    ["host memory", progress.host_bytes === null ? null : bytesWords(progress.host_bytes)],
  ].filter(([, words]) => words !== null);
  const sentence = progress.step
    ? `Step ${countWords(progress.step)} of ${countWords(progress.steps)}, ${aboutWords(share)}${left}.${verdictSoFar(progress)}`
    : `It has begun; no step of ${countWords(progress.steps)} is done yet.`;
  fill(
    "progress",
    "How far is it?",
    sentence,
    make("progress", { max: progress.steps, value: progress.step, "aria-label": "Steps done" }),
    figures.length
      ? make(
          "dl",
          { class: "figures" },
          figures.map(([what, words]) => make("div", {}, make("dt", {}, what), make("dd", {}, words))),
        )
      : null,
  );
}

/** `3 running · 12 to come`: what of the store has not ended. */
function openWords(rows) {
  const count = (name) => rows.filter((row) => row.state === name).length;
  const running = count("running"),
    planned = running ? count("planned") : 0;
  return [running ? `${countWords(running)} running` : null, planned ? `${countWords(planned)} to come` : null];
}

// -- what is followed ------------------------------------------------------------------------------------------------

/** The newest of the runs that go on. */
function newestRunning() {
  return d3.greatest(
    state.rows.filter((row) => row.state === "running"),
    (left, right) => d3.ascending(left.started ?? "", right.started ?? "") || left.index - right.index,
  );
}

/** The row that was selected, by its key, or by its cell, which may have become a run since. */
function findRow(key) {
  const same = state.rows.find((row) => row.key === key);
  if (same) return same;
  const cell = /^cell-(.+?)(?:-\d+)?$/.exec(key)?.[1];
  if (cell) return state.rows.findLast((row) => row.cell === cell) ?? null;
  return state.rows.find((row) => row.run !== null && Number(row.run) === Number(key)) ?? null;
}

const EVERY_MS = 2000;
let fetchedAt = Date.now(),
  isAnswered = true;

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
    isAnswered = answer.ok || answer.status === 304;
    if (isAnswered) fetchedAt = Date.now();
    if (answer.status === 200) {
      showNew(await answer.json());
      // Only now: what could not be shown is asked for again.
      state.etag = answer.headers.get("ETag");
    } else if (isAnswered && state.selected) await fetchDetail(state.selected);
  } catch {
    isAnswered = false;
  }
}

/** New data with the same choices: selection, filters, scroll and focus stay. */
function showNew(page) {
  const chosen = state.hash.run,
    before = state.selected;
  const hadRows = JSON.stringify(state.page.columns);
  // Details of other runs may have changed too: they are fetched again when they are asked for.
  for (const name of [...state.details.keys()]) if (name !== before?.run) state.details.delete(name);
  loadPage(page);
  const kept = before && findRow(before.key);
  // Without a choice the newest run that goes on is followed, and stays when it has ended.
  state.selected = (chosen && kept) || newestRunning() || kept || usualRow();
  if (chosen && state.selected) state.hash.run = state.selected.key;
  // With the first runs there are tabs that were not there before.
  drawTabs();
  if (shownTab === "compare") followCompared();
  // What is hidden is drawn when it is opened, and has no part in the address.
  if (shownTab !== "runs") return;
  if (chosen) writeAddress();
  if (JSON.stringify(page.columns) === hadRows) drawSteady();
  else keepingPlace(drawAll);
  if (state.selected) fetchDetail(state.selected, true);
}

/** Only what goes on has changed. */
function drawSteady() {
  state.shown = filtered();
  table.rows = sortedRows(state.shown);
  drawAboutPage();
  drawWindow(true);
  drawProgress(state.selected);
}

/** Draw all anew, with scroll, focus and what was typed as they were. */
function keepingPlace(draw) {
  const top = table.scroller?.scrollTop ?? 0,
    focus = document.activeElement?.id,
    down = scrollY;
  const typed = focus === "filter-q" ? document.activeElement.selectionStart : null;
  draw();
  table.scroller.scrollTop = top;
  drawWindow(true);
  scrollTo(0, down);
  if (focus) byId(focus)?.focus({ preventScroll: true });
  if (typed !== null) byId("filter-q").setSelectionRange(typed, typed);
}

function follow() {
  const told = byId("updated");
  told.hidden = false;
  byId("network").textContent = "It asks nobody but the machine that serves it.";
  setInterval(update, EVERY_MS);
  document.addEventListener("visibilitychange", update);
  const tell = () => {
    const seconds = Math.round((Date.now() - fetchedAt) / 1000);
    const ago = seconds < 5 ? "just now" : seconds < 120 ? `${seconds} s ago` : `${Math.round(seconds / 60)} min ago`;
    const words = isAnswered ? `updated ${ago}` : `no answer; last updated ${ago}`;
    if (told.textContent !== words) told.textContent = words;
  };
  setInterval(tell, 1000);
  tell();
}
