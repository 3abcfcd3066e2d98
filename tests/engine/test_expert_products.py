"""Products of experts in plain torch, forward and backward, against autograd of every token with every expert."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from flopwise.engine.kernels import plain_experts  # noqa: E402
from tests.support.expert_cases import CASES, Mixture, mixture_of  # noqa: E402


def mixed_densely(mixture: Mixture, leaves: list[Tensor]) -> Tensor:
    """Every expert's result for every token, times what the token gives it: most of them nothing."""
    case = mixture.case
    source, weights, first, second, *biases = leaves
    shares = torch.zeros(case.tokens, case.experts, dtype=source.dtype).scatter(1, mixture.index.long(), weights)
    inner = torch.einsum("th,eih->tei", source, first)
    if biases:
        inner = inner + biases[0]
    gate, up = inner.chunk(2, -1)
    if case.kind == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        activated = gate * torch.sigmoid(1.702 * gate) * up
    else:
        activated = torch.nn.functional.silu(gate) * up
    made = torch.einsum("tei,ehi->teh", activated, second)
    if biases:
        made = made + biases[1]
    summed: Tensor = (made * shares[..., None]).sum(1)
    return summed


@pytest.mark.parametrize("name", CASES)
def test_plain_products_give_what_autograd_gives(name: str) -> None:
    mixture = mixture_of(CASES[name], torch.float64, torch.device("cpu"))
    case, routed = mixture.case, mixture.routed
    given = [mixture.source, mixture.weights, mixture.first, mixture.second]
    if mixture.first_bias is not None and mixture.second_bias is not None:
        given += [mixture.first_bias, mixture.second_bias]
    leaves = [each.clone().requires_grad_() for each in given]
    expected = mixed_densely(mixture, leaves)
    wanted = torch.autograd.grad(expected, leaves, mixture.gradient)

    gate, up, activated = (mixture.empty(case.inner) for _ in range(3))
    plain_experts.gated_product(
        mixture.source, mixture.first, mixture.first_bias, routed, kind=case.kind, gate=gate, up=up, activated=activated
    )
    made, out = mixture.empty(case.hidden), torch.empty_like(mixture.source)
    plain_experts.product(activated, mixture.second, mixture.second_bias, routed, out=made)
    plain_experts.sum_rows(made, routed, mixture.weights, out=out, accumulate=False)
    torch.testing.assert_close(out, expected.detach())

    rows = routed.weights_of(mixture.weights)
    weighted = mixture.empty(case.inner)
    plain_experts.product(mixture.gradient, mixture.second, None, routed, out=weighted, gathers=True, back=True)
    of_rows = plain_experts.weigh_backward(case.kind, weighted, gate, up, rows)
    of_weights, of_source = torch.empty_like(mixture.weights), torch.ones_like(mixture.source)
    routed.weights_to(of_rows, out=of_weights)
    of_first, of_second = torch.ones_like(mixture.first), torch.ones_like(mixture.second)
    plain_experts.wgrad(mixture.gradient, weighted, routed, total=of_second, gathers="gradient")
    both, back = torch.cat((gate, up), 1), mixture.empty(case.hidden)
    plain_experts.wgrad(both, mixture.source, routed, total=of_first, gathers="source")
    laid_out, again = mixture.empty(case.hidden), torch.ones_like(mixture.first)
    plain_experts.lay_out(mixture.source, routed, out=laid_out)
    plain_experts.wgrad(both, laid_out, routed, total=again, gathers="")
    assert torch.equal(again, of_first)
    plain_experts.product(both, mixture.first, None, routed, out=back, back=True)
    plain_experts.sum_rows(back, routed, None, out=of_source, accumulate=True)
    found = [of_source - 1, of_weights, of_first - 1, of_second - 1]
    if case.biased:
        assert mixture.first_bias is not None and mixture.second_bias is not None
        of_biases = torch.ones_like(mixture.first_bias), torch.ones_like(mixture.second_bias)
        plain_experts.bias_gradient(both, routed, weights=None, total=of_biases[0])
        plain_experts.bias_gradient(mixture.gradient, routed, weights=rows, total=of_biases[1])
        # What the down product's bias adds to the weights' gradient is no matter of its rows.
        of_weights += (mixture.gradient @ mixture.second_bias.t()).gather(1, mixture.index.long())
        found += [each - 1 for each in of_biases]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tile_rows", [1, 4, 64])
def test_tiles_hold_each_row_once_and_no_two_experts(name: str, tile_rows: int) -> None:
    routed = mixture_of(CASES[name], torch.float32, torch.device("cpu")).routed
    tiles, ends = routed.cut(tile_rows), routed.starts.tolist()[1:]
    seen = []
    for expert, first in zip(tiles.experts.tolist(), tiles.first_rows.tolist(), strict=True):
        if expert < routed.experts:
            seen += [(expert, row) for row in range(first, min(first + tile_rows, ends[expert]))]
    each = enumerate(plain_rows for plain_rows in zip([0, *ends[:-1]], ends, strict=True))
    assert seen == [(expert, row) for expert, (first, last) in each for row in range(first, last)]
