"""Profiles of real runs on a GPU; skipped where there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

from flopwise.profile.explain.invariants import broken
from flopwise.profile.measure.outside import run_outside
from flopwise.profile.measure.sampling import read_counter_record
from flopwise.profile.read.reading import read_profiles
from flopwise.records.profile import Profile
from flopwise.store.runs import PROFILE, from_text, read_steps
from flopwise.train import run as train_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SCRIPT = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
batch = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
for _ in range(300):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
torch.cuda.synchronize()
"""


def known(profile: Profile, name: str) -> float:
    value = profile.get(name)
    assert value is not None, name
    return value


def check_sums(profile: Profile) -> None:
    span = known(profile, "device_span_s")
    assert known(profile, "device_busy_s") + known(profile, "idle_s") == pytest.approx(span, rel=1e-9)
    assert sum(row.seconds for row in profile.classes) == pytest.approx(known(profile, "device_busy_s"), rel=1e-9)
    assert broken(profile) == ()


@pytest.mark.parametrize("device_mib", [None, 4608])
def test_a_training_is_profiled(tmp_path: Path, device_mib: int | None) -> None:
    """With all state on the device, and under a cap that has it copied."""
    record = train_run(
        model="qwen2.5-0.5b",
        steps=16,
        sequence_tokens=4096,
        batch_sequences=16,
        precision="bf16",
        device="cuda",
        profile=True,
        checkpoint=False,
        device_memory_bytes=None if device_mib is None else device_mib * 2**20,
        store=str(tmp_path),
    )
    folder = tmp_path / record.id
    profile, steps = from_text((folder / PROFILE).read_text(), Profile), read_steps(folder)
    check_sums(profile)
    assert profile.peaks is not None
    traced = [step.mfu or 0.0 for step in steps if 2 < step.step <= 5]
    from_trace = known(profile, "model_flops") / (known(profile, "device_span_s") * profile.peaks.flops)
    assert from_trace == pytest.approx(fmean(traced), rel=0.01)
    for name in ("matrix_active_s", "mbu", "power_w", "energy_j", "clock_mean_hz", "clock_boost_hz", "throttle_share"):
        assert profile.values[name].source == "measured", name
    assert 0 < known(profile, "matrix_active_s") < known(profile, "device_span_s")
    assert {"gemm", "attention", "norm", "pointwise", "optimizer"} <= {row.kind for row in profile.classes}
    streams = {task.stream for task in profile.tasks}
    assert ("copy-in" in streams) == (device_mib is not None)
    for task in profile.tasks:
        assert task.measured_start_s is not None and task.measured_end_s is not None
        assert -1e-3 <= task.measured_start_s <= task.measured_end_s


def test_another_program_is_profiled(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    outcome = run_outside([sys.executable, str(script)], tmp_path / "profile", warm_up=5, steps=4)
    assert outcome.exit_code == 0 and len(outcome.traces) == 1
    assert read_counter_record(outcome.counters[0]).window == "steady"
    (profile,) = [profile for read in read_profiles([tmp_path / "profile"]) for profile in read.profiles]
    check_sums(profile)
    assert profile.steps == 4
    # Eight layers: two products forward and backward each, but for the first, which has no gradient to pass on.
    flops = known(profile, "hardware_flops")
    assert flops == pytest.approx(2 * 8192 * 4096 * 4096 * (3 * 8 - 1), rel=0.01)
