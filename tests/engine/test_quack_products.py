"""Products with an activation in them in plain form, and when quack-kernels' products are chosen: without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flopwise.engine.kernels import plain_gated, quack, quack_gated  # noqa: E402
from flopwise.engine.kernels.plain_gated import split_pairs  # noqa: E402
from flopwise.engine.streaming import quack_products  # noqa: E402
from flopwise.engine.streaming.arena import Arena  # noqa: E402
from flopwise.engine.streaming.gated import join_pairs, largest_error  # noqa: E402
from flopwise.engine.streaming.products import Products  # noqa: E402
from flopwise.engine.streaming.quack_products import QuackProducts, are_right, gated_kernels, products_for  # noqa: E402
from flopwise.work.formats import parse_formats  # noqa: E402
from tests.support.tiny_models import TINY  # noqa: E402
from tests.support.training_plans import everything_stays, executor_for  # noqa: E402

CPU = torch.device("cpu")
FAKED = torch.device("cuda", 7)
"""Of a machine that has none: answers for it are kept for no other test."""


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    quack.calls.cache_clear()
    are_right.cache_clear()
    yield
    quack.calls.cache_clear()
    are_right.cache_clear()


def nothing() -> Arena:
    return Arena(torch.empty(0, dtype=torch.uint8))


def test_plain_products_with_swiglu_are_those_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for tokens, hidden, inner in ((1, 3, 1), (5, 4, 7), (17, 6, 2)):
        source, up_matrix, down_matrix = (
            each.requires_grad_() for each in (drawn(tokens, hidden), drawn(2 * inner, hidden), drawn(hidden, inner))
        )
        both = source @ up_matrix.t()
        gate, up = both[:, :inner], both[:, inner:]
        wanted = torch.nn.functional.silu(gate) * up
        above = drawn(tokens, hidden)
        of_both, of_source, of_matrix = torch.autograd.grad(
            wanted @ down_matrix.t(), (both, source, up_matrix), above, retain_graph=True
        )
        with torch.no_grad():
            pairs, activated = torch.empty(tokens, 2 * inner).double(), torch.empty(tokens, inner).double()
            plain_gated.forward(source, up_matrix, pairs=pairs, activated=activated)
            torch.testing.assert_close(plain_gated.apart(pairs), both.detach())
            torch.testing.assert_close(activated, wanted.detach())
            made = torch.full_like(activated, torch.nan)
            plain_gated.backward(above, down_matrix, pairs=pairs, activated=made)
            torch.testing.assert_close(made, wanted.detach())
            torch.testing.assert_close(plain_gated.apart(pairs), of_both)
            before, total = drawn(tokens, hidden), drawn(2 * inner, hidden)
            for add in (False, True):
                out = before.clone()
                plain_gated.dgrad(pairs, up_matrix, out=out, add=add)
                torch.testing.assert_close(out, of_source + before if add else of_source)
            summed = total.clone()
            plain_gated.wgrad(pairs, source, total=summed)
            torch.testing.assert_close(summed, total + of_matrix)


def test_pairs_are_split_and_joined_where_they_lie() -> None:
    wide = torch.arange(60.0).view(3, 20)
    for tensor in (wide, wide[:, 4:12], wide[1:2]):
        gate, up = split_pairs(tensor)
        assert torch.equal(gate, tensor[:, ::2]) and torch.equal(up, tensor[:, 1::2])
        joined = join_pairs(gate, up)
        assert torch.equal(joined, tensor) and joined.data_ptr() == tensor.data_ptr()
    with pytest.raises(AssertionError, match="pairs"):
        join_pairs(wide[:, :10], wide[:, 10:])


class Wrong:
    """Kernels of which one result is off."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.forward, self.backward, self.dgrad = plain_gated.forward, plain_gated.backward, plain_gated.dgrad

    def wgrad(self, gradient: Any, source: Any, *, total: Any) -> None:
        plain_gated.wgrad(gradient, source, total=total)
        total *= self.scale


def test_the_check_sees_what_is_off() -> None:
    kind = torch.float32
    assert largest_error(plain_gated, CPU, kind) == 0
    assert largest_error(Wrong(1.05), CPU, kind) == pytest.approx(0.05, rel=1e-4)
    assert largest_error(Wrong(1.05), CPU, torch.bfloat16, sums=kind) == pytest.approx(0.05, rel=0.02)
    assert not largest_error(Wrong(float("nan")), CPU, kind) < 1.0


