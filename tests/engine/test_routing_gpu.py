"""Routing as Triton's kernels against the plain form on the processor, at awkward sizes.

They need a GPU; with TRITON_INTERPRET=1 and Triton at hand they run, slowly, on the processor.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from flopwise.engine.kernels import dispatch, experts, fused_routing
from flopwise.work.routing import Routing
from tests.support.triton_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens that are routed."""

    tokens: int
    experts: int
    choices: int
    routing: Routing


SIGMOID = Routing(scores="sigmoid", scale=2.5, correction=True)
CASES = {
    "softmax": Case(37, 6, 2, Routing(normalised=False)),
    "softmax, normalised": Case(70, 128, 8, Routing()),
    "scaled": Case(5, 160, 6, Routing(normalised=False, scale=16.0, groups=8, groups_kept=3)),
    "sigmoid": Case(11, 7, 7, Routing(scores="sigmoid", normalised=False)),
    "corrected": Case(9, 384, 8, SIGMOID),
    "best two": Case(33, 256, 8, Routing(
        scores="sigmoid", scale=2.5, correction=True, groups=8, groups_kept=4, group_by="best two"
    )),
    "groups of three": Case(19, 9, 4, Routing(groups=3, groups_kept=2, correction=True, group_by="best two")),
    "groups of one": Case(3, 4, 2, Routing(groups=4, groups_kept=3)),
    "one of one": Case(6, 1, 1, Routing()),
    "one token, all of them": Case(1, 33, 33, Routing()),
    "on inputs": Case(21, 16, 1, Routing(scores="sigmoid", normalised=False, on_inputs=True)),
    "many": Case(3, 512, 10, Routing()),
}  # fmt: skip
LARGE = {} if IS_INTERPRETED else {"large": Case(16384, 128, 8, Routing()), "larger": Case(4099, 512, 22, SIGMOID)}
TYPES = (torch.float32, torch.bfloat16)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """As far as the type rounds."""
    step = {torch.float32: 4e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found.cpu(), expected, rtol=step, atol=step * float(expected.abs().max()))


@pytest.mark.parametrize("name", [*CASES, *LARGE])
@pytest.mark.parametrize("dtype", TYPES)
def test_routing_there_and_back(name: str, dtype: torch.dtype) -> None:
    case = (CASES | LARGE)[name]
    shape, routing = (case.tokens, case.choices), case.routing
    # Columns of wider rows, as a product with padding writes them.
    wide = (2 * drawn(case.tokens, case.experts + 3, seed=1)).to(dtype)
    scores = wide[:, : case.experts]
    correction = drawn(case.experts, seed=2) if routing.correction else None
    terms = None if correction is None else experts.split_terms(correction)
    expected = torch.empty(shape), torch.empty(shape, dtype=torch.int32)
    experts.route(scores, routing, correction=terms, weights=expected[0], index=expected[1])
    found = [torch.full_like(each, -1).to(DEVICE) for each in expected]
    there = wide.to(DEVICE)[:, : case.experts]
    for given in (correction, terms):
        added = None if given is None else given.to(DEVICE)
        fused_routing.route(there, routing, correction=added, weights=found[0], index=found[1])
        same = found[1].cpu() == expected[1]
        # Of shares that are equal but for their last bit another may be chosen, or the two in another order.
        shares = experts.shares_of(scores, routing, torch.float32)
        ranked = shares if correction is None else shares + correction
        close(ranked.gather(1, found[1].cpu().long()), ranked.gather(1, expected[1].long()))
        assert same.double().mean() > 0.99 or dtype == torch.bfloat16
        # With a correction equal ranks are not equal shares.
        rows = same.all(-1)
        if bool(rows.any()):
            close(found[0].cpu()[rows], expected[0][rows])
    assert all(len(set(row)) == case.choices for row in found[1].tolist())

    gradient = drawn(*shape, seed=3)
    back, made = torch.empty(scores.shape, dtype=dtype), torch.full_like(wide, torch.nan).to(DEVICE)
    experts.route_backward(gradient, scores, expected[1], routing, out=back)
    fused_routing.route_backward(
        gradient.to(DEVICE), there, expected[1].to(DEVICE), routing, out=made[:, : case.experts]
    )
    close(made[:, : case.experts], back, dtype)
    assert bool(made[:, case.experts :].isnan().all())


@pytest.mark.parametrize("groups", [1, 4])
def test_of_equal_shares_the_first_is_taken(groups: int) -> None:
    routing = Routing(groups=groups, groups_kept=min(2, groups))
    scores = (2 * drawn(50, 32, seed=4)).round()
    shares = experts.shares_of(scores, routing, torch.float32)
    if groups > 1:
        grouped = shares.view(50, groups, -1)
        order = grouped.amax(-1).sort(dim=-1, descending=True, stable=True)[1][:, :2]
        kept = torch.zeros(50, groups, dtype=torch.bool).scatter(1, order, value=True)
        shares = grouped.masked_fill(~kept[..., None], -1.0).flatten(1)
    expected = shares.sort(dim=-1, descending=True, stable=True)[1][:, :8]
    weights, index = torch.empty(50, 8, device=DEVICE), torch.empty(50, 8, dtype=torch.int32, device=DEVICE)
    fused_routing.route(scores.to(DEVICE), routing, correction=None, weights=weights, index=index)
    assert torch.equal(index.cpu().long(), expected)


