"""Texts of others as they may be shown: nothing in them that a terminal acts on, every byte of a path as something."""

from __future__ import annotations

from flopwise.base.files import encodable

KEPT = "\n\u00a0\u2009\u202f"
"""Signs that are not called printable and do no harm: ends of lines, and blanks that do not break."""


def visible(text: str) -> str:
    """Text in lines, with a question mark for what a terminal would act on: escapes, controls, turns of direction."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in KEPT else "?" for sign in encodable(text))
