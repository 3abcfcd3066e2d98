"""Recorded runs of the reference offload trainer, each repeated by the simulator and held against what was measured.

A run that succeeded is repeated with the plan that it ran with: what it recorded, and where it recorded nothing what
its rule `dataflow` decides. A run that failed is held against what the rule says to its caps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.plan.device.forecast import times_of
from flopwise.records.plan import Plan
from flopwise.references.dataflow.rule import RuleChoice, configure, to_plan
from flopwise.references.dataflow.sizes import GIB, head_chunk_tokens
from flopwise.references.dataflow.variants import RECORDED, VARIANTS
from flopwise.references.published.offload import OffloadRun
from flopwise.references.validate.fitting import Progress
from flopwise.references.validate.validation import ERROR_WORDS, ValidatedRow, Validation, rate_rank, summarize
from flopwise.setup.hardware import Hardware
from flopwise.work.transformer import Transformer

FLASH_KERNELS = ("flash-3",)
"""What the trainer builds for Ampere and Hopper: FlashAttention-3's library, which has kernels for both."""
MOST_ACTIVATIONS = 2**16
"""Of a round; recorded rounds have 2,048 at most. A file with more has a typing mistake."""


def plan_of_run(run: OffloadRun, model: Transformer, hardware: Hardware) -> Plan:
    """The plan of a run that succeeded, as it ran."""
    _check(run, model)
    return plan_as_recorded(run, model, hardware)


