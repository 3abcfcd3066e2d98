"""A question as a page asks it: a few words, each of a known name, that lead to the same functions as a command line.

Nothing in it is ever a path: models, hardware and frameworks are those of the catalogue, or a model is the text of a
`config.json` itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from flopwise.base.errors import FlopwiseError, one_of, shown
from flopwise.base.units import AUTO, parse_count, parse_devices, read_option
from flopwise.catalog.load import (
    hardware_aliases,
    hardware_names,
    load_hardware,
    load_model,
    model_from_table,
    model_names,
    stack_aliases,
    stack_names,
)
from flopwise.door.asking import setup_of
from flopwise.door.intervals import predict_step
from flopwise.door.planning import plan_cluster, plan_under_caps
from flopwise.plan.cluster.answer import answer
from flopwise.predict.choose import capacity_bytes
from flopwise.records.cluster_plan import PlannedCluster
from flopwise.records.plan import Planned
from flopwise.records.prediction import Prediction
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import Setup
from flopwise.setup.stack import NO_STACK
from flopwise.setup.trained import TrainedWords
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer

LONGEST_WORD = 100
LONGEST_CONFIG = 48 * 1024
"""Signs of a `config.json`; the longest of the hub, with thousands of labels, are beyond it."""
CONFIG_NAME = "config.json"
"""What a dropped configuration is called in a command line."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Words as they would be typed; `auto` leaves a choice to flopwise."""

    model: str = "llama-3-8b"
    config: str = ""
    """The text of a Hugging Face `config.json`, in the place of a catalogue's name."""
    on: str = "h200"
    gpus: str = "1"
    seq: str = AUTO
    batch: str = AUTO
    batch_tokens: str = AUTO
    micro: str = AUTO
    precision: str = AUTO
    recompute: str = AUTO
    optimizer: str = "adamw"
    stack: str = NO_STACK
    device_mem: str = AUTO
    host_mem: str = AUTO
    lora: str = AUTO
    base: str = AUTO

    @property
    def devices(self) -> int:
        return read_option(self.gpus, "gpus", parse_devices) or 1

    @property
    def own(self) -> bool:
        """Whether flopwise itself runs the plan: one device, and no word of a framework's."""
        return self.devices == 1 and not any(self.is_said(name) for name in OF_FRAMEWORKS)

    def is_said(self, name: str) -> bool:
        return str(getattr(self, name)).lower() != str(DEFAULTS[name]).lower()


DEFAULTS = {field.name: field.default for field in fields(Question)}
OF_FRAMEWORKS = ("micro", "recompute", "stack")
"""Words of set-ups that a framework runs."""


