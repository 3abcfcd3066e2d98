"""The GPT that the published tables have in common: what Megatron-LM trains."""

from __future__ import annotations

from flopwise.work.transformer import Transformer


def gpt(
    name: str, title: str, source: str, *, layers: int, hidden: int, heads: int, vocab: int, context: int
) -> Transformer:
    """A GPT-2 of any size: learned positions, LayerNorm before each half, GELU, biases everywhere, a tied head."""
    return Transformer(
        name=name,
        title=title,
        source=source,
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=4 * hidden,
        vocab=vocab,
        context=context,
        positions="learned",
        norm="layer",
        norm_bias=True,
        gated=False,
        activation="gelu",
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        tied=True,
    )
