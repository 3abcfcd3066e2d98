"""`flopwise train` beside several devices and beside a run that goes on: what is refused before a process starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.catalog.load import load_model, plan_table
from flopwise.engine import launch, spawning
from flopwise.engine.executable import check_formats
from flopwise.store.runs import new_run, write_record
from flopwise.train import launching
from flopwise.train.request import TrainRequest
from flopwise.work.formats import POLICIES, parse_formats
from tests.cli.test_cli_fuzz import answered
from tests.cli.test_cli_train import Trainer, asked, cluster_plan, refused, trainer
from tests.report.test_training_report import a_record

__all__ = ["trainer"]


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ranks were started, each time that some were."""
    found: list[int] = []

    def spawn(_words: list[str], ranks: int) -> int:
        found.append(ranks)
        return 7

    monkeypatch.setattr(spawning, "spawn", spawn)
    monkeypatch.setattr(launching, "check_launch", lambda _request: None)
    return found


def test_fp8_on_several_devices_is_refused_before_any_starts(trainer: Trainer, spawned: list[int]) -> None:
    several = "fp8 cannot be trained in on several devices yet"
    err = refused(trainer, "gpt2 --gpus 2 --precision fp8")
    assert several in err and "hint: --precision bf16, or --gpus 1" in err
    Path("plan.toml").write_text(to_toml(plan_table(replace(cluster_plan(2), precision="fp8"), load_model("gpt2"))))
    err = refused(trainer, "plan.toml")
    assert several in err and "hint: `flopwise plan" in err
    write_record(new_run(Path("runs")), a_record(id="0001", plan={"precision": "fp8"}, state="interrupted"))
    err = refused(trainer, "--resume 1 --gpus 2")
    assert several in err and err.rstrip().endswith("hint: --gpus 1")
    assert spawned == []
    assert asked(trainer, "--resume 1 --gpus 1").devices == 1
    assert answered(["train", "gpt2", "--gpus", "2", "--precision", "bf16"])[0] == 7
    assert spawned == [2]


def test_everything_is_looked_at_before_a_process_is_started(
    trainer: Trainer, spawned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TrainRequest] = []

    def check(request: TrainRequest) -> None:
        seen.append(request)
        raise FlopwiseError("not here", hint="elsewhere")

    monkeypatch.setattr(launching, "check_launch", check)
    assert refused(trainer, "gpt2 --gpus 2") == "error: not here\n\nhint: elsewhere\n"
    assert ([request.devices for request in seen], spawned) == ([2], [])
    # One device is looked at by what runs it, and so are ranks that somebody else has started.
    assert asked(trainer, "gpt2 --gpus 1").devices == 1
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(launch, "leave", lambda _code=0: None)
    assert asked(trainer, "gpt2 --gpus 2").devices == 2
    assert len(seen) == 1


def test_hardware_may_be_named_beside_a_run_that_goes_on(trainer: Trainer) -> None:
    write_record(new_run(Path("runs")), a_record(id="0001", state="interrupted"))
    assert "--on" in refused(trainer, "--resume 1 --seq 8").rpartition("hint:")[2]
    assert asked(trainer, "--resume 1 --on mine.toml") == TrainRequest(resume="1", on="mine.toml")


def test_every_policy_that_trains_is_in_the_help() -> None:
    text = " ".join(answered(["train", "--help"])[1].split())
    listed = text.partition("--precision")[2].partition("changes as")[0].replace(",", " ").replace(";", " ").split()
    for name in POLICIES:
        try:
            check_formats(parse_formats(name))
        except ValueError:
            continue
        assert name in listed
