"""Why a plan is as it is, and what more memory would buy."""

from __future__ import annotations

from dataclasses import replace

from flopwise.base.units import show_bytes, show_count, show_seconds, show_share
from flopwise.plan.device.estimate import UPDATED_ON_HOST, Shape, can_update_on_host
from flopwise.plan.device.forecast import clipping_share, forecast, recompute_s
from flopwise.plan.device.handing import handing_s, is_replayed
from flopwise.plan.device.memory import plan_bytes
from flopwise.plan.device.search import OVERHEAD, FoundPlan, best_estimate, fastest_plan
from flopwise.plan.device.smallest import does_not_fit
from flopwise.plan.program.sizes import working_bytes
from flopwise.predict.simulate.own_kernels import FORWARD, TO_INPUT, TO_WEIGHT
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.predict.step import estimated_words, loss_share_notes, reference_notes, routing_notes
from flopwise.records.plan import Help, Plan, Planned
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import CappedSetup
from flopwise.work.model import Model, beyond_context
from flopwise.work.op import Convention
from flopwise.work.transformer import Transformer

MORE_DEVICE_BYTES = 8 * 2**30
MORE_HOST_BYTES = 32 * 2**30


def make_plan(
    setup: CappedSetup, *, convention: Convention = "causal", helps: bool = True, elsewhere: bool = True
) -> Planned:
    """The fastest plan with its forecast and reasons, or an error that says what would fit; `elsewhere` too."""
    found = fastest_plan(setup)
    if found is None:
        raise does_not_fit(setup, elsewhere=elsewhere)
    seen = forecast(found.plan, setup.model, setup.hardware, convention=convention)
    if is_replayed(found.plan, setup.model, setup.hardware, seen.compute_s):
        found = replace(found, plan=replace(found.plan, replay=True))
        seen = forecast(found.plan, setup.model, setup.hardware, convention=convention)
    return Planned(
        model=setup.model.name,
        plan=found.plan,
        forecast=seen,
        reasons=reasons(found, setup),
        searched=found.estimated,
        simulated=found.simulated,
        helps=what_helps(found, setup) if helps else (),
        notes=(
            *notes(setup.model, setup.hardware, setup.sequence_tokens),
            *reference_notes(setup.model, setup.sequence_tokens, setup.lengths, found.plan.batch_sequences, convention),
            *length_notes(setup, found.plan),
        ),
    )


def what_helps(found: FoundPlan, setup: CappedSetup) -> tuple[Help, ...]:
    """More of each memory, with the batch as it is; by estimates, which differ less than they are off."""
    plan = found.plan
    same = replace(setup, batch_sequences=plan.batch_sequences)
    now = best_estimate(same)
    there = int(setup.hardware.device.dram.size_bytes.value)
    more = [replace(same, host_cap_bytes=same.host_cap_bytes + MORE_HOST_BYTES)] if setup.hardware.link else []
    if setup.device_cap_bytes + MORE_DEVICE_BYTES <= there:
        more.insert(0, replace(same, device_cap_bytes=same.device_cap_bytes + MORE_DEVICE_BYTES))
    helps = []
    for wider in more:
        then = best_estimate(wider)
        if now is not None and then is not None:
            helps.append(
                Help(
                    device_memory_bytes=wider.device_cap_bytes,
                    host_memory_bytes=wider.host_cap_bytes,
                    speed=max(1.0, now / then),
                )
            )
    return tuple(helps)


def notes(model: Model, hardware: Hardware, sequence_tokens: int) -> tuple[str, ...]:
    """What a reader should know before trusting the figures."""
    found = [model.note] if model.note else []
    beyond = beyond_context(model, sequence_tokens)
    if beyond:
        found.append(beyond)
    estimated = estimated_words(hardware)
    if estimated:
        found.append(estimated)
    found += loss_share_notes(model)
    found += routing_notes(model, 1)
    if isinstance(model, Transformer) and model.experts and hardware.device.kind == "gpu":
        shares = f"{FORWARD:g}, {TO_INPUT:g} and {TO_WEIGHT:g}"
        found.append(
            f"experts' products are predicted as flopwise's own kernels: forward, to inputs and to matrices {shares} "
            "of a library's rate"
        )
    if isinstance(model, Transformer) and model.recurrence is not None and hardware.device.kind == "gpu":
        found.append(
            "states are carried by plain kernels, with products in fp32, or in tf32 where the numbers are narrower: no "
            "fused ones are there yet, and `flopwise predict` tells what those would take"
        )
    if hardware.efficiency.attention.kernel:
        found.append(f"attention is predicted by the rates of {hardware.efficiency.attention.kernel}")
    if hardware.link is not None:
        kind = hardware.sources[hardware.link.bandwidth_bytes_per_s.source].kind
        if kind != "measured":
            found.append(f"the rate of the link between {hardware.name} and its host is {kind}, not measured")
    return tuple(found)


def length_notes(setup: CappedSetup, plan: Plan) -> list[str]:
    """Where lengths come from, and what memory and time are those of."""
    lengths = setup.lengths
    if lengths is None:
        return []
    if plan.packed is None:
        told = f"a sequence is {plan.chunks_per_sequence} chunks, which are filled up: padding is computed"
    else:
        told = f"memory holds any batch: room for {plan.sequence_tokens:,} tokens of each sequence"
    return [*([lengths.note] if lengths.note else []), told]


