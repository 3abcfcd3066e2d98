"""From what a caller of the door hands in (names or objects, numbers or words) to what the rooms take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flopwise.base.errors import FlopwiseError, one_of, shown
from flopwise.base.units import (
    AUTO,
    Quantity,
    parse_cap,
    parse_devices,
    parse_sequences,
    parse_tokens,
    parse_watts,
    read_option,
    read_word,
)
from flopwise.catalog.load import load_model, load_stack
from flopwise.predict.choose import usual_formats
from flopwise.profile.measure.this_machine import find_hardware
from flopwise.setup.efficiency import FLASH_KERNELS
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel, parse_parallel, shard_all
from flopwise.setup.power import at_power
from flopwise.setup.setup import ONE_DEVICE, Setup, batch_in_sequences, read_attention
from flopwise.setup.stack import NO_STACK, Stack
from flopwise.setup.trained import TrainedWords, check_base
from flopwise.setup.words import FUSIONS
from flopwise.work.formats import Formats, parse_formats, with_base
from flopwise.work.lengths import SEQUENCE_LAYOUTS, Lengths, SequenceLayout
from flopwise.work.lstm import Lstm
from flopwise.work.model import Model
from flopwise.work.op import ATTENTION_KERNELS
from flopwise.work.optimizers import OPTIMIZERS
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES

LengthsGiven = str | Path | Sequence[int] | Lengths
"""A file, words, lengths one by one, or their distribution."""
RoutingGiven = str | Path | Sequence[float] | Sequence[Sequence[float]]
"""How a mixture's experts are used: words, a file, or of each block their shares."""


def model_of(
    model: str | Path | Model, changes: Mapping[str, object] | None = None, trained: TrainedWords | None = None
) -> Model:
    """A model by name, path or description; changes are made to what is loaded. `trained`: what of it is."""
    found = _model_of(model, changes)
    return found if trained is None else trained.of(found)


def _model_of(model: str | Path | Model, changes: Mapping[str, object] | None) -> Model:
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


def hardware_of(on: str | Path | Hardware, power: Quantity | None = None) -> Hardware:
    """Hardware by name, path or description, under a limit of so many watts."""
    found = _hardware_of(on)
    watts = read_option(power, "power", parse_watts)
    return found if watts is None else at_power(found, watts)


def _hardware_of(on: str | Path | Hardware) -> Hardware:
    if isinstance(on, str | Path):
        return find_hardware(on)
    if not isinstance(on, Hardware):
        raise FlopwiseError(
            f"{shown(on)} is no hardware", why="a name, a path or a description is", hint='fw.load_hardware("h200")'
        )
    return on


def name_of(on: str | Path | Hardware, power: Quantity | None = None) -> str:
    """What a plan calls the hardware that it is for."""
    name = str(on) if isinstance(on, str | Path) else on.name
    watts = read_option(power, "power", parse_watts)
    return name if watts is None else f"{name}@{watts:g}W"


