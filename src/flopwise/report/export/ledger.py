"""A plan as another trainer's configuration: what every export shares.

A field of a plan either carries over, under a name that the other trainer knows, or is left, with the reason. What is
left changes the speed or the memory of a step; what would change the training itself is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from flopwise.base.errors import FlopwiseError
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.plan import Plan
from flopwise.setup.parallel import Parallel
from flopwise.work.formats import Formats, parse_formats
from flopwise.work.model import Model
from flopwise.work.parameters import ENDS

AnyPlan = Plan | ClusterPlan

BEYOND = "learning rate, its schedule and clipping are not part of a plan: set them, or the trainer's defaults hold"

MODEL = "model"
"""Stands for the model's description, which a plan's file holds beside the plan."""

PROMISES = {
    "hardware": "the other trainer takes the devices that it finds",
    "device_memory_bytes": "the other trainer has no cap on memory",
    "expected": "a prediction for flopwise's plan, not a setting",
}
"""Fields that no other trainer has a place for, and why."""

UNEVEN = "sequences are as long as the other trainer's data has them, and filled up or packed as it does"


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Another trainer's configuration, and what became of each field of the plan."""

    text: str
    carried: dict[str, str]
    """Field → where it stands in the text, or the default that says the same."""
    left: dict[str, str]
    """Field that does not carry over, or not wholly → why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedBatch:
    """How a step's sequences are dealt out: sequences = micro × accumulation × data, always."""

    sequences: int
    """Of all devices together."""
    micro: int
    """That one device, or one group of devices that share each sequence, runs at once."""
    accumulation: int
    data: int
    """Ranks that see different sequences."""


def field_names(plan: AnyPlan) -> tuple[str, ...]:
    """All that an export has to account for: the plan's fields, those of its Parallel as `parallel.NAME`, the model."""
    own = tuple(field.name for field in fields(plan) if field.name not in (MODEL, "parallel"))
    inner = tuple(f"parallel.{field.name}" for field in fields(Parallel)) if isinstance(plan, ClusterPlan) else ()
    return (*own, *inner, MODEL)


class Ledger:
    """Keeps account of a plan's fields while they are carried over."""

    def __init__(self, plan: AnyPlan, target: str) -> None:
        self.plan = plan
        self.target = target
        self.carried: dict[str, str] = {}
        self.left: dict[str, str] = {}
        for name, why in PROMISES.items():
            self.leave(name, why)
        self.leave("host_memory_bytes" if isinstance(plan, Plan) else "stack", _without_place(plan))
        self.rule("lengths", "all sequences are equally long", None if plan.lengths is None else UNEVEN)

    def carry(self, where: str, *names: str) -> None:
        """The fields stand in the text, or are what the target does by itself; a reason not to comes first."""
        for name in names:
            if name not in self.left:
                self.carried[name] = where

    def leave(self, name: str, why: str) -> None:
        """The field does not carry over, or not wholly."""
        self.carried.pop(name, None)
        self.left[name] = why

    def rule(self, name: str, where: str, why: str | None) -> None:
        """Carried where there is no reason against it."""
        if why is None:
            self.carry(where, name)
        else:
            self.leave(name, why)

    def export(self, text: str) -> Export:
        """The finished export; a field that was forgotten is a mistake of ours."""
        forgotten = set(field_names(self.plan)) - set(self.carried) - set(self.left)
        assert not forgotten, f"{self.target}: nothing was said about {sorted(forgotten)}"
        known = field_names(self.plan)
        return Export(
            text=text,
            carried={name: self.carried[name] for name in known if name in self.carried},
            left={name: self.left[name] for name in known if name in self.left},
        )

    def notes(self) -> list[str]:
        """One line for each field that is left, in the plan's order."""
        return [f"{name}: {self.left[name]}" for name in field_names(self.plan) if name in self.left]

    def refused(self, what: str, *, why: str, hint: str) -> FlopwiseError:
        """What the target cannot do, where the training would be another one, or none."""
        return FlopwiseError(f"{self.target} cannot take this plan: {what}", why=why, hint=hint)


def _without_place(plan: AnyPlan) -> str:
    if isinstance(plan, Plan):
        return "the other trainer has no cap on memory"
    return "names the framework whose speed was predicted, not a setting"


def header(ledger: Ledger, model: Model, version: str, batch: ExportedBatch) -> list[str]:
    """The first lines of an export: what it is of, for which version, its batch, and what is left."""
    lines = [
        f"{ledger.target} configuration, written by flopwise export from a plan for {model.name}",
        f"field names of {version}",
        f"batch: {batch.sequences} sequences = {batch.micro} at once × {batch.accumulation} times × {batch.data} ranks",
        BEYOND,
    ]
    notes = ledger.notes()
    return [*lines, "", "not carried over, or not wholly:", *(f"  {note}" for note in notes)] if notes else lines


