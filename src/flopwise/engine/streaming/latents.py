"""Latent attention's own operators, run: keys that share the channels that turn."""

from __future__ import annotations

import torch

from flopwise.engine.streaming.values import Gradients, Values
from flopwise.work.attention_ops import LATENT_NORM, QUERY_LATENT_NORM
from flopwise.work.op import Op
from flopwise.work.transformer import Transformer

LATENT_NORMS = (QUERY_LATENT_NORM, LATENT_NORM)
"""Norms with an epsilon of their own."""


def spread_key(op: Op, values: Values, model: Transformer) -> None:
    """Every head's key: the channels that turn, which all have in common, before those of its own."""
    common, own = (values[name] for name in op.inputs)
    rows, turned = own.shape[0], model.turned_channels
    heads = values.allocate(op.outputs[0], (rows, model.kv_width), own.dtype).view(rows, model.kv_heads, -1)
    heads[..., :turned].copy_(common[:, None, :])
    heads[..., turned:].copy_(own.view(rows, model.kv_heads, -1))


def spread_key_backward(op: Op, gradients: Gradients, model: Transformer) -> None:
    """What all heads have in common gets the sum of their gradients."""
    gradient, (common, own) = gradients[op.outputs[0]], op.inputs
    rows, turned = gradient.shape[0], model.turned_channels
    heads = gradient.view(rows, model.kv_heads, -1)
    out, _ = gradients.target(common, (rows, turned), gradient.dtype)
    torch.sum(heads[..., :turned], 1, dtype=gradient.dtype, out=out)
    out, _ = gradients.target(own, (rows, model.kv_width - model.kv_heads * turned), gradient.dtype)
    out.view(rows, model.kv_heads, -1).copy_(heads[..., turned:])
    gradients.drop(op.outputs[0])
