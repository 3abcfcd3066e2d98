"""Products of experts as Triton's kernels against the plain ones, at awkward sizes.

They need a GPU; with TRITON_INTERPRET=1 and Triton at hand those in float32 and float16 run, slowly, on the processor.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from flopwise.engine.kernels import dispatch, fused_experts, plain_experts
from tests.support.expert_cases import CASES, Case, Mixture, mixture_of
from tests.support.triton_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS
TYPES = (torch.float32, torch.float16) if IS_INTERPRETED else (torch.float32, torch.bfloat16, torch.float16)
LARGE = {} if IS_INTERPRETED else {
    "qwen3": Case(700, 16, 8, 2048, 768),
    "adapters": Case(700, 16, 8, 2048, 16),
    "gpt-oss": Case(513, 8, 4, 2880, 2880, kind="clamped_swiglu", biased=True),
    "all of one, large": Case(1500, 4, 1, 512, 1024, among=1),
}  # fmt: skip


def close(found: Tensor, expected: Tensor) -> None:
    """Equal as far as the type rounds, once or twice."""
    step = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[found.dtype]
    error = float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    assert error < step, error


def check(mixture: Mixture) -> None:
    """Every product of a mixture, forward and backward."""
    case, routed = mixture.case, mixture.routed
    results = []
    for form in (fused_experts, plain_experts):
        gate, up, activated = (mixture.empty(case.inner) for _ in range(3))
        form.gated_product(
            mixture.source, mixture.first, mixture.first_bias, routed,
            kind=case.kind, gate=gate, up=up, activated=activated,
        )  # fmt: skip
        both, gathered, made = (mixture.empty(width) for width in (2 * case.inner, 2 * case.inner, case.hidden))
        form.product(mixture.source, mixture.first, mixture.first_bias, routed, out=gathered, gathers=True)
        form.product(activated, mixture.second, mixture.second_bias, routed, out=made)
        twice = made.clone()
        form.product(activated, mixture.second, None, routed, out=twice, add=True)
        rows, weighted = routed.weights_of(mixture.weights), mixture.empty(case.inner)
        # Gate and up beside each other, as columns of one tensor.
        both[:, : case.inner], both[:, case.inner :] = gate, up
        inner = both[:, : case.inner], both[:, case.inner :]
        form.product(mixture.gradient, mixture.second, None, routed, out=weighted, gathers=True, back=True)
        of_rows = form.weigh_backward(case.kind, weighted, *inner, rows)
        alone, alone_up = weighted.clone(), up.clone()
        of_rows_alone = form.weigh_backward("gelu", alone, None, alone_up, rows)
        of_first, of_second = torch.ones_like(mixture.first), torch.ones_like(mixture.second)
        form.wgrad(mixture.gradient, weighted, routed, total=of_second, gathers="gradient")
        form.wgrad(both, mixture.source, routed, total=of_first, gathers="source")
        own = torch.ones_like(mixture.first[:, : case.inner])
        form.wgrad(inner[0], activated[:, :1].expand(-1, case.hidden).contiguous(), routed, total=own, gathers="")
        laid, of_laid = mixture.empty(case.hidden), torch.ones_like(mixture.first)
        form.lay_out(mixture.source, routed, out=laid)
        form.wgrad(both, laid, routed, total=of_laid, gathers="")
        back = torch.ones_like(made)
        form.product(both, mixture.first, None, routed, out=back, back=True)
        form.product(inner[1], mixture.first[:, : case.inner], None, routed, out=back, back=True, add=True)
        out, of_source = torch.empty_like(mixture.source), torch.ones_like(mixture.source)
        form.sum_rows(made, routed, mixture.weights, out=out, accumulate=False)
        form.sum_rows(back, routed, None, out=of_source, accumulate=True)
        biases = torch.ones_like(mixture.first[:, :, 0]), torch.ones_like(mixture.second[:, :, 0])
        form.bias_gradient(both, routed, weights=None, total=biases[0])
        form.bias_gradient(mixture.gradient, routed, weights=rows, total=biases[1])
        results.append([
            gate, up, activated, gathered, made, twice, both, weighted, of_rows.to(out.dtype), alone, alone_up,
            of_rows_alone.to(out.dtype), of_first, of_second, own, laid, of_laid, back, out, of_source, *biases,
        ])  # fmt: skip
    for found, expected in zip(*results, strict=True):
        close(found, expected)


@pytest.mark.parametrize("name", [*CASES, *LARGE])
@pytest.mark.parametrize("dtype", TYPES)
def test_fused_products_give_what_plain_ones_give(name: str, dtype: torch.dtype) -> None:
    check(mixture_of((CASES | LARGE)[name], dtype, DEVICE))


@pytest.mark.parametrize("name", ["clamped, with biases", *LARGE])
def test_products_that_no_descriptor_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card without the room: the sides of the tensors would allow it."""
    monkeypatch.setattr(fused_experts, "is_described", lambda _: False)
    check(mixture_of((CASES | LARGE)[name], TYPES[1], DEVICE))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter's tensors are not on a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device() -> None:
    mixture = mixture_of(CASES["uneven"], torch.bfloat16, DEVICE)
    made = mixture.empty(mixture.case.hidden)
    gate, up, activated = (mixture.empty(mixture.case.inner) for _ in range(3))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        routed = dispatch.sort_by_expert(mixture.index, mixture.case.experts)
        fused_experts.gated_product(
            mixture.source, mixture.first, None, routed, kind="silu", gate=gate, up=up, activated=activated
        )
        fused_experts.product(activated, mixture.second, None, routed, out=made)
    finally:
        torch.cuda.set_sync_debug_mode("default")
