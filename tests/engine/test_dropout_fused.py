"""Dropout's kernels against the plain forms: the same masks, in norms, alone and in attention, also of changed scores.

They need a GPU; with TRITON_INTERPRET=1 and Triton at hand those in float32 run, slowly, on the processor.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from flopwise.engine.kernels import dropout as plain_dropout
from flopwise.engine.kernels import fused, fused_attention, fused_dropout, plain
from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.packed_attention import Packed, packed_backward, packed_forward
from flopwise.engine.kernels.plain_attention import AttentionMask, Saved, plain_backward, plain_forward
from tests.support.triton_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS
SINGLE, HALF = torch.float32, torch.bfloat16
TYPES = (SINGLE,) if IS_INTERPRETED else (SINGLE, HALF)
ATTENTION_TYPE = SINGLE if IS_INTERPRETED else HALF
"""The matrix unit rounds float32 to less."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def normal(*shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def mask_of(rows: int, share: float = 0.3) -> DropMask:
    tokens = torch.from_numpy(np.random.default_rng(1).integers(-(2**31), 2**31, rows).astype(np.int32))
    return DropMask(share, torch.tensor([-123456789, 987654321], dtype=torch.int32).to(DEVICE), tokens.to(DEVICE))


def close(found: Tensor, expected: Tensor, steps: float = 2.0, *, of: torch.dtype | None = None) -> None:
    """Equal within so many roundings of its type or another, as a share of the largest number."""
    step = 2**-8 if (of or found.dtype) == HALF else 4e-6
    largest = max(1.0, float(expected.abs().amax()))
    difference = float((found.double() - expected.double()).abs().amax())
    assert difference <= steps * step * largest, difference / (step * largest)


@pytest.mark.parametrize("share", [0.1, 0.75])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 7), (33, 257), (3, 4097)])
def test_rows(rows: int, width: int, dtype: torch.dtype, added: bool, share: float) -> None:
    source, other = (normal(rows, width + 3, dtype=dtype)[:, :width] for _ in range(2))
    mask = mask_of(rows, share)
    results = []
    for form in (plain_dropout, fused_dropout):
        out = torch.empty_like(source)
        form.dropout(source, mask, out=out, other=other if added else None)
        results.append(out)
        # Over what it reads.
        place = source.clone()
        form.dropout(place, mask, out=place, other=other if added else None)
        assert torch.equal(place, out)
    close(results[1], results[0])
    assert added or torch.equal(results[1] == 0, results[0] == 0)


@pytest.mark.parametrize("what", ["other", "out"])
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 7), (33, 257), (3, 4097), (2, 8193)])
def test_norms(rows: int, width: int, dtype: torch.dtype, rms: bool, what: str) -> None:
    source, other, gradient = (normal(rows, width + 3, dtype=dtype)[:, :width] for _ in range(3))
    weight, bias = normal(width, dtype=dtype), normal(width, dtype=dtype)
    mask = mask_of(rows)
    results: list[list[Tensor]] = []
    for form in (plain, fused):
        out, total = torch.empty_like(source), torch.empty_like(source)
        statistics = torch.empty((rows,) if rms else (rows, 2), device=DEVICE)
        form.norm_forward(
            *(source, weight, bias),
            epsilon=1e-5,
            rms=rms,
            out=out,
            statistics=statistics,
            other=other,
            total=total,
            drop_other=mask if what == "other" else None,
            drop_out=mask if what == "out" else None,
        )
        results.append([out, total, statistics])
        for accumulate in (False, True):
            below = torch.ones_like(source) if accumulate else gradient.clone()
            dropped, sums = torch.empty_like(source), torch.ones(2, width, device=DEVICE)
            form.norm_backward(
                *(gradient if accumulate else below, results[0][1], weight, results[0][2]),
                rms=rms,
                out=below,
                weight_gradient=sums[0],
                bias_gradient=sums[1],
                accumulate=accumulate,
                drop=mask,
                dropped=dropped,
            )
            results[-1] += [below, dropped, sums]
    for expected, found in zip(*results, strict=True):
        close(found, expected, 8.0)


MASKS = {
    "all": AttentionMask(4, 4, 24, causal=False, window=None),
    "causal": AttentionMask(4, 2, 64, causal=True, window=None),
    "window": AttentionMask(2, 1, 16, causal=True, window=37),
    "one head": AttentionMask(1, 1, 8, causal=True, window=None),
    "capped": AttentionMask(4, 2, 64, causal=True, window=37, cap=1.5, scaled_by=0.2),
    "ALiBi": AttentionMask(4, 2, 16, causal=True, window=None, slopes=(0.5, 0.25, 0.125, 0.0625)),
    "rounded ALiBi, capped": AttentionMask(
        2, 2, 16, causal=True, window=None, cap=2.0, slopes=(0.7, 0.3), rounded=True
    ),
    "wide heads": AttentionMask(2, 1, 256, causal=True, window=None, cap=30.0),
}
INTERPRETED = [name for name in MASKS if not (IS_INTERPRETED and MASKS[name].rounded)]
"""The interpreter cuts numbers to bf16 instead of rounding them."""


def assert_equal_attention(found: list[Tensor], expected: list[Tensor]) -> None:
    """Result, logsumexp and gradients. Weights are rounded to the inputs' type, wherever their products are summed."""
    for place, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        of = torch.float32 if place == 1 else found[0].dtype
        close(got, wanted, 4.0 if of == HALF else 30.0, of=of)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (70, 70), (130, 130), (9, 75), (64, 128)])
