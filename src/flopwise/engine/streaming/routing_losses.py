"""Losses of a mixture's routing: experts that are used evenly, and scores that stay small.

What balances an expert is the share of a round's tokens that chose it. It is known when the round's last chunk has come
through, which is before anything goes back, so that both are exact however the round is cut:

    forward    each layer and chunk   sums += tokens of each expert, its shares, squares of the scores' logarithms
    backward   the first one          sums ▶ the losses, and what each share's gradient is   (`_settle`)
               each layer and chunk   gradient of the scores += that, through the softmax

Nothing of it asks the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwise.engine.executor import RoutingFigures
from flopwise.engine.kernels.blocks import row_blocks
from flopwise.engine.kernels.experts import shares_of
from flopwise.records.plan import Plan
from flopwise.work.transformer import Transformer

BALANCE, Z, BUSIEST, UNUSED = range(4)


def sums_bytes(model: Transformer, plan: Plan) -> int:
    """What a round counts."""
    return model.routing.sums_bytes(model.layers, plan.sequences_per_round, model.experts)


class RoutingLosses:
    """Counts a round's routing, and takes its losses back into the gradients of the scores."""

    def __init__(self, model: Transformer, plan: Plan, statistics: torch.dtype, room: Tensor) -> None:
        """`room`: bytes for what is counted."""
        self.model, self.routing, self.statistics = model, model.routing, statistics
        self.by_sequence = model.routing.balance_over == "sequence"
        self.sequences = plan.sequences_per_round
        self.sequence_tokens, self.rounds = plan.sequence_tokens, plan.rounds_per_step
        experts = model.experts
        shape = (model.layers, self.sequences if self.by_sequence else 1, 2 * experts + 2)
        self._sums = room[: sums_bytes(model, plan)].view(torch.float64).view(shape)
        self._counts, self._shares = self._sums[..., :experts], self._sums[..., experts : 2 * experts]
        self._squares, self._rows = self._sums[..., -2], self._sums[..., -1]
        self._mixed = torch.tensor([layer in model.mixed_blocks for layer in range(model.layers)], device=room.device)
        self._totals = torch.zeros(4, dtype=torch.float64, device=room.device)
        self.counting = False
        """Whether what is routed now is counted: not where it is recomputed or evaluated."""
        self._layer, self._numbers = 0, torch.empty(0, device=room.device)
        self._settled = True

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a step."""
        self._totals.zero_()
        self._settled = True

    def begin_round(self) -> None:
        """Before a round's first task."""
        self._settle()
        self._sums.zero_()
        self._settled = False

    def at(self, layer: int, numbers: Tensor, *, counts: bool) -> None:
        """What the next operators are of. `numbers`: of the chunk's tokens, below zero where there is none."""
        self._layer, self._numbers, self.counting = layer, numbers, counts

    def end(self) -> None:
        """Behind a step's last task."""
        self._settle()

    def figures(self) -> RoutingFigures:
        """When the device is done."""
        return RoutingFigures(*self._totals.tolist())

    # -- forward ------------------------------------------------------------------------------------------------------

    def count(self, scores: Tensor, index: Tensor) -> None:
        """Of a chunk's scores and the experts that were chosen."""
        if not self.counting:
            return
        sums, experts = self._sums[self._layer], self.model.experts
        for block in self._blocks(scores):
            there, groups = self._there(block)
            shares, logarithms = self._shares_of(scores[block])
            places = (groups[:, None] * experts + index[block]).flatten()
            tokens = torch.zeros(sums.shape[0] * experts, dtype=torch.float64, device=scores.device)
            tokens.scatter_add_(0, places, there.double().repeat_interleave(index.shape[1]))
            sums[:, :experts] += tokens.view(-1, experts)
            rest = torch.cat((shares, logarithms.square(), torch.ones_like(logarithms)), -1) * there[:, None]
            sums[:, experts:] += self._by_group(rest, groups)

    def _by_group(self, rows: Tensor, groups: Tensor) -> Tensor:
        if not self.by_sequence:
            return rows.sum(0, dtype=torch.float64)
        found = torch.zeros((self.sequences, rows.shape[1]), dtype=rows.dtype, device=rows.device)
        return found.index_add_(0, groups, rows)

    def _blocks(self, scores: Tensor) -> list[slice]:
        return list(row_blocks(scores.shape[0], scores.shape[1] * self.statistics.itemsize, 8))

    def _there(self, block: slice) -> tuple[Tensor, Tensor]:
        """Which rows are tokens, and whose sums they belong to."""
        numbers = self._numbers[block]
        there = numbers >= 0
        groups = numbers.clamp(min=0).long() // self.sequence_tokens % self.sequences
        return there, groups if self.by_sequence else torch.zeros_like(groups)

    def _shares_of(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Shares that add up to one, and the logarithm of the scores' exponentials."""
        shares = shares_of(scores, self.routing, self.statistics)
        if self.routing.scores == "sigmoid":
            shares = shares / shares.sum(-1, keepdim=True)
        return shares, torch.logsumexp(scores.to(self.statistics), -1, keepdim=True)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """From what was counted to the losses; the counts become the gradients of the shares."""
        if self._settled:
            return
        self._settled = True
        routing, experts, chosen = self.routing, self.model.experts, self.model.experts_per_token
        counts, shares, squares, rows = self._counts, self._shares, self._squares, self._rows
        of_layers = counts.sum(1)
        evenness = torch.stack(
            (
                of_layers.amax(-1) / of_layers.mean(-1).clamp(min=1e-9),
                (of_layers == 0).sum(-1, dtype=torch.float64) / experts,
            )
        )
        mixed = self._mixed.double()
        each = 1.0 / self.rounds
        self._totals[BUSIEST:].add_((evenness * mixed).sum(-1) / mixed.sum() * each)
        if routing.balance_over == "model":
            tokens = rows.sum().clamp(min=1)
            found = counts.sum((0, 1)) * (experts * routing.balance * each / tokens.square())
            self._totals[BALANCE].add_((found * shares.sum((0, 1))).sum())
            counts.copy_(found.expand_as(counts))
            scale = (routing.z_loss * each / tokens).expand_as(rows)
        else:
            tokens = rows.clamp(min=1)
            # Of several sequences the mean.
            several = (rows > 0).sum(1, keepdim=True).clamp(min=1)
            counts.mul_((experts / chosen * routing.balance * each / (tokens.square() * several))[..., None])
            self._totals[BALANCE].add_((counts * shares).sum())
            scale = (routing.z_loss * each / rows.sum(1, keepdim=True).clamp(min=1)).expand_as(rows)
        self._totals[Z].add_((squares * scale).sum())
        rows.copy_(scale)

    def add_gradient(self, scores: Tensor, *, out: Tensor) -> None:
        """`out`, the gradient of a chunk's scores, gets that of these losses added."""
        self._settle()
        slopes, scales = self._counts[self._layer], self._rows[self._layer]
        for block in self._blocks(scores):
            there, groups = self._there(block)
            shares, logarithms = self._shares_of(scores[block])
            below = slopes[groups].to(self.statistics)
            below = below - (below * shares).sum(-1, keepdim=True)
            if self.routing.scores == "sigmoid":
                single = torch.sigmoid(scores[block].to(self.statistics))
                below = below * shares * (1.0 - single)
            else:
                below = below * shares
            if self.routing.z_loss:
                scale = 2.0 * scales[groups].to(self.statistics)[:, None]
                below = below + scale * logarithms * torch.softmax(scores[block], -1, dtype=self.statistics)
            out[block] += (below * there[:, None]).to(out.dtype)
