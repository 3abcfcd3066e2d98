"""From what a caller of the door hands in (names or objects, numbers or words) to what the rooms take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.units import check_cap, parse_bytes, parse_devices, parse_sequences, parse_tokens
from flopwise.catalog.load import load_model, load_stack
from flopwise.profile.measure.this_machine import find_hardware
from flopwise.records.prediction import NO_STACK
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel, parse_parallel, sharded
from flopwise.setup.setup import Setup, batch_in_sequences
from flopwise.setup.stack import Stack
from flopwise.setup.words import Fusion, Optimizer
from flopwise.work.formats import Formats, parse_formats
from flopwise.work.lstm import Lstm
from flopwise.work.model import Model
from flopwise.work.op import AttentionKernel
from flopwise.work.transformer import Transformer
from flopwise.work.work import Recompute

Quantity = int | str
"""A number, or one as the command line takes it: 8192 or "8k", 2**30 or "1GiB"."""
Read = TypeVar("Read")


def model_of(model: str | Path | Model, changes: Mapping[str, object] | None = None) -> Model:
    """A model by name, path or description; changes are made to what is loaded."""
    if changes is not None and not isinstance(changes, Mapping):
        raise FlopwiseError("changes are a mapping of fields to values", hint='changes={"layers": 2}')
    if isinstance(model, str | Path):
        return load_model(model, changes)
    if changes:
        raise FlopwiseError(
            "changes beside a description", why="they are for what is loaded", hint="dataclasses.replace(model, …)"
        )
    if not isinstance(model, Transformer | Lstm):
        raise FlopwiseError(
            f"{shown(model)} is no model", why="a name, a path or a description is", hint='fw.load_model("llama-3-8b")'
        )
    return model


def hardware_of(on: str | Path | Hardware) -> Hardware:
    """Hardware by name, path or description."""
    if isinstance(on, str | Path):
        return find_hardware(on)
    if not isinstance(on, Hardware):
        raise FlopwiseError(
            f"{shown(on)} is no hardware", why="a name, a path or a description is", hint='fw.load_hardware("h200")'
        )
    return on


def name_of(on: str | Path | Hardware) -> str:
    """What a plan calls the hardware that it is for."""
    return str(on) if isinstance(on, str | Path) else on.name


def read(value: Quantity | None, option: str, parse: Callable[[Quantity], Read]) -> Read | None:
    """A quantity, None where it is left to flopwise; a mistake in it is told with the option's name."""
    if value is None or value == "auto":
        return None
    try:
        return parse(value)
    except FlopwiseError as error:
        raise error.within(f"--{option}") from None


def memory(value: Quantity | None, place: Literal["device", "host"]) -> int | None:
    """A cap on memory; no host memory at all may be meant."""
    return read(value, f"{place}-mem", lambda given: check_cap(parse_bytes(given), str(given), place))


def setup_of(
    model: Model,
    on: str | Path | Hardware,
    *,
    seq: Quantity | None,
    batch: Quantity | None,
    batch_tokens: Quantity | None,
    precision: str | Formats | None,
    optimizer: Optimizer,
    micro: Quantity | None = None,
    recompute: Recompute | None = None,
    attention: AttentionKernel | None = None,
    fusion: Fusion | None = None,
    device_mem: Quantity | None = None,
    host_mem: Quantity | None = None,
    clip: bool = False,
    devices: Quantity | None = None,
    parallel: str | Parallel | None = None,
    stack: str | Path | Stack | None = None,
) -> Setup:
    """What `predict` and `plan` are asked; None leaves a choice to flopwise."""
    framework = _stack(stack)
    sequence = read(seq, "seq", parse_tokens)
    return Setup(
        model=model,
        hardware=hardware_of(on),
        hardware_name=name_of(on),
        sequence_tokens=sequence,
        batch_sequences=batch_in_sequences(
            model,
            sequences=read(batch, "batch", parse_sequences),
            tokens=read(batch_tokens, "batch-tokens", parse_tokens),
            sequence=sequence,
        ),
        micro_batch_sequences=read(micro, "micro", parse_sequences),
        formats=parse_formats(precision) if isinstance(precision, str) else precision,
        recompute=recompute,
        attention=attention or (framework.attention_kernel if framework else "flash"),
        fusion=fusion or (framework.fusion if framework else "fused"),
        optimizer=optimizer,
        device_cap_bytes=memory(device_mem, "device"),
        host_cap_bytes=memory(host_mem, "host"),
        clip=clip,
        parallel=_parallel(read(devices, "gpus", parse_devices), parallel),
        stack=framework,
    )


def _stack(stack: str | Path | Stack | None) -> Stack | None:
    if stack is None or stack == NO_STACK:
        return None
    return stack if isinstance(stack, Stack) else load_stack(stack)


def _parallel(devices: int | None, parallel: str | Parallel | None) -> Parallel:
    """How devices share the work; without words they shard everything, as FSDP does."""
    if isinstance(parallel, Parallel):
        return parallel
    if parallel is not None:
        return parse_parallel(parallel, devices)
    return sharded(devices or 1)


def paths_of(given: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """One path or several, as text."""
    several = [given] if isinstance(given, str | Path) else given
    return tuple(str(path) for path in several)
