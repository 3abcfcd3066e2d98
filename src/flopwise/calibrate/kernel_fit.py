"""A device's efficiency constants from kernels that were timed on it.

Streams first, since products and attention move bytes too: seconds = launch + (bytes + half_bytes) / rate is linear in
1 / rate and half_bytes / rate, so both come from one least-squares fit of relative errors; the launch is measured.

Matrix products: three constants of the kernels (fill_depth, quantisation, exposed_output) and the `sustained` share,
fitted to the rows of training's first number format; other formats then have a share of their own. Rows weigh 1 when
every side is at least 1024 and 0.3 otherwise. Small tiles follow one law for all chips, share ∝ 1 / (1 + 25 · (1/rows +
1/columns)), in which 1/rows + 1/columns are the operand bytes that a tile needs per FLOP.

Attention: per direction the share of endless sequences, top, and the keys that a tile's start and end cost, start:
share = top / (1 + 2 · start / tokens); a factor for heads of 64 and the tail. Rows with less than eight tiles of
queries a unit weigh 0.3. Then each length that was timed with full heads of 128 gets the share that meets it.

What is minimised is the mean |ln(predicted / measured)|, by differential evolution (Storn & Price 1997) with a fixed
seed. Held out: constants fitted to one half of the shapes are tested on the other, both ways round; the halves are by a
hash of the sides, so that a shape and its transpose are never on both sides.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.predict.kernels.attention import TILE_QUERIES, attention_times
from flopwise.predict.kernels.bandwidth import streaming_times
from flopwise.predict.kernels.gemm import gemm_times
from flopwise.records.calibration import AttentionRow, Calibration, FitErrors, Fitted, ProductRow, StreamRow
from flopwise.setup.efficiency import AttentionEfficiency, Efficiency, GemmEfficiency, MemoryEfficiency, Tile
from flopwise.setup.hardware import Device
from flopwise.work.formats import WIDTH_BYTES

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]
Row = TypeVar("Row", ProductRow, AttentionRow, StreamRow)

TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
TILE_SLOPE = 25.0
"""Fitted to the A100; it costs every other chip less than 0.1 points of error."""
KERNEL_BOUNDS = ((0.0, 300.0), (0.0, 1.0), (0.0, 1.0))
"""Of fill_depth, quantisation and exposed_output."""
SUSTAINED_BOUNDS = (0.05, 1.0)
ATTENTION_BOUNDS = ((0.01, 1.0), (0.01, 1.0), (0.0, 1.0), (0.3, 1.0), (0.3, 1.0), (10.0, 1500.0), (10.0, 1500.0))
"""Of top, forward and backward, the tail, narrow heads forward and backward, start forward and backward."""
LENGTHS = (256.0, 1024.0, 4096.0, 16384.0, 65536.0)
SMALL_WEIGHT = 0.3
MEMBERS, GENERATIONS = 24, 50
"""Of a fit to a few hundred rows: more of them change no constant that is written."""
LEAST_HALF, LEAST_STREAMS = 8, 3
"""Rows in each half that a fit of four constants and more needs, and one of two."""
LEAST_SHARE, LARGEST_SHARE = 1e-3, 1.0


def fit_efficiency(device: Device, start: Efficiency, calibration: Calibration) -> tuple[Efficiency, Fitted]:
    """Constants from all rows, and the errors of those fitted to half of them; what was not timed is as in `start`.

    The device's peaks are what shares are of, and must hold for every format that was timed.
    """
    efficiency = replace(start, launch_s=_round(calibration.launch_s))
    streams, products, attentions = calibration.streams, calibration.products, calibration.attentions
    if streams:
        efficiency = replace(efficiency, memory=fit_streams(device, efficiency, streams))
    based, first = efficiency, calibration.number_format
    if any(row.number_format == first for row in products):
        efficiency = replace(efficiency, gemm=fit_products(device, efficiency, products, first))
    if attentions:
        efficiency = replace(efficiency, attention=fit_attention(device, efficiency, attentions))
    whole = efficiency
    lengths = sorted({float(row.tokens) for row in attentions})

    def refit_products(rows: Sequence[ProductRow]) -> Efficiency:
        return replace(whole, gemm=fit_products(device, based, rows, first))

    def refit_attention(rows: Sequence[AttentionRow]) -> Efficiency:
        return replace(whole, attention=fit_attention(device, whole, rows, lengths))

    def refit_streams(rows: Sequence[StreamRow]) -> Efficiency:
        return replace(whole, memory=fit_streams(device, based, rows))

    fitted = Fitted(
        products=held_out(
            [row for row in products if row.number_format == first],
            lambda row: sorted((row.rows, row.depth, row.columns)),
            refit_products,
            lambda rows, found: product_seconds(device, found, rows),
        ),
        attention=held_out(
            attentions,
            lambda row: (row.tokens, row.heads, row.sequences),
            refit_attention,
            lambda rows, found: attention_seconds(device, found, rows),
        ),
        streams=held_out(
            streams,
            lambda row: (row.bytes,),
            refit_streams,
            lambda rows, found: stream_seconds(device, found, rows),
            least=LEAST_STREAMS,
        ),
    )
    return whole, fitted


# -- what rows should take -------------------------------------------------------------------------------------------


def product_seconds(device: Device, efficiency: Efficiency, rows: Sequence[ProductRow]) -> Floats:
    """Predicted seconds of each product."""
    gemm = efficiency.gemm
    peaks = [_peak(device, row.number_format) * gemm.sustained_in(row.number_format) / gemm.sustained for row in rows]
    return gemm_times(
        device,
        efficiency,
        [row.rows for row in rows],
        [row.depth for row in rows],
        [row.columns for row in rows],
        peak_flops=peaks,
        operand_bytes=[WIDTH_BYTES[row.number_format] for row in rows],
        output_bytes=[row.output_bytes for row in rows],
        accumulate=[row.accumulates for row in rows],
    ).seconds


def attention_seconds(device: Device, efficiency: Efficiency, rows: Sequence[AttentionRow]) -> Floats:
    """Predicted seconds of each call."""
    seconds = np.zeros(len(rows))
    for direction in ("forward", "backward"):
        mine = [index for index, row in enumerate(rows) if row.direction == direction]
        if mine:
            found = [rows[index] for index in mine]
            seconds[mine] = attention_times(
                device,
                efficiency,
                direction,
                flops=[row.flops for row in found],
                moved_bytes=[row.moved_elements * WIDTH_BYTES[row.number_format] for row in found],
                heads=[row.sequences * row.heads for row in found],
                tokens=[row.tokens for row in found],
                head_dim=[row.head_dim for row in found],
                peak_flops=[_peak(device, row.number_format) for row in found],
            ).seconds
    return seconds


def stream_seconds(device: Device, efficiency: Efficiency, rows: Sequence[StreamRow]) -> Floats:
    """Predicted seconds of each kernel."""
    return streaming_times(device, efficiency, [row.bytes for row in rows]).seconds


def _peak(device: Device, number_format: str) -> float:
    if number_format not in device.peak_flops:
        raise FlopwiseError(
            f"the device has no peak for {number_format}",
            why="a product's rate is told as a share of it",
            hint="add it to [device.peak_flops]",
        )
    return device.peak_flops[number_format].value


# -- fits ------------------------------------------------------------------------------------------------------------


def fit_streams(device: Device, start: Efficiency, rows: Sequence[StreamRow]) -> MemoryEfficiency:
    """Share of the bandwidth, and the bytes that a kernel's start and end cost beyond its launch."""
    bandwidth = device.dram.bandwidth_bytes_per_s
    assert bandwidth is not None  # Device refuses a `dram` level without it
    seconds, moved = _column(row.seconds for row in rows), _column(row.bytes for row in rows)
    beyond = np.maximum(seconds - start.launch_s, 0.1 * seconds)
    # Relative errors: each row is divided by what it took.
    columns = np.stack([moved, np.ones_like(moved)], axis=1) / beyond[:, None]
    slope, offset = np.linalg.lstsq(columns, np.ones_like(moved), rcond=None)[0].tolist()
    if offset < 0 or slope <= 0 or len(np.unique(moved)) < 2:
        slope, offset = float(np.median(beyond / moved)), 0.0
    share = min(1.0 / (slope * bandwidth.value), LARGEST_SHARE)
    return replace(start.memory, dram=round(share, 3), half_bytes=float(f"{offset / slope:.3g}"))


