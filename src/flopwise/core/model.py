"""`Model`: any of the descriptions that yield operators."""

from __future__ import annotations

from flopwise.core.lstm import Lstm
from flopwise.core.transformer import Transformer

Model = Transformer | Lstm

ARCHITECTURES: dict[str, type[Transformer] | type[Lstm]] = {"transformer": Transformer, "lstm": Lstm}
"""The value of `architecture` in a model file, and the description it holds."""
