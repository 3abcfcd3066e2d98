"""The plan of a training: read from a file, or found for this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.base.units import show_bytes
from flopwise.plan.device.explain import planned
from flopwise.plan.device.forecast import forecast
from flopwise.plan.program.runs import check_runs
from flopwise.predict import step as predicted_step
from flopwise.predict.choose import PLAIN, capacity_bytes, default_host_bytes, usual_formats
from flopwise.predict.cluster.costing import peak_bytes
from flopwise.predict.cluster.strategies import listed
from flopwise.records.cluster_plan import ClusterExpected, ClusterPlan
from flopwise.records.plan import Forecast, Plan
from flopwise.records.prediction import NO_STACK
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import CappedSetup, SettledSetup, Setup, default_sequence
from flopwise.work.describe import describe
from flopwise.work.formats import FP8_MULTIPLE, POLICIES, parse_formats
from flopwise.work.model import Model
from flopwise.work.op import Gemm
from flopwise.work.transformer import Transformer

CPU_MEMORY_SHARE = 0.6
"""Of a CPU's memory: it is the host's too, and others run there."""


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


def find_plan(setup: Setup) -> Promise:
    """The fastest plan for one device, or one that shards over several."""
    return _several(setup) if setup.parallel.devices > 1 else _one(setup)


def cap_setup(setup: Setup) -> CappedSetup:
    """The set-up of one device under its caps, or under what there is of its memory and the host's."""
    device, host = capacity_bytes(setup), setup.host_cap_bytes
    if setup.device_cap_bytes is None and setup.hardware.link is None:
        device = int(CPU_MEMORY_SHARE * setup.hardware.device.dram.size_bytes.value)
    return setup.cap(
        sequence_tokens=setup.sequence_tokens or default_sequence(setup.model),
        formats=setup.formats or usual_formats(setup.hardware),
        device=max(1, device),
        host=default_host_bytes(setup.hardware) if host is None else host,
    )


def _one(setup: Setup) -> Promise:
    hardware, batch, wanted = setup.hardware, setup.batch_sequences, cap_setup(setup)
    if batch is None:
        wanted = replace(wanted, batch_sequences=setup.micro_batch_sequences)
    if hardware.link is None and wanted.formats.matrix not in hardware.device.peak_flops:
        # A CPU computes in formats whose speed nobody measured. The plan is that of fp32, which takes no less memory.
        other = planned(replace(wanted, formats=POLICIES["fp32"]), helps=False, elsewhere=False)
        return _unknown(replace(other.plan, precision=wanted.formats.name), batch)
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
        return _cluster_promise(plan, plan.setup(model, hardware))
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


def _several(setup: Setup) -> Promise:
    """Data parallel with everything sharded, which is what runs on several devices."""
    devices, micro = setup.parallel.devices, setup.micro_batch_sequences
    batch = setup.batch_sequences or 8 * devices
    formats = setup.formats or usual_formats(setup.hardware)
    plan = ClusterPlan(
        hardware=setup.hardware_name or setup.hardware.name,
        devices=devices,
        sequence_tokens=setup.sequence_tokens or default_sequence(setup.model),
        batch_sequences=batch,
        micro_batch_sequences=micro or max(1, -(-batch // devices)),
        precision=formats.name,
        recompute="none",
        attention=setup.attention,
        fusion=setup.fusion,
        optimizer=setup.optimizer,
        stack=NO_STACK,
        parallel=setup.parallel,
        device_memory_bytes=setup.device_cap_bytes,
    )
    # A micro-batch that is given is run as it is, with nothing recomputed.
    asked = replace(setup, batch_sequences=batch, formats=formats, recompute=None if micro is None else "none")
    return check_fits(_cluster_promise(plan, asked), setup.model, setup.hardware)


def _too_large(setup: SettledSetup, needed: int) -> DoesNotFit:
    """A set-up over several devices takes more than each of them has."""
    capacity, parallel = capacity_of_each(setup), setup.parallel
    hints = []
    if capacity < needed <= capacity_of_each(replace(setup, device_cap_bytes=None)):
        hints.append(f"--device-mem {-(-needed // 2**20)}MiB")
    if setup.micro_batch_sequences > 1:
        hints.append("a smaller --micro")
    return DoesNotFit(
        f"no plan fits {setup.model.name} on {parallel.devices:,} × {setup.hardware.name} in"
        f" {show_bytes(capacity)} of device memory each",
        why=f"{show_bytes(needed)} are needed, and there are {show_bytes(capacity)}: {parallel.label},"
        f" recompute {setup.recompute}, micro-batch {setup.micro_batch_sequences:,}",
        hint=", ".join([*hints, "a shorter --seq, or --gpus 1, which streams through the host's memory"]),
        needed_bytes=needed,
    )


def check_fits(promise: Promise, model: Model, hardware: Hardware) -> Promise:
    """The promise of several devices with its memory, as far as that can be told; refused where they have less."""
    assert isinstance(promise.plan, ClusterPlan)
    setup = promise.plan.setup(model, hardware)
    if promise.device_bytes is None:
        promise = replace(promise, device_bytes=_bytes_of_each(setup))
    if promise.device_bytes is not None and promise.device_bytes > capacity_of_each(setup):
        raise _too_large(setup, promise.device_bytes)
    return promise


def capacity_of_each(setup: Setup) -> int:
    """What each of several devices has, or the cap on it; ranks on a CPU share its memory."""
    there, device = capacity_bytes(setup), setup.hardware.device
    if device.kind != "cpu":
        return there
    return min(there, int(CPU_MEMORY_SHARE * device.dram.size_bytes.value) // setup.parallel.devices)


def _bytes_of_each(setup: SettledSetup) -> int | None:
    """Memory of each device where a step's time cannot be told, for want of a network; None: nor can this."""
    # Where nobody has measured the speed of a format: those of fp32 take no less.
    for formats in (setup.formats, POLICIES["fp32"]):
        try:
            return int(peak_bytes(listed([replace(setup, formats=formats)]), setup.hardware, PLAIN)[0])
        except FlopwiseError:
            continue
    return None


def _cluster_promise(plan: ClusterPlan, setup: Setup) -> Promise:
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
    if plan.devices > 1 and not setup.hardware.networks:
        return nothing
    found = predicted_step(setup)
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