def fit_products(device: Device, start: Efficiency, rows: Sequence[ProductRow], first: str) -> GemmEfficiency:
    """Constants from the rows of the `first` format, and a share for each other one."""
    own = [row for row in rows if row.number_format == first]
    measured = np.log(_column(row.seconds for row in own))
    weights = np.where([row.is_large for row in own], 1.0, SMALL_WEIGHT)
    tiles = law_tiles() if device.kind == "gpu" else start.gemm.tiles
    plain = replace(start, gemm=replace(start.gemm, tiles=tiles, by_format=None))

    def loss(constants: Floats) -> float:
        candidate = with_gemm_constants(plain, constants)
        return _distance(product_seconds(device, candidate, own), measured, weights)

    bounds = np.array([*KERNEL_BOUNDS, SUSTAINED_BOUNDS])
    found = minimise(remembered(loss, rounded_gemm_constants), bounds, members=MEMBERS, generations=GENERATIONS)
    fitted = with_gemm_constants(plain, found)
    others = sorted({row.number_format for row in rows} - {first})
    shares = {
        name: _share_of_format(device, fitted, [row for row in rows if row.number_format == name]) for name in others
    }
    return replace(fitted.gemm, by_format=shares or None)


def _share_of_format(device: Device, efficiency: Efficiency, rows: Sequence[ProductRow]) -> float:
    """`sustained` for the rows' format, the kernels' other constants as they are."""
    measured = np.log(_column(row.seconds for row in rows))
    weights = np.where([row.is_large for row in rows], 1.0, SMALL_WEIGHT)

    def loss(constants: Floats) -> float:
        candidate = replace(efficiency.gemm, by_format={rows[0].number_format: float(constants[0])})
        return _distance(product_seconds(device, replace(efficiency, gemm=candidate), rows), measured, weights)

    return round(float(minimise(loss, np.array([SUSTAINED_BOUNDS]), members=10, generations=25)[0]), 4)


