"""A card under a power limit of its own: `h100-sxm@500W`.

Matrix products and attention keep a card at its power limit, so that their rate follows from it: the power of switching
is C · V² · f, and the voltage falls with the clock, so that

    rate ∝ clock ∝ (power − idle) ^ EXPONENT

between the cube root (the voltage falls all the way) and linear (it is at its least already). Kernels that are bound by
bytes are not slowed down: DRAM keeps its clock, and the arithmetic units wait anyway.

What the two constants are from:
  - EXPONENT: an A100 keeps up 0.87 of its peak at 400 W and 0.72 at 300 W (rows of the catalogue's two cards), which is
    0.54 of the logarithm; an H200 at its limit of 700 W runs products at 1455 of 1980 MHz, 0.735, while a card far from
    its limit runs at all of them. 0.5 is the round figure between the bounds, and an estimate.
  - IDLE: what memory, links and leakage take whatever the clock. An estimate.
"""

from __future__ import annotations

from dataclasses import replace

from flopwise.base.errors import FlopwiseError
from flopwise.setup.efficiency import AttentionEfficiency, Efficiency
from flopwise.setup.hardware import Fact, Hardware, Source

EXPONENT = 0.5
IDLE = 0.15
"""Of the card's own limit."""
LEAST = 0.3
"""Of the card's own limit: drivers take none much lower, and the law is for clocks that still fall."""
SOURCE = "power-limit"


def at_power(hardware: Hardware, watts: float) -> Hardware:
    """The hardware with its compute-bound kernels slowed down to a power limit."""
    fact = hardware.device.power_w
    if fact is None:
        raise FlopwiseError(
            f"{hardware.name} at {watts:g} W",
            why="its description does not say what power it has without a limit",
            hint='power_w = { value = 700, source = "datasheet" } in [device] of a TOML of your own',
        )
    if fact.source == SOURCE and watts != fact.value:
        raise FlopwiseError(
            f"{hardware.name} at {watts:g} W",
            why=f"it is limited to {fact.value:g} W already",
            hint=f"one limit: {hardware.name.split('@')[0]}@{watts:g}W",
        )
    if not LEAST * fact.value <= watts <= fact.value:
        raise FlopwiseError(
            f"{hardware.name} cannot be limited to {watts:g} W",
            why=f"it takes {fact.value:g} W at most, and limits from {LEAST * fact.value:g} W on are described",
            hint=f"{hardware.name}@{0.75 * fact.value:g}W, for example",
        )
    if watts == fact.value:
        return hardware
    share = rate_share(watts / fact.value)
    note = f"Rates at {fact.value:g} W times {share:.3g}, by the law between power and clock of `setup/power.py`"
    return replace(
        hardware,
        name=f"{hardware.name}@{watts:g}W",
        title=f"{hardware.title} at {watts:g} W",
        aliases=(),
        device=replace(hardware.device, power_w=Fact(value=watts, source=SOURCE)),
        efficiency=_slowed(hardware.efficiency, share),
        sources={**hardware.sources, SOURCE: Source(title="Limit set by the user", kind="estimated", note=note)},
    )


def rate_share(power_share: float) -> float:
    """How fast compute-bound kernels are under a limit, as a share of their rate without one."""
    return float(((power_share - IDLE) / (1.0 - IDLE)) ** EXPONENT)


def _slowed(efficiency: Efficiency, share: float) -> Efficiency:
    gemm = efficiency.gemm
    own = {name: value * share for name, value in gemm.by_format.items()} if gemm.by_format else None
    return replace(
        efficiency,
        gemm=replace(gemm, source=SOURCE, sustained=gemm.sustained * share, by_format=own),
        attention=_slowed_attention(efficiency.attention, share),
    )


def _slowed_attention(attention: AttentionEfficiency, share: float) -> AttentionEfficiency:
    others = {name: _slowed_attention(one, share) for name, one in (attention.others or {}).items()}
    return replace(
        attention,
        source=SOURCE,
        forward=tuple((tokens, value * share) for tokens, value in attention.forward),
        backward=tuple((tokens, value * share) for tokens, value in attention.backward),
        others=others or None,
    )
