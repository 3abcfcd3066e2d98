"""Training steps: time, memory, what binds them, and their operators in order. One set-up is a list of one."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import unknown_name
from flopwise.base.units import show_count
from flopwise.predict.choose import ChosenSetup, capacity_bytes, choose
from flopwise.predict.cluster.costing import PLAIN, cost_laid_out, evaluate
from flopwise.predict.cluster.step import most_host_bytes, slowest_stage, stage_tables
from flopwise.predict.kernels.calls import kernels_of
from flopwise.predict.kernels.costs import SetupCosts, cost_together, families_called, peak_flops
from flopwise.predict.kernels.memory import device_bytes
from flopwise.predict.operators import add_up
from flopwise.records.prediction import DeviceBytes, OpPrediction, Prediction, StagePrediction
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import SettledSetup, Setup
from flopwise.setup.stack import NO_STACK
from flopwise.work.describe import describe
from flopwise.work.lengths import Lengths
from flopwise.work.model import Model, beyond_context
from flopwise.work.op import CONVENTIONS, AttentionKernel, Convention
from flopwise.work.transformer import Transformer
from flopwise.work.work import Recompute

PALM_NOTE_MFU = 0.75
"""Above this, `palm` shares say more about the convention than about the device."""


SCALED = {
    "rowwise": "with a scale for each row, and again with one for each column (rowwise)",
    "tensorwise": "with one scale for a tensor, whose largest number is looked for first (tensorwise)",
    "delayed": "with one scale for a tensor, of the steps before (delayed)",
}
"""How numbers come into fp8, in words."""


def step(asked: Setup, *, convention: Convention = "causal") -> Prediction:
    """Predict one optimizer step; what the set-up leaves open is chosen, and noted."""
    return steps([asked], convention=convention)[0]


def steps(asked: Sequence[Setup], *, convention: Convention = "causal", operators: bool = True) -> list[Prediction]:
    """Predict a step of each set-up, what they have in common being costed once.

    A kernel's sizes are linear in the micro-batch, so that every micro-batch of a model, sequence, format and recompute
    policy is costed in one go; set-ups on several devices are laid out as the arrays that `plan` searches. Without
    `operators` their tables stay empty, which makes thousands of predictions several times faster.
    """
    if convention not in CONVENTIONS:
        raise unknown_name("convention", str(convention), CONVENTIONS, hint=f"one of {', '.join(CONVENTIONS)}")
    chosen = dict(enumerate(choose(asked)))
    plain = {place: choice for place, choice in chosen.items() if choice.setup.is_plain}
    several = {place: choice for place, choice in chosen.items() if place not in plain}
    found = _on_one(plain, convention, operators) | _on_several(several, convention, operators)
    return [found[place] for place in chosen]


def _on_one(chosen: dict[int, ChosenSetup], convention: Convention, operators: bool) -> dict[int, Prediction]:
    """On one device with everything on it: the operators are all that takes time."""
    places, found = list(chosen), {}
    for rows, costs in cost_together([choice.setup for choice in chosen.values()], SettledSetup.micro_batches):
        parts = {"host": host_waits(costs)}
        table = add_up(costs, costs.seconds.sum(axis=(1, 2)) + parts["host"], parts)
        ops = table.tables(convention) if operators else [()] * len(rows)
        steps_s = table.added_s + parts["host"]
        for mine, (place, step_s) in enumerate(zip(rows, steps_s.tolist(), strict=True)):
            choice = chosen[places[place]]
            found[places[place]] = _prediction(
                choice,
                convention,
                step_s=step_s,
                bound="host" if parts["host"][mine] > 0 else table.bound(mine),
                device_bytes=device_bytes(choice.setup),
                ops=ops[mine],
            )
    return found


def host_waits(costs: SetupCosts) -> NDArray[np.float64]:
    """Seconds of each set-up's step in which the device has been handed nothing: where its kernels take less than the
    host takes to start them one by one. No time is lost where kernels are replayed, or are the host's own work."""
    *each, update = kernels_of(costs.calls).tolist()
    found = []
    for setup, kernels_s in zip(costs.setups, costs.seconds.sum(axis=(1, 2)).tolist(), strict=True):
        started_s = (sum(each) * setup.accumulation_steps + update) * setup.hardware.launch_s
        is_free = setup.cuda_graphs or setup.hardware.device.kind != "gpu"
        found.append(0.0 if is_free else max(0.0, started_s - kernels_s))
    return np.array(found)