@pytest.mark.parametrize("kind", INTERPRETED)
@pytest.mark.parametrize("drops", [False, True])
def test_attention(drops: bool, kind: str, queries: int, keys: int, accumulate: bool) -> None:
    mask, sequences = MASKS[kind], 1 if accumulate else 2
    if not mask.causal and queries != keys:
        pytest.skip("what looks both ways is not cut")
    dtype = ATTENTION_TYPE
    query, gradient = (normal(sequences, queries, mask.heads, mask.head_dim, dtype=dtype) for _ in range(2))
    # Keys and values are columns of wider rows.
    wide = normal(sequences, keys, 2 * mask.kv_heads, mask.head_dim, dtype=dtype)
    key, value = wide[:, :, : mask.kv_heads], wide[:, :, mask.kv_heads :]
    drop = mask_of(sequences * queries) if drops else None
    lengths = None
    if not mask.causal:
        lengths = torch.tensor([keys, max(1, keys // 3)], dtype=torch.int32).to(DEVICE)[:sequences]
    results = []
    for name in ("plain", "fused"):
        out = torch.zeros_like(query)
        sums = torch.zeros(sequences, mask.heads, queries, device=DEVICE)
        if name == "plain":
            plain_forward(query, key, value, mask, out=out, logsumexp=sums, lengths=lengths, drop=drop)
            given = Saved(gradient, query, key, value, out, sums)
        else:
            fused_attention.forward(query, key, value, mask, drop, lengths=lengths, out=out, logsumexp=sums)
        kept = SINGLE if accumulate else dtype
        found = [torch.zeros_like(query), *(torch.ones(key.shape, dtype=kept, device=DEVICE) for _ in range(2))]
        if name == "plain":
            plain_backward(
                *(given, mask),
                query_gradient=found[0],
                key_gradient=found[1],
                value_gradient=found[2],
                accumulate=accumulate,
                lengths=lengths,
                drop=drop,
            )
        else:
            gradients = (found[0], found[1], found[2])
            fused_attention.backward(given, mask, drop, gradients, lengths=lengths, accumulate=accumulate)
        results.append([out, sums, *found])
    assert_equal_attention(results[1], results[0])


@pytest.mark.parametrize("lengths", [(5, 1, 90, 3), (1,), (70, 70), (64, 0, 65)])
@pytest.mark.parametrize("kind", INTERPRETED)
@pytest.mark.parametrize("drops", [False, True])
def test_packed_attention(drops: bool, kind: str, lengths: tuple[int, ...]) -> None:
    mask, rows = MASKS[kind], sum(lengths)
    query, gradient = (normal(rows, mask.heads, mask.head_dim, dtype=ATTENTION_TYPE) for _ in range(2))
    key, value = (normal(rows, mask.kv_heads, mask.head_dim, dtype=ATTENTION_TYPE) for _ in range(2))
    drop = mask_of(rows) if drops else None
    packed = Packed(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), max(lengths) + 3)
    on_cpu = (query.cpu(), key.cpu(), value.cpu())
    slow = None if drop is None else DropMask(drop.share, drop.keys.cpu(), drop.tokens.cpu())
    out, sums = torch.zeros_like(on_cpu[0]), torch.zeros(mask.heads, rows)
    packed_forward(on_cpu[0], on_cpu[1], on_cpu[2], mask, packed, out=out, logsumexp=sums, drop=slow)
    expected = [torch.zeros_like(each) for each in on_cpu]
    packed_backward(
        Saved(gradient.cpu(), on_cpu[0], on_cpu[1], on_cpu[2], out, sums),
        mask,
        packed,
        query_gradient=expected[0],
        key_gradient=expected[1],
        value_gradient=expected[2],
        drop=slow,
    )
    there = Packed(packed.starts.to(DEVICE), packed.longest)
    made, total = torch.zeros_like(query), torch.zeros(mask.heads, rows, device=DEVICE)
    fused_attention.packed_forward(query, key, value, mask, drop, there, out=made, logsumexp=total)
    found = (torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value))
    saved = Saved(gradient, query, key, value, out.to(DEVICE), sums.to(DEVICE))
    fused_attention.packed_backward(saved, mask, drop, there, found)
    assert_equal_attention([each.cpu() for each in (made, total, *found)], [out, sums, *expected])


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_value_of_ones_shows_which_weights_are_kept(share: float) -> None:
    """With equal keys and one channel a key of its own, the output is the mask."""
    tokens, mask = 64, AttentionMask(1, 1, 64, causal=False, window=None)
    zeros = torch.zeros(1, tokens, 1, 64, dtype=ATTENTION_TYPE, device=DEVICE)
    value = torch.eye(tokens, dtype=ATTENTION_TYPE, device=DEVICE).view(1, tokens, 1, 64)
    drop = mask_of(tokens, share)
    out, sums = torch.zeros_like(zeros), torch.zeros(1, 1, tokens, device=DEVICE)
    fused_attention.forward(zeros, zeros, value, mask, drop, lengths=None, out=out, logsumexp=sums)
    kept = out.view(tokens, tokens) > 0
    expected = torch.empty(tokens, tokens, device=DEVICE)
    # One head: the same places as those of rows.
    plain_dropout.dropout(torch.ones_like(expected), drop, out=expected)
    assert torch.equal(kept, expected > 0)
    close(out.view(tokens, tokens).float() * tokens, expected, 2000.0)