def comment(lines: list[str]) -> str:
    """Lines as comments that begin with #."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


# -- what all targets ask of a plan ----------------------------------------------------------------------------------


def check_plan(plan: AnyPlan, model: Model) -> None:
    """Refuse a plan that is not one for its model, as a file that was changed by hand may be."""
    model.check_sequence(plan.sequence_tokens)
    if isinstance(plan, ClusterPlan):
        plan.parallel.check(model, plan.sequence_tokens)
    elif plan.layers != model.layers:
        raise FlopwiseError(
            f"the plan is for {plan.layers} layers, and {model.name} has {model.layers}",
            why="`saves` has a row for each layer",
            hint="`flopwise plan … -w plan.toml` writes a plan anew",
        )


def batch_of(plan: AnyPlan, ledger: Ledger) -> ExportedBatch:
    """The step's batch in equal parts; micro-batches that do not divide it are made smaller, and that is said."""
    if isinstance(plan, Plan):
        micro = max(1, plan.chunk_tokens // plan.sequence_tokens)
        total = plan.batch_sequences
        return ExportedBatch(sequences=total, micro=micro, accumulation=total // micro, data=1)
    data = plan.parallel.data
    if plan.batch_sequences % data:
        raise ledger.refused(
            f"{plan.batch_sequences} sequences over {data} data-parallel ranks",
            why="every rank must have as many sequences as the others",
            hint=f"`flopwise plan … --batch {-(-plan.batch_sequences // data) * data}`",
        )
    mine = plan.batch_sequences // data
    wanted = min(plan.micro_batch_sequences, mine)
    micro = next(size for size in range(wanted, 0, -1) if mine % size == 0)
    if micro != plan.micro_batch_sequences:
        ledger.leave(
            "micro_batch_sequences",
            f"{plan.micro_batch_sequences} do not divide the {mine} sequences of a rank; {micro} are written",
        )
    return ExportedBatch(sequences=plan.batch_sequences, micro=micro, accumulation=mine // micro, data=data)


def formats_of(plan: AnyPlan) -> Formats:
    return parse_formats(plan.precision)


def is_pure(formats: Formats) -> bool:
    """Whether weights, gradients and moments all have the activations' format, with no second copy of the weights."""
    state = (formats.weights, formats.gradients, formats.moments)
    return formats.master is None and set(state) == {formats.compute}


def state_stays(plan: Plan, kind: str) -> bool:
    """Whether all of the weights, gradients or optimizer state stay on the device."""
    residency = getattr(plan, kind)
    return bool(residency.blocks == plan.layers and set(residency.ends) == set(ENDS))


def whole_recompute(plan: Plan) -> bool:
    """Whether a trainer that treats all layers alike makes them again: unless all is kept whole on the device."""
    return any(letter != "F" for row in plan.saves for letter in row)


def leave_streaming(plan: Plan, ledger: Ledger) -> None:
    """The fields of a plan for one device that only flopwise's own executor has."""
    ledger.leave("chunk_tokens", "others run whole sequences: at once " + _sequences(plan))
    ledger.leave("head_chunk_tokens", "the loss is computed as the other trainer does it; its logits take more memory")
    ledger.leave("activation_slots", "others allocate activations as they come")
    ledger.leave("fetch", "others do not bring activations back from the host this way")
    ledger.leave("host_copies", "where copies of the state are kept is the other trainer's own affair")
    ledger.leave("rule", "says how the plan was found")
    ledger.leave("replay", "others hand kernels over one by one; torch.compile's reduce-overhead comes nearest to it")
    ledger.leave(
        "attention",
        "attention runs over whole sequences"
        if plan.attention == "chunk"
        else "the other trainer picks its own kernel",
    )
    if plan.update_when == "backward":
        ledger.leave("update_when", "the update runs when all gradients are there; the result is the same")
    else:
        ledger.carry("the update runs at the end of a step", "update_when")


def _sequences(plan: Plan) -> str:
    count = max(1, plan.chunk_tokens // plan.sequence_tokens)
    return "1 sequence" if count == 1 else f"{count} sequences"


def mesh(parallel: Parallel, ledger: Ledger) -> tuple[int, int]:
    """Data ranks that hold copies, and data ranks that share one, where context ranks always share too."""
    if not parallel.zero:
        ledger.carry("every data rank holds all of the state", "parallel.shard")
        return parallel.data, 1
    shard = parallel.shard or parallel.replicas
    if shard % parallel.context or parallel.data % (shard // parallel.context):
        ledger.leave("parallel.shard", f"shards over {shard} ranks cut a group of context ranks; all data ranks share")
        return 1, parallel.data
    inner = shard // parallel.context
    ledger.carry("the sizes of the data-parallel mesh", "parallel.shard")
    return parallel.data // inner, inner
