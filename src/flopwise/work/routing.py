"""How a mixture chooses each token's experts and weighs what they make."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from flopwise.base.errors import FlopwiseError, shown


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

    def check(self, owner: str, experts: int, experts_per_token: int) -> None:
        """Refuse what chooses no experts."""
        if not (self.scale > 0 and isfinite(self.scale)):
            raise FlopwiseError(f"{owner}: routing.scale = {shown(self.scale)} is not above 0", hint="scale = 1.0")
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


CORRECTION_TERMS = 3
"""Numbers whose sum a correction is: in bf16 one would be as coarse as what it decides between, three are exact."""

USUAL_ROUTING = Routing()
"""Mixtral's."""
