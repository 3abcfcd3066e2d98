"""Whole trainings of tiny models: they learn, stop, are killed, go on, and end as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.catalog.load import load_model, model_table
from flopwise.engine.signals import Stop
from flopwise.engine.weights import checkpoint
from flopwise.profile.measure.this_machine import this_cpu
from flopwise.records.measurement import RunRecord, StepRecord
from flopwise.setup.hardware import Hardware
from flopwise.store.rows import read_row, row_of
from flopwise.store.runs import ROW, RunLock, find_run, read_record, read_steps, write_record
from flopwise.train import Callback, Started, TrainRequest, trained_model
from flopwise.train import hardware as hardware_module
from flopwise.train import loop as loop_module
from flopwise.train import resuming as resuming_module
from flopwise.train import running as running_module
from flopwise.train.running import run
from flopwise.work.describe import describe
from flopwise.work.transformer import Transformer
from tests.support.listing import list_runs

TINY = Transformer(
    name="tiny",
    title="tiny",
    source="test",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=64,
    vocab=264,
    context=64,
    tied=True,
)
ENCODER = Transformer(
    name="encoder",
    title="encoder",
    source="test",
    layers=2,
    hidden=64,
    heads=4,
    ffn=128,
    vocab=264,
    context=128,
    causal=False,
    positions="learned",
    position_rows=128,
    norm="layer",
    norm_bias=True,
    norm_place="post",
    embedding_norm=True,
    final_norm=False,
    gated=False,
    activation="gelu",
    qkv_bias=True,
    output_bias=True,
    ffn_bias=True,
    head_bias=True,
    head="classifier",
    labels=2,
    token_types=2,
)


@pytest.fixture(autouse=True, scope="module")
def hardware() -> Iterator[None]:
    """Measured once, not for every training."""
    found: Hardware = this_cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware_module, "find_hardware", lambda _name: found)
        yield


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tiny models, a text, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tiny.toml").write_text(to_toml(model_table(TINY)), encoding="utf-8")
    (tmp_path / "encoder.toml").write_text(to_toml(model_table(ENCODER)), encoding="utf-8")
    words = random.Random(1)  # noqa: S311 - a text, no secret
    lines = (" ".join(words.choice(("red", "green", "blue", "seven")) for _ in range(9)) for _ in range(400))
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def asked(place: Path, **changes: Any) -> dict[str, Any]:
    """A training of the tiny model on the text."""
    return {
        "model": str(place / "tiny.toml"),
        "data": (str(place / "text.txt"),),
        "sequence_tokens": 32,
        "batch_sequences": 4,
        "steps": 12,
        "store": str(place / "runs"),
        "learning_rate": 3e-3,
        **changes,
    }


class Recorder(Callback):
    """Remembers what it is told; may send a signal after a step."""

    def __init__(self, stop_after: int | None = None, by: int = signal.SIGINT) -> None:
        self.stop_after, self.by = stop_after, by
        self.started: list[Started] = []
        self.steps: list[StepRecord] = []
        self.notes: list[str] = []
        self.ended: list[RunRecord] = []

    def on_start(self, started: Started) -> None:
        self.started.append(started)

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        if record.step == self.stop_after:
            os.kill(os.getpid(), self.by)

    def on_note(self, note: str) -> None:
        self.notes.append(note)

    def on_end(self, record: RunRecord) -> None:
        self.ended.append(record)


def final_files(folder: Path) -> dict[str, bytes]:
    """Weights and optimizer state of the last checkpoint, byte for byte."""
    found = checkpoint.latest(folder)
    assert found is not None
    return {name: (found / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(step.step, step.loss) for step in read_steps(folder)]


def test_a_language_model_learns(place: Path) -> None:
    told = Recorder()
    record = run(callbacks=[told], **asked(place, steps=40))
    assert record.state == "done"
    assert record.steps_done == 40
    folder = find_run(place / "runs", record.id)
    assert read_record(folder) == record
    measured = record.measurement
    assert measured is not None
    assert measured.last_loss < 0.6 * measured.first_loss
    assert record.metrics["eval_loss"] < 3.0  # type: ignore[operator]
    assert [step.step for step in told.steps] == list(range(1, 41))
    assert losses(folder) == [(step.step, step.loss) for step in told.steps]
    assert told.started[0].first_step == 0
    assert told.ended == [record]
    assert sum(row.measured_bytes for row in measured.memory if row.owner == "unaccounted") == 0


@pytest.mark.parametrize(("by", "optimizer"), [(signal.SIGINT, "adamw"), (signal.SIGTERM, "adamw-8bit")])
def test_a_stopped_run_goes_on_bit_for_bit(place: Path, by: int, optimizer: str) -> None:
    whole = run(**asked(place, clip_norm=1.0, optimizer=optimizer))
    stopped = run(callbacks=[Recorder(stop_after=5, by=by)], **asked(place, clip_norm=1.0, optimizer=optimizer))
    assert stopped.state == "interrupted"
    assert stopped.steps_done in (5, 6)
    told = Recorder()
    resumed = run(callbacks=[told], resume=stopped.id, store=str(place / "runs"))
    assert resumed.state == "done"
    assert told.started[0].first_step == stopped.steps_done
    store = place / "runs"
    one, other = find_run(store, whole.id), find_run(store, stopped.id)
    assert losses(one) == losses(other)
    assert final_files(one) == final_files(other)
    assert resumed.metrics["train_loss"] == pytest.approx(whole.metrics["train_loss"], rel=1e-12)
    assert resumed.metrics["epoch"] == whole.metrics["epoch"]
    assert (whole.resumed_after, resumed.resumed_after) == (0, stopped.steps_done)
    # The set-up is the same, and so is its id; the row that the first end left is that of the second now.
    assert whole.cell == stopped.cell == resumed.cell is not None
    for folder, record in ((one, whole), (other, resumed)):
        assert (folder / ROW).exists()
        assert read_row(folder) == row_of(record)


@pytest.mark.parametrize("stop_after", [None, 3])
def test_a_long_step_is_left(place: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int | None) -> None:
    """What stops a container kills it soon after it has asked."""
    whole = run(**asked(place, steps=5))
    monkeypatch.setattr(loop_module, "LONG_STEP_S", 0.0)
    told = Recorder(stop_after=stop_after, by=signal.SIGTERM)
    if stop_after is None:
        monkeypatch.setattr(told, "on_start", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    stopped = run(callbacks=[told], **asked(place, steps=5))
    assert (stopped.state, stopped.reason, stopped.steps_done) == ("interrupted", "SIGTERM", stop_after or 0)
    assert (stopped.checkpoint is None) == (stopped.metrics == {}) == (stop_after is None)
    saved = ", and saved" if stop_after else ""
    assert told.notes[-1] == f"stopped by SIGTERM after step {stop_after or 0}{saved}"
    resumed = run(resume=stopped.id, store=str(place / "runs"))
    store = place / "runs"
    assert (resumed.state, resumed.steps_done) == ("done", 5)
    assert final_files(find_run(store, whole.id)) == final_files(find_run(store, stopped.id))
    assert losses(find_run(store, whole.id)) == losses(find_run(store, stopped.id))


def test_a_long_evaluation_is_left_and_made_up_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(**asked(place, steps=3))
    evaluation = loop_module.Loop.evaluate

    def interrupted(self: loop_module.Loop, *stop: Stop) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluation(self, *stop)

    with monkeypatch.context() as patch:
        patch.setattr(loop_module.Loop, "evaluate", interrupted)
        patch.setattr(loop_module, "LONG_STEP_S", 0.0)
        stopped = run(**asked(place, steps=3))
    assert (stopped.state, stopped.steps_done) == ("interrupted", 3)
    assert "eval_loss" not in stopped.metrics
    resumed = run(resume=stopped.id, store=str(place / "runs"))
    assert resumed.state == "done"
    assert resumed.metrics["eval_loss"] == whole.metrics["eval_loss"]


def test_a_resume_that_fails_leaves_the_record_as_it_was(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(place / "runs" / run(**asked(place, steps=2)).id)
    before = (folder / "record.json").read_bytes()

    def full(*_: object) -> None:
        raise FlopwiseError("the disk is full")

    monkeypatch.setattr(running_module, "trim_steps", full)
    with pytest.raises(FlopwiseError, match="the disk is full"):
        run(resume="last", store=str(place / "runs"), steps=4)
    assert (folder / "record.json").read_bytes() == before


def test_what_another_process_did_meanwhile_is_not_lost(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(**asked(place, steps=2))
    find = resuming_module.find_resumed

    def late(*arguments: Any) -> Any:
        found = find(*arguments)
        monkeypatch.setattr(running_module, "find_resumed", find)
        run(resume="last", store=str(place / "runs"), steps=4)
        return found

    monkeypatch.setattr(running_module, "find_resumed", late)
    with pytest.raises(FlopwiseError, match="has gone on in another process meanwhile"):
        run(resume="last", store=str(place / "runs"), steps=6)
    record = list_runs(place / "runs")[-1].record
    assert record is not None and record.steps_done == 4


def test_several_ranks_train_the_same_model_however_fast_each_finds_the_machine() -> None:
    slow, fast = this_cpu(), this_cpu()
    peaks = {name: replace(fact, value=1000 * fact.value) for name, fact in fast.device.peak_flops.items()}
    fast = replace(fast, device=replace(fast.device, peak_flops=peaks))
    wanted = TrainRequest(devices=2)
    models = [trained_model.find_trained(wanted, None, hardware, 2).model for hardware in (slow, fast)]
    assert models[0] == models[1]


def test_ranks_meet_on_the_device_that_the_run_began_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed on a machine with a GPU, a training on CPUs is still one."""
    run(**asked(place, steps=2, device="cpu"))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    met: list[str] = []

    def meet(_rank: object, device: str) -> None:
        met.append(device)
        raise FlopwiseError("enough")

    monkeypatch.setattr(running_module, "rank_group", meet)
    with pytest.raises(FlopwiseError, match="enough"):
        run(resume="last", store=str(place / "runs"), steps=4, devices=2)
    assert met == ["cpu"]


