"""`flopwise train` as a user types it; the training itself is a stand-in here."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import flopwise.train
from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.catalog.load import load_model, plan_table
from flopwise.cli.train_progress import LiveTraining, PlainTraining, start_lines, watching
from flopwise.engine import spawning
from flopwise.profile.measure.this_machine import cpu_here
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.measurement import RunRecord
from flopwise.records.outcome import Outcome
from flopwise.setup.parallel import Parallel
from flopwise.setup.training import Training
from flopwise.store.runs import new_run, write_record
from flopwise.train import launching
from flopwise.train.events import Callback, Started
from flopwise.train.request import TrainRequest
from tests.cli.test_cli_fuzz import answered
from tests.report.test_device_plan_report import some_plan
from tests.report.test_training_report import BLOCK, GIB, NAN, a_record, a_step

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "FLOPWISE_STORE")


def a_start(**changes: Any) -> Started:
    plain = Started(
        folder=Path("runs/0142"),
        run="0142",
        hardware="NVIDIA H200",
        training=Training(steps=20),
        first_step=0,
        expected=Outcome(
            model="llama-3-8b",
            batch_sequences=24,
            sequence_tokens=8192,
            devices=1,
            step_s=17.4,
            tokens_per_s=11_300.0,
            device_bytes=33 * GIB,
            host_bytes=64 * GIB,
        ),
        checks=("NVIDIA H200, 139 GiB", "64 GiB of host memory pinned", "plan fits", "1,507 sequences"),
        notes=("a note from the data",),
    )
    figures = {name: changes.pop(name) for name in list(changes) if name in Outcome.__dataclass_fields__}
    return replace(plain, expected=replace(plain.expected, **figures), **changes)


@dataclass
class Trainer:
    """Stands in for `train.run`: keeps what it is asked, tells of five steps, ends as it is told to."""

    record: RunRecord
    error: Exception | None = None
    asked: list[TrainRequest] = field(default_factory=list)
    callbacks: int = 0

    def __call__(self, request: TrainRequest, *, callbacks: Sequence[Callback] = ()) -> RunRecord:
        self.asked.append(request)
        self.callbacks = len(callbacks)
        for callback in callbacks:
            callback.on_progress("tokens", 1, 2)
            callback.on_start(a_start(training=Training(steps=5)))
            for number in range(1, 6):
                evaluation = {"eval_loss": 1.5, "eval_accuracy": 0.25} if number == 5 else None
                callback.on_step(a_step(number, evaluation=evaluation))
            callback.on_checkpoint(Path("runs/0142/checkpoints/000005"))
            callback.on_note("something happened")
        if self.error:
            raise self.error
        for callback in callbacks:
            callback.on_end(self.record)
        return self.record


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trainer:
    """In the place of `train.run`, in an empty folder, with no rank in the environment."""
    stand_in = Trainer(a_record())
    monkeypatch.setitem(vars(flopwise.train), "run", stand_in)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    return stand_in


def asked(trainer: Trainer, line: str) -> TrainRequest:
    code, _, err = answered(["train", *line.split()])
    assert code == 0, err
    return trainer.asked[-1]


def refused(trainer: Trainer, line: str) -> str:
    """The words of an error, told before anything is trained."""
    code, out, err = answered(["train", *line.split()])
    assert (code, out, trainer.asked) == (2, "", []), err
    assert err.startswith("error: ")
    assert "\nhint: " in err
    return err


# -- from words to a request -----------------------------------------------------------------------------------------


def test_without_arguments_everything_is_left_open(trainer: Trainer) -> None:
    assert asked(trainer, "") == TrainRequest()


def test_every_option_arrives(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    # None of the files is there, which is looked at first.
    monkeypatch.setattr("flopwise.train.data_checks.check_data", lambda _: None)
    line = (
        "gpt2 --data a.txt --data b --eval-data c --tokenizer t.json --task language --steps 1_000 --seq 1k --batch 48 "
        "--micro 11 --precision bf16 --learning-rate 3e-4 --warmup 0 --schedule linear --weight-decay 0 --beta1 0.8 "
        "--beta2 0.999 --epsilon 1e-7 --optimizer adamw-8bit --dropout 0 "
        "--clip 1.5 --stochastic-rounding --seed 7 --padding longest --text-column body "
        "--label-column kind --device-mem 40GiB --host-mem 0 --device cpu --weights w --anywhere "
        "--deterministic --checkpoint-every 10 --keep 3 --evaluate-every 5 --store s"
    )
    expected = TrainRequest(
        model="gpt2",
        data=("a.txt", "b"),
        evaluation_data=("c",),
        tokenizer="t.json",
        task="language",
        steps=1000,
        sequence_tokens=1024,
        batch_sequences=48,
        micro_batch_sequences=11,
        precision="bf16",
        learning_rate=3e-4,
        warmup_steps=0,
        schedule="linear",
        weight_decay=0.0,
        beta1=0.8,
        beta2=0.999,
        epsilon=1e-7,
        optimizer="adamw-8bit",
        dropout=0.0,
        clip_norm=1.5,
        stochastic_rounding=True,
        seed=7,
        padding="longest",
        text_column="body",
        label_column="kind",
        device_memory_bytes=40 * GIB,
        host_memory_bytes=0,
        device="cpu",
        weights="w",
        anywhere=True,
        deterministic=True,
        checkpoint_every=10,
        keep_checkpoints=3,
        evaluate_every=5,
        store="s",
    )
    assert asked(trainer, line) == expected
    assert asked(trainer, "bert-base --epochs 2.5 --from-scratch --gpus 1") == TrainRequest(
        model="bert-base", epochs=2.5, from_scratch=True
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--steps 0", "--steps: cannot be '0'"),
        ("--steps many", "--steps: cannot be 'many'"),
        ("--steps 1e3", "a whole number of at least 1"),
        ("--epochs 0", "0 epochs"),
        ("--epochs nan", "--epochs: cannot be 'nan'"),
        ("--epochs 3 --steps 10", "--steps beside --epochs"),
        ("--micro 0", "--micro: a number of sequences must be a whole number of at least 1"),
        ("--micro 9 --batch 8", "--micro 9 beside --batch 8"),
        ("--batch x", "--batch: cannot read 'x'"),
        ("--seq 1.5", "--seq"),
        ("--task translation", "--task cannot be 'translation'"),
        ("--schedule cosin", "--schedule cosine"),
        ("--padding none", "--padding cannot be 'none'"),
        ("--device gpu", "--device cannot be 'gpu'"),
        ("--learning-rate -1", "--learning-rate: cannot be '-1'"),
        ("--learning-rate 3e400", "--learning-rate"),
        ("--learning-rate 1e4", "learning_rate of a training cannot be 10000.0"),
        ("--beta2 1", "beta2 of a training"),
        ("--optimizer adam", "--optimizer cannot be 'adam'"),
        ("--optimizer lion --epsilon 1e-6", "lion has no epsilon"),
        ("--momentum 0.9", "--optimizer muon or sgd-momentum"),
        ("--optimizer sgd --nesterov", "sgd has no nesterov"),
        ("--optimizer adamw-8bit --gpus 2", "on several devices"),
        ("--clip inf", "--clip"),
        ("--warmup -1", "--warmup: cannot be '-1'"),
        ("--seed 1.5", "--seed: cannot be '1.5'"),
        ("--seed 99999999999999999999", "--seed"),
        ("--precision bf17", "--precision"),
        ("--device-mem 40", "--device-mem 40GiB"),
        ("--device-mem 40G", "--device-mem: cannot read '40G'"),
        ("--host-mem 7", "bytes are no host's memory"),
        ("--gpus 0", "--gpus: cannot be '0'"),
        ("--keep 0", "--keep: cannot be '0'"),
        ("--checkpoint-every 0", "--checkpoint-every"),
        ("--weights w --from-scratch", "--weights beside --from-scratch"),
        ("-o csv", "--output cannot be 'csv'"),
        ("--resume last", "there are no runs in runs"),
        ("--resume 7 gpt2", "the model gpt2 beside --resume"),
        ("--resume 7 --seq 512", "--seq beside --resume"),
        ("--resume 7 --seed 0", "--seed beside --resume"),
        ("--resume 7 --dora", "--dora beside --resume"),
    ],
)
def test_mistakes_are_told_before_anything_begins(trainer: Trainer, line: str, words: str) -> None:
    assert words in refused(trainer, line)


odd = st.sampled_from(
    ["", "0", "-1", "1e9", "nan", "auto", "AUTO", "7", "1,0", "1_0", "²", "1e-3", "40GiB", "x y", "٣"]
)
OPTIONS = (
    *("--steps", "--epochs", "--seq", "--batch", "--micro", "--precision", "--learning-rate", "--warmup", "--schedule"),
    *("--weight-decay", "--clip", "--seed", "--device-mem", "--host-mem", "--device", "--keep", "--task", "--padding"),
    *("--checkpoint-every", "--evaluate-every", "--beta1", "--resume", "-o"),
)


@pytest.mark.usefixtures("trainer")
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(OPTIONS), odd, max_size=3))
def test_whatever_is_typed_is_answered(words: dict[str, str]) -> None:
    code, _, err = answered(["train", *(word for pair in words.items() for word in pair)])
    assert code == 0 or (code == 2 and err.startswith("error: ") and "\nhint: " in err)


# -- plans, runs to resume, several devices --------------------------------------------------------------------------


def cluster_plan(devices: int) -> ClusterPlan:
    return ClusterPlan(
        hardware="h200",
        devices=devices,
        sequence_tokens=2048,
        batch_sequences=8,
        micro_batch_sequences=1,
        precision="bf16",
        recompute="none",
        attention="flash",
        fusion="fused",
        optimizer="adamw",
        stack="kernels",
        parallel=Parallel(data=devices, zero=3),
    )


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """What would have been started, which fails with 7."""
    started: list[tuple[list[str], int]] = []

    def spawn(arguments: list[str], ranks: int) -> int:
        started.append((arguments, ranks))
        return 7

    monkeypatch.setattr(spawning, "spawn", spawn)
    # What it looks at is in tests/train/test_launch_checks.py.
    monkeypatch.setattr(launching, "check_launch", lambda _request: None)
    return started


def test_a_plan_says_all_but_the_batch(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("plan.toml").write_text(to_toml(plan_table(some_plan(), load_model("llama-3-8b"))))
    for option in ("--seq 8k", "--micro 1", "--precision bf16", "--device-mem 40GiB", "--host-mem 1GiB"):
        assert f"{option.split()[0]} beside plan.toml" in refused(trainer, f"plan.toml {option}")
    assert "beside a plan for 1" in refused(trainer, "plan.toml --gpus 2")
    # It is for an H200, which tests do not run on.
    monkeypatch.setattr("flopwise.train.launching._here", lambda _wanted: cpu_here())
    assert "the plan is for NVIDIA H200" in refused(trainer, "plan.toml --batch 23")
    monkeypatch.setattr("flopwise.train.launching._here", lambda _wanted: None)
    assert asked(trainer, "plan.toml --batch 23 --gpus 1") == TrainRequest(model="plan.toml", batch_sequences=23)


def test_a_plan_for_several_devices_starts_as_many(trainer: Trainer, spawned: list[tuple[list[str], int]]) -> None:
    Path("plan.toml").write_text(to_toml(plan_table(cluster_plan(4), load_model("gpt2"))))
    assert "--batch beside plan.toml" in refused(trainer, "plan.toml --batch 8")
    assert "--gpus 2 beside a plan for 4" in refused(trainer, "plan.toml --gpus 2")
    code, out, _ = answered(["train", "plan.toml", "--steps", "3"])
    assert (code, out, trainer.asked) == (7, "", [])
    assert spawned == [(["train", "plan.toml", "--steps", "3"], 4)]


def test_several_devices_are_started_once(
    trainer: Trainer, spawned: list[tuple[list[str], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr("flopwise.engine.launch.leave", lambda code=0: left.append(code))
    assert answered(["train", "--gpus", "2"])[0] == 7
    assert spawned == [(["train", "--gpus", "2"], 2)]
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert asked(trainer, "--gpus 2").devices == 2
    assert trainer.callbacks == 1
    monkeypatch.setenv("RANK", "1")
    code, out, err = answered(["train", "--gpus", "2"])
    assert (code, out, err, trainer.callbacks) == (0, "", "", 0)
    assert len(spawned) == 1
    # Each of several ranks ends its process by itself.
    assert left == [0, 0]


def test_a_run_is_resumed_on_as_many_devices(trainer: Trainer, spawned: list[tuple[list[str], int]]) -> None:
    first, second = new_run(Path("runs")), new_run(Path("runs"))
    write_record(first, a_record(id="0001"))
    write_record(second, a_record(id="0002", plan={"devices": 4}, state="interrupted"))
    code, _, err = answered(["train", "--resume", "1"])
    assert code == 2 and "run 0001 has done its 20 steps" in err and "--steps 40" in err
    found = asked(trainer, "--resume 1 --steps 40 --keep 1 --checkpoint-every 5 --evaluate-every 5")
    expected = TrainRequest(resume="1", steps=40, keep_checkpoints=1, checkpoint_every=5, evaluate_every=5)
    assert found == expected
    assert answered(["train", "--resume", "last"])[0] == 7
    assert spawned[0][1] == 4
    code, _, err = answered(["train", "--resume", "3"])
    assert code == 2
    assert "there is no run 3 in runs" in err


def test_without_torch_there_is_a_hint(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    whole = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "torch" else whole(name))
    err = refused(trainer, "gpt2")
    assert "training needs torch, which is not installed" in err
    assert "hint: pip install 'flopwise[train]'" in err


def test_help_and_mistakes_import_nothing_heavy() -> None:
    for words, heavy in ((["--help"], ["numpy", "msgspec", "rich"]), (["--steps", "0"], ["torch", "tokenizers"])):
        code = (
            f"import sys; from flopwise.cli import main; sys.argv = ['flopwise', 'train', *{words}]\n"
            "try:\n    main()\nexcept SystemExit:\n    pass\n"
            f"sys.exit(' '.join(name for name in {heavy} if name in sys.modules))"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
        assert found.stderr.splitlines()[-1] == ""


# -- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_talk_is_on_stderr_and_the_answer_on_stdout(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = answered(["train"])
    assert (code, len(trainer.asked)) == (0, 1)
    assert out.startswith(BLOCK)
    assert out.endswith("saved run 0142   next: flopwise show 0142\n")
    lines = err.splitlines()
    assert max(map(cell_len, [*lines, *out.splitlines()])) <= columns
    header = next(number for number, line in enumerate(lines) if line.split()[:2] == ["step", "loss"])
    assert any(line.startswith("checks   ✓ NVIDIA H200, 139 GiB   ✓ 64 GiB") for line in lines[:header])
    assert "note: a note from the data" in lines[:header]
    assert [line.split()[0] for line in lines[header + 1 : header + 5]] == ["1", "2", "3", "5"]
    assert lines[header + 5 :] == [
        "evaluated after step 5: eval_loss 1.5 · eval_accuracy 25.00%",
        "saved runs/0142/checkpoints/000005",
        "note: something happened",
    ]
    assert {len(line) for line in lines[header : header + 5]} == {len(lines[header])}
    assert "\x1b" not in err + out


def test_json_is_the_record_and_nothing_else(trainer: Trainer) -> None:
    trainer.record = a_record(metrics={"train_loss": NAN})
    code, out, _ = answered(["train", "-o", "json"])
    record = json.loads(out)
    assert code == 0
    assert (record["id"], record["measurement"]["tokens_per_s"]) == ("0142", 11_230.0)
    assert record["metrics"] == {"train_loss": "nan"}


@pytest.mark.parametrize(("reason", "expected"), [("SIGINT", 130), ("SIGTERM", 143), ("another rank", 143)])
def test_an_interrupted_run_ends_cleanly_and_says_how_to_go_on(trainer: Trainer, reason: str, expected: int) -> None:
    trainer.record = a_record(state="interrupted", steps_done=12, reason=reason)
    code, out, _ = answered(["train", "--store", "my runs"])
    assert code == expected
    assert f"interrupted: 12 of 20 steps · {reason}" in out
    following = "go on with: flopwise train --resume 0142 --store 'my runs'"
    assert out.splitlines()[-1] == following
    code, out, err = answered(["train", "--store", "my runs", "-o", "json"])
    assert (code, json.loads(out)["state"], err.splitlines()[-1]) == (expected, "interrupted", following)
    trainer.record = a_record(state="interrupted", steps_done=12, reason=reason, checkpoint=None)
    code, out, _ = answered(["train"])
    assert code == expected and "--resume" not in out


def test_the_start_of_a_run_that_goes_on() -> None:
    lines = start_lines(a_start(first_step=12, devices=4, tokens_per_s=None, checks=()), 80)
    assert lines[-1] == "goes on after step 12"
    assert lines[0].startswith("run 0142 · llama-3-8b · 4 × NVIDIA H200")
    bare = a_start(step_s=None, tokens_per_s=None, device_bytes=None, host_bytes=None)
    assert not any(line.startswith("planned") for line in start_lines(bare, 80))


def rows_said(step_s: float, steps: int, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Steps that have a row in a log, where each step takes so long."""
    now = [0.0]
    shown = PlainTraining(clock=lambda: now[0])
    shown.on_start(a_start(training=Training(steps=steps)))
    capsys.readouterr()
    for number in range(1, steps + 1):
        now[0] += step_s
        shown.on_step(a_step(number))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split()[0] == "step"
    return [int(line.split()[0].replace(",", "")) for line in lines[1:]]


