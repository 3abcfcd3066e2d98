"""Write `catalog/evidence.toml` from held-out predictions: `python -m benchmarks.evidence`.

One entry for each table and ZeRO stage, of the rows that may be fitted to, each model size predicted by constants that
were fitted to the others; that of table 2 of the Megatron paper has the rows that never are.
The entries of the stack `kernels` are of predictions without any framework's constants: the H200 steps of
`benchmarks.steps` on one device, and on several the measured tables, whose frameworks were slower than their kernels.
Those of `dataflow` and `flopwise-streaming` are for plans of one device: recorded runs of the offload trainer, and of
flopwise itself, against their simulation.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.stacks import FITTED_TABLES, NOT_FITTED
from benchmarks.steps import compared
from flopwise.base.files import to_toml, write_whole
from flopwise.catalog.load import ROOT, load_hardware, load_model, load_stack
from flopwise.door.planning import cap_device
from flopwise.plan.device.explain import make_plan
from flopwise.predict.cluster.costing import PLAIN
from flopwise.predict.expected import OWN_STREAMED
from flopwise.records.evidence import Evidence, EvidenceBook, Span
from flopwise.records.plan import Planned
from flopwise.references.dataflow.recorded import repeat_steps
from flopwise.references.published import protocol_of, read_cases
from flopwise.references.published.offload import read_offload
from flopwise.references.validate.fitting import fit_of, held_out_predictions, lay_out
from flopwise.references.validate.protocol import Case
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import Setup
from flopwise.setup.stack import NO_STACK
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.transformer import Transformer

LEVELS = (
    *(table for table in FITTED_TABLES if protocol_of(table).measured and table != "deepspeed"),
    "uci",
    "dgx-cloud",
)
"""Of frameworks that were tuned by who published them; DeepSpeed's ZeRO-3 of 2021 was what others compared with."""
CELLS = Path(__file__).parent / "results" / "h200" / "cells.csv"
HEADER = """\
# Held-out errors of predicted step times, from which intervals are made (predict/interval.py).
# Written by `python -m benchmarks.evidence`; do not edit.
"""


def main() -> None:
    entries = (
        *(entry for table in (*FITTED_TABLES, *NOT_FITTED) for entry in table_evidence(table)),
        one_device_evidence(),
        *(entry for table in LEVELS for entry in kernels_evidence(table)),
        offload_evidence(),
        own_executor_evidence(),
    )
    write_whole(ROOT / "evidence.toml", HEADER + to_toml(EvidenceBook(entries=entries)))
    for entry in entries:
        bounds = f"{100 * entry.low:>+7.1f}%{100 * entry.high:>+7.1f}%"
        print(f"{entry.table:<12}{entry.stack:<13}zero{entry.zero}{entry.n:>6} rows{bounds}")


def table_evidence(table: str) -> tuple[Evidence, ...]:
    """The held-out errors of one shipped table: of the rows that may be fitted, or of all where none may.

    Of a table that the stack's constants are not fitted to, those of the constants that ship.
    """
    protocol, cases = protocol_of(table), [case for case in read_cases(table) if case.step_s]
    cases = [case for case in cases if case.fitted] or cases
    # Those of another framework are the evidence of its stack.
    cases = [case for case in cases if case.stack == protocol.stack]
    own = protocol.fitted_table == table
    fit_cases = cases if own else read_cases(protocol.fitted_table)
    fit = fit_of(protocol, fit_cases, load_stack(protocol.stack))
    return evidence_of(
        table,
        cases,
        held_out_predictions(fit, cases).step_s.tolist(),
        measured=protocol.measured,
        how=f"protocol {table}: each model size predicted by constants fitted to "
        + ("the others" if own else f"the other sizes of {protocol.fitted_table}"),
    )


