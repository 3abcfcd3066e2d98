"""Plans of models that are trained in part: what passes, what is stored, what backward does not come to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model, load_stack
from flopwise.plan.cluster.answer import answer
from flopwise.plan.device.explain import make_plan
from flopwise.plan.device.memory import plan_bytes
from flopwise.plan.program.compile import compile_plan
from flopwise.plan.program.sizes import sizes_of
from flopwise.predict.choose import usual_formats
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.records.plan import Planned
from flopwise.records.program import check
from flopwise.setup.setup import Setup
from flopwise.setup.trained import TrainedWords
from flopwise.work.formats import parse_formats, with_base
from flopwise.work.transformer import Transformer

GIB = 2**30
H200 = load_hardware("h200")
SMALL = load_model("llama-3-1b")
HALF_FROZEN = TrainedWords(freeze="blocks.0-7,head,embedding")
CASES = {
    "adapters": (TrainedWords(lora=8), "bf16-amp,base=bf16"),
    "adapters over nf4": (TrainedWords(lora=8, lora_on="q,v"), "bf16-amp,base=nf4"),
    "dora": (TrainedWords(lora=8, dora=True), "bf16-amp,base=bf16"),
    "adapters on the upper half": (TrainedWords(lora=8, freeze="blocks.0-7"), "bf16-amp,base=nf4"),
    "adapters above and below": (TrainedWords(lora=8, dora=True, freeze="blocks.4-9"), "bf16-amp,base=bf16"),
    "lower half frozen": (HALF_FROZEN, "bf16"),
    "lower half frozen, in int8": (HALF_FROZEN, "bf16-mixed,base=int8"),
    "a block in the middle": (TrainedWords(freeze="blocks.3-9"), "bf16"),
}


def plan_for(words: TrainedWords, precision: str, device: float, *, clip: bool = False) -> tuple[Planned, Transformer]:
    model = words.of(SMALL)
    assert isinstance(model, Transformer)
    setup = Setup(model=model, hardware=H200, batch_sequences=4, clip=clip)
    capped = setup.cap(sequence_tokens=2048, formats=parse_formats(precision), device=int(device * GIB), host=16 * GIB)
    return make_plan(capped, helps=False), model


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("device", [2.6, 24.0])
@pytest.mark.parametrize("case", CASES)
def test_plans_fit_and_their_programs_hold(case: str, device: float, clip: bool) -> None:
    words, precision = CASES[case]
    planned, model = plan_for(words, precision, device, clip=clip)
    plan = planned.plan
    program = compile_plan(plan, model)
    check(program)
    found = plan_bytes(plan, sizes_of(model, plan.sequence_tokens, parse_formats(precision), "adamw"))
    assert found == {place: program.bytes_by_owner(place) for place in ("device", "host")}
    assert sum(found["device"].values()) <= device * GIB
    trained = {each.part for each in program.at_end.values() if each.kind == "weights" and each.version == 1}
    frozen = {each.part for each in program.at_end.values() if each.kind == "weights" and each.version == 0}
    assert trained == {task.layer if task.layer is not None else task.end for task in program.tasks if task.parameters}
    assert not trained & frozen
    reached = {task.layer for task in program.tasks if task.kind.startswith("backward")}
    assert reached == set(range(model.first_reached, model.layers))


def test_only_what_is_trained_goes_back_to_the_host() -> None:
    planned, model = plan_for(TrainedWords(lora=8), "bf16-amp,base=bf16", 1.6)
    sizes = sizes_of(model, 2048, parse_formats("bf16-amp,base=bf16"), "adamw")
    program = compile_plan(planned.plan, model)
    loads = {task.bytes for task in program.tasks if (task.kind, task.what) == ("load", "weights") and task.layer}
    stores = {task.bytes for task in program.tasks if (task.kind, task.what) == ("store", "weights") and task.layer}
    assert loads == {sizes.block.weights}
    assert stores == {sizes.block.trained}
    assert sizes.block.parameters == 8 * (2 * 2048 + 2 * 2048 + 2 * (2048 + 512) + 3 * (2048 + 8192))
    assert sizes.block.gradients < sizes.block.weights / 10
    assert not sizes.head.gradients
    assert not sizes.embedding.optimizer


def test_blocks_without_adapters_take_no_more_than_their_own_products() -> None:
    """Those below all adapters run forward alone; one between them hands the gradient on, and has no adapters."""
    planned, model = plan_for(TrainedWords(lora=64, freeze="blocks.0-3,blocks.8"), "bf16-amp,base=bf16", 100.0)
    plan = replace(planned.plan, replay=False)
    program, costs = compile_plan(plan, model), TaskSeconds(plan, model, H200)
    seconds = costs.of(program)
    took = {(task.kind, task.layer): each for task, each in zip(program.tasks, seconds, strict=True)}
    frozen = TrainedWords(freeze="blocks").of(SMALL)
    bare = TaskSeconds(plan, frozen, H200).groups(plan.tokens_of(0))
    assert ("backward", 3) not in took
    assert took["forward", 0] == took["forward", 8] < took["forward", 4] == took["forward", 15]
    assert took["backward", 8] < took["backward", 9]
    without = bare.backward["before"] + bare.backward["after"] + bare.recompute["full"]["before"]
    without += bare.recompute["full"]["after"]
    assert took["backward", 8] == pytest.approx(without + costs.attention_s(0, "backward", 8), rel=1e-9)
    # What is held against the kernels' own ceiling is less than all of it.
    assert planned.forecast.ceiling_share < 1


def test_a_frozen_block_does_without_gradients_of_matrices() -> None:
    planned, model = plan_for(TrainedWords(freeze="blocks.3-9"), "bf16", 100.0)
    program = compile_plan(planned.plan, model)
    seconds = TaskSeconds(planned.plan, model, H200).of(program)
    took = {task.layer: second for task, second in zip(program.tasks, seconds, strict=True) if task.kind == "backward"}
    assert took[3] == took[9] < took[2] == took[15]
    # Of a backward, the products are two of equal size: without one of them a good half is left.
    assert 0.5 < took[3] / took[2] < 0.7


def test_adapters_take_two_thirds_of_the_time() -> None:
    whole, _ = plan_for(TrainedWords(), "bf16", 100.0)
    tuned, _ = plan_for(TrainedWords(lora=8), "bf16-amp,base=bf16", 100.0)
    assert 2 / 3 < tuned.forecast.step_s / whole.forecast.step_s < 0.85
    assert 0.65 < tuned.forecast.model_flops / whole.forecast.model_flops < 0.75


def test_fewer_bits_pass_faster() -> None:
    steps = []
    for base in ("bf16", "int8", "nf4"):
        model = TrainedWords(lora=16).of(load_model("llama-3-70b"))
        formats = with_base(usual_formats(H200, model), base)
        setup = Setup(model=model, hardware=H200, batch_sequences=4)
        capped = setup.cap(sequence_tokens=4096, formats=formats, device=24 * GIB, host=180 * GIB)
        steps.append(make_plan(capped, helps=False).forecast)
    assert steps[0].step_s > 1.1 * steps[2].step_s
    copies = [each.host_bytes["weights"] for each in steps]
    assert copies[0] > 1.5 * copies[1] > 2.4 * copies[2]


def test_what_a_plan_cannot_do_is_told() -> None:
    planned, model = plan_for(HALF_FROZEN, "bf16", 24.0)
    with pytest.raises(FlopwiseError, match="other layers than backward comes to"):
        compile_plan(planned.plan, replace(model, frozen=("embedding", "head", "blocks.0-2")))
    with pytest.raises(FlopwiseError, match="updates on the host"):
        compile_plan(replace(planned.plan, update_place="host", replay=False), model)
    with pytest.raises(FlopwiseError, match="trained in part"):
        Setup(model=model, hardware=H200, parallel=replace(Setup(model=model, hardware=H200).parallel, tensor=2))
    with pytest.raises(FlopwiseError, match="behind a framework"):
        Setup(model=model, hardware=H200, stack=load_stack("torchtitan"))


@pytest.mark.parametrize("words", [TrainedWords(lora=16), HALF_FROZEN])
def test_several_devices_share_the_batch_alone(words: TrainedWords) -> None:
    """What `plan --gpus` finds is what trains: no layer is split."""
    hardware = load_hardware("h100-sxm")
    setup = Setup(model=words.of(SMALL), hardware=hardware, batch_sequences=16, sequence_tokens=2048)
    found = answer(setup, 8).best
    assert (found.parallel.data, found.parallel.tensor, found.parallel.pipeline) == (8, 1, 1)
    whole = answer(replace(setup, model=SMALL), 8).best
    assert found.step_s < whole.step_s
