"""Adapters as PEFT writes and reads them: `adapter_config.json` and `adapter_model.safetensors`; and merged away.

PEFT has a pair of matrices for each linear layer of transformers. Ours of a product that makes several results share
one matrix A, whose rows are theirs below each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.engine.weights.huggingface import NAMES, family_of, place_of
from flopwise.work.adapters import DOWN, RESULTS, UP, Adapters, Target
from flopwise.work.parameters import Parameter, parameters_of
from flopwise.work.transformer import Transformer

PREFIX = "base_model.model."


def _layers(model: Transformer) -> dict[str, dict[Target, str]]:
    """Product → target → transformers' name of its layer, of those that have an adapter."""
    adapters, names = model.adapters, NAMES[family_of(model)].layer
    assert adapters is not None
    without = "up" if model.gated else "gate_up"
    fused = next((name for product in RESULTS for name in names.get(product, ()) if _is_fused(product, names)), None)
    if fused is not None:
        raise FlopwiseError(
            f"{model.name}: adapters of this network cannot be saved yet",
            why=f"transformers has {fused} in one, for which PEFT has one adapter and there are several here",
            hint="--freeze embedding,blocks.0-15, or a model of the Llama, Mistral or Qwen kind",
        )
    return {
        product: {
            target: name for target, name in zip(RESULTS[product], layers, strict=True) if target in adapters.targets
        }
        for product, layers in names.items()
        if product in RESULTS and product != without
    }


def _is_fused(product: str, names: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether a family has several of our results in one layer."""
    return product in names and len(names[product]) != len(RESULTS[product])


def adapter_config(model: Transformer, base: str | None) -> dict[str, Any]:
    """PEFT's configuration; `base`: the model's folder or name."""
    adapters = model.adapters
    assert adapters is not None
    modules = [name.rpartition(".")[2] for layers in _layers(model).values() for name in layers.values()]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": adapters.rank_stabilised,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def to_peft(model: Transformer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters under our names as PEFT's."""
    assert model.adapters is not None
    rank, found = model.adapters.rank, {}
    for layer in range(model.layers):
        for product, targets in _layers(model).items():
            for place, (target, name) in enumerate(targets.items()):
                down = tensors[f"layers.{layer}.{product}_{DOWN}.weight"]
                own = f"{PREFIX}{NAMES[family_of(model)].layers}.{layer}.{name}"
                found[f"{own}.lora_A.weight"] = down[place * rank : (place + 1) * rank]
                found[f"{own}.lora_B.weight"] = tensors[f"layers.{layer}.{target}_{UP}.weight"]
    return found


def from_peft(model: Transformer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's adapters under our names; what is missing, too much or of another shape is refused."""
    left, found = set(tensors), {}
    for layer in range(model.layers):
        for product, targets in _layers(model).items():
            own = f"{PREFIX}{NAMES[family_of(model)].layers}.{layer}"
            names = {target: f"{own}.{name}" for target, name in targets.items()}
            wanted = [f"{name}.lora_{side}.weight" for name in names.values() for side in (DOWN, UP)]
            missing = [name for name in wanted if name not in left]
            if missing:
                raise _refused(model, f"there is no {missing[0]}")
            left -= set(wanted)
            if names:
                downs = [tensors[f"{name}.lora_A.weight"] for name in names.values()]
                found[f"layers.{layer}.{product}_{DOWN}.weight"] = torch.cat(downs)
            for target, name in names.items():
                found[f"layers.{layer}.{target}_{UP}.weight"] = tensors[f"{name}.lora_B.weight"]
    if left:
        raise _refused(model, f"{min(left)} belongs to no adapter of it")
    for parameter in parameters_of(model, 1):
        if parameter.name in found and tuple(found[parameter.name].shape) != parameter.shape:
            raise _refused(model, f"{parameter.name} would be {tuple(found[parameter.name].shape)}")
    return found


def _refused(model: Transformer, why: str) -> FlopwiseError:
    return FlopwiseError(
        f"the adapters are none of {model.name}", why=why, hint="adapters of the same rank, beside the same matrices"
    )


class Merged(Mapping[str, Tensor]):
    """Tensors under transformers' names, W + scale · B·A in the place of W; each is made when it is asked for."""

    def __init__(self, model: Transformer, adapters: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
        assert model.adapters is not None
        self._scale, self._adapters, self._frozen = model.adapters.scale, adapters, frozen
        self._settings: Adapters = model.adapters
        names = NAMES[family_of(model)]
        self._places: dict[str, tuple[Parameter, int, int]] = {}
        """Name of a file → our parameter, and its first and last row there."""
        for parameter in parameters_of(replace(model, adapters=None), 1):
            place, first = place_of(model, names, parameter), 0
            for name, rows in zip(place.names, place.rows or parameter.shape[:1], strict=True):
                self._places[name] = parameter, first, first + rows
                first += rows

    def __getitem__(self, name: str) -> Tensor:
        parameter, first, last = self._places[name]
        whole = self._frozen[parameter.name][first:last]
        product = parameter.weight.module
        if parameter.role != "matrix" or product not in RESULTS:
            return whole
        chosen = [target for target in RESULTS[product] if target in self._settings.targets]
        place = [each for each, (other, _, _) in self._places.items() if other is parameter].index(name)
        target = RESULTS[product][place]
        if target not in chosen:
            return whole
        rank, layer = self._settings.rank, f"layers.{parameter.part}"
        row = chosen.index(target) * rank
        down = self._adapters[f"{layer}.{product}_{DOWN}.weight"][row : row + rank].float()
        up = self._adapters[f"{layer}.{target}_{UP}.weight"].float()
        return (whole.float() + self._scale * (up @ down)).to(whole.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def base_name(weights: Path | None, model: Transformer) -> str:
    """What a configuration says that adapters lie beside."""
    return str(weights.resolve()) if weights is not None else model.name.partition("+")[0]