def test_more_steps_than_were_asked_for_first(place: Path) -> None:
    record = run(**asked(place, steps=3, schedule="constant", warmup_steps=0))
    with pytest.raises(FlopwiseError, match="has done its 3 steps"):
        run(resume="last", store=str(place / "runs"))
    longer = run(resume="last", store=str(place / "runs"), steps=6)
    whole = run(**asked(place, steps=6, schedule="constant", warmup_steps=0))
    store = place / "runs"
    assert longer.id == record.id
    assert final_files(find_run(store, longer.id)) == final_files(find_run(store, whole.id))


def test_killed_behind_its_last_checkpoint_it_is_brought_to_its_end(place: Path) -> None:
    whole = run(**asked(place, steps=3))
    write_record(find_run(place / "runs", whole.id), replace(whole, state="running", metrics={}, measurement=None))
    ended = run(resume="last", store=str(place / "runs"))
    assert (ended.state, ended.steps_done, ended.measurement) == ("done", 3, None)
    kept = {name: value for name, value in whole.metrics.items() if "runtime" not in name and "second" not in name}
    assert {name: ended.metrics[name] for name in kept} == pytest.approx(kept)


def test_a_run_with_settings_left_open_goes_on(place: Path) -> None:
    """Warm-up, batch and rate were chosen for the first number of steps: they stay."""
    request = asked(place, steps=20, micro_batch_sequences=3)
    del request["batch_sequences"], request["learning_rate"]
    first = run(**request)
    longer = run(resume="last", store=str(place / "runs"), steps=30)
    assert (first.training.warmup_steps, longer.training.warmup_steps) == (2, 2)
    assert longer.training.learning_rate == first.training.learning_rate
    assert longer.steps_done == 30
    assert [step.samples for step in read_steps(find_run(place / "runs", "last"))] == [8] * 30


