"""The plan of a training: read from a file, or found for this machine."""

from __future__ import annotations

from dataclasses import replace

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.base.units import show_bytes, show_share
from flopwise.plan.device.explain import make_plan
from flopwise.plan.device.forecast import clipping_share, forecast
from flopwise.plan.program.runs import check_runs
from flopwise.predict import step as predicted_step
from flopwise.predict.choose import capacity_bytes, default_host_bytes, usual_formats
from flopwise.predict.cluster.costing import PLAIN, peak_bytes
from flopwise.predict.cluster.strategies import listed
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.outcome import Outcome
from flopwise.records.plan import Forecast, Plan
from flopwise.records.prediction import Prediction
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import CappedSetup, SettledSetup, Setup, default_sequence
from flopwise.setup.stack import NO_STACK
from flopwise.setup.written import words_of, write_setup
from flopwise.work.describe import describe
from flopwise.work.formats import FP8_MULTIPLE, POLICIES, parse_formats
from flopwise.work.lengths import Lengths
from flopwise.work.model import Model
from flopwise.work.op import Gemm
from flopwise.work.transformer import Transformer

CPU_MEMORY_SHARE = 0.6
"""Of a CPU's memory: it is the host's too, and others run there."""

LEAST_TOLD = 0.001
"""Of a step, what a wait takes that is worth a word."""

FoundPlan = tuple[Plan | ClusterPlan, Outcome]
"""A plan, and what it is expected to take, as far as that is known."""


def find_plan(setup: Setup) -> FoundPlan:
    """The fastest plan for one device, or one that shards over several."""
    return _several(setup) if setup.parallel.devices > 1 else _one(setup)


def cap_setup(setup: Setup) -> CappedSetup:
    """The set-up of one device under its caps, or under what there is of its memory and the host's."""
    device, host = capacity_bytes(setup), setup.host_cap_bytes
    if setup.device_cap_bytes is None and setup.hardware.link is None:
        device = int(CPU_MEMORY_SHARE * setup.hardware.device.dram.size_bytes.value)
    return setup.cap(
        sequence_tokens=setup.sequence_tokens or default_sequence(setup.model),
        formats=setup.formats or usual_formats(setup.hardware, setup.model),
        device=max(1, device),
        host=default_host_bytes(setup.hardware) if host is None else host,
    )


def _one(setup: Setup) -> FoundPlan:
    hardware, batch, wanted = setup.hardware, setup.batch_sequences, cap_setup(setup)
    if batch is None:
        wanted = replace(wanted, batch_sequences=setup.micro_batch_sequences)
    if hardware.link is None and wanted.formats.matrix not in hardware.device.peak_flops:
        # A CPU computes in formats whose speed nobody measured. The plan is that of fp32, which takes no less memory.
        other = make_plan(replace(wanted, formats=POLICIES["fp32"]), helps=False, elsewhere=False)
        return _unknown(replace(other.plan, precision=wanted.formats.name), batch)
    # This machine is the device: another one is no way out.
    found = make_plan(wanted, helps=False, elsewhere=False)
    return _known(found.plan, found.forecast, batch)


def note_clipping(plan: Plan | ClusterPlan, model: Transformer, hardware: Hardware) -> str:
    """That gradients are clipped, and what the wait for the last of them costs where that is known."""
    told = "gradients are clipped by their norm (--clip 0 for none)"
    if isinstance(plan, ClusterPlan) or plan.update_when != "end":
        return told
    try:
        waited = clipping_share(plan, model, hardware)
    except FlopwiseError:
        # The device may lack a rate that the plan's formats need.
        return told
    if waited < LEAST_TOLD:
        return told
    return f"{told}: no update before the last of them is there, which takes {show_share(waited)} of a step"


