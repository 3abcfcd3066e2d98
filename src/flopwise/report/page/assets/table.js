"use strict";
// All runs: only the rows in sight are in the document, however many there are.

const ROW_HEIGHT = 32,
  BEYOND = 6;
const table = { columns: [], body: null, scroller: null, first: -1, last: -1, rows: [], shape: "" };

function sortedRows(rows) {
  // The newest first; what was never begun stays behind, in its order.
  const key = state.hash.sort ?? "-started",
    name = key.replace(/^-/, ""),
    sign = key.startsWith("-") ? -1 : 1;
  if (isEmptyColumn(name)) return rows;
  const value = sortValue(name);
  const keyed = rows.map((row) => [value(row), row]);
  // What is not known comes last either way.
  keyed.sort(([left], [right]) => {
    const none = (left === null) - (right === null);
    if (none || left === null) return none;
    return (
      sign * (typeof left === typeof right ? d3.ascending(left, right) : d3.ascending(String(left), String(right)))
    );
  });
  return keyed.map(([, row]) => row);
}

function drawTable() {
  table.rows = sortedRows(state.shown);
  table.columns = shownColumns();
  const sample = table.rows.filter((_, place) => place % Math.ceil(table.rows.length / 200) === 0);
  const widths = table.columns.map(([name, heading, words, isNumber, longest]) => {
    const signs = Math.max(
      heading.length + 1,
      name === "state" ? 10 : 0,
      d3.max(sample, (row) => words(row).length) ?? 0,
    );
    return (isNumber ? 0.62 : 0.7) * Math.min(longest, signs) + 1.35;
  });
  const shape = `${table.columns.map(([name]) => name).join()}|${widths.join()}|${state.constants.join()}`;
  if (shape !== table.shape || !table.body) buildTable(widths);
  table.shape = shape;
  byId("table")
    .querySelector(".answer")
    .replaceChildren(...withCode(tableSentence()));
  for (const head of byId("table").querySelectorAll("th[data-name]")) {
    const key = state.hash.sort ?? "",
      way = key === head.dataset.name ? "ascending" : key === `-${head.dataset.name}` ? "descending" : "none";
    head.setAttribute("aria-sort", way);
    head.querySelector("i").textContent = way === "ascending" ? "▲" : way === "descending" ? "▼" : "";
  }
  table.first = -1;
  table.element.setAttribute("aria-rowcount", table.rows.length + 1);
  drawWindow();
}

function tableSentence() {
  const count = isFiltered()
    ? `${countWords(table.rows.length)} of ${countOf(state.rows.length, "row")}`
    : countOf(table.rows.length, "row");
  const same = state.constants
    .map((name) => AXES[name]?.[0] && `${AXES[name][0]} ${AXES[name][1](state.rows[0][name])}`)
    .filter(Boolean);
  const alike = same.length ? ` The same in all: ${listWords(same.map((words) => cut(words, 50)))}.` : "";
  if (!state.rows.length) return `There are no runs here yet. \`flopwise train\` trains a small model on this machine${LIVE ? ", and this page follows it" : ""}; \`flopwise sweep\` several.`;
  if (!table.rows.length) return "No row is left by the filters: clear them to see all.";
  return `${count}; select one to see it below, tick some to compare them, sort by any heading.${alike}`;
}

function buildTable(widths) {
  const head = make(
    "tr",
    { "aria-rowindex": "1" },
    make("th", { scope: "col", class: "mark" }, make("span", { class: "hidden" }, "compare")),
    table.columns.map(([name, heading, , isNumber]) =>
      make(
        "th",
        { scope: "col", "data-name": name, class: isNumber ? "number" : null, "aria-sort": "none" },
        make("button", { type: "button", click: () => sortBy(name) }, heading, make("i", { "aria-hidden": "true" })),
      ),
    ),
  );
  table.body = make("tbody", {});
  table.element = make(
    "table",
    {
      class: "rows",
      role: "grid",
      "aria-label": "Runs",
      style: `width:max(100%,${(2 + widths.reduce((sum, width) => sum + width, 0)).toFixed(1)}em)`,
    },
    make(
      "colgroup",
      {},
      make("col", { style: "width:2em" }),
      widths.map((width) => make("col", { style: `width:${width.toFixed(2)}em` })),
    ),
    make("thead", {}, head),
    table.body,
  );
  table.scroller = make("div", { class: "scroller", scroll: () => drawWindow() }, table.element);
  const tools = make(
    "div",
    { class: "tools" },
    make("a", { id: "csv", href: "#", download: "flopwise-runs.csv", click: linkCsv }, "CSV of these rows"),
    make("button", { type: "button", id: "copy", click: copyMarkdown }, "copy as markdown"),
    make("button", { type: "button", id: "compare-marked", click: () => compareMarked() }, "compare"),
    make("span", { id: "copied", role: "status", class: "faint" }),
    columnChooser(),
  );
  fill("table", "Which runs are there?", "", tools, table.scroller);
  drawMarked();
  table.body.addEventListener("click", (event) => {
    if (event.target.closest(".mark")) return;
    const row = rowAt(event.target);
    if (row) selectRow(row);
  });
  table.element.addEventListener("keydown", tableKey);
}

function rowAt(element) {
  const line = element.closest("tr[data-place]");
  return line ? table.rows[Number(line.dataset.place)] : null;
}

