"""From words to values: what the commands share in reading their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from flopwise.base.errors import FlopwiseError
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.parallel import Parallel
    from flopwise.setup.setup import Setup
    from flopwise.setup.stack import Stack
    from flopwise.work.model import Model

    Ask = Callable[[Model, Hardware], Setup]

MOST_DIGITS = 18
Found = TypeVar("Found")
FORMS = ("table", "md", "csv", "json")

# -- options that several commands have ------------------------------------------------------------------------------

ModelArgument = Annotated[
    str, typer.Argument(help="Catalogue name, config.json or its folder, or a TOML, several with commas; or a plan.")
]
OnOption = Annotated[
    str, typer.Option(help="Hardware: catalogue name or TOML, several with commas; this-machine, this-cpu.")
]
SequenceOption = Annotated[str, typer.Option(help="Tokens of a sequence: 8192, 8k.")]
BatchOption = Annotated[str, typer.Option(help="Sequences of a step, over all micro-batches.")]
BatchTokensOption = Annotated[str, typer.Option(help="The same in tokens: 512k, 2M.")]
MicroOption = Annotated[str, typer.Option(help="Sequences that run at once; need not divide the batch.")]
PrecisionOption = Annotated[
    str,
    typer.Option(help="bf16, bf16-mixed, bf16-amp, fp16-mixed, fp16-amp, fp32, tf32, fp8; changes as key=format."),
]
RecomputeOption = Annotated[
    str, typer.Option(help="What backward makes again: none, selective, everything, attention, context, input, full.")
]
OptimizerOption = Annotated[str, typer.Option(help="adamw, lion or sgd.")]
AttentionOption = Annotated[str, typer.Option(help="flash or eager; auto: the stack's.")]
FusionOption = Annotated[
    str, typer.Option(help="fused (compiled or hand-written kernels) or eager; auto: the stack's.")
]
GpusOption = Annotated[str, typer.Option(help="Devices: 8, 64, 4096.")]
# `predict` sets several numbers side by side.
SEVERAL = "several with commas or as 1-8*2."
GpusListOption = Annotated[str, typer.Option(help=f"Devices: 8, 64; {SEVERAL}")]
SequenceListOption = Annotated[str, typer.Option(help=f"Tokens of a sequence: 8192, 8k; {SEVERAL}")]
BatchListOption = Annotated[str, typer.Option(help=f"Sequences of a step, over all micro-batches; {SEVERAL}")]
BatchTokensListOption = Annotated[str, typer.Option(help=f"The same in tokens: 512k, 2M; {SEVERAL}")]
MicroListOption = Annotated[str, typer.Option(help=f"Sequences that run at once; {SEVERAL}")]
ParallelOption = Annotated[
    str,
    typer.Option(
        help="How several devices share the work, as `flopwise plan` prints it: dp2 tp8 pp4 cp2 ep2 zero3 shard8 sp "
        "kept prefetch2 balanced chunks2 gpipe optimizer-on-host activations-on-host."
    ),
]
StackOption = Annotated[
    str, typer.Option(help="Training framework, by name or TOML (`flopwise ls stacks`); kernels: none in the way.")
]
ConventionOption = Annotated[
    str, typer.Option(help="How model FLOPs are counted: causal (half the square) or palm (6·N + full square).")
]
DeviceMemoryOption = Annotated[
    str, typer.Option(help="Cap on device memory: 40GiB. Default: all but a reserve of 1 GiB.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a field of the model: --set layers=16. Repeatable.")
]
OutputOption = Annotated[str, typer.Option("--output", "-o", help="table, md, csv or json.")]
METHODS = ("physical", "deepflow")
MethodOption = Annotated[
    str, typer.Option(help="physical, or deepflow: the formulas of that analytical model of 2019.")
]

# -- words to values -------------------------------------------------------------------------------------------------


def names(text: str, what: str) -> list[str]:
    """The names of a list with commas, at least one; `what` they name is for the error."""
    from flopwise.base.errors import FlopwiseError

    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise FlopwiseError(f"{what} must be named", hint="`flopwise ls models` and `flopwise ls hardware` list them")
    return found


def one_of(value: str, choices: Iterable[str], what: str) -> Any:  # noqa: ANN401 - one of a Literal's words
    """The word, in small letters, if it is among the choices."""
    from flopwise.base.errors import FlopwiseError, nearest, shown

    known = tuple(choices)
    if value.lower() not in known:
        close = nearest(value, known)
        raise FlopwiseError(
            f"{what} cannot be {shown(value)}",
            why=f"it is one of {', '.join(known)}",
            hint=f"{what} {close[0] if close else known[0]}",
        )
    return value.lower()


def hardware_named(name: str) -> Hardware:
    """A device of the catalogue, of a file, or of this machine."""
    from flopwise.profile.measure.this_machine import find_hardware

    return told(lambda: find_hardware(name))


def told(look: Callable[[], Found]) -> Found:
    """What `look` finds; what was odd about it is told beside the answer."""
    import warnings

    from flopwise.cli.output import say

    with warnings.catch_warnings(record=True) as odd:
        warnings.simplefilter("always", UserWarning)
        found = look()
    for warning in odd:
        say(f"note: {warning.message}")
    return found


def value_of(words: Mapping[str, Any], option: str, parse: Callable[[str], Found]) -> Found | None:
    """An option's value, None where `auto` leaves it to flopwise; a mistake in it is told with the option's name."""
    from flopwise.base.errors import FlopwiseError

    text = words[option]
    if text.lower() == "auto":
        return None
    try:
        return parse(text)
    except FlopwiseError as error:
        raise error.within(f"--{option.replace('_', '-')}") from None


def is_given(context: typer.Context, option: str) -> bool:
    """Whether the user typed the option, be it with its default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def requested(words: Mapping[str, Any]) -> Ask:
    """The options of `predict` as a set-up of any model and hardware; `auto` leaves a choice to flopwise."""
    from typing import get_args

    from flopwise.base.units import parse_sequences, parse_tokens
    from flopwise.setup.setup import Setup, batch_in_sequences
    from flopwise.setup.words import MOMENTS, Fusion
    from flopwise.work.formats import parse_formats
    from flopwise.work.op import AttentionKernel
    from flopwise.work.work import RECOMPUTE_POLICIES

    recompute = one_of(words["recompute"], ("auto", *RECOMPUTE_POLICIES), "--recompute")
    stack = _stack(words.get("stack", "kernels"))
    attention = one_of(words["attention"], ("auto", *get_args(AttentionKernel)), "--attention")
    fusion = one_of(words["fusion"], ("auto", *get_args(Fusion)), "--fusion")
    sequence = value_of(words, "seq", parse_tokens)
    sequences = value_of(words, "batch", parse_sequences)
    tokens = value_of(words, "batch_tokens", parse_tokens)
    micro = value_of(words, "micro", parse_sequences)
    formats = value_of(words, "precision", parse_formats)
    optimizer = one_of(words["optimizer"], tuple(MOMENTS), "--optimizer")
    cap = value_of(words, "device_mem", _device_bytes)
    parallel = _parallel(words.get("gpus", "auto"), words.get("parallel", "auto"))

    def ask(model: Model, hardware: Hardware) -> Setup:
        return Setup(
            model=model,
            hardware=hardware,
            sequence_tokens=sequence,
            batch_sequences=batch_in_sequences(model, sequences=sequences, tokens=tokens, sequence=sequence),
            micro_batch_sequences=micro,
            formats=formats,
            recompute=None if recompute == "auto" else recompute,
            attention=attention if attention != "auto" else stack.attention_kernel if stack else "flash",
            fusion=fusion if fusion != "auto" else stack.fusion if stack else "fused",
            optimizer=optimizer,
            device_cap_bytes=cap,
            parallel=parallel,
            stack=stack,
        )

    return ask


