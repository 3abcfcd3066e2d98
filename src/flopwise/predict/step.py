"""One training step: the operators in order, each with its time, its share and what binds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from flopwise.base.errors import unknown_name
from flopwise.predict.choose import PLAIN, capacity_bytes, choose
from flopwise.predict.cluster.step import cluster_step
from flopwise.predict.kernels.calls import Phase, calls_of
from flopwise.predict.kernels.costs import BOUND_NAMES, CAUSES, peak_flops, setup_costs
from flopwise.predict.kernels.memory import device_bytes
from flopwise.records.prediction import NO_STACK, DeviceBytes, OpPrediction, Prediction, StagePrediction
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import SettledSetup, Setup
from flopwise.work.describe import describe
from flopwise.work.model import beyond_context
from flopwise.work.op import CONVENTIONS, Convention
from flopwise.work.traffic import least_bytes

PALM_NOTE_MFU = 0.75
"""Above this, `palm` shares say more about the convention than about the device."""


def step(asked: Setup, *, convention: Convention = "causal") -> Prediction:
    """Predict one optimizer step; what the set-up leaves open is chosen, and noted."""
    if convention not in CONVENTIONS:
        raise unknown_name("convention", str(convention), CONVENTIONS, hint=f"one of {', '.join(CONVENTIONS)}")
    setup, reasons = choose(asked)
    model, hardware = setup.model, setup.hardware
    work = describe(model, setup.sequence_tokens, setup.attention)
    made = _made(setup, convention)
    model_flops = setup.batch_sequences * work.model_flops(convention)
    hardware_flops = setup.batch_sequences * work.total_hardware_flops(convention, setup.recompute)
    devices = setup.parallel.devices
    peak = peak_flops(hardware, setup.formats.matrix)
    mfu = model_flops / (made.step_s * peak * devices)
    capacity = capacity_bytes(setup)
    by_bound = {op.bound: sum(other.time_s for other in made.ops if other.bound == op.bound) for op in made.ops}
    return Prediction(
        model=model.name,
        hardware=hardware.name,
        sequence_tokens=setup.sequence_tokens,
        batch_sequences=setup.batch_sequences,
        micro_batch_sequences=setup.micro_batch_sequences,
        accumulation_steps=setup.accumulation_steps,
        batch_tokens=setup.batch_tokens,
        precision=setup.formats.name,
        recompute=setup.recompute,
        attention=setup.attention,
        fusion=setup.fusion,
        optimizer=setup.optimizer,
        n_params=work.parameters,
        n_active_params=work.active_parameters,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        convention=convention,
        step_s=made.step_s,
        tokens_per_s=setup.batch_tokens / made.step_s,
        mfu=mfu,
        hfu=hardware_flops / (made.step_s * peak * devices),
        peak_flops=peak,
        peak_format=setup.formats.matrix,
        peak_source=_source_kind(hardware, hardware.device.peak_flops[setup.formats.matrix].source),
        bound=max(by_bound, key=lambda name: by_bound[name]),
        device_bytes=made.device_bytes,
        device_capacity_bytes=capacity,
        fits=made.device_bytes.total <= capacity,
        ops=made.ops,
        devices=devices,
        parallel=setup.parallel,
        stack=setup.stack.name if setup.stack else NO_STACK,
        stages=made.stages,
        host_bytes=made.host_bytes,
        parts=made.parts,
        chosen=reasons,
        notes=_notes(setup, mfu, convention),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """Time and memory, from the one or the other way of costing."""

    step_s: float
    ops: tuple[OpPrediction, ...]
    device_bytes: DeviceBytes
    parts: dict[str, float] = field(default_factory=dict)
    stages: tuple[StagePrediction, ...] = ()
    host_bytes: int = 0


def _made(setup: SettledSetup, convention: Convention) -> _Made:
    if setup.is_plain:
        ops = _operators(setup, convention)
        return _Made(step_s=sum(op.time_s for op in ops), ops=ops, device_bytes=device_bytes(setup))
    found = cluster_step(setup, setup.stack or PLAIN, convention)
    return _Made(
        step_s=found.step_s,
        ops=found.ops,
        device_bytes=found.device_bytes,
        parts=found.parts,
        stages=found.stages,
        host_bytes=found.host_bytes,
    )


def _operators(setup: SettledSetup, convention: Convention) -> tuple[OpPrediction, ...]:
    work = describe(setup.model, setup.sequence_tokens, setup.attention)
    calls = calls_of(setup)
    sizes = setup.micro_batches()
    costs = setup_costs(setup)
    seconds = costs.seconds
    step_s = float(seconds.sum())
    again = work.recomputed(setup.recompute)
    found = []
    for index, name in enumerate(calls.names):
        mine = costs.op == index
        flops = model_flops = 0
        moved = least = round(float(costs.bytes[mine].sum()))
        if index < len(work.ops):
            op, share = work.ops[index], again.get(name, Fraction(0))
            flops = work.hardware_flops(op, convention, share)
            model_flops = 3 * work.forward_flops(op, convention)
            least = sum(count * least_bytes(work, op, setup.formats, size, share) for size, count in sizes)
        causes = [float(seconds[mine][costs.cause[mine] == cause].sum()) for cause in range(len(CAUSES))]
        by_phase = [float(seconds[mine & (costs.phase == phase)].sum()) for phase in Phase]
        time_s = float(seconds[mine].sum())
        found.append(
            OpPrediction(
                name=name,
                kind=calls.kinds[index],
                flops=setup.batch_sequences * flops,
                model_flops=setup.batch_sequences * model_flops,
                bytes=moved,
                least_bytes=least,
                time_s=time_s,
                share=time_s / step_s,
                bound=BOUND_NAMES[CAUSES[int(np.argmax(causes))]],
                forward_s=by_phase[Phase.FORWARD],
                backward_s=by_phase[Phase.BACKWARD],
                recompute_s=by_phase[Phase.RECOMPUTE],
                update_s=by_phase[Phase.UPDATE],
            )
        )
    return tuple(found)


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


def _notes(setup: SettledSetup, mfu: float, convention: Convention) -> tuple[str, ...]:
    notes = [setup.model.note] if setup.model.note else []
    beyond = beyond_context(setup.model, setup.sequence_tokens)
    if beyond:
        notes.append(beyond)
    estimated = estimated_words(setup.hardware)
    if estimated:
        notes.append(estimated)
    if setup.fusion == "eager":
        notes.append("activations are counted for fused kernels; plain code keeps more")
    if convention == "palm" and mfu > PALM_NOTE_MFU:
        notes.append("palm also counts look-ups and the masked half of attention, which are not executed")
    return tuple(notes)
