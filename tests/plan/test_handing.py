"""When a step is captured and replayed instead of handed over kernel by kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.explain import make_plan
from flopwise.plan.device.handing import handing_s, is_replayed
from flopwise.records.plan import Plan
from flopwise.setup.setup import CappedSetup
from flopwise.work.formats import parse_formats

H200 = load_hardware("h200")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Everything of a small model stays on the device."""
    setup = CappedSetup(
        model=load_model("qwen3-0.6b"),
        hardware=H200,
        sequence_tokens=4096,
        batch_sequences=8,
        device_cap_bytes=120 << 30,
        host_cap_bytes=0,
        formats=parse_formats("bf16"),
    )
    return make_plan(setup, helps=False).plan


def test_a_step_that_waits_for_nothing_is_replayed_sooner(plan: Plan) -> None:
    handed_s = handing_s(plan, H200)
    passes = replace(plan, weights=replace(plan.weights, blocks=3, passing=2))
    offloads = replace(plan, saves=tuple(letters.lower() for letters in plan.saves))
    for share, alone, others in ((0.1, False, False), (0.3, True, False), (0.6, True, True)):
        assert is_replayed(plan, H200, handed_s / share) == alone
        assert is_replayed(passes, H200, handed_s / share) == others
        assert is_replayed(offloads, H200, handed_s / share) == others


def test_updates_on_the_host_and_steps_of_a_cpu_are_never(plan: Plan) -> None:
    none = replace(plan.optimizer_state, blocks=0, ends=())
    assert not is_replayed(replace(plan, replay=False, update_place="host", optimizer_state=none), H200, 1e-6)
    cpu = replace(H200, device=replace(H200.device, kind="cpu"))
    assert not is_replayed(plan, cpu, 1e-6)
    assert plan.replay
