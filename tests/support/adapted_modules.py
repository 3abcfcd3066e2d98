"""LoRA as PEFT adds it to plain modules: for each matrix y = W·x + scale · B·(A·x), with W frozen; and DoRA.

With magnitudes m each row of V = W + scale · B·A is m ÷ |V| as long, |V| being no part of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from flopwise.engine.modules import ExpertMatrices, PlainBlock, ReferenceModel
from flopwise.work.transformer import Transformer
from tests.support.tiny_models import random_module

PRODUCTS = {
    "qkv": ("q", "k", "v"),
    "latents": ("q_a", "kv_a", "kv_turned"),
    "query_up": ("q",),
    "latent_up": ("k", "v"),
    "output": ("o",),
    "gate_up": ("gate", "up"),
    "up": ("up",),
    "down": ("down",),
}


class Adapted(nn.Module):
    """A linear layer, some of whose results have an adapter each, or all of them one."""

    def __init__(
        self,
        base: nn.Linear,
        widths: dict[str, int],
        targets: tuple[str, ...],
        rank: int,
        scale: float,
        *,
        magnitudes: bool = False,
    ) -> None:
        super().__init__()
        self.base, self.widths, self.scale = base.requires_grad_(False), widths, scale
        self.row_widths = widths
        """Rows of each of our results."""
        chosen = [name for name in widths if name in targets]
        dtype = base.weight.dtype
        self.lora_A = nn.ModuleDict(
            {name: nn.Linear(base.in_features, rank, bias=False, dtype=dtype) for name in chosen}
        )
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, widths[name], bias=False, dtype=dtype) for name in chosen})
        self.lora_magnitude = nn.ParameterDict(
            {name: torch.empty(widths[name], dtype=dtype) for name in chosen if magnitudes}
        )

    def forward(self, value: Tensor) -> Tensor:
        parts = []
        split = list(self.widths.values())
        matrices = torch.split(self.base.weight, split)
        for name, part, matrix in zip(self.widths, self.base(value).split(split, -1), matrices, strict=True):
            low = self.lora_B[name](self.lora_A[name](value)) * self.scale if name in self.lora_A else 0.0
            if name in self.lora_magnitude:
                factor = self.lora_magnitude[name] / self.norms(name, matrix)
                parts.append(part + (factor - 1) * (value @ matrix.t()) + factor * low)
            else:
                parts.append(part + low)
        return torch.cat(parts, -1)

    def norms(self, name: str, matrix: Tensor) -> Tensor:
        """Of the rows of a matrix with its adapter; no part of the gradient."""
        up, down = self.lora_B[name].weight, self.lora_A[name].weight
        assert isinstance(up, Tensor)
        assert isinstance(down, Tensor)
        found: Tensor = torch.linalg.norm(matrix + self.scale * up.detach() @ down.detach(), dim=1)
        return found


class AdaptedExperts(nn.Module):
    """A mixture's matrices, some of whose results have an adapter for each expert."""

    def __init__(
        self, base: ExpertMatrices, widths: dict[str, int], targets: tuple[str, ...], rank: int, scale: float
    ) -> None:
        super().__init__()
        self.base, self.widths, self.scale, self.row_widths = base.requires_grad_(False), widths, scale, widths
        self.rows = [*widths.values()]
        *lead, _, inputs = base.weight.shape
        dtype, chosen = base.weight.dtype, [name for name in widths if name in targets]
        self.lora_A = nn.ParameterDict({name: torch.empty(*lead, rank, inputs, dtype=dtype) for name in chosen})
        self.lora_B = nn.ParameterDict({name: torch.empty(*lead, widths[name], rank, dtype=dtype) for name in chosen})

    def forward(self, value: Tensor, expert: int) -> Tensor:
        parts = []
        for name, part in zip(self.widths, self.base(value, expert).split(self.rows, -1), strict=True):
            low: Tensor | float = 0.0
            if name in self.lora_A:
                down, up = (each[expert] if each.ndim == 3 else each for each in (self.lora_A[name], self.lora_B[name]))
                low = value @ down.t() @ up.t() * self.scale
            parts.append(part + low)
        return torch.cat(parts, -1)


