"""What a kernel or an operator is for, told by its name."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from flopwise.base.files import read_table
from flopwise.records.profile import KernelClass

_RULES: tuple[tuple[KernelClass, re.Pattern[str]], ...] = tuple(
    (rule["class"], re.compile(rule["pattern"], re.IGNORECASE | re.VERBOSE))
    for rule in read_table(Path(__file__).with_name("kernel_classes.toml"))["rules"]
)
_LONGEST_NAME = 2000
"""Characters that are looked at: templates of C++ can be far longer, and say what they are at their beginning."""


@lru_cache(maxsize=65536)
def class_of(name: str, *, category: str = "") -> KernelClass:
    """The class of a kernel or an operator; `category` is the trace's own, which settles what a copy is."""
    if category in ("gpu_memcpy", "gpu_memset"):
        # What stays within device memory is work on it like a kernel's; copy engines go over a link.
        return "pointwise" if category == "gpu_memset" or "DtoD" in name else "copy"
    looked_at = name[:_LONGEST_NAME]
    return next((kind for kind, rule in _RULES if rule.search(looked_at)), "other")
