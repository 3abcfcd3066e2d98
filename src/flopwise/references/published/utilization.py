"""MFU and HFU of published measurements, counted again from throughput, shape and peak."""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.references.published.benchmark_tables import BenchmarkRow
from flopwise.work.describe import describe
from flopwise.work.model import Model
from flopwise.work.work import Recompute


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