def kernels_evidence(table: str) -> tuple[Evidence, ...]:
    """One shipped table predicted as if no framework were in the way."""
    timed = [case for case in read_cases(table) if case.step_s]
    cases = [replace(case, stack=NO_STACK) for case in [case for case in timed if case.fitted] or timed]
    predicted = lay_out(cases, PLAIN).seconds(PLAIN).tolist()
    return evidence_of(table, cases, predicted, measured=True, how="predicted without any framework's constants")


LEAST_ROWS = 3
"""Fewer bound nothing."""


def evidence_of(
    table: str, cases: Sequence[Case], predicted_s: Sequence[float], *, measured: bool, how: str
) -> tuple[Evidence, ...]:
    """Errors and spans of rows with their predictions, by ZeRO stage."""
    pairs = list(zip(cases, predicted_s, strict=True))
    counts = Counter(case.setup.parallel.zero for case in cases)
    stages = sorted(zero for zero, count in counts.items() if count >= LEAST_ROWS)
    return tuple(
        _entry(table, [pair for pair in pairs if pair[0].setup.parallel.zero == zero], measured=measured, how=how)
        for zero in stages
    )


def _entry(table: str, pairs: Sequence[tuple[Case, float]], *, measured: bool, how: str) -> Evidence:
    cases, predicted_s = [case for case, _ in pairs], [seconds for _, seconds in pairs]
    errors = [case.step_s / seconds - 1 for case, seconds in zip(cases, predicted_s, strict=True) if case.step_s]
    low, high = _quantiles(errors)
    return Evidence(
        table=table,
        stack=cases[0].stack,
        architectures=tuple(sorted({case.setup.hardware.device.architecture for case in cases})),
        zero=cases[0].setup.parallel.zero,
        features=tuple(sorted({feature for case in cases for feature in case.setup.parallel.features})),
        measured=measured,
        n=len(errors),
        low=low,
        high=high,
        level=round(statistics.median(errors), 4),
        parameters=_span([describe(case.setup.model, case.setup.sequence_tokens).parameters for case in cases]),
        sequence_tokens=_span([case.setup.sequence_tokens for case in cases]),
        devices=_span([case.setup.parallel.devices for case in cases]),
        tensor=_span([case.setup.parallel.tensor for case in cases]),
        pipeline=_span([case.setup.parallel.pipeline for case in cases]),
        micro_tokens=_span([case.setup.micro_batch_sequences * case.setup.sequence_tokens for case in cases]),
        how=how,
    )


def one_device_evidence() -> Evidence:
    """The steps that were measured on one H200."""
    rows = compared()
    made = [row.prediction for row in rows]
    errors = [row.measured_s / row.prediction.step_s - 1 for row in rows]
    return _of_one_device(
        table="steps_h200",
        stack=NO_STACK,
        architectures=(load_hardware("h200").device.architecture,),
        errors=errors,
        n=len(rows),
        parameters=_span([describe(load_model(step.model), step.sequence_tokens).parameters for step in made]),
        sequence_tokens=_span([step.sequence_tokens for step in made]),
        micro_tokens=_span([step.micro_batch_sequences * step.sequence_tokens for step in made]),
        how="13 steps of compiled torch modules on one H200 (benchmarks/steps.py); nothing was fitted to them",
    )


def offload_evidence() -> Evidence:
    """Recorded runs of the offload trainer, each repeated by the simulator with the plan that it had."""
    runs = [run for run in read_offload() if run.succeeded]
    models = {name: load_model(name) for name in {run.model for run in runs}}
    hardware = {name: load_hardware(name) for name in {run.hardware for run in runs}}
    transformers = {name: model for name, model in models.items() if isinstance(model, Transformer)}
    steps = [seconds for seconds, _ in repeat_steps(runs, transformers, hardware)]
    errors = [run.step_s / seconds - 1 for run, seconds in zip(runs, steps, strict=True) if seconds]
    return _of_one_device(
        table="offload",
        stack="dataflow",
        architectures=tuple(sorted({machine.device.architecture for machine in hardware.values()})),
        errors=errors,
        n=len(runs),
        parameters=_span([describe(models[run.model], run.sequence_tokens).parameters for run in runs]),
        sequence_tokens=_span([run.sequence_tokens for run in runs]),
        micro_tokens=_span([run.chunk_tokens for run in runs]),
        how="simulated with the plan that each run had; kernels' rates are from the same trainer's profiles",
    )


