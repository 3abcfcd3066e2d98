"""LoRA and DoRA beside the layers of a network of `transformers`, under PEFT's names and by its rules, in torch."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flopwise.engine.weights.adapter_files import PREFIX


class Lora(nn.Module):
    """y = layer(x) + scale · B·(A·x), of a Linear or of GPT-2's transposed layer."""

    def __init__(self, layer: Any, rank: int, scale: float) -> None:
        super().__init__()
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        self.base_layer, self.scale = layer, scale
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        self.lora_magnitude_vector: nn.Parameter | None = None

    @property
    def matrix(self) -> Tensor:
        """The layer's, with the outputs as rows."""
        found: Tensor = self.base_layer.weight if isinstance(self.base_layer, nn.Linear) else self.base_layer.weight.t()
        return found

    def row_norms(self) -> Tensor:
        """Of the matrix with its adapter; no part of the gradient."""
        whole = self.matrix + self.scale * self.lora_B.weight @ self.lora_A.weight
        found: Tensor = torch.linalg.norm(whole.detach(), dim=1)
        return found

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.base_layer(value)
        low: Tensor = self.scale * self.lora_B(self.lora_A(value))
        if self.lora_magnitude_vector is None:
            return result + low
        factor: Tensor = self.lora_magnitude_vector / self.row_norms()
        return result + (factor - 1) * (value @ self.matrix.t()) + factor * low


class ExpertLora(nn.Module):
    """W + scale · B·A of each expert, of matrices that transformers has in one tensor: some rows of each."""

    def __init__(self, parts: list[tuple[slice, nn.ParameterList, nn.ParameterList]], scale: float) -> None:
        super().__init__()
        self.rows, self.scale = [rows for rows, _, _ in parts], scale
        self.downs = nn.ModuleList(down for _, down, _ in parts)
        self.ups = nn.ModuleList(up for _, _, up in parts)

    def forward(self, matrices: Tensor) -> Tensor:
        result = matrices.clone()
        for rows, downs, ups in zip(self.rows, self.downs, self.ups, strict=True):
            assert isinstance(downs, nn.ParameterList)
            assert isinstance(ups, nn.ParameterList)
            products = [up @ down for down, up in zip(downs, ups, strict=True)]
            result[:, rows] += self.scale * torch.stack(products)
        return result


def _beside_experts(
    name: str, module: Any, table: dict[str, Any], scale: float, *, generator: torch.Generator, deviation: float
) -> dict[str, nn.Parameter]:
    """Adapters of experts, by the names that their matrices have in files of weights."""
    found: dict[str, nn.Parameter] = {}
    mixtral = {"w1", "w2", "w3"} & {*table["target_modules"]}
    words = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    path = name.replace("mlp.experts", "block_sparse_moe.experts") if mixtral else name
    inner = module.down_proj.shape[2]
    places = {words[0]: slice(0, inner), words[1]: slice(inner, 2 * inner), words[2]: slice(None)}
    for matrix, members in (("gate_up_proj", words[:2]), ("down_proj", words[2:])):
        parts = []
        for word in (each for each in members if each in table["target_modules"]):
            rows, (experts, _, inputs) = places[word], getattr(module, matrix).shape
            outputs = inner if matrix == "gate_up_proj" else module.down_proj.shape[1]
            sides = []
            for side, shape in (("lora_A", (table["r"], inputs)), ("lora_B", (outputs, table["r"]))):
                drawn = [nn.Parameter(deviation * torch.randn(shape, generator=generator)) for _ in range(experts)]
                found |= {f"{PREFIX}{path}.{number}.{word}.{side}.weight": each for number, each in enumerate(drawn)}
                sides.append(nn.ParameterList(drawn))
            parts.append((rows, sides[0], sides[1]))
        if parts:
            parametrize.register_parametrization(module, matrix, ExpertLora(parts, scale), unsafe=True)
    return found


class ParameterLora(nn.Module):
    """W + scale · B·A of a parameter that has all experts, (experts, inputs, outputs), by PEFT's own einsum."""

    def __init__(self, down: nn.Parameter, up: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.down, self.up, self.scale = down, up, scale

    def forward(self, matrices: Tensor) -> Tensor:
        experts = matrices.shape[0]
        down, up = self.down.view(experts, -1, self.down.shape[1]), self.up.view(self.up.shape[0], -1, experts)
        return matrices + self.scale * torch.einsum("o r e, e r i -> e i o", up, down)


def _beside_parameters(
    name: str, module: Any, table: dict[str, Any], scale: float, *, generator: torch.Generator, deviation: float
) -> dict[str, nn.Parameter]:
    """Adapters of parameters, each wrapped around those before it, which then are its `base_layer`."""
    words = [word for word, _ in module.named_parameters(recurse=False)]
    chosen = [
        word for word in words if any(f".{name}.{word}".endswith(f".{target}") for target in table["target_parameters"])
    ]
    found: dict[str, nn.Parameter] = {}
    for place, word in enumerate(chosen):
        experts, inputs, outputs = getattr(module, word).shape
        shapes = {"lora_A": (table["r"] * experts, inputs), "lora_B": (outputs, table["r"] * experts)}
        drawn = {
            side: nn.Parameter(deviation * torch.randn(shape, generator=generator)) for side, shape in shapes.items()
        }
        wrapped = name + ".base_layer" * (len(chosen) - 1 - place)
        found |= {f"{PREFIX}{wrapped}.{side}.weight": value for side, value in drawn.items()}
        proxy = ParameterLora(drawn["lora_A"], drawn["lora_B"], scale)
        parametrize.register_parametrization(module, word, proxy, unsafe=True)
    return found


def add_adapters(
    network: Any, table: dict[str, Any], *, seed: int = 0, deviation: float = 0.3
) -> dict[str, nn.Parameter]:
    """Adapters as PEFT's configuration asks for them, with random numbers; everything else is frozen.

    Returns what is trained, by PEFT's names.
    """
    network.requires_grad_(False)
    scale = table["lora_alpha"] / (sqrt(table["r"]) if table["use_rslora"] else table["r"])
    generator, found = torch.Generator().manual_seed(seed), dict[str, nn.Parameter]()
    for name, layer in list(network.named_modules()):
        if any(name == word or name.endswith(f".{word}") for word in table["target_modules"]):
            holder, _, last = name.rpartition(".")
            made = Lora(layer, table["r"], scale)
            setattr(network.get_submodule(holder), last, made)
            for side in ("lora_A", "lora_B"):
                weight = getattr(made, side).weight
                weight.data.copy_(deviation * torch.randn(weight.shape, generator=generator))
                found[f"{PREFIX}{name}.{side}.weight"] = weight
            if table["use_dora"]:
                lengths = made.row_norms() * (1 + deviation * torch.randn(made.matrix.shape[0], generator=generator))
                made.lora_magnitude_vector = found[f"{PREFIX}{name}.lora_magnitude_vector"] = nn.Parameter(lengths)
    for word in table["modules_to_save"] or ():
        for name, module in network.named_modules():
            if name.endswith(word):
                found |= {f"{PREFIX}{name}.{key}": value.requires_grad_() for key, value in module.named_parameters()}
    for name, module in list(network.named_modules()):
        if name.endswith("mlp.experts") and table["target_parameters"]:
            found |= _beside_parameters(name, module, table, scale, generator=generator, deviation=deviation)
        elif name.endswith("mlp.experts"):
            found |= _beside_experts(name, module, table, scale, generator=generator, deviation=deviation)
    return found
