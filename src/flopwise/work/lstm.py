"""The description of a recurrent language model: embedding, a stack of LSTM layers, a projection, a softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flopwise.work.checks import check_name, check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class Lstm:
    """A language model that reads its tokens one after the other."""

    name: str
    title: str
    source: str
    layers: int
    hidden: int
    vocab: int
    context: int
    """Tokens that it is unrolled over."""
    projection: int = 0
    """Width of the projection of the hidden state; 0: none."""
    head_input: Literal["hidden", "projection"] = "hidden"
    """What the softmax reads. The reference analytical model holds a projection, but its softmax reads the
    hidden state; a network with a bottleneck reads the projection."""

    note: str | None = None
    """What a reader of a prediction should know, such as what had to be assumed."""

    def __post_init__(self) -> None:
        check_name(self.name)
        check_positive(self.name, layers=self.layers, hidden=self.hidden, vocab=self.vocab, context=self.context)
        if self.projection or self.head_input == "projection":
            check_positive(self.name, projection=self.projection)

    def check_sequence(self, tokens: int) -> None:
        """Any length can be unrolled."""
        check_positive(self.name, sequence=tokens)
