"""The same losses of a mixture's routing where several ranks have a micro-batch each: autograd on the plain modules.

How many tokens chose an expert has no gradient, so that ranks add up their counts before they go back: the loss is that
of the tokens of all ranks' micro-batches together, and each rank's part of it has the gradients of its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from flopwise.engine.executor import RoutingFigures
from flopwise.engine.kernels.experts import shares_of
from flopwise.engine.modules import PlainBlock, at_least_fp32
from flopwise.work.transformer import Transformer

SUMS = 4


class PassLosses:
    """Adds up what a step's passes, micro-batches that all ranks run at once, have beside the loss of the data."""

    def __init__(self, model: Transformer, blocks: Sequence[PlainBlock], device: torch.device) -> None:
        self.model, self.routing = model, model.routing
        self.blocks = [block for block in blocks if block.layer in model.mixed_blocks]
        self._totals = torch.zeros(SUMS, dtype=torch.float64, device=device)

    def begin(self) -> None:
        """Before a step."""
        self._totals.zero_()

    def of_pass(self, there: Tensor, share: float) -> Tensor:
        """This rank's part of a pass that is so much of the step; `there`: (sequences, tokens), which are tokens."""
        routed = [block.take_routed() for block in self.blocks]
        flat = there.flatten()
        by_sequence = [self._counts(index, there) for _, index in routed]
        counts = torch.stack([each.sum(0) for each in by_sequence])
        tokens = flat.sum().double()
        several = there.any(-1).sum().double()
        # Of all ranks at once: their counts, tokens and sequences.
        everywhere = torch.cat((counts.flatten(), tokens[None], several[None]))
        distributed.all_reduce(everywhere)
        all_counts, all_tokens = everywhere[:-2].view_as(counts), everywhere[-2].clamp(min=1)
        shares = [self._shares(scores) for scores, _ in routed]
        experts, layers = self.model.experts, len(routed)
        if self.routing.balance_over == "sequence":
            balance = self._by_sequence(shares, by_sequence, there) / everywhere[-1].clamp(min=1)
        elif self.routing.balance_over == "layer":
            means = torch.stack([each[flat].sum(0, dtype=torch.float64) for each in shares]) / all_tokens
            balance = experts / self.model.experts_per_token * (all_counts / all_tokens * means).sum()
        else:
            means = sum((each[flat].sum(0, dtype=torch.float64) for each in shares), torch.zeros_like(counts[0]))
            whole = layers * all_tokens
            balance = experts * (all_counts.sum(0) / whole * means / whole).sum()
        squares = torch.stack([self._squares(scores)[flat].sum(dtype=torch.float64) for scores, _ in routed]).sum()
        z_loss = squares / all_tokens / (layers if self.routing.balance_over == "model" else 1)
        balance, z_loss = share * self.routing.balance * balance, share * self.routing.z_loss * z_loss
        busiest = (all_counts.amax(-1) / all_counts.mean(-1).clamp(min=1e-9)).mean()
        unused = (all_counts == 0).double().mean()
        self._totals += torch.stack((balance.detach(), z_loss.detach(), busiest * share, unused * share))
        return balance + z_loss

    def figures(self) -> RoutingFigures:
        """Of a step, of all ranks."""
        distributed.all_reduce(self._totals[:2])
        return RoutingFigures(*self._totals.tolist())

    def _counts(self, index: Tensor, there: Tensor) -> Tensor:
        """Of each sequence the tokens that chose each expert, (sequences, experts)."""
        found = torch.zeros((there.shape[0], self.model.experts), dtype=torch.float64, device=index.device)
        tokens = there.double()[..., None].expand(*there.shape, index.shape[-1])
        return found.scatter_add_(1, index.reshape(there.shape[0], -1), tokens.reshape(there.shape[0], -1))

    def _by_sequence(self, shares: Sequence[Tensor], counts: Sequence[Tensor], there: Tensor) -> Tensor:
        """The sum over this rank's sequences."""
        sequences, tokens = there.shape
        lengths = there.sum(-1, keepdim=True).double().clamp(min=1)
        total = torch.zeros((), dtype=torch.float64, device=there.device)
        for each, chosen in zip(shares, counts, strict=True):
            means = (each.view(sequences, tokens, -1) * there[..., None]).sum(1, dtype=torch.float64) / lengths
            total = total + self.model.experts / self.model.experts_per_token * (means * chosen / lengths).sum()
        return total

    def _shares(self, scores: Tensor) -> Tensor:
        shares = shares_of(scores, self.routing, at_least_fp32(scores.dtype))
        return shares / shares.sum(-1, keepdim=True) if self.routing.scores == "sigmoid" else shares

    @staticmethod
    def _squares(scores: Tensor) -> Tensor:
        return torch.logsumexp(scores.to(at_least_fp32(scores.dtype)), -1).square()
