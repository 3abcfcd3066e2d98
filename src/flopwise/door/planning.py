"""Plans as they are asked for: one device under two memory caps, or many devices and how they share the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml, write_whole
from flopwise.catalog.load import catalogue_word, hardware_place, plan_table
from flopwise.door.intervals import predicted, streamed_interval
from flopwise.plan.cluster.answer import Steps, answer
from flopwise.plan.cluster.search import Question
from flopwise.plan.device.cuts import DeviceQuestion
from flopwise.plan.device.explain import planned
from flopwise.plan.program.sizes import sizes_of
from flopwise.predict.choose import PLAIN, Request, base_workload, capacity_bytes, check_link, default_host_bytes
from flopwise.records.cluster_plan import Answer, ClusterPlan, Expected, PlannedCluster
from flopwise.records.plan import MOST_PAIRS, Plan, Planned
from flopwise.setup.hardware import Hardware
from flopwise.work.model import Model
from flopwise.work.op import Convention

LONGEST_SEQUENCE = 2**30

# -- one device ------------------------------------------------------------------------------------------------------


def device_question(
    model: Model,
    hardware: Hardware,
    request: Request,
    *,
    hardware_name: str,
    device_bytes: int,
    host_bytes: int,
    host_given: bool,
    clip: bool,
) -> DeviceQuestion:
    """What is asked of the search for one device; `host_given`: the host's cap was said, not taken for granted."""
    if host_bytes and host_given:
        check_link(hardware)
    workload, _ = base_workload(model, hardware, request)
    if workload.sequence_tokens > LONGEST_SEQUENCE:
        raise FlopwiseError(
            f"--seq: {workload.sequence_tokens:,} tokens are more than can be planned",
            why=f"at most {LONGEST_SEQUENCE:,} are",
            hint="--seq 1M",
        )
    given = request.batch_sequences is not None or request.batch_tokens is not None
    if given and workload.batch_sequences > MOST_PAIRS:
        raise FlopwiseError(
            f"a batch of {workload.batch_sequences:,} sequences is more than can be planned",
            why=f"at most {MOST_PAIRS:,} are",
            hint="--batch 48",
        )
    return DeviceQuestion(
        model=model,
        hardware=hardware,
        hardware_name=catalogue_word(hardware_name),
        sequence_tokens=workload.sequence_tokens,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        formats=workload.formats,
        optimizer=workload.optimizer,
        batch_sequences=workload.batch_sequences if given else None,
        clip=clip,
    )


Ruled = Callable[[DeviceQuestion], Planned]
"""Another rule than flopwise's own search."""


def plan_device(
    question: DeviceQuestion,
    *,
    convention: Convention = "causal",
    host_given: bool,
    helps: bool = True,
    rule: Ruled | None = None,
) -> Planned:
    """The fastest plan with its interval, and with what is to be known of the host's memory."""
    sizes_of(question.model, question.sequence_tokens, question.formats, question.optimizer)
    found = planned(question, convention=convention, helps=helps) if rule is None else rule(question)
    note = _host_note(question, given=host_given)
    if note is not None:
        found = replace(found, notes=(*found.notes, note))
    return replace(found, interval=streamed_interval(found, question.model, question.hardware))


def _host_note(question: DeviceQuestion, *, given: bool) -> str | None:
    """What is to be known of the host's memory beside the cap."""
    hardware = question.hardware
    if not given:
        described = hardware.host is not None or hardware.link is None
        if question.host_bytes or described:
            return None
        return f"no host memory: {hardware.name} does not say how much there is; --host-mem 110GiB"
    # The default leaves what the system, Python and the data take.
    known = default_host_bytes(hardware)
    if not question.host_bytes or question.host_bytes <= known:
        return None
    return "--host-mem is what the training may take: the system, Python and data need some of the host beside it"


def plan_under_caps(
    model: Model,
    hardware: Hardware,
    request: Request,
    *,
    hardware_name: str,
    host_bytes: int | None,
    clip: bool,
    convention: Convention,
) -> Planned:
    """The fastest plan for one device under the request's cap and the host's; None: most of what the host has."""
    question = device_question(
        model,
        hardware,
        request,
        hardware_name=hardware_name,
        device_bytes=capacity_bytes(hardware, request),
        host_bytes=default_host_bytes(hardware) if host_bytes is None else host_bytes,
        host_given=host_bytes is not None,
        clip=clip,
    )
    return plan_device(question, convention=convention, host_given=host_bytes is not None)


# -- many devices ----------------------------------------------------------------------------------------------------


def search_cluster(
    model: Model, hardware: Hardware, request: Request, *, offload: bool, tell: Steps | None = None
) -> Answer:
    """The best strategy for a request, and why the next ones lose."""
    workload, _ = base_workload(model, hardware, request)
    question = Question(
        model=model,
        hardware=hardware,
        devices=request.parallel.devices,
        workload=workload,
        capacity_bytes=capacity_bytes(hardware, request),
        stack=request.stack or PLAIN,
        recompute=request.recompute,
        micro_batch_sequences=request.micro_batch_sequences,
        offload=offload,
    )
    return answer(question, tell)


def planned_cluster(
    model: Model, hardware: Hardware, request: Request, found: Answer, *, hardware_name: str, convention: Convention
) -> PlannedCluster:
    """The best strategy as a full prediction, with its operators, stages, interval and notes; and as a plan."""
    fixed = replace(
        request,
        parallel=found.best.parallel,
        recompute=found.best.workload.recompute,
        micro_batch_sequences=found.best.workload.micro_batch_sequences,
    )
    prediction = predicted(model, hardware, fixed, convention)
    plan = ClusterPlan(
        hardware=hardware_place(hardware_name),
        devices=prediction.devices,
        sequence_tokens=prediction.sequence_tokens,
        batch_sequences=prediction.batch_sequences,
        micro_batch_sequences=prediction.micro_batch_sequences,
        precision=prediction.precision,
        recompute=prediction.recompute,
        attention=request.attention,
        fusion=prediction.fusion,
        optimizer=prediction.optimizer,
        stack=prediction.stack,
        parallel=prediction.parallel,
        expected=Expected(
            step_s=prediction.step_s,
            tokens_per_s=prediction.tokens_per_s,
            mfu=prediction.mfu,
            device_bytes=prediction.device_bytes.total,
        ),
        device_memory_bytes=request.device_memory_bytes,
    )
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