def _unknown(plan: Plan, batch: int | None) -> FoundPlan:
    """A plan that can be run, and whose speed cannot be told."""
    taken = plan.expected or Outcome()
    words = words_of(plan, "recompute") | {"batch_sequences": batch or plan.batch_sequences}
    return plan, Outcome(**words, device_bytes=taken.device_bytes, host_bytes=taken.host_bytes)


def _known(plan: Plan | ClusterPlan, found: Forecast | Prediction, batch: int | None) -> FoundPlan:
    """The plan with its figures; a batch whose last round is not full takes less in proportion."""
    share = 1 if batch is None else batch / plan.batch_sequences
    # What a framework keeps on the host is no part of its plan.
    expected = found.expected if isinstance(plan, Plan) else replace(found.expected, host_bytes=None)
    return replace(plan, expected=expected), replace(
        expected,
        **words_of(plan, "recompute") | {"batch_sequences": batch or plan.batch_sequences},
        step_s=share * found.step_s,
        hardware_flops=int(share * found.hardware_flops),
        peak_flops=found.peak_flops * plan.devices,
        peak_format=found.peak_format,
    )


def given_plan(
    plan: Plan | ClusterPlan, model: Transformer, hardware: Hardware, batch: int | None, lengths: Lengths | None = None
) -> FoundPlan:
    """A plan from a file, with what it takes on the hardware that it is run on, with sequences as they are there."""
    plan = replace(plan, lengths=lengths.words if lengths else None)
    if isinstance(plan, ClusterPlan):
        return _predicted(plan, plan.setup(model, hardware))
    check_runs(plan, model)
    if batch is not None and -(-batch // plan.sequences_per_round) != plan.rounds_per_step:
        raise FlopwiseError(
            f"--batch {batch} is no step of the plan",
            why=f"it has {plan.rounds_per_step} rounds of {plan.sequences_per_round} sequences",
            hint=f"--batch {plan.batch_sequences}, or plan again for this batch",
        )
    try:
        return _known(plan, forecast(plan, model, hardware), batch)
    except FlopwiseError:
        # The device may lack a rate that the plan's formats need; it can be run all the same.
        return _unknown(plan, batch)


def _several(setup: Setup) -> FoundPlan:
    """Data parallel with everything sharded, which is what runs on several devices."""
    devices, micro = setup.parallel.devices, setup.micro_batch_sequences
    batch = setup.batch_sequences or 8 * devices
    # A micro-batch that is given is run as it is, with nothing recomputed.
    asked = replace(
        setup,
        sequence_tokens=setup.sequence_tokens or default_sequence(setup.model),
        batch_sequences=batch,
        formats=setup.formats or usual_formats(setup.hardware, setup.model),
        recompute=None if micro is None else "none",
    )
    words = write_setup(asked) | {
        "micro_batch_sequences": micro or max(1, -(-batch // devices)),
        "recompute": "none",
        "stack": NO_STACK,
    }
    plan = ClusterPlan(**words, device_memory_bytes=setup.device_cap_bytes)
    return check_fits(_predicted(plan, asked), setup.model, setup.hardware)


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


def check_fits(found: FoundPlan, model: Model, hardware: Hardware) -> FoundPlan:
    """The plan of several devices with its memory, as far as that can be told; refused where they have less."""
    plan, expected = found
    assert isinstance(plan, ClusterPlan)
    setup = plan.setup(model, hardware)
    needed = _bytes_of_each(setup) if expected.device_bytes is None else expected.device_total
    if needed is not None and needed > capacity_of_each(setup):
        raise _too_large(setup, needed)
    return plan, replace(expected, device_bytes=needed)


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


def _predicted(plan: ClusterPlan, setup: Setup) -> FoundPlan:
    """The plan as it is predicted, with what the prediction has chosen."""
    if plan.devices > 1 and not setup.hardware.networks:
        return plan, Outcome(**words_of(plan, "recompute"))
    found = predicted_step(setup)
    chosen = replace(plan, micro_batch_sequences=found.micro_batch_sequences, recompute=found.recompute)
    return _known(chosen, found, None)


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
