"use strict";
// Columns of the table of runs: those that are usual, every other field of a row, and the reader's choice among them.

/** [field, heading, words, is a number, longest in signs]. */
const USUAL_COLUMNS = [
  ["run", "run", (row) => row.run ?? (row.cell ? `(${row.cell.slice(0, 6)})` : UNKNOWN), false, 9],
  ["state", "state", (row) => stateOfRow(row), false, 14],
  ["reason", "reason", (row) => plainWords(row.reason), false, 24],
  ["model", "model", (row) => plainWords(row.model), false, 26],
  ["hardware", "hardware", (row) => plainWords(row.hardware), false, 18],
  ["devices", "devices", (row) => countWords(row.devices), true, 8],
  ["sequence_tokens", "sequence", (row) => countWords(row.sequence_tokens), true, 9],
  ["batch_sequences", "batch", (row) => countWords(row.batch_sequences), true, 8],
  ["micro_batch_sequences", "micro", (row) => countWords(row.micro_batch_sequences), true, 7],
  ["precision", "precision", (row) => plainWords(row.precision), false, 10],
  ["optimizer", "optimizer", (row) => plainWords(row.optimizer), false, 10],
  ["device_cap_bytes", "device cap", (row) => (row.device_cap_bytes === null ? UNKNOWN : capWords(row.device_cap_bytes)), true, 10],
  ["host_cap_bytes", "host cap", (row) => (row.host_cap_bytes === null ? UNKNOWN : capWords(row.host_cap_bytes)), true, 10],
  ["tokens_per_s", "tok/s", (row) => speedWords(row.tokens_per_s), true, 11],
  ["mfu", "MFU", (row) => shareWords(row.mfu), true, 8],
  ["hfu", "HFU", (row) => shareWords(row.hfu), true, 8],
  ["predicted_tokens_per_s", "predicted", (row) => speedWords(row.predicted_tokens_per_s), true, 11],
  ["*interval", "8 of 10 lie in", (row) => intervalWords(row) || UNKNOWN, true, 23],
  ["*predicted_mfu", "pred. MFU", (row) => shareWords(row.foreseen?.mfu), true, 9],
  ["*fit", "fits?", (row) => fitWords(row), false, 24],
  ["prediction_error", "error", (row) => errorWords(predictionError(row)), true, 9],
  ["step_s", "step", (row) => secondsWords(row.step_s), true, 9],
  ["device_bytes", "device", (row) => bytesWords(row.device_bytes), true, 10],
  ["host_bytes", "host", (row) => (row.host_bytes === 0 ? "0" : bytesWords(row.host_bytes)), true, 10],
  ["bound", "bound by", (row) => boundWords(row.bound), false, 18],
  ["last_loss", "loss", (row) => (number(row.last_loss) === null ? plainWords(row.last_loss) : significant(row.last_loss, 4)), true, 8],
  ["tokens_per_dollar", "tok/$", (row) => (number(row.tokens_per_dollar) === null ? UNKNOWN : rateWords(row.tokens_per_dollar, "")), true, 9],
  ["started", "started", (row) => whenWords(row.started), false, 17],
];

/** Figures that no field of a row is: of what is foreseen of it. */
const MADE = {
  "*interval": (row) => row.foreseen?.low_tokens_per_s ?? null,
  "*predicted_mfu": (row) => row.foreseen?.mfu ?? null,
  "*fit": (row) => (row.foreseen?.fit ? row.foreseen.fit.total / row.foreseen.fit.cap : null),
};

function intervalWords(row) {
  return row.foreseen?.words?.speed_range ?? "";
}

function fitWords(row) {
  if (row.foreseen?.fit) return `${row.foreseen.fit.tone === "bad" ? "✗" : "✓"} ${row.foreseen.fit.of}`;
  return typeof row.predicted_fits === "boolean" ? (row.predicted_fits ? "✓" : "✗") : UNKNOWN;
}