def test_a_run_from_weights_goes_on_from_them(place: Path) -> None:
    source = run(**asked(place, steps=30))
    saved = checkpoint.latest(find_run(place / "runs", source.id))
    assert saved is not None
    request = asked(place, model=str(saved), steps=4, checkpoint_every=2)
    del request["learning_rate"]
    record = run(callbacks=[Recorder(stop_after=2)], **request)
    assert record.state == "interrupted"
    assert run(resume=record.id, store=str(place / "runs")).state == "done"
    assert record.measurement is not None
    # Ended before its first checkpoint, it begins with the same weights again.
    with pytest.raises(RuntimeError, match="in the middle"):
        run(callbacks=[Breaking()], **asked(place, model=str(saved), steps=4))
    again = run(resume="last", store=str(place / "runs"))
    assert again.measurement is not None
    assert again.measurement.first_loss == record.measurement.first_loss


class Breaking(Callback):
    def on_step(self, record: StepRecord) -> None:
        raise RuntimeError(f"in the middle, after step {record.step}")


def test_a_checkpoint_that_is_gone_is_not_begun_anew(place: Path) -> None:
    record = run(**asked(place, steps=2))
    folder = find_run(place / "runs", record.id)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(FlopwiseError, match="it is gone"):
        run(resume="last", store=str(place / "runs"), steps=4)
    assert read_record(folder) == record
    (folder / "plan.toml").write_text("nothing", encoding="utf-8")
    with pytest.raises(FlopwiseError, match="the plan of run"):
        run(resume="last", store=str(place / "runs"), steps=4)