def setup_of(
    model: Model,
    hardware: Hardware,
    *,
    name: str,
    seq: Quantity | None = None,
    lengths: LengthsGiven | None = None,
    layout: str | None = None,
    tokenizer: str | Path | None = None,
    batch: Quantity | None = None,
    batch_tokens: Quantity | None = None,
    precision: str | Formats | None = None,
    base: str | None = None,
    optimizer: str = "adamw",
    micro: Quantity | None = None,
    recompute: str | None = None,
    attention: str | None = None,
    fusion: str | None = None,
    device_mem: Quantity | None = None,
    host_mem: Quantity | None = None,
    clip: bool = False,
    cuda_graphs: bool = False,
    devices: Quantity | None = None,
    parallel: str | Parallel | None = None,
    stack: str | Path | Stack | None = None,
    routing: RoutingGiven | None = None,
) -> Setup:
    """What `predict` and `plan` are asked, on hardware of that `name`; None and `auto` leave a choice to flopwise."""
    if routing is not None and not (isinstance(routing, str) and routing.lower() == AUTO):
        from flopwise.door.routing import with_routing

        model = with_routing(model, routing)
    framework = _stack(stack)
    sequence = read_option(seq, "seq", parse_tokens)
    spread = _parallel(read_option(devices, "gpus", parse_devices), parallel)
    usual: SequenceLayout = "packed" if framework is None and spread == ONE_DEVICE else "padded"
    uneven = _uneven(model, lengths, layout, tokenizer, sequence=sequence, usual=usual)
    word = read_word(attention, (*ATTENTION_KERNELS, *FLASH_KERNELS), "attention")
    if word and not _attends(model):
        raise FlopwiseError(
            f"--attention {word}: {model.name} has no attention",
            why="its layers carry a state instead",
            hint="leave --attention out",
        )
    kept, family = read_attention(word) if word else (framework.attention_kernel if framework else "flash", None)
    return Setup(
        model=model,
        hardware=hardware,
        hardware_name=name,
        sequence_tokens=sequence,
        lengths=uneven,
        batch_sequences=batch_in_sequences(
            model,
            sequences=read_option(batch, "batch", parse_sequences),
            tokens=read_option(batch_tokens, "batch-tokens", parse_tokens),
            sequence=sequence,
        ),
        micro_batch_sequences=read_option(micro, "micro", parse_sequences),
        formats=_formats(model, hardware, precision, base),
        recompute=read_word(recompute, RECOMPUTE_POLICIES, "recompute"),
        attention=kept,
        flash_kernel=family,
        fusion=read_word(fusion, FUSIONS, "fusion") or (framework.fusion if framework else "fused"),
        optimizer=one_of(optimizer, OPTIMIZERS, "--optimizer"),
        device_cap_bytes=read_option(device_mem, "device-mem", parse_cap("device")),
        host_cap_bytes=read_option(host_mem, "host-mem", parse_cap("host")),
        clip=clip,
        cuda_graphs=cuda_graphs,
        parallel=spread,
        stack=framework,
    )


def _uneven(
    model: Model,
    lengths: LengthsGiven | None,
    layout: str | None,
    tokenizer: str | Path | None,
    *,
    sequence: int | None,
    usual: SequenceLayout,
) -> Lengths | None:
    """How long sequences are, where they are not of one length; `usual`: how they lie where nobody says."""
    if lengths is not None and not (isinstance(lengths, str) and lengths.lower() == AUTO):
        # Only here: most questions have no use for files of data.
        from flopwise.door.lengths import lengths_of

        found = lengths_of(lengths, model, tokenizer=tokenizer, sequence=sequence)
        chosen = found.layout if isinstance(lengths, Lengths) else usual
        said = one_of(layout, SEQUENCE_LAYOUTS, "--layout") if layout is not None and _is_said(layout) else chosen
        return replace(found, layout=said)
    for name, value in (("layout", layout), ("tokenizer", tokenizer)):
        if _is_said(value):
            raise FlopwiseError(
                f"--{name} without --lengths", why="sequences of one length have no padding", hint="--lengths data.csv"
            )
    return None


def _attends(model: Model) -> bool:
    if not isinstance(model, Transformer):
        return False
    return not model.has_kinds or len(model.recurrent_blocks) + len(model.feed_blocks) < model.layers


def _is_said(value: object) -> bool:
    return value is not None and str(value).lower() not in ("", AUTO)


def _formats(model: Model, hardware: Hardware, precision: str | Formats | None, base: str | None) -> Formats | None:
    """The formats that are asked for, be it of frozen weights alone; None: as usual."""
    found = precision if isinstance(precision, Formats) else read_option(precision, "precision", parse_formats)
    kept = read_option(base, "base", str.lower)
    check_base(model, kept)
    return found if kept is None else with_base(found or usual_formats(hardware, model), kept)


def _stack(stack: str | Path | Stack | None) -> Stack | None:
    if stack is None or str(stack).lower() == NO_STACK:
        return None
    return stack if isinstance(stack, Stack) else load_stack(stack)


def _parallel(devices: int | None, parallel: str | Parallel | None) -> Parallel:
    """How devices share the work; without words they shard everything, as FSDP does."""
    if isinstance(parallel, Parallel):
        return parallel
    return read_option(parallel, "parallel", lambda words: parse_parallel(words, devices)) or shard_all(devices or 1)


def paths_of(given: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """One path or several, as text."""
    several = [given] if isinstance(given, str | Path) else given
    return tuple(str(path) for path in several)
