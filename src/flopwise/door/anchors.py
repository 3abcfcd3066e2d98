"""A measured step as people name it: `tokens_per_s=6667@gpus=8 seq=8k batch=16`, a run, a trainer's log, a trace."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.files import LARGEST_FILE_BYTES, read_text
from flopwise.base.headers import other_separator, otherwise_written
from flopwise.base.units import parse_figure
from flopwise.catalog.load import load_evidence, measured_stack, model_from_table
from flopwise.door.asking import hardware_of, model_of, setup_of
from flopwise.predict.anchor import FOUR_OF_FIVE, Anchor, anchored_interval, anchored_stack, find_anchor, own_stack
from flopwise.predict.choose import choose
from flopwise.predict.expected import scatter_of
from flopwise.predict.kernels.costs import peak_flops
from flopwise.predict.step import model_flops, steps
from flopwise.records.measurement import RunRecord
from flopwise.records.prediction import Prediction
from flopwise.setup.parallel import Parallel, shard_all
from flopwise.setup.setup import SettledSetup, Setup
from flopwise.store.runs import find_run, read_record, store_folder
from flopwise.work.formats import parse_formats
from flopwise.work.op import Convention
from flopwise.work.work import RECOMPUTE_POLICIES

EXAMPLE = "--anchor 'tokens_per_s_per_gpu=6667@gpus=8 seq=8k batch=16'"
OUTCOMES: dict[str, Callable[[SettledSetup, float], float]] = {
    "step_s": lambda _, value: value,
    "step_ms": lambda _, value: value / 1e3,
    "tokens_per_s": lambda setup, value: setup.batch_tokens / value,
    "tokens_per_s_per_gpu": lambda setup, value: setup.batch_tokens / (value * setup.parallel.devices),
    "samples_per_s": lambda setup, value: setup.batch_sequences / value,
    "tflops_per_gpu": lambda setup, value: _flops(setup) / (1e12 * value * setup.parallel.devices),
    "mfu": lambda setup, value: _flops(setup) / (value * _peak(setup) * setup.parallel.devices),
}
"""What was measured → the seconds of a step that it means. FLOPs are counted as `predict` does."""
LOG_WORDS: dict[str, str] = {
    # torchtitan; Megatron-LM; nanotron; composer and llm-foundry; transformers; nanochat; DeepSpeed.
    r"\btps:\s*([\d.,]+)": "tokens_per_s_per_gpu",
    r"elapsed time per iteration \(ms\):\s*([\d.,]+)": "step_ms",
    r"\btime_per_iteration_ms:\s*([\d.,]+K?)": "step_ms",
    r"throughput/device/tokens_per_sec:\s*([\d.,]+)": "tokens_per_s_per_gpu",
    r"['\"]?train_samples_per_second['\"]?\s*[:=]\s*([\d.,]+)": "samples_per_s",
    r"\btok/s(?:ec)?:\s*([\d.,]+)": "tokens_per_s",
    r"\bSamplesPerSec=([\d.,]+)": "samples_per_s",
}
"""What trainers print in a log → what it means."""
FIELDS = {
    **{"seq": "sequence_tokens", "batch": "batch_sequences", "batch_tokens": "batch_sequences"},
    **{"micro": "micro_batch_sequences", "precision": "formats", "recompute": "recompute", "optimizer": "optimizer"},
    **{"attention": "attention", "fusion": "fusion"},
}
"""Word of an anchor's set-up → field of a set-up."""
WORDS = ("model", "on", "gpus", *FIELDS)


def read_anchor(text: str, asked: Setup, store: str | None = None) -> Anchor:
    """What the measured step that is named says; what its set-up leaves open is as in the one that is `asked`."""
    what, _, words = str(text).partition("@")
    what = what.strip()
    if not what:
        raise FlopwiseError(
            "the anchor names nothing that was measured",
            why="it is a run, a trainer's log or trace, or a figure with its set-up",
            hint=EXAMPLE,
        )
    name, equals, value = what.partition("=")
    if equals and name.strip().lower() in OUTCOMES:
        return _anchor(asked, words, name.strip().lower(), _number(name.strip().lower(), value, what), what)
    if (found := _logged(what)) is not None:
        return _anchor(asked, words, *found, "of a log's line")
    path = Path(what)
    if path.is_file():
        return _anchor(asked, words, *_of_file(path), path.name)
    if equals:
        raise unknown_name("measured figure", name.strip(), OUTCOMES, hint=EXAMPLE)
    folder = find_run(store_folder(store), what)
    record = read_record(folder)
    setup = _settled(_with_words(_run_setup(record, asked), words))
    return _found(setup, _run_seconds(record), f"run {record.id}")


def _anchor(asked: Setup, words: str, outcome: str, value: float, name: str) -> Anchor:
    setup = _settled(_with_words(asked, words))
    return _found(setup, OUTCOMES[outcome](setup, value), name)


