"""Losses that balance experts and keep routers' scores small, against autograd on the plain modules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from flopwise.base.errors import FlopwiseError  # noqa: E402
from flopwise.engine.batch import NO_LABEL, Batch  # noqa: E402
from flopwise.engine.modules import PlainBlock  # noqa: E402
from flopwise.plan.program.compile import compile_plan  # noqa: E402
from flopwise.records.plan import Plan  # noqa: E402
from flopwise.work.routing import BalanceOver, Routing  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.routing_reference import balance_of, z_of  # noqa: E402
from tests.support.tiny_models import (  # noqa: E402
    TINY,
    TOKENS,
    parameters,
    random_module,
    transformers_model,
)
from tests.support.training_plans import (  # noqa: E402
    cut_plan,
    everything_stays,
    executor_for,
    first_gradients,
    largest_error,
    random_batch,
)

FAMILIES = ["mixtral", "gpt_oss", "glm4_moe", "deepseek_v2", "qwen3_next", "nemotron_h"]
OVER: list[BalanceOver] = ["model", "layer", "sequence"]


def with_losses(family: str, over: BalanceOver, *, balance: float = 0.7, z_loss: float = 0.03) -> Transformer:
    model = TINY[family]
    if family == "nemotron_h":
        # One block of three has experts, and nothing else.
        model = replace(model, experts=4, experts_per_token=2, ffn=16, routing=Routing(normalised=False))
    return replace(model, routing=replace(model.routing, balance=balance, balance_over=over, z_loss=z_loss))


def routed_by(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Scores and experts of each mixture's block, as a module makes them from now on."""
    found: list[tuple[Tensor, Tensor]] = []
    route = PlainBlock.route

    def watched(block: PlainBlock, value: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = route(block, value)
        found.append((block.router(value), chosen))
        return weights, chosen

    monkeypatch.setattr(PlainBlock, "route", watched)
    return found


def plans(model: Transformer) -> dict[str, Plan]:
    whole = everything_stays(model, sequence=TOKENS, sequences=2)
    if model.recurrence is not None:
        # Sequences that carry a state are not cut.
        return {"whole": whole, "kept little": replace(whole, saves=("I",) * model.layers, activation_slots=1)}
    return {
        "whole": whole,
        "cut": cut_plan(model, sequence=TOKENS, chunk=5, letters="faci", attention="chunk", groups=2),
        "attention at once": cut_plan(model, sequence=TOKENS, chunk=7, letters="iF", attention="sequence", groups=2),
        "rounds": everything_stays(model, sequence=TOKENS, sequences=1, rounds_per_step=2),
    }


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_autograds_however_a_round_is_cut(
    family: str, over: BalanceOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_losses(family, over)
    routing, module = model.routing, random_module(model)
    routes = routed_by(monkeypatch)
    for name, plan in plans(model).items():
        ragged = name != "rounds"
        batch = random_batch(model, 2, TOKENS, 5, ragged=ragged)
        expected = dict.fromkeys(("data", "balance", "z"), torch.zeros((), dtype=torch.float64))
        for micro in batch.micro_batches(plan.sequences_per_round):
            routes.clear()
            data = module.loss(torch.from_numpy(micro.ids).long(), torch.from_numpy(micro.labels))
            there = torch.ones(micro.ids.shape, dtype=torch.bool)
            if micro.lengths is not None:
                there = torch.arange(TOKENS) < torch.from_numpy(micro.lengths)[:, None]
            expected["data"] = expected["data"] + data / batch.with_loss
            share = 1 / plan.rounds_per_step
            balance = balance_of(routes, routing, model.experts, there)
            expected["balance"] = expected["balance"] + share * routing.balance * balance
            expected["z"] = expected["z"] + share * routing.z_loss * z_of(routes, routing, there)
        module.zero_grad()
        torch.autograd.backward(sum(expected.values(), torch.zeros(())))
        executor = executor_for(plan, model, parameters(module))
        evaluated = executor.evaluate([batch])
        found = executor.step(batch, 0)
        assert found.routing is not None, name
        assert found.routing.balance_loss == pytest.approx(float(expected["balance"].detach()), rel=1e-9), name
        assert found.routing.z_loss == pytest.approx(float(expected["z"].detach()), rel=1e-9), name
        assert found.loss == pytest.approx(sum(float(each.detach()) for each in expected.values()), rel=1e-9)
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad
            for name, value in module.named_parameters()
            if value.requires_grad
        }
        assert largest_error(first_gradients(executor), gradients) < 1e-8, name
        assert evaluated.loss == pytest.approx(float(expected["data"].detach()), rel=1e-9), "of the data alone"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe"])
def test_the_loss_over_the_model_is_that_of_transformers(family: str) -> None:
    model = with_losses(family, "model", balance=0.4, z_loss=0.0)
    module = random_module(model)
    theirs = transformers_model(model, module)
    batch = random_batch(model, 2, TOKENS, 3, masked=False)
    labels = torch.from_numpy(batch.labels).long()
    made = theirs(torch.from_numpy(batch.ids).long(), output_router_logits=True)
    data = functional.cross_entropy(made.logits.flatten(0, 1).double(), labels.flatten())
    expected = float((data + 0.4 * made.aux_loss).detach())
    plan = cut_plan(model, sequence=TOKENS, chunk=6, letters="fi", attention="chunk", groups=2)
    found = executor_for(plan, model, parameters(module)).step(batch, 0)
    assert found.loss == pytest.approx(expected, rel=1e-6)


def test_evenness_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_losses("mixtral", "model")
    module = random_module(model)
    routes = routed_by(monkeypatch)
    batch = random_batch(model, 2, TOKENS, 4)
    module.loss(torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.labels))
    loads = torch.stack([functional.one_hot(chosen, model.experts).sum((0, 1)) for _, chosen in routes]).double()
    executor = executor_for(everything_stays(model, sequence=TOKENS, sequences=2), model, parameters(module))
    found = executor.step(batch, 0).routing
    assert found is not None
    assert found.busiest == pytest.approx(float((loads.amax(-1) / loads.mean(-1)).mean()))
    assert found.unused == pytest.approx(float((loads == 0).double().mean()))


