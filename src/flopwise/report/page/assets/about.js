"use strict";
// What a row was asked for and with what it ran; and of a row that nobody has run, what is foreseen of it.

function pairsList(pairs) {
  return make("dl", { class: "figures pairs" }, pairs.map(([what, words]) => make("div", {}, make("dt", {}, what), make("dd", { title: words.length > 40 ? words : null }, words))));
}

/** Every field of the row, its set-up, versions and the end of its log. */
function drawAbout(row, detail) {
  byId("about-run").hidden = !row;
  if (!row) return;
  const fields = state.page.names.filter((name) => row[name] !== null && row[name] !== undefined && row[name] !== "").map((name) => [fieldTitle(name), fieldWords(name, row[name])]);
  const part = (title, ...content) => make("details", {}, make("summary", {}, title), ...content);
  const parts = [part(`The row, ${countOf(fields.length, "field")}`, pairsList(fields))];
  if (detail?.setup?.length) parts.push(part(`What was asked for and settled, ${countOf(detail.setup.length, "setting")}`, pairsList(detail.setup)));
  if (detail?.versions?.length) parts.push(part("With what it ran", pairsList(detail.versions)));
  if (detail?.log?.length) parts.push(part("The end of its log", make("pre", { class: "log", tabindex: "0", "aria-label": "Log" }, detail.log.join("\n"))));
  const ran = row.run ? `Everything that is written down of run ${row.run}.` : "Everything that is known of it.";
  fill("about-run", "What exactly was it?", ran, ...parts);
}

/** Which panels a row can fill; what it cannot is left out, not told five times. */
function showPanels(row, detail) {
  const isForeseen = row !== null && !row.run;
  for (const id of ["timeline", "steps", "roofline"]) byId(id).hidden = isForeseen || (id === "steps" && Boolean(state.page.of_profiles));
  byId("profile").hidden = isForeseen && !row.foreseen && row.state === "planned";
  byId("why").hidden = !detail?.why;
  if (detail?.why) byId("why").replaceChildren(make("h3", { id: "why-title" }, "What limits it?"), make("p", {}, state.page.of_profiles ? detail.why : capital(detail.why)));
}

// -- what is foreseen ------------------------------------------------------------------------------------------------

function foreseenBars(view) {
  return view.bars.map((bar) => ({
    place: bar.place,
    pieces: bar.owners.map((owner, place) => ({ owner, bytes: bar.bytes[place], words: bar.words[place] })),
    cap: bar.cap,
    capWords: bar.cap_words,
  }));
}

function drawForeseenMemory(view) {
  const told = view.bars.map((bar) => `${bytesWords(d3.sum(bar.bytes))} on the ${bar.place}${bar.cap ? ` of ${bar.cap_words}` : ""}`);
  const words = `${{ good: "Yes", warn: "Yes, just", bad: "No" }[view.fit.tone]}, as predicted: ${listWords(told)}; ${view.fit.words}.`;
  const svg = described(memoryBars(foreseenBars(view), widthOf("memory")), `Memory by owner: ${words}`);
  fill("memory", "Does it fit?", words, make("div", { class: "plot" }, svg), ownersLegend(view.bars));
}

function drawForeseenStep(row, view) {
  const { words } = view;
  const range = words.speed_range ? `, ${words.speed_range} in ${words.evidence}` : `; ${words.evidence}`;
  const sentence = `Predicted: ${words.speed}${range}. The step takes ${words.step} at ${words.mfu} MFU, bound by ${view.bound}.`;
  const command = view.command ? make("p", { class: "faint" }, "In a terminal: ", make("code", {}, view.command)) : null;
  fill("profile", "Where would the time go?", sentence, make("div", { class: "plot" }, partsBar(view, "profile")), partsTable(view), command);
}
