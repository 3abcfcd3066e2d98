"use strict";
// An answer to take away: the command, the link, and what was pinned to be compared.

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