def test_a_logger_that_fails_does_not_end_the_training(place: Path) -> None:
    class Broken:
        def log(self, data: dict[str, Any]) -> None:
            raise ConnectionError(str(data["step"]))

    with pytest.warns(UserWarning, match="a logger failed"):
        assert run(loggers=[Broken()], **asked(place, steps=3)).state == "done"


def test_a_damaged_checkpoint_is_passed_over_and_none_left_is_told(place: Path) -> None:
    request = asked(place, steps=6, checkpoint_every=2, keep_checkpoints=3)
    whole = run(**request)
    folder = find_run(place / "runs", whole.id)
    expected = final_files(folder)
    found = checkpoint.checkpoints(folder)
    assert [entry.step for entry in found] == [6, 4, 2]
    _flip(found[0].path / "model.safetensors")
    told = Recorder()
    resumed = run(callbacks=[told], resume="last", store=str(place / "runs"))
    assert any("step-00000006 is passed over" in note for note in told.notes)
    assert told.started[0].first_step == 4
    assert resumed.state == "done"
    assert final_files(folder) == expected
    for entry in checkpoint.checkpoints(folder):
        _flip(entry.path / "optimizer.safetensors")
    before = losses(folder)
    with pytest.raises(FlopwiseError, match="no checkpoint of run"):
        run(resume="last", store=str(place / "runs"))
    assert losses(folder) == before


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(bytes(content))


def test_two_processes_never_train_in_one_folder(place: Path) -> None:
    record = run(callbacks=[Recorder(stop_after=3)], **asked(place))
    with RunLock(find_run(place / "runs", record.id)), pytest.raises(FlopwiseError, match="another process"):
        run(resume="last", store=str(place / "runs"))
    assert run(resume="last", store=str(place / "runs")).state == "done"


def test_a_signal_in_the_last_step_changes_nothing(place: Path) -> None:
    record = run(callbacks=[Recorder(stop_after=5)], **asked(place, steps=6))
    if record.state == "done":
        assert "eval_loss" in record.metrics
    else:
        assert record.steps_done == 5


def test_a_log_tells_what_happened(place: Path) -> None:
    record = run(**asked(place, steps=4, checkpoint_every=2))
    log = (find_run(place / "runs", record.id) / "log.txt").read_text(encoding="utf-8")
    assert "begins: tiny" in log
    assert log.count("saved step-") == 2
    assert log.rstrip().endswith("done after step 4")


