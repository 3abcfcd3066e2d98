"""The colours of everything that is drawn: the page, its figures as SVG, and pictures by matplotlib.

Eight colours for what is side by side, each of another lightness and hue, so that any two of them stay apart (ΔE of at
least 10, by a test) for readers without red or green cones too; and one row of colours from little to much.
"""

from __future__ import annotations

LIGHT = ("#2465c8", "#d6791a", "#299a5b", "#b43e8f", "#7a6601", "#279cbc", "#8e1c28", "#2c2a80")
"""On white."""
DARK = ("#679cfd", "#f29b58", "#63c98b", "#de7fc5", "#f7e37d", "#9de4ed", "#d14741", "#7164e5")
"""On a dark panel: the same in the same order, by name and by hue."""
HEAT = ("#f1f5d8", "#d5e9b9", "#a2d5b8", "#66bfc1", "#369fc3", "#2a78b5", "#28509b", "#212d78", "#101a4b")
"""From little to much: lightness falls all the way, so that it reads in grey too. The same on light and on dark."""


def luminance(colour: str) -> float:
    """Of `#rrggbb`, from 0 to 1, as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on that colour."""
    behind = luminance(colour) + 0.05
    return "#ffffff" if 1.05 / behind > behind / 0.05 else "#000000"


def style() -> str:
    """The colours as variables of CSS: `--c0` to `--c7` with `--c0-ink` to stand on them, `--h0` to `--h8`."""
    heat = "".join(f"--h{place}: {colour}; " for place, colour in enumerate(HEAT))
    return (
        f":root {{ {heat}{_variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n"
        # Paper is white.
        f"@media print {{ :root {{ {_variables(LIGHT)} }} }}\n"
    )


def _variables(colours: tuple[str, ...]) -> str:
    return " ".join(f"--c{place}: {found}; --c{place}-ink: {ink_on(found)};" for place, found in enumerate(colours))
