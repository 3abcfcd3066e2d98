"""The 198 published MPT rows, counted again and compared with what their tables print and with formulas by hand."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.mpt_table import Recounted, recounted
from flopwise.references.published.benchmark_tables import BenchmarkRow

A100_PEAK = 312e12
H100_PEAK = 1979e12 / 2
"""The datasheet prints 1,979 TFLOP/s with sparsity."""
VOCAB = 50_368
"""From the table: NumParams of 7b at 2,048 tokens is 32·12·d² + (V + 2048 + 418)·d, 418·d being biases and norms."""


@cache
def pairs() -> list[tuple[BenchmarkRow, Recounted]]:
    """Every row with its recount, made once for the whole file."""
    return recounted()


def row_of(model: str, device: str, tokens: int, devices: int) -> tuple[BenchmarkRow, Recounted]:
    """The one bf16 row of that model, device, length and number of devices."""
    wanted = (model, device, tokens, devices)
    found = [
        (row, again)
        for row, again in pairs()
        if (row.model, row.device, row.sequence_tokens, row.devices) == wanted and row.precision == "amp_bf16"
    ]
    assert len(found) == 1
    return found[0]


def test_every_printed_figure_comes_out_again() -> None:
    """Our PaLM-convention MFU and HFU against the MFU and HFU columns, in percentage points; parameters exactly."""
    assert len(pairs()) == 198
    for row, again in pairs():
        assert 100 * again.mfu_palm == pytest.approx(100 * row.mfu, abs=0.01), row
        assert 100 * again.hfu_printed == pytest.approx(100 * row.hfu, abs=0.01), row
        assert again.parameters == row.parameters, row


def test_the_mask_lowers_utilisation_and_recompute_raises_it() -> None:
    """Causal MFU against PaLM's for the same row, and each HFU against its MFU: flash attention always adds some."""
    for row, again in pairs():
        assert 0 < again.mfu_causal < again.mfu_palm < 1, row
        assert again.mfu_causal < again.hfu_causal < 1, row
        assert again.mfu_palm < again.hfu_palm, row


def causal_by_hand(
    *, layers: int, hidden: int, tokens: int, tokens_per_s_per_device: float, peak: float
) -> tuple[float, float]:
    """MFU, and HFU with the blocks checkpointed, of a GPT block of 12·d² weights under a causal mask.

    A token meets 12·L·d² + d·V weights, 6 FLOPs each; of the S keys it sees half on average, and 4·d FLOPs a layer and
    key go forward, three times that in all: 6·L·d·S. Executed are the blocks once more (8 instead of 6 FLOPs a weight)
    and attention 4.5 times its forward instead of 3 times: 9·L·d·S.
    """
    blocks, head, attention = 12 * layers * hidden**2, hidden * VOCAB, layers * hidden * tokens
    share = tokens_per_s_per_device / peak
    return (6 * (blocks + head) + 6 * attention) * share, (8 * blocks + 6 * head + 9 * attention) * share


def test_causal_figures_of_7b_at_65536_on_a100() -> None:
    """The recount against the formula by hand.

    8,108 tokens/s on 8 devices: 46.97 % in the table's convention is 29.70 % of work under a causal mask.
    """
    row, again = row_of("7b", "a100_80gb", 65_536, 8)
    assert (row.mfu, row.tokens_per_s, row.activation_checkpointing) == (0.4697, 8108, True)
    rate = 8108.5 / 8
    mfu, hfu = causal_by_hand(layers=32, hidden=4096, tokens=65_536, tokens_per_s_per_device=rate, peak=A100_PEAK)
    assert round(100 * mfu, 2) == 29.70
    assert again.mfu_causal == pytest.approx(mfu, rel=1e-9)
    assert again.hfu_causal == pytest.approx(hfu, rel=1e-9)


def test_causal_figures_of_30b_at_8192_on_h100() -> None:
    """The same for another device and size: 11,072 tokens/s on 8 devices, printed as 29.92 %."""
    row, again = row_of("30b", "h100_80gb", 8192, 8)
    assert (row.mfu, row.tokens_per_s, row.activation_checkpointing) == (0.2992, 11_072, True)
    rate = 11_072.5 / 8
    mfu, hfu = causal_by_hand(layers=48, hidden=7168, tokens=8192, tokens_per_s_per_device=rate, peak=H100_PEAK)
    assert again.mfu_causal == pytest.approx(mfu, rel=1e-9)
    assert again.hfu_causal == pytest.approx(hfu, rel=1e-9)


def test_without_checkpointing_only_attention_is_executed_twice() -> None:
    """HFU − MFU of a row that recomputes nothing: flash attention's scores again, a sixth of its 6·L·d·S FLOPs."""
    row, again = row_of("7b", "h100_80gb", 2048, 8)
    assert not row.activation_checkpointing
    assert row.mfu == row.hfu
    extra = 32 * 4096 * 2048 * (row.tokens_per_s + 0.5) / 8 / H100_PEAK
    assert again.hfu_causal - again.mfu_causal == pytest.approx(extra, rel=1e-9)
