"""Trainings whose numbers become NaN or infinite: never done, no good checkpoint lost, and the cause is told."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flopwise.base.errors import FlopwiseError
from flopwise.engine.weights import checkpoint
from flopwise.engine.weights.finite import FIRST_BAD_BYTE, are_finite, extremes, not_finite
from flopwise.records.measurement import RunRecord
from flopwise.setup.training import Training
from flopwise.train.running import run
from tests.cli.test_cli_fuzz import answered
from tests.support.launched import described_cpu
from tests.support.listing import list_runs
from tests.train.test_train_run import Recorder, asked, hardware, place

__all__ = ("hardware", "place")

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the update of a step, counted from 1, one that leaves no finite weight; its loss is as it was."""
    really = Training.rate_at

    def make(poisoned: int) -> None:
        monkeypatch.setattr(
            Training, "rate_at", lambda self, step: math.inf if step + 1 == poisoned else really(self, step)
        )

    return make


def failed(place: Path, **changes: Any) -> tuple[FlopwiseError, RunRecord]:
    """A training that ends with an error, and what its record says then."""
    with pytest.raises(FlopwiseError) as caught:
        run(**asked(place, precision="fp32", **changes))
    record = list_runs(place / "runs")[-1].record
    assert record is not None
    assert (record.state, record.reason) == ("failed", caught.value.what)
    return caught.value, record


def folder_of(place: Path, record: RunRecord) -> Path:
    return place / "runs" / record.id


def shown_checkpoints(folder: Path) -> list[tuple[int, bool]]:
    """Steps, the newest first, and whether each can be used."""
    return [(found.step, not found.problem) for found in checkpoint.checkpoints(folder)]


