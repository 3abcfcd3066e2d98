"""Hugging Face Trainer's own figures: `all_results.json`, `trainer_state.json`, or the block that it prints.

What it prints is formatted: times as H:MM:SS.cc (cut, not rounded), `total_flos` in units of 2**30 FLOP with the suffix
"GF", memory in units of 2**20 B with "MB"; its JSON files hold seconds, FLOP and bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read.opening import TraceFile
from flopwise.records.profile import Profile, Read, SourcedValue

LONGEST_LINE = 64 * 2**10
"""Bytes of a line that are looked at."""
MOST_JSON_BYTES = 256 * 2**20
MOST_METRICS = 10_000

RATES_NOTE = "the trainer's rates may count one process only: times the number of processes for all of them"
GIGA_NOTE = "HF Trainer prints int(flos) >> 30 with the suffix GF: units of 2**30 FLOP, rounded down"
MEGA_NOTE = "HF Trainer prints bytes >> 20 with the suffix MB: units of 2**20 B, rounded down"

_BLOCK = re.compile(r"\*{5} (\w{1,60}) metrics \*{5}$")
_LINE = re.compile(r"([A-Za-z][\w./\-@]{0,199})\s*=\s*(\S.*)$")
_NUMBER = re.compile(r"[+-]?\d{1,30}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?$")
_TIME = re.compile(r"(?:(\d{1,6}) days?, )?(\d{1,12}):(\d{2}):(\d{2}(?:\.\d{1,9})?)$")
_NOT_A_NUMBER = re.compile(rb"(?<=[:\[,\s])(?:NaN|-?Infinity)(?=[,\]}\s])")
_TELLTALES = (b'"train_runtime"', b'"train_steps_per_second"', b'"eval_runtime"', b'"total_flos"', b'"log_history"')


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainMetric:
    """One figure of the trainer, in base units."""

    value: float | str
    """A word where it is no finite number."""
    unit: str
    """`s`, `B`, `FLOP`, `1/s`, `epoch`, `count`, `1` or `text`."""
    raw: str
    note: str | None = None


def block_name(line: str) -> str | None:
    """`train` for the line above a block of train metrics; None: the line is no such line."""
    found = _BLOCK.search(line.rstrip())
    return found[1] if found else None


def metric_line(line: str) -> tuple[str, TrainMetric] | None:
    """A line `name = value` of a block; None: it is none."""
    found = _LINE.match(line.strip())
    return (found[1], read_metric(found[1], found[2])) if found else None


def read_metric(name: str, raw: str) -> TrainMetric:
    """A figure as the trainer prints it."""
    if time := _TIME.match(raw):
        days, hours, minutes, seconds = time.groups()
        value: float = (int(days or 0) * 24 + int(hours)) * 3600 + int(minutes) * 60 + float(seconds)
        return TrainMetric(value=value, unit="s", raw=raw)
    if re.match(r"\d{1,30}GF$", raw):
        return TrainMetric(value=int(raw[:-2]) << 30, unit="FLOP", raw=raw, note=GIGA_NOTE)
    if re.match(r"-?\d{1,30}MB$", raw):
        return TrainMetric(value=int(raw[:-2]) << 20, unit="B", raw=raw, note=MEGA_NOTE)
    if _NUMBER.match(raw):
        whole = raw.lstrip("+-").isdecimal()
        value = int(raw) if whole else float(raw)
        if math.isfinite(value):
            return TrainMetric(value=value, unit=_unit(name, whole=whole), raw=raw)
    return TrainMetric(value=raw, unit="text", raw=raw)


def _unit(name: str, *, whole: bool) -> str:
    if name == "epoch":
        return "epoch"
    if name.endswith("_per_second"):
        return "1/s"
    if name.endswith("_runtime"):
        return "s"
    if name == "total_flos":
        return "FLOP"
    return "count" if whole else "1"


def text_lines(source: TraceFile) -> Iterator[bytes]:
    """Lines without their ends; of one longer than LONGEST_LINE its beginning, one byte longer than that."""
    pending = b""
    while block := source.read(LONGEST_LINE):
        *whole, pending = (pending + block).split(b"\n")
        yield from (line[: LONGEST_LINE + 1] for line in whole)
        pending = pending[: LONGEST_LINE + 1]
    if pending:
        yield pending


def clean_line(line: bytes) -> str:
    """A line as words: bytes that are no text, and signs that steer a terminal, are replaced."""
    text = line[:LONGEST_LINE].decode("utf-8", errors="replace").rstrip("\r\n")
    return text if text.isprintable() else "".join(sign if sign.isprintable() else " " for sign in text)


def step_wall(metrics: Mapping[str, float | str]) -> SourcedValue | None:
    """Seconds of a step: runtime over steps, these counted from the rate that is printed beside it."""
    rate = metrics.get("train_steps_per_second")
    if not isinstance(rate, int | float) or not 0 < rate < math.inf:
        return None
    runtime = metrics.get("train_runtime")
    if isinstance(runtime, int | float) and 0 < runtime < math.inf:
        steps = round(min(rate * runtime, 1e15))
        # The rate has three decimals and the runtime two that are cut: enough to tell the whole number of steps?
        if steps >= 1 and runtime * 0.0005 + rate * 0.01 < 0.5:
            return SourcedValue(runtime / steps, "counted", 0.01 / steps)
    return SourcedValue(1 / rate, "counted", min(0.0005 / rate, 1.0) / rate)


def trainer_values(metrics: Mapping[str, float | str]) -> dict[str, SourcedValue]:
    """What the trainer's figures say under our names."""
    values = {}
    if (wall := step_wall(metrics)) is not None:
        values["step_wall_s"] = wall
    rate = metrics.get("train_samples_per_second")
    if isinstance(rate, int | float) and 0 < rate < math.inf:
        values["samples_per_s"] = SourcedValue(float(rate), "ingested", 0.0005)
    return values


