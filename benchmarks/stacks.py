"""Fit the constants of every stack anew and write them into the catalogue: `python -m benchmarks.stacks [--check]`.

Each stack's constants are fitted to all fitted rows of its table, from the protocol's start values, and written with
three significant digits. With --check nothing is written and a difference of more than 2 % exits with 1.
"""

from __future__ import annotations

import re
import sys

from flopwise.base.files import read_text, write_whole
from flopwise.catalog.load import ROOT, load_stack
from flopwise.references.published import protocol_of, read_cases
from flopwise.references.validate.fitting import fit_of
from flopwise.setup.stack import Stack

FITTED_TABLES = ("mpt", "vtrain", "nanotron", "megatron", "torchtitan", "megatron-core", "korthikanti", "deepspeed")
"""Those whose stacks' constants are fitted to them."""
NOT_FITTED = ("megatron-2", "uci", "dgx-cloud", "nemo", "nemo-blackwell")
"""Those that are predicted by constants of another table."""


def refitted(table: str) -> Stack:
    """A table's stack with its constants fitted to all the rows that may be."""
    protocol, cases = protocol_of(table), read_cases(table)
    return fit_of(protocol, cases, load_stack(protocol.stack)).without(None)


def with_value(text: str, name: str, value: float) -> str:
    """A stack's file with another value of one constant."""
    key = f'"{name}"' if "." in name else name
    pattern = re.compile(rf"(\[constants\.{re.escape(key)}\]\nvalue = )[^\n]+")
    assert pattern.search(text), f"the file has no [constants.{key}] followed by its value"
    return pattern.sub(lambda found: f"{found[1]}{value:.3g}", text)


def main() -> int:
    check, off = "--check" in sys.argv[1:], 0
    for stack in map(refitted, FITTED_TABLES):
        path = ROOT / "stacks" / f"{stack.name}.toml"
        shipped, text = load_stack(stack.name), read_text(path)
        for name, constant in stack.constants.items():
            before = shipped.constants[name].value
            off += abs(before / constant.value - 1) > 0.02
            print(f"{stack.name:<13}{name:<18}{before:>10.3g} →{constant.value:>10.3g}")
            text = with_value(text, name, constant.value)
        if not check:
            write_whole(path, text)
    return int(check and off > 0)


if __name__ == "__main__":
    sys.exit(main())
