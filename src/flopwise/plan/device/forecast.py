"""What a plan takes on a hardware: its program played by the simulator, and everything that is divided by the time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from flopwise.plan.device.handing import GRAPH, HOST, host_waits
from flopwise.plan.device.memory import plan_bytes
from flopwise.plan.program.compile import compile_plan
from flopwise.plan.program.sizes import sizes_of
from flopwise.predict.kernels.costs import peak_flops
from flopwise.predict.simulate.simulator import LAST_COPIES, simulate, waits_between
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.predict.step import model_flops
from flopwise.records.plan import LETTERS, NO_BACKWARD, POLICY, Forecast, Plan
from flopwise.records.program import Stream, Task
from flopwise.records.simulation import Simulation
from flopwise.setup.hardware import Hardware
from flopwise.setup.written import words_of
from flopwise.work.describe import describe, is_in
from flopwise.work.lengths import parse_lengths
from flopwise.work.model import Model
from flopwise.work.op import Attention, Convention

PLAYED_ROUNDS, LIKE_THE_REST = 5, 2
"""A step's rounds are alike but for the first and the last ones: of longer steps five are played, and the others are
like the one in the middle."""

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

    def plus(self, other: Times, rounds: int) -> Times:
        """With `rounds` more, each like the other."""

        sums = {name: getattr(self, name) + rounds * getattr(other, name) for name in SUMMED}
        names = {**self.idle, **other.idle}
        idle = {name: self.idle.get(name, 0.0) + rounds * other.idle.get(name, 0.0) for name in names}
        return Times(**sums, idle=idle)


SUMMED = tuple(each.name for each in fields(Times) if each.name != "idle")


def times_of(plan: Plan, model: Model, hardware: Hardware, costs: TaskSeconds | None = None) -> Times:
    """A step's seconds and bytes, by simulation."""
    seconds = costs or TaskSeconds(plan, model, hardware)
    rounds = min(plan.rounds_per_step, PLAYED_ROUNDS)
    program = compile_plan(plan, model, rounds=rounds)
    simulation = simulate(program, seconds.of(program), hardware.link, peaks=False)
    again_s = recompute_s(plan, seconds)
    played = Times(
        step_s=simulation.step_s,
        compute_s=simulation.busy["compute"],
        recompute_s=rounds * again_s,
        exposed_copy_s=simulation.exposed_copy_s,
        copy_in_s=simulation.busy["copy-in"],
        copy_out_s=simulation.busy["copy-out"],
        copy_in_bytes=_bytes(program.tasks, "copy-in"),
        copy_out_bytes=_bytes(program.tasks, "copy-out"),
        idle=simulation.idle,
    )
    if rounds < plan.rounds_per_step:
        return played.plus(_of_round(simulation, LIKE_THE_REST, again_s), plan.rounds_per_step - rounds)
    return played


def with_host(times: Times, plan: Plan, model: Model, hardware: Hardware) -> Times:
    """The same with what the device waits for a host that hands work over more slowly than it is done."""
    waits = host_waits(plan, model, hardware, times.step_s)
    return replace(times, step_s=times.step_s + sum(waits.values()), idle={**times.idle, **waits})


def _bytes(tasks: Iterable[Task], stream: Stream) -> int:
    return sum(task.bytes for task in tasks if task.stream == stream)


def _of_round(simulation: Simulation, number: int, again_s: float) -> Times:
    """One of a step's rounds, from its first computation to the first of the next one."""
    tasks, starts, ends = simulation.program.tasks, simulation.starts, simulation.ends
    computed = [index for index, task in enumerate(tasks) if task.stream == "compute"]
    rounds = [tasks[index].round for index in computed]
    first, behind = rounds.index(number), rounds.index(number + 1)
    idle, exposed_copy_s = waits_between(
        simulation.program, computed[first + 1 : behind + 1], starts, ends, ends[computed[first]]
    )
    own = [index for index, task in enumerate(tasks) if task.round == number]

    def busy(stream: Stream) -> float:
        return sum(ends[index] - starts[index] for index in own if tasks[index].stream == stream)

    step_s = starts[computed[behind]] - starts[computed[first]]
    # What a direction of the link is behind after each round piles up until computations wait for it.
    late_s = max(0.0, busy("copy-in") - step_s, busy("copy-out") - step_s)
    if late_s:
        idle[LAST_COPIES] = idle.get(LAST_COPIES, 0.0) + late_s
    return Times(
        step_s=step_s + late_s,
        compute_s=busy("compute"),
        recompute_s=again_s,
        exposed_copy_s=exposed_copy_s + late_s,
        copy_in_s=busy("copy-in"),
        copy_out_s=busy("copy-out"),
        copy_in_bytes=_bytes((tasks[index] for index in own), "copy-in"),
        copy_out_bytes=_bytes((tasks[index] for index in own), "copy-out"),
        idle=idle,
    )


TRACED_ROUNDS = 8
"""Rounds that a trace shows at most."""


def trace_step(plan: Plan, model: Model, hardware: Hardware, *, rounds: int = TRACED_ROUNDS) -> Simulation:
    """The plan's step task by task; of a long one the first rounds, the update behind the last of them."""
    program = compile_plan(plan, model, rounds=min(plan.rounds_per_step, rounds))
    return simulate(program, TaskSeconds(plan, model, hardware).of(program), hardware.link)