def read_question(words: Iterable[tuple[str, str]]) -> Question:
    """The question of a request's names and values; what is not known is refused, never left out."""
    found: dict[str, str] = {}
    for name, value in words:
        if name not in DEFAULTS:
            raise FlopwiseError(f"{shown(name)} is no word of a question", hint=f"one of {', '.join(DEFAULTS)}")
        if name in found:
            raise FlopwiseError(f"{name} is given twice", why="one value would be lost", hint=f"one {name}")
        longest = LONGEST_CONFIG if name == "config" else LONGEST_WORD
        if len(value) > longest:
            raise FlopwiseError(f"{name} is too long", why=f"at most {longest:,} signs are read", hint="a shorter one")
        found[name] = value
    question = Question(**found)
    if not question.config:
        _check_name("model", question.model, model_names())
    _check_name("hardware", question.on, (*hardware_names(), *hardware_aliases()))
    _check_name("framework", question.stack, (NO_STACK, *stack_names(), *stack_aliases()))
    return question


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Refuse what is not in the catalogue: a page never names a file."""
    if name.lower() not in known:
        raise FlopwiseError(
            f"{shown(name)} is no {what} of the catalogue",
            why="a page asks for no files",
            hint="drop a config.json on the page, or use the command line" if what == "model" else "one of the list",
        )


# -- asked -----------------------------------------------------------------------------------------------------------


def model_asked(question: Question) -> Model:
    """The description, of the catalogue or of the text that was dropped, with what of it is trained."""
    trained = TrainedWords(lora=read_option(question.lora, "lora", parse_count(1, "--lora 16")))
    return trained.of(_described(question.config) if question.config else load_model(question.model))


def _described(text: str) -> Model:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise FlopwiseError(f"this {CONFIG_NAME} cannot be read", why="it is no JSON object", hint="one of the hub")
    called = table.get("_name_or_path")
    # What it was called where it was saved: of a folder the last name alone.
    name = called.replace("\\", "/").rstrip("/").rpartition("/")[2] if isinstance(called, str) else ""
    return model_from_table(table, f"{name[:LONGEST_WORD] or 'dropped'}/{CONFIG_NAME}")


def hardware_asked(question: Question) -> Hardware:
    return load_hardware(question.on)


def setup_asked(question: Question, *, spread: bool = True) -> Setup:
    """The set-up that it says; without `spread` how the devices share the work is what is looked for."""
    return setup_of(
        model_asked(question),
        hardware_asked(question),
        name=question.on,
        seq=question.seq,
        batch=question.batch,
        batch_tokens=question.batch_tokens,
        micro=question.micro,
        precision=question.precision,
        base=question.base,
        optimizer=one_of(question.optimizer, ("adamw", "lion", "sgd"), "--optimizer"),
        recompute=question.recompute,
        device_mem=question.device_mem,
        host_mem=question.host_mem if question.own else None,
        devices=question.gpus if spread else None,
        stack=question.stack,
    )


def predict_question(question: Question) -> Prediction:
    """What `flopwise predict` answers."""
    return predict_step(setup_asked(question), "causal")


def whole_device(question: Question) -> int:
    """What the device has for a training where nobody sets a cap."""
    return capacity_bytes(setup_asked(replace(question, device_mem=AUTO)))


def plan_question(question: Question) -> Planned | PlannedCluster:
    """What `flopwise plan` answers: a schedule for one device, or a strategy for several."""
    setup = setup_asked(question, spread=False)
    if question.own and isinstance(setup.model, Transformer):
        return plan_under_caps(setup, convention="causal")
    if question.is_said("host_mem"):
        raise FlopwiseError(
            "--host-mem beside a framework's options",
            why="it is for one device that flopwise itself runs",
            hint="one device, with recompute, micro-batch and framework left open",
        )
    return plan_cluster(setup, answer(setup, question.devices), convention="causal")


# -- around it -------------------------------------------------------------------------------------------------------

Change = dict[str, str]


def elsewhere(question: Question) -> list[tuple[str, Prediction | FlopwiseError]]:
    """The same on every device of the catalogue, as `predict` answers; without a cap, which was for one device."""
    found: list[tuple[str, Prediction | FlopwiseError]] = []
    for name in hardware_names():
        asked = replace(question, on=name, device_mem=question.device_mem if name == question.on else AUTO)
        try:
            found.append((name, predict_question(asked)))
        except FlopwiseError as error:
            found.append((name, error))
    return found


def nearby(question: Question, seen: Prediction) -> list[tuple[Change, Prediction]]:
    """Predictions of what people change next; a change that cannot be made is left out."""
    found = []
    for change in _changes(question, seen):
        try:
            found.append((change, predict_question(replace(question, **change))))
        except FlopwiseError:
            # No peak in that format, nothing that divides, no such model with adapters.
            continue
    return found


def _changes(question: Question, seen: Prediction) -> Iterable[Change]:
    tokens = seen.sequence_tokens
    yield {"precision": "bf16" if seen.precision.startswith("fp8") else "fp8"}
    if not seen.fits:
        yield from ({"recompute": "full"}, {"optimizer": "lion"}, {"lora": "16"}, {"lora": "16", "base": "nf4"})
        yield {"seq": str(max(1, tokens // 2))}
    elif seen.recompute != "none":
        yield {"recompute": "none"}
    yield {"gpus": str(2 * seen.devices)}
    yield {"batch": str(2 * seen.batch_sequences), "batch_tokens": AUTO}
    if question.is_said("device_mem"):
        yield {"device_mem": AUTO}


# -- as a command ----------------------------------------------------------------------------------------------------

OPTIONS = tuple(name for name in DEFAULTS if name not in ("model", "config", "on"))


def command(question: Question, verb: str, *, write: str = "") -> str:
    """The line that asks the same in a terminal."""
    said = [name for name in OPTIONS if question.is_said(name) and (name != "host_mem" or verb == "plan")]
    words = [CONFIG_NAME if question.config else question.model, "--on", question.on]
    for name in said:
        words += [f"--{name.replace('_', '-')}", str(getattr(question, name))]
    if write:
        words += ["-w", write]
    return f"flopwise {verb} {shlex.join(words)}"