def test_scores_decide_where_their_sigmoids_are_equal() -> None:
    scores = torch.tensor([[30.0, 40.0, -5.0, 39.0], [-200.0, -150.0, -120.0, -190.0]])
    weights, index = torch.empty(2, 1, device=DEVICE), torch.empty(2, 1, dtype=torch.int32, device=DEVICE)
    rule = Routing(scores="sigmoid", normalised=False, on_inputs=True)
    fused_routing.route(scores.to(DEVICE), rule, correction=None, weights=weights, index=index)
    assert index.tolist() == [[1], [2]] and weights.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("rule", [Routing(), SIGMOID, Routing(groups=4, groups_kept=1, group_by="best two")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
def test_what_is_no_number_still_has_experts(rule: Routing) -> None:
    """Else the products would read beyond what there is before the loss tells."""
    scores = drawn(8, 16, seed=5)
    scores[0], scores[1, 3], scores[2, 5], scores[3], scores[4, 1:] = torch.nan, torch.nan, torch.inf, torch.inf, -1e30
    scores[5] = -torch.inf
    weights, index = torch.empty(8, 4, device=DEVICE), torch.empty(8, 4, dtype=torch.int32, device=DEVICE)
    correction = torch.zeros(16, device=DEVICE) if rule.correction else None
    fused_routing.route(scores.to(DEVICE), rule, correction=correction, weights=weights, index=index)
    for row in index.tolist():
        assert len(set(row)) == 4 and all(0 <= expert < 16 for expert in row)


SORTED = {
    "uneven": (37, 5, 2, None),
    "no token for most": (90, 11, 2, 3),
    "all of one": (300, 4, 1, 1),
    "every expert of every token": (45, 3, 3, None),
    "one token": (1, 7, 3, None),
    "one expert": (6, 1, 1, None),
    "exactly a block": (64, 8, 2, None),
    "many experts": (60, 300, 5, None),
}
SORTED_LARGE = {} if IS_INTERPRETED else {
    "Qwen3-30B": (16384, 128, 8, None),
    "beyond a thousand blocks": (65537, 96, 6, None),
    "two of many": (8191, 512, 10, 11),
}  # fmt: skip


@pytest.mark.parametrize("name", [*SORTED, *SORTED_LARGE])
def test_sorting_is_that_of_a_stable_sort(name: str) -> None:
    tokens, count, choices, among = (SORTED | SORTED_LARGE)[name]
    generator = torch.Generator().manual_seed(5)
    index = torch.rand(tokens, among or count, generator=generator).argsort(-1)[:, :choices].int()
    expected, found = experts.sort_by_expert(index, count), fused_routing.sort_by_expert(index.to(DEVICE), count)
    for part in ("choices", "tokens", "places", "starts"):
        wanted, made = getattr(expected, part), getattr(found, part).cpu()
        assert made.dtype == wanted.dtype and torch.equal(made, wanted), part
    for height in (1, 16, 128):
        tiles, cut = expected.cut(height), found.cut(height)
        assert torch.equal(cut.experts.cpu(), tiles.experts)
        needed = tiles.experts < count
        assert torch.equal(cut.first_rows.cpu()[needed], tiles.first_rows[needed])
        assert found.cut(height) is cut
    weights = torch.rand(tokens, choices, generator=generator)
    assert torch.equal(found.weights_of(weights.to(DEVICE)).cpu(), expected.weights_of(weights))
    sums = torch.rand(expected.rows, generator=generator)
    wanted, made = torch.empty(tokens, choices), torch.empty(tokens, choices, device=DEVICE)
    expected.weights_to(sums, out=wanted)
    found.weights_to(sums.to(DEVICE), out=made)
    close(made, wanted)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter's tensors are not on a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device_and_a_captured_step_routes_anew() -> None:
    routing, tokens, count, choices = Routing(), 1000, 128, 8
    scores = drawn(tokens, count, seed=1).to(DEVICE)
    weights, index = torch.empty(tokens, choices, device=DEVICE), torch.empty(tokens, choices, device=DEVICE).int()
    below = torch.empty_like(scores)

    def step() -> tuple[Tensor, ...]:
        dispatch.route(scores, routing, correction=None, weights=weights, index=index)
        routed = dispatch.sort_by_expert(index, count)
        assert isinstance(routed, fused_routing.FusedRouted)
        tiles = routed.cut(128)
        routed.weights_to(routed.weights_of(weights), out=weights)
        dispatch.route_backward(weights, scores, index, routing, out=below)
        return routed.choices, routed.tokens, routed.places, routed.starts, tiles.experts, weights, below

    step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    scores.copy_(drawn(tokens, count, seed=2))
    graph.replay()
    replayed = [each.clone() for each in made]
    for found, expected in zip(replayed, step(), strict=True):
        assert torch.equal(found, expected)
