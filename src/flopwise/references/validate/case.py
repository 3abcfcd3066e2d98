"""`Case`: one row of a published table, as the set-up that it was and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.setup.setup import SettledSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A measured training step."""

    row: int
    """Line of the table, the first after the header being 1."""
    size: str
    """The model's size: what is left out together."""
    label: str
    """The rest of the set-up in a few words, for people."""
    setup: SettledSetup
    """As the kernels and the network allow it: without its stack, whose constants may be what is looked for."""
    stack: str
    """Catalogue name."""
    step_s: float | None
    """Measured; None where it ran out of memory or was not measured."""
    fits: bool | None
    """Whether it fitted; None where the table does not say."""
    fitted: bool = True
    """Whether constants may be fitted to this row; the others are only ever predicted."""
    reserved_bytes: int | None = None
    """Device memory that the framework's allocator held at its peak, where the table prints it."""