def looks_like(head: bytes) -> bool:
    """Whether a file that begins like this is the trainer's."""
    beginning = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if beginning.startswith(b"{"):
        return b'"traceEvents"' not in head and any(name in head for name in _TELLTALES)
    return re.search(rb"\*{5} \w{1,60} metrics \*{5}", head) is not None


def read_source(source: TraceFile, name: str) -> Read:
    """Profiles of a file: one of a JSON file, one for each run of a printed text."""
    if source.head(16).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return Read(profiles=(read_json(_whole(source, name), name),))
    return Read(profiles=tuple(read_text(text_lines(source), name)))


def read_text(lines: Iterable[bytes], name: str) -> list[Profile]:
    """Printed blocks: one of train metrics begins a run, those of evaluations belong to the run before them."""
    runs: list[dict[str, float | str]] = []
    headings: list[str] = []
    block: str | None = None
    heading = ""
    kept = dropped = 0
    for line in map(clean_line, lines):
        found = block_name(line)
        if found is not None:
            if not runs or (found == "train" and any(metric.startswith("train_") for metric in runs[-1])):
                runs.append({})
                headings.append(heading)
            block = found
        elif block and (metric := metric_line(line)):
            if kept < MOST_METRICS:
                runs[-1][metric[0]] = metric[1].value
                kept += 1
            else:
                dropped += 1
        elif line.strip():
            block = None
            heading = line.lstrip("# ").strip()[:200] if line.startswith("#") else heading
    filled = [(heading, run) for heading, run in zip(headings, runs, strict=True) if run]
    if not filled:
        raise _nothing(name)
    warnings = (f"{dropped} figures beyond the first {MOST_METRICS} are left out",) if dropped else ()
    names = [
        heading or (name if len(filled) == 1 else f"{name} {number}") for number, (heading, _) in enumerate(filled, 1)
    ]
    return [_profile(title, name, run, warnings=warnings) for title, (_, run) in zip(names, filled, strict=True)]