def _on_several(chosen: dict[int, ChosenSetup], convention: Convention, operators: bool) -> dict[int, Prediction]:
    """On several devices, or behind a framework: the slowest stage's operators, and what they wait for."""
    places, found = np.array(list(chosen), dtype=np.intp), {}
    setups = [choice.setup for choice in chosen.values()]
    for group, laid_out, costed in cost_laid_out(setups, evaluate):
        stack = setups[group[0]].stack or PLAIN
        stages, on_host = stage_tables(laid_out, costed, stack), most_host_bytes(laid_out, costed, stack)
        for rows, costs in cost_together([setups[place] for place in group], _whole_micro_batch):
            mine = np.array(rows)
            parts = {name: values[mine] for name, values in costed.parts.items()}
            table = add_up(slowest_stage(costs, costed, mine), costed.step_s[mine], parts)
            ops = table.tables(convention) if operators else [()] * len(rows)
            for index, row in enumerate(rows):
                place = int(places[group[row]])
                found[place] = _prediction(
                    chosen[place],
                    convention,
                    step_s=float(costed.step_s[row]),
                    bound="host" if stack is PLAIN and parts["host"][index] > 0 else table.bound(index),
                    # Of the fullest stage.
                    device_bytes=max((stage.device_bytes for stage in stages[row]), key=lambda memory: memory.total),
                    ops=ops[index],
                    stages=stages[row],
                    host_bytes=on_host[row],
                    parts={name: float(values[index]) for name, values in parts.items()},
                )
    return found


def _whole_micro_batch(setup: SettledSetup) -> tuple[tuple[int, int], ...]:
    return ((setup.micro_batch_sequences, 1),)


def _prediction(
    choice: ChosenSetup,
    convention: Convention,
    *,
    step_s: float,
    bound: str,
    device_bytes: DeviceBytes,
    ops: tuple[OpPrediction, ...],
    stages: tuple[StagePrediction, ...] = (),
    host_bytes: int = 0,
    parts: dict[str, float] | None = None,
) -> Prediction:
    setup = choice.setup
    model, hardware, devices = setup.model, setup.hardware, setup.parallel.devices
    n_params, n_active_params, n_trained_params = _parameters(model, setup.sequence_tokens)
    model_flops, hardware_flops = _flops(setup, convention)
    peak, capacity = peak_flops(hardware, setup.formats.matrix), capacity_bytes(setup)
    kernel = " and ".join(families_called(setup)) or None
    mfu = model_flops / (step_s * peak * devices)
    return Prediction(
        model=model.name,
        hardware=hardware.name,
        sequence_tokens=setup.sequence_tokens,
        lengths=setup.lengths.words if setup.lengths else None,
        batch_sequences=setup.batch_sequences,
        micro_batch_sequences=setup.micro_batch_sequences,
        accumulation_steps=setup.accumulation_steps,
        batch_tokens=setup.batch_tokens,
        precision=setup.formats.name,
        recompute=setup.recompute,
        attention=setup.attention,
        attention_kernel=kernel,
        fusion=setup.fusion,
        optimizer=setup.optimizer,
        n_params=n_params,
        n_active_params=n_active_params,
        n_trained_params=None if n_trained_params == n_params else n_trained_params,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        convention=convention,
        step_s=step_s,
        tokens_per_s=setup.batch_tokens / step_s,
        padded_tokens_per_s=setup.padded_tokens / step_s if setup.padded_tokens != setup.batch_tokens else None,
        mfu=mfu,
        hfu=hardware_flops / (step_s * peak * devices),
        peak_flops=peak,
        peak_format=setup.formats.matrix,
        peak_source=_source_kind(hardware, hardware.device.peak_flops[setup.formats.matrix].source),
        bound=bound,
        device_bytes=device_bytes,
        device_capacity_bytes=capacity,
        fits=device_bytes.total <= capacity,
        ops=ops,
        devices=devices,
        parallel=setup.parallel,
        stack=setup.stack.name if setup.stack else NO_STACK,
        stages=stages,
        host_bytes=host_bytes,
        parts=parts or {},
        chosen=choice.reasons | _kernel_reason(setup, kernel),
        notes=_notes(setup, mfu, bound, convention),
    )


def _kernel_reason(setup: SettledSetup, kernel: str | None) -> dict[str, str]:
    """Why attention is costed by these kernels, where that was left open."""
    if kernel is None or setup.flash_kernel is not None:
        return {}
    if setup.stack is not None and setup.flash_kernels:
        return {"attention": f"{setup.stack.name}'s"}
    if setup.stack is None or setup.stack.name == NO_STACK:
        return {"attention": "assumed without a stack"}
    return {"attention": f"assumed: {setup.stack.name} does not say"}


@lru_cache(maxsize=1024)
def _parameters(model: Model, sequence_tokens: int) -> tuple[int, int, int]:
    """All of them, those that a token uses, and those that are trained."""
    work = describe(model, sequence_tokens)
    return work.parameters, work.active_parameters, work.trained_parameters


def _flops(setup: SettledSetup, convention: Convention) -> tuple[int, int]:
    """Of a batch: the model's, padding left out, and the hardware's; operator by operator, as tables have them."""
    lengths, sequences = setup.lengths, setup.batch_sequences
    needed = model_flops(setup.model, setup.sequence_tokens, lengths, sequences, convention)
    work = describe(setup.model, setup.width, setup.attention, lengths=setup.packed)
    executed = _executed(
        setup.model, setup.width, setup.attention, packed=setup.packed, again=setup.recompute, by=convention
    )
    return needed, sum(work.of_batch(flops, sequences) for flops in executed)


