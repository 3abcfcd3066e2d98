"""In what blocks' attention may differ: how far it looks, how positions turn and scale what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import Literal

from flopwise.base.errors import FlopwiseError
from flopwise.work.checks import check_positive, check_real

RotaryMethod = Literal["linear", "llama3", "dynamic", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryScaling:
    """How the rotary frequencies are lowered for a context longer than the first one.

    linear    divides all frequencies by `factor`
    llama3    divides by `factor` those that turn less than `low_frequency_factor` times in the original context, leaves
              those that turn more than `high_frequency_factor` times, and goes over smoothly in between
    dynamic   raises the base for sequences longer than the original context (NTK)
    yarn      divides by `factor` the pairs that turn less than `beta_slow` times, leaves those that turn more than
              `beta_fast` times, with a ramp over the pairs in between (Peng et al., arXiv 2309.00071)
    longrope  divides each pair's by a number of its own: of `long_factors` for sequences longer than the original
              context, else of `short_factors` (Ding et al., arXiv 2402.13753)
    """

    factor: float
    original_context: int | None = None
    """Tokens of the context before; linear scaling needs none."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    method: RotaryMethod | None = None
    """None: as Llama 3.1 does where there is an original context, else linearly."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the ends of YaRN's ramp are whole numbers."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """What rotated queries and keys are multiplied by; None: what the method takes (`attention_scale`)."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if self.method is None:
            object.__setattr__(self, "method", "linear" if self.original_context is None else "llama3")
        check_real("rotary_scaling", factor=self.factor, low_frequency_factor=low, high_frequency_factor=high)
        check_real("rotary_scaling", beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        if self.original_context is not None:
            check_positive("rotary_scaling", original_context=self.original_context)
        elif self.method != "linear":
            raise FlopwiseError(
                f"rotary_scaling: {self.method} needs original_context", hint="the tokens of the context before"
            )
        if low > high:
            raise FlopwiseError(
                f"rotary_scaling: low_frequency_factor = {low} is above high_frequency_factor = {high}",
                why="frequencies between the two are scaled in part",
                hint="Llama 3.1 has 1 and 4",
            )
        if self.attention_factor is not None:
            check_real("rotary_scaling", attention_factor=self.attention_factor)
        for factor in (*self.short_factors, *self.long_factors):
            check_real("rotary_scaling", short_and_long_factors=factor)

    @property
    def attention_scale(self) -> float:
        """What rotated queries and keys are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.method == "longrope" and self.factor > 1.0:
            assert self.original_context is not None
            return sqrt(1 + log(self.factor) / log(self.original_context))
        if self.method != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self.mscale_factor(self.mscale) / self.mscale_factor(self.mscale_all_dim)
        return self.mscale_factor(1.0)

    def mscale_factor(self, scale: float) -> float:
        """What YaRN multiplies by for a weight of the logarithm of its factor."""
        return 1.0 if self.factor <= 1 else 0.1 * scale * log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Temperature:
    """Queries are multiplied by 1 + scale · ln(1 + ⌊position ÷ floor⌋), positions counted from 1, as Llama 4's blocks
    without positions do; it is 1 for the first tokens of a sequence."""

    floor: int
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherAttention:
    """The attention of some blocks where it is not that of the others: how far it looks, and how positions turn."""

    window: int | None = None
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    rotary: bool = True
    """False: these blocks have no positions."""
    attention_chunk: int | None = None
    temperature: Temperature | None = None
    qk_norm: bool = True
    """False: these blocks have no norms of queries and keys, where others do."""
