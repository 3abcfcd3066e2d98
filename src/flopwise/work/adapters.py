"""What of a model is trained, where that is not everything: adapters beside frozen matrices, or some parts alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Literal, get_args

from flopwise.base.errors import FlopwiseError, shown, unknown_name

Target = Literal["q", "k", "v", "o", "gate", "up", "down", "q_a", "kv_a", "kv_turned"]
TARGETS: tuple[Target, ...] = get_args(Target)
"""The matrices of a block that an adapter may lie beside. The last three are latent attention's, which leads queries,
and keys and values, through narrow rows: `kv_turned` makes the channels of keys that turn, in one layer with `kv_a`."""

HEADS: tuple[Target, ...] = ("q", "k", "v", "o")
"""Those of attention that all have."""
LATENTS: tuple[Target, ...] = ("q_a", "kv_a", "kv_turned")
GROUPS: dict[str, tuple[Target, ...]] = {
    "all-linear": TARGETS,
    "attention": (*HEADS, *LATENTS),
    "mlp": ("gate", "up", "down"),
}

RESULTS: dict[str, tuple[Target, ...]] = {
    "qkv": ("q", "k", "v"),
    "latents": LATENTS,
    "query_up": ("q",),
    "latent_up": ("k", "v"),
    "output": ("o",),
    "gate_up": ("gate", "up"),
    "up": ("up",),
    "down": ("down",),
}
"""A block's product → the targets that its results belong to (see `layer_names.targets_of`)."""

LOW, DOWN, UP = "low", "A", "B"
"""What an adapter calls its inner result, and the matrices that lead to it and back."""
MAGNITUDE, DIRECTION = "magnitude", "direction"
"""What DoRA calls the vector that a product's results are scaled by, and these before they are."""
MAGNITUDE_PIECE = 1 << 22
"""Numbers that are multiplied and summed at once for the gradient of magnitudes: few enough for a GPU's cache."""
MAGNITUDE_VECTORS = 5
"""A number for each row of a matrix, that DoRA's executor holds at once at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """LoRA (arXiv 2106.09685): a frozen matrix W of a product becomes W + scale · B·A, of which A and B are trained.

    DoRA (arXiv 2402.09353) trains a vector of magnitudes too: each row of that sum is as long as its magnitude says.
    """

    rank: int
    """Rows of A, columns of B."""
    alpha: float
    targets: tuple[Target, ...] = TARGETS
    """Those that a model has not, such as the gate of a plain feed-forward, are left out."""
    rank_stabilised: bool = False
    """The scale is alpha ÷ √rank (arXiv 2312.03732) instead of alpha ÷ rank."""
    magnitudes: bool = False
    """DoRA: the rows' lengths are trained apart from their directions."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise FlopwiseError(f"adapters cannot have a rank of {shown(self.rank)}", hint="--lora 16")
        if not (self.alpha > 0 and isfinite(self.alpha)):
            raise FlopwiseError(f"alpha of adapters cannot be {shown(self.alpha)}", hint="--lora-alpha 32")
        for name in self.targets:
            if name not in TARGETS:
                raise unknown_name("matrix of a block", name, TARGETS, hint="--lora-on all-linear")
        if not self.targets:
            raise FlopwiseError("adapters lie beside no matrix", hint="--lora-on all-linear")

    @property
    def scale(self) -> float:
        """What B·A is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilised else self.rank)

    @property
    def label(self) -> str:
        """For a model's name: `lora16`, `lora8(q,v)`, `dora16`."""
        kind = ("rs" if self.rank_stabilised else "") + ("dora" if self.magnitudes else "lora")
        group = next((name for name, members in GROUPS.items() if set(members) == set(self.targets)), None)
        beside = "" if group == "all-linear" else f"({group or ','.join(self.targets)})"
        return f"{kind}{self.rank}{beside}"


EMBEDDING, HEAD, BLOCKS = "embedding", "head", "blocks"


def parse_frozen(text: str) -> tuple[str, ...]:
    """`embedding,blocks.0-15`: parts that are not trained."""
    found = tuple(word.strip().lower() for word in text.split(",") if word.strip())
    if not found:
        raise FlopwiseError("no part is named to be frozen", hint="--freeze embedding,blocks.0-15")
    return found


def frozen_layers(frozen: Collection[str], layers: int) -> frozenset[int]:
    """The blocks among frozen parts; `blocks` alone stands for all of them."""
    found: set[int] = set()
    for word in frozen:
        kind, _, numbers = word.partition(".")
        if word in (EMBEDDING, HEAD):
            continue
        first, _, last = numbers.partition("-")
        if word == BLOCKS:
            first, last = "0", str(layers - 1)
        if kind != BLOCKS or not first.isdecimal() or not (last or first).isdecimal():
            raise FlopwiseError(
                f"{shown(word)} is no part of a model",
                why="its parts are embedding, head, and blocks by their numbers",
                hint="--freeze embedding,blocks.0-15",
            )
        span = range(int(first), int(last or first) + 1)
        if not span or span[-1] >= layers:
            raise FlopwiseError(
                f"{word} cannot be frozen",
                why=f"there are {layers} blocks, 0 to {layers - 1}"
                if span
                else "its last block comes before its first",
                hint=f"--freeze embedding,blocks.0-{max(0, layers // 2 - 1)}",
            )
        found.update(span)
    return frozenset(found)
