"""MFU and HFU of the 198 published MPT rows, counted again: `python -m benchmarks.mpt_table [FILE.md]`.

Prints, per table, how far our figures are from the printed ones, what the `causal` convention makes of them, and, for
the rows on eight GPUs, what share of the speed predicted for one device without communication they reached.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from flopwise.catalog.load import load_hardware, load_model
from flopwise.predict import Setup, step
from flopwise.references.published.benchmark_tables import BenchmarkRow, read_benchmark_tables
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES
from flopwise.work.model import Model
from flopwise.work.work import Recompute

TABLES = Path(__file__).parents[1] / "tests" / "data" / "mpt_tables.md"
HARDWARE = {"h100_80gb": "h100-sxm", "a100_80gb": "a100-80gb", "a100_40gb": "a100-40gb"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recounted:
    """A published row's utilisation under each way of counting; shares of the peak."""

    parameters: int
    mfu_palm: float
    hfu_printed: float
    """As the table counts it: the whole model once more under checkpointing, nothing for flash attention."""
    hfu_palm: float
    """The same convention with what is really executed: blocks again, not the head; flash attention's recompute."""
    mfu_causal: float
    hfu_causal: float


def recount(row: BenchmarkRow, model: Model, peak_flops: float) -> Recounted:
    """Count a row anew. The printed tokens/s is truncated, so half a token is added: the middle of what it may be."""
    work = describe(model, row.sequence_tokens)
    sequences_per_s = (row.tokens_per_s + 0.5) / row.sequence_tokens
    rate = sequences_per_s / (row.devices * peak_flops)
    policy: Recompute = "full" if row.activation_checkpointing else "none"
    mfu_palm = work.model_flops("palm") * rate
    return Recounted(
        parameters=work.parameters,
        mfu_palm=mfu_palm,
        hfu_printed=mfu_palm * (4 / 3 if row.activation_checkpointing else 1),
        hfu_palm=work.total_hardware_flops("palm", policy) * rate,
        mfu_causal=work.model_flops("causal") * rate,
        hfu_causal=work.total_hardware_flops("causal", policy) * rate,
    )


def peak_flops(row: BenchmarkRow) -> float:
    """The catalogue's dense peak for the row's device and number format."""
    number_format = row.precision.removeprefix("amp_")
    return load_hardware(HARDWARE[row.device]).device.peak_flops[number_format].value


def recounted(path: Path = TABLES) -> list[tuple[BenchmarkRow, Recounted]]:
    """Every row of the document with its figures counted again."""
    rows = read_benchmark_tables(path.read_text(encoding="utf-8"))
    return [(row, recount(row, load_model(f"mpt-{row.model}"), peak_flops(row))) for row in rows]


def reached(row: BenchmarkRow) -> float:
    """Published MFU as a share of that predicted for one device with the row's own micro-batch."""
    setup = Setup(
        model=load_model(f"mpt-{row.model}"),
        hardware=load_hardware(HARDWARE[row.device]),
        sequence_tokens=row.sequence_tokens,
        batch_sequences=row.micro_batch * row.accumulation_steps,
        micro_batch_sequences=row.micro_batch,
        formats=POLICIES["bf16-amp"],
        recompute="full" if row.activation_checkpointing else "none",
    )
    return row.mfu / step(setup, convention="palm").mfu


def main() -> None:
    pairs = recounted(Path(sys.argv[1]) if len(sys.argv) > 1 else TABLES)
    print(f"{len(pairs)} rows; deviations in percentage points, ratios as causal ÷ printed\n")
    print(
        f"{'table':<26}{'rows':>5}{'MFU':>8}{'HFU':>8}{'params':>8}{'causal MFU: min, median, max':>31}{'reached':>9}"
    )
    for table in dict.fromkeys(row.table for row, _ in pairs):
        group = [(row, again) for row, again in pairs if row.table == table]
        mfu = max(abs(again.mfu_palm - row.mfu) for row, again in group) * 100
        hfu = max(abs(again.hfu_printed - row.hfu) for row, again in group) * 100
        exact = sum(again.parameters == row.parameters for row, again in group)
        ratios = sorted(again.mfu_causal / row.mfu for row, again in group)
        spread = f"{ratios[0]:.3f}, {statistics.median(ratios):.3f}, {ratios[-1]:.3f}"
        shares = [reached(row) for row, _ in group if row.devices == 8 and not row.precision.endswith("fp8")]
        median = f"{statistics.median(shares):.2f}" if shares else "-"
        print(f"{table[:24]:<26}{len(group):>5}{mfu:>8.4f}{hfu:>8.4f}{exact:>8}{spread:>31}{median:>9}")


if __name__ == "__main__":
    main()
