"""`Case`, a row of a published table, and `Protocol`: what is fitted to what before the table is predicted.

Both are data, so that the split is never tuned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.setup.setup import SettledSetup
from flopwise.setup.stack import MOST_CONSTANTS, NEUTRAL


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A row that is no part of a comparison, and why."""

    row: int
    why: str


Metric = Literal["throughput", "time"]
METRICS: tuple[Metric, ...] = get_args(Metric)
"""What a table publishes, and so what its errors are of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """How a table is held against predictions."""

    table: str
    stack: str
    """Catalogue name of the framework that the table was measured with."""
    metric: Metric
    rows: str
    """In words: which rows the constants are fitted to, and what becomes of the others."""
    fitted_table: str
    """The table whose rows the stack's constants are fitted to: this one, or another."""
    start: dict[str, float]
    """The constants that are fitted to step times, and the values that every fit starts from."""
    memory: dict[str, float] = field(default_factory=dict)
    """The same for a constant that is fitted to reserved memory: one or none."""
    sizes: tuple[str, ...]
    """Model sizes. Each is a fold: its rows are predicted by constants that none of them was fitted to."""
    aside: tuple[str, ...] = ()
    """Rows whose products are in one of these formats are listed, and are no part of the figures."""
    measured: bool = True
    """False: the table's times were computed, not measured."""
    remark: str = ""
    """What a reader of the errors must know about the table."""
    columns: dict[str, str] = field(default_factory=dict)
    """Of a table with named columns: what all its rows have that they do not say."""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise unknown_name("metric", str(self.metric), METRICS, hint=f"one of {', '.join(METRICS)}")
        if len(self.start) + len(self.memory) > MOST_CONSTANTS or len(self.memory) > 1:
            raise FlopwiseError(
                f"the protocol of {self.table} fits {len(self.start)} + {len(self.memory)} constants",
                why=f"a stack has at most {MOST_CONSTANTS}, one of them memory's",
            )
        for name in (*self.start, *self.memory):
            if name.partition(".")[0] not in NEUTRAL:
                raise unknown_name("constant", name, NEUTRAL, hint=f"one of {', '.join(NEUTRAL)}")

    @property
    def constants(self) -> tuple[str, ...]:
        return (*self.start, *self.memory)

    def counts(self, case: Case) -> bool:
        """Whether a row is part of the figures: those of another framework are not."""
        return case.setup.formats.matrix not in self.aside and case.stack == self.stack
