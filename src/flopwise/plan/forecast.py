"""What a plan takes on a hardware: its program played by the simulator, and everything that is divided by the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from flopwise.core.describe import describe
from flopwise.core.hardware import Hardware
from flopwise.core.model import Model
from flopwise.core.op import Attention, Convention
from flopwise.core.plan import LETTERS, POLICY, Forecast, Plan
from flopwise.core.simulation import Simulation
from flopwise.plan.compile import compile_plan
from flopwise.plan.memory import plan_bytes
from flopwise.plan.sizes import sizes_of
from flopwise.predict.costs import peak_flops
from flopwise.predict.simulator import simulate
from flopwise.predict.tasks import TaskSeconds

PLAYED_ROUNDS = 3
"""A step's rounds are alike but for the first and the last: of longer steps three are played, and the rest follow."""

UPDATE = "update"


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds and bytes of a step, each of which grows by the same amount with every further round."""

    step_s: float
    compute_s: float
    recompute_s: float
    exposed_copy_s: float
    copy_in_s: float
    copy_out_s: float
    copy_in_bytes: int
    copy_out_bytes: int
    idle: Mapping[str, float]

    def plus(self, other: Times, before: Times, rounds: int) -> Times:
        """With `rounds` more, each like the one by which `other` is longer than `before`."""

        def more(name: str) -> float:
            return float(getattr(self, name) + rounds * (getattr(other, name) - getattr(before, name)))

        return Times(
            step_s=more("step_s"),
            compute_s=more("compute_s"),
            recompute_s=more("recompute_s"),
            exposed_copy_s=max(0.0, more("exposed_copy_s")),
            copy_in_s=more("copy_in_s"),
            copy_out_s=more("copy_out_s"),
            copy_in_bytes=round(more("copy_in_bytes")),
            copy_out_bytes=round(more("copy_out_bytes")),
            idle={
                name: max(0.0, seconds + rounds * (seconds - before.idle.get(name, 0.0)))
                for name, seconds in other.idle.items()
            },
        )


def times_of(plan: Plan, model: Model, hardware: Hardware, costs: TaskSeconds | None = None) -> Times:
    """A step's seconds and bytes, by simulation."""
    seconds = costs or TaskSeconds(plan, model, hardware)
    rounds = plan.rounds_per_step
    if rounds <= PLAYED_ROUNDS:
        return _played(plan, model, hardware, seconds, rounds)
    shorter = _played(plan, model, hardware, seconds, PLAYED_ROUNDS - 1)
    longer = _played(plan, model, hardware, seconds, PLAYED_ROUNDS)
    return longer.plus(longer, shorter, rounds - PLAYED_ROUNDS)


def _played(plan: Plan, model: Model, hardware: Hardware, costs: TaskSeconds, rounds: int) -> Times:
    program = compile_plan(plan, model, rounds=rounds)
    simulation = simulate(program, costs.of(program), hardware.link, peaks=False)
    sent = [sum(task.bytes for task in program.tasks if task.stream == stream) for stream in ("copy-in", "copy-out")]
    return Times(
        step_s=simulation.step_s,
        compute_s=simulation.busy["compute"],
        recompute_s=rounds * recompute_s(plan, costs),
        exposed_copy_s=simulation.exposed_copy_s,
        copy_in_s=simulation.busy["copy-in"],
        copy_out_s=simulation.busy["copy-out"],
        copy_in_bytes=sent[0],
        copy_out_bytes=sent[1],
        idle=simulation.idle,
    )


TRACED_ROUNDS = 8
"""Rounds that a trace shows at most."""


def traced(plan: Plan, model: Model, hardware: Hardware) -> Simulation:
    """The plan's step task by task; of a long one the first rounds, the update behind the last of them."""
    program = compile_plan(plan, model, rounds=min(plan.rounds_per_step, TRACED_ROUNDS))
    return simulate(program, TaskSeconds(plan, model, hardware).of(program), hardware.link)


def recompute_s(plan: Plan, costs: TaskSeconds) -> float:
    """Seconds of a round in which something is made again that a larger memory would have kept."""
    found = 0.0
    for row in plan.saves:
        for chunk, letter in enumerate(row):
            level = LETTERS[letter.lower()]
            if level != "full":
                found += costs.again_s(level, plan.tokens_of(chunk), chunk % plan.chunks_per_sequence)
    return found