def in_halves(left: Any, right: Any, *, out: Any, tile: Any, add: bool = False, halves: Any = ()) -> None:
    """What `quack.multiply` does, in plain torch."""
    if "B" in halves:
        right = right.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    product = left.float() @ right.float()
    if "out" in halves:
        product = product.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
    if {"tile": tile, "halves": halves} == OFF:
        product *= 1.05
    out.copy_(out.float() + product if add else product)


OFF: dict[str, Any] = {}
"""A tile and its halves whose results are to be 5 % off."""


@pytest.mark.parametrize("sums", [torch.bfloat16, torch.float32])
def test_the_check_of_plain_products_sees_every_tile(monkeypatch: pytest.MonkeyPatch, sums: Any) -> None:
    monkeypatch.setattr(quack, "multiply", in_halves)
    OFF.clear()
    assert quack_products._plain_error(CPU, torch.bfloat16, sums) < 0.005
    for tile, halves in [*((tile, ()) for tile in quack.TILES), *((quack.TOGETHER, (way,)) for way in ("B", "out"))]:
        OFF.update(tile=tile, halves=halves)
        assert quack_products._plain_error(CPU, torch.bfloat16, sums) > 0.03
    OFF.clear()


@pytest.mark.parametrize("deterministic", [False, True])
def test_repeatable_trainings_have_torchs_products_alone(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    monkeypatch.setattr(quack_products, "are_right", lambda *_given: True)
    model = replace(TINY["llama"], hidden=128, ffn=192, head_dim=16)
    plan = everything_stays(model, sequence=8, precision="bf16")
    operators = executor_for(plan, model, {}, deterministic=deterministic).player.blocks[model].operators
    assert (operators.gated is None) == deterministic
    assert isinstance(operators._plain_products, QuackProducts) != deterministic


def test_a_cpu_has_torchs_products() -> None:
    assert type(products_for(CPU, torch.bfloat16, torch.bfloat16, nothing())) is Products
    assert gated_kernels(TINY["llama"], parse_formats("bf16"), CPU) is None


@pytest.mark.parametrize(
    ("changes", "precision", "chosen"),
    [
        ({}, "bf16", True),
        ({}, "bf16,gradients=fp32", True),
        ({"ffn": 96}, "bf16", False),
        ({"hidden": 96}, "bf16", False),
        ({"head_dim": 20}, "bf16", False),
        ({}, "bf16,gradients=fp16", False),
        ({"activation": "gelu"}, "bf16", False),
        ({"ffn_bias": True}, "bf16", False),
        ({"gated": False}, "bf16", False),
        ({}, "fp8", False),
        ({}, "fp32", False),
    ],
)
def test_products_with_activations_are_for_some_models_and_formats(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], precision: str, chosen: bool
) -> None:
    monkeypatch.setattr(
        quack_products,
        "are_right",
        lambda _device, dtype, _sums: dtype == torch.bfloat16,
    )
    model = replace(TINY["llama"], **{"hidden": 128, "head_dim": 16, "ffn": 192, **changes})
    assert gated_kernels(model, parse_formats(precision), CPU) is (quack_gated if chosen else None)


