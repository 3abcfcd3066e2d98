"""Plans as they are asked for: one device under two memory caps, or many devices and how they share the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml, write_whole
from flopwise.base.units import show_bytes
from flopwise.catalog.load import catalogue_word, hardware_place, plan_table
from flopwise.door.anchors import predict_anchored
from flopwise.door.intervals import add_interval, predict_step
from flopwise.plan.device.explain import make_plan
from flopwise.plan.program.sizes import sizes_of
from flopwise.predict.anchor import Anchor
from flopwise.predict.choose import capacity_bytes, check_link, default_batch, default_host_bytes, settle_sizes
from flopwise.records.cluster_plan import Answer, ClusterPlan, PlannedCluster, plan_of
from flopwise.records.plan import MOST_PAIRS, Plan, Planned
from flopwise.setup.setup import CappedSetup, Setup
from flopwise.work.model import Model
from flopwise.work.op import Convention

LONGEST_SEQUENCE = 2**30

# -- one device ------------------------------------------------------------------------------------------------------


def cap_device(setup: Setup, *, device: int, host: int, host_given: bool) -> CappedSetup:
    """What is asked of the search for one device; `host_given`: the host's cap was said, not taken for granted."""
    if host and host_given:
        check_link(setup.hardware)
    base, _ = settle_sizes(setup)
    if base.sequence_tokens > LONGEST_SEQUENCE:
        raise FlopwiseError(
            f"--seq: {base.sequence_tokens:,} tokens are more than can be planned",
            why=f"at most {LONGEST_SEQUENCE:,} are",
            hint="--seq 1M",
        )
    if setup.batch_sequences is not None and setup.batch_sequences > MOST_PAIRS:
        raise FlopwiseError(
            f"a batch of {setup.batch_sequences:,} sequences is more than can be planned",
            why=f"at most {MOST_PAIRS:,} are",
            hint="--batch 48",
        )
    named = replace(setup, hardware_name=catalogue_word(setup.hardware_name))
    return named.cap(sequence_tokens=base.sequence_tokens, formats=base.formats, device=device, host=host)


Ruled = Callable[[CappedSetup], Planned]
"""Another rule than flopwise's own search."""


def plan_device(
    setup: CappedSetup,
    *,
    convention: Convention = "causal",
    host_given: bool,
    helps: bool = True,
    rule: Ruled | None = None,
) -> Planned:
    """The fastest plan with its interval, and with what is to be known of the host's memory."""
    sizes_of(setup.model, setup.sequence_tokens, setup.formats, setup.optimizer)
    found = make_plan(setup, convention=convention, helps=helps) if rule is None else rule(setup)
    note = _host_note(setup, given=host_given)
    if note is not None:
        found = replace(found, notes=(*found.notes, note))
    return add_interval(found, setup.model, setup.hardware)


def _host_note(setup: CappedSetup, *, given: bool) -> str | None:
    """What is to be known of the host's memory beside the cap."""
    hardware = setup.hardware
    if not given:
        described = hardware.host is not None or hardware.link is None
        fact = hardware.host.memory_bytes if hardware.host else None
        if setup.host_cap_bytes and fact is not None and hardware.sources[fact.source].kind != "measured":
            usual = f"the host's {show_bytes(int(fact.value))} are those of usual machines with {hardware.name}"
            return f"{usual} ({hardware.sources[fact.source].kind}); if yours has less: --host-mem 64GiB"
        if setup.host_cap_bytes or described:
            return None
        return f"no host memory: {hardware.name} does not say how much there is; --host-mem 110GiB"
    # The default leaves what the system, Python and the data take.
    known = default_host_bytes(hardware)
    if not setup.host_cap_bytes or setup.host_cap_bytes <= known:
        return None
    return "--host-mem is what the training may take: the system, Python and data need some of the host beside it"


def plan_under_caps(setup: Setup, *, convention: Convention) -> Planned:
    """The fastest plan for one device under the set-up's caps; without one for the host, most of what it has."""
    host, given = setup.host_cap_bytes, setup.host_cap_bytes is not None
    capped = cap_device(
        setup,
        device=capacity_bytes(setup),
        host=default_host_bytes(setup.hardware) if host is None else host,
        host_given=given,
    )
    return plan_device(capped, convention=convention, host_given=given)


# -- many devices ----------------------------------------------------------------------------------------------------


def plan_cluster(
    setup: Setup, found: Answer, *, convention: Convention, anchor: Anchor | None = None
) -> PlannedCluster:
    """The best strategy as a full prediction, with its operators, stages, interval and notes; and as a plan.

    `anchor`: the measured step that it was found by.
    """
    best = found.best
    fixed = replace(
        setup,
        batch_sequences=best.batch_sequences,
        parallel=best.parallel,
        recompute=best.recompute,
        micro_batch_sequences=best.micro_batch_sequences,
    )
    prediction = predict_anchored([fixed], anchor, convention)[0] if anchor else predict_step(fixed, convention)
    if setup.batch_sequences is None:
        _, why = default_batch(setup.model, prediction.sequence_tokens, prediction.devices)
        prediction = replace(prediction, chosen=prediction.chosen | {"batch_sequences": why})
    plan = plan_of(prediction, hardware_place(setup.hardware_name), setup.device_cap_bytes)
    return PlannedCluster(prediction=prediction, plan=plan, answer=found)


# -- a plan's file ---------------------------------------------------------------------------------------------------


def for_file(found: Planned | PlannedCluster) -> Plan | ClusterPlan:
    """The plan as a file holds it: with what it is expected to take, its hardware by a name that holds elsewhere."""
    if isinstance(found, PlannedCluster):
        return found.plan
    return replace(found.plan, hardware=hardware_place(found.plan.hardware), expected=found.forecast.expected)


def write_plan(path: Path, plan: Plan | ClusterPlan, model: Model) -> None:
    """Write a plan with the model that it is for: `flopwise train` and `fw.train` run it."""
    write_whole(path, to_toml(plan_table(plan, model)))