class _State(msgspec.Struct):
    """What is read of `trainer_state.json`, each figure as it stands until it is asked for."""

    log_history: list[msgspec.Raw] | None = None
    global_step: msgspec.Raw = msgspec.Raw()
    max_steps: msgspec.Raw = msgspec.Raw()
    num_train_epochs: msgspec.Raw = msgspec.Raw()
    train_batch_size: msgspec.Raw = msgspec.Raw()
    best_metric: msgspec.Raw = msgspec.Raw()
    total_flos: msgspec.Raw = msgspec.Raw()


def read_json(content: bytes, name: str) -> Profile:
    """`all_results.json`, `train_results.json` or `trainer_state.json`."""
    # Python writes NaN for a loss that is none, which JSON has no word for.
    content, replaced = _NOT_A_NUMBER.subn(b"null", content)
    warnings = (f"{replaced} figures are NaN or infinite",) if replaced else ()
    kind: Any = _State if b'"log_history"' in content else dict
    try:
        found = msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FlopwiseError(
            f"{name} is no JSON file of the trainer", why=str(error)[:200], hint="is it cut off? copy it again"
        ) from None
    if isinstance(found, _State):
        return _state_profile(found, name, warnings)
    metrics = _figures(found)
    if not any(metric.startswith(("train_", "eval_", "total_flos")) for metric in metrics):
        raise _nothing(name)
    return _profile(name, name, metrics, warnings=warnings)


def _state_profile(state: _State, name: str, warnings: tuple[str, ...]) -> Profile:
    metrics: dict[str, float | str] = {}
    losses: list[tuple[float | str | None, float]] = []
    unreadable = logged = 0
    for raw in state.log_history or ():
        entry = _decode(raw)
        if not isinstance(entry, dict):
            unreadable += 1
            continue
        figures = _figures(entry)
        step = figures.pop("step", None)
        loss = figures.get("loss")
        if isinstance(loss, int | float):
            logged += 1
            losses = [*losses[:1], (step, loss)]
        if len(metrics) < MOST_METRICS:
            metrics.update(figures)
    others = [field for field in _State.__struct_fields__ if field != "log_history"]
    metrics.update(_figures({field: _decode(getattr(state, field)) for field in others}))
    if not metrics:
        raise _nothing(name)
    if unreadable:
        warnings = (*warnings, f"{unreadable} entries of the log are not readable")
    notes: tuple[str, ...] = ()
    if logged > 1 and all(step is not None for step, _ in losses):
        (first, from_loss), (last, to_loss) = losses[0], losses[-1]
        notes = (f"loss {from_loss:g} at step {first}, {to_loss:g} at step {last}; logged {logged} times",)
    return _profile(name, name, metrics, notes=notes, warnings=warnings)


def _decode(raw: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _figures(found: Mapping[str, Any]) -> dict[str, float | str]:
    """Numbers and words of an object; whatever else it holds is no figure."""
    kept: dict[str, float | str] = {}
    for name, value in found.items():
        if len(kept) >= MOST_METRICS:
            break
        word = isinstance(value, str) and len(value) <= 200 and value.isprintable()
        if word or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300):
            kept[name] = value
    return kept


def _profile(
    title: str, name: str, metrics: dict[str, float | str], *, notes: tuple[str, ...] = (), warnings: tuple[str, ...]
) -> Profile:
    values = trainer_values(metrics)
    if "samples_per_s" in values:
        notes = (*notes, RATES_NOTE)
    return Profile(
        name=title,
        format="trainer",
        origin=(name,),
        values=values,
        train_metrics=metrics,
        notes=notes,
        warnings=warnings,
    )


def _whole(source: TraceFile, name: str) -> bytes:
    content = source.read(MOST_JSON_BYTES + 1)
    if len(content) > MOST_JSON_BYTES:
        raise FlopwiseError(
            f"{name} is larger than {MOST_JSON_BYTES // 2**20} MiB",
            hint="`all_results.json` of the same folder holds the final figures",
        )
    return content.removeprefix(b"\xef\xbb\xbf")


def _nothing(name: str) -> FlopwiseError:
    return FlopwiseError(
        f"{name} holds no train metrics",
        hint="name its all_results.json or trainer_state.json, or what it printed below `***** train metrics *****`",
    )
