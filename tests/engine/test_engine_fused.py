"""The fused forms against the plain ones at awkward sizes.

They need a GPU; with TRITON_INTERPRET=1 and Triton at hand those in float32 run, slowly, on the processor. Its
interpreter cuts numbers to bf16 instead of rounding them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from flopwise.engine.kernels import (
    activations,
    dispatch,
    fused,
    fused_activations,
    fused_heads,
    fused_update,
    heads,
    plain,
    simple_updates,
)
from flopwise.engine.kernels import adamw as plain_adamw
from flopwise.engine.kernels.heads import Turn
from flopwise.engine.kernels.rounding import Seed
from flopwise.engine.kernels.updating import UpdateSettings
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.products import Products
from tests.support.triton_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS
SINGLE, HALF = torch.float32, torch.bfloat16
TYPES = (SINGLE,) if IS_INTERPRETED else (SINGLE, HALF)
KEPT = ((SINGLE, SINGLE, False), (HALF, SINGLE, True), (HALF, HALF, False), (HALF, HALF, True))
"""Types of weights and moments, and whether there is a master."""
SHAPES = ((1, 1), (37, 1), (5, 7), (33, 257), (3, 4097), (2, 8193), (3, 20011))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def normal(*shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def close(found: Tensor, expected: Tensor, steps: float = 1.0) -> None:
    """Equal within so many roundings of the type, as a share of the largest number."""
    step = 2**-8 if found.dtype == HALF else 4e-6
    largest = max(1.0, float(expected.abs().amax()))
    difference = float((found.double() - expected.double()).abs().amax())
    assert difference <= steps * step * largest, difference / (step * largest)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_norms(rows: int, width: int, dtype: torch.dtype, rms: bool, biased: bool) -> None:
    # Rows of a wider tensor, so that their distance is not their width.
    source, gradient = (normal(rows, width + 3, dtype=dtype)[:, :width] for _ in range(2))
    weight, bias = normal(width, dtype=dtype), normal(width, dtype=dtype) if biased else None
    results: list[list[Tensor]] = []
    for form in (plain, fused):
        out = torch.empty_like(source)
        statistics = torch.empty((rows,) if rms else (rows, 2), device=DEVICE)
        form.norm_forward(source, weight, bias, epsilon=1e-5, rms=rms, out=out, statistics=statistics)
        results.append([out, statistics])
        for accumulate, kept in ((False, SINGLE), (True, HALF)):
            below = torch.ones_like(source) if accumulate else gradient.clone()
            sums = torch.ones(2, width, dtype=kept, device=DEVICE)
            form.norm_backward(
                *(gradient if accumulate else below, source, weight, results[0][1]),
                rms=rms,
                out=below,
                weight_gradient=sums[0],
                bias_gradient=sums[1] if biased else None,
                accumulate=accumulate,
            )
            results[-1] += [below, sums]
    steps = (1, 1, 30, 8, 30, 8) if width == 1 else (2, 1, 2, 2, 2, 2)
    for expected, found, allowed in zip(*results, steps, strict=True):
        close(found, expected, allowed)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 10), (33, 5, 128), (3, 40, 96)])
@pytest.mark.parametrize("inverse", [True, False])
def test_rotations(dtype: torch.dtype, shape: tuple[int, int, int], inverse: bool) -> None:
    tokens, heads, dim = shape
    buffer = normal(tokens, heads + 1, dim, dtype=dtype)
    expected, frequencies = buffer.clone(), normal(dim // 2).abs()
    # Beyond 105,615 radians, where sines take a longer way.
    positions = torch.randint(0, 300_000, (tokens,), dtype=torch.int32).to(DEVICE)
    plain.rotate(expected[:, 1:], positions, frequencies, out=expected[:, 1:], inverse=inverse)
    fused.rotate(buffer[:, 1:], positions, frequencies, out=buffer[:, 1:], inverse=inverse)
    close(buffer, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 10), (33, 5, 128), (3, 40, 96)])
@pytest.mark.parametrize(("rms", "biased"), [(True, False), (False, True)])
@pytest.mark.parametrize("neighbours", [True, False])
def test_norms_and_rotations_of_heads_in_one(
    dtype: torch.dtype, shape: tuple[int, int, int], rms: bool, biased: bool, neighbours: bool
) -> None:
    tokens, count, dim = shape
    # Heads among those of a wider product.
    source, gradient = (normal(tokens, count + 1, dim, dtype=dtype) for _ in range(2))
    weight, bias = normal(dim, dtype=dtype), normal(dim, dtype=dtype) if biased else None
    turn = Turn(
        positions=torch.randint(0, 300_000, (tokens,), dtype=torch.int32).to(DEVICE),
        frequencies=normal(dim // 2).abs(),
        scale=1.25,
        neighbours=neighbours,
    )
    results: list[list[Tensor]] = []
    ways = ((heads.forward_in_two, heads.backward_in_two), (fused_heads.forward, fused_heads.backward))
    for forward, backward in ways:
        out, above = torch.empty_like(source), gradient.clone()
        statistics = torch.empty((tokens * count,) if rms else (tokens * count, 2), device=DEVICE)
        forward(source[:, 1:], weight, bias, turn, epsilon=1e-5, rms=rms, out=out[:, 1:], statistics=statistics)
        sums = torch.ones(2, dim, dtype=dtype, device=DEVICE)
        backward(
            *(above[:, 1:], source[:, 1:], weight, statistics, turn),
            rms=rms,
            out=above[:, 1:],
            weight_gradient=sums[0],
            bias_gradient=sums[1] if biased else None,
        )
        assert torch.equal(above[:, 0], gradient[:, 0]), "heads beside them stay as they are"
        results.append([out[:, 1:], statistics, above[:, 1:], sums])
    steps = (2, 1, 30, 8) if dim == 2 else (2, 1, 4, 2)
    for expected, found, allowed in zip(*results, steps, strict=True):
        close(found, expected, allowed)


@pytest.mark.parametrize("kind", fused_activations.ACTIVATIONS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("rows", "width"), SHAPES[:5])
def test_activations(kind: str, dtype: torch.dtype, gated: bool, rows: int, width: int) -> None:
    gated = gated or kind == activations.CLAMPED
    together, gradient = normal(rows, 2 * width, dtype=dtype) * 4, normal(rows, width, dtype=dtype)
    together[0, 0], together[-1, -1] = 300.0, -300.0
    results: list[list[Tensor]] = []
    for form in (activations, fused_activations):
        inputs, above, out = together.clone(), gradient.clone(), torch.empty_like(gradient)
        gate, up = inputs[:, :width] if gated else None, inputs[:, width:]
        form.activation_forward(kind, gate, up, out=out)
        form.activation_backward(kind, above, gate, up, gate_out=gate, up_out=above)
        results.append([out, above, inputs])
        recompute, made = together.clone(), gradient.clone()
        gate, up = recompute[:, :width] if gated else None, recompute[:, width:]
        form.activation_backward(kind, made, gate, up, gate_out=gate, up_out=up, recompute=True)
        assert torch.equal(made, out), "the result that is made again is the one that forward made"
        results[-1] += [recompute]
    for expected, found in zip(*results, strict=True):
        close(found, expected)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rms", [True, False])
def test_norms_of_sums_and_norms_made_again(rows: int, width: int, dtype: torch.dtype, rms: bool) -> None:
    source, other, gradient = (normal(rows, width + 3, dtype=dtype)[:, :width] for _ in range(3))
    weight, bias = normal(width, dtype=dtype), None if rms else normal(width, dtype=dtype)
    results: list[list[Tensor]] = []
    for form in (plain, fused):
        out, total, copied = (torch.empty_like(source) for _ in range(3))
        statistics = torch.empty((rows,) if rms else (rows, 2), device=DEVICE)
        form.norm_forward(
            *(source, weight, bias),
            epsilon=1e-5,
            rms=rms,
            out=out,
            statistics=statistics,
            other=other,
            total=total,
        )
        alone = torch.empty_like(out)
        form.norm_forward(total, weight, bias, epsilon=1e-5, rms=rms, out=alone, statistics=statistics, total=copied)
        assert torch.equal(total, torch.add(source, other))
        assert torch.equal(copied, total)
        assert torch.equal(alone, out)
        for place in (0, 1):
            summed = [source.clone(), other.clone()]
            form.norm_forward(
                *(summed[0], weight, bias),
                epsilon=1e-5,
                rms=rms,
                out=summed[place],
                statistics=statistics,
                other=summed[1],
                total=copied,
            )
            assert torch.equal(summed[place], out) and torch.equal(copied, total), "in the place of what is summed"
        results.append([out])
        for frozen in (False, True):
            sums, below, above = torch.zeros(2, width, device=DEVICE), torch.ones_like(source), gradient.clone()
            form.norm_backward(
                *(above, total, weight, statistics),
                rms=rms,
                out=below,
                weight_gradient=None if frozen else sums[0],
                bias_gradient=None if rms or frozen else sums[1],
                accumulate=True,
                recompute=True,
                bias=bias,
            )
            close(above, out, 0.0 if form is fused else 1.0)
            results[-1] += [below, sums]
    for expected, found in zip(*results, strict=True):
        close(found, expected, 30 if width == 1 else 2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (9, 7), (5, 4097), (3, 50257), (4, 50304)])
@pytest.mark.parametrize("room", [0, 3, 15])
def test_cross_entropy(dtype: torch.dtype, rows: int, vocabulary: int, room: int) -> None:
    """With room behind rows of 50,257 that begins a line, and with such that does not."""
    logits = (normal(rows, vocabulary + room, dtype=dtype) * 5)[:, :vocabulary]
    before = logits.as_strided((rows, vocabulary + room), (vocabulary + room, 1))[:, vocabulary:].clone()
    labels = torch.randint(0, vocabulary, (rows,), dtype=torch.int32).to(DEVICE)
    labels[rows // 2] = -1
    if rows > 1:
        logits[0, : vocabulary // 2] = -torch.inf
        labels[0] = vocabulary - 1
    expected, losses = logits.clone(), torch.ones(2, device=DEVICE)
    plain.cross_entropy(expected, labels, scale=3.0, loss=losses[0])
    fused.cross_entropy(logits, labels, scale=3.0, loss=losses[1])
    close(logits, expected)
    assert (logits[rows // 2] == 0).all()
    behind = logits.as_strided((rows, vocabulary + room), (vocabulary + room, 1))[:, vocabulary:]
    assert ((behind == before) | (behind == 0)).all()
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-5)


@pytest.mark.skipif(IS_INTERPRETED, reason="8 GiB of logits")
def test_cross_entropy_beyond_32_bits() -> None:
    rows, vocabulary = 16400, 131_072
    logits = torch.zeros(rows, vocabulary, dtype=HALF, device=DEVICE)
    labels, loss = torch.full((rows,), 5, dtype=torch.int32, device=DEVICE), torch.zeros((), device=DEVICE)
    fused.cross_entropy(logits, labels, scale=1.0, loss=loss)
    assert float(loss) == pytest.approx(rows * 17 * 0.69314718, rel=1e-5)
    assert logits[-1, 4:7].tolist() == [2.0**-17, -1.0, 2.0**-17]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kept", TYPES)
@pytest.mark.parametrize(("rows", "width", "entries"), [(1, 1, 1), (37, 7, 3), (201, 600, 50), (300, 33, 1)])
def test_embeddings(dtype: torch.dtype, kept: torch.dtype, rows: int, width: int, entries: int) -> None:
    ids = torch.randint(0, entries, (rows,), dtype=torch.int32).to(DEVICE)
    gradient, sums = normal(rows, width, dtype=dtype), normal(entries + 2, width, dtype=kept)
    expected = sums.clone()
    plain.embedding_backward(ids, gradient, table_gradient=expected)
    fused.embedding_backward(ids, gradient, table_gradient=sums)
    close(sums, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (37, 7), (201, 1024), (65, 2500)])
def test_rows_are_copied(dtype: torch.dtype, rows: int, width: int) -> None:
    wide, out = (
        normal(rows, width + 11, dtype=dtype),
        torch.full((rows, width + 5), torch.nan, dtype=dtype, device=DEVICE),
    )
    fused.copy_rows(wide[:, 11:], out=out[:, 5:])
    assert torch.equal(out[:, 5:], wide[:, 11:])
    assert out[:, :5].isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kept", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 67, 3, 40), (3, 130, 5, 128)])
@pytest.mark.parametrize("add", [True, False])
def test_heads_are_copied(dtype: torch.dtype, kept: torch.dtype, shape: tuple[int, int, int, int], add: bool) -> None:
    sequences, tokens, heads, channels = shape
    given = normal(sequences, heads, tokens, channels, dtype=dtype).transpose(1, 2)
    found = normal(sequences, tokens, heads + 2, channels, dtype=kept)
    expected = found.clone()
    dispatched = expected[:, :, 1:-1]
    dispatched.copy_(dispatched.float() + given.float() if add else given)
    fused.copy_heads(given, out=found[:, :, 1:-1], add=add)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (2, 67, 3, 40), (2, 130, 5, 128)])
def test_parts_of_attention_are_merged(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    sequences, tokens, heads, channels = shape
    one, other = (
        (normal(sequences, heads, tokens, channels, dtype=dtype).transpose(1, 2), 9 * normal(sequences, heads, tokens))
        for _ in "12"
    )
    results = []
    for merge in (plain.merge_attention, fused.merge_attention):
        out, sums = normal(*shape, dtype=dtype), normal(sequences, heads, tokens + 5)[:, :, 2:-3]
        merge(one, other, out=out, logsumexp=sums)
        results.append((out, sums))
    for expected, found in zip(*results, strict=True):
        close(found, expected, 2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kept", TYPES)
@pytest.mark.parametrize(("rows", "width", "entries"), [(1, 1, 1), (37, 7, 3), (201, 1500, 50)])
def test_rows_of_tables(dtype: torch.dtype, kept: torch.dtype, rows: int, width: int, entries: int) -> None:
    ids = torch.randint(0, entries, (rows,), dtype=torch.int32).to(DEVICE)
    table, positions = normal(entries, width, dtype=kept), normal(entries, width + 3, dtype=kept)[:, :width]
    expected, found = (torch.full((rows, width + 5), torch.nan, dtype=dtype, device=DEVICE)[:, :width] for _ in "12")
    plain.embedding_forward(ids, table, out=expected)
    fused.embedding(ids, table, out=found, add=False)
    assert torch.equal(found, expected)
    plain.embedding_add(ids, positions, out=expected)
    fused.embedding(ids, positions, out=found, add=True)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [0, 1, 1023, 2_500_001])
def test_sums_of_squares(dtype: torch.dtype, count: int) -> None:
    values, sums = normal(count, dtype=dtype), torch.ones(2, device=DEVICE)
    plain.sum_of_squares(values, out=sums[0])
    fused_update.sum_of_squares(values, out=sums[1])
    assert float(sums[1]) == pytest.approx(float(sums[0]), rel=1e-5)


@pytest.mark.parametrize("kept", [each for each in KEPT if each[0] in TYPES])
@pytest.mark.parametrize("rounding", [None, Seed(17)])
@pytest.mark.parametrize("count", [1, 1025, 40_003])
@pytest.mark.parametrize("clipped", [True, False])
def test_adamw(kept: tuple[torch.dtype, torch.dtype, bool], rounding: Seed | None, count: int, clipped: bool) -> None:
    weight_type, moment_type, has_master = kept
    settings = UpdateSettings(
        rate=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, step=3, rounding=rounding
    )
    if clipped:
        settings = replace(settings, gradient_scale=torch.tensor(0.37, device=DEVICE))
    master = normal(count)
    state = [
        master.to(weight_type),
        normal(count, dtype=weight_type),
        normal(count, dtype=moment_type),
        normal(count, dtype=moment_type).abs(),
        master,
    ]
    # Places whose upper half changes within the piece.
    offset = 3 * 2**32 - 700
    results: list[list[Tensor]] = []
    for form in (plain_adamw, fused_update):
        given = [each.clone() for each in state]
        form.adamw(
            *(given[0], given[1], given[2], given[3], given[4] if has_master else None),
            settings=settings,
            offset=offset,
        )
        results.append(given)
    # Moments have the bits of the plain form. Behind them is a root, which torch need not round as exactly: weights
    # may be its neighbours now and then, all the more seldom where they are rounded further.
    expected, found = results
    assert torch.equal(found[2], expected[2]) and torch.equal(found[3], expected[3])
    for one, two in ((found[0], expected[0]), (found[4], expected[4])):
        close(one, two)
        if one.dtype == HALF:
            assert int((one != two).sum()) <= 1 + count // 1000


@pytest.mark.parametrize("kept", [each for each in KEPT if each[0] in TYPES])
@pytest.mark.parametrize("rounding", [None, Seed(17)])
@pytest.mark.parametrize("form", ["lion", "sgd", "sgd with momentum", "sgd that looks ahead"])
def test_updates_by_number(kept: tuple[torch.dtype, torch.dtype, bool], rounding: Seed | None, form: str) -> None:
    weight_type, moment_type, has_master = kept
    settings = UpdateSettings(
        rate=0.01,
        beta1=0.9,
        beta2=0.99,
        momentum=0.9,
        nesterov=form.endswith("ahead"),
        weight_decay=0.1,
        step=3,
        gradient_scale=torch.tensor(0.37, device=DEVICE),
        rounding=rounding,
    )
    count, offset = 40_003, 3 * 2**32 - 700
    master = normal(count)
    state = [master.to(weight_type), normal(count, dtype=weight_type), normal(count, dtype=moment_type), master]
    results: list[list[Tensor]] = []
    for forms in (simple_updates, fused_update):
        given = [each.clone() for each in state]
        getattr(forms, form.split(maxsplit=1)[0])(
            *(given[0], given[1], None if form == "sgd" else given[2], given[3] if has_master else None),
            settings=settings,
            offset=offset,
        )
        results.append(given)
    # A sum may be rounded after its product or before, and by chance one number in a thousand goes the other way.
    for one, two in zip(*results, strict=True):
        close(one, two)
        if one.dtype == HALF:
            assert int((one != two).sum()) <= 1 + count // 500


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter's tensors are not on a GPU")
def test_a_gpu_takes_the_fused_form() -> None:
    source, weight = normal(7, 300, dtype=HALF), normal(300, dtype=HALF)
    outs, statistics = [torch.empty_like(source) for _ in range(2)], torch.empty(7, device=DEVICE)
    for form, out in zip((dispatch, fused), outs, strict=True):
        form.norm_forward(source, weight, None, epsilon=1e-5, rms=True, out=out, statistics=statistics)
    assert torch.equal(outs[0], outs[1])


def test_equal_calls_give_equal_bits() -> None:
    source, gradient, weight = normal(301, 513, dtype=HALF), normal(301, 513, dtype=HALF), normal(513, dtype=HALF)
    found = []
    for _ in range(2):
        out, statistics, sums = torch.empty_like(source), torch.empty(301, 2, device=DEVICE), normal(2, 513) * 0
        fused.norm_forward(source, weight, weight, epsilon=1e-5, rms=False, out=out, statistics=statistics)
        fused.norm_backward(
            *(gradient, source, weight, statistics),
            rms=False,
            out=out,
            weight_gradient=sums[0],
            bias_gradient=sums[1],
            accumulate=True,
        )
        found.append((out, sums))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.skipif(IS_INTERPRETED, reason="matrix units")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 8, 16), (77, 40, 24), (4096, 512, 768)])
def test_sums_in_fp32_within_the_product(dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    room = Arena(torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE))
    gradient, source = normal(rows, outputs + 8, dtype=dtype)[:, 8:], normal(rows, inputs, dtype=dtype)
    totals = normal(2 * outputs, inputs, dtype=torch.float32)
    expected = totals[outputs:].double() + gradient.double().t() @ source.double()
    Products(room).wgrad(gradient, source, total=totals[outputs:])
    # Matrix units cut off what they add; a product in half precision would be off by a thousandth.
    assert float((totals[outputs:] - expected).norm() / expected.norm()) < 2e-5
    assert room.empty and room.peak_beside_bytes == 0 and room.peak_bytes == 0
