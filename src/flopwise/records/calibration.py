"""What a device was timed at, row by row, and what the fit of its constants left over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from flopwise.work.op import attention_elements, attention_flops, product_flops

ProductKind = Literal["forward", "to_source", "to_matrix"]
"""A layer's product, the one to its input's gradient, and the one that is added to its matrix' gradient."""
AttentionDirection = Literal["forward", "backward"]
CopyWay = Literal["to_device", "to_host", "to_device_beside", "to_host_beside"]
"""`beside`: while copies run the other way too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductRow:
    """A matrix product (rows × depth)·(depth × columns)."""

    number_format: str
    kind: ProductKind
    rows: int
    depth: int
    columns: int
    output_bytes: int
    """Of one element."""
    seconds: float

    @property
    def accumulates(self) -> bool:
        """Whether it is added to what the output held."""
        return self.kind == "to_matrix"

    @property
    def flops_per_s(self) -> float:
        return product_flops(self.rows, self.depth, self.columns) / self.seconds

    @property
    def is_large(self) -> bool:
        """Whether every side is at least 1024."""
        return min(self.rows, self.depth, self.columns) >= 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRow:
    """Causal attention over whole sequences."""

    number_format: str
    direction: AttentionDirection
    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    seconds: float

    @property
    def flops(self) -> float:
        """Half the square of scores."""
        return float(self.sequences * attention_flops(self.direction, self.tokens**2, self.heads, self.head_dim))

    @property
    def moved_elements(self) -> float:
        """Of queries, keys, values and results."""
        tokens, heads = self.sequences * self.tokens, self.heads + self.kv_heads
        return float(attention_elements(self.direction, tokens, heads, self.head_dim))

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRow:
    """A kernel that is bound by the bytes it reads and writes."""

    kernel: str
    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRow:
    """A copy between pinned host memory and the device."""

    way: CopyWay
    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The device's sensors at one moment under load; None: it does not say."""

    clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """All that was timed on a device, warm."""

    device: Literal["cuda", "cpu"]
    device_name: str
    units: int
    """Streaming multiprocessors, or cores."""
    memory_bytes: int
    host_cores: int
    host_memory_bytes: int
    number_format: str
    """The first of training's formats on this device, in which attention was timed."""
    versions: dict[str, str]
    """torch, cuda, driver, products, attention: whatever the rates depend on."""
    products: tuple[ProductRow, ...]
    attentions: tuple[AttentionRow, ...]
    streams: tuple[StreamRow, ...]
    copies: tuple[CopyRow, ...]
    samples: tuple[Sample, ...]
    kept_up_flops_per_s: float | None
    """Of one large product over the last second before the rows, when the clock had settled; None: not timed."""
    launch_s: float
    """Device time of the shortest kernel among queued ones."""
    host_launch_s: float
    """Host time to submit it."""
    update_bytes_per_s: float | None
    """Of AdamW on the host's cores in fp32, while copies run both ways; None: not timed."""
    power_limit_w: float | None
    seconds: float
    """That measuring took."""
    notes: tuple[str, ...] = ()
    """Rows that could not be had, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitErrors:
    """|predicted ÷ measured − 1| of rows that the constants were not fitted to."""

    rows: int
    median: float
    largest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """How well the fitted constants foretell shapes that were left out of the fit; None: too few rows to leave any."""

    products: FitErrors | None
    attention: FitErrors | None
    streams: FitErrors | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductCall:
    """A matrix product over tensors of its own, to be called over and over."""

    run: Callable[[], object]
    kernel: str
    """What runs products of its format, where they are large."""


class ProductMaker(Protocol):
    """Makes a call of a matrix product of random numbers, not done yet."""

    def __call__(
        self, *, kind: ProductKind, rows: int, depth: int, columns: int, number_format: str, device: str
    ) -> ProductCall: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCalls:
    """Attention over tensors of its own, to be called over and over."""

    forward: Callable[[], object]
    backward: Callable[[], object]
    kernel: str
    """What runs it."""


class AttentionMaker(Protocol):
    """Makes calls of causal attention over whole sequences of random numbers, forward done once."""

    def __call__(
        self, *, sequences: int, tokens: int, heads: int, kv_heads: int, head_dim: int, number_format: str, device: str
    ) -> AttentionCalls: ...