def test_padding_is_not_counted_as_work_or_speed(place: Path) -> None:
    rows = "".join(f"{'ab' * (3 + number % 17)},{'even' if number % 2 else 'odd'}\n" for number in range(80))
    (place / "short.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    request: dict[str, Any] = {
        "model": str(place / "encoder.toml"),
        "data": (str(place / "short.csv"),),
        "sequence_tokens": 128,
        "steps": 6,
        "store": str(place / "runs"),
    }
    whole, longest = run(**request), run(**request, padding="longest")
    assert whole.measurement is not None
    assert longest.measurement is not None
    # Whatever is filled up, a model is asked for its tokens alone.
    assert longest.measurement.model_flops == whole.measurement.model_flops
    padded = describe(load_model(str(place / "encoder.toml")), 128).model_flops("causal")
    assert whole.measurement.model_flops < whole.measurement.batch_sequences * padded / 2
    assert longest.metrics["total_flos"] < whole.metrics["total_flos"]  # type: ignore[operator]
    steps = read_steps(find_run(place / "runs", whole.id))
    assert all(step.tokens < 8 * 128 for step in steps)
    assert whole.measurement.predicted_step_s is not None
    mean = sum(step.tokens for step in steps[2:]) / 4
    assert whole.measurement.predicted_tokens_per_s == pytest.approx(mean / whole.measurement.predicted_step_s)


@pytest.mark.slow
@pytest.mark.parametrize(("padding", "tokens"), [("length", 16), ("longest", 32)])
def test_a_small_encoder_beats_the_majority_class(place: Path, padding: str, tokens: int) -> None:
    record = run(
        model=str(place / "encoder.toml"),
        sequence_tokens=tokens,
        padding=padding,
        learning_rate=2e-3,
        store=str(place / "runs"),
    )
    labels, accuracy = record.data["labels"], record.metrics["eval_accuracy"]
    assert record.metrics["epoch"] == pytest.approx(3.0, abs=0.01)
    assert isinstance(accuracy, float)
    assert accuracy > 1.4 / len(labels), f"{accuracy} on {len(labels)} classes of one size"


def test_a_classifier_is_trained_and_evaluated(place: Path) -> None:
    record = run(
        model=str(place / "encoder.toml"), sequence_tokens=16, steps=6, store=str(place / "runs"), batch_sequences=12
    )
    assert record.task == "classification"
    assert record.model["labels"] == len(record.data["labels"]) == 6
    assert 0 <= record.metrics["eval_accuracy"] <= 1  # type: ignore[operator]
    assert record.metrics["eval_samples"] == record.data["evaluation_sequences"]