def reasons(found: FoundPlan, setup: CappedSetup) -> dict[str, str]:
    """Derived value → why it has that value, in words."""
    plan, shape = found.plan, found.candidate.shape
    given = setup.batch_sequences is not None
    told = {
        "chunk_tokens": "the fastest of the sizes tried that fits",
        "chunks_per_round": _chunks_reason(plan),
        "rounds_per_step": f"the batch of {setup.batch_sequences:,} sequences"
        if given
        else f"of the plans simulated the fewest tokens a step within {100 * OVERHEAD:.0f} % of the fastest",
        "head_chunk_tokens": f"logits and hidden states of so many tokens take"
        f" {show_bytes(working_bytes(shape.sizes, plan)['head'])}; with fewer the head's gradient is read more often",
    }
    if plan.chunks_per_sequence > 1:
        told["attention"] = _attention_reason(plan, shape)
    told |= {
        "weights": _weights_reason(plan, shape),
        "gradients": _gradients_reason(plan, shape),
        "optimizer_state": _optimizer_reason(plan, shape),
        "activation_slots": _slots_reason(plan, shape, setup),
        "saves": _saves_reason(plan, shape, setup),
        "update_place": _place_reason(plan, setup),
        "update_when": "clipping needs the norm of all gradients first; the wait is "
        f"{show_share(clipping_share(plan, setup.model, setup.hardware))} of the step"
        if plan.update_when == "end"
        else "without clipping nothing else has to be waited for, and its copies run beside the rest of backward",
    }
    if plan.replay:
        handed = show_seconds(handing_s(plan, setup.model, setup.hardware))
        told["replay"] = (
            f"handed over one by one, a step's kernels would take the host {handed}; a graph of them does not"
        )
    return told


def _chunks_reason(plan: Plan) -> str:
    groups = plan.chunks_per_round // plan.chunks_per_sequence
    if groups == 1:
        return f"a sequence is {plan.chunks_per_sequence} chunks" if plan.chunks_per_sequence > 1 else "one is enough"
    return "so many share one pass of the weights over the link"


def _attention_reason(plan: Plan, shape: Shape) -> str:
    needed = shape.sizes.sequence_attention * plan.sequence_tokens
    if plan.attention == "sequence":
        return f"queries and gradients of a whole sequence fit, {show_bytes(needed)}; each key is then read once"
    return f"{show_bytes(needed)} for a whole sequence at once are worth more elsewhere"


def _weights_reason(plan: Plan, shape: Shape) -> str:
    if plan.weights.blocks == plan.layers:
        return "they fit, and need neither the link nor the host"
    moved = 2 * shape.sizes.block.weights
    return f"each block more would spare {show_count(moved, 'B')} of copies a round, and take slots from activations"


def _gradients_reason(plan: Plan, shape: Shape) -> str:
    if plan.gradients.blocks == plan.layers:
        return "they fit, and are summed where they are made"
    if plan.rounds_per_step == 1 and plan.update_when == "backward" and plan.update_place == "device":
        return "with one round each is used up where it is made: none goes to the host"
    moved = 2 * shape.sizes.block.gradients
    return f"each block more would spare {show_count(moved, 'B')} of copies in every round but one"


def _optimizer_reason(plan: Plan, shape: Shape) -> str:
    if plan.update_place == "host":
        return "the host updates, so it is the host's"
    if plan.optimizer_state.blocks == plan.layers:
        return "it fits, and needs neither the link nor the host"
    moved = 2 * shape.sizes.block.optimizer
    return f"each block passes once a step, {show_count(moved, 'B')}: the cheapest to send away"


def _slots_reason(plan: Plan, shape: Shape, setup: CappedSetup) -> str:
    size = show_bytes(shape.slot)
    if plan.activation_slots >= shape.pairs:
        return f"one for each (layer, chunk), {size} each"
    spare = show_bytes(setup.device_cap_bytes - sum(plan_bytes(plan, shape.sizes)["device"].values()))
    if sum(plan.saved("device").values()) > plan.saved("device")["full"]:
        return f"{size} each: others stay at lower levels, which take less; {spare} being spare"
    return f"what the state leaves of the device, {size} each, {spare} being spare"


def _saves_reason(plan: Plan, shape: Shape, setup: CappedSetup) -> str:
    leave = plan.saved("host")
    lower = sum(count for name, count in (*leave.items(), *plan.saved("device").items()) if name != "full")
    if not lower:
        return "everything is kept: nothing is made again"
    again = show_seconds(recompute_s(plan, shape.costs))
    cost = f"the levels that save the most seconds a byte; {again} a round are made again"
    room = setup.host_cap_bytes - sum(plan_bytes(plan, shape.sizes)["host"].values())
    bound = "the host is full" if room < shape.slot else "more would take longer over the link than to make again"
    return f"{cost}, as {bound}"


def _place_reason(plan: Plan, setup: CappedSetup) -> str:
    if plan.optimizer not in UPDATED_ON_HOST:
        return f"nobody has measured {plan.optimizer} on a host's cores"
    if not can_update_on_host(setup):
        return f"the hardware file does not say how fast {setup.hardware.name}'s host is"
    costs = TaskSeconds(plan, setup.model, setup.hardware)
    parameters = costs.work.trained_parameters
    there, here = costs.update_s(parameters, on_host=True), costs.update_s(parameters)
    if plan.update_place == "host":
        return f"{show_seconds(there)} of its cores, hidden behind backward, spare the link the optimizer's state"
    share = show_share(here / there)
    return f"{show_seconds(here)} of kernels, {share} of what the host's cores would take"
