"""Optimizers as others have them: torch's own, and published formulas written out plainly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwise.engine.batch import Batch
from flopwise.engine.modules import ReferenceModel
from flopwise.setup.training import Training
from flopwise.work.optimizers import Optimizer
from flopwise.work.parameters import parameters_of
from flopwise.work.transformer import Transformer
from tests.support.training_plans import reference_gradients

SIGNED_VALUES = {
    0: -0.992968738079071,
    1: -0.9789062738418579,
    7: -0.89453125,
    36: -0.48671871423721313,
    63: -0.10703125596046448,
    64: -0.09859374910593033,
    95: -0.011406250298023224,
    96: -0.009718749672174454,
    111: -0.001281249918974936,
    112: -0.0009437500848434865,
    119: -0.00015625001105945557,
    120: -8.874999912222847e-05,
    124: -7.749999895168003e-06,
    125: -3.250000190746505e-06,
    126: -5.500000384017767e-07,
    127: 0.0,
    128: 5.500000384017767e-07,
    129: 3.250000190746505e-06,
    130: 7.749999895168003e-06,
    131: 2.1249998098937795e-05,
    150: 0.0052187503315508366,
    191: 0.10703125596046448,
    253: 0.9789062738418579,
    254: 0.992968738079071,
    255: 1.0,
}
"""Place → value of bitsandbytes' table with signs, as it is listed in models quantised with it."""


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """The place of the nearest of a table's values, of two as near the lower one."""
    return (values[:, None].double() - table[None, :].double()).abs().argmin(dim=1)


class BlockwiseAdamW:
    """AdamW of one tensor with both moments in 8 bits, a block of 256 at a time."""

    def __init__(self, count: int, tables: tuple[Tensor, Tensor]) -> None:
        self.tables = tables
        blocks = -(-count // 256)
        self.codes = [torch.zeros(count, dtype=torch.uint8) for _ in tables]
        self.scales = [torch.zeros(blocks, dtype=torch.float32) for _ in tables]

    def step(self, weights: Tensor, gradient: Tensor, *, step: int, rate: float, betas: tuple[float, float]) -> Tensor:
        """The weights a step on, with epsilon 1e-8 and a weight decay of 0.1."""
        updated = weights.clone()
        for block in range(len(self.scales[0])):
            place = slice(256 * block, 256 * (block + 1))
            mean, square = (
                table[codes[place].long()] * scales[block]
                for table, codes, scales in zip(self.tables, self.codes, self.scales, strict=True)
            )
            each = gradient[place]
            mean = mean.to(each.dtype) * betas[0] + each * (1 - betas[0])
            square = square.to(each.dtype) * betas[1] + each * each * (1 - betas[1])
            root = square.sqrt() * (1 / (1 - betas[1] ** step) ** 0.5) + 1e-8
            updated[place] = weights[place] * (1 - rate * 0.1) - mean / root * (rate / (1 - betas[0] ** step))
            for index, moment in enumerate((mean.float(), square.float())):
                scale = moment.abs().max()
                self.scales[index][block] = scale
                shares = moment / scale if scale > 0 else torch.zeros_like(moment)
                self.codes[index][place] = nearest(shares, self.tables[index]).to(torch.uint8)
        return updated


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, line by line."""

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # noqa: ARG002
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                update = torch.sign(beta1 * mean + (1 - beta1) * weight.grad)
                weight.sub_(group["lr"] * (update + group["weight_decay"] * weight))
                mean.copy_(beta2 * mean + (1 - beta2) * weight.grad)


class TorchTrainer:
    """A plain module trained by optimizers of torch's, whose matrices are those of `transformers`: none is packed."""

    def __init__(
        self, module: ReferenceModel, model: Transformer, tokens: int, name: Optimizer, training: Training
    ) -> None:
        self.module, self.training = module, training
        values = dict(module.named_parameters())
        self.leaves: dict[str, list[torch.nn.Parameter]] = {}
        groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
        for each in parameters_of(model, tokens):
            if each.name not in values:
                continue
            parts = each.weight.parts or values[each.name].shape[:1]
            cut = torch.split(values[each.name].detach().clone(), list(parts))
            self.leaves[each.name] = [torch.nn.Parameter(piece.clone()) for piece in cut]
            matrix = each.role == "matrix" and isinstance(each.part, int)
            groups.setdefault((matrix, each.decays), []).extend(self.leaves[each.name])
        self.optimizers = [
            self._made(name, {key[1]: group for key, group in groups.items() if key[0] == matrix}, matrix=matrix)
            for matrix in (True, False)
        ]

    def _made(self, name: Optimizer, groups: dict[bool, list[torch.nn.Parameter]], *, matrix: bool) -> Any:
        training = self.training
        listed = [
            {"params": params, "weight_decay": training.weight_decay if decays else 0.0}
            for decays, params in groups.items()
        ]
        rate, betas = training.learning_rate, (training.beta1, training.beta2)
        if name == "muon" and matrix:
            return torch.optim.Muon(listed, lr=rate, momentum=training.momentum, adjust_lr_fn="match_rms_adamw")
        if name in ("adamw", "muon"):
            return torch.optim.AdamW(listed, lr=rate, betas=betas, eps=training.epsilon)
        if name == "adafactor":
            return torch.optim.Adafactor(listed, lr=rate)
        if name == "lion":
            return Lion(listed, lr=rate, betas=betas)
        momentum = training.momentum if name == "sgd-momentum" else 0.0
        return torch.optim.SGD(listed, lr=rate, momentum=momentum, nesterov=training.nesterov)

    def step(self, batch: Batch, number: int) -> float:
        """The loss of a batch, after which all weights have moved."""
        loss, gradients = reference_gradients(self.module, batch)
        for name, leaves in self.leaves.items():
            cut = torch.split(gradients[name], [leaf.shape[0] for leaf in leaves])
            for leaf, gradient in zip(leaves, cut, strict=True):
                leaf.grad = gradient.clone()
        every = [leaf for leaves in self.leaves.values() for leaf in leaves]
        if self.training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(every, self.training.clip_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.training.rate_at(number)
            optimizer.step()
        values = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, leaves in self.leaves.items():
                values[name].copy_(torch.cat([leaf.detach() for leaf in leaves]))
        return loss
