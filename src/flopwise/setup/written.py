"""A set-up in words: flat and by names, as files, rows and JSON hold it. Whatever is written down of one extends these.

None: left open, or not known. What extends them names once more, without a default, what it cannot do without.
"""

from __future__ import annotations

import hashlib
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

import msgspec

from flopwise.base.units import AUTO, Auto
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import Setup, read_attention
from flopwise.setup.stack import NO_STACK
from flopwise.setup.training import Task
from flopwise.work.formats import parse_formats
from flopwise.work.lengths import parse_lengths
from flopwise.work.lstm import Lstm
from flopwise.work.model import Model
from flopwise.work.optimizers import Optimizer
from flopwise.work.transformer import Transformer

Asked = TypeVar("Asked", bound=Setup)

NOT_IDENTITY = ("name", "title", "source", "family", "dropout")
"""Fields of a model's table that say nothing of its shape: the same one under two names is one cell."""


def _usual_fields(kind: type[Transformer] | type[Lstm]) -> dict[str, Any]:
    return {each.name: msgspec.to_builtins(each.default) for each in fields(kind) if each.default is not MISSING}


USUAL_FIELDS = {"transformer": _usual_fields(Transformer), "lstm": _usual_fields(Lstm)}
"""Architecture → field → what a description that does not say it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenSetup:
    """What is trained on what, sequence by sequence."""

    model: str | dict[str, Any] | None = None
    """Its name, or the whole table of its description."""
    hardware: str | None = None
    """Catalogue name, or the file that was named."""
    sequence_tokens: int | None = None
    lengths: str | None = None
    """How long sequences are and how they lie in memory, as `work.lengths` writes it: `packed:5x2,17,128`; None: all
    have `sequence_tokens`."""
    precision: str | None = None
    optimizer: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenBatch(WrittenSetup):
    """And how many sequences a step has."""

    devices: int | None = None
    batch_sequences: int | Auto | None = None
    """Of all devices together."""
    micro_batch_sequences: int | Auto | None = None
    """Of one device, or of a group that shares each sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenStrategy(WrittenBatch):
    """And how they are run, by which devices."""

    recompute: str | None = None
    """What backward makes again: `none`, a policy's name, or how many of a plan's chunks are kept at which level."""
    attention: str | None = None
    fusion: str | None = None
    stack: str | None = None
    parallel: Parallel | None = None


def words_of(said: object, *more: str) -> dict[str, Any]:
    """The fields of a `WrittenBatch`, and more, of what has them, to say them elsewhere."""
    return {name: getattr(said, name) for name in (*(field.name for field in fields(WrittenBatch)), *more)}


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSetup(WrittenBatch):
    """One point of a grid. What two sweeps have in common has the same set-up in both, and so the same cell."""

    model: dict[str, Any]
    """The whole table of its description: a shape, not only a name."""
    hardware: str
    devices: int
    sequence_tokens: int
    batch_sequences: int | Auto
    """auto: devices times the largest micro-batch that fits, which is looked for."""
    micro_batch_sequences: int | Auto
    """auto: what the plan chooses; with a batch that is auto, the largest that fits."""
    precision: str
    optimizer: Optimizer = "adamw"
    task: Task = "language"
    device_memory_bytes: int | None = None
    """Cap; None: all of the device but a reserve."""
    host_memory_bytes: int | None = None

    @property
    def model_name(self) -> str:
        return str(self.model.get("name") or "-")

    @property
    def hardware_name(self) -> str:
        """As people are told it: of a file its name alone, not where it lies."""
        return self.hardware.rpartition("/")[2] or self.hardware


def cell_id(setup: CellSetup) -> str:
    """Twelve hexadecimal digits of the set-up's hash, the same in every process and version of Python."""
    table = msgspec.to_builtins(setup)
    usual = USUAL_FIELDS.get(table["model"].get("architecture", ""), {})
    # What a description leaves as it usually is stays out, so that a new field of descriptions changes no cell's id.
    table["model"] = {
        key: value
        for key, value in table["model"].items()
        if key not in NOT_IDENTITY and not (key in usual and value == usual[key])
    }
    if table["lengths"] is None:
        # Sequences of one length are the same cell as before there were others.
        del table["lengths"]
    return hashlib.sha256(msgspec.json.encode(table, order="sorted")).hexdigest()[:12]


# -- a set-up to words, and back -------------------------------------------------------------------------------------


def write_setup(setup: Setup) -> dict[str, Any]:
    """The fields of a `WrittenStrategy`."""
    return {
        "model": setup.model.name,
        "hardware": setup.hardware_name or setup.hardware.name,
        "devices": setup.parallel.devices,
        "sequence_tokens": setup.sequence_tokens,
        "lengths": setup.lengths.words if setup.lengths else None,
        "batch_sequences": setup.batch_sequences,
        "micro_batch_sequences": setup.micro_batch_sequences,
        "precision": setup.formats.name if setup.formats else None,
        "recompute": setup.recompute,
        "attention": setup.attention_word,
        "fusion": setup.fusion,
        "optimizer": setup.optimizer,
        "stack": setup.stack.name if setup.stack else NO_STACK,
        "parallel": setup.parallel,
    }


def read_setup(words: WrittenBatch, kind: type[Asked], model: Model, hardware: Hardware, **more: Any) -> Asked:  # noqa: ANN401 - fields of a Setup
    """What the words are of, once it is known what their names stand for; `more` is what words do not tell."""
    given: dict[str, Any] = {
        name: None if getattr(words, name) == AUTO else getattr(words, name)
        for name in ("sequence_tokens", "batch_sequences", "micro_batch_sequences")
    }
    if words.lengths is not None:
        given["lengths"] = parse_lengths(words.lengths)
    for place in ("device", "host"):
        given[f"{place}_cap_bytes"] = getattr(words, f"{place}_memory_bytes", None)
    if isinstance(words, WrittenStrategy) and words.attention is not None:
        given["attention"], given["flash_kernel"] = read_attention(words.attention)
    for name in ("recompute", "fusion", "optimizer", "parallel"):
        if getattr(words, name, None) is not None:
            given[name] = getattr(words, name)
    formats = None if words.precision is None else parse_formats(words.precision)
    return kind(model=model, hardware=hardware, formats=formats, **given | more)
