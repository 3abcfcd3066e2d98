"""`Model`: any of the descriptions that yield operators."""

from __future__ import annotations

from flopwise.work.lstm import Lstm
from flopwise.work.transformer import Transformer

Model = Transformer | Lstm


def beyond_context(model: Model, sequence_tokens: int) -> str:
    """A note for sequences that are longer than a model is made for; empty where they are not."""
    if sequence_tokens <= model.context:
        return ""
    return f"{model.name} is made for sequences of {model.context:,} tokens, not {sequence_tokens:,}"


ARCHITECTURES: dict[str, type[Transformer] | type[Lstm]] = {"transformer": Transformer, "lstm": Lstm}
"""The value of `architecture` in a model file, and the description it holds."""
