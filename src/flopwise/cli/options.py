"""From words to values: what the commands share in reading their arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, get_type_hints

import typer

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.units import parse_watts, read_option

if TYPE_CHECKING:
    from collections.abc import Collection

    from flopwise.setup.hardware import Hardware
    from flopwise.setup.setup import Setup
    from flopwise.setup.trained import TrainedWords
    from flopwise.work.model import Model

Found = TypeVar("Found")
FORMS = ("table", "md", "csv", "json")
PAGE_FORMS = (*FORMS, "html")

# -- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a command takes: every field of its own class is an option, or an argument, as it was typed."""

    given: tuple[str, ...] = ()
    """Fields that the user typed, be it with their defaults."""

    def is_given(self, field: str) -> bool:
        return field in self.given


Taken = TypeVar("Taken", bound=Options)


def takes_options(command: Callable[[Taken], None]) -> Callable[..., None]:
    """The command as typer reads it: with a parameter for every field of the options that it takes."""
    kind: type[Taken] = get_type_hints(command)["options"]
    hints = get_type_hints(kind, include_extras=True)

    @wraps(command)
    def run(context: typer.Context, **words: Any) -> None:  # noqa: ANN401 - as the fields say
        sources = {name: context.get_parameter_source(name) for name in words}
        given = tuple(name for name, source in sources.items() if source and source.name == "COMMANDLINE")
        _refuse_empty(context, {name: words[name] for name in given})
        command(kind(given=given, **words))

    parameters = [
        Parameter(
            field.name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
        if field.name != "given"
    ]
    context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    vars(run)["__signature__"] = Signature([context, *parameters])
    return run


def _refuse_empty(context: typer.Context, given: dict[str, Any]) -> None:
    """An option without a value would be taken for one that was left out."""
    for option in context.command.params:
        value = given.get(option.name or "")
        if option.param_type_name == "option" and value in ("", [""]):
            name = max(option.opts, key=len)
            raise FlopwiseError(f"{name} is empty", why="a variable was not set?", hint=f"leave {name} out")


# -- options that several commands have ------------------------------------------------------------------------------

ModelArgument = Annotated[str, typer.Argument(help="Catalogue name, config.json or its folder, or a TOML.")]
SequenceOption = Annotated[str, typer.Option(help="Tokens of a sequence: 8192, 8k.")]
BatchOption = Annotated[str, typer.Option(help="Sequences of a step, over all micro-batches.")]
MicroOption = Annotated[str, typer.Option(help="Sequences that run at once; need not divide the batch.")]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="bf16, bf16-mixed, bf16-amp, fp16-mixed, fp16-amp, fp32, tf32, fp8, mxfp8, nvfp4; changes as key=format."
    ),
]
DeviceMemoryOption = Annotated[
    str, typer.Option(help="Cap on device memory: 40GiB. Default: all but a reserve of 1 GiB.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a field of the model: --set layers=16. Repeatable.")
]
LoraOption = Annotated[
    str, typer.Option("--lora", help="Train adapters of this rank beside a frozen model: 16.", show_default=False)
]
LoraAlphaOption = Annotated[
    str, typer.Option(help="Their scale is alpha ÷ rank. Default: twice the rank.", show_default=False)
]
LoraOnOption = Annotated[
    str, typer.Option(help="Matrices that have one: all-linear, attention, mlp, or some of q,k,v,o,gate,up,down.")
]
RsloraOption = Annotated[bool, typer.Option("--rslora", help="The adapters' scale is alpha ÷ √rank.")]
DoraOption = Annotated[bool, typer.Option("--dora", help="Train the lengths of the matrices' rows too (DoRA).")]
FreezeOption = Annotated[
    str, typer.Option(help="Parts that are not trained: embedding,blocks.0-15.", show_default=False)
]
BaseOption = Annotated[
    str, typer.Option(help="Format of frozen weights: nf4, int8, fp8, bf16, fp32. Default: bf16.", show_default=False)
]
TaskOption = Annotated[
    str,
    typer.Option(help="language, masked, classification, or dpo: pairs of answers. Default: what the model is for."),
]
LossShareOption = Annotated[
    str,
    typer.Option(
        help="Share of the tokens that have a loss, for which alone the head is computed: 0.3, of conversations the "
        "answers'. Default: all; of masked language models 15 %.",
        show_default=False,
    ),
]
OutputOption = Annotated[str, typer.Option("--output", "-o", help="table, md, csv or json.")]
PriceOption = Annotated[str, typer.Option(help="What a device costs an hour, in dollars: adds tokens per dollar.")]
StoreOption = Annotated[str, typer.Option(help="Folder of runs. Default: as FLOPWISE_STORE says, else runs.")]