def test_a_log_has_a_row_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    # Long steps: one in twenty. Short ones: every five seconds.
    assert rows_said(100.0, 200, capsys) == [1, 2, 3, *range(13, 200, 10), 200]
    assert rows_said(1 / 64, 2000, capsys) == [1, 2, 3, *range(323, 2000, 320), 2000]
    assert rows_said(0.001, 5, capsys) == [1, 2, 3, 5]


def test_a_reader_of_the_log_that_leaves_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    shown = PlainTraining()
    shown.on_start(a_start())
    shown.on_step(a_step())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_has_one_row_that_is_renewed(columns: int) -> None:
    file, now = Terminal(), [0.0]
    console = Console(file=file, force_terminal=True, width=columns, color_system=None, legacy_windows=False)
    live = LiveTraining(console, clock=lambda: now[0])
    live.on_start(a_start())
    for number in (1, 2, 3):
        now[0] += 17.5
        live.on_step(a_step(number, evaluation={"eval_loss": 2.0} if number == 2 else None))
        assert live.live is not None
        live.live.refresh()
    live.on_checkpoint(Path("checkpoints/000003"))
    live.on_end(a_record())
    live.close()
    text = file.getvalue()
    assert "evaluated after step 2: eval_loss 2.0" in text
    assert "saved checkpoints/000003" in text
    last = text.split("saved checkpoints/000003")[-1].splitlines()
    rows = [line for line in last if line.split()[:2] in (["step", "loss"], ["3", "2.913"])]
    assert len(rows) >= 2
    assert len(rows[0].rstrip()) == len(rows[1].rstrip()) <= columns
    assert "3/20" in text
    # 17 steps of 17.5 s.
    assert "4:57 left" in text


@pytest.mark.parametrize("colourless", [True, False])
def test_a_terminal_is_watched_live(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, colourless: bool) -> None:
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    if colourless:
        monkeypatch.setenv("NO_COLOR", "1")
    with watching() as callback:
        assert isinstance(callback, LiveTraining)
        trainer(TrainRequest(), callbacks=[callback])
    text = file.getvalue()
    assert "5/5" in text
    # A colour of the bar: set in the foreground.
    assert ("\x1b[38;5;" in text or "\x1b[3" in text.replace("\x1b[3m", "")) != colourless


def test_an_error_leaves_the_terminal_as_it_was(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("TERM", "xterm-256color")
    trainer.error = FlopwiseError("it broke")
    with pytest.raises(FlopwiseError), watching() as callback:
        trainer(TrainRequest(), callbacks=[callback])
    assert sys.stderr is file
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert file.getvalue().rindex(shown) > file.getvalue().rindex(hidden)
