"""Predicted against measured kernels, per device and source: `python -m benchmarks.kernels`.

Error is |predicted / measured − 1| of the time. `≥1024` are the matrix products whose three sides are all at least
1024. The constants stand in the catalogue and come from `benchmarks.fit_kernels`, whose docstring says what was
fitted to which rows: three constants of a chip's kernels, one `sustained` share a card. So these errors are in sample;
`held out` repeats the fit on one half of the shapes and tests on the other, both ways round, halves by a hash of the
sides (so that a shape and its transpose, or another output format, are never on both sides).

Readings of the published rows:
- LLMCompass lists matrix products in seconds and TFLOP/s (fp16), and softmax, layer norm and GELU in 10⁹ elements per
  second; its times include the host's launch and synchronisation. The A100's elements are fp16, read and written once:
  4 bytes. The MI210's are taken as fp32, 8 bytes, since its simulator uses that there and fp16 would put a GELU at
  38 % of the bandwidth.
- Nsight Compute (RAPID-LLM's counters) locks the clock, about 1.05 GHz, so the peak is scaled to it and no power cap
  applies; 1065 MHz is the base clock of the A100 PCIe 80 GB. Its products with one column are matrix-vector products.
- SimuMax divides by peak times its efficiency; attention counts the whole square, 2 and 5 times (query + value width)
  FLOPs for a pair, though the mask is causal. Of its rows the contiguous ones are used.
- B200 has two camps, at about 0.64 and 0.49 of the peak, with alike shapes in both; nothing here tells them apart.
- Grouped products of SimuMax are one cuBLAS call a group on several streams; here they count as one kernel.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.fit_kernels import CHIPS, fit_attentions, fit_gemms
from benchmarks.kernel_rows import (
    AttentionRows,
    Floats,
    GemmRows,
    Rows,
    efficiency_for,
    errors,
    load_attentions,
    load_gemms,
    load_streams,
    predict_attentions,
    predict_gemms,
    predict_streams,
)
from flopwise.catalog.load import load_hardware

STREAMING_BYTES = 2**24
"""Rows of fewer bytes measure the launch more than the memory."""


def gemm_errors(rows: GemmRows) -> Floats:
    """Errors with the catalogue's constants."""
    hardware = load_hardware(rows.device)
    return errors(predict_gemms(rows, hardware, efficiency_for(rows, hardware)), rows.seconds)


def held_out_gemms(sets: list[GemmRows]) -> list[Floats]:
    """Errors of every row with constants fitted, over all sets of the chip, to the other half of the shapes."""
    halves = [_half(np.sort(np.stack([rows.m, rows.n, rows.k], axis=1), axis=1)) for rows in sets]
    found = [np.zeros(len(rows.seconds)) for rows in sets]
    for side in (False, True):
        fitted = fit_gemms([rows.where(half == side) for rows, half in zip(sets, halves, strict=True)])
        for rows, half, efficiency, result in zip(sets, halves, fitted, found, strict=True):
            # Predicted whole, so that the constant of the measuring method is the same as in sample.
            predicted = predict_gemms(rows, load_hardware(rows.device), efficiency)
            result[half != side] = errors(predicted, rows.seconds)[half != side]
    return found


def held_out_attention(rows: AttentionRows) -> Floats:
    """Errors of every row with constants fitted to the other half of the shapes."""
    half = _half(np.stack([rows.tokens, rows.heads, rows.value_dim], axis=1))
    hardware = load_hardware(rows.device)
    found = np.zeros(len(rows.seconds))
    for side in (False, True):
        efficiency = fit_attentions(rows.where(half == side))
        found[half != side] = errors(predict_attentions(rows, hardware, efficiency), rows.seconds)[half != side]
    return found


def _half(shapes: Floats) -> NDArray[np.bool_]:
    return np.array([zlib.crc32(",".join(f"{side:.0f}" for side in shape).encode()) % 2 == 1 for shape in shapes])


def _gemm_lines() -> Iterator[str]:
    sets = {(rows.source, rows.device): rows for rows in load_gemms()}
    held_out: dict[tuple[str, str], Floats] = {}
    for keys in CHIPS.values():
        held_out.update(zip(keys, held_out_gemms([sets[key] for key in keys]), strict=True))
    for key, rows in sets.items():
        found, other = gemm_errors(rows), held_out.get(key)
        for name, mask in (("≥1024", rows.large), ("all", np.ones(len(found), dtype=bool))):
            if mask.any():
                yield _line("gemm", rows, name, found[mask], None if other is None else other[mask])


def _attention_lines() -> Iterator[str]:
    for rows in load_attentions():
        hardware = load_hardware(rows.device)
        found = errors(predict_attentions(rows, hardware, hardware.efficiency), rows.seconds)
        other = held_out_attention(rows)
        square = rows.query_dim == rows.value_dim
        yield _line("attention", rows, "fitted", found[square], other[square])
        if not square.all():
            yield _line("attention", rows, "192/128", found[~square], other[~square])


def _streaming_lines() -> Iterator[str]:
    for rows in load_streams():
        hardware = load_hardware(rows.device)
        found = errors(predict_streams(rows, hardware, hardware.efficiency), rows.seconds)
        mask = rows.bytes >= STREAMING_BYTES
        if mask.any():
            yield _line(rows.kernel, rows, "≥16 MiB", found[mask], None)


def _line(kernel: str, rows: Rows, shapes: str, found: Floats, other: Floats | None) -> str:
    figures = (np.median(found), found.mean(), np.quantile(found, 0.9), found.max())
    printed = "".join(f"{100 * figure:>8.1f}" for figure in figures)
    rest = "" if other is None else f"{100 * np.median(other):>11.1f}{100 * other.mean():>8.1f}"
    return f"{kernel:<11}{rows.device:<16}{rows.source:<17}{shapes:<9}{len(found):>5}{printed}{rest}"


def main() -> None:
    print("errors of the time in %".rjust(84))
    print(
        f"{'kernel':<11}{'device':<16}{'source':<17}{'shapes':<9}{'rows':>5}"
        f"{'median':>8}{'mean':>8}{'p90':>8}{'max':>8}{'held out':>11}{'mean':>8}"
    )
    for lines in (_gemm_lines(), _attention_lines(), _streaming_lines()):
        for line in lines:
            print(line)


if __name__ == "__main__":
    main()
