"""Programs profiled as they are, in processes of their own; the recorder that does it, in this one."""

from __future__ import annotations

import atexit
import errno
import gzip
import json
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.profile.measure import recording
from flopwise.profile.measure.hook import Watcher
from flopwise.profile.measure.outside import ProgramOutcome, option_that_turns_us_off, read_told, reason, run_outside
from flopwise.profile.measure.recording import Recorder, without_last_step
from flopwise.profile.measure.sampling import NoSampler, read_counter_record
from flopwise.profile.measure.start_up.sitecustomize import TOLD

Run = Callable[..., ProgramOutcome]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A script's text and its arguments, profiled by this Python."""

    def of(text: str, *arguments: str, **options: Any) -> ProgramOutcome:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text))
        settings = {"warm_up": 2, "steps": 3, **options}
        return run_outside([sys.executable, str(script), *arguments], tmp_path / "profile", **settings)

    return of


def events(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace, "rt", encoding="utf-8") as stream:
        found: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return found


def spans(trace: Path, beginning: str) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events(trace):
        if str(event.get("name", "")).startswith(beginning) and event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


TRAINING = """
    import sys
    import torch
    import sitecustomize

    print(sys.argv[1:], sitecustomize.WORD, [path for path in sys.path if "flopwise-profile" in path])
    print(sys.stdin.read())
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    # The second optimizer steps only every other time, and is not counted.
    first, second = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(first)
    for step in range(8):
        for part in range(2):
            model(torch.ones(4, 8)).sum().backward()
        first.step()
        schedule.step()
        if step % 2:
            second.step()
    print("trained", file=sys.stderr)
    sys.exit(3)
"""