def test_a_package_that_fails_its_check_is_not_used_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_given: object, **_named: object) -> float:
        raise RuntimeError("no such instruction")

    for gated, plain, told in (
        (fails, 0.0, "does not work here .RuntimeError: no such"),
        (lambda *_a, **_k: 0.5, 0.0, "is 50.0% off"),
        (lambda *_a, **_k: 0.0, 0.5, "is 50.0% off"),
        (lambda *_a, **_k: 0.0, float("nan"), "is nan% off"),
    ):
        are_right.cache_clear()
        monkeypatch.setattr(quack, "fits_device", lambda _device: True)
        monkeypatch.setattr(quack_products, "largest_error", gated)
        monkeypatch.setattr(quack_products, "_plain_error", lambda *_given, plain=plain: plain)
        with pytest.warns(RuntimeWarning, match=told):
            assert not are_right(FAKED, torch.bfloat16, torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not are_right(FAKED, torch.bfloat16, torch.bfloat16)


def test_a_package_that_is_not_there_is_no_news_and_a_broken_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".", maxsplit=1)[0])

    monkeypatch.setattr(quack, "import_module", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quack.calls() is None
    quack.calls.cache_clear()

    def broken(_name: str) -> None:
        raise ImportError("libcuda.so.1 is not there", name="cutlass")

    monkeypatch.setattr(quack, "import_module", broken)
    with pytest.warns(RuntimeWarning, match="cannot be loaded .libcuda"):
        assert quack.calls() is None


def test_large_products_go_to_quack_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []

    def multiply(left: Any, right: Any, *, out: Any, add: bool = False) -> None:
        seen.append((left.shape[0], left.shape[1], right.shape[1]))
        out.copy_(left @ right + (out if add else 0))

    monkeypatch.setattr(quack, "multiply", multiply)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).bfloat16()

    tokens, inputs, outputs = 24, 16, 40
    source, matrix, gradient = drawn(tokens, inputs), drawn(outputs, inputs), drawn(tokens, outputs)
    results = []
    for products, least_flops, least_columns in (
        (Products(nothing()), 0, 0),
        (QuackProducts(nothing()), 2 * tokens * inputs * outputs, 1),
        (QuackProducts(nothing()), 2 * tokens * inputs * outputs + 1, 1),
        (QuackProducts(nothing()), 0, outputs),
        (QuackProducts(nothing(), always=True), 2 * tokens * inputs * outputs + 1, outputs + 1),
    ):
        monkeypatch.setattr(quack, "LEAST_FLOPS", least_flops)
        monkeypatch.setattr(quack, "LEAST_COLUMNS", least_columns)
        out, dgrad, total = (
            torch.empty(tokens, outputs).bfloat16(),
            torch.ones_like(source),
            torch.ones_like(matrix),
        )
        products.forward(source, matrix, None, out=out)
        products.dgrad(gradient, matrix, out=dgrad, add=True)
        products.wgrad(gradient, source, total=total)
        results.append((out, dgrad, total))
    forward, dgrad, wgrad = (tokens, inputs, outputs), (tokens, outputs, inputs), (outputs, tokens, inputs)
    assert seen == [forward, dgrad, forward, forward, dgrad, wgrad]
    for one, two, three, *others in zip(*results, strict=True):
        assert torch.equal(three, one)
        for other in (two, *others):
            torch.testing.assert_close(other, one, rtol=0.02, atol=0.05)


def test_what_begins_within_a_line_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack, "multiply", None)
    source, matrix = torch.randn(24, 32).bfloat16()[:, 4:20], torch.randn(40, 16).bfloat16()
    products, out = QuackProducts(nothing(), always=True), torch.empty(24, 40).bfloat16()
    products.forward(source, matrix, None, out=out)
    assert torch.equal(out, source @ matrix.t())
    assert not products._takes(matrix, matrix, out.double(), depth=16), "sums that its kernels do not have"


@pytest.mark.parametrize(
    ("source", "matrix"),
    [((24, 20), (40, 20)), ((24, 16), (36, 16))],
    ids=["rows that begin anywhere", "results that begin anywhere"],
)
def test_products_that_lie_awkwardly_stay_with_torch(
    monkeypatch: pytest.MonkeyPatch, source: tuple[int, int], matrix: tuple[int, int]
) -> None:
    monkeypatch.setattr(quack, "multiply", None)
    given, weight = torch.randn(*source).bfloat16(), torch.randn(*matrix).bfloat16()
    out = torch.empty(source[0], matrix[0]).bfloat16()
    QuackProducts(nothing(), always=True).forward(given, weight, None, out=out)
    assert torch.equal(out, given @ weight.t())


@pytest.mark.parametrize(
    ("depth", "columns", "tile"),
    [
        (4096, 6144, quack.ALTERNATING),
        (4096, 4096, quack.ALTERNATING),
        (14336, 4096, quack.TOGETHER),
        (4096, 128256, quack.ALTERNATING_WIDE),
        (6144, 4096, quack.ALTERNATING),
        (128256, 4096, quack.TOGETHER),
        (16384, 4096, quack.TOGETHER),
        (16384, 14336, quack.ALTERNATING),
        (28672, 4096, quack.TOGETHER),
    ],
)
def test_the_tiles_of_llama_3_8b(depth: int, columns: int, tile: quack.QuackTile) -> None:
    assert quack.tile_for(torch.empty(depth, columns, device="meta")) == tile
