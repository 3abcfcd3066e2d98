"""How much of a device's peak its kernels reach, as data in the hardware file.

Everything here is a small set of constants per device; nothing is keyed by a particular shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.work.formats import WIDTH_BYTES

MOST_FACTOR = 10.0
LEAST_SHARE = 1e-3
"""A kernel that reaches less than a thousandth of the peak is described wrongly."""


def _share(name: str, value: float, *, most: float = 1.0) -> None:
    if not LEAST_SHARE <= value <= most:
        raise FlopwiseError(f"{name} must be a share between {LEAST_SHARE:g} and {most:g}, got {value!r}", hint="0.7")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """An output tile that the matrix-product library may give to one unit."""

    rows: int
    columns: int
    """Which side is which does not matter: the longer one is laid along the longer side of the product."""
    share: float
    """Rate of a unit busy with such tiles, as a share of the sustained rate."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise FlopwiseError(f"a tile has positive sides, got {self.rows} × {self.columns}")
        _share("tile share", self.share)


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmEfficiency:
    """Matrix products."""

    source: str
    sustained: float
    """Share of the peak that large, deep, aligned products keep up, clocks under the power cap included."""
    tiles: tuple[Tile, ...]
    fill_depth: float
    """Depth (elements of k) that filling and draining a tile's pipeline costs, once per tile."""
    quantisation: float = 1.0
    """Share of a last, partly filled wave of tiles that is lost. 1: every wave takes its full time. 0: the work is
    spread evenly, as by kernels that split the last tiles, or on a card that its power cap slows down anyway."""
    exposed_output: float = 0.5
    """Share of the time for moving the output that is not hidden behind the multiplication."""
    by_format: dict[str, float] | None = None
    """`sustained` of number formats whose own share of their own peak is known; None: all are alike."""
    activates: bool = False
    """Whether products in bf16 and fp16 have the SwiGLU between them in them, as flopwise trains with quack-kernels.

    Plans for one device count on it; `predict`, which is for any trainer, does not."""

    def sustained_in(self, number_format: str) -> float:
        """Share of a format's peak that large, deep, aligned products keep up."""
        return (self.by_format or {}).get(number_format, self.sustained)

    def __post_init__(self) -> None:
        _share("sustained", self.sustained)
        for number_format, share in (self.by_format or {}).items():
            if number_format not in WIDTH_BYTES:
                raise unknown_name("number format (in gemm.by_format)", number_format, WIDTH_BYTES, hint="fp8 = 0.65")
            _share(f"gemm.by_format.{number_format}", share)
        for name, value in (("quantisation", self.quantisation), ("exposed_output", self.exposed_output)):
            if not 0 <= value <= 1:
                raise FlopwiseError(f"gemm.{name} must lie between 0 and 1, got {value!r}")
        if not self.tiles:
            raise FlopwiseError("gemm.tiles must list at least one tile")
        if not 0 <= self.fill_depth <= 1e6:
            raise FlopwiseError(f"fill_depth must lie between 0 and 1e6, got {self.fill_depth!r}", hint="100")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionEfficiency:
    """Flash attention: share of the peak by sequence length, between the points linear in log2(length).

    The lengths are of causal sequences; `predict.attention` says how others compare.
    """

    source: str
    forward: tuple[tuple[float, float], ...]
    """(tokens, share) for a head dimension of 128."""
    backward: tuple[tuple[float, float], ...]
    head_dim_64: float = 1.0
    """Factor for a head dimension of 64 and less; between 64 and 128 it is interpolated."""
    head_dim_64_backward: float | None = None
    """The same for the backward pass; None: as forward."""
    tail: float = 0.5
    """Share of the longest tile's time that the even spread of the work leaves over at the end."""
    packed_most: float | None = None
    """Share of the peak that kernels for sequences of uneven length reach at most; None: as for even ones."""
    pair_s: tuple[float, float] | None = None
    """Seconds of a (query, key) pair beside its products, forward and backward: a CPU's exponentials."""
    whole_keys: int | None = None
    """Keys of a block that a causal mask leaves whole, as torch's kernel for CPUs does."""
    others: dict[str, tuple[float, float]] | None = None
    """Kernel → how many times as fast it is, forward and backward, of kernels that may be installed instead."""
    kernel: str | None = None
    """Which of the others these are the rates of; None: of the one that was measured."""

    def by(self, kernel: str) -> AttentionEfficiency:
        """The rates of another kernel; these where nobody has compared it."""
        if kernel not in (self.others or {}):
            return self
        forward, backward = (self.others or {})[kernel]
        return replace(
            self,
            forward=tuple((tokens, min(1.0, share * forward)) for tokens, share in self.forward),
            backward=tuple((tokens, min(1.0, share * backward)) for tokens, share in self.backward),
            others=None,
            kernel=kernel,
        )

    def __post_init__(self) -> None:
        _share("attention.head_dim_64", self.head_dim_64)
        if self.head_dim_64_backward is not None:
            _share("attention.head_dim_64_backward", self.head_dim_64_backward)
        if self.packed_most is not None:
            _share("attention.packed_most", self.packed_most)
        for name, factors in (self.others or {}).items():
            if not 0 < min(factors) <= max(factors) <= MOST_FACTOR:
                raise FlopwiseError(
                    f"attention.others.{name} must be two factors above 0 and up to {MOST_FACTOR:g}, got {factors!r}",
                    hint="[1.09, 1.13]: as fast as the kernel that was measured, times so much, forward and backward",
                )
        pair_s, whole_keys = self.pair_s or (0.0, 0.0), self.whole_keys or 0
        if not 0 <= min(pair_s) <= max(pair_s) < 1 or not 0 <= whole_keys < 2**20:
            raise FlopwiseError(
                f"attention.pair_s and whole_keys cannot be {self.pair_s!r} and {self.whole_keys!r}",
                hint="pair_s = [6e-10, 1e-9], whole_keys = 512; or leave them out",
            )
        if not 0 <= self.tail <= 1:
            raise FlopwiseError(f"attention.tail must lie between 0 and 1, got {self.tail!r}")
        for name, points in (("forward", self.forward), ("backward", self.backward)):
            if not points or list(points) != sorted(points):
                raise FlopwiseError(f"attention.{name} must list (tokens, share) by rising tokens")
            for tokens, share in points:
                _share(f"attention.{name}", share)
                if not 0 < tokens < float("inf"):
                    raise FlopwiseError(f"attention.{name} needs lengths above 0, got {tokens!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEfficiency:
    """Kernels that are bound by bytes."""

    source: str
    dram: float
    """Share of the DRAM bandwidth that long streaming kernels reach."""
    half_bytes: float = 0.0
    """Bytes at which a kernel reaches half of that rate (start-up and tail)."""

    def __post_init__(self) -> None:
        _share("memory.dram", self.dram)
        if not 0 <= self.half_bytes <= 1e12:
            raise FlopwiseError(f"half_bytes must lie between 0 and 1e12, got {self.half_bytes!r}", hint="0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainEfficiency:
    """Operators that nobody fuses, call by call in caches: how flopwise trains on a CPU."""

    source: str
    call_s: float
    """What a call costs whatever its size, the program round it included."""
    bytes_per_s: float
    """Read and written by calls whose numbers stay in the caches."""
    function_s: float
    """Of an exponential, beside the bytes."""

    def __post_init__(self) -> None:
        if not 0 <= self.call_s < 1 or not 0 <= self.function_s < 1 or not 1e6 < self.bytes_per_s < 1e18:
            raise FlopwiseError(
                "plain.call_s and function_s are seconds below 1, bytes_per_s is more than 1e6",
                hint="call_s = 8e-6, bytes_per_s = 4e10, function_s = 8e-10",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """What a device's kernels reach of its peaks."""

    source: str
    launch_s: float
    """Device time that a kernel costs at the least, launches queued ahead."""
    gemm: GemmEfficiency
    attention: AttentionEfficiency
    memory: MemoryEfficiency
    plain: PlainEfficiency | None = None
    """None: operators that are bound by bytes are fused, as on a GPU."""

    def __post_init__(self) -> None:
        if not 0 <= self.launch_s < 1:
            raise FlopwiseError(f"launch_s must lie between 0 and 1 s, got {self.launch_s!r}")
