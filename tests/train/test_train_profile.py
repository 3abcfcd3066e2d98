"""`train --profile`: what the profile of a real run on this CPU says, and that profiling never costs the training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from flopwise.profile.explain.invariants import broken
from flopwise.profile.measure.recording import Recorder
from flopwise.profile.read.reading import read_profiles
from flopwise.records.measurement import StepRecord
from flopwise.records.profile import Profile
from flopwise.store.runs import PROFILE, from_text, read_steps
from flopwise.train import run as train_run
from flopwise.train.events import Callback


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, note: str) -> None:
        self.notes.append(note)


def trained(tmp_path: Path, **asked: Any) -> tuple[Path, list[StepRecord], list[str]]:
    listener = Notes()
    words: dict[str, Any] = {"steps": 9, "sequence_tokens": 128, "batch_sequences": 4, "device": "cpu", "profile": True}
    record = train_run(store=str(tmp_path), checkpoint=False, callbacks=[listener], **words | asked)
    folder = tmp_path / record.id
    return folder, read_steps(folder), listener.notes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[StepRecord], list[str]]:
    return trained(tmp_path_factory.mktemp("profiled"))


@pytest.fixture(scope="module")
def profile(run: tuple[Path, list[StepRecord], list[str]]) -> Profile:
    return from_text((run[0] / PROFILE).read_text(), Profile)


def known(profile: Profile, name: str) -> float:
    value = profile.get(name)
    assert value is not None, name
    return value


def check_rules(profile: Profile) -> None:
    """But those that hold a measured peak against the run: on cores that others use, the peak may be found too low."""
    assert [rule for rule in broken(profile) if not {"mfu", "hfu", "peak"} & set(rule.rule.split())] == []


def test_what_was_busy_and_idle_is_the_span(profile: Profile) -> None:
    span = known(profile, "device_span_s")
    assert known(profile, "device_busy_s") + known(profile, "idle_s") == pytest.approx(span, rel=1e-9)
    assert sum(row.seconds for row in profile.classes) == pytest.approx(known(profile, "device_busy_s"), rel=1e-9)
    check_rules(profile)


def test_its_mfu_is_the_trainers(run: tuple[Path, list[StepRecord], list[str]], profile: Profile) -> None:
    steps = run[1]
    assert profile.steps == 3 and profile.peaks is not None
    measurement = json.loads((run[0] / "record.json").read_text())["measurement"]
    # The warm-up takes two steps, and a third where that one has not settled.
    assert known(profile, "mfu") == measurement["mfu"] and measurement["steps"] in (9 - 2 - 3, 9 - 3 - 3)

    # The traced steps, by the trace's clock and by the trainer's: the same to a per cent, but for what else ran here.
    traced = [step for step in steps if 2 < step.step <= 5]
    events = json.loads(gzip.decompress((run[0] / "trace-rank0.json.gz").read_bytes()))["traceEvents"]
    marks = [event["dur"] / 1e6 for event in events if event["name"].startswith("ProfilerStep#")]
    flops = known(profile, "model_flops")
    shares = [flops / (mark * profile.peaks.flops) for mark in marks]
    ratios = [share / (step.mfu or 0.0) for share, step in zip(shares, traced, strict=True)]
    assert max(ratios) == pytest.approx(1, abs=0.01) and known(profile, "step_wall_s") >= fmean(marks) * (1 - 1e-6)


def test_products_and_attention_have_the_programs_flops(profile: Profile) -> None:
    flops = {row.kind: row.flops for row in profile.classes}
    assert flops["gemm"] and flops["attention"]
    assert flops["gemm"] + flops["attention"] == pytest.approx(known(profile, "hardware_flops"))
    assert profile.peaks is not None
    for row in profile.classes:
        roof = row.roof_s(profile.peaks)
        assert roof is None or roof > 0


def test_tasks_predicted_and_measured_have_the_same_rows(profile: Profile) -> None:
    tasks = profile.tasks
    assert [task.name for task in tasks][:2] == ["embed 0", "forward 0.0"]
    assert tasks[-1].name.startswith("optimize")
    ends = 0.0
    for task in tasks:
        assert task.predicted_start_s is not None and task.predicted_end_s is not None
        assert task.measured_start_s is not None and task.measured_end_s is not None
        # A CPU runs them one after the other.
        assert ends <= task.measured_start_s <= task.measured_end_s
        ends = task.measured_end_s
    assert 0 < ends <= 3 * known(profile, "step_wall_s")


def test_memory_is_the_runs(run: tuple[Path, list[StepRecord], list[str]], profile: Profile) -> None:
    record = json.loads((run[0] / "record.json").read_text())
    rows = [row for row in record["measurement"]["memory"] if row["place"] == "device"]
    assert profile.memory_total_bytes == sum(row["measured_bytes"] for row in rows)
    assert profile.memory_total_bytes is not None
    peak = max(size for _, size in profile.memory_over_time)
    assert 0.5 * profile.memory_total_bytes < peak <= profile.memory_total_bytes
    assert {use.name: use.bytes for use in profile.memory} == {row["owner"]: row["measured_bytes"] for row in rows}


def test_the_trace_alone_gives_the_same_classes(
    run: tuple[Path, list[StepRecord], list[str]], profile: Profile
) -> None:
    (read,) = read_profiles([run[0] / "trace-rank0.json.gz"])
    assert [(row.kind, row.seconds) for row in read.profiles[0].classes] == [
        (row.kind, row.seconds) for row in profile.classes
    ]
    assert read_profiles([run[0]])[0].profiles == (profile,)


def test_what_lies_between_steps_is_no_part_of_them(tmp_path: Path) -> None:
    """Here an evaluation of 64 sequences follows every step, and takes longer than the step."""
    folder, steps, _ = trained(tmp_path, steps=6, sequence_tokens=64, batch_sequences=2, evaluate_every=1)
    found = from_text((folder / PROFILE).read_text(), Profile)
    (traced,) = [step for step in steps if step.step == 3]
    assert found.steps == 1 and traced.evaluation is not None
    assert traced.evaluation["eval_runtime"] > 0.5 * traced.step_s
    assert known(found, "device_span_s") == pytest.approx(traced.step_s, rel=0.1)
    check_rules(found)


def test_a_run_too_short_to_be_profiled_says_so(tmp_path: Path) -> None:
    folder, steps, notes = trained(tmp_path, steps=1)
    assert len(steps) == 1 and not (folder / PROFILE).exists()
    assert notes == ["there is no profile: the run ended before a step was traced"]


def test_a_trace_that_cannot_be_written_costs_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Recorder) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recorder, "step", full)
    _, steps, notes = trained(tmp_path, steps=4)
    assert len(steps) == 4
    assert notes == ["there is no profile: profiling failed: OSError(28, 'No space left on device')"]


def test_the_window_is_as_long_as_asked_for(tmp_path: Path) -> None:
    folder, steps, _ = trained(tmp_path, steps=4, profile_steps=1)
    found = from_text((folder / PROFILE).read_text(), Profile)
    assert found.steps == 1 and len(steps) == 4


def test_of_a_few_steps_the_first_is_not_what_is_measured(tmp_path: Path) -> None:
    """Two of three are traced: they are warm at least."""
    folder, steps, _ = trained(tmp_path, steps=3)
    measurement = json.loads((folder / "record.json").read_text())["measurement"]
    assert measurement["steps"] == 2
    assert measurement["step_s"] == pytest.approx((steps[1].step_s + steps[2].step_s) / 2)
