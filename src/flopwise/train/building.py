"""Executors by plan, and the numbers that they begin with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.engine.devices import choose_device
from flopwise.engine.executor import Executor
from flopwise.engine.launch import Group, Rank
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.engine.weights.adapter_files import first_magnitudes, from_peft
from flopwise.engine.weights.checkpoint import ADAPTERS, LazyTensors
from flopwise.engine.weights.finite import not_finite
from flopwise.engine.weights.huggingface import from_huggingface
from flopwise.engine.weights.initial import all_initial_values
from flopwise.engine.weights.mxfp4 import BLOCKS, SCALES
from flopwise.engine.weights.tensor_files import open_tensors
from flopwise.engine.weights.weight_files import weight_files
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.plan import Plan
from flopwise.records.program import Program
from flopwise.setup.training import Training
from flopwise.work.parameters import is_of_adapter
from flopwise.work.transformer import Transformer


def rank_group(rank: Rank, device: str) -> AbstractContextManager[object]:
    """Joins the ranks of a training."""
    return Group(rank, choose_device(device))


def build_executor(
    plan: Plan | ClusterPlan,
    program: Program | None,
    model: Transformer,
    training: Training,
    *,
    device: str,
    rank: Rank,
    deterministic: bool,
) -> Executor:
    """The executor for a plan: streaming on one device, sharding over several."""
    if deterministic:
        torch.use_deterministic_algorithms(True)
    if isinstance(plan, ClusterPlan):
        place = torch.device(device, rank.local_rank) if device == "cuda" else torch.device("cpu")
        # Torch's tensors of several ranks take most of a second to import.
        from flopwise.engine.sharded.distributed import DistributedExecutor

        return DistributedExecutor(plan, model, training, device=place, rank=rank.rank, world=rank.world)
    assert program is not None
    return StreamingExecutor(plan, program, model, training, device=torch.device(device), deterministic=deterministic)


def first_weights(
    executor: Executor, model: Transformer, seed: int, folder: Path | None, sequence_tokens: int
) -> tuple[str, ...]:
    """Draw every parameter, or take them from a folder; returns those that the folder did not have."""
    missing = {parameter.name for parameter in executor.parameters}
    beside: set[str] = set()
    if folder is not None:
        tensors = FolderTensors(folder)
        if missing <= set(tensors):
            # A checkpoint of ours, of a model that transformers has no class for.
            _check_shapes(executor, tensors)
            _check_finite(tensors, ((parameter.name, tensors[parameter.name]) for parameter in executor.parameters))
            executor.set_weights(tensors)
            missing = set()
        else:

            def take(name: str, values: Tensor) -> None:
                _check_finite(tensors, [(name, values)])
                executor.set_weights({name: values})

            drawn_anew = set(from_huggingface(model, tensors, sequence_tokens, take).missing)
            beside = {parameter.name for parameter in executor.parameters if is_of_adapter(parameter)}
            missing = drawn_anew | beside
    drawn = (parameter for parameter in executor.parameters if parameter.name in missing)
    for parameter, values in all_initial_values(drawn, seed, model.layers):
        executor.set_weights({parameter.name: values})
    if model.adapters is not None and model.adapters.magnitudes:
        for name, lengths in first_magnitudes(model, executor.row_lengths):
            executor.set_weights({name: lengths})
    return () if folder is None else tuple(sorted(name for name in missing if name not in beside))


def begin_with_adapters(executor: Executor, model: Transformer, folder: Path) -> None:
    """Adapters that PEFT or flopwise saved, in the place of first ones."""
    path = folder / ADAPTERS
    if not path.is_file():
        raise FlopwiseError(
            f"{folder} holds no {ADAPTERS}",
            why="adapters are read from safetensors files, and from nothing that runs code when it is read",
            hint="`save_pretrained` of today's PEFT writes one",
        )
    found = from_peft(model, LazyTensors(path))
    bad = not_finite(found.items())
    if bad:
        raise FlopwiseError(f"{bad[0]} in {path} is not finite", why="every loss would be NaN", hint="other adapters")
    executor.set_weights(found)


def _check_shapes(executor: Executor, tensors: Mapping[str, Tensor]) -> None:
    for parameter in executor.parameters:
        shape = tuple(tensors[parameter.name].shape)
        if shape != parameter.shape:
            raise FlopwiseError(
                f"{parameter.name} is {shape} in the weights and {parameter.shape} in the model",
                hint="the model that the weights were saved from",
            )


def _check_finite(folder: FolderTensors, taken: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that no training can begin with; what a folder holds beside them may be anything."""
    if not_finite(taken):
        name, path = folder.first_not_finite()
        raise FlopwiseError(
            f"{name} in {path} is not finite",
            why="it holds NaN or infinity, and every loss would be NaN",
            hint="other weights: those of a training that diverged are good up to an earlier checkpoint",
        )


class FolderTensors(Mapping[str, Tensor]):
    """Tensors of all safetensors files of a folder by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._places: dict[str, Path] = {}
        for path in weight_files(folder):
            try:
                with open_tensors(path) as opened:
                    names = list(opened.keys())
            except (OSError, SafetensorError) as error:
                raise FlopwiseError(
                    f"{path} cannot be read", why=str(error), hint="fetch the file again; it may be cut short"
                ) from None
            twice = [name for name in names if name in self._places]
            if twice:
                raise FlopwiseError(
                    f"{twice[0]} is in {self._places[twice[0]].name} and in {path.name}",
                    why="it is not clear which one is meant",
                    hint="a folder with the weights of one model",
                )
            self._places.update(dict.fromkeys(names, path))

    def __getitem__(self, name: str) -> Tensor:
        with open_tensors(self._places[name]) as opened:
            found: Tensor = opened.get_tensor(name)
        # Matrices in MXFP4 are read by who knows that form.
        if not name.endswith((BLOCKS, SCALES)) and (not found.is_floating_point() or found.dtype.itemsize == 1):
            raise FlopwiseError(
                f"{name} holds {str(found.dtype).removeprefix('torch.')}, which are quantised weights",
                why="what they are scaled by is not read, and they cannot be trained",
                hint="the model's weights in bf16 or fp32",
            )
        return found

    def first_not_finite(self) -> tuple[str, Path]:
        """The first tensor that holds NaN or infinity, and its file; there must be one."""
        for name, path in self._places.items():
            with open_tensors(path) as opened:
                if not_finite([(name, opened.get_tensor(name))]):
                    return name, path
        raise AssertionError("all are finite")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
