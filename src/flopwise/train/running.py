"""One training from start to end: `train.run`."""

from __future__ import annotations

import datetime
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from flopwise.base.errors import FlopwiseError, one_of, unknown_name
from flopwise.base.files import plain, to_json, to_toml, write_whole
from flopwise.base.units import AUTO
from flopwise.catalog.load import model_table, plan_table
from flopwise.engine.data import PreferenceData, StreamedData
from flopwise.engine.devices import device_facts
from flopwise.engine.executor import Executor
from flopwise.engine.launch import Rank, rank_of
from flopwise.engine.signals import Stop
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.engine.weights import checkpoint
from flopwise.engine.weights.adapter_files import adapter_config, base_name
from flopwise.engine.weights.checkpoint import CheckpointState
from flopwise.engine.weights.handed_on import files_to_hand_on
from flopwise.engine.weights.weight_files import weights_digest
from flopwise.plan.program.compile import compile_plan
from flopwise.profile.explain.verdicts import first_verdict
from flopwise.profile.measure.this_machine import environment
from flopwise.records.measurement import RunRecord, RunState, StepRecord
from flopwise.records.plan import Plan
from flopwise.setup.written import CellSetup, cell_id, words_of
from flopwise.store.cells import Told
from flopwise.store.rows import read_profile, write_row
from flopwise.store.runs import (
    CHECKPOINTS,
    PLAN,
    PROFILE,
    RunLock,
    find_run,
    new_run,
    read_record,
    read_steps,
    store_folder,
    tidy_run,
    trim_steps,
    write_record,
)
from flopwise.store.sweeps import own_attempt, tell_sweep
from flopwise.train.building import begin_with_adapters, build_executor, first_weights, rank_group
from flopwise.train.events import Callback, LogFile, Logger, LoggerCallback, Started
from flopwise.train.loop import Loop, LoopEnd, LoopSettings, Progress, restore
from flopwise.train.measuring import commit, measure, metrics
from flopwise.train.origin import begin_anew, read_config
from flopwise.train.own_data import Data
from flopwise.train.planning import products_not_in_fp8
from flopwise.train.preparing import Prepared, prepare
from flopwise.train.profiling import RunProfiler
from flopwise.train.request import TrainRequest, check_request, has_done, merge_resumed
from flopwise.train.resuming import Resumed, as_written, find_resumed, laid_out_as_before
from flopwise.train.trackers import Tracking
from flopwise.work.describe import describe
from flopwise.work.optimizers import OPTIMIZERS
from flopwise.work.total_flos import total_flos

AVERAGED = "averaged"
"""A run's folder for the model with the means of its weights over the steps."""
MERGED = "merged"
"""A run's folder for the model that its adapters were merged into."""
LEAST_WAITED_S = 1.0
"""For text, that is worth a word."""


def run(
    request: TrainRequest | None = None,
    *,
    own_data: Data | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
    **asked: Any,  # noqa: ANN401 - the fields of TrainRequest, checked there
) -> RunRecord:
    """Train. Either a request, or its fields as keywords: `train.run(model="gpt2", steps=10)`.

    `own_data` makes the batches itself; `data` may be such an object too.

    A callback is a `flopwise.train.Callback` with the methods overridden that it wants to hear of; a logger is anything
    with `log(dict)`, which is given every step's figures.
    """
    if request is not None and asked:
        raise FlopwiseError("both a request and keywords were given", hint="one of them")
    if isinstance(asked.get("data"), Data):
        own_data = asked.pop("data")
    wanted = replace(request or _make_request(asked), own_data=own_data is not None)
    listeners = _Listeners([*callbacks, *(LoggerCallback(logger, warnings.warn) for logger in loggers)])
    rank = rank_of(os.environ)
    if wanted.devices > 1 and rank.world != wanted.devices:
        raise FlopwiseError(
            f"{wanted.devices} devices were asked for, and {rank.world} rank{'s' if rank.world > 1 else ''} run",
            hint=f"`flopwise train --gpus {wanted.devices}` starts them, or torchrun --nproc-per-node {wanted.devices}",
        )
    group: AbstractContextManager[object] = nullcontext()
    if rank.world > 1:
        group = rank_group(rank, _device_of(wanted))
    with group:
        return _Run(wanted, rank, listeners, own_data).go()


