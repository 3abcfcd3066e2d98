"""Versions of the rule `dataflow`: what changed in the reference offload trainer's configuration from July 2025 on."""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.base.errors import unknown_name

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


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(
            name="jul11",
            date="2025-07-11",
            count_all_activations=True,
            full_extra_bytes_per_token=4,
            link_rule=False,
            target_s=6,
        ),
        Variant(name="jul17", date="2025-07-17", count_all_activations=True, target_s=6),
        Variant(name="jul20", date="2025-07-20", target_s=6),
        Variant(name="jul23", date="2025-07-23", overhead=0.02),
        Variant(name="jul31", date="2025-07-31", overhead=0.02, least_head_chunk_tokens=2048),
        Variant(name="sep19", date="2025-09-19", overhead=0.01, least_head_chunk_tokens=8192),
        Variant(
            name="head",
            date="2025-09-20",
            compute_efficiency=0.7,
            link_efficiency=0.6,
            overhead=0.01,
            least_chunk_tokens=8192,
            least_head_chunk_tokens=1024,
        ),
    )
}
"""By name. Every field is as found, but for `sep19`: when its efficiencies went from July's to those of `head` is not
known, and July's are taken. `head` is the newest; September 20 is the date of its chunk size."""

RECORDED = "jul20"
"""The variant of the recorded runs."""


def variant_of(name: str) -> Variant:
    """The variant of that name."""
    if name not in VARIANTS:
        raise unknown_name("variant of the rule `dataflow`", name, VARIANTS, hint=f"one of {', '.join(VARIANTS)}")
    return VARIANTS[name]
