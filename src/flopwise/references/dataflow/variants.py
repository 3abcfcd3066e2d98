"""Versions of the rule `dataflow`: what changed in the reference offload trainer's configuration from July 2025 on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flopwise.base.errors import unknown_name
from flopwise.base.files import decode, read_table

LONGER_STEP = 8
"""The model that it calls 8B gets steps so many times as long, up to July 22."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A version of the rule: what changed from one to another. What is left out is as in July 2025."""

    name: str
    date: str
    """When it was so, ISO; its documents and recorded runs carry these dates."""
    count_all_activations: bool = False
    """Whether the host must have room for all activations, also those that stay on the device: until July 18."""
    full_extra_bytes_per_token: int = 0
    """What a full save counted beyond what it takes."""
    link_rule: bool = True
    """Whether full saves are given up where they would clog the link: since July 14."""
    compute_efficiency: float = 0.6
    link_efficiency: float = 0.75
    target_s: float | None = None
    """Seconds that a step should take, `LONGER_STEP` times as many for the 8B model; None: see `overhead`."""
    overhead: float | None = None
    """Share of a step that moving weights in and out once should take."""
    least_chunk_tokens: int = 16384
    """On Hopper and the A100."""
    least_chunk_tokens_elsewhere: int = 8192
    least_head_chunk_tokens: int | None = None
    """The head's chunk is the smallest divisor of the chunk of at least so many tokens; None: the chunk."""


_TABLE = read_table(Path(__file__).with_name("variants.toml"))
VARIANTS = {name: decode({"name": name, **fields}, Variant, "variants.toml") for name, fields in _TABLE.items()}
"""By name. Every field is as found, but for `sep19`: when its efficiencies went from July's to those of `head` is not
known, and July's are taken. `head` is the newest; September 20 is the date of its chunk size."""

RECORDED = "jul20"
"""The variant of the recorded runs."""


def variant_of(name: str) -> Variant:
    """The variant of that name."""
    if name not in VARIANTS:
        raise unknown_name("variant of the rule `dataflow`", name, VARIANTS, hint=f"one of {', '.join(VARIANTS)}")
    return VARIANTS[name]