function sortBy(name) {
  const isNumber = table.columns.find(([field]) => field === name)[3];
  const [first, second] = isNumber ? [`-${name}`, name] : [name, `-${name}`];
  choose({ sort: state.hash.sort === first ? second : state.hash.sort === second ? null : first });
  table.scroller.scrollTop = 0;
  drawTable();
}

/** The rows in sight and a few beyond; the room of the others is kept by two empty rows. */
function drawWindow(force = false) {
  // As high as it may grow: with few rows before, it is lower than that.
  const height = parseFloat(getComputedStyle(table.scroller).maxHeight) || 480,
    top = table.scroller.scrollTop;
  const first = Math.max(0, Math.floor(top / ROW_HEIGHT) - BEYOND),
    last = Math.min(table.rows.length, Math.ceil((top + height) / ROW_HEIGHT) + BEYOND);
  if (!force && table.first === first && table.last === last) return;
  Object.assign(table, { first, last });
  const focused = table.body.contains(document.activeElement) ? document.activeElement.dataset.place : null;
  const space = (count) =>
    count > 0
      ? make(
          "tr",
          { class: "space", "aria-hidden": "true" },
          make("td", { colspan: table.columns.length + 1, style: `height:${count * ROW_HEIGHT}px` }),
        )
      : null;
  const active = table.rows.indexOf(state.selected);
  const lines = table.rows.slice(first, last).map((row, offset) => {
    const place = first + offset,
      isSelected = row === state.selected;
    return make(
      "tr",
      {
        "data-place": place,
        "aria-rowindex": place + 2,
        "aria-selected": isSelected ? "true" : "false",
        tabindex: isSelected || (place === first && (active < first || active >= last)) ? "0" : "-1",
      },
      make(
        "td",
        { class: "mark" },
        make("input", { type: "checkbox", tabindex: isSelected ? "0" : "-1", checked: isMarked(row), "aria-label": `Compare ${rowName(row)}`, change: (event) => mark(row, event.target.checked) }),
      ),
      table.columns.map(([name, , words, isNumber]) => {
        const text = words(row);
        return make(
          "td",
          {
            class: name === "state" ? `state ${stateClass(row.state)}` : isNumber ? "number" : null,
            title: text.length > 16 ? text : null,
          },
          text,
        );
      }),
    );
  });
  table.body.replaceChildren(...[space(first), ...lines, space(table.rows.length - last)].filter(Boolean));
  if (focused !== null) table.body.querySelector(`tr[data-place="${focused}"]`)?.focus({ preventScroll: true });
}

function tableKey(event) {
  const line = event.target.closest("tr[data-place]");
  if (!line || event.target.tagName === "INPUT") return;
  const place = Number(line.dataset.place),
    page = Math.max(1, Math.floor(table.scroller.clientHeight / ROW_HEIGHT) - 2),
    end = table.rows.length - 1;
  const to = {
    ArrowDown: place + 1,
    ArrowUp: place - 1,
    PageDown: place + page,
    PageUp: place - page,
    Home: 0,
    End: end,
    Enter: place,
    " ": place,
  }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const next = Math.min(end, Math.max(0, to));
  selectRow(table.rows[next]);
  reveal(next);
  table.body.querySelector(`tr[data-place="${next}"]`)?.focus({ preventScroll: true });
}

/** Scroll within the table so that a row is in sight. */
function reveal(place) {
  const top = place * ROW_HEIGHT,
    room = table.scroller.clientHeight - ROW_HEIGHT - 8;
  if (top < table.scroller.scrollTop) table.scroller.scrollTop = top;
  else if (top + ROW_HEIGHT > table.scroller.scrollTop + room) table.scroller.scrollTop = top + ROW_HEIGHT - room;
  drawWindow(true);
}

// -- CSV and markdown ------------------------------------------------------------------------------------------------

function csvCell(value) {
  if (value === null || value === undefined) return "";
  let text = String(value);
  // A cell that a spreadsheet would run as a formula is kept as text.
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text) && text !== "-") text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Every column at full precision, of the rows that the filters leave, in the order they are shown. */
function csvText() {
  const names = state.page.names;
  return (
    [names.join(","), ...table.rows.map((row) => names.map((name) => csvCell(row[name])).join(","))].join("\r\n") +
    "\r\n"
  );
}

function linkCsv(event) {
  const link = event.currentTarget;
  if (link.href.startsWith("blob:")) URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([csvText()], { type: "text/csv;charset=utf-8" }));
}

function markdownText() {
  const clean = (words) =>
    words
      .replaceAll(FIRM, " ")
      .replaceAll("\\", "\\\\")
      .replaceAll("|", "\\|")
      .replaceAll("<", "&lt;")
      .replace(/[\r\n]+/g, " ");
  const line = (cells) => `| ${cells.join(" | ")} |`;
  return (
    [
      line(table.columns.map(([, heading]) => heading)),
      line(table.columns.map(([, , , isNumber]) => (isNumber ? "---:" : "---"))),
      ...table.rows.map((row) => line(table.columns.map(([, , words]) => clean(words(row))))),
    ].join("\n") + "\n"
  );
}

async function copyMarkdown() {
  const text = markdownText();
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  byId("copied").textContent = done ? `copied ${countOf(table.rows.length, "row")}` : "the browser refuses to copy";
}