# -- the numbers themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 7, 64, 1031])
def test_one_bad_number_anywhere_is_found(dtype: torch.dtype, count: int) -> None:
    numbers = torch.linspace(-3.0, 3.0, count).to(dtype)
    assert are_finite(extremes(numbers))
    for where in {0, count // 2, count - 1}:
        for bad in (math.nan, math.inf, -math.inf):
            changed = numbers.clone()
            changed[where] = bad
            assert not are_finite(extremes(changed))
    largest = torch.full((count,), torch.finfo(dtype).max, dtype=dtype)
    assert are_finite(extremes(largest)) and are_finite(extremes(-largest))


@pytest.mark.parametrize("dtype", list(FIRST_BAD_BYTE))
def test_every_byte_of_fp8_is_told_apart(dtype: torch.dtype) -> None:
    for byte in range(256):
        number = torch.tensor([0, byte, 1], dtype=torch.uint8).view(dtype)
        assert are_finite(extremes(number)) == bool(torch.isfinite(number.to(torch.float32)).all()), byte


def test_what_is_no_floating_point_number_is_finite() -> None:
    tensors = {"whole": torch.arange(3), "none": torch.empty(0), "bad": torch.tensor([0.0, math.nan]).view(1, 2).t()}
    assert not_finite(tensors.items()) == ("bad",)


# -- trainings -------------------------------------------------------------------------------------------------------


def test_a_learning_rate_beyond_reason_ends_no_training_well(place: Path) -> None:
    # The decay alone multiplies weights by 1 - 1000 a step, whatever gradients the kernels of this CPU find.
    line = (
        f"train {place}/tiny.toml --data {place}/text.txt --seq 32 --batch 4 --precision fp32 --steps 20 "
        "--learning-rate 1000 --weight-decay 1 --warmup 0 --schedule constant "
        f"--store {place}/runs --device cpu"
    )
    for more in ("", " --no-checkpoint"):
        code, out, err = answered(shlex.split(line + more))
        assert code == 2 and not out and "diverged" in err
        record = list_runs(place / "runs")[-1].record
        assert record is not None and record.state == "failed"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_the_last_update_is_looked_at(place: Path, poison: Callable[[int], None], precision: str) -> None:
    poison(3)
    with pytest.raises(FlopwiseError, match="weights after step 3 are not finite") as caught:
        run(**asked(place, steps=3, precision=precision, evaluation_data=()))
    assert "no good checkpoint" in str(caught.value) and "--clip 1.0" in str(caught.value.hint)
    (listed,) = list_runs(place / "runs")
    assert listed.record is not None
    assert (listed.record.state, listed.record.checkpoint, listed.record.steps_done) == ("failed", None, 3)
    assert shown_checkpoints(listed.folder) == [(3, False)] and checkpoint.latest(listed.folder) is None


def test_the_last_update_is_looked_at_without_checkpoints(place: Path, poison: Callable[[int], None]) -> None:
    poison(2)
    error, record = failed(place, steps=2, checkpoint=False, clip_norm=1.0)
    assert error.what == "weights after step 2 are not finite"
    assert "--clip" not in str(error.hint) and "--weights" not in str(error.hint)
    assert not (folder_of(place, record) / "checkpoints").exists()


def test_a_bad_checkpoint_ends_the_training_and_takes_no_place(place: Path, poison: Callable[[int], None]) -> None:
    poison(3)
    told = Recorder()
    error, record = failed(place, steps=9, checkpoint_every=1, keep_checkpoints=1, callbacks=[told])
    folder = folder_of(place, record)
    assert error.what == "weights after step 3 are not finite"
    assert "the last good checkpoint is step-00000002" in str(error.why)
    assert f"--weights {folder}/checkpoints/step-00000002" in str(error.hint) and "--resume" in str(error.hint)
    assert [step.step for step in told.steps] == [1, 2, 3]
    assert record.checkpoint == "checkpoints/step-00000002"
    assert shown_checkpoints(folder) == [(3, False), (2, True)]
    assert checkpoint.latest(folder) == folder / "checkpoints" / "step-00000002"
    bad, good = (checkpoint.read_state(found.path).not_finite for found in checkpoint.checkpoints(folder))
    assert "model.embed_tokens.weight" in bad and not good
    assert "step-00000003" not in (folder / "log.txt").read_text()


@pytest.mark.parametrize("by_number", [False, True])
def test_resuming_takes_the_last_good_one(place: Path, monkeypatch: pytest.MonkeyPatch, by_number: bool) -> None:
    whole = run(**asked(place, steps=5, precision="fp32", store=str(place / "undisturbed")))
    with monkeypatch.context() as patch:
        really = Training.rate_at
        patch.setattr(Training, "rate_at", lambda self, step: math.inf if step == 2 else really(self, step))
        _, record = failed(place, steps=5, checkpoint_every=1, keep_checkpoints=1)
    told = Recorder()
    resumed = run(callbacks=[told], resume=record.id if by_number else "last", store=str(place / "runs"))
    assert any("step-00000003 is passed over: NaN or infinity in" in note for note in told.notes)
    assert (resumed.state, resumed.resumed_from) == ("done", "checkpoints/step-00000002")
    folder = folder_of(place, record)
    assert shown_checkpoints(folder)[0] == (5, True) and all(good for _, good in shown_checkpoints(folder))
    one, other = (
        load_file(store / record_id / "checkpoints" / "step-00000005" / "model.safetensors")
        for store, record_id in ((place / "undisturbed", whole.id), (place / "runs", record.id))
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_where_none_is_finite_there_is_nothing_to_resume(place: Path, poison: Callable[[int], None]) -> None:
    poison(1)
    _, record = failed(place, steps=4, checkpoint_every=1)
    with pytest.raises(FlopwiseError, match="is whole and finite") as caught:
        run(resume="last", store=str(place / "runs"))
    assert "NaN or infinity" in str(caught.value.why) and "--learning-rate" in str(caught.value.hint)
    assert shown_checkpoints(folder_of(place, record)) == [(1, False)]


def test_a_loss_that_is_not_finite_names_the_checkpoint_that_was_resumed(
    place: Path, poison: Callable[[int], None]
) -> None:
    stopped = run(callbacks=[Recorder(stop_after=2)], **asked(place, steps=8, precision="fp32"))
    assert stopped.checkpoint == "checkpoints/step-00000003"
    poison(5)
    with pytest.raises(FlopwiseError, match="the loss of step 6 is nan") as caught:
        run(resume="last", store=str(place / "runs"))
    assert "the last good checkpoint is step-00000003" in str(caught.value.why)
    record = list_runs(place / "runs")[-1].record
    assert record is not None and record.checkpoint == "checkpoints/step-00000003"


def huge_weights(place: Path) -> Path:
    """Losses of these are finite, and the squares of gradients are not."""
    saved = run(**asked(place, steps=1, precision="fp32"))
    found = checkpoint.latest(folder_of(place, saved))
    assert found is not None
    tensors = load_file(found / "model.safetensors")
    tensors["model.norm.weight"] *= 1e24
    save_file(tensors, found / "model.safetensors")
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_a_norm_that_is_not_finite_ends_the_training_at_once(place: Path, precision: str) -> None:
    found = huge_weights(place)
    told = Recorder()
    with pytest.raises(FlopwiseError, match="the norm of the gradients of step 1 is") as caught:
        run(callbacks=[told], **asked(place, precision=precision, weights=str(found), clip_norm=1.0, steps=5))
    assert caught.value.hint and math.isfinite(told.steps[0].loss) and len(told.steps) == 1


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("every", [None, 2])
def test_an_evaluation_that_is_not_finite_ends_the_training(
    place: Path, monkeypatch: pytest.MonkeyPatch, every: int | None, checkpoints: bool
) -> None:
    from flopwise.engine.executor import Evaluated
    from flopwise.engine.streaming.executor import StreamingExecutor

    monkeypatch.setattr(StreamingExecutor, "evaluate", lambda *_: Evaluated(math.nan, 0, 5, 5))
    error, record = failed(place, steps=4, evaluate_every=every, checkpoint=checkpoints)
    last = every or 4
    assert error.what == f"the evaluation after step {last} has a loss of nan"
    assert (record.steps_done, record.checkpoint) == (last, None)
    # Weights that are finite and give no loss are no good ones either.
    assert shown_checkpoints(folder_of(place, record)) == ([(4, False)] if checkpoints and not every else [])


def test_a_run_that_is_brought_to_its_end_is_looked_at_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from flopwise.engine.executor import Evaluated
    from flopwise.engine.streaming.executor import StreamingExecutor
    from flopwise.store.runs import write_record

    record = run(**asked(place, steps=2))
    write_record(folder_of(place, record), replace(record, state="running"))
    monkeypatch.setattr(StreamingExecutor, "evaluate", lambda *_: Evaluated(math.inf, 0, 5, 5))
    with pytest.raises(FlopwiseError, match="has a loss of inf"):
        run(resume="last", store=str(place / "runs"))


def test_infinite_optimizer_state_is_told_as_such(tmp_path: Path) -> None:
    from tests.engine.test_checkpoint import a_state, tensors_of

    weights, optimizer = tensors_of(1)
    optimizer["second/a"] = torch.tensor([1.0, math.inf])
    path = checkpoint.save(tmp_path, weights=weights, optimizer=optimizer, state=a_state(1), config=None, keep=1)
    assert checkpoint.read_state(path).not_finite == ("second/a",)
    with pytest.raises(FlopwiseError, match="is not finite") as caught:
        checkpoint.check_finite(path, checkpoint.read_state(path))
    assert "second/a" in str(caught.value.why) and caught.value.hint
    # It is there for those who look at it.
    assert checkpoint.load(path).optimizer["second/a"][1] == math.inf


def test_runs_show_no_bad_checkpoint(place: Path, poison: Callable[[int], None]) -> None:
    poison(2)
    _, record = failed(place, steps=3, checkpoint_every=1)
    code, out, _ = answered(["show", record.id, "--store", str(place / "runs")])
    assert code == 0 and "step-00000001" in out and "step-00000002" not in out
    code, out, _ = answered(["ls", "runs", "--store", str(place / "runs")])
    assert code == 0 and "failed" in out and "done" not in out


# -- weights that are given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_given_weights_that_are_not_finite_are_told(place: Path, bad: float) -> None:
    saved = run(**asked(place, steps=1))
    found = checkpoint.latest(folder_of(place, saved))
    assert found is not None
    weights = found / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][3] = bad
    save_file(tensors, weights)
    for given in ({"weights": str(found)}, {"model": str(found)}):
        with pytest.raises(FlopwiseError, match=r"model\.norm\.weight in") as caught:
            run(**asked(place, **{"steps": 2, **given}))
        assert str(weights) in caught.value.what and "learning" not in str(caught.value)
    assert len(list_runs(place / "runs")) == 1


def test_what_lies_beside_the_weights_may_be_anything(place: Path) -> None:
    saved = run(**asked(place, steps=1))
    found = checkpoint.latest(folder_of(place, saved))
    assert found is not None
    tensors = load_file(found / "model.safetensors")
    beside = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((2,), math.nan)}
    save_file({**tensors, **beside}, found / "model.safetensors")
    assert run(**asked(place, steps=1, weights=str(found))).state == "done"


