"""Pairs of answers, of which the better one is made likelier than the other: DPO (arXiv 2305.18290).

A pair's margin is Δ = β · ((log π(chosen) − log ρ(chosen)) − (log π(rejected) − log ρ(rejected))), where π is the model
and ρ the reference; its loss is −(1 − ε) · log σ(Δ) − ε · log σ(−Δ). How much the tokens of an answer count in the
gradient follows from Δ, and so from every token of both: the head runs over a whole chunk first, and keeps no logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.embedding_head import Loss
from flopwise.engine.streaming.inputs import Inputs
from flopwise.setup.training import Training


class Preferences:
    """What is known of the answers in the chunks of a round."""

    def __init__(self, training: Training, inputs: Inputs, arena: Arena) -> None:
        self.training, self.inputs, self.arena = training, inputs, arena
        self.scores = torch.zeros_like(inputs.references)
        """Of each chunk's answers, how likely the model finds them, as a logarithm."""

    def begin(self, chunk: int) -> None:
        """Nothing of a chunk is scored yet."""
        self.scores[chunk].zero_()

    def add(self, chunk: int, answers: Tensor, losses: Tensor) -> None:
        """What some of a chunk's tokens, each of such an answer, add to the scores of these."""
        wide = self.arena.take(losses.shape, torch.float64)
        # In fp64, so that the order in which a GPU adds does not show.
        self.scores[chunk].index_add_(0, answers, wide.copy_(losses).neg_())
        self.arena.give(wide)

    def weigh(self, chunk: int, scale: Tensor, loss: Loss) -> None:
        """From a chunk's scores to the sums of the step, and to what its tokens weigh in the gradient of the mean."""
        answers, weights, references = self.inputs.answers(chunk)
        beta, wrong = self.training.dpo_beta, self.training.dpo_label_smoothing
        pairs = references.numel() // 2
        gains = beta * (self.scores[chunk] - references)[: 2 * pairs].view(pairs, 2)
        margin = gains[:, 0] - gains[:, 1]
        there = ~margin.isnan()
        losses = -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
        loss.total.add_(torch.where(there, losses, 0.0).sum())
        if loss.correct is not None:
            loss.correct.add_((margin > 0).sum())
        if loss.gains is not None:
            loss.gains.add_(torch.where(there[:, None], gains, 0.0).sum(0))
        slope = beta * ((1 - wrong) * torch.sigmoid(-margin) - wrong * torch.sigmoid(margin)) * scale
        slope = torch.where(there, slope, 0.0)
        by_answer = torch.stack((slope, -slope), 1).to(weights.dtype).view(-1)
        torch.index_select(by_answer, 0, answers, out=weights)
