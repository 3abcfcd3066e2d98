"""Which kernels a calibration times, and for how long: the shapes of transformer training, and a few odd ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from flopwise.records.calibration import ProductKind

MIB = 2**20
KINDS: tuple[ProductKind, ...] = ("forward", "to_source", "to_matrix")
HALVES = ("bf16", "fp16")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CALL_TOKENS = 16384
"""Of all sequences of an attention call, unless one alone is longer."""
VOCABULARY = 128256
SKINNY = (
    (128, 4096, 4096),
    (128, 4096, 14336),
    (256, 4096, 6144),
    (512, 4096, 4096),
    (512, 14336, 4096),
    (1024, 1024, 1024),
    (512, 512, 512),
    (2048, 768, 768),
    (4096, 128, 4096),
    (8192, 256, 8192),
    (1536, 4096, 1536),
    (3072, 1024, 3072),
    (640, 2048, 2048),
    (4096, 4096, 192),
)
"""(rows, depth, columns): few tiles, shallow depths, odd waves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductShape:
    """A matrix product (rows × depth)·(depth × columns)."""

    number_format: str
    kind: ProductKind
    rows: int
    depth: int
    columns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Causal attention over whole sequences."""

    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What is timed; products in the order of what matters most, in case time runs out."""

    products: tuple[ProductShape, ...]
    other_products: tuple[ProductShape, ...]
    """In formats that training can do without."""
    attentions: tuple[AttentionShape, ...]
    stream_bytes: tuple[int, ...]
    """Of one tensor."""
    copy_bytes: int
    update_parameters: int
    row_s: float
    """That a row is timed for."""
    settle_s: tuple[float, float]
    """How long large products run before anything is timed, at the least and at the most."""
    most_s: float
    """After this, rows that are left are left out."""


def gpu_schedule(formats: Collection[str], *, quick: bool) -> Schedule:
    """For a GPU that multiplies in these formats."""
    first = first_format(formats)
    hidden = ((2048, 8192), (4096, 14336), (8192, 28672)) if not quick else ((2048, 8192), (4096, 14336))
    products = [shape for sizes in hidden for shape in _layers(first, *sizes, tokens=8192)]
    if not quick:
        products += [
            shape for tokens in (2048, 16384) for sizes in hidden[:2] for shape in _layers(first, *sizes, tokens)
        ]
        products += _layers(first, 768, 3072, 8192)
        products += _layers(first, 768, 3072, 2048)
    products += [shape for tokens in (2048, 8192)[quick:] for shape in _layer(first, 4096, VOCABULARY, tokens)]
    # The product that warms the card up, once more among the rows.
    products.append(_product(first, "to_source", 8192, 8192, 8192))
    skinny = SKINNY[::3] if quick else SKINNY
    products += [_product(first, "forward", *sides) for sides in skinny]
    others = [name for name in ("fp8", "tf32", "fp32") if name in formats and name != first]
    return Schedule(
        products=tuple(products),
        other_products=tuple(shape for name in others for shape in _of_other_format(name, quick=quick)),
        attentions=tuple(_attentions(quick=quick)),
        stream_bytes=(MIB // 2, 2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB)[:: 2 if quick else 1],
        copy_bytes=256 * MIB,
        update_parameters=100_000_000,
        row_s=0.04 if quick else 0.12,
        settle_s=(2.0, 3.0) if quick else (4.0, 8.0),
        most_s=40.0 if quick else 100.0,
    )


def cpu_schedule(*, quick: bool) -> Schedule:
    """For a CPU: what models have that learn there."""
    hidden, tokens = ((256, 512), (256,)) if quick else ((256, 512, 1024), (256, 1024))
    sizes = [(size, count) for count in tokens for size in hidden]
    products = [shape for size, count in sizes for shape in _layer("fp32", size, size, count)]
    products += [shape for size, count in sizes for shape in _layer("fp32", size, 4 * size, count)]
    products += [shape for size, count in sizes for shape in _layer("fp32", 4 * size, size, count)]
    lengths = (128, 256, 512) if quick else (128, 256, 512, 1024, 2048)
    return Schedule(
        products=tuple(products),
        other_products=tuple(
            shape
            for size in hidden[:2]
            for sides in ((size, 4 * size), (4 * size, size))
            for shape in _layer("bf16", *sides, 256)
        ),
        attentions=tuple(
            AttentionShape(sequences=max(1, 1024 // length), tokens=length, heads=8, kv_heads=4, head_dim=64)
            for length in lengths
        ),
        stream_bytes=(MIB // 4, 4 * MIB, 64 * MIB),
        copy_bytes=0,
        update_parameters=0,
        row_s=0.05 if quick else 0.2,
        settle_s=(0.2, 0.2) if quick else (0.5, 0.5),
        most_s=15.0 if quick else 50.0,
    )


def first_format(formats: Collection[str]) -> str:
    """Training's first choice among formats, as plans make it."""
    return next((name for name in HALVES if name in formats), "fp32")


def _product(number_format: str, kind: ProductKind, *sides: int) -> ProductShape:
    rows, depth, columns = sides
    return ProductShape(number_format=number_format, kind=kind, rows=rows, depth=depth, columns=columns)


def _layer(number_format: str, inputs: int, outputs: int, tokens: int) -> list[ProductShape]:
    """A layer's three products."""
    sides = {
        "forward": (tokens, inputs, outputs),
        "to_source": (tokens, outputs, inputs),
        "to_matrix": (outputs, tokens, inputs),
    }
    return [_product(number_format, kind, *sides[kind]) for kind in KINDS]


def _layers(number_format: str, hidden: int, inner: int, tokens: int) -> list[ProductShape]:
    """A block's layers: queries, keys and values; attention's result; gate and up; down."""
    sizes = ((hidden, 3 * hidden // 2), (hidden, hidden), (hidden, 2 * inner), (inner, hidden))
    return [shape for size in sizes for shape in _layer(number_format, *size, tokens)]


def _of_other_format(number_format: str, *, quick: bool) -> Iterator[ProductShape]:
    # fp8 is multiplied in one layout only, whatever the product is for.
    if number_format == "fp8":
        for hidden, inner in ((4096, 14336), (8192, 28672))[: 1 if quick else 2]:
            for shape in _layers("fp8", hidden, inner, 16384):
                yield _product("fp8", "forward", shape.rows, shape.depth, shape.columns)
        return
    for sides in ((4096, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 1024))[: 1 if quick else 3]:
        yield _product(number_format, "forward", *sides)


def _attentions(*, quick: bool) -> Iterator[AttentionShape]:
    wide: Sequence[int] = (512, 2048, 8192, 32768) if quick else LENGTHS
    narrow: Sequence[int] = (2048, 8192) if quick else LENGTHS[:-1]
    for head_dim, lengths in ((128, wide), (64, narrow)):
        for tokens in lengths:
            sequences = max(1, CALL_TOKENS // tokens)
            yield AttentionShape(sequences=sequences, tokens=tokens, heads=32, kv_heads=8, head_dim=head_dim)
    if not quick:
        # Fewer tiles than units: what the tail costs.
        for tokens, heads in ((1024, 8), (2048, 8), (4096, 4), (8192, 4)):
            yield AttentionShape(sequences=1, tokens=tokens, heads=heads, kv_heads=max(1, heads // 4), head_dim=128)