def least_seconds(setup: SettledSetup) -> float:
    """What a step takes on devices that do nothing but the model's own products, at their peak."""
    peak = peak_flops(setup.hardware, setup.formats.matrix) * setup.parallel.devices
    return model_flops(setup.model, setup.sequence_tokens, setup.lengths, setup.batch_sequences, "causal") / peak


def model_flops(
    model: Model, sequence_tokens: int, lengths: Lengths | None, sequences: int, convention: Convention
) -> int:
    """FLOPs that a batch needs, padding left out."""
    work = describe(model, sequence_tokens, lengths=lengths)
    return sum(work.of_batch(flops, sequences) for flops in _needed(model, sequence_tokens, lengths, convention))


@lru_cache(maxsize=1024)
def _needed(model: Model, sequence_tokens: int, lengths: Lengths | None, convention: Convention) -> tuple[int, ...]:
    """Of each operator."""
    work = describe(model, sequence_tokens, lengths=lengths)
    return tuple(work.model_flops_of(op, convention) for op in work.ops)


@lru_cache(maxsize=1024)
def _executed(
    model: Model, width: int, attention: AttentionKernel, *, packed: Lengths | None, again: Recompute, by: Convention
) -> tuple[int, ...]:
    """The same with what is executed."""
    work = describe(model, width, attention, lengths=packed)
    shares = work.recomputed(again)
    return tuple(work.hardware_flops(op, by, shares.get(op.name, Fraction(0))) for op in work.ops)


def _source_kind(hardware: Hardware, key: str) -> str:
    return hardware.sources[key].kind


def estimated_words(hardware: Hardware) -> str:
    """Which of a device's efficiencies nobody has measured, in words; nothing where all were."""
    efficiency = hardware.efficiency
    parts = {
        "matrix products": efficiency.gemm.source,
        "attention": efficiency.attention.source,
        "memory": efficiency.memory.source,
    }
    estimated = [name for name, source in parts.items() if _source_kind(hardware, source) == "estimated"]
    return f"efficiency of {', '.join(estimated)} on {hardware.name} is estimated, not measured" if estimated else ""


def reference_notes(
    model: Model, sequence_tokens: int, lengths: Lengths | None, sequences: int, convention: Convention
) -> list[str]:
    """What comes before the first step where answers are compared: one forward pass over the data."""
    if not isinstance(model, Transformer) or model.objective != "preference":
        return []
    work = describe(model, sequence_tokens, lengths=lengths)
    forward = work.of_batch(sum(work.forward_flops(op, convention) for op in work.ops), sequences)
    return [f"the reference scores each pair once, before the first step: {show_count(forward, 'FLOP')} for a step's"]


def loss_share_notes(model: Model) -> list[str]:
    """Where not all tokens have a loss."""
    share = getattr(model, "loss_share", 1.0)
    return [] if share == 1 else [f"the head is computed for {100 * share:.3g} % of the tokens, those with a loss"]


def routing_notes(model: Model, ranks: int) -> list[str]:
    """Where a mixture's experts are not used evenly."""
    if not isinstance(model, Transformer) or model.routing.is_even:
        return []
    return [model.routing.skew_words(model.experts, model.experts_per_token, ranks)]


def length_notes(setup: Setup) -> list[str]:
    """Where lengths come from, and which batch has its memory counted."""
    lengths = setup.lengths
    if lengths is None:
        return []
    notes = [lengths.note] if lengths.note else []
    if lengths.layout != "padded" and len(lengths.counted) > 1:
        widest = "the worst batch: every sequence" if setup.is_plain else "the mean micro-batch; the longest sequence"
        notes.append(f"memory is that of {widest} has {lengths.longest:,} tokens")
    return notes


def _notes(setup: SettledSetup, mfu: float, bound: str, convention: Convention) -> tuple[str, ...]:
    notes = [setup.model.note] if setup.model.note else []
    beyond = beyond_context(setup.model, setup.sequence_tokens)
    if beyond:
        notes.append(beyond)
    estimated = estimated_words(setup.hardware)
    if estimated:
        notes.append(estimated)
    if bound == "host" and setup.stack is None and not setup.hardware.host_is_measured:
        notes.append(f"what starting a kernel takes of the host is estimated: {setup.hardware.launch_s * 1e6:.0f} µs")
    notes += reference_notes(setup.model, setup.sequence_tokens, setup.lengths, setup.batch_sequences, convention)
    notes += loss_share_notes(setup.model)
    notes += routing_notes(setup.model, setup.parallel.expert)
    if setup.is_plain and isinstance(setup.model, Transformer) and setup.model.experts:
        notes.append("experts' products are predicted as libraries'; `flopwise plan` knows those that `train` runs")
    notes += length_notes(setup)
    if setup.formats.matrix == "fp8" and setup.stack is not None:
        notes.append(f"operands of products in fp8 are cast {SCALED[setup.formats.scaled_by]}")
    if setup.fusion == "eager":
        notes.append("activations are counted for fused kernels; plain code keeps more")
    if convention == "palm" and mfu > PALM_NOTE_MFU:
        notes.append("palm also counts look-ups and the masked half of attention, which are not executed")
    return tuple(notes)
