"""Products in fp8 against the definition of their numbers and against products of the numbers themselves."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.engine.executable import check_formats
from flopwise.engine.kernels import fp8
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.fp8_products import Fp8Products, check_device
from flopwise.engine.streaming.products import Products
from flopwise.work.formats import parse_formats

HALF, SINGLE = torch.bfloat16, torch.float32
SHAPES = ((1, 1), (5, 7), (33, 257), (130, 100), (3, 30001))
QUANTISED = {"rows": fp8.plain_quantise_rows, "columns": fp8.plain_quantise_columns}


def e4m3_numbers() -> np.ndarray:
    """All finite numbers of e4m3 by its definition: a sign, four bits of exponent with bias 7, three behind the one."""
    below = [fraction / 8 * 2.0**-6 for fraction in range(8)]
    above = [(1 + fraction / 8) * 2.0 ** (exponent - 7) for exponent, fraction in product(range(1, 16), range(8))]
    positive = np.array(below + above[:-1])  # The last pattern is NaN.
    return np.sort(np.concatenate((-positive, positive)))


def spread(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    """Numbers of very different magnitudes."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw) * torch.exp(2 * torch.randn(shape, generator=draw))).to(dtype)


def quantised(source: Tensor, along: str) -> tuple[Tensor, Tensor]:
    """Numbers and scales, both of rows; of the transposed source for columns."""
    rows, width = source.shape
    shape = (rows, width) if along == "rows" else (width, rows)
    out, scales = torch.empty(shape, dtype=fp8.FLOAT8), torch.empty(shape[0])
    QUANTISED[along](source, out=out, scales=scales)
    return out, scales


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_each_number_is_the_nearest_under_its_scale(rows: int, width: int, along: str, dtype: torch.dtype) -> None:
    # Columns of a wider tensor, so that the distance of rows is not their width.
    source = spread(rows, width + 3, dtype=dtype)[:, 1 : width + 1]
    before = source.clone()
    out, scales = quantised(source, along)
    assert torch.equal(source, before)
    wanted = (source if along == "rows" else source.t()).double()
    assert torch.allclose(scales.double(), wanted.abs().amax(1) / 448, rtol=1e-6, atol=0)
    exact = (wanted / scales.double().unsqueeze(1)).numpy().ravel()
    numbers = e4m3_numbers()
    place = np.searchsorted(numbers, exact).clip(1, len(numbers) - 1)
    least = np.minimum(abs(numbers[place - 1] - exact), abs(numbers[place] - exact))
    found = abs(out.double().numpy().ravel() - exact)
    assert (found <= least + 1e-6 * abs(exact)).all()


@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-4, 1.0, 1e30, 1e37])
def test_a_row_of_any_size_keeps_its_numbers(along: str, size: float) -> None:
    source = (torch.randn(24, 32, generator=torch.Generator().manual_seed(1)) * size).to(HALF)
    out, scales = quantised(source, along)
    back = out.double() * scales.double().unsqueeze(1)
    wanted = (source if along == "rows" else source.t()).double()
    largest = wanted.abs().amax(1, keepdim=True)
    if size > fp8.LEAST_AMAX:
        assert ((back - wanted).abs() <= wanted.abs() / 16 + largest * 2.0**-18).all()
    assert out.double().isfinite().all() and (scales > 0).all() and scales.isfinite().all()


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_zeros_stay_zeros(along: str) -> None:
    source = spread(16, 48)
    source[3], source[:, 7] = 0, 0
    out, scales = quantised(source, along)
    wanted = source if along == "rows" else source.t()
    assert scales.isfinite().all() and scales.reciprocal().isfinite().all()
    assert (out.float()[wanted == 0] == 0).all()
    out, scales = quantised(torch.zeros(16, 16, dtype=HALF), along)
    assert (out.float() == 0).all() and (1 / scales).isfinite().all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_what_is_not_finite_is_not_lost(along: str, bad: float) -> None:
    source = spread(32, 48)
    source[5, 9] = bad
    out, scales = quantised(source, along)
    count = source.shape[0 if along == "rows" else 1]
    other, other_scales = quantised(spread(16, out.shape[1]), "rows")
    result = torch.empty(count, 16, dtype=HALF)
    fp8.multiply(out, scales, other, other_scales, bias=None, out=result, fast_sums=True)
    lost = 5 if along == "rows" else 9
    assert not result[lost].isfinite().any()
    assert result[torch.arange(count) != lost].isfinite().all()


# -- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(16, 16, 16), (48, 592, 1040), (1040, 64, 32), (16, 30016, 16)])
def test_the_plain_product_is_what_torch_makes(rows: int, inner: int, columns: int, biased: bool) -> None:
    left, left_scales = quantised(spread(rows, inner), "rows")
    right, right_scales = quantised(spread(columns, inner, seed=1), "rows")
    bias = spread(columns, seed=2) if biased else None
    wide = torch.zeros(rows, columns + 8, dtype=HALF)
    fp8.multiply(left, left_scales, right, right_scales, bias=bias, out=wide[:, :columns], fast_sums=False)
    scaled = left.double() * left_scales.double()[:, None], right.double() * right_scales.double()[:, None]
    exact = scaled[0] @ scaled[1].t() + (0 if bias is None else bias.double())
    sizes = scaled[0].abs() @ scaled[1].abs().t()
    assert ((wide[:, :columns].double() - exact).abs() <= exact.abs() / 256 + sizes * 1e-5).all()
    assert (wide[:, columns:] == 0).all()
    theirs = torch._scaled_mm(
        left, right.t(), scale_a=left_scales[:, None], scale_b=right_scales[None], bias=bias, out_dtype=HALF
    )
    assert ((wide[:, :columns].double() - theirs.double()).abs() <= exact.abs() / 128 + sizes * 1e-5).all()