@dataclass(frozen=True, kw_only=True)
class SetupOptions(Options):
    """What `predict` and `plan` are asked about; where one of them takes several values, its own field says so."""

    model: ModelArgument
    on: Annotated[str, typer.Option(help="Hardware: catalogue name or TOML; this-machine.")] = "this-machine"
    power: Annotated[str, typer.Option(help="Power limit of a device: 500W; as in --on h100-sxm@500W.")] = "auto"
    gpus: Annotated[str, typer.Option(help="Devices: 8, 64, 4096.")] = "auto"
    seq: SequenceOption = "auto"
    lengths: Annotated[
        str,
        typer.Option(
            help="How long sequences are: data.csv (its column length, tokens or text; data.csv:NAME), a file of one "
            "number a line, 5,17x3,128, mean=24, or min=2,p50=17,max=66. Default: all are as long as --seq."
        ),
    ] = "auto"
    layout: Annotated[
        str,
        typer.Option(
            help="Of uneven sequences: packed (no padding), padded (to --seq), longest (to a micro-batch's longest). "
            "Default: packed on one device without a stack, else padded."
        ),
    ] = "auto"
    tokenizer: Annotated[
        str,
        typer.Option(help="tokenizer.json that says how long the texts of --lengths are; else by their characters."),
    ] = ""
    routing: Annotated[
        str,
        typer.Option(
            help="How a mixture's experts are used: balanced, power-law=0.5, busiest=1.7 (its tokens over the mean's), "
            "or a file: shares of experts, or a profile of a mixture. Default: balanced."
        ),
    ] = "auto"
    batch: BatchOption = "auto"
    batch_tokens: Annotated[str, typer.Option(help="The same in tokens: 512k, 2M.")] = "auto"
    micro: MicroOption = "auto"
    precision: PrecisionOption = "auto"
    recompute: Annotated[
        str,
        typer.Option(
            help="What backward makes again: none, selective, pointwise; all but attention, context or input; full."
        ),
    ] = "auto"
    optimizer: Annotated[str, typer.Option(help="adamw, adamw-8bit, muon, lion, sgd, sgd-momentum or adafactor.")] = (
        "adamw"
    )
    attention: Annotated[
        str,
        typer.Option(help="flash, eager, or whose kernels: flash-2, flash-3, flash-4, cudnn, …; auto: the stack's."),
    ] = "auto"
    fusion: Annotated[
        str, typer.Option(help="fused (compiled or hand-written kernels) or eager; auto: the stack's.")
    ] = "auto"
    convention: Annotated[
        str, typer.Option(help="How model FLOPs are counted: causal (half the square) or palm (6·N + full square).")
    ] = "causal"
    device_mem: DeviceMemoryOption = "auto"
    stack: Annotated[
        str,
        typer.Option(help="Training framework, by name or TOML (`flopwise ls stacks`); kernels: none in the way."),
    ] = "kernels"
    anchor: Annotated[
        str | None,
        typer.Option(
            help="A measured step to predict from: a run, a trainer's log or trace, or figure@set-up, such as "
            "'tokens_per_s_per_gpu=6667@gpus=8 seq=8k batch=16'; what is left out is as asked here.",
            show_default=False,
        ),
    ] = None
    change: SetOption = None
    lora: LoraOption = "auto"
    lora_alpha: LoraAlphaOption = "auto"
    lora_on: LoraOnOption = "auto"
    rslora: RsloraOption = False
    dora: DoraOption = False
    freeze: FreezeOption = "auto"
    task: TaskOption = "auto"
    loss_share: LossShareOption = "auto"
    base: BaseOption = "auto"
    output: Annotated[
        str,
        typer.Option("--output", "-o", help="table, md, csv, json, or html: the planner as one file."),
    ] = "table"

    def __post_init__(self) -> None:
        watts = read_option(self.power, "power", parse_watts)
        if watts is not None:
            object.__setattr__(self, "on", ",".join(f"{name.strip()}@{watts:g}W" for name in self.on.split(",")))

    def setup(
        self,
        model: Model,
        hardware: Hardware,
        *,
        name: str,
        device_mem: str,
        devices: str | None = None,
        parallel: str | None = None,
        clip: bool = False,
        cuda_graphs: bool = False,
    ) -> Setup:
        """The set-up that they say, on hardware of that `name`."""
        from flopwise.door.asking import setup_of

        return setup_of(
            model,
            hardware,
            name=name,
            seq=self.seq,
            lengths=self.lengths,
            layout=self.layout,
            tokenizer=self.tokenizer or None,
            routing=self.routing,
            batch=self.batch,
            batch_tokens=self.batch_tokens,
            micro=self.micro,
            precision=self.precision,
            base=self.base,
            recompute=self.recompute,
            optimizer=self.optimizer,
            attention=self.attention,
            fusion=self.fusion,
            device_mem=device_mem,
            devices=devices,
            parallel=parallel,
            clip=clip,
            cuda_graphs=cuda_graphs,
            stack=self.stack,
        )


