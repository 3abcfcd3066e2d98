"""What the description says that plain kernels call, read and write, held to what torch is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.engine.kernels import adamw, dispatch, plain, plain_experts
from flopwise.engine.kernels.activations import activation_backward, activation_forward
from flopwise.engine.kernels.quantised import Quantised
from flopwise.engine.kernels.updating import UpdateSettings
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.magnitudes import take_norms
from flopwise.work import plain as described
from flopwise.work.activations import ACTIVATIONS
from flopwise.work.formats import quantised_bytes
from flopwise.work.plain import Passes
from tests.support.tiny_models import TINY

ROWS, WIDTH = 128, 256
NUMBERS = ROWS * WIDTH
VIEWS = {"view", "slice", "select", "alias", "t", "transpose", "permute", "expand", "unsqueeze", "detach", "as_strided"}
PLACES = {"empty", "empty_like", "empty_strided"}
FUNCTIONS = {"exp": 1.0, "exp_": 1.0, "erf_": 1.5, "tanh": 3.0, "tanh_": 3.0, "segment_reduce": 6.0}


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls that compute, the numbers in and out of them, and functions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self.moved = self.functions = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        name = func._schema.name.split("::")[1]
        if name in VIEWS | PLACES:
            return result
        self.calls += 1
        self.moved += _numbers(args) + _numbers((given.get("out"), result))
        self.functions += FUNCTIONS.get(name, 0.0) * (result.numel() if isinstance(result, Tensor) else 0)
        return result


def _numbers(values: Any) -> int:
    """Of tensors, each once."""
    found: dict[tuple[int, int], int] = {}

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.data_ptr(), value.numel()] = value.numel()
        elif isinstance(value, tuple | list):
            for each in value:
                add(each)

    add(values)
    return sum(found.values())


def counted(run: Callable[[], object], numbers: int = NUMBERS) -> Passes:
    """Of one call, for each number; tables that are kept are there already."""
    run()
    with Counting() as counting:
        run()
    return Passes(counting.calls, counting.moved / numbers, counting.functions / numbers)


def assert_near(found: Passes, expected: Passes) -> None:
    """As described, but for a norm's statistics, a row's labels and the like."""
    assert found.calls == pytest.approx(expected.calls, abs=1)
    assert found.moved == pytest.approx(expected.moved, rel=0.05, abs=1.0)
    assert found.functions == pytest.approx(expected.functions, rel=0.01)


def rows() -> Tensor:
    return torch.rand(ROWS, WIDTH)


@pytest.mark.parametrize(
    ("kind", "gated"),
    [(kind, gated) for kind in ACTIVATIONS for gated in (False, True) if gated or kind != "clamped_swiglu"],
)
def test_activations(kind: str, gated: bool) -> None:
    gate, up, gradient = (rows() if gated else None), rows(), rows()
    gate_out = rows() if gated else None
    forward, backward = described.ACTIVATIONS[kind]
    if gated:
        forward, backward = (one.plus(more) for one, more in zip((forward, backward), described.GATED, strict=True))
    out = rows()
    found = counted(lambda: activation_forward(kind, gate, up, out=out))
    assert_near(found, forward)
    assert_near(
        counted(lambda: activation_backward(kind, gradient, gate, up, gate_out=gate_out, up_out=out, recompute=True)),
        backward,
    )


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms(norm: str) -> None:
    rms = norm == "rms"
    source, gradient, out, weight = rows(), rows(), rows(), torch.rand(WIDTH)
    bias = None if rms else torch.rand(WIDTH)
    bias_gradient = None if rms else torch.zeros(WIDTH)
    statistics, weight_gradient = torch.rand((ROWS,) if rms else (ROWS, 2)), torch.zeros(WIDTH)
    forward, backward = described.NORMS[norm]
    found = counted(
        lambda: plain.norm_forward(source, weight, bias, epsilon=1e-5, rms=rms, out=out, statistics=statistics)
    )
    assert_near(found, forward)
    summed = counted(
        lambda: plain.norm_forward(
            source, weight, bias, epsilon=1e-5, rms=rms, out=out, statistics=statistics, other=gradient, total=rows()
        )
    )
    # `rows` draws numbers into a new place, which is a call that reads and writes as many.
    assert summed.moved == pytest.approx(forward.plus(described.SUM).moved + 1, rel=0.1)
    found = counted(
        lambda: plain.norm_backward(
            gradient,
            source,
            weight,
            statistics,
            rms=rms,
            out=out,
            weight_gradient=weight_gradient,
            bias_gradient=bias_gradient,
            accumulate=True,
            recompute=True,
            bias=bias,
        )
    )
    assert_near(found, backward)


def test_the_others() -> None:
    source, out = rows(), rows()
    ids, positions = torch.randint(0, 100, (ROWS,)), torch.arange(ROWS, dtype=torch.int32)
    frequencies, table, loss = torch.rand(16), rows(), torch.zeros(())
    heads = source.view(ROWS, 8, 32), out.view(ROWS, 8, 32)
    found = counted(lambda: plain.rotate(heads[0], positions, frequencies, out=heads[1], inverse=False))
    assert_near(found, described.ROTATION)
    assert_near(counted(lambda: plain.cross_entropy(source, ids, scale=1.0, loss=loss)), described.CROSS_ENTROPY[0])
    assert_near(counted(lambda: plain.embedding_forward(ids, table, out=out)), described.LOOK_UP[0])
    found = counted(lambda: plain.embedding_backward(ids, source, table_gradient=table))
    assert_near(found, described.LOOK_UP[1])
    assert_near(counted(lambda: plain.add_column_sums(source, total=torch.zeros(WIDTH))), described.COLUMN_SUM)


@pytest.mark.parametrize("kind", list(described.DEQUANTISED))
def test_what_brings_a_quantised_matrix_back(kind: str) -> None:
    matrix = Quantised.within(torch.empty(quantised_bytes(ROWS, WIDTH, kind), dtype=torch.uint8), (ROWS, WIDTH), kind)
    matrix.quantise(rows())
    found, out = described.DEQUANTISED[kind], rows()
    # Looking a code up is counted as functions, of which torch calls none.
    assert_near(counted(lambda: matrix.dequantise(out=out)), found._replace(functions=0.0))


def test_what_magnitudes_take_of_a_matrix() -> None:
    matrix, down, up, norms = rows(), torch.rand(4, WIDTH), torch.rand(ROWS, 4), torch.rand(ROWS)
    arena = Arena(torch.empty(1 << 20, dtype=torch.uint8))

    def factors() -> None:
        take_norms(matrix, down, up, scale=2.0, out=norms, arena=arena)
        torch.div(norms, norms, out=norms)

    assert_near(counted(factors), described.MAGNITUDE_LENGTHS)


def test_what_a_mixture_calls_around_its_products() -> None:
    model = replace(TINY["qwen3_moe"], experts=16, experts_per_token=4)
    routing, choices, experts = replace(model.routing, normalised=True), 4, 16
    scores, weights = torch.rand(ROWS, experts), torch.rand(ROWS, choices)
    index = torch.empty(ROWS, choices, dtype=torch.int32)

    def route() -> None:
        dispatch.route(scores, routing, correction=None, weights=weights, index=index)

    def without_functions(passes: Passes) -> Passes:
        return passes._replace(functions=0.0)

    forward, backward = described.ROUTE
    assert_near(counted(route, scores.numel()), without_functions(forward))
    into = torch.empty_like(scores)
    found = counted(lambda: dispatch.route_backward(weights, scores, index, routing, out=into), scores.numel())
    assert_near(found, backward)
    found = counted(lambda: dispatch.sort_by_expert(index, experts), index.numel())
    assert_near(found, without_functions(described.SORT))
    routed, source, out = dispatch.sort_by_expert(index, experts), torch.rand(ROWS * choices, WIDTH), rows()
    for each, weighs in zip(described.SUMMED, (weights, None), strict=True):
        summed = partial(plain_experts.sum_rows, source, routed, weighs, out=out, accumulate=False)
        found = counted(summed, source.numel())
        assert_near(found, each._replace(calls=2 + each.calls * choices))
    up = torch.rand(experts, 8, WIDTH)
    made = torch.empty(ROWS * choices, 8)
    plain_experts.product(out, up, None, routed, out=made, gathers=True)
    found = counted(lambda: plain_experts.product(out, up, None, routed, out=made, gathers=True))
    assert found.calls == 2 * experts


def test_an_update() -> None:
    weights, gradients, first, second = (torch.rand(NUMBERS) for _ in range(4))
    settings = UpdateSettings(rate=1e-3, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1, step=3)
    found = counted(lambda: adamw.adamw(weights, gradients, first, second, None, settings=settings, offset=0))
    assert_near(found, described.UPDATE)