def set_ups(words: Mapping[str, Any]) -> list[Ask]:
    """The options of `predict` as set-ups: every combination of the numbers that are lists or ranges."""
    from itertools import product
    from math import prod

    listed = [_listed(words, option) for option in LISTS]
    count = prod(len(values) for values in listed)
    if count > MOST_SET_UPS:
        raise too_many_set_ups(count)
    return [requested({**words, **dict(zip(LISTS, values, strict=True))}) for values in product(*listed)]


def too_many_set_ups(count: int) -> FlopwiseError:
    """The error of more of them than a person reads."""
    from flopwise.base.errors import FlopwiseError

    return FlopwiseError(
        f"{count:,} set-ups", why=f"`predict` shows up to {MOST_SET_UPS:,}", hint="`flopwise sweep --predict`"
    )


MOST_SET_UPS = 1000
"""More than that is a sweep, which predicts thousands at once."""
LISTS = {"gpus": "64,256", "seq": "2k,8k", "batch": "64,256", "batch_tokens": "512k,2M", "micro": "1,2,4"}
"""Options of `predict` that may name several numbers, with an example of it."""


def _listed(words: Mapping[str, Any], option: str) -> list[str]:
    """The values of an option, each as it would be typed alone."""
    from flopwise.base.units import parse_counts, parse_devices, parse_tokens

    text, parse = words[option], parse_devices if option == "gpus" else parse_tokens
    if not any(sign in text.strip()[1:] for sign in ",*+-"):
        return [text]
    found = value_of(words, option, lambda text: parse_counts(text, parse, LISTS[option], auto=option != "gpus"))
    return list(dict.fromkeys(str(value) for value in found or ()))