METHODS = ("physical", "deepflow")
MethodOption = Annotated[
    str, typer.Option(help="physical, or deepflow: the formulas of that analytical model of 2019.")
]

# -- words to values -------------------------------------------------------------------------------------------------


def split_names(text: str, what: str) -> list[str]:
    """The names of a list with commas, at least one; `what` they name is for the error."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise FlopwiseError(f"{what} must be named", hint="`flopwise ls models` and `flopwise ls hardware` list them")
    return found


def find_hardware(name: str) -> Hardware:
    """A device of the catalogue, of a file, or of this machine."""
    from flopwise.profile.measure import this_machine

    return tell_warnings(lambda: this_machine.find_hardware(name))


def tell_warnings(look: Callable[[], Found]) -> Found:
    """What `look` finds; what was odd about it is told beside the answer."""
    from flopwise.cli.output import say

    with warnings.catch_warnings(record=True) as odd:
        warnings.simplefilter("always", UserWarning)
        found = look()
    for warning in odd:
        say(f"note: {warning.message}")
    return found


def parse_changes(texts: list[str] | None) -> dict[str, Any]:
    """`layers=16` as a TOML value; a bare word is a string."""
    import tomllib

    from flopwise.base.files import parse_toml

    changes: dict[str, Any] = {}
    for text in texts or ():
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


class TrainedOptions(Protocol):
    """Options that say what of a model is trained."""

    @property
    def lora(self) -> str: ...
    @property
    def lora_alpha(self) -> str: ...
    @property
    def lora_on(self) -> str: ...
    @property
    def rslora(self) -> bool: ...
    @property
    def dora(self) -> bool: ...
    @property
    def freeze(self) -> str: ...
    @property
    def task(self) -> str: ...


def trained_words(options: TrainedOptions, loss_share: str = "auto") -> TrainedWords:
    """What of a model is trained, as it was typed; a training knows its share of tokens with a loss by its data."""
    from flopwise.base.units import parse_count, read_word
    from flopwise.setup.trained import TrainedWords, parse_alpha
    from flopwise.setup.training import TASKS, parse_share

    return TrainedWords(
        lora=read_option(options.lora, "lora", parse_count(1, "--lora 16")),
        lora_alpha=read_option(options.lora_alpha, "lora-alpha", parse_alpha),
        lora_on=None if options.lora_on.lower() == "auto" else options.lora_on,
        rslora=options.rslora,
        dora=options.dora,
        freeze=None if options.freeze.lower() == "auto" else options.freeze,
        task=read_word(options.task, TASKS, "task"),
        loss_share=read_option(loss_share, "loss-share", parse_share),
    )


def check_target(
    path: str, option: str = "--write", example: str = "plan.toml", *, inputs: Collection[str] = ()
) -> None:
    """Refuse a file that cannot be written, or that is one of the inputs, before the work for it begins."""
    import os
    from pathlib import Path

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