def fit_attention(
    device: Device, start: Efficiency, rows: Sequence[AttentionRow], lengths: Sequence[float] = ()
) -> AttentionEfficiency:
    """Shares by length (those of the rows, where none are given), the factor of narrow heads and the tail."""
    measured = np.log(_column(row.seconds for row in rows))
    tiles = _column(row.sequences * row.heads * row.tokens / TILE_QUERIES for row in rows)
    weights = np.where(tiles >= 8 * device.units.value, 1.0, SMALL_WEIGHT)
    points = lengths or sorted({float(row.tokens) for row in rows})
    narrow = min(row.head_dim for row in rows) <= 64 < max(row.head_dim for row in rows)

    def candidate(constants: Floats) -> Efficiency:
        attention = with_attention_constants(start.attention, constants, lengths=points, narrow=narrow)
        return replace(start, attention=attention)

    def loss(constants: Floats) -> float:
        return _distance(attention_seconds(device, candidate(constants), rows), measured, weights)

    found = candidate(minimise(loss, np.array(ATTENTION_BOUNDS), members=MEMBERS, generations=GENERATIONS))
    return _met(device, found, rows)


def _met(device: Device, efficiency: Efficiency, rows: Sequence[AttentionRow]) -> AttentionEfficiency:
    """The curves through the rows themselves, where a length was timed with wide heads and enough of them."""
    widest = max(row.head_dim for row in rows)
    for direction in ("forward", "backward"):
        best: dict[float, AttentionRow] = {}
        for row in rows:
            if row.direction == direction and row.head_dim == widest:
                kept = best.get(row.tokens)
                if kept is None or row.sequences * row.heads > kept.sequences * kept.heads:
                    best[row.tokens] = row
        most = max((row.sequences * row.heads * row.tokens for row in best.values()), default=0)
        full = {tokens: row for tokens, row in best.items() if 4 * row.sequences * row.heads * row.tokens >= most}
        # What the launches and the tail take is no share, so the second round still moves a little.
        for _ in range(2):
            points = getattr(efficiency.attention, direction)
            predicted = attention_seconds(device, efficiency, list(full.values()))
            factor = {tokens: seconds / full[tokens].seconds for tokens, seconds in zip(full, predicted, strict=True)}
            moved = tuple((tokens, _clip(share * float(factor.get(tokens, 1.0)))) for tokens, share in points)
            changes: dict[str, Any] = {direction: moved}
            efficiency = replace(efficiency, attention=replace(efficiency.attention, **changes))
    return efficiency.attention


# -- constants to descriptions ---------------------------------------------------------------------------------------


def law_tiles() -> tuple[Tile, ...]:
    """The menu of a GPU's library, with the rates that the law gives them."""
    rates = [1.0 / (1.0 + TILE_SLOPE * (1.0 / rows + 1.0 / columns)) for rows, columns in TILES]
    return tuple(
        Tile(rows=rows, columns=columns, share=round(rate / max(rates), 3))
        for (rows, columns), rate in zip(TILES, rates, strict=True)
    )


def with_gemm_constants(start: Efficiency, constants: Iterable[float]) -> Efficiency:
    """The efficiency with fill_depth, quantisation, exposed_output and sustained, rounded as files have them."""
    fill, quantisation, exposed, sustained = rounded_gemm_constants(constants)
    gemm = replace(
        start.gemm,
        sustained=sustained,
        fill_depth=fill,
        quantisation=quantisation,
        exposed_output=exposed,
    )
    return replace(start, gemm=gemm)


