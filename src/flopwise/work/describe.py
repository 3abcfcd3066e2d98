"""From a model to its work: the one door that prediction, planning and training come through."""

from __future__ import annotations

from functools import lru_cache

from flopwise.base.errors import FlopwiseError
from flopwise.work.layout import WHOLE, Layout, illegal_layout
from flopwise.work.lstm import Lstm
from flopwise.work.lstm_ops import lstm_work
from flopwise.work.model import Model
from flopwise.work.op import AttentionKernel
from flopwise.work.transformer import check_positive
from flopwise.work.transformer_ops import transformer_work
from flopwise.work.work import Work


@lru_cache(maxsize=1024)
def describe(model: Model, sequence_tokens: int, kernel: AttentionKernel = "flash", layout: Layout = WHOLE) -> Work:
    """The operators of `model` for one sequence of `sequence_tokens` tokens: those of one device of a `layout`."""
    check_positive(model.name, sequence_tokens=sequence_tokens)
    illegal = illegal_layout(model, sequence_tokens, layout)
    if illegal:
        raise FlopwiseError(f"{model.name} cannot be split that way: {illegal[0]}", why=illegal[1], hint=illegal[2])
    if isinstance(model, Lstm):
        return lstm_work(model, sequence_tokens)
    return transformer_work(model, sequence_tokens, kernel, layout)
