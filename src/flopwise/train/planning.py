"""The plan of a training: read from a file, or found for this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.base.units import show_bytes
from flopwise.plan.device.cuts import DeviceQuestion
from flopwise.plan.device.explain import planned
from flopwise.plan.device.forecast import forecast
from flopwise.plan.program.runs import check_runs
from flopwise.predict import step as predicted_step
from flopwise.predict.choose import PLAIN, Request, capacity_bytes, default_host_bytes
from flopwise.predict.cluster.costing import peak_bytes
from flopwise.predict.cluster.strategies import listed
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.cluster_plan import Expected as ClusterExpected
from flopwise.records.plan import Forecast, Plan
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel
from flopwise.setup.workload import Workload
from flopwise.work.describe import describe
from flopwise.work.formats import FP8_MULTIPLE, POLICIES, Formats, parse_formats
from flopwise.work.op import Gemm
from flopwise.work.transformer import Transformer

CPU_MEMORY_SHARE = 0.6
"""Of a CPU's memory: it is the host's too, and others run there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a plan is wanted for."""

    model: Transformer
    hardware: Hardware
    hardware_name: str
    sequence_tokens: int
    batch_sequences: int | None
    """None: what the plan finds best."""
    micro_batch_sequences: int | None
    formats: Formats
    device_memory_bytes: int | None
    host_memory_bytes: int | None
    clip: bool
    devices: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """A plan with what it is expected to take, as far as that is known."""

    plan: Plan | ClusterPlan
    batch_sequences: int
    step_s: float | None
    tokens_per_s: float | None
    peak_flops: float | None
    peak_format: str | None
    hardware_flops: int | None
    """Of a step, where it is known."""
    device_bytes: int | None
    host_bytes: int | None


def find_plan(question: Question) -> Promise:
    """The fastest plan for one device, or one that shards over several."""
    return _several(question) if question.devices > 1 else _one(question)


def _one(question: Question) -> Promise:
    hardware = question.hardware
    if question.device_memory_bytes is None and hardware.link is None:
        device_bytes = int(CPU_MEMORY_SHARE * hardware.device.dram.size_bytes.value)
    else:
        device_bytes = capacity_bytes(hardware, Request(device_memory_bytes=question.device_memory_bytes))
    host_bytes = question.host_memory_bytes
    if host_bytes is None:
        host_bytes = default_host_bytes(hardware)
    micro, batch = question.micro_batch_sequences, question.batch_sequences
    if micro is not None and batch is not None and micro > batch:
        raise FlopwiseError(
            f"a micro-batch of {micro} is larger than the batch of {batch}",
            why="a step runs the batch in micro-batches",
            hint=f"--micro {batch} or less",
        )
    wanted = DeviceQuestion(
        model=question.model,
        hardware=hardware,
        hardware_name=question.hardware_name,
        sequence_tokens=question.sequence_tokens,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        formats=question.formats,
        batch_sequences=batch if micro is None or batch is not None else micro,
        round_sequences=micro,
        clip=question.clip,
    )
    if hardware.link is None and question.formats.matrix not in hardware.device.peak_flops:
        # A CPU computes in formats whose speed nobody measured. The plan is that of fp32, which takes no less memory.
        other = planned(replace(wanted, formats=POLICIES["fp32"]), helps=False, elsewhere=False)
        return _unknown(replace(other.plan, precision=question.formats.name), batch)
    # This machine is the device: another one is no way out.
    found = planned(wanted, helps=False, elsewhere=False)
    return _promise(found.plan, found.forecast, batch)


def _unknown(plan: Plan, batch: int | None) -> Promise:
    """A plan that can be run, and whose speed cannot be told."""
    return Promise(
        plan=plan,
        batch_sequences=plan.rounds_per_step * plan.sequences_per_round if batch is None else batch,
        step_s=None,
        tokens_per_s=None,
        peak_flops=None,
        peak_format=None,
        hardware_flops=None,
        device_bytes=plan.expected.device_bytes if plan.expected else None,
        host_bytes=plan.expected.host_bytes if plan.expected else None,
    )


def _promise(plan: Plan, found: Forecast, batch: int | None) -> Promise:
    """The plan with its forecast; a batch whose last round is not full takes less in proportion."""
    whole = plan.rounds_per_step * plan.sequences_per_round
    share = 1.0 if batch is None else batch / whole
    return Promise(
        plan=replace(plan, expected=found.expected),
        batch_sequences=whole if batch is None else batch,
        step_s=share * found.step_s,
        tokens_per_s=found.tokens_per_s,
        peak_flops=found.peak_flops,
        peak_format=found.peak_format,
        hardware_flops=int(share * found.hardware_flops),
        device_bytes=found.device_total,
        host_bytes=found.host_total,
    )


def given_plan(plan: Plan | ClusterPlan, model: Transformer, hardware: Hardware, batch: int | None) -> Promise:
    """A plan from a file, with what it takes on the hardware that it is run on."""
    if isinstance(plan, ClusterPlan):
        return _cluster_promise(plan, model, hardware)
    check_runs(plan, model)
    whole = plan.rounds_per_step * plan.sequences_per_round
    if batch is not None and -(-batch // plan.sequences_per_round) != plan.rounds_per_step:
        raise FlopwiseError(
            f"--batch {batch} is no step of the plan",
            why=f"it has {plan.rounds_per_step} rounds of {plan.sequences_per_round} sequences",
            hint=f"--batch {whole}, or plan again for this batch",
        )
    try:
        return _promise(plan, forecast(plan, model, hardware), batch)
    except FlopwiseError:
        # The device may lack a rate that the plan's formats need; it can be run all the same.
        return _unknown(plan, batch)


def _several(question: Question) -> Promise:
    """Data parallel with everything sharded, which is what runs on several devices."""
    batch = question.batch_sequences or 8 * question.devices
    plan = ClusterPlan(
        hardware=question.hardware_name,
        devices=question.devices,
        sequence_tokens=question.sequence_tokens,
        batch_sequences=batch,
        micro_batch_sequences=question.micro_batch_sequences or max(1, -(-batch // question.devices)),
        precision=question.formats.name,
        recompute="none",
        attention="flash",
        fusion="fused",
        optimizer="adamw",
        stack="kernels",
        parallel=Parallel(data=question.devices, zero=3),
        device_memory_bytes=question.device_memory_bytes,
    )
    promise = _cluster_promise(plan, question.model, question.hardware, choose=question.micro_batch_sequences is None)
    return check_fits(promise, question.model, question.hardware)


def _too_large(plan: ClusterPlan, needed: int, model: Transformer, hardware: Hardware, capacity: int) -> DoesNotFit:
    """A set-up over several devices takes more than each of them has."""
    hints = []
    if capacity < needed <= capacity_of_each(hardware, plan.devices, None):
        hints.append(f"--device-mem {-(-needed // 2**20)}MiB")
    if plan.micro_batch_sequences > 1:
        hints.append("a smaller --micro")
    return DoesNotFit(
        f"no plan fits {model.name} on {plan.devices:,} × {hardware.name} in {show_bytes(capacity)} of device"
        " memory each",
        why=f"{show_bytes(needed)} are needed, and there are {show_bytes(capacity)}: {plan.parallel.label},"
        f" recompute {plan.recompute}, micro-batch {plan.micro_batch_sequences:,}",
        hint=", ".join([*hints, "a shorter --seq, or --gpus 1, which streams through the host's memory"]),
        needed_bytes=needed,
    )


def check_fits(promise: Promise, model: Transformer, hardware: Hardware) -> Promise:
    """The promise of several devices with its memory, as far as that can be told; refused where they have less."""
    plan = promise.plan
    assert isinstance(plan, ClusterPlan)
    if promise.device_bytes is None:
        promise = replace(promise, device_bytes=_bytes_of_each(plan, model, hardware))
    capacity = capacity_of_each(hardware, plan.devices, plan.device_memory_bytes)
    if promise.device_bytes is not None and promise.device_bytes > capacity:
        raise _too_large(plan, promise.device_bytes, model, hardware, capacity)
    return promise


def capacity_of_each(hardware: Hardware, devices: int, cap: int | None) -> int:
    """What each of several devices has, or the cap on it; ranks on a CPU share its memory."""
    there = capacity_bytes(hardware, Request(device_memory_bytes=cap))
    if hardware.device.kind != "cpu":
        return there
    return min(there, int(CPU_MEMORY_SHARE * hardware.device.dram.size_bytes.value) // devices)


def _bytes_of_each(plan: ClusterPlan, model: Transformer, hardware: Hardware) -> int | None:
    """Memory of each device where a step's time cannot be told, for want of a network; None: nor can this."""
    workload = Workload(
        sequence_tokens=plan.sequence_tokens,
        batch_sequences=plan.batch_sequences,
        micro_batch_sequences=plan.micro_batch_sequences,
        formats=parse_formats(plan.precision),
        recompute=plan.recompute,
        attention=plan.attention,
        fusion=plan.fusion,
        optimizer=plan.optimizer,
    )
    # Where nobody has measured the speed of a format: those of fp32 take no less.
    for formats in (workload.formats, POLICIES["fp32"]):
        try:
            set_up = listed([(model, plan.parallel, replace(workload, formats=formats))], hardware)
            return int(peak_bytes(set_up, hardware, PLAIN)[0])
        except FlopwiseError:
            continue
    return None


