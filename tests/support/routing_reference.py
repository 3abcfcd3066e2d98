"""Losses of a mixture's routing, one formula after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flopwise.work.routing import Routing


def balance_of(routed: list[tuple[Tensor, Tensor]], routing: Routing, experts: int, there: Tensor) -> Tensor:
    """The formulas one by one; `there`: (sequences, tokens), which of them are no padding."""

    def shares(scores: Tensor) -> Tensor:
        if routing.scores == "softmax":
            return scores.softmax(-1)
        return scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)

    def over(layers: list[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
        counts = sum(functional.one_hot(chosen[rows], experts).sum((0, 1)).double() for _, chosen in layers)
        mean = torch.cat([shares(scores)[rows] for scores, _ in layers]).mean(0)
        found: Tensor = experts * (counts / (len(layers) * rows.sum()) * mean).sum()
        return found

    flat = there.flatten()
    if routing.balance_over == "model":
        return over(routed, flat)
    chosen = routed[0][1].shape[-1]
    if routing.balance_over == "layer":
        found: Tensor = torch.stack([over([layer], flat) for layer in routed]).sum() / chosen
        return found
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for layer in routed:
        for number, row in enumerate(there):
            rows = torch.zeros_like(there)
            rows[number] = row
            total = total + over([layer], rows.flatten()) / chosen / len(there)
    return total


def z_of(routed: list[tuple[Tensor, Tensor]], routing: Routing, there: Tensor) -> Tensor:
    means = torch.stack([scores.logsumexp(-1).square()[there.flatten()].mean() for scores, _ in routed])
    found: Tensor = means.mean() if routing.balance_over == "model" else means.sum()
    return found