def _device_of(request: TrainRequest) -> str:
    """A run that goes on does so on the device that it began on, whatever else there is here."""
    if request.resume is None:
        return request.device
    record = read_record(find_run(store_folder(request.store), request.resume))
    return merge_resumed(record, request).device


def _make_request(asked: dict[str, Any]) -> TrainRequest:
    known = {field.name for field in fields(TrainRequest) if field.init}
    for name in asked:
        if name not in known:
            raise unknown_name("argument of train.run", name, known, hint="the fields of flopwise.train.TrainRequest")
    for name in ("data", "evaluation_data"):
        if name in asked:
            several = [asked[name]] if isinstance(asked[name], str | Path) else asked[name]
            asked[name] = tuple(str(source) for source in several)
    if asked.get("optimizer") is not None:
        asked["optimizer"] = one_of(asked["optimizer"], OPTIMIZERS, "optimizer")
    return TrainRequest(**asked)


class _Listeners(Callback):
    """All callbacks as one."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)

    def on_start(self, started: Started) -> None:
        for callback in self.callbacks:
            callback.on_start(started)

    def on_progress(self, what: str, done: int, of: int) -> None:
        for callback in self.callbacks:
            callback.on_progress(what, done, of)

    def on_step(self, record: StepRecord) -> Literal["stop"] | None:
        # All of them hear of it, whatever the first one says.
        return "stop" if "stop" in [callback.on_step(record) for callback in self.callbacks] else None

    def on_checkpoint(self, saved: Path) -> None:
        for callback in self.callbacks:
            callback.on_checkpoint(saved)

    def on_note(self, note: str) -> None:
        for callback in self.callbacks:
            callback.on_note(note)

    def on_end(self, record: RunRecord) -> None:
        for callback in self.callbacks:
            callback.on_end(record)


class _Run:
    """A training in its folder."""

    def __init__(self, request: TrainRequest, rank: Rank, listeners: _Listeners, own: Data | None) -> None:
        self.rank, self.listeners, self.own = rank, listeners, own
        self.trackers: list[Tracking] = []
        self.writes = rank.rank == 0
        self.resumed = find_resumed(request, listeners.on_note) if request.resume else None
        self.request = request
        if self.resumed is not None:
            merged = merge_resumed(self.resumed.record, request)
            self.request = laid_out_as_before(begin_anew(merged, self.resumed.checkpoint), self.resumed, rank.world)
            if self.request.own_data != (own is not None):
                raise FlopwiseError(
                    f"run {self.resumed.folder.name} was trained on "
                    + ("data of the program that began it" if self.request.own_data else "files"),
                    hint="fw.train(resume=…, data=…) with that object" if self.request.own_data else "leave data out",
                )
        check_request(self.request)

    def go(self) -> RunRecord:
        """Prepare, train, and leave a record whatever happens."""
        with self._lock(self.resumed.folder if self.resumed else None):
            if self.resumed is not None and self.writes:
                self._check_same(self.resumed)
            prepared = prepare(
                self.request,
                ranks=self.rank.world,
                plan=self.resumed.plan if self.resumed else None,
                training=self.resumed.record.training if self.resumed else None,
                tell=self.listeners.on_progress,
                own=self.own,
            )
            try:
                return self._with_data(prepared)
            finally:
                if isinstance(prepared.data, StreamedData):
                    prepared.data.close()

    def _with_data(self, prepared: Prepared) -> RunRecord:
        self._check_held_out(prepared)
        executor = self._executor(prepared)
        try:
            progress = self._begin(executor, prepared)
            # From here on a signal ends the step in flight and no more.
            with Stop() as stop:
                folder = self._folder()
                with self._lock(None if self.resumed else folder):
                    return self._train(executor, prepared, folder, progress, stop)
        finally:
            executor.close()

    def _check_held_out(self, prepared: Prepared) -> None:
        """Refuse to look for the best evaluation where there will be none."""
        if self.request.patience is None and not self.request.keep_best:
            return
        if next(iter(prepared.data.evaluation(prepared.batch_sequences)), None) is None:
            raise FlopwiseError(
                "no data is held out",
                why="--patience and --keep-best go by its loss",
                hint="--eval-data FOLDER, or more data",
            )

    def _check_same(self, resumed: Resumed) -> None:
        """Refuse to go on from where another process has gone on meanwhile: what it did since would be lost."""
        now, then = read_record(resumed.folder), resumed.record
        if (now.state, now.steps_done, now.ended) != (then.state, then.steps_done, then.ended):
            raise FlopwiseError(
                f"run {resumed.folder.name} has gone on in another process meanwhile",
                why=f"it is {now.state} after {now.steps_done:,} steps",
                hint=f"--resume {resumed.folder.name} once more, if it has to go on",
            )

    def _lock(self, folder: Path | None) -> AbstractContextManager[object]:
        """One process at a time trains in a folder."""
        return RunLock(folder) if folder is not None and self.writes else nullcontext()

    # -- before the first step ------------------------------------------------------------------------------------

    def _executor(self, prepared: Prepared) -> Executor:
        plan, model = prepared.plan, prepared.model
        # What could not be saved is told before anything is trained.
        _adapter_config(prepared)
        program = compile_plan(plan, model) if isinstance(plan, Plan) else None
        return build_executor(
            plan,
            program,
            model,
            prepared.training,
            device=prepared.device,
            rank=self.rank,
            deterministic=self.request.deterministic,
        )

    def _begin(self, executor: Executor, prepared: Prepared) -> Progress:
        """First numbers, or those of a checkpoint."""
        model, tokens = prepared.model, prepared.plan.sequence_tokens
        executor.clear_moments()
        if self.resumed is None or self.resumed.loaded is None:
            if self.resumed is not None:
                self.listeners.on_note("the run has no checkpoint yet: it begins anew")
            missing = first_weights(executor, model, prepared.training.seed, prepared.weights, tokens)
            if missing:
                self.listeners.on_note(f"drawn anew, since the weights have none: {', '.join(missing[:4])}")
            self._refer(executor, prepared)
            if self.request.adapters is not None:
                begin_with_adapters(executor, model, Path(self.request.adapters))
            return Progress()
        loaded = self.resumed.loaded
        if model.adapters is not None or model.objective == "preference":
            # What they lie beside is no part of a checkpoint.
            first_weights(executor, model, prepared.training.seed, prepared.weights, tokens)
            self._refer(executor, prepared)
        template = self._template(prepared)
        checkpoint.check_matches(
            loaded.state,
            model=template.model,
            data=template.data,
            precision=template.precision,
            batch_sequences=template.batch_sequences,
            sequence_tokens=template.sequence_tokens,
            training=prepared.training,
        )
        # One that was killed between its last checkpoint and its end is brought to that end.
        ended = self.resumed.record.state == "done" or loaded.state.step > prepared.training.steps
        if ended and loaded.state.step >= prepared.training.steps:
            raise has_done(self.resumed.folder.name, loaded.state.step)
        return restore(executor, loaded, model)

    def _refer(self, executor: Executor, prepared: Prepared) -> None:
        """Preferences are learned beside what the model that it begins with finds of the answers."""
        if not isinstance(prepared.data, PreferenceData):
            return
        assert isinstance(executor, StreamingExecutor)
        told = prepared.data.refer(
            executor.score,
            {
                "weights": weights_digest(prepared.weights) if prepared.weights else prepared.training.seed,
                "model": model_table(replace(prepared.model, adapters=None)),
                "precision": prepared.plan.precision,
            },
            sequences=prepared.batch_sequences,
            seen=prepared.training.steps * prepared.batch_sequences,
        )
        self.listeners.on_note(told)

    def _folder(self) -> Path:
        if self.resumed is not None:
            return self.resumed.folder
        return new_run(store_folder(self.request.store)) if self.writes else store_folder(self.request.store)

    def _template(self, prepared: Prepared) -> CheckpointState:
        return CheckpointState(
            step=0,
            position=0,
            model=model_table(prepared.model),
            training=prepared.training,
            data=prepared.data.describe(),
            precision=prepared.plan.precision,
            batch_sequences=prepared.batch_sequences,
            sequence_tokens=prepared.plan.sequence_tokens,
            totals={},
            files={},
            not_finite=(),
        )

    def _record(self, prepared: Prepared, folder: Path, progress: Progress) -> RunRecord:
        facts = {name: str(value) for name, value in environment().items() if value is not None}
        resumed = self.resumed
        cell, attempt = self._cell(prepared)
        return RunRecord(
            id=folder.name,
            cell=cell,
            attempt=attempt,
            state="running",
            started=resumed.record.started if resumed else _now(),
            model=model_table(prepared.model),
            hardware=prepared.hardware.name,
            task=prepared.training.task,
            training=prepared.training,
            plan=plain(prepared.plan),
            data=prepared.data.describe(),
            environment={**facts, **device_facts(prepared.device), **commit()},
            steps_done=progress.step,
            request=as_written(
                replace(
                    self.request,
                    tokenizer=prepared.tokenizer,
                    stream_data=isinstance(prepared.data, StreamedData) or None,
                ),
                batch_sequences=prepared.batch_sequences,
                weights=prepared.weights,
            ),
            resumed_from=f"{CHECKPOINTS}/{resumed.checkpoint.name}" if resumed and resumed.checkpoint else None,
            resumed_after=progress.step,
        )

    def _cell(self, prepared: Prepared) -> tuple[str, int | None]:
        """The cell that is measured, and which of its attempts this is; without a sweep, the id of the set-up alone."""
        if (
            self.resumed is not None
            and self.resumed.record.cell is not None
            and self.resumed.record.attempt is not None
        ):
            return self.resumed.record.cell, self.resumed.record.attempt
        request, plan = self.request, prepared.plan
        words = words_of(plan) | {
            "model": model_table(prepared.model),
            "hardware": prepared.hardware.name,
            "devices": self.rank.world,
            "batch_sequences": prepared.batch_sequences,
            "micro_batch_sequences": request.micro_batch_sequences or AUTO,
        }
        setup = CellSetup(
            **words,
            task=prepared.training.task,
            device_memory_bytes=request.device_memory_bytes,
            host_memory_bytes=request.host_memory_bytes,
        )
        return own_attempt() or (cell_id(setup), None)

    def _write_first(self, prepared: Prepared, folder: Path, record: RunRecord, progress: Progress) -> None:
        """What a folder holds before the first step; a new one that cannot be written is taken away again."""
        if self.resumed is not None:
            # Before the record: where this fails, the one from before says how the run stands.
            self._go_back(folder, progress)
        try:
            write_whole(folder / PLAN, to_toml(plan_table(prepared.plan, prepared.model)), own=True)
            write_record(folder, record)
        except FlopwiseError:
            if self.resumed is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _go_back(self, folder: Path, progress: Progress) -> None:
        """To the step that a run goes on from: what comes after it is done again."""
        tidy_run(folder)
        trim_steps(folder, progress.step)
        checkpoint.drop_later(folder, progress.step)
        lost = progress.step - len(read_steps(folder))
        if lost:
            self.listeners.on_note(f"the lines of {lost:,} of {progress.step:,} steps are missing or damaged")

    # -- the steps ------------------------------------------------------------------------------------------------

    def _save_models(self, loop: Loop, folder: Path) -> Iterator[str]:
        """What is written beside the checkpoints at the end; and notes on it."""
        if self.request.merge:
            yield f"merged into {loop.save_merged(folder / MERGED)}"
        if loop.training.ema:
            yield f"the mean of the weights is in {loop.save_averaged(folder / AVERAGED)}"

    def _train(self, executor: Executor, prepared: Prepared, folder: Path, progress: Progress, stop: Stop) -> RunRecord:
        record = self._record(prepared, folder, progress)
        if self.writes:
            self._write_first(prepared, folder, record, progress)
            tell_sweep(folder.parent, Told(run=folder.name))
        profiler = self._profiler(executor, prepared, folder, progress)
        files = [LogFile(folder)] if self.writes else []
        listeners = _Listeners([*self.listeners.callbacks, *files, *([profiler] if profiler else [])])
        self.trackers = [Tracking(words, listeners.on_note) for words in self.request.log if self.writes]
        listeners.callbacks.extend(self.trackers)
        loop = Loop(
            executor,
            prepared.data,
            prepared.model,
            prepared.training,
            self._settings(prepared, folder),
            on_step=listeners.on_step,
            on_checkpoint=listeners.on_checkpoint,
            watch=profiler,
        )
        loop.progress = progress
        if self.resumed is not None and self.resumed.loaded is not None:
            loop.saved = checkpoint.path_of(folder, progress.step)
        try:
            listeners.on_start(self._describe_start(prepared, folder, progress))
            outcome = loop.run(progress, stop)
            earlier = [step for step in read_steps(folder) if step.step <= progress.step] if self.writes else []
            for note in self._how_ended(outcome):
                listeners.on_note(note)
            found = measure(
                prepared,
                outcome,
                executor.memory(),
                earlier=earlier,
                ranks=self.rank.world,
                slowed=profiler.traced if profiler else range(0),
            )
            for note in (*_waited_note(prepared), *self._save_models(loop, folder)):
                listeners.on_note(note)
            reason = outcome.stopped_by or outcome.ended_early
            figures = metrics(prepared, outcome) if outcome.progress.step else {}
            record = replace(record, reason=reason, measurement=found, metrics=figures)
        except BaseException as error:
            if profiler is not None:
                profiler.abandon()
            reason = error.what if isinstance(error, FlopwiseError) else repr(error)
            # On a disk that is full the record cannot be written either; what came first is what is told.
            with suppress(FlopwiseError):
                self._leave_row(folder, self._write_end(folder, replace(record, reason=reason), "failed", loop))
            raise
        finally:
            for tracker in self.trackers:
                tracker.close()
        record = self._write_end(folder, record, "interrupted" if outcome.stopped_by else "done", loop)
        if profiler is not None and found is not None:
            # Long traces take a while, in which nothing else can be lost any more.
            missing = profiler.close(found)
            if missing:
                listeners.on_note(f"there is no profile: {missing}")
            else:
                profile = read_profile(folder)
                record = replace(record, profile=PROFILE, bound=first_verdict(profile) if profile else None)
                write_record(folder, record)
        self._leave_row(folder, record)
        if self.writes:
            listeners.on_end(record)
        return record

    def _how_ended(self, outcome: LoopEnd) -> Iterator[str]:
        """What there is to tell of a training that has not done all its steps."""
        last = checkpoint.path_of(Path(), outcome.progress.step).name
        saved = ", and saved" if outcome.checkpoint is not None and outcome.checkpoint.name == last else ""
        if outcome.stopped_by:
            yield f"stopped by {outcome.stopped_by} after step {outcome.progress.step}{saved}"
        if outcome.ended_early:
            yield f"ended after step {outcome.progress.step}{saved}: {outcome.ended_early}"

    def _profiler(self, executor: Executor, prepared: Prepared, folder: Path, progress: Progress) -> RunProfiler | None:
        """One rank looks at itself."""
        if not self.request.profile or not self.writes:
            return None
        return RunProfiler(
            folder,
            executor,
            prepared,
            done=progress.step,
            request=self.request,
            world=self.rank.world,
        )

    def _write_end(self, folder: Path, record: RunRecord, state: RunState, loop: Loop) -> RunRecord:
        saved = f"{CHECKPOINTS}/{loop.saved.name}" if loop.saved else None
        best = f"{CHECKPOINTS}/{loop.best.name}" if loop.best else None
        record = replace(record, state=state, ended=_now(), checkpoint=saved, best=best, steps_done=loop.progress.step)
        if self.writes:
            write_record(folder, record)
        return record

    def _leave_row(self, folder: Path, record: RunRecord) -> None:
        """For listings, which make it themselves of the record where a full disk has none."""
        if self.writes:
            with suppress(FlopwiseError):
                write_row(folder, record)

    def _settings(self, prepared: Prepared, folder: Path) -> LoopSettings:
        expected, model = prepared.expected, prepared.model
        begun, tokenizer = prepared.origin, prepared.tokenizer
        if self.resumed is not None and self.resumed.checkpoint is not None:
            # What it began with may be gone by now, and its last checkpoint has it all.
            begun = self.resumed.checkpoint
            tokenizer = str(begun) if (begun / "tokenizer.json").is_file() else tokenizer
        return LoopSettings(
            folder=folder,
            batch_sequences=prepared.batch_sequences,
            checkpoints=self.request.checkpoint,
            checkpoint_every=self.request.checkpoint_every,
            patience=self.request.patience,
            keep_best=self.request.keep_best,
            keep_checkpoints=self.request.keep_checkpoints,
            evaluate_every=self.request.evaluate_every,
            writes=self.writes,
            model_flops=cache(lambda tokens: describe(model, tokens).model_flops("causal")),
            total_flos=lambda tokens: total_flos(describe(model, tokens), 1),
            peak_flops=expected.peak_flops,
            predicted_step_s=expected.step_s,
            template=self._template(prepared),
            origin=read_config(begun if model.adapters is None else prepared.origin),
            handed_on=files_to_hand_on(begun, tokenizer, prepared.training.task, own_data=self.own is not None)
            | _adapter_config(prepared),
            end_token=prepared.data.end_token,
        )

    def _describe_start(self, prepared: Prepared, folder: Path, progress: Progress) -> Started:
        in_bf16 = products_not_in_fp8(prepared.plan, prepared.model)
        return Started(
            folder=folder,
            run=folder.name,
            hardware=prepared.place,
            training=prepared.training,
            first_step=progress.step,
            expected=replace(prepared.expected, model=prepared.model.name, devices=self.rank.world),
            checks=prepared.checks,
            notes=(*prepared.notes, *([] if in_bf16 is None else [in_bf16])),
        )


def _waited_note(prepared: Prepared) -> tuple[str, ...]:
    """What steps have waited for text, where it is tokenized meanwhile."""
    waited_s = prepared.data.waited_s if isinstance(prepared.data, StreamedData) else 0.0
    if waited_s < LEAST_WAITED_S:
        return ()
    return (f"steps have waited {waited_s:,.0f} s for text to be tokenized: it is slower than they are",)


def _adapter_config(prepared: Prepared) -> dict[str, bytes]:
    """What PEFT reads beside adapters, where there are some."""
    if prepared.model.adapters is None:
        return {}
    table = adapter_config(prepared.model, base_name(prepared.weights, prepared.model))
    return {checkpoint.ADAPTER_CONFIG: to_json(table).encode() + b"\n"}


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
