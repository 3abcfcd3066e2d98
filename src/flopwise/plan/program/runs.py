"""Whether a plan, which may come from a file, can run at all."""

from __future__ import annotations

from flopwise.base.errors import FlopwiseError
from flopwise.records.outcome import WRITTEN_BY
from flopwise.records.plan import NO_BACKWARD, Plan, Residency
from flopwise.setup.trained import trains_partly
from flopwise.work.model import Model


def check_runs(plan: Plan, model: Model) -> None:
    """Refuse plans of a file that cannot run."""
    for kind in ("weights", "gradients"):
        residency: Residency = getattr(plan, kind)
        if residency.blocks < plan.layers and not residency.passing:
            raise FlopwiseError(
                f"the plan has no slot for {kind} to pass through",
                why=f"{plan.layers - residency.blocks} of {plan.layers} blocks do not stay",
                hint=WRITTEN_BY,
            )
    reached = getattr(model, "first_reached", 0)
    rows = [row.strip(NO_BACKWARD) for row in plan.saves]
    if any(rows[:reached]) or not all(len(row) == plan.chunks_per_round for row in rows[reached:]):
        raise FlopwiseError(
            "the plan saves other layers than backward comes to",
            why=f"of {model.name} it comes down to layer {reached}",
            hint="plan this model anew",
        )
    if plan.update_place == "host" and trains_partly(model):
        raise FlopwiseError(
            "the plan updates on the host, and not everything is trained",
            why="frozen weights would come back over the link with the others",
            hint="plan this model anew",
        )
    if plan.chunks_per_sequence > 1 and getattr(model, "uncut", False):
        mean = getattr(model, "averages", False)
        raise FlopwiseError(
            f"a sequence of {model.name} cannot be cut",
            why="the classifier reads the mean of all its tokens, which is taken of a whole sequence"
            if mean
            else "a state is carried from its beginning to its end, in one piece",
            hint="plan this model anew",
        )
    if plan.replay and getattr(model, "carries", False):
        raise FlopwiseError(
            f"a step of {model.name} cannot be replayed",
            why="gradients of its states come from autograd, whose memory is not the same in every step",
            hint="replay = false",
        )
    if plan.attention == "chunk" and plan.chunks_per_sequence > 1 and not getattr(model, "causal", True):
        raise FlopwiseError(
            f"attention of {model.name} cannot run chunk by chunk",
            why="every token looks at all others, also at those of later chunks",
            hint='attention = "sequence"',
        )
