"""How much of a device's peak its kernels reach, as data in the hardware file.

Everything here is a small set of constants per device; nothing is keyed by a particular shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.work.formats import OPERAND_BYTES

MOST_FACTOR = 2.0
"""Of narrow and wide heads beside those of 128."""
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
    timed: float | None = None
    """`sustained` of products that were timed one by one, where steps that last show another; None: the same.
    A card that is still cool is faster, and tests may be too short for its library."""
    activates: bool = False
    """Whether products in bf16 and fp16 have the SwiGLU between them in them, as flopwise trains with quack-kernels.

    Plans for one device count on it; `predict`, which is for any trainer, does not."""

    def sustained_in(self, number_format: str) -> float:
        """Share of a format's peak that large, deep, aligned products keep up."""
        return (self.by_format or {}).get(number_format, self.sustained)

    def __post_init__(self) -> None:
        _share("sustained", self.sustained)
        for number_format, share in (self.by_format or {}).items():
            if number_format not in OPERAND_BYTES:
                raise unknown_name("number format (in gemm.by_format)", number_format, OPERAND_BYTES, hint="fp8 = 0.65")
            _share(f"gemm.by_format.{number_format}", share)
        if self.timed is not None:
            _share("gemm.timed", self.timed)
        for name, value in (("quantisation", self.quantisation), ("exposed_output", self.exposed_output)):
            if not 0 <= value <= 1:
                raise FlopwiseError(f"gemm.{name} must lie between 0 and 1, got {value!r}")
        if not self.tiles:
            raise FlopwiseError("gemm.tiles must list at least one tile")
        if not 0 <= self.fill_depth <= 1e6:
            raise FlopwiseError(f"fill_depth must lie between 0 and 1e6, got {self.fill_depth!r}", hint="100")


FLASH_KERNELS = (
    *("flash-2", "flash-3", "flash-4", "cudnn", "triton", "mem-efficient", "ck", "splash", "nki", "flopwise"),
)
"""Families of kernels for flash attention: Dao's generations, cuDNN's (which Transformer Engine calls), OpenAI's Triton
of 2022, CUTLASS's memory-efficient one of xFormers and torch, AMD's Composable Kernel, Google's and Amazon's own, and
ours, for dropped weights and changed scores."""


NARROW_VALUES = ("flash-3", "flash-4", "cudnn")
"""Families with kernels for values narrower than keys (latent attention's 192 and 128); to the others they are padded:
FlashAttention's `hopper` and `cute` folders, cuDNN's attention since 9 (its release notes)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionEfficiency:
    """A family of kernels for flash attention: share of the peak by sequence length, linear in log2(length).

    The lengths are of causal sequences; `predict.attention` says how others compare.
    """

    source: str
    kernel: str | None = None
    """Whose rates these are, one of `FLASH_KERNELS`; None: nobody says."""
    forward: tuple[tuple[float, float], ...]
    """(tokens, share) for a head dimension of 128."""
    backward: tuple[tuple[float, float], ...]
    head_dim_64: float = 1.0
    """Factor for a head dimension of 64 and less; between 64 and 128 it is interpolated."""
    head_dim_64_backward: float | None = None
    """The same for the backward pass; None: as forward."""
    head_dim_256: float = 1.0
    """Factor for a head dimension of 256 and more."""
    head_dim_256_backward: float | None = None
    tail: float = 0.5
    """Share of the longest tile's time that the even spread of the work leaves over at the end."""
    most_head_dim: int | None = None
    """The widest head that they take; None: any."""
    uneven: bool = True
    """Whether they take sequences of uneven length that lie one behind another."""
    windows: bool = True
    """Whether they leave out what a sliding window hides."""
    pair_s: tuple[float, float] | None = None
    """Seconds of a (query, key) pair beside its products, forward and backward: a CPU's exponentials."""
    whole_keys: int | None = None
    """Keys of a block that a causal mask leaves whole, as torch's kernel for CPUs does."""
    others: dict[str, AttentionEfficiency] | None = None
    """By family, those that a trainer may call instead; the first that can is taken where these kernels cannot."""

    @property
    def narrow_values(self) -> bool:
        """Whether values narrower than keys stay so."""
        return self.kernel in NARROW_VALUES

    @property
    def families(self) -> tuple[str, ...]:
        """Whose rates are known, those that are taken first being first."""
        return (*((self.kernel,) if self.kernel else ()), *(self.others or {}))

    def preferring(self, kernels: Sequence[str]) -> AttentionEfficiency:
        """The same with the named families before all others, as far as there are rates of them."""
        known = {self.kernel or "": replace(self, others=None), **(self.others or {})}
        order = [*(name for name in kernels if name in known), *(name for name in known if name not in kernels)]
        if order == list(known):
            return self
        first, *rest = order
        return replace(known[first], kernel=first or None, others={name: known[name] for name in rest})

    def for_calls(self, head_dim: float, *, packed: bool, windowed: bool) -> AttentionEfficiency:
        """The first family that takes such heads and sequences; these rates where none is known to."""
        each = (self, *(self.others or {}).values())
        return next((one for one in each if one.takes(head_dim, packed=packed, windowed=windowed)), self)

    def takes(self, head_dim: float, *, packed: bool, windowed: bool) -> bool:
        """Whether these kernels are made for such heads and sequences."""
        narrow = self.most_head_dim is None or head_dim <= self.most_head_dim
        return narrow and (self.uneven or not packed) and (self.windows or not windowed)

    def __post_init__(self) -> None:
        if self.kernel is not None:
            _check_family(self.kernel)
        for factor in ("head_dim_64", "head_dim_64_backward", "head_dim_256", "head_dim_256_backward"):
            value = getattr(self, factor)
            if value is not None:
                _share(f"attention.{factor}", value, most=MOST_FACTOR)
        for name, one in (self.others or {}).items():
            _check_family(name)
            if one.others is not None or one.kernel not in (None, name) or name == self.kernel:
                raise FlopwiseError(
                    f"attention.others.{name} must be the rates of one other family",
                    hint=f"[efficiency.attention.others.{name}] with source, forward and backward",
                )
        if self.others:
            named = {name: one if one.kernel else replace(one, kernel=name) for name, one in self.others.items()}
            object.__setattr__(self, "others", named)
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


def _check_family(name: str) -> None:
    if name not in FLASH_KERNELS:
        raise unknown_name("attention kernel", name, FLASH_KERNELS, hint=f"one of {', '.join(FLASH_KERNELS)}")


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