def rounded_gemm_constants(constants: Iterable[float]) -> tuple[float, ...]:
    """As files have them; a `sustained` of further devices may follow."""
    fill, quantisation, exposed, *sustained = (float(value) for value in constants)
    return round(fill), round(quantisation, 2), round(exposed, 2), *(round(share, 4) for share in sustained)


def with_attention_constants(
    start: AttentionEfficiency, constants: Iterable[float], *, lengths: Sequence[float] = LENGTHS, narrow: bool
) -> AttentionEfficiency:
    """The efficiency with constants in the order of `ATTENTION_BOUNDS`; `narrow`: heads of 64 were timed as well."""
    top, top_backward, tail, forward_64, backward_64, begin, begin_backward = (float(value) for value in constants)
    attention = replace(
        start,
        forward=by_length(top, begin, lengths),
        backward=by_length(top_backward, begin_backward, lengths),
        tail=round(tail, 2),
    )
    if narrow:
        attention = replace(attention, head_dim_64=round(forward_64, 3), head_dim_64_backward=round(backward_64, 3))
    return attention


def by_length(top: float, begin: float, lengths: Sequence[float] = LENGTHS) -> tuple[tuple[float, float], ...]:
    """The share of each length, from that of endless ones and the keys that a tile's start and end cost."""
    return tuple((length, _clip(top / (1.0 + 2.0 * begin / length), 3)) for length in lengths)


# -- searching and testing -------------------------------------------------------------------------------------------


def remembered(loss: Callable[[Floats], float], rounded: Callable[[Floats], Hashable]) -> Callable[[Floats], float]:
    """The same loss, found once for constants that are rounded alike: half of what a search tries, towards its end."""
    found: dict[Hashable, float] = {}

    def once(constants: Floats) -> float:
        key = rounded(constants)
        if key not in found:
            found[key] = loss(constants)
        return found[key]

    return once


def minimise(loss: Callable[[Floats], float], bounds: Floats, *, members: int = 40, generations: int = 90) -> Floats:
    """Differential evolution, rand-to-best/1/bin, reproducible."""
    random = np.random.default_rng(20240607)
    low, high = bounds[:, 0], bounds[:, 1]
    population = low + random.random((members, len(bounds))) * (high - low)
    losses = np.array([loss(member) for member in population])
    for _ in range(generations):
        for index in range(members):
            best = population[int(np.argmin(losses))]
            one, two = population[random.choice(members, 2, replace=False)]
            step = population[index] + 0.7 * (best - population[index]) + random.uniform(0.3, 0.9) * (one - two)
            kept = random.random(len(bounds)) < 0.2
            trial = np.clip(np.where(kept, population[index], step), low, high)
            value = loss(trial)
            if value < losses[index]:
                population[index], losses[index] = trial, value
    return np.asarray(population[int(np.argmin(losses))])


def halves(shapes: Iterable[Sequence[float]]) -> Booleans:
    """Which half each shape is in, by a hash of its sides."""
    return np.array([zlib.crc32(",".join(f"{side:.0f}" for side in shape).encode()) % 2 == 1 for shape in shapes])


def held_out(
    rows: Sequence[Row],
    shape: Callable[[Row], Sequence[float]],
    fit: Callable[[Sequence[Row]], Efficiency],
    seconds: Callable[[Sequence[Row], Efficiency], Floats],
    *,
    least: int = LEAST_HALF,
) -> FitErrors | None:
    """Errors of every row with constants fitted to the other half of the shapes; None where a half is too small."""
    half = halves([shape(row) for row in rows])
    if not len(rows) or min(int(half.sum()), int((~half).sum())) < least:
        return None
    errors = []
    for side in (False, True):
        known = [row for row, mine in zip(rows, half, strict=True) if mine == side]
        tested = [row for row, mine in zip(rows, half, strict=True) if mine != side]
        predicted = seconds(tested, fit(known))
        errors.append(np.abs(predicted / _column(row.seconds for row in tested) - 1.0))
    found = np.concatenate(errors)
    return FitErrors(rows=len(found), median=float(np.median(found)), largest=float(found.max()))


def _distance(predicted: Floats, measured_logarithm: Floats, weights: Floats) -> float:
    return float(np.average(np.abs(np.log(predicted) - measured_logarithm), weights=weights))


def _column(values: Iterable[float]) -> Floats:
    return np.array([float(value) for value in values])


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _clip(share: float, digits: int = 4) -> float:
    return round(min(max(share, LEAST_SHARE), LARGEST_SHARE), digits)
