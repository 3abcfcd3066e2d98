"""Texts of others as they may be shown: nothing in them that a terminal acts on, every byte of a path as something."""

from __future__ import annotations

import re

KEPT = "\n\u00a0\u2009\u202f"
"""Signs that are not called printable and do no harm: ends of lines, and blanks that do not break."""
_BYTES = re.compile("[\udc80-\udcff]")
"""How Python keeps bytes of a path that are no UTF-8."""


def visible(text: str) -> str:
    """Text in lines, with a question mark for what a terminal would act on: escapes, controls, turns of direction."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in KEPT else "?" for sign in encodable(text))


def encodable(text: str) -> str:
    r"""Text that UTF-8 has bytes for: bytes of a path that are none stand as `\xff`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        named = _BYTES.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
        return named.encode("utf-8", "backslashreplace").decode()
    return text