def adapt(
    model: Transformer, *, dtype: torch.dtype = torch.float64, seed: int = 0, joined: tuple[str, ...] = ()
) -> ReferenceModel:
    """A module with adapters as the description has them, everything else frozen and random; both matrices random.

    `joined`: products with one adapter for all their results.
    """
    adapters = model.adapters
    assert adapters is not None
    module = random_module(replace(model, adapters=None, frozen=None), dtype=dtype, seed=seed).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed + 1)
    for number, layer in enumerate(module.layers):
        assert isinstance(layer, PlainBlock)
        if number in model.frozen_layers:
            continue
        products = [(prefix, product) for prefix in ("", "shared_") for product in PRODUCTS]
        for prefix, product in products:
            base, targets = getattr(layer, f"{prefix}{product}", None), PRODUCTS[product]
            if product == "latents" and layer.model.latent is not None and not layer.model.latent.query_rank:
                targets = ("q", *targets[1:])
            if base is None or not set(targets) & set(adapters.targets):
                continue
            widths = _widths(layer.model, prefix)
            own = {f"{prefix}{name}": widths[name] for name in targets}
            chosen = tuple[str, ...](f"{prefix}{name}" for name in adapters.targets)
            kind = AdaptedExperts if isinstance(base, ExpertMatrices) else Adapted
            if product == "latents":
                # Two of its results are one layer's.
                own = {targets[0]: widths[targets[0]], "kv_a+kv_turned": widths["kv_a"] + widths["kv_turned"]}
                chosen = tuple(name for name in own if name.partition("+")[0] in adapters.targets)
            elif product in joined:
                own, chosen = {"+".join(targets): sum(own.values())}, ("+".join(targets),)
            more = {"magnitudes": True} if adapters.magnitudes and kind is Adapted else {}
            made = kind(base, own, chosen, adapters.rank, adapters.scale, **more)
            made.row_widths = {f"{prefix}{name}": widths[name] for name in targets}
            for value in (*made.lora_A.parameters(), *made.lora_B.parameters()):
                value.data.copy_(0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float64))
            for value in made.lora_magnitude.parameters() if isinstance(made, Adapted) else ():
                value.data.copy_(1 + 0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float64))
            setattr(layer, f"{prefix}{product}", made)
    return module


def _widths(kind: Transformer, prefix: str) -> dict[str, int]:
    """Rows of each matrix of a block, or of its shared experts."""
    ffn = kind.shared_ffn if prefix else kind.ffn
    attention = {"q": kind.query_width, "k": kind.kv_width, "v": kind.kv_width, "o": kind.hidden}
    if kind.latent is not None:
        turned, latent = kind.rotary_dim or 0, kind.latent
        attention |= {"k": kind.heads * (kind.head_dim - turned), "v": kind.heads * latent.value_dim}
        attention |= {"q_a": latent.query_rank, "kv_a": latent.rank, "kv_turned": turned}
    return {**attention, "gate": ffn, "up": ffn, "down": kind.hidden}


def ours(module: nn.Module, of: Callable[[nn.Parameter], Tensor] = lambda value: value.detach()) -> dict[str, Tensor]:
    """Something of every parameter under our names: the matrices A of a product are one, below each other."""
    found: dict[str, Tensor] = {}
    down: dict[str, list[Tensor]] = {}
    for name, value in module.named_parameters():
        place = name.split(".")
        if "lora_A" in place:
            down.setdefault(".".join([*place[:2], f"{place[2]}_A.weight"]), []).append(of(value))
        elif "lora_B" in place or "lora_magnitude" in place:
            kind = "B" if "lora_B" in place else "magnitude"
            targets, given = place[4].split("+"), of(value)
            holder = module.get_submodule(".".join(place[:3]))
            assert isinstance(holder, Adapted | AdaptedExperts)
            apart = given.numel() and len(targets) > 1
            rows = [holder.row_widths[target] for target in targets]
            parts = list(torch.split(given, rows, -2 if given.ndim == 3 else 0)) if apart else [given] * len(targets)
            for target, part in zip(targets, parts, strict=True):
                found[".".join([*place[:2], f"{target}_{kind}.weight"])] = part
        else:
            found[name.replace(".base.", ".")] = of(value)
    return found | {name: torch.cat(values, -2) for name, values in down.items()}


def trained(module: nn.Module) -> dict[str, Tensor]:
    """Gradients of what is trained, zeros where it has no part in the loss."""

    def gradient(value: nn.Parameter) -> Tensor:
        if not value.requires_grad:
            return torch.empty(0)
        return torch.zeros_like(value) if value.grad is None else value.grad.clone()

    return {name: values for name, values in ours(module, gradient).items() if values.numel()}
