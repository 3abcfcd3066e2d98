"""The colours: any two that may stand side by side stay apart, for readers without red or green cones too."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from math import dist

import pytest

from flopwise.report.palette import DARK, HEAT, LIGHT, ink_on, luminance, style

LEAST_APART = 10.0
"""ΔE*ab between neighbours: 2 is just seen side by side, and small marks need several times that."""

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
CONES = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
}
# sRGB to XYZ under D65.
TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
Three = tuple[float, ...]


def times(matrix: tuple[Three, ...], vector: Three) -> Three:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def linear(colour: str) -> Three:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def seen(colour: str, cones: str) -> Three:
    """CIE L*a*b* of a colour as somebody with those cones sees it."""
    light = tuple(min(1.0, max(0.0, part)) for part in times(CONES[cones], linear(colour)))
    white = times(TO_XYZ, (1.0, 1.0, 1.0))
    shares = [value / full for value, full in zip(times(TO_XYZ, light), white, strict=True)]
    x, y, z = (share ** (1 / 3) if share > 216 / 24389 else (24389 / 27 * share + 16) / 116 for share in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_lab_of_known_colours() -> None:
    assert seen("#ffffff", "all") == pytest.approx((100, 0, 0), abs=0.01)
    # Lindbloom's calculator.
    assert seen("#ff0000", "all") == pytest.approx((53.24, 80.09, 67.20), abs=0.05)


@pytest.mark.parametrize("cones", CONES)
@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_any_two_colours_stay_apart(colours: tuple[str, ...], cones: str) -> None:
    assert len(colours) == 8
    for first, second in combinations(colours, 2):
        assert dist(seen(first, cones), seen(second, cones)) >= LEAST_APART, (first, second)


def test_colours_before_did_not() -> None:
    """What the rule is for: blue and violet, forward and backward, were one to a reader without green cones."""
    assert dist(seen("#2f6fd0", "no green"), seen("#6b5fc7", "no green")) < LEAST_APART


def contrast(first: str, second: str) -> float:
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_words_can_be_read_on_every_colour() -> None:
    for colour in (*LIGHT, *DARK, *HEAT):
        assert contrast(ink_on(colour), colour) >= 4.5, colour


@pytest.mark.parametrize("cones", CONES)
def test_more_is_darker_for_everybody(cones: str) -> None:
    shades = [seen(colour, cones) for colour in HEAT]
    for less, more in pairwise(shades):
        assert less[0] - more[0] > 4 and dist(less, more) >= 8


def test_style_names_each_of_them() -> None:
    named = re.findall(r"--([ch]\d): (#[0-9a-f]{6});", style())
    assert [colour for name, colour in named if name[0] == "h"] == list(HEAT)
    # On a screen by its scheme; on paper always those for white.
    assert [colour for name, colour in named if name[0] == "c"] == [*LIGHT, *DARK, *LIGHT]
