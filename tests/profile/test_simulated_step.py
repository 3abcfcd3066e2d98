"""The step that `plan --trace` writes, read again, and one step of others' traces as it ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model
from flopwise.door import plan
from flopwise.plan.device.forecast import trace_step
from flopwise.predict.simulate.simulator import memory_points, waits_of
from flopwise.profile.explain.activity import ActivityBuilder, timeline_of
from flopwise.profile.read.reading import read_profiles
from flopwise.records.plan import Planned
from flopwise.report.page.data import _timeline
from flopwise.report.trace import chrome_trace


def test_what_plan_writes_profile_reads(tmp_path: Path) -> None:
    found = plan("gpt2", on="rtx-4090", seq="1k", batch=8, device_mem="3GiB", host_mem="16GiB")
    assert isinstance(found, Planned)
    played = trace_step(found.plan, load_model("gpt2"), load_hardware("rtx-4090"))
    path = tmp_path / "step.json"
    path.write_text(chrome_trace(played, memory_points(played), "gpt2 on a card"), encoding="utf-8")
    ((profile,),) = [read.profiles for read in read_profiles([path])]

    tasks = played.program.tasks
    assert len(profile.tasks) == len(tasks) and profile.device == "gpt2 on a card"
    for told, task, start, end in zip(profile.tasks, tasks, played.starts, played.ends, strict=True):
        assert told.stream == task.stream and told.measured_start_s is None
        assert told.predicted_start_s == pytest.approx(start, abs=1e-9)
        assert told.predicted_end_s == pytest.approx(end, abs=2e-9)
    values = {name: value.value for name, value in profile.values.items()}
    assert {value.source for value in profile.values.values()} == {"modelled"}
    assert values["device_span_s"] == pytest.approx(max(played.ends), abs=1e-8)
    played_spans = zip(tasks, played.starts, played.ends, strict=True)
    computing = sum(end - start for task, start, end in played_spans if task.stream == "compute")
    assert values["device_busy_s"] - values["copy_exposed_s"] == pytest.approx(computing, rel=1e-5)
    # What is exposed is at most what compute waits for.
    waited = sum(end - start for start, end, _ in waits_of(played))
    assert 0 <= values["copy_exposed_s"] <= waited + 1e-6
    assert profile.memory_total_bytes == sum(played.peak_device_bytes.values())
    # Logits and hidden states are no runtime's: a training's own profile has them among the activations.
    owners = {use.name: use.owner for use in profile.memory}
    assert owners["weights"] == "parameters" and owners["workspace"] == "runtime"
    assert owners["head"] == owners["activations"] == "activations"

    path.write_text(path.read_text(encoding="utf-8")[:-200], encoding="utf-8")
    with pytest.raises(FlopwiseError, match="no whole trace"):
        read_profiles([path])


def test_a_step_of_another_tools_trace_is_drawn_as_it_ran() -> None:
    built = ActivityBuilder()
    # Three steps of 100 ns, launched 20 ns before they run; the middle one is drawn.
    for step in range(3):
        begun = 100 * step
        built.add("gemm", "gemm", begun + 20, begun + 50, stream=7, launch_ns=begun)
        built.add("softmax", "attention", begun + 50, begun + 60, stream=7, launch_ns=begun + 1)
        built.add("sum", "pointwise", begun + 55, begun + 58, stream=9, launch_ns=begun + 2)
        built.add("to the card", "copy", begun + 40, begun + 70, stream=11, launch_ns=begun + 3)
        built.add("all-reduce", "communication", begun + 60, begun + 90, stream=13, launch_ns=begun + 4)
    found = timeline_of(built.build(), [(0, 100), (100, 200), (200, 300)])
    assert [(task.name, task.stream) for task in found] == [
        ("gemm", "compute"),
        ("softmax", "compute"),
        ("sum", "compute 2"),
        ("to the card", "copy"),
        ("all-reduce", "network"),
    ]
    assert np.allclose([(task.start_s, task.end_s) for task in found[:2]], [(0, 30e-9), (30e-9, 40e-9)])
    # Without steps all of it; without anything nothing.
    assert len(timeline_of(built.build())) == 15 and timeline_of(ActivityBuilder().build()) == ()
    drawn = _timeline(found)
    assert drawn is not None and drawn.measured_end_ns == (30, 40, 38, 50, 70)
    assert set(drawn.predicted_start_ns) == {None} and drawn.kinds[drawn.kind[4]] == "communication"