def test_a_training_is_recorded_and_does_not_notice(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("WORD = 'theirs'\n")
    (tmp_path / "input").write_text("through stdin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    monkeypatch.setenv("RANK", "5")
    keep = os.dup(0)
    with (tmp_path / "input").open() as stream:
        os.dup2(stream.fileno(), 0)
        try:
            outcome = run(TRAINING, "--depth", "4")
        finally:
            os.dup2(keep, 0)
            os.close(keep)
    assert outcome.exit_code == 3
    written = capfd.readouterr()
    assert written.out == "['--depth', '4'] theirs []\nthrough stdin\n"
    assert written.err == "trained\n"
    folder = tmp_path / "profile"
    assert outcome.traces == (folder / "trace-rank5.json.gz",)
    assert outcome.counters == (folder / "counters-rank5.json",)
    assert len(list(folder.iterdir())) == 2
    record = read_counter_record(outcome.counters[0])
    assert (record.rank, record.steps, record.window) == (5, 3, "profiled")
    steps = spans(outcome.traces[0], "ProfilerStep#")
    assert list(steps) == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    # Two forward passes of two linear layers in each step, and an update that lies wholly within it.
    products = [event["ts"] for event in events(outcome.traces[0]) if event.get("name") == "aten::addmm"]
    updates = spans(outcome.traces[0], "Optimizer.step#AdamW")["Optimizer.step#AdamW.step"]
    assert len(updates) == 3
    for ((begin, end),), (update_begin, update_end) in zip(steps.values(), updates, strict=True):
        assert sum(1 for product in products if begin <= product <= end) == 4
        assert begin <= update_begin < update_end <= end


def test_without_an_optimizer_calls_are_steps_and_breaking_off_leaves_the_whole_ones(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        """
        import copy
        import pickle
        import torch
        inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        scale, model = torch.nn.Softmax(dim=-1), torch.nn.Sequential(inner, torch.nn.Linear(8, 8))
        with torch.inference_mode():
            for call in range(7):
                model(scale(torch.ones(4, 8)))
                if call == 1:
                    kept = pickle.dumps(model)
                    copies = copy.deepcopy(model), pickle.loads(kept)
                    print(b"flopwise" in kept, *(twin(torch.ones(4, 8)).shape for twin in copies))
        raise SystemError("as it happens")
        """,
        steps=9,
    )
    assert outcome.exit_code == 1
    written = capfd.readouterr()
    size = "torch.Size([4, 8])"
    assert written.out == f"False {size} {size}\n"
    assert written.err.endswith("SystemError: as it happens\n")
    (trace,) = outcome.traces
    # The calls 3 to 6: nobody knows that the seventh was whole.
    steps = spans(trace, "ProfilerStep#")
    assert len(steps) == 4
    assert read_counter_record(outcome.counters[0]).steps == 4
    products = [event["ts"] for event in events(trace) if event.get("name") == "aten::addmm"]
    assert len(products) == 12
    for ((begin, end),) in steps.values():
        assert sum(1 for product in products if begin <= product <= end) == 3


def test_a_program_without_torch_gets_nothing(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run(
        """
        import importlib.util
        import os
        import signal
        import sys
        print(importlib.util.find_spec("torch").name, [name for name in sys.modules if name.startswith("flopwise")])
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert (outcome.exit_code, outcome.signal) == (128 + signal.SIGKILL, signal.SIGKILL)
    assert (outcome.traces, outcome.counters, outcome.why_none) == ((), (), "it never imported torch")
    assert capfd.readouterr() == ("torch []\n", "")


def test_what_goes_wrong_with_us_is_not_the_programs_problem(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("version = 'another torch'\n")
    outcome = run(
        """
        import sys
        import torch
        import torch as again
        print(torch.version, {"numpy", "msgspec"} & set(sys.modules), torch.__spec__.origin == torch.__file__)
        """
    )
    assert (outcome.exit_code, outcome.traces) == (0, ())
    assert str(outcome.why_none).startswith("profiling failed: AttributeError: ")
    assert capfd.readouterr() == ("another torch set() True\n", "")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("python -I train.py", "-I"),
        ("/usr/bin/python3.12 -u -W ignore -E train.py", "-E"),
        ("python3 -uS train.py", "-S"),
        ("python -X dev -Wignore -bb train.py -I", None),
        ("python -c print() -S", None),
        ("python -m torch.distributed.run -E", None),
        ("python --check-hash-based-pycs never -I x.py", "-I"),
        ("python -WI -XS x.py", None),
        ("python - -I", None),
        ("torchrun -I train.py", None),
        ("python", None),
    ],
)
def test_options_of_python_that_leave_us_out(words: str, option: str | None) -> None:
    assert option_that_turns_us_off(words.split()) == option


def test_commands_that_cannot_be_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no-program").write_bytes(b"\x7fELF nothing")
    (tmp_path / "no-program").chmod(0o755)
    (tmp_path / "no-executable").touch()
    for command, what, exit_code in (
        ([], "no command", 2),
        (["no-such-command"], "no-such-command", 127),
        (["./no-program"], "cannot be run", 126),
        (["./no-executable"], "may not be executed", 126),
        (["./no-such-program"], "there is no command", 127),
    ):
        here = [word.replace("./", f"{tmp_path}/") for word in command]
        with pytest.raises(FlopwiseError, match=what) as error:
            run_outside(here, tmp_path / "profile", warm_up=1, steps=1)
        assert error.value.exit_code == exit_code
    for warm_up, steps in ((0, 1), (1, 0)):
        with pytest.raises(FlopwiseError, match="warm-up"):
            run_outside(["true"], tmp_path / "profile", warm_up=warm_up, steps=steps)
    with pytest.raises(FlopwiseError, match="cannot write"):
        run_outside(["true"], tmp_path / "no-program/profile", warm_up=1, steps=1)


def test_an_earlier_profile_is_not_mixed_with_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "trace-rank0.json.gz").touch()
    with pytest.raises(FlopwiseError, match="already"):
        run_outside(["true"], tmp_path, warm_up=1, steps=1)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many calls of a model and then steps of its training, in this process and watched as a program's would be."""
    import torch

    # What the watcher changes in torch and in Python ends with the test.
    for owner, name in (
        (torch.autograd.profiler.record_function, "__enter__"),
        (torch.autograd.profiler.record_function, "__exit__"),
        (torch.autograd.profiler.profile, "_prepare_trace"),
        (torch.nn.Module, "_compiled_call_impl"),
    ):
        monkeypatch.setattr(owner, name, owner.__dict__[name])
    # Once anybody in this process has made one, torch notes its steps, and then those of ours twice.
    step = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
    )
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / TOLD).touch()
    Watcher(tmp_path / "profile" / TOLD, warm_up=1, steps=2, at_most_s=60.0).watch()

    class Plain(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = torch.nn.Linear(2, 2)
    optimizer = Plain(model.parameters(), lr=0.1)

    def steps(count: int) -> None:
        for _ in range(count):
            model(torch.ones(2, 2))
        for _ in range(count):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()

    return steps


def test_an_evaluation_before_the_training_does_not_take_its_place(
    training: Callable[[int], None], tmp_path: Path
) -> None:
    training(6)
    trace = tmp_path / "profile/trace-rank0.json.gz"
    assert len(spans(trace, "ProfilerStep#")) == 2
    assert len(spans(trace, "Optimizer.step#")["Optimizer.step#Plain.step"]) == 2


@pytest.mark.parametrize("before", [1, 2])
def test_a_program_that_uses_the_profiler_itself_keeps_it(
    training: Callable[[int], None], tmp_path: Path, before: int
) -> None:
    from torch.profiler import ProfilerActivity, profile

    training(before)
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        training(3)
    assert {row.key: row.count for row in theirs.key_averages()}["Optimizer.step#Plain.step"] == 3
    assert "it uses torch's profiler itself" in reason(read_told(tmp_path / "profile" / TOLD), 3)
    assert not list(tmp_path.glob("profile/*"))


def test_a_recording_that_fails_ends_alone(
    training: Callable[[int], None], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(recording, "_export", full)
    training(6)
    assert "flopwise" not in "".join(capfd.readouterr())
    assert reason(read_told(tmp_path / "profile" / TOLD), 3) == "profiling failed: OSError: [Errno 28] the disk is full"


def work(recorder: Recorder, steps: int) -> None:
    import torch

    for _ in range(steps):
        torch.ones(3, 3) @ torch.ones(3, 3)
        recorder.step()


@pytest.mark.parametrize(("warm_up", "recorded"), [(1, 1), (3, 2)])
def test_counters_are_those_of_steps_that_nothing_disturbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_up: int, recorded: int
) -> None:
    monkeypatch.setattr(recording, "ENERGY_WINDOW_S", 0.0)
    recorder = Recorder(tmp_path, warm_up=warm_up, steps=recorded, rank=0, sampler=NoSampler)
    work(recorder, warm_up + recorded - 1)
    assert not recorder.written
    work(recorder, 1)
    trace, counters = tmp_path / "trace-rank0.json.gz", tmp_path / "counters-rank0.json"
    assert recorder.written == (trace, counters)
    assert len(spans(trace, "ProfilerStep#")) == recorded
    assert [event["name"] for event in events(trace)].count("aten::mm") == recorded
    assert read_counter_record(counters).window == "profiled"
    # One step to settle, and one to count.
    work(recorder, 1)
    assert read_counter_record(counters).window == "profiled"
    work(recorder, 1)
    assert recorder.done
    record = read_counter_record(counters)
    assert (record.window, record.steps) == ("steady", 1)
    work(recorder, 2)
    recorder.close()
    assert {path.name for path in tmp_path.iterdir()} == {trace.name, counters.name}


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_recorder_closed_before_its_first_whole_step_leaves_nothing(tmp_path: Path, steps: int) -> None:
    recorder = Recorder(tmp_path, warm_up=3, steps=2, rank=0, sampler=NoSampler)
    work(recorder, steps)
    recorder.close()
    recorder.close()
    work(recorder, 9)
    assert recorder.done
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_can_take_back_what_it_wrote_and_leaves_what_others_did(tmp_path: Path) -> None:
    others = Recorder(tmp_path, warm_up=1, steps=1, rank=0, sampler=NoSampler, replace=False)
    work(others, 2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 2
    recorder = Recorder(tmp_path, warm_up=1, steps=1, rank=0, sampler=NoSampler, replace=False)
    work(recorder, 2)
    assert recorder.written == (
        tmp_path / f"trace-rank0-{os.getpid()}.json.gz",
        tmp_path / f"counters-rank0-{os.getpid()}.json",
    )
    recorder.discard()
    assert recorder.done
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_recording_that_takes_too_long_ends_with_its_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, warm_up=1, steps=1000, rank=0, at_most_s=0.0, sampler=NoSampler)
    work(recorder, 2)
    assert len(spans(recorder.written[0], "ProfilerStep#")) == 1


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    def event(name: str, category: str, begin: int, **more: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": 5, **more}

    kept = [
        {"ph": "M", "name": "thread_name", "ts": 99},
        event("ProfilerStep#1", "user_annotation", 10),
        event("ProfilerStep#1", "gpu_user_annotation", 25),
        event("cudaLaunchKernel", "cuda_runtime", 12, args={"correlation": 7}),
        event("late kernel of an early launch", "kernel", 30, args={"correlation": 7}),
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 7, "ts": 30},
    ]
    cut = [
        event("ProfilerStep#2", "user_annotation", 20),
        event("ProfilerStep#2", "gpu_user_annotation", 40),
        event("cudaLaunchKernel", "cuda_runtime", 22, args={"correlation": 8}),
        event("kernel", "kernel", 40, args={"correlation": 8}),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 8, "ts": 22},
        event("aten::mm", "cpu_op", 21),
    ]
    assert without_last_step([*cut, *kept]) == kept
    assert without_last_step(kept[:1]) == kept[:1]


def test_steps_of_a_daemon_thread_on_a_gpu_are_told_as_such(tmp_path: Path) -> None:
    """Its profiler could not be stopped when the program ends; where it is seen: `benchmarks.odd_programs` on a GPU."""
    (tmp_path / TOLD).write_text("7 python\n7 torch\n7 daemon\n7 ended 0 0\n")
    (process,) = read_told(tmp_path / TOLD)
    assert "daemon" in process
    assert "a daemon thread takes its steps on the GPU" in reason([process], 4)


@pytest.mark.parametrize("attempt", range(3))
def test_a_program_ends_for_a_caller_with_threads_too(run: Run, attempt: int) -> None:  # noqa: ARG001 - once more
    """Any of them may be told that a child has ended, and most drop it."""
    enough = threading.Event()
    others = [threading.Thread(target=enough.wait) for _ in range(8)]
    for other in others:
        other.start()
    try:
        assert run("pass").exit_code == 0
    finally:
        enough.set()
        for other in others:
            other.join()
