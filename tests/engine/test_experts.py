"""Every rule by which a mixture routes, against plain torch and autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flopwise.engine.kernels import experts
from flopwise.engine.modules import PlainBlock
from flopwise.work.routing import Routing
from tests.support.tiny_models import TINY, TOKENS, random_module
from tests.support.training_plans import cut_plan, everything_stays, executor_for, random_batch

RULES = {
    "softmax": Routing(normalised=False),
    "softmax, normalised": Routing(),
    "sigmoid": Routing(scores="sigmoid", normalised=False, scale=2.5),
    "sigmoid, normalised": Routing(scores="sigmoid", scale=2.5),
    "softmax in groups": Routing(normalised=False, scale=16.0, groups=3, groups_kept=2),
    "sigmoid in groups": Routing(
        scores="sigmoid", scale=2.5, correction=True, groups=3, groups_kept=1, group_by="best two"
    ),
    "corrected": Routing(scores="sigmoid", correction=True),
}
EXPERTS = 6


def chosen_one_by_one(shares: Tensor, routing: Routing, correction: Tensor | None, count: int) -> list[set[int]]:
    """The experts of each token, by sorting."""
    found = []
    for row in shares.tolist():
        ranked = [share + (0.0 if correction is None else float(correction[place])) for place, share in enumerate(row)]
        size = len(row) // routing.groups
        groups = [range(group * size, (group + 1) * size) for group in range(routing.groups)]
        counted = 2 if routing.group_by == "best two" else 1
        groups.sort(key=lambda group: -sum(sorted((ranked[place] for place in group), reverse=True)[:counted]))
        allowed = [place for group in groups[: routing.groups_kept] for place in group]
        found.append(set(sorted(allowed, key=lambda place: -ranked[place])[:count]))
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 6])
def test_experts_and_weights_follow_the_rule(rule: str, count: int) -> None:
    routing = RULES[rule]
    if count > EXPERTS // routing.groups * routing.groups_kept:
        pytest.skip("more than the groups have")
    generator = torch.Generator().manual_seed(count)
    scores = 2 * torch.randn(11, EXPERTS, generator=generator, dtype=torch.float64)
    correction = torch.randn(EXPERTS, generator=generator, dtype=torch.float64) if routing.correction else None
    weights, index = torch.empty(11, count, dtype=torch.float64), torch.empty(11, count, dtype=torch.int32)
    experts.route(scores, routing, correction=correction, weights=weights, index=index)
    leaf = scores.clone().requires_grad_()
    shares = leaf.sigmoid() if routing.scores == "sigmoid" else leaf.softmax(-1)
    assert [set(row) for row in index.tolist()] == chosen_one_by_one(shares.detach(), routing, correction, count)
    expected = shares.gather(-1, index.long())
    if routing.normalised:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected.detach() * routing.scale)
    gradient = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
    below = torch.empty_like(scores)
    experts.route_backward(gradient, scores, index, routing, out=below)
    torch.testing.assert_close(below, torch.autograd.grad(expected * routing.scale, leaf, gradient)[0])


@pytest.mark.parametrize("cut", ["whole", "chunk"])
def test_a_watched_step_tells_how_evenly_experts_are_used(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY["mixtral"]
    module = random_module(model)
    chosen: list[torch.Tensor] = []
    route = PlainBlock.route

    def watched(block: PlainBlock, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = route(block, value)
        chosen.append(found[1])
        return found

    monkeypatch.setattr(PlainBlock, "route", watched)
    saves = ("F",) * model.layers
    plan = (
        everything_stays(model, sequence=TOKENS, sequences=2, saves=saves)
        if cut == "whole"
        else cut_plan(model, sequence=TOKENS, chunk=TOKENS, letters="F", attention="chunk")
    )
    batch = random_batch(model, plan.sequences_per_round, TOKENS, 0)
    module.loss(torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.labels).long())
    executor = executor_for(plan, model, {name: value.detach() for name, value in module.named_parameters()})
    executor.step(batch, 0)
    assert executor.mixture_use() is None, "nobody watched"
    executor.times_tasks = True
    executor.set_weights({name: value.detach() for name, value in module.named_parameters()})
    executor.step(batch, 1)
    use = executor.mixture_use()
    assert use is not None
    loads = torch.stack([torch.bincount(each.flatten(), minlength=model.experts) for each in chosen]).double()
    assert use.busiest == pytest.approx(float((loads.amax(-1) / loads.mean(-1)).mean()))
    assert use.unused == pytest.approx(float((loads == 0).double().mean()))
    assert set(use.seconds) == {"router", "permutation", "experts", "attention"}
    assert all(seconds > 0 for seconds in use.seconds.values())
