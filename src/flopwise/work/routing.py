"""How a mixture chooses each token's experts and weighs what they make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isfinite
from random import Random
from statistics import fmean
from typing import Literal

from flopwise.base.errors import FlopwiseError, shown

BalanceOver = Literal["model", "layer", "sequence"]
"""Over which tokens a balancing loss counts. With N experts, k of them a token, shares p and the tokens n of each:

model     N · Σ (n ÷ tokens) · mean p, over all layers and tokens at once, as transformers
layer     N ÷ k of the same of each layer, the layers added up, as Megatron and DeepSeek without `seq_aux`
sequence  of each layer and sequence, the mean of the sequences, the layers added up, as DeepSeek with `seq_aux`

The z-loss is the mean over the same tokens: of all layers' at once, or of each layer's, added up.
"""

MOST_WEIGHT = 100.0
"""More of a loss beside the data's is a typing mistake."""
SUM_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """From a router's scores to a token's experts and their weights; it changes values, hardly what is counted.

    A softmax over the chosen scores alone (gpt-oss) is that over all of them, normalised: no rule of its own.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes a share of a score: among all experts', or of each on its own, as DeepSeek-V3."""
    normalised: bool = True
    """A token's shares are divided by their sum, as Mixtral's; otherwise they are as they are."""
    scale: float = 1.0
    """What the weights are multiplied by."""
    bias: bool = False
    """Whether the router's product has a bias."""
    correction: bool = False
    """Whether a number of each expert is added to its share for the choice alone. No gradient reaches it."""
    groups: int = 1
    """Of experts, of which a token's are in the best `groups_kept`."""
    groups_kept: int = 1
    group_by: Literal["best", "best two"] = "best"
    """A group's score is its best share, as DeepSeek-V2, or the sum of its two best, as DeepSeek-V3."""
    on_inputs: bool = False
    """Weights multiply what experts read, not what they make, as Llama 4."""
    balance: float = 0.0
    """By how much a loss counts that balances the experts; 0: there is none."""
    balance_over: BalanceOver = "model"
    z_loss: float = 0.0
    """By how much the square of the logarithm of the scores' exponentials counts (ST-MoE, arXiv 2202.08906)."""

    skew: float = 0.0
    """How unevenly experts are taken to be used, for predictions alone: the exponent of `law_shares`. 0: evenly."""
    shares: tuple[tuple[float, ...], ...] = ()
    """The same as measured: of each mixture's block, or of all, the share of the choices that each expert has."""

    @property
    def is_even(self) -> bool:
        """Whether every expert is taken to have as many tokens."""
        return not (self.skew or self.shares)

    def load(self, experts: int, experts_per_token: int, ranks: int) -> float:
        """Tokens of the most loaded of so many ranks, which hold as many experts each, over those of the mean one.

        Of measured shares experts lie in their order, as they are dealt out; of a power law nobody knows which are the
        popular ones, and the mean of some orders is taken.
        """
        if ranks == 1 or self.is_even:
            return 1.0
        if self.shares:
            return fmean(_most_loaded(_within(row, experts_per_token), ranks) for row in self.shares)
        return _load_of_law(self.skew, experts, experts_per_token, ranks)

    def skew_words(self, experts: int, experts_per_token: int, ranks: int) -> str:
        """How unevenly experts are taken to be used; nothing where they are used evenly."""
        if self.is_even:
            return ""
        if self.shares:
            rows = [_within(row, experts_per_token) for row in self.shares]
            how, busiest = "as measured", experts * fmean(map(max, rows))
        else:
            how = f"by a power law of {self.skew:.3g}"
            busiest = experts * max(law_shares(self.skew, experts, experts_per_token))
        told = f"experts are used {how}: the busiest has {busiest:.1f} times the mean's tokens"
        load = self.load(experts, experts_per_token, ranks)
        return f"{told}, the most loaded of {ranks} expert ranks {load:.2f} times" if ranks > 1 else told

    @property
    def has_losses(self) -> bool:
        """Whether a training has losses beside that of its data."""
        return self.balance > 0 or self.z_loss > 0

    @property
    def words(self) -> str:
        """Which losses there are."""
        over = {"model": "all layers at once", "layer": "each layer", "sequence": "each layer and sequence"}
        terms = (
            f"{self.balance:g} × a loss that balances experts over {over[self.balance_over]}" if self.balance else "",
            f"{self.z_loss:g} × the squares of the logarithms of their scores' exponentials" if self.z_loss else "",
        )
        return f"the loss has in it {' and '.join(filter(None, terms))}"

    @property
    def network(self) -> Routing:
        """What the network computes, without what a training adds to its loss and how experts are taken to be used."""
        return replace(self, balance=0.0, balance_over="model", z_loss=0.0, skew=0.0, shares=())

    def sums_bytes(self, layers: int, sequences: int, experts: int) -> int:
        """Of what a round of so many sequences counts for its losses: of each layer two numbers of each expert, and two
        more."""
        counted = layers * (sequences if self.balance_over == "sequence" else 1)
        return SUM_BYTES * counted * (2 * experts + 2) if self.has_losses else 0

    def _check_skew(self, owner: str, experts: int) -> None:
        if not 0 <= self.skew <= MOST_SKEW:
            raise FlopwiseError(
                f"{owner}: routing.skew = {shown(self.skew)} is not between 0 and {MOST_SKEW:g}",
                why="it is the exponent of a power law: 0 is even, 1 is Zipf's",
                hint="skew = 0.5",
            )
        for row in self.shares:
            if len(row) != experts or not all(0 <= share < inf for share in row) or not sum(row) > 0:
                raise FlopwiseError(
                    f"{owner}: routing.shares are not those of {experts} experts",
                    why="each row has a number of each expert, none below 0 and not all 0",
                    hint="leave them out for experts that are used evenly",
                )
        if self.skew and self.shares:
            raise FlopwiseError(f"{owner}: routing has both skew and shares", hint="one of the two")

    def check(self, owner: str, experts: int, experts_per_token: int) -> None:
        """Refuse what chooses no experts."""
        if not (self.scale > 0 and isfinite(self.scale)):
            raise FlopwiseError(f"{owner}: routing.scale = {shown(self.scale)} is not above 0", hint="scale = 1.0")
        for field in ("balance", "z_loss"):
            weight = getattr(self, field)
            if not 0 <= weight <= MOST_WEIGHT:
                raise FlopwiseError(
                    f"{owner}: routing.{field} = {shown(weight)} is not between 0 and {MOST_WEIGHT:g}",
                    why="it is what a loss beside that of the data is multiplied by",
                    hint=f"{field} = 0.01",
                )
        self._check_skew(owner, experts)
        if self.has_losses and not experts:
            raise FlopwiseError(f"{owner}: a loss that balances experts, and there are none", hint="balance = 0")
        if not 1 <= self.groups_kept <= self.groups:
            raise FlopwiseError(
                f"{owner}: {shown(self.groups_kept)} of {shown(self.groups)} groups of experts is not possible",
                hint="groups_kept between 1 and groups",
            )
        if experts and (self.groups < 1 or experts % self.groups):
            raise FlopwiseError(
                f"{owner}: {shown(self.groups)} groups do not divide {experts} experts", hint="groups = 1"
            )
        if experts and experts_per_token > experts // self.groups * self.groups_kept:
            raise FlopwiseError(
                f"{owner}: {experts_per_token} experts a token are more than {self.groups_kept} of "
                f"{self.groups} groups have",
                hint="a larger groups_kept",
            )
        if experts and self.group_by == "best two" and self.groups > 1 and experts // self.groups < 2:
            raise FlopwiseError(f"{owner}: a group of one expert has no two best", hint='group_by = "best"')