def recompute_s(plan: Plan, costs: TaskSeconds) -> float:
    """Seconds of a round in which something is made again that a larger memory would have kept."""
    found = 0.0
    for row in plan.saves:
        for chunk, letter in enumerate(row.strip(NO_BACKWARD)):
            level = LETTERS[letter.lower()]
            if level != "full":
                found += costs.recompute_s(level, plan.tokens_of(chunk), chunk % plan.chunks_per_sequence)
    return found


def forecast(plan: Plan, model: Model, hardware: Hardware, *, convention: Convention = "causal") -> Forecast:
    """The plan's step on that hardware."""
    costs = TaskSeconds(plan, model, hardware)
    times = with_host(times_of(plan, model, hardware, costs), plan, model, hardware)
    taken = plan_bytes(plan, sizes_of(model, plan.sequence_tokens, costs.formats, plan.optimizer))
    needed, executed = flops_of(plan, model, convention)
    peak = peak_flops(hardware, costs.formats.matrix)
    tokens, whole = plan.batch_tokens, plan.tokens_per_step
    idle = {name: seconds for name, seconds in times.idle.items() if seconds > 0}
    update_s = _update_s(plan, costs, idle)
    return Forecast(
        **words_of(plan, "recompute") | {"model": model.name, "hardware": hardware.name},
        step_s=times.step_s,
        tokens_per_s=tokens / times.step_s,
        padded_tokens_per_s=whole / times.step_s if whole != tokens else None,
        mfu=needed / (times.step_s * peak),
        hfu=executed / (times.step_s * peak),
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
        model_flops=needed,
        hardware_flops=executed,
        convention=convention,
        peak_format=costs.formats.matrix,
    )


def clipping_share(plan: Plan, model: Model, hardware: Hardware) -> float:
    """Of the step of a plan that clips, what updates during backward would save."""
    during = times_of(replace(plan, update_when="backward"), model, hardware)
    return max(0.0, 1 - during.step_s / times_of(plan, model, hardware).step_s)


def _update_s(plan: Plan, costs: TaskSeconds, idle: Mapping[str, float]) -> float:
    """The update's kernels on the device, and what the step waits for its state."""
    waits = sum(idle.get(name, 0.0) for name in ("optimizer state", "room for optimizer state", "update on the host"))
    on_device = costs.update_s(costs.work.trained_parameters) if plan.update_place == "device" else 0.0
    return on_device + waits


MOSTLY = 0.05
"""A step that waits for less than this share of its time is bound by what it computes."""


def bound_of(times: Times) -> str:
    """In a word or two, what to have more of."""
    waited = {name: seconds for name, seconds in times.idle.items() if seconds > 0 and name != GRAPH}
    if waited and sum(waited.values()) > MOSTLY * times.step_s:
        most = max(waited, key=lambda name: waited[name])
        return {"update on the host": "the host's update", HOST: "the host"}.get(most, "the link")
    if times.recompute_s > MOSTLY * times.step_s:
        return "memory, by recompute"
    return "compute"


def flops_of(plan: Plan, model: Model, convention: Convention) -> tuple[int, int]:
    """Model FLOPs of a step, and those that are executed; what fills packed chunks up is in neither."""
    lengths = parse_lengths(plan.lengths) if plan.lengths else None
    needed = model_flops(model, plan.sequence_tokens, lengths, plan.batch_sequences, convention)
    return needed, int(sum(executed_flops(plan, model, convention).values()))


def executed_flops(plan: Plan, model: Model, convention: Convention) -> dict[str, Fraction]:
    """Operator → FLOPs that a step executes: with what flash attention and save levels make again."""
    work = describe(model, plan.sequence_tokens, lengths=plan.packed)
    sequences = Fraction(plan.batch_sequences, work.sequences)
    twice = {name: Fraction(1) for name in work.forward_twice}
    executed = {
        op.name: Fraction(sequences * work.hardware_flops(op, convention, twice.get(op.name, Fraction(0))))
        for op in work.ops
    }
    shares = {level: work.recomputed(POLICY[level]) for level in set(LETTERS.values())}
    for layer, row in enumerate(plan.saves):
        for chunk, letter in enumerate(row.strip(NO_BACKWARD)):
            share = Fraction(plan.tokens_of(chunk), plan.sequence_tokens * work.sequences)
            for op in (op for op in work.ops if op.in_block):
                again = shares[LETTERS[letter.lower()]].get(op.name, Fraction(0)) / op.layers
                if not again or not is_in(op, model, layer):
                    continue
                part = share if not isinstance(op, Attention) else share * _pairs_share(plan, op, chunk)
                executed[op.name] += plan.rounds_per_step * again * part * work.forward_flops(op, convention)
    return executed


def _pairs_share(plan: Plan, attention: Attention, chunk: int) -> Fraction:
    """The pairs that a chunk's queries see, over what they would if all chunks saw equally many."""
    if plan.chunks_per_sequence == 1:
        return Fraction(1)
    first = chunk % plan.chunks_per_sequence * plan.chunk_tokens
    tokens = plan.tokens_of(chunk)
    kinds = attention.by_kind()
    pairs = sum(kind.layers * kind.twice_pairs_of(first, first + tokens) for kind in kinds)
    return Fraction(
        pairs * plan.sequence_tokens, tokens * sum(kind.layers * kind.twice_pairs("mask") for kind in kinds)
    )
