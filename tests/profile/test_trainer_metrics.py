"""Figures of Hugging Face's Trainer, as printed and as files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read import neuron_text, trainer_metrics
from flopwise.profile.read.opening import TraceFile
from flopwise.profile.read.trainer_metrics import read_metric
from flopwise.records.profile import Profile

BLOCK = """***** train metrics *****
  epoch                    =        3.0
  total_flos               =  1470300GF
  train_loss               =     0.2553
  train_runtime            = 0:02:54.60
  train_samples_per_second =     137.45
  train_steps_per_second   =      4.295
"""
EVALUATION = """***** eval metrics *****
  eval_loss    =     0.1247
  eval_runtime = 0:00:02.99
"""


def profiles_of(content: bytes) -> tuple[Profile, ...]:
    return trainer_metrics.read_source(TraceFile("a", iter([content])), "a").profiles


@pytest.mark.parametrize(
    ("name", "raw", "value", "unit"),
    [
        ("train_runtime", "0:02:54.60", 174.6, "s"),
        ("train_runtime", "1 day, 2:03:04.56", 93784.56, "s"),
        ("train_runtime", "12 days, 0:00:00.00", 1036800.0, "s"),
        ("total_flos", "1470300GF", 1470300 * 2**30, "FLOP"),
        ("before_init_mem_cpu", "7MB", 7 * 2**20, "B"),
        ("train_samples", "16000", 16000, "count"),
        ("epoch", "3.0", 3.0, "epoch"),
        ("train_loss", "nan", "nan", "text"),
        ("train_loss", "1e999", "1e999", "text"),
        ("learning_rate", "5e-05", 5e-05, "1"),
        ("train_steps_per_second", "9" * 4000, "9" * 4000, "text"),
    ],
)
def test_printed_figures(name: str, raw: str, value: float | str, unit: str) -> None:
    found = read_metric(name, raw)
    assert (found.value, found.unit, found.raw) == (value, unit, raw)


def test_a_printed_block() -> None:
    (profile,) = profiles_of(f"some log\n\n{BLOCK}{EVALUATION}done\nx = 3\n".encode())
    assert profile.format == "trainer"
    assert list(profile.train_metrics)[-2:] == ["eval_loss", "eval_runtime"]
    # 4.295 steps a second for 174.6 s are 750 steps.
    assert profile.get("step_wall_s") == pytest.approx(174.6 / 750, rel=1e-15)
    assert profile.get("samples_per_s") == 137.45
    assert profile.notes == (trainer_metrics.RATES_NOTE,)
    assert "x" not in profile.train_metrics


def test_several_runs_of_one_text() -> None:
    second = BLOCK.replace("4.295", "8.59")
    profiles = profiles_of(f"# First\n{BLOCK}{EVALUATION}\n# Second\n{second}".encode())
    assert [profile.name for profile in profiles] == ["First", "Second"]
    assert [profile.train_metrics["train_steps_per_second"] for profile in profiles] == [4.295, 8.59]
    assert [profile.name for profile in profiles_of((BLOCK + BLOCK).encode())] == ["a 1", "a 2"]


def test_steps_that_cannot_be_counted() -> None:
    # Of two days at this rate the number of steps is uncertain by more than one: the rate itself is the better word.
    figures: dict[str, float | str] = {"train_runtime": 172800.0, "train_steps_per_second": 0.123}
    wall = trainer_metrics.step_wall(figures)
    assert wall is not None
    assert wall.value == pytest.approx(1 / 0.123)
    assert wall.half_ulp == pytest.approx(0.0005 / 0.123**2)
    assert trainer_metrics.step_wall({"train_steps_per_second": 2.0}) is not None
    for useless in (0.0, -1.0, "nan", float("inf")):
        assert trainer_metrics.step_wall({"train_steps_per_second": useless}) is None
    assert trainer_metrics.step_wall({"train_runtime": 3.0}) is None


def test_results_file() -> None:
    figures = {
        "epoch": 3.0,
        "total_flos": 1.5e15,
        "train_runtime": 174.6,
        "train_steps_per_second": 4.295,
        "extra": [1],
    }
    (profile,) = profiles_of(json.dumps(figures).encode())
    assert profile.get("step_wall_s") == pytest.approx(174.6 / 750)
    assert profile.train_metrics == {name: value for name, value in figures.items() if name != "extra"}
    assert profile.get("samples_per_s") is None


def test_state_file() -> None:
    state = {
        "best_metric": None,
        "epoch": 3.0,
        "global_step": 750,
        "log_history": [
            {"epoch": 1.0, "loss": 0.9, "learning_rate": 3e-05, "step": 250},
            {"epoch": 2.0, "loss": float("nan"), "learning_rate": 1e-05, "step": 500},
            "damaged",
            {"epoch": 3.0, "loss": 0.25, "learning_rate": 0.0, "step": 750},
            {"epoch": 3.0, "step": 750, "train_runtime": 174.6, "train_steps_per_second": 4.295, "train_loss": 0.5},
        ],
        "train_batch_size": 32,
    }
    content = json.dumps(state, indent=2).encode()
    assert trainer_metrics.looks_like(content)
    (profile,) = profiles_of(content)
    assert profile.get("step_wall_s") == pytest.approx(174.6 / 750)
    assert profile.train_metrics["loss"] == 0.25
    assert profile.train_metrics["global_step"] == 750
    assert profile.train_metrics["train_batch_size"] == 32
    assert profile.batch_sequences is None
    assert profile.notes == ("loss 0.9 at step 250, 0.25 at step 750; logged 2 times",)
    assert profile.warnings == ("1 figures are NaN or infinite", "1 entries of the log are not readable")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"words",
        b"***** train metrics *****\nnothing",
        b"{}",
        b'{"a": 1}',
        b'{"log_history": 3}',
        b'{"log_history": []}',
        b'{"train_runtime": ' + b"9" * 9000 + b"}",
        b'{"log_history": [' + b"[" * 100_000,
        b'{"train_runtime": 3',
    ],
)
def test_nothing_to_read_is_an_error(content: bytes) -> None:
    with pytest.raises(FlopwiseError):
        profiles_of(content)


def test_a_file_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_metrics, "MOST_JSON_BYTES", 100)
    with pytest.raises(FlopwiseError, match="larger than"):
        profiles_of(b'{"train_runtime": 1' + b" " * 200 + b"}")


def test_what_is_the_trainers() -> None:
    assert trainer_metrics.looks_like(BLOCK.encode())
    assert trainer_metrics.looks_like(b'\xef\xbb\xbf{"train_runtime": 1}')
    assert not trainer_metrics.looks_like(b'{"traceEvents": [], "total_flos": 1}')
    assert not trainer_metrics.looks_like(b"***** metrics *****")
    assert not neuron_text.looks_like(BLOCK.encode())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(BLOCK)), st.binary(max_size=40), st.integers(0, len(BLOCK)))
def test_mutated_texts_are_survived(start: int, noise: bytes, end: int) -> None:
    content = BLOCK.encode()
    as_json = json.dumps({"log_history": [{"step": 1, "loss": 0.5, "train_runtime": 3.0}], "global_step": 1}).encode()
    for text in (content, as_json, b"{" + content):
        try:
            profiles_of(text[:start] + noise + text[end:])
        except FlopwiseError as error:
            assert error.hint