def _found(setup: SettledSetup, step_s: float, name: str) -> Anchor:
    return find_anchor(setup, step_s, name, scatter_of(setup, load_evidence(), measured_stack(setup.stack)))


def _settled(setup: Setup) -> SettledSetup:
    return choose([setup])[0].setup


def _number(outcome: str, text: str, where: str) -> float:
    plain = text.strip()
    share = outcome == "mfu" and plain.endswith("%")
    try:
        value = parse_figure(plain.removesuffix("%") if share else plain) / (100 if share else 1)
    except FlopwiseError:
        value = 0.0
    if not 0 < value < 1e15:
        raise FlopwiseError(
            f"the anchor {shown(where)} has no number above 0", why=f"{outcome} was measured", hint=EXAMPLE
        )
    if outcome == "mfu" and value > 1:
        raise FlopwiseError(
            f"the anchor {shown(where)} is beyond the peak",
            why="MFU is a share of it: no step does more than all of what its device can",
            hint="mfu=0.4, or mfu=40%",
        )
    return value


def _flops(setup: SettledSetup) -> float:
    return model_flops(setup.model, setup.sequence_tokens, setup.lengths, setup.batch_sequences, "causal")


def _peak(setup: SettledSetup) -> float:
    return peak_flops(setup.hardware, setup.formats.matrix)


# -- the set-up that was measured ------------------------------------------------------------------------------------


def _with_words(asked: Setup, words: str) -> Setup:
    """The set-up with what the words behind an @ say otherwise."""
    given, strategy = _split(words)
    model = model_of(given["model"]) if "model" in given else asked.model
    hardware = hardware_of(given["on"]) if "on" in given else asked.hardware
    options: dict[str, Any] = {word: given[word] for word in FIELDS if word in given}
    if "batch_tokens" in options and "seq" not in options and asked.sequence_tokens:
        options["seq"] = asked.sequence_tokens
    spread = "gpus" in given or bool(strategy)
    made = setup_of(
        model,
        hardware,
        name=given.get("on", asked.hardware_name),
        devices=given.get("gpus"),
        parallel=" ".join(strategy) or None,
        **options,
    )
    changed = {FIELDS[word]: getattr(made, FIELDS[word]) for word in options}
    parallel = made.parallel if spread else asked.parallel
    return replace(asked, model=model, hardware=hardware, parallel=parallel, **changed)


def _split(words: str) -> tuple[dict[str, str], list[str]]:
    """`gpus=64 tp8 zero1 seq=8k`: settings by name, and the words of a strategy."""
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise FlopwiseError(f"cannot read the anchor's set-up {shown(words)}", why=str(error), hint=EXAMPLE) from None
    given: dict[str, str] = {}
    strategy = []
    for part in parts:
        word, equals, value = part.partition("=")
        if not equals:
            strategy.append(part)
        elif word == "parallel":
            strategy += value.split()
        elif word not in WORDS or not value:
            raise unknown_name("setting of an anchor", word, (*WORDS, "parallel"), hint=EXAMPLE)
        elif word in given:
            raise FlopwiseError(
                f"the anchor's set-up says {word} twice", why="one value would be lost", hint=f"keep one {word}=…"
            )
        else:
            given[word] = value
    return given, strategy


# -- what was measured -----------------------------------------------------------------------------------------------


def _of_file(path: Path) -> tuple[str, float]:
    """The figure that a trainer's log, a table or a trace has of a step: the median where it has several."""
    binary = path.suffix in (".gz", ".nsys-rep", ".sqlite", ".pt", ".pickle")
    # What is larger than a log is a trace, for the readers of traces.
    text = "" if binary or path.stat().st_size > LARGEST_FILE_BYTES else read_text(path)
    found = _logged(text) or (_column(text, path) if path.suffix == ".csv" else None)
    if found is not None:
        return found
    from flopwise.profile.read.reading import read_profiles

    profiles = [profile for one in read_profiles([path]) for profile in one.profiles]
    seconds = [value for profile in profiles if profile.steps and (value := profile.get("step_wall_s"))]
    if not seconds:
        raise FlopwiseError(
            f"{path} says of no step how long it took",
            why="no line of a trainer that is known, no column such as step_s or tokens_per_s, no trace with steps",
            hint=EXAMPLE,
        )
    return "step_s", median(seconds)


