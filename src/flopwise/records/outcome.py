"""`Outcome`: a set-up with what its step takes. Predictions, forecasts and measurements extend it, so that a name means
the same in all of them; alone it is what little is known, before anything runs, of a plan or of a sweep's cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import show_seconds
from flopwise.setup.written import WrittenStrategy
from flopwise.work.op import Convention

WRITTEN_BY = "`flopwise plan … -w plan.toml` writes one"
"""Where a plan comes from that can be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Where a measured step may lie, from the errors of predictions of its kind."""

    low_s: float
    high_s: float
    basis: str
    """Whose errors they are."""
    outside: tuple[str, ...] = ()
    """In what the case lies outside the data, each of which has widened the interval."""

    def figures(self) -> dict[str, str]:
        """Between what and what, by whose errors, and where those do not reach."""
        words = f"{show_seconds(self.low_s)} to {show_seconds(self.high_s)} (by {self.basis})"
        return {"interval": words} | ({"beyond the data": ", ".join(self.outside)} if self.outside else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(WrittenStrategy):
    """One step, by all devices together unless a field says otherwise. None: not known."""

    model: str | None = None
    batch_sequences: int | None = None
    micro_batch_sequences: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    """Padding left out."""
    padded_tokens_per_s: float | None = None
    """Of sequences filled up to `sequence_tokens`, be the padding computed or not; None: there is none."""
    mfu: float | None = None
    """Model FLOPs by those of the peak."""
    hfu: float | None = None
    """The same with what is executed, recompute included."""
    model_flops: int | None = None
    hardware_flops: int | None = None
    convention: Convention | None = None
    """How they are counted."""
    peak_flops: float | None = None
    peak_format: str | None = None
    """The number format of that peak."""
    bound: str | None = None
    """What limits the step, in a word or two."""
    fits: bool | None = None
    device_bytes: dict[str, int] | int | None = None
    """Of the fullest device, by owner or in all; where nothing fits, the least that would be needed."""
    host_bytes: dict[str, int] | int | None = None
    parts: dict[str, float] | None = None
    """What the seconds of a step over several devices are made of: kernels by class, exposed communication, …"""
    ceiling_s: float | None = None
    """What the kernels alone take, exchanges hidden, where the step is what frameworks reach; None: it is another."""
    interval: Interval | None = None
    notes: tuple[str, ...] | None = None
    """What a reader should know before trusting the figures."""

    @property
    def device_total(self) -> int | None:
        return _total(self.device_bytes)

    @property
    def host_total(self) -> int | None:
        return _total(self.host_bytes)

    @property
    def expected(self) -> Outcome:
        """In brief, as a plan's file says it."""
        return Outcome(
            step_s=self.step_s,
            tokens_per_s=self.tokens_per_s,
            padded_tokens_per_s=self.padded_tokens_per_s,
            mfu=self.mfu,
            hfu=self.hfu,
            device_bytes=self.device_total,
            host_bytes=self.host_total,
        )


def check_finite(found: Outcome) -> None:
    """Refuse an answer that holds what is no number, which nobody could tell from one."""
    for name in ("step_s", "tokens_per_s", "mfu", "hfu"):
        value = getattr(found, name)
        if value is not None and not isfinite(value):
            raise FlopwiseError(
                f"{name} of {found.model or 'the plan'} comes out as {value}",
                why="numbers of the hardware, or of the model, are too large or too small to reckon with",
                hint="look through their descriptions, as `flopwise show NAME` prints them",
            )


def check_expected(found: Outcome | None) -> None:
    """Refuse a plan that promises what no step has."""
    for name in ("step_s", "tokens_per_s", "mfu", "hfu") if found else ():
        value = getattr(found, name)
        if value is not None and not 0 < value < inf:
            raise FlopwiseError(f"{name} of a plan must be above 0, got {value}", hint=WRITTEN_BY)


def _total(held: dict[str, int] | int | None) -> int | None:
    return sum(held.values()) if isinstance(held, dict) else held
