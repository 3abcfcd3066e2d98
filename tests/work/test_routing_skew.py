"""How unevenly experts are used: shares, and the most loaded of several ranks."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model
from flopwise.work.describe import describe
from flopwise.work.layout import Layout
from flopwise.work.op import Gemm
from flopwise.work.routing import Routing, law_shares, skew_of_busiest
from flopwise.work.transformer import Transformer


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (128, 8), (60, 4), (5, 5), (7, 1)])
@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0, 3.0])
def test_shares_add_up_and_none_has_more_than_all_tokens(experts: int, chosen: int, exponent: float) -> None:
    shares = law_shares(exponent, experts, chosen)
    assert sum(shares) == pytest.approx(1.0)
    assert max(shares) <= 1 / chosen * (1 + 1e-9)
    assert list(shares) == sorted(shares, reverse=True)
    within = [share for share in shares if share < 1 / chosen * (1 - 1e-9)]
    for rank, share in enumerate(within[1:], len(shares) - len(within) + 2):
        assert share / within[0] == pytest.approx(((rank) / (len(shares) - len(within) + 1)) ** -exponent)


def test_the_most_loaded_rank_has_the_mean_or_more() -> None:
    loads = [Routing(skew=skew).load(128, 8, 8) for skew in (0.0, 0.1, 0.3, 0.6, 1.0, 2.0)]
    assert loads[0] == 1.0
    assert loads == sorted(loads)
    ranks = [Routing(skew=0.5).load(128, 8, count) for count in (1, 2, 4, 16, 64, 128)]
    assert ranks == sorted(ranks)
    assert ranks[0] == 1.0
    assert ranks[-1] == pytest.approx(128 * max(law_shares(0.5, 128, 8)))


def test_measured_shares_are_dealt_out_in_their_order() -> None:
    # Two blocks: the ranks of the first have 0.4 and 0.6, those of the second 0.75 and 0.25.
    shares = ((10.0, 30.0, 20.0, 40.0), (0.5, 0.25, 0.2, 0.05))
    assert Routing(shares=shares).load(4, 1, 2) == pytest.approx((2 * 0.6 + 2 * 0.75) / 2)
    assert Routing(shares=shares).load(4, 1, 1) == 1.0
    # A token has each expert once: of two choices none has more than half.
    assert Routing(shares=((9.0, 1.0, 1.0, 1.0),)).load(4, 2, 4) == pytest.approx(4 * 0.5)


@pytest.mark.parametrize("busiest", [1.3, 2.0, 3.9])
def test_the_law_of_a_busiest_expert_has_it(busiest: float) -> None:
    assert 8 * max(law_shares(skew_of_busiest(busiest, 8, 2), 8, 2)) == pytest.approx(busiest, rel=1e-6)


@pytest.mark.parametrize(
    ("exponent", "ranks", "published"), [(1.01, 4, 2.25), (1.2, 4, 2.07), (1.01, 8, 3.97), (1.2, 8, 4.25)]
)
def test_loads_are_those_of_published_times(exponent: float, ranks: int, published: float) -> None:
    """How much longer layers of 8 experts, 2 of them a token, took of the most loaded rank where tokens were drawn so.

    aiconfigurator (Apache 2.0): medians over cards and sizes of at least 8,192 tokens, 12 to 18 rows each.
    """
    draw = Random(0)  # noqa: S311 - a reproducible draw
    shares, most, rest = [], 0.8 * 12_288, 1.0 - exponent
    for _ in range(400):
        parts = [(most**rest - 1) * draw.random() + 1 for _ in range(8)]
        shares.append(tuple(part ** (1 / rest) for part in parts))
    assert Routing(shares=tuple(shares)).load(8, 2, ranks) == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(
    ("routing", "told"),
    [
        (Routing(skew=-0.1), "skew"),
        (Routing(skew=4.0), "skew"),
        (Routing(shares=((1.0, 2.0),)), "are not those of 8 experts"),
        (Routing(shares=((0.0,) * 8,)), "are not those of 8 experts"),
        (Routing(shares=((1.0,) * 7 + (float("nan"),),)), "are not those of 8 experts"),
        (Routing(skew=0.5, shares=((1.0,) * 8,)), "both skew and shares"),
        (Routing(shares=((1.0,) * 8,) * 3), "has 3 rows, and 32 blocks have experts"),
    ],
)
def test_what_is_no_skew_is_refused(routing: Routing, told: str) -> None:
    model = load_model("mixtral-8x7b")
    assert isinstance(model, Transformer)
    with pytest.raises(FlopwiseError, match=told):
        replace(model, routing=routing)


def test_the_most_loaded_rank_is_described_and_the_models_work_is_not_more() -> None:
    model = load_model("mixtral-8x7b")
    assert isinstance(model, Transformer)
    skewed = replace(model, routing=replace(model.routing, skew=0.5))
    load = skewed.routing.load(8, 2, 4)
    assert load > 1.1
    even, uneven = (describe(each, 4096, "flash", Layout(expert=4)) for each in (model, skewed))

    def rows(work: object, name: str) -> int:
        ops = even.ops if work is even else uneven.ops
        (found,) = (op.rows for op in ops if isinstance(op, Gemm) and op.name == name)
        return found

    for name in ("gate_up", "down"):
        assert rows(uneven, name) == pytest.approx(load * rows(even, name), rel=1e-3)
    assert uneven.tensors["dispatched"].elements == pytest.approx(load * even.tensors["dispatched"].elements, rel=1e-3)
    assert rows(uneven, "qkv") == rows(even, "qkv")
    assert describe(skewed, 4096).model_flops("causal") == describe(model, 4096).model_flops("causal")


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-4-maverick", "nemotron-3-nano-30b-a3b"])
def test_measured_shares_of_each_mixture_stay_with_kinds_of_blocks(name: str) -> None:
    """Blocks without experts have no row, and a kind's description has other blocks."""
    model = load_model(name)
    assert isinstance(model, Transformer)
    rows = ((1.0,) * model.experts,) * len(model.mixed_blocks)
    assert len(rows) < model.layers
    measured = replace(model, routing=replace(model.routing, shares=rows))
    assert len(measured.kinds) == len(model.kinds)
    assert len(measured.product_kinds) == len(model.product_kinds)
    assert describe(measured, 512).parameters == describe(model, 512).parameters
