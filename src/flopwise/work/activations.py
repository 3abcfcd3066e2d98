"""Activations, by the words of descriptions."""

ACTIVATIONS = (
    *("silu", "gelu", "gelu_tanh", "relu", "relu2", "relu6", "leaky_relu", "mish", "sigmoid", "tanh", "linear"),
    *("quick_gelu", "clamped_swiglu"),
)
"""Activations that a feed-forward part may have; all read and write the same bytes.

`gelu` is the exact one, `gelu_tanh` the approximation by a tanh that GPT-2 was trained with, `quick_gelu` that by a
sigmoid (of 1.702 x). `clamped_swiglu` is gpt-oss's: quick_gelu(gate) · (up + 1), of gate up to 7 and up from -7 to 7.
"""
