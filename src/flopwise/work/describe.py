"""From a model to its work: the one door that prediction, planning and training come through."""

from __future__ import annotations

from functools import lru_cache

from flopwise.base.errors import FlopwiseError
from flopwise.work.checks import check_positive
from flopwise.work.layout import WHOLE, Layout, illegal_layout
from flopwise.work.lengths import Lengths
from flopwise.work.lstm import Lstm
from flopwise.work.lstm_ops import lstm_work
from flopwise.work.model import Model
from flopwise.work.op import AttentionKernel, Op, is_beside
from flopwise.work.transformer import Transformer
from flopwise.work.transformer_ops import transformer_work
from flopwise.work.work import Work


@lru_cache(maxsize=1024)
def describe(
    model: Model,
    sequence_tokens: int,
    kernel: AttentionKernel = "flash",
    layout: Layout = WHOLE,
    lengths: Lengths | None = None,
) -> Work:
    """The operators of `model` for one sequence of `sequence_tokens` tokens: those of one device of a `layout`.

    With `lengths`, none longer than that: for all the sequences that those count, behind each other, without padding.
    """
    check_positive(model.name, sequence_tokens=sequence_tokens)
    if lengths is not None:
        check_lengths(model, lengths, kernel, layout)
    illegal = illegal_layout(model, sequence_tokens, layout)
    if illegal:
        raise FlopwiseError(f"{model.name} cannot be split that way: {illegal[0]}", why=illegal[1], hint=illegal[2])
    if isinstance(model, Lstm):
        return lstm_work(model, sequence_tokens)
    return transformer_work(model, sequence_tokens, kernel, layout, lengths)


def is_in(op: Op, model: Model, layer: int) -> bool:
    """Whether a block has an operator of its model's description."""
    if op.first_layer > layer:
        return False
    if isinstance(model, Transformer) and is_beside(op) and layer in model.frozen_layers:
        return False
    return not op.block_kind or (isinstance(model, Transformer) and op.block_kind == model.block_kind(layer))


def check_lengths(model: Model, lengths: Lengths, kernel: AttentionKernel, layout: Layout = WHOLE) -> None:
    """Refuse lengths of sequences that nothing tells apart, and packed ones where padding cannot be left out."""
    if isinstance(model, Lstm):
        raise FlopwiseError(
            f"sequences of {model.name} are of one length",
            why="its layers run time step by time step, all sequences at once",
            hint="leave --lengths out",
        )
    why = ""
    if lengths.layout == "packed" and kernel == "eager":
        why = "eager attention computes the whole square of a batch's longest sequence"
    elif layout != WHOLE:
        why = "several devices share sequences of one length alone"
    if why:
        raise FlopwiseError(f"sequences of {model.name} cannot be packed", why=why, hint="--layout padded")