def _logged(text: str) -> tuple[str, float] | None:
    """What the lines of a log say; of the last half, which has warmed up."""
    for pattern, outcome in LOG_WORDS.items():
        found = re.findall(pattern, text)
        if found:
            # Some print 0, or dots, before they have timed a step.
            values = [value for value in map(_logged_number, found) if value > 0]
            if values:
                return outcome, median(values[len(values) // 2 :])
    return None


def _logged_number(text: str) -> float:
    """1,234.5 or 1.2K; 0 where it is no number."""
    try:
        return float(text.rstrip("K").replace(",", "")) * (1e3 if text.endswith("K") else 1.0)
    except ValueError:
        return 0.0


STEADY = 1.25
"""Rows of one set-up agree so far, between their quartiles; a table of several set-ups is no one step."""


def _column(text: str, path: Path) -> tuple[str, float] | None:
    """The same of a table's first column that is called like a figure, where all its rows are of one set-up."""
    reader = csv.DictReader(io.StringIO(text))
    rows, names = list(reader), [name.strip() for name in reader.fieldnames or ()]
    for outcome in OUTCOMES:
        values = [value for row in rows if (value := _figure(row.get(outcome))) > 0]
        if values:
            _check_one_step(values, outcome, path)
            return outcome, median(values)
    separator, near = other_separator(names), otherwise_written(OUTCOMES, names)
    if separator is not None or near:
        raise FlopwiseError(
            f"{path} says of no step how long it took",
            why=f"it has {separator} between its columns, and commas are expected"
            if separator
            else "; ".join(f"its column {shown(there)} is read if it is called {name}" for name, there in near.items()),
            hint=EXAMPLE,
        )
    return None


def _check_one_step(values: list[float], outcome: str, path: Path) -> None:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (1.0, 1.0, 1.0)
    if high > STEADY * low:
        raise FlopwiseError(
            f"{path} has {outcome} from {min(values):,.6g} to {max(values):,.6g}",
            why="rows of several set-ups, or steps that are not steady, are no one measured step",
            hint=f"the figure of one set-up: {EXAMPLE}",
        )


def _figure(text: str | None) -> float:
    """A cell's figure; 0 where it has none."""
    try:
        return parse_figure(text or "")
    except FlopwiseError:
        return 0.0


def _run_seconds(record: RunRecord) -> float:
    if record.measurement is None:
        raise FlopwiseError(
            f"run {record.id} has measured no step",
            why=f"its state is {record.state}",
            hint="a run that has ended well",
        )
    return record.measurement.step_s


def _run_setup(record: RunRecord, asked: Setup) -> Setup:
    """What a run of flopwise's was of; by the stack of the question, or by none."""
    measured, plan = record.measurement, record.plan
    if measured is None:
        return asked
    hardware = asked.hardware if measured.hardware == asked.hardware.name else hardware_of(measured.hardware)
    spread = plan.get("parallel")
    parallel = Parallel(**spread) if isinstance(spread, Mapping) else shard_all(measured.devices)
    recompute = plan.get("recompute")
    return replace(
        asked,
        model=model_from_table(dict(record.model), f"run {record.id}"),
        hardware=hardware,
        parallel=parallel,
        sequence_tokens=measured.sequence_tokens,
        lengths=None,
        batch_sequences=measured.batch_sequences,
        micro_batch_sequences=measured.micro_batch_sequences,
        formats=parse_formats(measured.precision),
        optimizer=measured.optimizer,
        recompute=next((policy for policy in RECOMPUTE_POLICIES if policy == recompute), "none"),
    )


# -- predictions from it ---------------------------------------------------------------------------------------------


def with_anchor(setup: Setup, anchor: Anchor) -> Setup:
    """The set-up as the anchor's factors predict it."""
    return replace(setup, stack=anchored_stack(anchor, setup.hardware))


def _is_own(setup: SettledSetup, anchor: Anchor) -> bool:
    """Whether a set-up is the very one that was measured."""
    return replace(setup, stack=anchor.setup.stack, hardware_name=anchor.setup.hardware_name) == anchor.setup


def predict_anchored(setups: Sequence[Setup], anchor: Anchor, convention: Convention) -> list[Prediction]:
    """Predictions of set-ups from one measured step, each with what that leaves unknown."""
    settled = [choice.setup for choice in choose([with_anchor(setup, anchor) for setup in setups])]
    asked = [
        replace(setup, stack=own_stack(anchor)) if _is_own(one, anchor) else with_anchor(setup, anchor)
        for setup, one in zip(setups, settled, strict=True)
    ]
    found = steps(asked, convention=convention)
    evidence, stack = load_evidence(), measured_stack(anchor.setup.stack)
    return [
        replace(
            one,
            interval=anchored_interval(anchor, one, setup, setup.hardware, scatter_of(setup, evidence, stack)),
            notes=(*one.notes, anchor_words(anchor)),
        )
        for one, setup in zip(found, settled, strict=True)
    ]


TOLD = 0.005
MOST_COUNTED = 0.9
"""Of what an anchor is off by; where more counts for other set-ups there is nothing to tell."""


def anchor_words(anchor: Anchor) -> str:
    """What the anchor changed, in words."""
    told = [f"{kind} × {factor:.2f}" for kind, factor in anchor.factors.items() if abs(factor - 1) > TOLD]
    said = f"predicted from the measured step {anchor.name}, {anchor.off:.2f} × as long as without"
    if anchor.counted < MOST_COUNTED:
        usual = f"rows like it lie ±{anchor.noise * FOUR_OF_FIVE:.0%} round their level"
        said += f", {anchor.counted:.0%} of which counts for others, since {usual}"
    return f"{said}: {', '.join(told)}" if told else said
