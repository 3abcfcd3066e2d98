"use strict";
// Plan, Runs and Compare: one of them is shown, and the address holds what is chosen on it.

/** Name → title; `isThere()`, whether this page has it; `entries()`, what it keeps in the address; `open()`, which draws
 *  it from what the address says. What is hidden has no width, so that a tab is drawn when it is opened. */
const tabs = new Map();
let shownTab = null;

function addTab(name, tab) {
  tabs.set(name, tab);
}

function tabsThere() {
  return [...tabs].filter(([, tab]) => tab.isThere()).map(([name]) => name);
}

/** What the address asks for: a tab by name; the tab of runs where it names what only runs have; else the first. */
function tabOfAddress() {
  const given = new URLSearchParams(location.hash.slice(1)),
    there = tabsThere();
  if (there.includes(given.get("tab"))) return given.get("tab");
  return given.size && !given.get("tab") && there.includes("runs") ? "runs" : firstTab();
}

function firstTab() {
  const there = tabsThere();
  return there.includes(state.page.opens) ? state.page.opens : there[0];
}

/** The address as it is to be; runs alone need not say that they are runs. */
function writeAddress() {
  const kept = new URLSearchParams(tabs.get(shownTab).entries());
  const text = kept.toString();
  const isPlain = shownTab === firstTab() ? !text : false;
  const named = shownTab === "runs" && (text || firstTab() === "runs") ? text : `tab=${shownTab}${text ? `&${text}` : ""}`;
  history.replaceState(null, "", isPlain || !named ? location.pathname + location.search : `#${named}`);
}

function openTab(name) {
  shownTab = name;
  for (const other of tabs.keys()) byId(`tab-${other}`).hidden = other !== name;
  drawTabs();
  document.documentElement.dataset.tab = name;
  tabs.get(name).open();
}

function drawTabs() {
  const there = tabsThere();
  byId("tabs").hidden = there.length < 2;
  byId("tabs").replaceChildren(
    ...there.map((name) =>
      make(
        "a",
        {
          href: `#tab=${name}`,
          "aria-current": name === shownTab ? "page" : null,
          click: (event) => {
            event.preventDefault();
            openTab(name);
            writeAddress();
            byId("tabs").querySelector("[aria-current]").focus({ preventScroll: true });
          },
        },
        tabs.get(name).title,
      ),
    ),
  );
}
