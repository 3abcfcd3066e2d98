"""Whether a plan, which may come from a file, can run at all."""

from __future__ import annotations

from flopwise.base.errors import FlopwiseError
from flopwise.records.outcome import WRITTEN_BY
from flopwise.records.plan import Plan, Residency
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
    if plan.attention == "chunk" and plan.chunks_per_sequence > 1 and not getattr(model, "causal", True):
        raise FlopwiseError(
            f"attention of {model.name} cannot run chunk by chunk",
            why="every token looks at all others, also at those of later chunks",
            hint='attention = "sequence"',
        )