def test_uneven_micro_batches_change_nothing_but_rounding(place: Path) -> None:
    precision = "fp32,matrix=fp64,compute=fp64,weights=fp64,gradients=fp64,moments=fp64"
    whole = run(**asked(place, batch_sequences=48, steps=2, precision=precision))
    parts = run(**asked(place, batch_sequences=48, micro_batch_sequences=11, steps=2, precision=precision))
    assert parts.measurement is not None
    assert parts.measurement.micro_batch_sequences == 11
    assert parts.plan["rounds_per_step"] == 5
    store = place / "runs"
    for (_, one), (_, other) in zip(losses(find_run(store, whole.id)), losses(find_run(store, parts.id)), strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def _trained(arguments: dict[str, Any]) -> None:
    run(**arguments)


def _killed_after(seconds: float | None, arguments: dict[str, Any]) -> bool:
    """Train in another process and kill it; whether it was still at work. None: it may take as long as it wants."""
    process = multiprocessing.get_context("fork").Process(target=_trained, args=(arguments,))
    process.start()
    process.join(seconds)
    alive = process.is_alive()
    if alive:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert alive or process.exitcode == 0
    return alive


@pytest.mark.slow
def test_killed_twenty_times_it_ends_as_if_never_killed(place: Path) -> None:
    steps, every = 60, 3
    changes: dict[str, Any] = {
        "steps": steps,
        "checkpoint_every": every,
        "clip_norm": 1.0,
        "precision": "bf16,weights=fp32",
    }
    arguments = asked(place, **changes)
    begun = time.monotonic()
    assert not _killed_after(None, arguments)
    whole_s = time.monotonic() - begun
    store = place / "runs"
    whole = find_run(store, "1")
    draw = random.Random(7)  # noqa: S311
    kills = 0
    arguments = {**arguments, "store": str(place / "killed")}
    while kills < 20:
        there = [run for run in list_runs(place / "killed") if run.record] if (place / "killed").exists() else []
        attempt = {"resume": "last", "store": str(place / "killed")} if there else arguments
        if there and read_record(there[-1].folder).state == "done":
            # It got through: begin another one, so that there are twenty kills.
            assert losses(there[-1].folder) == losses(whole)
            attempt = arguments
        kills += _killed_after(draw.uniform(0.05, 0.6) * whole_s, attempt)
    last = find_run(place / "killed", "last")
    if read_record(last).state != "done":
        assert not _killed_after(None, {"resume": "last", "store": str(place / "killed")})
    assert read_record(last).state == "done"
    assert losses(last) == losses(whole)
    assert final_files(last) == final_files(whole)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_plan_for_other_hardware_is_refused(place: Path) -> None:
    from flopwise.catalog.load import load_plan, plan_table

    record = run(**asked(place, steps=1))
    plan, model = load_plan(find_run(place / "runs", record.id) / "plan.toml")
    other = place / "other.toml"
    other.write_text(to_toml(plan_table(replace(plan, hardware="h200"), model)), encoding="utf-8")
    request: dict[str, Any] = {
        "model": str(other),
        "data": (str(place / "text.txt"),),
        "steps": 1,
        "store": str(place / "runs"),
    }
    with pytest.MonkeyPatch.context() as patch:
        from flopwise.profile.measure.this_machine import find_hardware

        cpu = this_cpu()
        patch.setattr(hardware_module, "find_hardware", lambda name: cpu if name == "this-cpu" else find_hardware(name))
        with pytest.raises(FlopwiseError, match="the plan is for") as caught:
            run(**request)
        assert caught.value.hint and "--anywhere" in caught.value.hint
        assert run(**request, anywhere=True).state == "done"


def test_a_diverged_training_stops_and_says_so(place: Path) -> None:
    with pytest.raises(FlopwiseError, match="the loss of step") as caught:
        # The decay alone multiplies weights by 1 - 900 a step: they overflow on every CPU.
        run(**asked(place, steps=40, learning_rate=900.0, weight_decay=1.0, warmup_steps=0))
    assert caught.value.hint
    (listed,) = list_runs(place / "runs")
    assert listed.record is not None
    assert listed.record.state == "failed"
    assert listed.record.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": ("nowhere.txt",)}, "nowhere"),
        ({"model": "lstm-lm"}, "cannot be trained"),
        ({"model": "bert-base", "task": "language"}, "sees what comes after"),
        ({"task": "classification"}, "left to right"),
        ({"precision": "fp8,compute=fp32"}, "cannot be trained"),
        ({"precision": "fp16-amp"}, "cannot be trained"),
        ({"steps": 0}, "steps"),
        ({"epochs": 1.0}, "--epochs"),
        ({"micro_batch_sequences": 9}, "larger than the batch"),
        ({"weights": "."}, "holds no weights"),
        ({"weights": "nowhere"}, "there is no folder"),
        ({"batch_sequences": 10**7}, "a batch of 10,000,000"),
        ({"sequense_tokens": 3}, "did you mean sequence_tokens"),
    ],
)
def test_mistakes_are_told_before_anything_runs(place: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopwiseError, match=words) as caught:
        run(**asked(place, **changes))
    assert caught.value.hint
    assert not list_runs(place / "runs") if (place / "runs").exists() else True


def test_loggers_are_given_every_step(place: Path) -> None:
    class Log:
        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        def log(self, data: dict[str, Any]) -> None:
            self.rows.append(data)

    log = Log()
    run(loggers=[log], **asked(place, steps=3))
    assert [row["step"] for row in log.rows] == [1, 2, 3]
    assert all("loss" in row and "gradient_norm" not in row for row in log.rows)
    assert "eval_loss" in log.rows[-1]