def _cluster_promise(plan: ClusterPlan, model: Transformer, hardware: Hardware, *, choose: bool = False) -> Promise:
    nothing = Promise(
        plan=plan,
        batch_sequences=plan.batch_sequences,
        step_s=None,
        tokens_per_s=None,
        peak_flops=None,
        peak_format=None,
        hardware_flops=None,
        device_bytes=None,
        host_bytes=None,
    )
    if plan.devices > 1 and not hardware.networks:
        return nothing
    request = Request(
        sequence_tokens=plan.sequence_tokens,
        batch_sequences=plan.batch_sequences,
        micro_batch_sequences=None if choose else plan.micro_batch_sequences,
        formats=plan.precision,
        recompute=None if choose else plan.recompute,
        parallel=plan.parallel,
        device_memory_bytes=plan.device_memory_bytes,
    )
    found = predicted_step(model, hardware, request)
    expected = ClusterExpected(
        step_s=found.step_s,
        tokens_per_s=found.tokens_per_s,
        mfu=found.mfu,
        device_bytes=found.device_bytes.total,
    )
    settled = replace(
        plan, micro_batch_sequences=found.micro_batch_sequences, recompute=found.recompute, expected=expected
    )
    return Promise(
        plan=settled,
        batch_sequences=plan.batch_sequences,
        step_s=found.step_s,
        tokens_per_s=found.tokens_per_s,
        peak_flops=found.peak_flops * plan.devices,
        peak_format=found.peak_format,
        hardware_flops=found.hardware_flops,
        device_bytes=found.device_bytes.total,
        host_bytes=None,
    )


def products_not_in_fp8(plan: Plan | ClusterPlan, model: Transformer) -> str | None:
    """What a plan in fp8 multiplies in bf16 all the same, in words; None: nothing."""
    if isinstance(plan, ClusterPlan) or parse_formats(plan.precision).matrix != "fp8":
        return None
    odd = sorted({tokens for chunk in range(plan.chunks_per_round) if (tokens := plan.tokens_of(chunk)) % FP8_MULTIPLE})
    if odd:
        return f"no product is in fp8: chunks of {odd[0]:,} tokens are no multiple of {FP8_MULTIPLE}; all run in bf16"
    work = describe(model, plan.sequence_tokens)
    products = [op for op in work.ops if isinstance(op, Gemm) and op.in_block]
    left = [
        op.name
        for op in products
        if op.depth % FP8_MULTIPLE or any(work.tensors[name].elements // op.rows % FP8_MULTIPLE for name in op.outputs)
    ]
    if not left:
        return None
    return f"in bf16 instead of fp8: {', '.join(left)}, whose sides are no multiples of {FP8_MULTIPLE}"