ORDERS = 32
"""In which popular experts are dealt out to ranks."""


@lru_cache(maxsize=256)
def law_shares(exponent: float, experts: int, experts_per_token: int) -> tuple[float, ...]:
    """Each expert's share of all choices, the most popular one's first: in proportion to 1 ÷ rank^exponent (Zipf).

    Each of a token's experts is another, so that none has more than all tokens.
    """
    return _within(tuple(rank**-exponent for rank in range(1, experts + 1)), experts_per_token)


def _within(weights: tuple[float, ...], experts_per_token: int) -> tuple[float, ...]:
    """Shares in these proportions, of which none is more than one of a token's choices."""
    most, open_weights = 1.0 / experts_per_token, list(weights)
    shares = [0.0] * len(weights)
    left = 1.0
    while True:
        total = sum(open_weights)
        beyond = [place for place, weight in enumerate(open_weights) if weight and left * weight / total > most]
        if not beyond:
            break
        for place in beyond:
            shares[place], open_weights[place] = most, 0.0
            left -= most
    if total > 0:
        shares = [share or left * weight / total for share, weight in zip(shares, open_weights, strict=True)]
    return tuple(shares)


def _most_loaded(shares: tuple[float, ...], ranks: int) -> float:
    each = len(shares) // ranks
    return ranks * max(sum(shares[first : first + each]) for first in range(0, len(shares), each))


@lru_cache(maxsize=1024)
def _load_of_law(exponent: float, experts: int, experts_per_token: int, ranks: int) -> float:
    shares, draw = list(law_shares(exponent, experts, experts_per_token)), Random(0)  # noqa: S311 - the same orders every time
    found = []
    for _ in range(ORDERS):
        draw.shuffle(shares)
        found.append(_most_loaded(tuple(shares), ranks))
    return fmean(found)


def skew_of_busiest(busiest: float, experts: int, experts_per_token: int) -> float:
    """The power law whose most popular expert has so many times the mean's tokens; the nearest one there is."""
    low, high = 0.0, MOST_SKEW
    for _ in range(50):
        middle = (low + high) / 2
        if experts * max(law_shares(middle, experts, experts_per_token)) < busiest:
            low = middle
        else:
            high = middle
    return high


MOST_SKEW = 3.0
"""Beyond it one expert has next to all."""

CORRECTION_TERMS = 3
"""Numbers whose sum a correction is: in bf16 one would be as coarse as what it decides between, three are exact."""

USUAL_ROUTING = Routing()
"""Mixtral's."""
