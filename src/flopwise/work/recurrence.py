"""Layers that carry a state along the sequence instead of looking back, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.work.checks import check_positive

Rule = Literal["mamba2", "gated_delta"]
RULES: tuple[Rule, ...] = get_args(Rule)

RECURRENT, ATTENDING, FEEDING = "recurrent", "attention", "feed"
"""Kinds of blocks, where some carry a state, some look back, and some are a feed-forward part alone."""

DELTA_CHUNK = 64
"""Tokens that kernels of the gated delta rule, and transformers, take at once; no configuration says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """A state of `key_dim` × `head_dim` numbers for each head, which every token changes and reads.

    mamba2       the state fades by a share that the token sets and gains key · value; what is read of it and a part of
                 the value are gated and normed (Dao and Gu, arXiv 2405.21060: keys are its B, queries its C)
    gated_delta  it fades as well, and what it already has for a key is replaced by a share of the value; what is read
                 is normed and gated (Yang, Kautz and Hatamizadeh, arXiv 2412.06464)

    One product makes the gate, what goes through a short causal convolution (queries, keys and values) and the steps.
    Tokens are taken in chunks: within one all at once, as products, and one state goes from each to the next.
    """

    rule: Rule
    heads: int
    head_dim: int
    """Channels of a head's values."""
    key_heads: int
    """Heads of keys and queries, each of which serves a run of neighbouring heads."""
    key_dim: int
    """Channels of a key; Mamba-2's state size."""
    conv: int = 4
    """Tokens that the convolution sees, the last one included."""
    conv_bias: bool = False
    bias: bool = False
    """Of the products around it."""
    chunk: int = DELTA_CHUNK
    norm_groups: int = 1
    """Parts of the result that mamba2 norms by themselves; gated_delta norms each head."""
    least_step: float = 0.0
    most_step: float | None = None
    """Between which a mamba2 token's step is kept; None: however large."""

    @property
    def width(self) -> int:
        """Channels of all values, and of the gate."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Those that go through the convolution."""
        return self.width + 2 * self.key_width

    @property
    def steps(self) -> int:
        """Numbers of a token beside its channels: how far each head's state fades, and of the delta rule how much of
        the value replaces what is there."""
        return self.heads * (2 if self.rule == "gated_delta" else 1)

    @property
    def norm_width(self) -> int:
        """Channels that are normed together."""
        return self.head_dim if self.rule == "gated_delta" else self.width // self.norm_groups

    @property
    def norm_weights(self) -> int:
        """Numbers of the norm's scale: heads of the delta rule have one in common."""
        return self.head_dim if self.rule == "gated_delta" else self.width


def check_states(recurrence: Recurrence, owner: str) -> None:
    """Refuse sizes and bounds that no state can have."""
    if recurrence.rule not in RULES:
        raise unknown_name("rule", recurrence.rule, RULES, hint=f"rule is one of {', '.join(RULES)}").within(owner)
    least, most = recurrence.least_step, recurrence.most_step
    sizes = ("heads", "head_dim", "key_heads", "key_dim", "conv", "chunk", "norm_groups")
    check_positive(owner, **{field: getattr(recurrence, field) for field in sizes})
    wrong = {
        "each key head serves as many heads": recurrence.heads % recurrence.key_heads,
        "parts that are normed are equal": recurrence.width % recurrence.norm_groups,
        "a step's bounds are finite, in their order": not (isfinite(least) and least >= 0.0)
        or (most is not None and not (isfinite(most) and most > least)),
        "the delta rule has no biases and no bounds of its steps": recurrence.rule == "gated_delta"
        and (recurrence.bias or recurrence.conv_bias or least or most is not None),
    }
    for why, there in wrong.items():
        if there:
            raise FlopwiseError(
                f"{owner} cannot be described so", why=why, hint="correct key_heads, norm_groups, biases or bounds"
            )
