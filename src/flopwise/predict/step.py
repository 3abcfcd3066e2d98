"""One training step: the operators in order, each with its time, its share and what binds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from flopwise.base.errors import unknown_name
from flopwise.predict.choose import PLAIN, Request, capacity_bytes, choose
from flopwise.predict.cluster.step import cluster_step
from flopwise.predict.cluster.strategies import micro_batches
from flopwise.predict.kernels.calls import Phase, calls_of
from flopwise.predict.kernels.costs import BOUND_NAMES, CAUSES, peak_flops, workload_costs
from flopwise.predict.kernels.memory import device_bytes
from flopwise.records.prediction import NO_STACK, DeviceBytes, OpPrediction, Prediction, StagePrediction
from flopwise.setup.hardware import Hardware
from flopwise.setup.workload import Workload
from flopwise.work.describe import describe
from flopwise.work.model import Model, beyond_context
from flopwise.work.op import CONVENTIONS, Convention
from flopwise.work.traffic import least_bytes
from flopwise.work.work import Work

PALM_NOTE_MFU = 0.75
"""Above this, `palm` shares say more about the convention than about the device."""


def step(
    model: Model, hardware: Hardware, request: Request | None = None, *, convention: Convention = "causal"
) -> Prediction:
    """Predict one optimizer step; what the request leaves open is chosen, and noted."""
    request = request or Request()
    if convention not in CONVENTIONS:
        raise unknown_name("convention", str(convention), CONVENTIONS, hint=f"one of {', '.join(CONVENTIONS)}")
    choice = choose(model, hardware, request)
    workload = choice.workload
    work = describe(model, workload.sequence_tokens, workload.attention)
    made = _made(model, hardware, request, workload, convention)
    model_flops = workload.batch_sequences * work.model_flops(convention)
    hardware_flops = workload.batch_sequences * work.total_hardware_flops(convention, workload.recompute)
    devices = request.parallel.devices
    peak = peak_flops(hardware, workload.formats.matrix)
    mfu = model_flops / (made.step_s * peak * devices)
    capacity = capacity_bytes(hardware, request)
    by_bound = {op.bound: sum(other.time_s for other in made.ops if other.bound == op.bound) for op in made.ops}
    return Prediction(
        model=model.name,
        hardware=hardware.name,
        sequence_tokens=workload.sequence_tokens,
        batch_sequences=workload.batch_sequences,
        micro_batch_sequences=workload.micro_batch_sequences,
        accumulation_steps=micro_batches(workload, request.parallel.data)[2],
        batch_tokens=workload.batch_tokens,
        precision=workload.formats.name,
        recompute=workload.recompute,
        attention=workload.attention,
        fusion=workload.fusion,
        optimizer=workload.optimizer,
        n_params=work.parameters,
        n_active_params=work.active_parameters,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        convention=convention,
        step_s=made.step_s,
        tokens_per_s=workload.batch_tokens / made.step_s,
        mfu=mfu,
        hfu=hardware_flops / (made.step_s * peak * devices),
        peak_flops=peak,
        peak_format=workload.formats.matrix,
        peak_source=_source_kind(hardware, hardware.device.peak_flops[workload.formats.matrix].source),
        bound=max(by_bound, key=lambda name: by_bound[name]),
        device_bytes=made.device_bytes,
        device_capacity_bytes=capacity,
        fits=made.device_bytes.total <= capacity,
        ops=made.ops,
        devices=devices,
        parallel=request.parallel,
        stack=request.stack.name if request.stack else NO_STACK,
        stages=made.stages,
        host_bytes=made.host_bytes,
        parts=made.parts,
        chosen=choice.reasons,
        notes=_notes(model, hardware, workload, mfu, convention),
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


def _made(model: Model, hardware: Hardware, request: Request, workload: Workload, convention: Convention) -> _Made:
    if request.is_plain:
        work = describe(model, workload.sequence_tokens, workload.attention)
        ops = _operators(model, work, workload, hardware, convention)
        return _Made(step_s=sum(op.time_s for op in ops), ops=ops, device_bytes=device_bytes(work, workload))
    found = cluster_step(
        model,
        hardware,
        workload,
        parallel=request.parallel,
        stack=request.stack or PLAIN,
        convention=convention,
    )
    return _Made(
        step_s=found.step_s,
        ops=found.ops,
        device_bytes=found.device_bytes,
        parts=found.parts,
        stages=found.stages,
        host_bytes=found.host_bytes,
    )


def _operators(
    model: Model, work: Work, workload: Workload, hardware: Hardware, convention: Convention
) -> tuple[OpPrediction, ...]:
    calls = calls_of(model, workload)
    sizes = workload.micro_batches()
    costs = workload_costs(model, hardware, workload)
    seconds = costs.seconds
    step_s = float(seconds.sum())
    again = work.recomputed(workload.recompute)
    found = []
    for index, name in enumerate(calls.names):
        mine = costs.op == index
        flops = model_flops = 0
        moved = least = round(float(costs.bytes[mine].sum()))
        if index < len(work.ops):
            op, share = work.ops[index], again.get(name, Fraction(0))
            flops = work.hardware_flops(op, convention, share)
            model_flops = 3 * work.forward_flops(op, convention)
            least = sum(count * least_bytes(work, op, workload.formats, size, share) for size, count in sizes)
        causes = [float(seconds[mine][costs.cause[mine] == cause].sum()) for cause in range(len(CAUSES))]
        by_phase = [float(seconds[mine & (costs.phase == phase)].sum()) for phase in Phase]
        time_s = float(seconds[mine].sum())
        found.append(
            OpPrediction(
                name=name,
                kind=calls.kinds[index],
                flops=workload.batch_sequences * flops,
                model_flops=workload.batch_sequences * model_flops,
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


def _notes(model: Model, hardware: Hardware, workload: Workload, mfu: float, convention: Convention) -> tuple[str, ...]:
    notes = [model.note] if model.note else []
    beyond = beyond_context(model, workload.sequence_tokens)
    if beyond:
        notes.append(beyond)
    estimated = estimated_words(hardware)
    if estimated:
        notes.append(estimated)
    if workload.fusion == "eager":
        notes.append("activations are counted for fused kernels; plain code keeps more")
    if convention == "palm" and mfu > PALM_NOTE_MFU:
        notes.append("palm also counts look-ups and the masked half of attention, which are not executed")
    return tuple(notes)
