"""The plain forms against float64 autograd of the obvious formulas, at odd sizes; what chunking must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from flopwise.engine.kernels import blocks, dispatch
from flopwise.work.activations import ACTIVATIONS
from tests.support.engine_memory import peak_bytes

SINGLE, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16
TYPES = (DOUBLE, SINGLE, HALF)
ROUNDING = {DOUBLE: 1e-12, SINGLE: 4e-6, HALF: 2**-8}
"""What results may be away from float64's, as a share of the largest."""

sizes = st.integers(1, 40)
types = st.sampled_from(TYPES)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE).to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    return DOUBLE if dtype == DOUBLE else SINGLE


def leaf(values: Tensor) -> Tensor:
    return values.double().clone().requires_grad_()


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    largest = max(1.0, float(expected.detach().abs().amax()))
    assert float((found.double() - expected.detach()).abs().amax()) <= tolerance * largest


@contextmanager
def small_blocks(block_bytes: int) -> Iterator[None]:
    """Blocks of a few rows, so that small tensors need several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", block_bytes)
        yield


def norm_formula(source: Tensor, weight: Tensor, bias: Tensor | None, *, rms: bool) -> Tensor:
    if rms:
        scaled = source * torch.rsqrt((source * source).mean(-1, keepdim=True) + 1e-5) * weight
        return scaled if bias is None else scaled + bias
    return functional.layer_norm(source, source.shape[-1:], weight, bias, eps=1e-5)


@given(
    rows=sizes,
    width=sizes,
    dtype=types,
    rms=st.booleans(),
    biased=st.booleans(),
    accumulate=st.booleans(),
    block_bytes=st.sampled_from([1, 4 << 20]),
)
def test_norms(
    *, rows: int, width: int, dtype: torch.dtype, rms: bool, biased: bool, accumulate: bool, block_bytes: int
) -> None:
    source, weight, bias = normal(rows, width, dtype=dtype), normal(width, dtype=dtype), normal(width, dtype=dtype)
    gradient, given_out = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype)
    leaves = [leaf(source), leaf(weight), leaf(bias)]
    expected = norm_formula(leaves[0], leaves[1], leaves[2] if biased else None, rms=rms)
    below, of_weight, of_bias = torch.autograd.grad(expected, leaves, gradient.double(), allow_unused=True)
    out = torch.full_like(source, 7.0)
    statistics = torch.empty((rows,) if rms else (rows, 2), dtype=wide(dtype))
    sums = torch.ones(2, width, dtype=wide(dtype))
    target = given_out.clone() if accumulate else gradient
    with small_blocks(block_bytes):
        dispatch.norm_forward(
            source, weight, bias if biased else None, epsilon=1e-5, rms=rms, out=out, statistics=statistics
        )
        # Without adding, the result takes the place of the gradient above.
        dispatch.norm_backward(
            *(gradient, source, weight, statistics),
            rms=rms,
            out=target,
            weight_gradient=sums[0],
            bias_gradient=sums[1] if biased else None,
            accumulate=accumulate,
        )
    # A row of one number has no deviation, and two may lie close: its reciprocal is large, and what is rounded with it.
    share = 300 if width <= 2 else 20
    close(out, expected, (3 if rms else 1) * ROUNDING[dtype])
    close(target, below + given_out.double() if accumulate else below, share * ROUNDING[wide(dtype)] + ROUNDING[dtype])
    close(sums[0] - 1, of_weight, share * ROUNDING[wide(dtype)] + (4 * ROUNDING[dtype] if rms else 0))
    assert (of_bias is not None) == biased
    close(sums[1] - 1, of_bias if biased else torch.zeros_like(of_weight), 20 * ROUNDING[wide(dtype)])


@given(rows=sizes, width=sizes, dtype=types, rms=st.booleans(), place=st.sampled_from([0, 1]))
def test_a_norm_takes_the_place_of_what_it_sums(
    *, rows: int, width: int, dtype: torch.dtype, rms: bool, place: int
) -> None:
    summed, weight = [normal(rows, width, dtype=dtype) for _ in range(2)], normal(width, dtype=dtype)
    statistics = torch.empty((rows,) if rms else (rows, 2), dtype=wide(dtype))
    total, alone = torch.add(*summed), torch.empty(rows, width, dtype=dtype)
    options: dict[str, Any] = {"epsilon": 1e-5, "rms": rms, "statistics": statistics}
    dispatch.norm_forward(total, weight, None, out=alone, **options)
    made = torch.empty_like(total)
    with small_blocks(1):
        dispatch.norm_forward(summed[0], weight, None, out=summed[place], other=summed[1], total=made, **options)
    assert torch.equal(summed[place], alone)
    assert torch.equal(made, total)


def test_the_rms_norm_rounds_as_transformers_does() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    source, weight = normal(9, 257, dtype=HALF), normal(257, dtype=HALF)
    module = llama.LlamaRMSNorm(257, eps=1e-6).to(HALF)
    module.weight.data.copy_(weight)
    out, statistics = torch.empty_like(source), torch.empty(9)
    dispatch.norm_forward(source, weight, None, epsilon=1e-6, rms=True, out=out, statistics=statistics)
    assert torch.equal(out, module(source).detach())


@given(
    tokens=sizes,
    heads=st.integers(1, 5),
    half=st.integers(1, 9),
    dtype=types,
    inverse=st.booleans(),
    in_place=st.booleans(),
)
def test_rotations(*, tokens: int, heads: int, half: int, dtype: torch.dtype, inverse: bool, in_place: bool) -> None:
    buffer = normal(tokens, heads + 1, 2 * half, dtype=dtype)
    source = buffer[:, 1:]
    positions, frequencies = torch.randint(0, 70_000, (tokens,), dtype=torch.int32), normal(half).abs()
    angles = positions[:, None].float() * frequencies
    # Angles, cosines and sines are of fp32 whatever the type of the heads.
    turn = torch.complex(angles.cos().double(), angles.sin().double() * (-1 if inverse else 1))[:, None]
    turned = torch.complex(source[..., :half].double(), source[..., half:].double()) * turn
    kept = buffer[:, 0].clone()
    out = source if in_place else torch.empty_like(source)
    with small_blocks(heads * half * 64):
        dispatch.rotate(source, positions, frequencies, out=out, inverse=inverse)
    close(out, torch.cat([turned.real, turned.imag], -1), ROUNDING[dtype])
    assert torch.equal(buffer[:, 0], kept)


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda values: functional.relu(values) ** 2,
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    "mish": functional.mish,
    "sigmoid": functional.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "linear": lambda values: values,
}
PAIRED = {"clamped_swiglu": lambda gate, up: REFERENCES["quick_gelu"](gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)}
"""Of a gate and what it multiplies."""


@pytest.mark.parametrize("kind", ACTIVATIONS)
@given(sizes, sizes, types, st.booleans())
@settings(max_examples=15)
def test_activations(kind: str, rows: int, width: int, dtype: torch.dtype, gated: bool) -> None:
    gated = gated or kind in PAIRED
    # Gate and up are halves of one projection; the gradients take the place of what they are of.
    together = normal(rows, 2 * width, dtype=dtype) * 4
    gate, up = together[:, :width], together[:, width:]
    gradient = normal(rows, width, dtype=dtype)
    leaves = [leaf(gate), leaf(up)]
    if kind in PAIRED:
        expected = PAIRED[kind](*leaves)
    else:
        act = REFERENCES[kind]
        expected = act(leaves[0]) * leaves[1] if gated else act(leaves[1])
    of_gate, of_up = torch.autograd.grad(expected, leaves, gradient.double(), allow_unused=True)
    out = torch.empty_like(up)
    with small_blocks(width * 100):
        dispatch.activation_forward(kind, gate if gated else None, up, out=out)
        dispatch.activation_backward(
            kind, gradient, gate if gated else None, up, gate_out=gate if gated else None, up_out=gradient
        )
    tolerance = ROUNDING[dtype] + ROUNDING[wide(dtype)]
    close(out, expected, tolerance)
    close(gradient, of_up, tolerance)
    if gated:
        close(gate, of_gate, tolerance)


@pytest.mark.parametrize("kind", REFERENCES)
def test_activations_far_out_stay_finite(kind: str) -> None:
    up = torch.tensor([[-1e4, -300.0, -88.0, -0.0, 0.0, 88.0, 300.0, 1e4]])
    out, below = torch.empty_like(up), torch.empty_like(up)
    dispatch.activation_forward(kind, None, up, out=out)
    dispatch.activation_backward(kind, torch.ones_like(up), None, up, gate_out=None, up_out=below)
    assert torch.isfinite(below).all()
    torch.testing.assert_close(out, REFERENCES[kind](up), rtol=1e-6, atol=1e-30)


@given(sizes, st.integers(2, 70), types, st.sampled_from([1, 4 << 20]))
def test_cross_entropy(rows: int, vocabulary: int, dtype: torch.dtype, block_bytes: int) -> None:
    logits = normal(rows, vocabulary, dtype=dtype) * 5
    labels = torch.randint(-1, vocabulary, (rows,), dtype=torch.int32)
    source = leaf(logits)
    total = functional.cross_entropy(source, labels.long(), ignore_index=-1, reduction="sum")
    below = torch.autograd.grad(total * 0.25, source)[0]
    loss = torch.tensor(3.0, dtype=wide(dtype))
    with small_blocks(block_bytes):
        dispatch.cross_entropy(logits, labels, scale=0.25, loss=loss)
    close(logits, below, ROUNDING[dtype])
    close(loss - 3, total, ROUNDING[wide(dtype)])
    assert (logits[labels < 0] == 0).all()


def test_cross_entropy_of_large_and_hidden_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [float("nan"), 1.0, 2.0], [-torch.inf, 0.0, 0.0]])
    loss = torch.zeros(())
    dispatch.cross_entropy(logits, torch.tensor([1, -100, 2], dtype=torch.int32), scale=1.0, loss=loss)
    assert logits.tolist() == [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.5, -0.5]]
    assert float(loss) == pytest.approx(2e4 + 0.6931472)


@given(
    rows=sizes,
    width=sizes,
    entries=st.integers(1, 9),
    dtype=types,
    kept=types,
    block_bytes=st.sampled_from([1, 300, 4 << 20]),
)
def test_embeddings(
    *, rows: int, width: int, entries: int, dtype: torch.dtype, kept: torch.dtype, block_bytes: int
) -> None:
    ids = torch.randint(0, entries, (rows,), dtype=torch.int32)
    table, given_out = normal(entries, width, dtype=dtype), normal(rows, width, dtype=dtype)
    gradient, sums = normal(rows, width, dtype=dtype), normal(entries, width, dtype=kept)
    expected = sums.double().index_add(0, ids.long(), gradient.double())
    out, added = torch.empty_like(given_out), given_out.clone()
    with small_blocks(block_bytes):
        dispatch.embedding_forward(ids, table, out=out)
        dispatch.embedding_add(ids, table, out=added)
        dispatch.embedding_backward(ids, gradient, table_gradient=sums)
    assert torch.equal(out, table[ids.long()])
    close(added, given_out.double() + table[ids.long()].double(), ROUNDING[dtype])
    close(sums, expected, max(ROUNDING[kept], ROUNDING[wide(dtype)]))


def test_one_id_many_times_is_rounded_once() -> None:
    # Added one by one, a bf16 sum would stop growing at 256.
    gradient, sums = torch.ones(5000, 3, dtype=HALF), torch.zeros(2, 3, dtype=HALF)
    with small_blocks(4096):
        dispatch.embedding_backward(torch.ones(5000, dtype=torch.int32), gradient, table_gradient=sums)
    assert sums.tolist() == [[0.0] * 3, [float(torch.tensor(5000.0).to(HALF))] * 3]


@given(st.integers(0, 5000), types, st.sampled_from([64, 4 << 20]))
def test_sums_of_squares(count: int, dtype: torch.dtype, block_bytes: int) -> None:
    values = normal(count, dtype=dtype)
    out = torch.tensor(2.0, dtype=wide(dtype))
    with small_blocks(block_bytes):
        dispatch.sum_of_squares(values, out=out)
    assert float(out) == pytest.approx(
        2 + float(values.double().square().sum()), rel=2e-6 if dtype != DOUBLE else 1e-12
    )


Result = dict[str, Tensor]


def by_rows(rows: slice, values: dict[str, Tensor], dtype: torch.dtype, *, rms: bool) -> Result:
    """Every row-wise operator on some of the rows."""
    source, gradient = values["source"][rows], values["gradient"][rows]
    count, width = source.shape
    out, below, act = torch.empty_like(source), torch.empty_like(source), torch.empty_like(source)
    statistics = torch.empty((count,) if rms else (count, 2))
    dispatch.norm_forward(source, values["weight"], None, epsilon=1e-5, rms=rms, out=out, statistics=statistics)
    dispatch.norm_backward(
        *(gradient, source, values["weight"], statistics),
        rms=rms,
        out=below,
        weight_gradient=torch.zeros(width),
        bias_gradient=None,
        accumulate=False,
    )
    logits = source.clone()
    dispatch.cross_entropy(logits, values["labels"][rows], scale=0.5, loss=torch.zeros(()))
    results = {"out": out, "statistics": statistics, "below": below, "logits": logits}
    for kind in ("silu", "gelu", "gelu_tanh", "mish"):
        dispatch.activation_forward(kind, gradient, source, out=act)
        results[kind] = act.clone()
        of_gate, of_up = torch.empty_like(source), torch.empty_like(source)
        dispatch.activation_backward(kind, gradient, source, out, gate_out=of_gate, up_out=of_up)
        results[f"{kind} gate"], results[f"{kind} up"] = of_gate, of_up
    assert out.dtype == dtype
    return results


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(23, 1), (23, 7), (23, 129)])
def test_a_row_is_the_same_in_every_chunk(dtype: torch.dtype, rms: bool, rows: int, width: int) -> None:
    check_chunks(dtype, rows, width, rms=rms, steps=(1, 2, 5))


@pytest.mark.usefixtures("_two_threads")
def test_a_long_row_is_the_same_in_every_chunk() -> None:
    # Rows of this length are shared among threads where torch may choose.
    check_chunks(SINGLE, 3, 50257, rms=False, steps=(1, 2))


def check_chunks(dtype: torch.dtype, rows: int, width: int, *, rms: bool, steps: tuple[int, ...]) -> None:
    values = {
        "source": normal(rows, width, dtype=dtype),
        "gradient": normal(rows, width, dtype=dtype),
        "weight": normal(width, dtype=dtype),
        "labels": torch.randint(0, width, (rows,), dtype=torch.int32),
    }
    whole = by_rows(slice(0, rows), values, dtype, rms=rms)
    for step in steps:
        pieces = [by_rows(slice(first, first + step), values, dtype, rms=rms) for first in range(0, rows, step)]
        for name, result in whole.items():
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), result), (name, step)


def test_temporaries_are_bounded() -> None:
    # Tensors of 32 MiB in bf16; a row takes 16 KiB.
    rows, width = 4096, 4096
    source, gradient, out = (torch.ones(rows, width, dtype=HALF) for _ in range(3))
    weight, sums, statistics = torch.ones(width, dtype=HALF), torch.zeros(2, width), torch.empty(rows, 2)
    ids, loss, turns = torch.arange(rows, dtype=torch.int32) % 50, torch.zeros(()), torch.ones(64)
    calls: dict[str, Callable[[], None]] = {
        "norm": lambda: dispatch.norm_forward(
            source, weight, weight, epsilon=1e-5, rms=False, out=out, statistics=statistics
        ),
        "norm backward": lambda: dispatch.norm_backward(
            *(gradient, source, weight, statistics),
            rms=False,
            out=out,
            weight_gradient=sums[0],
            bias_gradient=sums[1],
            accumulate=True,
        ),
        "rotate": lambda: dispatch.rotate(
            source.view(rows, 32, 128), ids, turns, out=out.view(rows, 32, 128), inverse=True
        ),
        "activation": lambda: dispatch.activation_forward("gelu_tanh", gradient, source, out=out),
        "activation backward": lambda: dispatch.activation_backward(
            "mish", gradient, out, source, gate_out=out, up_out=gradient
        ),
        "embedding": lambda: dispatch.embedding_forward(ids, source, out=out),
        "embedding add": lambda: dispatch.embedding_add(ids, source, out=out),
        "embedding backward": lambda: dispatch.embedding_backward(ids, source, table_gradient=out),
        "squares": lambda: dispatch.sum_of_squares(source, out=loss),
        "cross entropy": lambda: dispatch.cross_entropy(gradient, ids, scale=1.0, loss=loss),
    }
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    assert {name: peak for name, peak in peaks.items() if not 1 << 20 < peak <= 1.25 * blocks.BLOCK_BYTES} == {}