def own_executor_evidence() -> Evidence:
    """Cells that flopwise itself ran on one H200, each planned anew with the catalogue's H200."""
    with CELLS.open(encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["outcome"] == "ok"]
    hardware = load_hardware("h200")
    pairs = [(float(row["step_s"]), _planned_cell(row, hardware)) for row in rows]
    errors = [measured_s / planned.forecast.step_s - 1 for measured_s, planned in pairs]
    plans = [planned.plan for _, planned in pairs]
    return _of_one_device(
        table="cells_h200",
        stack=OWN_STREAMED,
        architectures=(hardware.device.architecture,),
        errors=errors,
        n=len(rows),
        parameters=_span([describe(load_model(row["model"]), int(row["sequence_tokens"])).parameters for row in rows]),
        sequence_tokens=_span([plan.sequence_tokens for plan in plans]),
        micro_tokens=_span([plan.tokens_of(0) for plan in plans]),
        how="19 cells of flopwise's own executor on one H200 (benchmarks/results/h200), a card whose kernels' rates "
        "the catalogue has; planned anew",
    )


def _of_one_device(
    *,
    table: str,
    stack: str,
    architectures: tuple[str, ...],
    errors: Sequence[float],
    n: int,
    parameters: Span,
    sequence_tokens: Span,
    micro_tokens: Span,
    how: str,
) -> Evidence:
    """Steps of one device, nothing of which is spread."""
    low, high = _quantiles(errors)
    one = Span(least=1, most=1)
    return Evidence(
        table=table,
        stack=stack,
        architectures=architectures,
        zero=0,
        features=(),
        measured=True,
        n=n,
        low=low,
        high=high,
        level=round(statistics.median(errors), 4),
        parameters=parameters,
        sequence_tokens=sequence_tokens,
        devices=one,
        tensor=one,
        pipeline=one,
        micro_tokens=micro_tokens,
        how=how,
    )


def _planned_cell(row: dict[str, str], hardware: Hardware) -> Planned:
    sequence, host = int(row["sequence_tokens"]), int(row["host_cap_bytes"])
    setup = Setup(
        model=load_model(row["model"]),
        hardware=hardware,
        hardware_name=hardware.name,
        sequence_tokens=sequence,
        batch_sequences=int(row["batch_tokens"]) // sequence,
        formats=parse_formats(row["precision"]),
    )
    capped = cap_device(setup, device=int(row["device_cap_bytes"]), host=host, host_given=host > 0)
    return make_plan(capped, helps=False)


INSIDE = 0.82
"""Of the rows, rounded: 5 of 6, 7 of 8 or of 9, 8 of 10, 11 of 13. Quantiles of so few leave one out at either end."""


def _quantiles(errors: Sequence[float]) -> tuple[float, float]:
    """The lowest and highest of the rows that are inside: of an odd number left out, the farther end has one more."""
    ordered, out = sorted(errors), len(errors) - round(INSIDE * len(errors))
    begin, end = out // 2, len(errors) - 1 - out // 2
    if out % 2:
        middle = math.log1p(statistics.median(ordered))
        if middle - math.log1p(ordered[begin]) > math.log1p(ordered[end]) - middle:
            begin += 1
        else:
            end -= 1
    # Outward, so that what is written holds as many.
    return math.floor(1e4 * ordered[begin]) / 1e4, math.ceil(1e4 * ordered[end]) / 1e4


def _span(values: Sequence[int]) -> Span:
    return Span(least=min(values), most=max(values))


if __name__ == "__main__":
    main()
