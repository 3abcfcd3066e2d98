"""Adapters as PEFT writes and reads them: `adapter_config.json` and `adapter_model.safetensors`; and merged away.

PEFT has a pair of matrices for each linear layer of transformers, and for DoRA a vector of magnitudes. Where our
product makes the results of several, its matrix A has theirs below each other; where one layer has several of our
results, its matrix B and its magnitudes are ours below each other. Each expert of a mixture has layers of its own, as
it has in the files of weights; where these have all experts in one parameter (gpt-oss), PEFT has one for all: every A
below the other, every B with the expert as its last side, and the second parameter's wrapped around the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.engine.weights.huggingface import Place, latent_rows, names_of, place_of
from flopwise.work.adapters import DOWN, GROUPS, LATENTS, MAGNITUDE, RESULTS, UP, Adapters, Target
from flopwise.work.layer_names import layer_names, products_of, shortest_names, targets_of
from flopwise.work.parameters import Parameter, parameters_of
from flopwise.work.product_ops import SHARED, split_prefix
from flopwise.work.transformer import Transformer

PREFIX = "base_model.model."
MAGNITUDES = "lora_magnitude_vector"
"""PEFT's name of a layer's magnitudes."""
TASK_TYPES = {"language": "CAUSAL_LM", "classifier": "SEQ_CLS"}
"""PEFT's words for what a head is for."""
EXPERT_NUMBER = "{}"
"""Where the name of a layer has the number of an expert."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One of transformers' layers that has an adapter: which of our matrices its two are."""

    name: str
    """Within its block."""
    product: str
    targets: tuple[str, ...]
    """Whose second matrices lie below each other in its one."""
    first: int
    """Its first matrix' first row in ours."""

    inner: bool = False
    """Of a parameter that has all experts: whether another one's is wrapped around it."""
    stacked: bool = False
    """Whether it is such a parameter."""

    @property
    def of_experts(self) -> bool:
        """Whether each expert of a mixture has one."""
        return EXPERT_NUMBER in self.name

    def key(self, layers: str, block: int) -> str:
        """What its tensors' names begin with."""
        name = self.name.rpartition(".")[0] + (".base_layer" if self.inner else "") if self.stacked else self.name
        return f"{PREFIX}{layers}.{block}.{name}"


def _layers(model: Transformer, block: int) -> list[_Layer]:
    """The layers of a block that have an adapter."""
    kind, shared = model.kind_of(block), names_of(model).shared
    if kind.adapters is None:
        return []
    found = _layers_of(kind, layer_names(kind), "")
    stacked = [layer for layer in found if kind.experts and layer.name in names_of(model).stacked.values()]
    if stacked:
        found = [layer for layer in found if layer not in stacked]
        found += [replace(layer, stacked=True, inner=layer is not stacked[-1]) for layer in stacked]
    if kind.shared_ffn:
        found += _layers_of(kind, {target: f"{shared}.{target}_proj" for target in GROUPS["mlp"]}, SHARED)
    return found


def _layers_of(kind: Transformer, names: Mapping[Target, str], prefix: str) -> list[_Layer]:
    """Those of these names; `prefix`: of our names of them."""
    assert kind.adapters is not None
    found: list[_Layer] = []
    for product in products_of(kind):
        chosen = [target for target in targets_of(kind, product) if target in kind.adapters.targets and target in names]
        for place, name in enumerate(dict.fromkeys(names[target] for target in chosen)):
            targets = tuple(f"{prefix}{target}" for target in chosen if names[target] == name)
            found.append(_Layer(name, f"{prefix}{product}", targets, place * kind.adapters.rank))
    return found


def _target_modules(model: Transformer) -> list[str]:
    """PEFT's words for the layers that have adapters, which name no others."""
    names, blocks = names_of(model), range(model.layers)
    chosen = list(dict.fromkeys(layer.name for block in blocks for layer in _layers(model, block) if not layer.stacked))
    known = dict.fromkeys(name for kind in model.kinds for name in layer_names(kind).values())
    others = [name for name in known if name not in chosen]
    found = shortest_names(chosen, [*others, *names.ends.values()])
    if found is None:
        places = [(block, [layer.name for layer in _layers(model, block)]) for block in blocks]
        return [f"{names.layers}.{block}.{each}" for block, own in places for each in _each(model, own)]
    return found


def _target_parameters(model: Transformer, adapted: Iterable[int]) -> list[str] | None:
    """PEFT's words for parameters of all experts that have adapters: for all blocks, or by block."""
    chosen = [(block, layer.name) for block in adapted for layer in _layers(model, block) if layer.stacked]
    if not model.frozen_layers:
        return list(dict.fromkeys(name for _, name in chosen)) or None
    return [f"{names_of(model).layers}.{block}.{name}" for block, name in chosen] or None