def forecast(plan: Plan, model: Model, hardware: Hardware, *, convention: Convention = "causal") -> Forecast:
    """The plan's step on that hardware."""
    costs = TaskSeconds(plan, model, hardware)
    times = times_of(plan, model, hardware, costs)
    taken = plan_bytes(plan, sizes_of(model, plan.sequence_tokens, costs.formats, plan.optimizer))
    model_flops, hardware_flops = flops_of(plan, model, convention)
    peak = peak_flops(hardware, costs.formats.matrix)
    tokens = plan.tokens_per_step
    idle = {name: seconds for name, seconds in times.idle.items() if seconds > 0}
    update_s = _update_s(plan, costs, idle)
    return Forecast(
        step_s=times.step_s,
        tokens_per_s=tokens / times.step_s,
        mfu=model_flops / (times.step_s * peak),
        hfu=hardware_flops / (times.step_s * peak),
        peak_flops=peak,
        ceiling_share=costs.ceiling_s() / times.step_s,
        compute_s=times.compute_s,
        recompute_s=times.recompute_s,
        update_s=update_s,
        exposed_copy_s=times.exposed_copy_s,
        idle=idle,
        copy_in_bytes=times.copy_in_bytes,
        copy_out_bytes=times.copy_out_bytes,
        link_share=max(times.copy_in_s, times.copy_out_s) / times.step_s,
        bound=bound_of(times),
        device_bytes=taken["device"],
        host_bytes=taken["host"],
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        convention=convention,
        peak_format=costs.formats.matrix,
    )


def _update_s(plan: Plan, costs: TaskSeconds, idle: Mapping[str, float]) -> float:
    """The update's kernels on the device, and what the step waits for its state."""
    waits = sum(idle.get(name, 0.0) for name in ("optimizer state", "room for optimizer state", "update on the host"))
    on_device = costs.update_s(costs.work.parameters) if plan.update_place == "device" else 0.0
    return on_device + waits


MOSTLY = 0.05
"""A step that waits for less than this share of its time is bound by what it computes."""


def bound_of(times: Times) -> str:
    """In a word or two, what to have more of."""
    waited = {name: seconds for name, seconds in times.idle.items() if seconds > 0}
    if waited and sum(waited.values()) > MOSTLY * times.step_s:
        most = max(waited, key=lambda name: waited[name])
        return "the host's update" if most == "update on the host" else "the link"
    if times.recompute_s > MOSTLY * times.step_s:
        return "memory, by recompute"
    return "compute"


def flops_of(plan: Plan, model: Model, convention: Convention) -> tuple[int, int]:
    """Model FLOPs of a step, and those that are executed."""
    sequences = plan.rounds_per_step * plan.sequences_per_round
    model_flops = sequences * describe(model, plan.sequence_tokens).model_flops(convention)
    return model_flops, int(sum(executed_flops(plan, model, convention).values()))


def executed_flops(plan: Plan, model: Model, convention: Convention) -> dict[str, Fraction]:
    """Operator → FLOPs that a step executes: with what flash attention and save levels make again."""
    work = describe(model, plan.sequence_tokens)
    sequences = plan.rounds_per_step * plan.sequences_per_round
    executed = {op.name: Fraction(sequences * work.hardware_flops(op, convention, Fraction(0))) for op in work.ops}
    shares = {level: work.recomputed(POLICY[level]) for level in set(LETTERS.values())}
    attention = next(op for op in work.ops if isinstance(op, Attention))
    for row in plan.saves:
        for chunk, letter in enumerate(row):
            share = Fraction(plan.tokens_of(chunk), plan.sequence_tokens)
            for op in work.ops:
                again = shares[LETTERS[letter.lower()]].get(op.name, Fraction(0)) / op.layers
                if not again:
                    continue
                part = share if op is not attention else share * _pairs_share(plan, attention, chunk)
                executed[op.name] += plan.rounds_per_step * again * part * work.forward_flops(op, convention)
    return executed


def _pairs_share(plan: Plan, attention: Attention, chunk: int) -> Fraction:
    """The pairs that a chunk's queries see, over what they would if all chunks saw equally many."""
    if plan.chunks_per_sequence == 1:
        return Fraction(1)
    first = chunk % plan.chunks_per_sequence * plan.chunk_tokens
    tokens = plan.tokens_of(chunk)
    pairs = attention.twice_pairs_of(first, first + tokens)
    return Fraction(pairs * plan.sequence_tokens, tokens * attention.twice_pairs("mask"))