def _stack(name: str) -> Stack | None:
    from flopwise.records.prediction import NO_STACK

    if name.lower() == NO_STACK:
        return None
    from flopwise.catalog.load import load_stack

    return load_stack(name)


def _parallel(gpus: str, words: str) -> Parallel:
    """The devices and how they share the work; without words they shard everything, as FSDP does."""
    from flopwise.base.errors import FlopwiseError
    from flopwise.base.units import parse_devices
    from flopwise.setup.parallel import parse_parallel, sharded

    count = value_of({"gpus": gpus}, "gpus", parse_devices)
    if words.lower() == "auto":
        return sharded(count or 1)
    try:
        return parse_parallel(words, count)
    except FlopwiseError as error:
        raise error.within("--parallel") from None


def _device_bytes(text: str) -> int:
    from flopwise.base.units import check_cap, parse_bytes

    return check_cap(parse_bytes(text), text, "device")


def changes_of(texts: list[str]) -> dict[str, Any]:
    """`layers=16` as a TOML value; a bare word is a string."""
    import tomllib

    from flopwise.base.errors import FlopwiseError, shown
    from flopwise.base.files import parse_toml

    changes: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key or not text.isprintable():
            raise FlopwiseError(
                f"cannot read --set {shown(text)}",
                why="a field, = and a value are expected, on one line",
                hint="--set layers=16",
            )
        if key in changes:
            raise FlopwiseError(
                f"--set gives {shown(key)} twice", why="one value would be lost", hint=f"keep one --set {key}=…"
            )
        try:
            changes[key] = parse_toml(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            changes[key] = value
        except (ValueError, RecursionError):
            raise FlopwiseError(
                f"cannot read --set {shown(text)}",
                why="the number has too many digits, or the lists are too deep",
                hint="--set layers=16",
            ) from None
    return changes


def check_target(
    path: str, option: str = "--write", example: str = "plan.toml", *, inputs: Collection[str] = ()
) -> None:
    """Refuse a file that cannot be written, or that is one of the inputs, before the work for it begins."""
    import os
    from pathlib import Path

    from flopwise.base.errors import FlopwiseError

    target = Path(path)
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise FlopwiseError(
            f"{option} {path} cannot be written",
            why="it is a folder" if target.is_dir() else "its folder is not there or not yours to write to",
            hint=f"{option} {example}",
        )
    read = next((name for name in inputs if target.exists() and Path(name).exists() and target.samefile(name)), None)
    if read is not None:
        raise FlopwiseError(
            f"{option} {path} would overwrite {read}",
            why="it is read from there",
            hint=f"{option} with another file, as {example}",
        )


def counted(least: int, example: str) -> Callable[[str], int]:
    """Reads whole numbers from `least` on: 100, 1_000."""
    from flopwise.base.errors import FlopwiseError, shown
    from flopwise.base.units import one_expected

    def read(text: str) -> int:
        if "," in text:
            raise one_expected(text, "a whole number")
        plain = text.strip().replace("_", "")
        if not (plain.isascii() and plain.isdecimal()) or len(plain) > MOST_DIGITS or int(plain) < least:
            raise FlopwiseError(
                f"cannot be {shown(text)}", why=f"a whole number of at least {least} is expected", hint=example
            )
        return int(plain)

    return read