def arena(size: int = 1 << 22) -> Arena:
    return Arena(torch.empty(size, dtype=torch.uint8))


def case(rows: int, inputs: int, outputs: int) -> dict[str, Tensor]:
    """Tensors of one layer's products, all columns of wider ones."""
    shapes = {"source": (rows, inputs), "matrix": (outputs, inputs), "gradient": (rows, outputs)}
    found = {
        name: spread(size[0], size[1] + 16, seed=index)[:, 16:] for index, (name, size) in enumerate(shapes.items())
    }
    return found | {"bias": spread(outputs, seed=7)}


def run(products: Products, given: dict[str, Tensor], way: str, *, add: bool) -> Tensor:
    """One of the products; with `add` inputs' gradients are added to what was there, as matrices' always are."""
    shape = {
        "forward": (given["source"].shape[0], given["matrix"].shape[0]),
        "dgrad": tuple(given["source"].shape),
        "wgrad": tuple(given["matrix"].shape),
    }[way]
    out = torch.full(shape, 1.0, dtype=HALF)
    if way == "forward":
        products.forward(given["source"], given["matrix"], None if add else given["bias"], out=out)
    elif way == "dgrad":
        products.dgrad(given["gradient"], given["matrix"], out=out, add=add)
    else:
        products.wgrad(given["gradient"], given["source"], total=out)
    return out


def exact(given: dict[str, Tensor], way: str, *, add: bool) -> Tensor:
    source, matrix, gradient, bias = (given[name].double() for name in ("source", "matrix", "gradient", "bias"))
    there = 1.0 if add or way == "wgrad" else 0.0
    if way == "forward":
        return source @ matrix.t() + (0.0 if add else bias)
    return there + (gradient @ matrix if way == "dgrad" else gradient.t() @ source)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("way", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("sides", [(16, 16, 16), (48, 80, 208), (256, 64, 32)])
def test_products_are_nearly_those_of_the_numbers(sides: tuple[int, int, int], way: str, add: bool) -> None:
    given, room = case(*sides), arena()
    before = {name: tensor.clone() for name, tensor in given.items()}
    products = Fp8Products(room)
    found, wanted = run(products, given, way, add=add).double(), exact(given, way, add=add)
    # Each factor is off by at most a sixteenth, a thirty-second in the mean square; errors of a sum are independent.
    assert float((found - wanted).norm() / wanted.norm()) < 0.06
    assert float((found - wanted).norm() / wanted.norm()) > 1e-3
    assert (products.in_fp8, products.in_compute) == (1, 0)
    assert room.empty and room.peak_beside_bytes == 0
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("way", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("sides", [(15, 16, 16), (16, 24, 16), (16, 16, 33)])
def test_other_sides_are_multiplied_as_ever(sides: tuple[int, int, int], way: str) -> None:
    given, products = case(*sides), Fp8Products(arena())
    assert not fp8.fits(*sides)
    assert torch.equal(run(products, given, way, add=False), run(Products(arena()), given, way, add=False))
    assert (products.in_fp8, products.in_compute) == (0, 1)


def test_the_matrix_gradient_may_stay_in_bf16() -> None:
    given = case(32, 48, 64)
    for kind, same in (("bf16", True), ("fp8", False)):
        found = run(Fp8Products(arena(), weight_gradient=kind), given, "wgrad", add=False)  # type: ignore[arg-type]
        assert torch.equal(found, run(Products(arena()), given, "wgrad", add=False)) is same


def test_sums_in_fp32_get_the_same_product() -> None:
    given = case(32, 48, 64)
    half = run(Fp8Products(arena()), given, "wgrad", add=False)
    total = torch.full((64, 48), 1.0)
    Fp8Products(arena()).wgrad(given["gradient"], given["source"], total=total)
    assert torch.equal(total.to(HALF), half) and not torch.equal(total, half.float())


@settings(max_examples=25)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 99), st.sampled_from(["rows", "columns"]))
def test_any_shape_comes_back_within_a_sixteenth(rows: int, width: int, seed: int, along: str) -> None:
    source = spread(rows, width, seed=seed)
    out, scales = quantised(source, along)
    wanted = (source if along == "rows" else source.t()).double()
    back = out.double() * scales.double().unsqueeze(1)
    assert ((back - wanted).abs() <= wanted.abs() / 16 + scales.double().unsqueeze(1) * 2.0**-10 * 1.001).all()


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp8", "fp8,master=fp32,moments=fp32", "fp8,weights=fp32,gradients=fp32"])
def test_fp8_is_trained_in(precision: str) -> None:
    check_formats(parse_formats(precision))


@pytest.mark.parametrize("precision", ["fp8,compute=fp32", "bf16,weights=fp8", "bf16,moments=fp8", "bf16,matrix=int8"])
def test_other_narrow_formats_are_refused(precision: str) -> None:
    with pytest.raises(FlopwiseError, match="cannot be trained in"):
        check_formats(parse_formats(precision))


def test_a_card_without_fp8_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    for capability, refused in (((8, 0), True), ((8, 9), False), ((9, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        if refused:
            with pytest.raises(FlopwiseError, match="A100 cannot multiply in fp8"):
                check_device(card)
        else:
            check_device(card)