def test_an_expert_that_nobody_chose_and_one_that_all_did() -> None:
    """Their gradients are those of the shares alone: the number of tokens has none."""
    model = with_losses("mixtral", "model", balance=1.0, z_loss=0.0)
    module = random_module(model)
    with torch.no_grad():
        for layer in range(model.layers):
            router = module.get_parameter(f"layers.{layer}.router.weight")
            router.zero_()
            router[0] = 0.1
    batch = Batch(np.zeros((1, TOKENS), np.int32), np.full((1, TOKENS), NO_LABEL, np.int32))
    executor = executor_for(everything_stays(model, sequence=TOKENS), model, parameters(module))
    found = executor.step(batch, 0).routing
    assert found is not None
    # Two of four experts have every token each, by equal tokens.
    assert found.busiest == pytest.approx(2.0)
    assert found.unused == pytest.approx(0.5)


def test_what_is_counted_has_room_in_the_plan() -> None:
    quiet, counting = TINY["mixtral"], with_losses("mixtral", "sequence")
    sizes = {}
    for model in (quiet, counting):
        program = compile_plan(everything_stays(model, sequence=TOKENS, sequences=3), model)
        sizes[model] = program.bytes_by_owner("device")["workspace"]
    numbers = counting.layers * 3 * (2 * counting.experts + 2)
    assert sizes[counting] - sizes[quiet] >= 8 * numbers
    plan = everything_stays(counting, sequence=TOKENS, sequences=3)
    executor = executor_for(plan, counting, parameters(random_module(counting)))
    executor.step(random_batch(counting, 3, TOKENS, 1), 0)
    assert executor.player.arena.peak_beside_bytes == 0


@pytest.mark.parametrize(
    "routing",
    [Routing(balance=-0.1), Routing(balance=float("nan")), Routing(z_loss=1e9), Routing(z_loss=float("inf"))],
)
def test_weights_that_are_none_are_refused(routing: Routing) -> None:
    with pytest.raises(FlopwiseError, match="is not between 0 and 100"):
        replace(TINY["mixtral"], routing=routing)


def test_a_model_without_experts_has_none() -> None:
    with pytest.raises(FlopwiseError, match="there are none"):
        replace(TINY["llama"], routing=Routing(balance=0.1))