def test_sequences_beyond_the_context_are_noted(place: Path) -> None:
    told = Recorder()
    run(callbacks=[told], **asked(place, steps=1, sequence_tokens=96))
    assert "tiny is made for sequences of 64 tokens, not 96" in told.started[0].notes
    run(callbacks=[told], **asked(place, steps=1, sequence_tokens=64))
    assert not any("is made for" in note for note in told.started[1].notes)


# -- several ranks ---------------------------------------------------------------------------------------------------


def on_two_ranks(place: Path, more: str) -> tuple[str, RunRecord]:
    """What both ranks say of a training that fails, and its record."""
    (place / "mine.toml").write_text(described_cpu())
    line = (
        f"train {place}/tiny.toml --data {place}/text.txt --seq 32 --batch 4 --steps 3 --warmup 0 "
        f"--schedule constant --store {place}/runs --on {place}/mine.toml --device cpu --gpus 2 {more}"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "flopwise", *shlex.split(line)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 2, ended.stderr
    told = [line.partition("error: ")[2] for line in ended.stderr.splitlines() if "error: " in line]
    # Of two that say the same, one is heard; another one would stand beside it.
    assert len(told) == 1, ended.stderr
    record = list_runs(place / "runs")[-1].record
    assert record is not None
    assert (record.state, record.reason) == ("failed", told[0])
    return told[0], record


@pytest.mark.slow
def test_all_ranks_end_together(place: Path) -> None:
    told, record = on_two_ranks(place, "--precision fp32 --learning-rate 30 --checkpoint-every 1 --keep 1")
    assert "finite" in told or "nan" in told
    if record.checkpoint is not None:
        assert checkpoint.latest(folder_of(place, record)) == folder_of(place, record) / record.checkpoint


@pytest.mark.slow
def test_a_norm_that_is_not_finite_ends_all_ranks(place: Path) -> None:
    line = f"--precision bf16-mixed --clip 1.0 --no-checkpoint --weights {huge_weights(place)}"
    told, record = on_two_ranks(place, line)
    assert record.checkpoint is None
    assert told == "the norm of the gradients of step 1 is inf"
