"""Trainings that end before their last step in good order, the best checkpoint, and trackers that are told of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.engine.signals import Stop
from flopwise.records.measurement import StepRecord
from flopwise.store.runs import find_run, read_record, read_steps
from flopwise.train import Callback
from flopwise.train import loop as loop_module
from flopwise.train.request import TrainRequest, check_request
from flopwise.train.running import run
from flopwise.train.trackers import check_trackers
from tests.train.test_train_run import Recorder, asked, final_files, hardware, losses, place

__all__ = ["hardware", "place"]

STAND_IN = """
import json, pathlib
calls = pathlib.Path({calls!r})
def tell(name, words):
    with calls.open("a") as stream:
        stream.write(json.dumps([name, words]) + "\\n")
def init(**words): print("hello"); tell("init", words)
def log(figures, step): tell("log", [figures, step])
def finish(): tell("finish", None)
"""


class Ending(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_step(self, record: StepRecord) -> Literal["stop"] | None:
        return "stop" if record.step == self.after else None


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, float]], None]:
    """Says what the evaluation after a step finds."""

    def say(found: dict[int, float]) -> None:
        whole = loop_module.Loop.evaluate

        def evaluate(loop: loop_module.Loop, stop: Stop | None = None) -> dict[str, float]:
            return {**whole(loop, stop), "eval_loss": found[loop.progress.step]}

        monkeypatch.setattr(loop_module.Loop, "evaluate", evaluate)

    return say


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[-8:]) for path in (folder / "checkpoints").glob("step-*"))


def test_a_callback_ends_it_saved_and_done_and_it_goes_on_as_if_it_never_had(place: Path) -> None:
    whole = run(**asked(place, steps=6))
    told = Recorder()
    record = run(callbacks=[Ending(4), told], **asked(place, steps=6))
    folder = find_run(place / "runs", record.id)
    assert (record.state, record.reason, record.steps_done) == ("done", "a callback has ended it", 4)
    assert record.checkpoint == "checkpoints/step-00000004"
    assert [step.step for step in told.steps] == [1, 2, 3, 4]
    assert any("ended after step 4, and saved: a callback" in note for note in told.notes)
    again = run(resume=record.id, store=str(place / "runs"))
    assert (again.state, again.reason, again.steps_done) == ("done", None, 6)
    assert final_files(folder) == final_files(find_run(place / "runs", whole.id))


def test_a_callback_that_ends_the_last_step_changes_nothing(place: Path) -> None:
    record = run(callbacks=[Ending(2)], **asked(place, steps=2))
    assert (record.state, record.reason) == ("done", None)


def test_it_ends_when_evaluations_bring_nothing_and_the_best_stays(
    place: Path, judged: Callable[[dict[int, float]], None]
) -> None:
    judged({1: 5.0, 2: 4.0, 3: 4.5, 4: 3.0, 5: 3.0, 6: 3.1, 7: 2.0})
    request = asked(place, steps=7, evaluate_every=1, patience=2, keep_best=True, keep_checkpoints=1)
    record = run(**request)
    folder = find_run(place / "runs", record.id)
    assert (record.state, record.steps_done) == ("done", 6)
    assert record.reason == "no evaluation was better than that after step 4, 2 in a row"
    assert record.best == "checkpoints/step-00000004"
    assert saved_steps(folder) == [4, 6]


def test_what_is_remembered_of_evaluations_is_resumed(place: Path, judged: Callable[[dict[int, float]], None]) -> None:
    judged({1: 3.0, 2: 4.0, 3: 4.0, 4: 1.0, 5: 2.0})
    request = asked(place, steps=5, evaluate_every=1, patience=2, keep_best=True)
    first = run(callbacks=[Ending(2)], **request)
    record = run(resume=first.id, store=str(place / "runs"))
    assert (record.steps_done, record.best) == (3, "checkpoints/step-00000001")
    # With more patience it goes on, and finds a better one.
    longer = run(resume=first.id, store=str(place / "runs"), patience=3)
    assert (longer.steps_done, longer.best, longer.reason) == (5, "checkpoints/step-00000004", None)
    whole = run(**{**request, "patience": 9})
    assert losses(find_run(place / "runs", longer.id)) == losses(find_run(place / "runs", whole.id))


def test_a_warm_up_may_be_a_share(place: Path) -> None:
    record = run(**asked(place, steps=4, warmup_share=0.5, schedule="wsd", decay_share=0.25, learning_rate=1e-3))
    assert record.training.warmup_steps == 2
    rates = [step.learning_rate for step in read_steps(find_run(place / "runs", record.id))]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"patience": 3}, "--patience without --evaluate-every"),
        ({"keep_best": True}, "--keep-best without --evaluate-every"),
        ({"keep_best": True, "evaluate_every": 2, "checkpoint": False}, "--keep-best beside --no-checkpoint"),
        ({"patience": 0, "evaluate_every": 2}, "--patience 0"),
        ({"warmup_steps": 3, "warmup_share": 0.1}, "a warm-up in steps and as a share"),
        ({"decay_share": 0.1}, "of another schedule"),
        ({"log": ("mlflow",)}, "mlflow"),
        ({"log": ("wandb:",)}, "cannot read --log wandb:"),
        ({"log": ("tensorboard:here",)}, "cannot read --log tensorboard:here"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopwiseError, match=words) as caught:
        check_request(TrainRequest(**wrong))
    assert caught.value.hint


def test_no_best_without_anything_held_out(place: Path) -> None:
    (place / "short.txt").write_text("red green blue " * 4, encoding="utf-8")
    request = asked(place, evaluate_every=1, patience=1) | {"data": (str(place / "short.txt"),), "batch_sequences": 1}
    with pytest.raises(FlopwiseError, match="no data is held out"):
        run(**request)


# -- trackers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """A module under a tracker's name that writes down what it is told."""
    made: list[str] = []

    def install(name: str, more: str = "") -> Path:
        calls = tmp_path / f"{name}.jsonl"
        folder = tmp_path / "modules"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(STAND_IN.format(calls=str(calls)) + more, encoding="utf-8")
        monkeypatch.syspath_prepend(folder)
        made.append(name)
        return calls

    yield install
    import sys

    for name in made:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_is_told_of_everything_and_stays_offline(
    place: Path,
    stand_in: Callable[..., Path],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    calls = stand_in(name)
    record = run(**asked(place, steps=2, evaluate_every=2, log=(f"{name}:mine",)))
    assert capsys.readouterr().out == ""
    told = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [word for word, _ in told] == ["init", "log", "log", "finish"]
    opened = told[0][1]
    assert (opened["project"], opened["name"]) == ("mine", f"runs-{record.id}")
    assert opened["config"]["model"] == "tiny"
    assert opened["config"]["learning_rate"] == 3e-3
    assert opened.get("mode") == ("offline" if name == "wandb" else None)
    figures, step = told[2][1]
    assert step == 2
    assert {"loss", "learning_rate", "tokens_per_s", "eval_loss", "device_bytes"} <= set(figures)
    assert (read_record(find_run(place / "runs", record.id)).request["log"]) == [f"{name}:mine"]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_told_once_and_ends_nothing(
    place: Path, stand_in: Callable[..., Path], broken: str
) -> None:
    stand_in("wandb", f"def {broken}(*_, **__): raise OSError('no disk')\n")
    told = Recorder()
    record = run(callbacks=[told], **asked(place, steps=3, log=("wandb",)))
    assert record.state == "done"
    assert len([note for note in told.notes if "no disk" in note]) == 1


def test_a_tracker_is_closed_where_the_training_fails(place: Path, stand_in: Callable[..., Path]) -> None:
    class Breaking(Callback):
        def on_step(self, record: StepRecord) -> None:
            raise RuntimeError(str(record.step))

    calls = stand_in("wandb")
    with pytest.raises(RuntimeError):
        run(callbacks=[Breaking()], **asked(place, steps=3, log=("wandb",)))
    assert calls.read_text().splitlines()[-1] == '["finish", null]'


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwise.train.trackers.find_spec", lambda _name: None)
    with pytest.raises(FlopwiseError, match="wandb is not installed") as caught:
        check_trackers(("wandb",))
    assert caught.value.hint == "pip install wandb, or without --log"


def test_tensorboard_by_torchs_own_writer(place: Path) -> None:
    pytest.importorskip("tensorboard")
    record = run(**asked(place, steps=2, log=("tensorboard",)))
    reading = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reading.EventAccumulator(str(find_run(place / "runs", record.id) / "tensorboard"))
    found.Reload()
    steps = read_steps(find_run(place / "runs", record.id))
    assert [event.value for event in found.Scalars("loss")] == pytest.approx([step.loss for step in steps])
