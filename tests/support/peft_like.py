"""LoRA beside the layers of a network of `transformers`, under PEFT's names and by its rules, in plain torch."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from flopwise.engine.weights.adapter_files import PREFIX


class Lora(nn.Module):
    """y = layer(x) + scale · B·(A·x), of a Linear or of GPT-2's transposed layer."""

    def __init__(self, layer: Any, rank: int, scale: float) -> None:
        super().__init__()
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        self.base_layer, self.scale = layer, scale
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.base_layer(value) + self.scale * self.lora_B(self.lora_A(value))
        return result


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
    return found
