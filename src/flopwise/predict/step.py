"""One training step on one device: the operators in order, each with its time, its share and what binds it."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import numpy as np

from flopwise.core.describe import describe
from flopwise.core.hardware import Hardware
from flopwise.core.model import Model
from flopwise.core.op import Convention
from flopwise.core.prediction import OpPrediction, Prediction
from flopwise.core.work import Work
from flopwise.core.workload import Workload
from flopwise.predict.calls import Floats, Phase, StepCalls, step_calls
from flopwise.predict.choose import Request, capacity_bytes, choose
from flopwise.predict.costs import (
    BOUND_NAMES,
    CAUSES,
    Costs,
    attention_costs,
    gemm_costs,
    joined,
    peak_flops,
    streaming_costs,
)
from flopwise.predict.memory import device_bytes


def step(
    model: Model, hardware: Hardware, request: Request | None = None, *, convention: Convention = "causal"
) -> Prediction:
    """Predict one optimizer step; what the request leaves open is chosen, and noted."""
    request = request or Request()
    choice = choose(model, hardware, request)
    workload = choice.workload
    work = describe(model, workload.sequence_tokens, workload.attention)
    ops = _operators(model, work, workload, hardware, convention)
    step_s = sum(op.time_s for op in ops)
    model_flops = workload.batch_sequences * work.model_flops(convention)
    hardware_flops = workload.batch_sequences * work.total_hardware_flops(convention, workload.recompute)
    peak = peak_flops(hardware, workload.formats.matrix)
    memory = device_bytes(work, workload)
    capacity = capacity_bytes(hardware, request)
    by_bound = {op.bound: sum(other.time_s for other in ops if other.bound == op.bound) for op in ops}
    return Prediction(
        model=model.name,
        hardware=hardware.name,
        sequence_tokens=workload.sequence_tokens,
        batch_sequences=workload.batch_sequences,
        micro_batch_sequences=workload.micro_batch_sequences,
        accumulation_steps=workload.accumulation_steps,
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
        step_s=step_s,
        tokens_per_s=workload.batch_tokens / step_s,
        mfu=model_flops / (step_s * peak),
        hfu=hardware_flops / (step_s * peak),
        peak_flops=peak,
        peak_format=workload.formats.matrix,
        peak_source=_source_kind(hardware, hardware.device.peak_flops[workload.formats.matrix].source),
        bound=max(by_bound, key=lambda name: by_bound[name]),
        device_bytes=memory,
        device_capacity_bytes=capacity,
        fits=memory.total <= capacity,
        ops=ops,
        chosen=choice.reasons,
        notes=_notes(hardware, workload),
    )


@lru_cache(maxsize=512)
def calls_for(model: Model, workload: Workload) -> StepCalls:
    """The kernels of a workload's micro-batch; the sizes of batch and micro-batch do not change them."""
    work = describe(model, workload.sequence_tokens, workload.attention)
    return step_calls(work, workload.formats, workload.recompute, workload.fusion, workload.optimizer)


def step_costs(calls: StepCalls, hardware: Hardware, sequences: Floats) -> Costs:
    """Cost of each kernel for micro-batches of `sequences` sequences."""
    parts = [gemm_costs(calls.gemms, hardware, sequences), streaming_costs(calls.streams, hardware, sequences)]
    if calls.attentions:
        parts.append(attention_costs(calls.attentions, hardware, sequences))
    return joined(parts)


def _operators(
    model: Model, work: Work, workload: Workload, hardware: Hardware, convention: Convention
) -> tuple[OpPrediction, ...]:
    calls = calls_for(model, workload)
    sizes = workload.micro_batches()
    costs = step_costs(calls, hardware, np.array([float(sequences) for sequences, _ in sizes]))
    # A micro-batch's kernels run once for each; the update runs once a step, whatever the micro-batches.
    repeats = np.array([float(count) for _, count in sizes])
    once = np.zeros_like(repeats)
    once[0] = 1.0
    weights = np.where((costs.phase == Phase.UPDATE)[:, None], once, repeats)
    seconds, moved = costs.seconds * weights, costs.bytes * weights
    step_s = float(seconds.sum())
    again = work.recomputed(workload.recompute)
    found = []
    for index, name in enumerate(calls.names):
        mine = costs.op == index
        flops = model_flops = 0
        if index < len(work.ops):
            op = work.ops[index]
            flops = work.hardware_flops(op, convention, again.get(name, Fraction(0)))
            model_flops = 3 * work.forward_flops(op, convention)
        causes = [float(seconds[mine][costs.cause[mine] == cause].sum()) for cause in range(len(CAUSES))]
        by_phase = [float(seconds[mine & (costs.phase == phase)].sum()) for phase in Phase]
        time_s = float(seconds[mine].sum())
        found.append(
            OpPrediction(
                name=name,
                kind=calls.kinds[index],
                flops=workload.batch_sequences * flops,
                model_flops=workload.batch_sequences * model_flops,
                bytes=round(float(moved[mine].sum())),
                time_s=time_s,
                share=time_s / step_s,
                bound=BOUND_NAMES[CAUSES[int(np.argmax(causes))]],
                forward_s=by_phase[Phase.FORWARD],
                backward_s=by_phase[Phase.BACKWARD],
                recompute_s=by_phase[Phase.RECOMPUTE],
            )
        )
    return tuple(found)


def _source_kind(hardware: Hardware, key: str) -> str:
    return hardware.sources[key].kind


def _notes(hardware: Hardware, workload: Workload) -> tuple[str, ...]:
    notes = []
    efficiency = hardware.efficiency
    parts = {
        "matrix products": efficiency.gemm.source,
        "attention": efficiency.attention.source,
        "memory": efficiency.memory.source,
    }
    estimated = [name for name, source in parts.items() if _source_kind(hardware, source) == "estimated"]
    if estimated:
        notes.append(f"efficiency of {', '.join(estimated)} on {hardware.name} is estimated, not measured")
    if workload.fusion == "eager":
        notes.append("activations are counted for fused kernels; plain code keeps more")
    return tuple(notes)