def _each(model: Transformer, names: Iterable[str]) -> Iterator[str]:
    """Layers' names, of a mixture's those of each expert."""
    for name in names:
        if EXPERT_NUMBER in name:
            yield from (name.format(expert) for expert in range(model.experts))
        else:
            yield name


def adapter_config(model: Transformer, base: str | None) -> dict[str, Any]:
    """PEFT's configuration; `base`: the model's folder or name."""
    adapters = model.adapters
    assert adapters is not None
    adapted = sorted({*range(model.layers)} - model.frozen_layers)
    return {
        "peft_type": "LORA",
        "task_type": TASK_TYPES.get(model.head),
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(model),
        "target_parameters": _target_parameters(model, adapted),
        "bias": "none",
        # GPT-2 keeps its matrices with the inputs as rows.
        "fan_in_fan_out": names_of(model).transposed,
        "init_lora_weights": True,
        "use_rslora": adapters.rank_stabilised,
        "use_dora": adapters.magnitudes,
        "modules_to_save": list(dict.fromkeys(_head_module(model, each) for each in head_parameters(model))) or None,
        "layers_to_transform": adapted if len(adapted) < model.layers else None,
        # Told where it is needed: an expert's number would pass for that of its block.
        "layers_pattern": names_of(model).layers.rpartition(".")[2] if len(adapted) < model.layers else None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def head_parameters(model: Transformer) -> dict[str, Parameter]:
    """A classifier's head, which is trained beside adapters: by the names that files have of it."""
    names = names_of(model)
    trained = (each for each in parameters_of(model, 1) if each.part == "head" and each.trained)
    return {place_of(model, names, each).names[0]: each for each in trained}


def _head_module(model: Transformer, name: str) -> str:
    """The module that PEFT saves whole, of a parameter of the head: the first below that of the network without one."""
    network = names_of(model).layers.partition(".")[0]
    return name.removeprefix(f"{network}.").partition(".")[0]


def _place(model: Transformer, layer: _Layer) -> Place:
    """How the rows of a layer's second matrix lie in a file."""
    if model.latent is not None and layer.product in ("latents", "query_up", "latent_up"):
        heads = None if layer.targets[0] in LATENTS else latent_rows(model, of_queries=layer.product != "latent_up")
        return Place((layer.name,), order=heads)
    together = names_of(model).heads_together and layer.product == "qkv"
    return Place((layer.name,), groups=(model.kv_heads, model.head_dim) if together else None)


def to_peft(model: Transformer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters under our names as PEFT's."""
    assert model.adapters is not None
    rank, found = model.adapters.rank, dict[str, Tensor]()
    for block in range(model.layers):
        for layer in _layers(model, block):
            ours, own = f"layers.{block}", layer.key(names_of(model).layers, block)
            down = tensors[f"{ours}.{layer.product}_{DOWN}.weight"][..., layer.first : layer.first + rank, :]
            ups = [tensors[f"{ours}.{target}_{UP}.weight"] for target in layer.targets]
            if layer.stacked:
                found[f"{own}.lora_{DOWN}.weight"] = down.flatten(0, -2)
                found[f"{own}.lora_{UP}.weight"] = _stack(ups)
                continue
            if layer.of_experts:
                found |= _by_expert(f"{own}.lora_{DOWN}.weight", down, model.experts)
                found |= _by_expert(f"{own}.lora_{UP}.weight", ups[0], model.experts)
                continue
            found[f"{own}.lora_{DOWN}.weight"] = down
            found[f"{own}.lora_{UP}.weight"] = _as_one(model, layer, ups)
            if model.adapters.magnitudes:
                lengths = [tensors[f"{ours}.{target}_{MAGNITUDE}.weight"] for target in layer.targets]
                found[f"{own}.{MAGNITUDES}"] = _as_one(model, layer, lengths)
    return found | {f"{PREFIX}{name}": tensors[each.name] for name, each in head_parameters(model).items()}


def _stack(ups: list[Tensor]) -> Tensor:
    """Matrices B of all experts as one: a row for each result, gate and up in turns, of each rank all experts."""
    # (results, experts, rows, rank), of a single expert without its side.
    each = torch.stack([up if up.ndim == 3 else up[None] for up in ups])
    return each.permute(2, 0, 3, 1).flatten(0, 1).flatten(1)


def _unstack(whole: Tensor, results: int, lower: tuple[int, ...]) -> Iterable[Tensor]:
    """The same apart; `lower`: the shape of our matrices A."""
    *experts, rank, _ = lower
    by_result = whole.view(-1, results, rank, experts[0] if experts else 1).permute(1, 3, 0, 2)
    return [each.contiguous() if experts else each[0].contiguous() for each in by_result]


def _as_one(model: Transformer, layer: _Layer, parts: list[Tensor]) -> Tensor:
    """What our results of a layer have, in the order of its own rows."""
    return _place(model, layer).split(torch.cat(parts) if len(parts) > 1 else parts[0])[layer.name]


def _by_expert(name: str, value: Tensor, experts: int) -> dict[str, Tensor]:
    """One tensor for all experts as one for each; of a single expert it has no dimension for the expert."""
    return {name.format(expert): value[expert] if value.ndim == 3 else value for expert in range(experts)}


def _of_experts(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts) if len(parts) > 1 else parts[0]


def from_peft(model: Transformer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's adapters under our names; what is missing, too much or of another shape is refused."""
    left, found, downs = set(tensors), dict[str, Tensor](), dict[str, list[Tensor]]()
    shapes = {parameter.name: parameter.shape for parameter in parameters_of(model, 1)}
    for block in range(model.layers):
        for layer in _layers(model, block):
            ours, own = f"layers.{block}", layer.key(names_of(model).layers, block)
            wanted = [[*_each(model, [f"{own}.lora_{side}.weight"])] for side in (DOWN, UP)]
            missing = [name for side in wanted for name in side if name not in left]
            if missing:
                raise _refused(model, f"there is no {missing[0]}")
            left -= {name for side in wanted for name in side}
            down, up = (_alike(model, [tensors[name] for name in side], side[0]) for side in wanted)
            if layer.stacked:
                names = [f"{ours}.{target}_{UP}.weight" for target in layer.targets]
                shape = shapes[f"{ours}.{layer.product}_{DOWN}.weight"]
                outputs = sum(shapes[name][-2] for name in names)
                sides = ((prod(shape[:-1]), shape[-1]), (outputs, prod(shape[:-1])))
                for side, each, expected in zip(wanted, (down, up), sides, strict=True):
                    if tuple(each.shape) != expected:
                        raise _refused(model, f"{side[0]} is {tuple(each.shape)} and not {expected}")
                found[f"{ours}.{layer.product}_{DOWN}.weight"] = down.view(shape)
                found |= zip(names, _unstack(up, len(names), shape), strict=True)
                continue
            downs.setdefault(f"{ours}.{layer.product}_{DOWN}.weight", []).append(down)
            names = [f"{ours}.{target}_{UP}.weight" for target in layer.targets]
            if layer.of_experts:
                found[names[0]] = up
                continue
            rows = [shapes[name][0] for name in names]
            found |= zip(names, _apart(model, layer, up, rows, name=wanted[1][0]), strict=True)
            if model.adapters is not None and model.adapters.magnitudes:
                name = f"{own}.{MAGNITUDES}"
                if name not in left:
                    raise _refused(model, f"there is no {name}")
                left.discard(name)
                lengths = [f"{ours}.{target}_{MAGNITUDE}.weight" for target in layer.targets]
                found |= zip(lengths, _apart(model, layer, tensors[name], rows, name=name), strict=True)
    found |= {name: _below_each_other(model, name, parts) for name, parts in downs.items()}
    found |= _head_of(model, tensors, left)
    if left:
        raise _refused(model, f"{min(left)} belongs to no adapter of it")
    for name, value in found.items():
        if tuple(value.shape) != shapes[name]:
            raise _refused(model, f"{name} would be {tuple(value.shape)}")
    return found


def _head_of(model: Transformer, tensors: Mapping[str, Tensor], left: set[str]) -> dict[str, Tensor]:
    """A classifier's head, as far as it was saved: by PEFT's default it is the last layer alone that is."""
    found = {}
    for name, parameter in head_parameters(model).items():
        if f"{PREFIX}{name}" in left:
            left.discard(f"{PREFIX}{name}")
            found[parameter.name] = tensors[f"{PREFIX}{name}"]
        elif parameter.weight.module == "classifier":
            raise _refused(model, f"there is no {PREFIX}{name}")
    return found


def _apart(model: Transformer, layer: _Layer, whole: Tensor, rows: list[int], *, name: str) -> Iterable[Tensor]:
    """What a layer's rows are, as those of our results."""
    if whole.shape[:1] != (sum(rows),):
        raise _refused(model, f"{name} is {tuple(whole.shape)} and not of {sum(rows):,} rows")
    return torch.split(_place(model, layer).join([whole]), rows)


def _alike(model: Transformer, parts: list[Tensor], name: str) -> Tensor:
    """What experts have of a matrix, as one tensor."""
    if len({part.shape for part in parts}) > 1:
        raise _refused(model, f"{name} has another shape than those of other experts")
    return _of_experts(parts)


def _below_each_other(model: Transformer, name: str, parts: list[Tensor]) -> Tensor:
    if len({(part.ndim, part.shape[-1]) for part in parts}) > 1 or parts[0].ndim < 2:
        raise _refused(model, f"what would be {name} has parts of other shapes")
    return torch.cat(parts, -2)


def _refused(model: Transformer, why: str) -> FlopwiseError:
    return FlopwiseError(
        f"the adapters are none of {model.name}", why=why, hint="adapters of the same rank, beside the same matrices"
    )


class Merged(Mapping[str, Tensor]):
    """Tensors under transformers' names, W + scale · B·A in the place of W, or DoRA's; each is made when asked for."""

    def __init__(self, model: Transformer, adapters: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
        assert model.adapters is not None
        self._settings: Adapters = model.adapters
        self._adapters, self._frozen = adapters, frozen
        layers = [layer for block in range(model.layers) for layer in _layers(model, block)]
        self._lows = {target: (layer.product, layer.first) for layer in layers for target in layer.targets}
        """Matrix → our product of it, and its first matrix' first row there."""
        self._model = model
        names = names_of(model)
        self._places: dict[str, tuple[Parameter, Place]] = {}
        """Name of a file → our parameter, and how it lies there."""
        for parameter in parameters_of(replace(model, adapters=None), 1):
            place = place_of(model, names, parameter)
            self._places |= dict.fromkeys(place.names, (parameter, place))
        self._last: tuple[str, dict[str, Tensor]] = "", {}
        """The parameter that was asked for last: its tensors follow each other."""

    def __getitem__(self, name: str) -> Tensor:
        parameter, place = self._places[name]
        if self._last[0] != parameter.name:
            self._last = parameter.name, place.split(self._merged(parameter))
        return self._last[1][name]

    def _merged(self, parameter: Parameter) -> Tensor:
        if parameter.name in self._adapters:
            return self._adapters[parameter.name]
        whole = self._frozen[parameter.name]
        prefix, product = split_prefix(parameter.weight.module)
        if not isinstance(parameter.part, int) or parameter.role != "matrix" or product not in RESULTS:
            return whole
        kind = self._model.kind_of(parameter.part)
        targets = [f"{prefix}{target}" for target in targets_of(kind, product)]
        if kind.adapters is None or not {*targets} & {*self._lows}:
            return whole
        widths = _widths(kind)
        rows = torch.split(whole, [widths[target] for target in targets], -2)
        layer = f"layers.{parameter.part}"
        return torch.cat([self._sum(part, layer, target) for part, target in zip(rows, targets, strict=True)], -2)

    def _sum(self, part: Tensor, layer: str, target: str) -> Tensor:
        """Some rows of a product's matrix, with their adapter."""
        if target not in self._lows:
            return part
        product, first = self._lows[target]
        down = self._adapters[f"{layer}.{product}_{DOWN}.weight"][..., first : first + self._settings.rank, :].float()
        up = self._adapters[f"{layer}.{target}_{UP}.weight"].float()
        merged = part.float() + self._settings.scale * (up @ down)
        if self._settings.magnitudes:
            lengths = self._adapters[f"{layer}.{target}_{MAGNITUDE}.weight"].float()
            merged *= (lengths / row_norms(merged))[:, None]
        return merged.to(part.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def row_norms(matrix: Tensor) -> Tensor:
    """The length of each row; of zeros the least number there is, as the executor has it."""
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms.clamp_(min=torch.finfo(matrix.dtype).tiny)


def first_magnitudes(model: Transformer, lengths_of: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """DoRA's magnitudes before anything is learned: the lengths of the frozen matrices' rows, told by name."""
    for block in range(model.layers):
        for layer in _layers(model, block):
            kind, (prefix, product) = model.kind_of(block), split_prefix(layer.product)
            widths, targets = _widths(kind), [f"{prefix}{target}" for target in targets_of(kind, product)]
            lengths = lengths_of(f"layers.{block}.{layer.product}.weight")
            parts = dict(zip(targets, torch.split(lengths, [widths[target] for target in targets]), strict=True))
            for target in layer.targets:
                yield f"layers.{block}.{target}_{MAGNITUDE}.weight", parts[target]


def _widths(kind: Transformer) -> dict[str, int]:
    """Rows of each of a block's matrices that may have an adapter."""
    feeds = {"": kind.ffn, SHARED: kind.shared_ffn}
    inner = {f"{prefix}{target}": width for prefix, width in feeds.items() for target in ("gate", "up")}
    outer = {f"{prefix}down": kind.hidden for prefix in feeds}
    heads = {"q": kind.query_width, "k": kind.kv_width, "v": kind.value_width, "o": kind.hidden}
    if kind.latent is not None:
        turned = kind.turned_channels
        heads |= {"q_a": kind.latent.query_rank, "kv_a": kind.latent.rank, "kv_turned": turned}
        heads["k"] = kind.kv_width - kind.kv_heads * turned
    return {**heads, **inner, **outer}


def base_name(weights: Path | None, model: Transformer) -> str:
    """What a configuration says that adapters lie beside."""
    return str(weights.resolve()) if weights is not None else model.name.partition("+")[0]