def plan_as_recorded(run: OffloadRun, model: Transformer, hardware: Hardware, *, as_run: bool = True) -> Plan:
    """What a run recorded, and blocks on the device, which it did not, by the rule; `as_run` as `placement` has it."""
    ruled, variant = _configure(run, model, hardware), VARIANTS[RECORDED]
    total = run.slots + run.n_full + run.n_attention + run.n_context
    if total % model.layers:
        raise FlopwiseError(
            f"{total} recorded activations are not the same number in each of {model.layers} layers",
            why="each layer has one for every chunk of a round",
            hint="slots + full + attention + context is layers × chunks",
        )
    same = (ruled.chunk_tokens, ruled.activation_slots, ruled.full) == (run.chunk_tokens, run.slots, run.n_full)
    windows = (total - run.slots) // max(1, run.slots)
    recorded = replace(
        ruled,
        chunk_tokens=run.chunk_tokens,
        chunks_per_sequence=-(-run.sequence_tokens // run.chunk_tokens),
        chunks_per_round=total // model.layers,
        head_chunk_tokens=head_chunk_tokens(run.chunk_tokens, variant),
        activation_slots=run.slots,
        home_activations=total - run.slots,
        full=run.n_full,
        attention=run.n_attention,
        context=run.n_context,
        full_per_window=ruled.full_per_window if same else run.n_full // max(1, windows),
        rounds_per_step=run.rounds,
    )
    return to_plan(recorded, model, hardware.name, run.device_bytes, run.host_bytes, as_run=as_run)


def _configure(run: OffloadRun, model: Transformer, hardware: Hardware) -> RuleChoice:
    return configure(
        model,
        hardware,
        sequence_tokens=run.sequence_tokens,
        device_bytes=run.device_bytes,
        host_bytes=run.host_bytes,
        variant=VARIANTS[RECORDED],
    )


def rule_accepts(run: OffloadRun, model: Transformer, hardware: Hardware) -> bool:
    """Whether the trainer's rule finds a configuration for the run's caps."""
    try:
        _configure(run, model, hardware)
    except DoesNotFit:
        return False
    return True


def validate_recorded(
    runs: Sequence[OffloadRun],
    models: Mapping[str, Transformer],
    hardware: Mapping[str, Hardware],
    *,
    table: str,
    protocol: str,
    progress: Progress | None = None,
) -> Validation:
    """Every run beside its repetition; `models` and `hardware` by the names that the runs have for them.

    Verdicts on memory are those of the trainer's rule, and a failed run counts as one that ran out. A run that the rule
    refuses although it succeeded has no prediction: how many blocks stayed on the device is the rule's to say.
    """
    rows = []
    steps = repeat_steps(runs, models, hardware)
    for number, (run, (step_s, accepted)) in enumerate(zip(runs, steps, strict=True), start=1):
        rows.append(_row(run, step_s, accepted))
        if progress:
            progress("", number, len(runs))
    return summarize(
        table, tuple(rows), protocol=f"{protocol}; {ERROR_WORDS['throughput']}", rank=_rank(runs, tuple(rows))
    )


def repeat_steps(
    runs: Sequence[OffloadRun], models: Mapping[str, Transformer], hardware: Mapping[str, Hardware]
) -> Iterator[tuple[float | None, bool]]:
    """Simulated seconds of each run's step, None where there is no plan, and whether the rule accepts its caps.

    Runs whose plans differ in nothing but the caps are simulated once: with a larger cap the rule often decides the
    same.
    """
    found: dict[tuple[str, str, Plan], float] = {}
    called = {name: with_kernels(machine) for name, machine in hardware.items()}
    for run in runs:
        model, machine = models[run.model], called[run.hardware]
        try:
            accepted = rule_accepts(run, model, machine)
            if not (run.succeeded and accepted):
                yield None, accepted
                continue
            plan = plan_of_run(run, model, machine)
            key = (run.model, run.hardware, replace(plan, device_memory_bytes=1, host_memory_bytes=1))
            if key not in found:
                found[key] = times_of(plan, model, machine).step_s
        except FlopwiseError as error:
            raise error.within(f"row {run.row}") from None
        yield found[key], accepted


def with_kernels(hardware: Hardware) -> Hardware:
    """The hardware with the attention that the trainer calls on it."""
    efficiency = hardware.efficiency
    attention = efficiency.attention.preferring(FLASH_KERNELS)
    return replace(hardware, efficiency=replace(efficiency, attention=attention))


def _check(run: OffloadRun, model: Transformer) -> None:
    """Refuse numbers of chunks that do not make up the run's batch."""
    groups, rest = divmod(run.sequences_per_step, run.rounds)
    if rest:
        raise FlopwiseError(
            f"{run.sequences_per_step} sequences a step are not a whole number in each of {run.rounds} rounds",
            hint="correct seqs_per_step or rounds_per_step",
        )
    parts = -(-run.sequence_tokens // run.chunk_tokens)
    chunks = groups * parts if parts > 1 else -(-groups * run.sequence_tokens // run.chunk_tokens)
    expected, told = model.layers * chunks, run.slots + run.home_activations
    if expected > MOST_ACTIVATIONS or told != expected:
        wrong = f", not {told:,}" if told != expected else f", more than {MOST_ACTIVATIONS:,}"
        raise FlopwiseError(
            f"{model.layers} layers of {chunks:,} chunks have {expected:,} activations{wrong}",
            why=f"{groups:,} sequences of {run.sequence_tokens:,} tokens a round, {run.chunk_tokens:,} tokens a chunk",
            hint="correct dev_act_slots, host_acts, chunk_size, seqs_per_step or rounds_per_step",
        )


def _row(run: OffloadRun, step_s: float | None, accepted: bool) -> ValidatedRow:
    return ValidatedRow(
        row=run.row,
        size=f"{run.model} · {run.sequence_tokens:,}",
        label=_label(run),
        measured_s=run.step_s if run.succeeded else None,
        predicted_s=step_s,
        error=abs(run.step_s / step_s - 1) if step_s is not None else None,
        measured_fits=run.succeeded,
        predicted_fits=accepted,
        # The rates of kernels may come from the same trainer's profiles, so no row is called held out.
        held_out=False,
        counted=True,
    )


def _label(run: OffloadRun) -> str:
    caps = f"device {run.device_bytes / GIB:g} GiB, host {run.host_bytes / GIB:g} GiB"
    if not run.succeeded:
        return caps
    levels = ((run.n_full, "full"), (run.n_attention, "attention"), (run.n_context, "context"))
    leaving = [f"{number} {level}" for number, level in levels if number]
    return ", ".join((f"{caps}: {run.slots} stay", *leaving, f"{run.rounds} rounds"))


def _rank(runs: Sequence[OffloadRun], rows: Sequence[ValidatedRow]) -> float | None:
    """Spearman's correlation of measured and simulated tokens per second."""
    pairs = [
        (run.sequences_per_step * run.sequence_tokens / run.step_s, run.step_s / row.predicted_s)
        for run, row in zip(runs, rows, strict=True)
        if row.predicted_s is not None
    ]
    return rate_rank(pairs)
