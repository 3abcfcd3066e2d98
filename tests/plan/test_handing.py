"""When a step is captured and replayed instead of handed over kernel by kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.explain import make_plan
from flopwise.plan.device.handing import UPDATE_KERNELS, handing_s, is_replayed, kernels_of
from flopwise.records.plan import Plan, Residency
from flopwise.setup.setup import CappedSetup
from flopwise.work.formats import parse_formats
from flopwise.work.transformer import Transformer

FEW = Residency(blocks=0, passing=1)
H200, MODEL = load_hardware("h200"), load_model("qwen3-0.6b")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Everything of a small model stays on the device."""
    setup = CappedSetup(
        model=MODEL,
        hardware=H200,
        sequence_tokens=4096,
        batch_sequences=8,
        device_cap_bytes=120 << 30,
        host_cap_bytes=0,
        formats=parse_formats("bf16"),
    )
    return make_plan(setup, helps=False).plan


def test_a_step_that_waits_for_nothing_is_replayed_sooner(plan: Plan) -> None:
    handed_s = handing_s(plan, MODEL, H200)
    passes = replace(plan, weights=replace(plan.weights, blocks=3, passing=2))
    offloads = replace(plan, saves=tuple(letters.lower() for letters in plan.saves))
    for share, alone, others in ((0.1, False, False), (0.3, True, False), (0.6, True, True)):
        assert is_replayed(plan, MODEL, H200, handed_s / share) == alone
        assert is_replayed(passes, MODEL, H200, handed_s / share) == others
        assert is_replayed(offloads, MODEL, H200, handed_s / share) == others


def test_updates_on_the_host_and_steps_of_a_cpu_are_never(plan: Plan) -> None:
    none = replace(plan.optimizer_state, blocks=0, ends=())
    assert not is_replayed(replace(plan, replay=False, update_place="host", optimizer_state=none), MODEL, H200, 1e-6)
    cpu = replace(H200, device=replace(H200.device, kind="cpu"))
    assert not is_replayed(plan, MODEL, cpu, 1e-6)
    assert plan.replay


def of_a_block(name: str, saves: str = "F") -> int:
    """Kernels that one more layer launches, its update left out."""
    model = load_model(name)
    assert isinstance(model, Transformer)
    setup = CappedSetup(
        model=model,
        hardware=H200,
        sequence_tokens=128,
        batch_sequences=8,
        device_cap_bytes=130 << 30,
        host_cap_bytes=1 << 40,
        formats=parse_formats("bf16"),
    )
    plan = make_plan(setup, helps=False).plan
    plan = replace(plan, saves=(saves * plan.chunks_per_round,) * plan.layers)
    shorter = replace(model, layers=model.layers - 2)
    less = kernels_of(replace(plan, saves=plan.saves[2:], weights=FEW, gradients=FEW, optimizer_state=FEW), shorter)
    return (kernels_of(plan, model) - less - 2 * UPDATE_KERNELS) // 2 // (plan.chunks_per_round * plan.rounds_per_step)


def test_kernels_are_those_of_the_description() -> None:
    # As counted in traces of both.
    assert of_a_block("bert-base") == of_a_block("gpt2") == 52
    # Two norms on heads there and back, and a third matrix with its two gradients, less biases' kernels.
    assert of_a_block("qwen3-0.6b") > of_a_block("llama-3-1b") > of_a_block("gpt2")
    assert of_a_block("gpt2", "i") > of_a_block("gpt2", "a") > of_a_block("gpt2")
