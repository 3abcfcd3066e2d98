"""quack-kernels' products, plain and with SwiGLU in them, and trainings with them, on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from flopwise.engine.kernels import quack, quack_gated  # noqa: E402
from flopwise.engine.streaming.arena import Arena  # noqa: E402
from flopwise.engine.streaming.gated import largest_error  # noqa: E402
from flopwise.engine.streaming.quack_products import QuackProducts, are_right, gated_kernels  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.tiny_models import TINY, parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    cut_plan,
    everything_stays,
    executor_for,
    first_gradients,
    random_batch,
    reference_gradients,
    total_error,
)

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not quack.fits_device(CUDA), reason="there is no Hopper GPU with quack-kernels"
    ),
]
HALVES = [torch.bfloat16, torch.float16]
ROUNDED = {torch.bfloat16: 0.006, torch.float16: 0.001}
"""‖difference‖ ÷ ‖result‖ of what is rounded once or twice to such numbers."""


@pytest.mark.parametrize("dtype", HALVES)
def test_the_check_passes_here(dtype: Any) -> None:
    assert are_right(CUDA, dtype, dtype)
    assert are_right(CUDA, dtype, torch.float32)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner"), [(1, 64, 64), (7, 64, 192), (333, 512, 704), (8193, 192, 128), (640, 256, 1088)]
)
def test_gated_products_at_awkward_sizes(dtype: Any, tokens: int, hidden: int, inner: int) -> None:
    for sums in (dtype, torch.float32):
        error = largest_error(quack_gated, CUDA, dtype, tokens=tokens, hidden=hidden, inner=inner, sums=sums)
        assert error < ROUNDED[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 8, 8), (97, 24, 40), (1000, 6152, 136), (301, 136, 8200)]
)
@pytest.mark.parametrize("columns", [False, True])
def test_plain_products_at_awkward_sizes(dtype: Any, tokens: int, inputs: int, outputs: int, columns: bool) -> None:
    generator = torch.Generator(device=CUDA).manual_seed(tokens)

    def drawn(rows: int, width: int) -> Any:
        """In a tensor of its own, or as columns of a wider one."""
        wide = torch.randn(rows, width + 16 * columns, generator=generator, device=CUDA).to(dtype)
        return wide[:, 8 : 8 + width] if columns else wide

    source, matrix, gradient = drawn(tokens, inputs), drawn(outputs, inputs), drawn(tokens, outputs)
    products = QuackProducts(Arena(torch.empty(0, dtype=torch.uint8, device=CUDA)), always=True)
    wide_source, wide_matrix, wide_gradient = source.double(), matrix.double(), gradient.double()

    def error(found: Tensor, wanted: Tensor) -> float:
        return float((found.double() - wanted).norm() / wanted.norm())

    out = drawn(tokens, outputs).fill_(torch.nan)
    products.forward(source, matrix, None, out=out)
    assert error(out, wide_source @ wide_matrix.t()) < ROUNDED[dtype]
    for add in (False, True):
        target = drawn(tokens, inputs)
        wanted = wide_gradient @ wide_matrix + (target.double() if add else 0)
        products.dgrad(gradient, matrix, out=target, add=add)
        assert error(target, wanted) < ROUNDED[dtype]
    for wide in (dtype, torch.float32):
        total = torch.randn(outputs, inputs, generator=generator, device=CUDA).to(wide)
        wanted = total.double() + wide_gradient.t() @ wide_source
        products.wgrad(gradient, source, total=total)
        assert error(total, wanted) < ROUNDED[dtype]


def test_products_that_lie_awkwardly_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_given: object, **_named: object) -> None:
        raise AssertionError("was called")

    monkeypatch.setattr(quack, "multiply", refuse)
    products = QuackProducts(Arena(torch.empty(0, dtype=torch.uint8, device=CUDA)), always=True)
    source, matrix = torch.randn(16, 20, device=CUDA).bfloat16(), torch.randn(24, 20, device=CUDA).bfloat16()
    out = torch.empty(16, 24, device=CUDA, dtype=torch.bfloat16)
    products.forward(source, matrix, None, out=out)
    assert torch.equal(out, source @ matrix.t())
    with pytest.raises(AssertionError, match="was called"):
        products.forward(source[:, :16].contiguous(), matrix[:, :16].contiguous(), None, out=out)


WIDER: dict[str, Any] = {"hidden": 128, "heads": 8, "kv_heads": 2, "head_dim": 16, "ffn": 192, "vocab": 203}
FAMILIES: dict[str, Transformer] = {
    "llama": replace(TINY["llama"], **WIDER),
    "qwen3": replace(TINY["qwen3"], **{**WIDER, "head_dim": 24}),
}


@pytest.mark.parametrize("precision", ["bf16", "bf16,gradients=fp32"])
@pytest.mark.parametrize("cut", ["whole", "chunk", "sequence"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_training_are_near_those_of_autograd(family: str, cut: str, precision: str) -> None:
    model = FAMILIES[family]
    exact = random_module(model, dtype=torch.bfloat16).double()
    for letters in ("f", "i", "aC"):
        if cut == "whole":
            saves = tuple(letters[layer % len(letters)] for layer in range(model.layers))
            plan = everything_stays(model, sequence=49, sequences=3, saves=saves, precision=precision)
        else:
            plan = cut_plan(model, sequence=49, chunk=16, letters=letters, attention=cut, precision=precision)
        batch = random_batch(model, plan.sequences_per_round, 49, 1)
        executor = executor_for(plan, model, parameters(exact), device=CUDA)
        assert executor.player.blocks[model].operators.gated is not None
        assert gated_kernels(model, executor.formats, CUDA) is quack_gated
        result = executor.step(batch, 0)
        loss, expected = reference_gradients(exact, batch)
        _, plain = reference_gradients(random_module(model, dtype=torch.bfloat16), batch)
        assert result.loss == pytest.approx(loss, rel=0.02, abs=0.01)
        assert total_error(first_gradients(executor), expected) <= 2 * total_error(plain, expected)
        assert executor.player.arena.empty
        executor.close()