/** A field as words, by the unit that its name ends with. */
function fieldWords(name, value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (/(^|_)bytes$/.test(name)) return bytesWords(value);
  if (/(^|_)mfu$|(^|_)hfu$/.test(name)) return shareWords(value);
  if (name === "prediction_error") return errorWords(value);
  if (/_flops$|flops_per_s/.test(name)) return rateWords(value, "FLOP/s");
  if (/tokens_per_s|samples_per_s/.test(name)) return speedWords(value);
  if (/_s(_p\d+)?$/.test(name)) return secondsWords(value);
  if (name === "n_params") return rateWords(value, "");
  if (/_w$/.test(name)) return `${significant(value)}${FIRM}W`;
  if (/_hz$/.test(name)) return rateWords(value, "Hz");
  if (/_j_per_token$/.test(name)) return `${significant(value)}${FIRM}J`;
  return Number.isInteger(value) ? countWords(value) : significant(value, 4);
}

const SPELLED = { mfu: "MFU", hfu: "HFU", cuda: "CUDA", tokens_per_s: "tok/s", tokens_per_dollar: "tok/$", step_s: "step", device_bytes: "device memory", host_bytes: "host memory", n_params: "parameters", energy_j_per_token: "energy of a token" };
function fieldTitle(name) {
  return SPELLED[name] ?? name.replace(/_per_s(?=_|$)/, " a second").replace(/_(bytes|w|hz|s|flops)$/, "").replaceAll("_", " ");
}

/** All columns: the usual ones, then every other field that any row has. */
function allColumns() {
  if (state.columns?.page === state.page) return state.columns.all;
  const usual = USUAL_COLUMNS.map(([name]) => name);
  const others = state.page.names
    .filter((name) => !usual.includes(name) && !isEmptyColumn(name))
    .map((name) => [name, fieldTitle(name), (row) => fieldWords(name, row[name]), typeof state.rows.find((row) => row[name] !== null)?.[name] === "number", 18]);
  const all = [...USUAL_COLUMNS.filter(([name]) => !isEmptyColumn(name)), ...others];
  state.columns = { page: state.page, all };
  return all;
}

function isEmptyColumn(name) {
  // The error can be told wherever both speeds can.
  if (name === "prediction_error") return isEmptyColumn("tokens_per_s") || isEmptyColumn("predicted_tokens_per_s");
  if (name in MADE) return !state.rows.some((row) => MADE[name](row) !== null);
  const column = state.page.columns[state.page.names.indexOf(name)];
  return column === null || column === undefined;
}

/** As the reader has chosen, else the usual ones that differ between rows. */
function shownColumns() {
  const all = allColumns(),
    chosen = (state.hash.cols ?? "").split(",").filter(Boolean);
  if (chosen.length) return all.filter(([name]) => chosen.includes(name));
  const usual = USUAL_COLUMNS.map(([name]) => name);
  return all.filter(([name]) => usual.includes(name) && !state.constants.includes(name));
}

/** The value that a column is sorted by. */
function sortValue(name) {
  if (name in MADE) return MADE[name];
  return name === "prediction_error" ? predictionError : (row) => row[name];
}

/** Check boxes, one for each column. */
function columnChooser() {
  const shown = new Set(shownColumns().map(([name]) => name));
  const box = ([name, heading]) =>
    make(
      "label",
      {},
      make("input", {
        type: "checkbox",
        checked: shown.has(name),
        "data-column": name,
        change: (event) => {
          if (event.target.checked) shown.add(name);
          else shown.delete(name);
          choose({ cols: [...shown].join(",") || null });
          drawTable();
          byId("columns").querySelector(`[data-column="${name}"]`)?.focus();
        },
      }),
      heading,
    );
  const usual = make("button", { type: "button", click: () => (choose({ cols: null }), drawTable()) }, "the usual ones");
  return make("details", { id: "columns", class: "chooser", open: byId("columns")?.open }, make("summary", {}, "columns"), make("div", { class: "boxes", role: "group", "aria-label": "Columns" }, allColumns().map(box)), usual);
}
