"""One training from start to end: `train.run`."""

from __future__ import annotations

import datetime
import os
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from flopwise.core.catalog import load_plan, model_table, plan_table
from flopwise.core.cluster_plan import ClusterPlan
from flopwise.core.describe import describe
from flopwise.core.errors import FlopwiseError
from flopwise.core.files import plain, to_toml, write_whole
from flopwise.core.measurement import Measurement, RunRecord, RunState, StepRecord
from flopwise.core.plan import Plan
from flopwise.core.store import (
    CHECKPOINTS,
    PLAN,
    find_run,
    new_run,
    read_record,
    read_steps,
    store_folder,
    trim_steps,
    write_record,
)
from flopwise.core.total_flos import total_flos
from flopwise.engine import checkpoint
from flopwise.engine.building import build_executor, first_weights, rank_group
from flopwise.engine.checkpoint import CheckpointState
from flopwise.engine.devices import device_facts
from flopwise.engine.executor import Executor
from flopwise.engine.launch import Rank, rank_of
from flopwise.engine.loop import Loop, LoopSettings, Outcome, Progress, restore
from flopwise.engine.signals import Stop
from flopwise.plan.compile import compile_plan
from flopwise.profile.environment import environment
from flopwise.train.events import Callback, Logger, LoggerCallback, Started
from flopwise.train.preparing import Prepared, prepare
from flopwise.train.request import TrainRequest

WARM_UP_STEPS = 2
"""Steps that are left out of what was measured, where enough others are there."""

LANGUAGE_EVALUATION_SEQUENCES = 64
"""Held-out sequences of a language model that are evaluated: enough to tell, and soon done."""


def run(
    request: TrainRequest | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
    **asked: Any,  # noqa: ANN401 - the fields of TrainRequest, checked there
) -> RunRecord:
    """Train. Either a request, or its fields as keywords: `train.run(model="gpt2", steps=10)`."""
    if request is not None and asked:
        raise FlopwiseError("both a request and keywords were given", hint="one of them")
    wanted = request or _requested(asked)
    listeners = _Listeners([*callbacks, *(LoggerCallback(logger) for logger in loggers)])
    rank = rank_of(os.environ)
    if wanted.devices > 1 and rank.world != wanted.devices:
        raise FlopwiseError(
            f"{wanted.devices} devices were asked for, and {rank.world} rank{'s' if rank.world > 1 else ''} run",
            hint=f"`flopwise train --gpus {wanted.devices}` starts them, or torchrun --nproc-per-node {wanted.devices}",
        )
    group: AbstractContextManager[object] = rank_group(rank, wanted.device) if rank.world > 1 else nullcontext()
    with group:
        return _Run(wanted, rank, listeners).go()


def _requested(asked: dict[str, Any]) -> TrainRequest:
    known = TrainRequest.__dataclass_fields__
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise FlopwiseError(f"train.run has no {unknown[0]}", why=f"it has {', '.join(known)}", hint="check the name")
    return TrainRequest(**asked)


class _Listeners(Callback):
    """All callbacks as one."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks

    def on_start(self, started: Started) -> None:
        for callback in self.callbacks:
            callback.on_start(started)

    def on_progress(self, what: str, done: int, of: int) -> None:
        for callback in self.callbacks:
            callback.on_progress(what, done, of)

    def on_step(self, record: StepRecord) -> None:
        for callback in self.callbacks:
            callback.on_step(record)

    def on_checkpoint(self, saved: Path) -> None:
        for callback in self.callbacks:
            callback.on_checkpoint(saved)

    def on_note(self, note: str) -> None:
        for callback in self.callbacks:
            callback.on_note(note)

    def on_end(self, record: RunRecord) -> None:
        for callback in self.callbacks:
            callback.on_end(record)


@dataclass(slots=True)
class _Resumed:
    """A run that is gone on with."""

    folder: Path
    record: RunRecord
    plan: Any
    checkpoint: Path | None


class _Run:
    """A training in its folder."""

    def __init__(self, request: TrainRequest, rank: Rank, listeners: _Listeners) -> None:
        self.rank, self.listeners = rank, listeners
        self.writes = rank.rank == 0
        self.resumed = self._resumed(request) if request.resume else None
        self.request = request if self.resumed is None else _merged(self.resumed.record, request)

    def go(self) -> RunRecord:
        prepared = prepare(
            self.request,
            ranks=self.rank.world,
            plan=self.resumed.plan if self.resumed else None,
            tell=self.listeners.on_progress,
        )
        executor = self._executor(prepared)
        try:
            progress = self._begin(executor, prepared)
            folder = self._folder()
            record = self._record(prepared, folder, progress)
            if self.writes:
                write_whole(folder / PLAN, to_toml(plan_table(prepared.plan, prepared.model)))
                write_record(folder, record)
            return self._train(executor, prepared, folder, record, progress)
        finally:
            executor.close()

    # -- before the first step ------------------------------------------------------------------------------------

    def _resumed(self, request: TrainRequest) -> _Resumed:
        assert request.resume is not None
        folder = find_run(store_folder(request.store), request.resume)
        record = read_record(folder)
        found = checkpoint.latest(folder)
        for passed in checkpoint.checkpoints(folder):
            if passed.problem:
                self.listeners.on_note(f"{passed.path.name} is passed over: {passed.problem}")
        return _Resumed(folder, record, load_plan(folder / PLAN), found)

    def _executor(self, prepared: Prepared) -> Executor:
        plan, model = prepared.plan, prepared.model
        program = compile_plan(plan, model) if isinstance(plan, Plan) else None
        return build_executor(
            plan, program, model, prepared.training,
            device=prepared.device, rank=self.rank, deterministic=self.request.deterministic,
        )  # fmt: skip

    def _begin(self, executor: Executor, prepared: Prepared) -> Progress:
        """First numbers, or those of a checkpoint."""
        model, tokens = prepared.model, prepared.plan.sequence_tokens
        executor.clear_moments()
        if self.resumed is None or self.resumed.checkpoint is None:
            if self.resumed is not None:
                self.listeners.on_note("the run has no checkpoint yet: it begins anew")
            missing = first_weights(executor, model, prepared.training.seed, prepared.weights, tokens)
            if missing:
                self.listeners.on_note(f"drawn anew, since the weights have none: {', '.join(missing[:4])}")
            return Progress()
        loaded = checkpoint.load(self.resumed.checkpoint)
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
        progress = restore(executor, loaded, model)
        if progress.step >= prepared.training.steps:
            raise FlopwiseError(
                f"run {self.resumed.folder.name} has done its {progress.step:,} steps",
                hint=f"--steps {2 * progress.step} to go on",
            )
        return progress

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
            batch_sequences=prepared.promise.batch_sequences,
            sequence_tokens=prepared.plan.sequence_tokens,
            totals={},
            files={},
        )

    def _record(self, prepared: Prepared, folder: Path, progress: Progress) -> RunRecord:
        now = _now()
        facts = {name: str(value) for name, value in environment().items() if value is not None}
        record = RunRecord(
            id=folder.name,
            state="running",
            started=self.resumed.record.started if self.resumed else now,
            model=model_table(prepared.model),
            task=prepared.training.task,
            training=prepared.training,
            plan=plain(prepared.plan),
            data=prepared.data.describe(),
            environment={**facts, **device_facts(prepared.device), **_commit()},
            steps_done=progress.step,
            request=_as_written(self.request),
            resumed_from=None,
        )
        if self.resumed is not None and self.resumed.checkpoint is not None:
            record = replace(record, resumed_from=f"{CHECKPOINTS}/{self.resumed.checkpoint.name}")
            if self.writes:
                trim_steps(folder, progress.step)
                checkpoint.drop_later(folder, progress.step)
        elif self.resumed is not None and self.writes:
            trim_steps(folder, 0)
        return record

    # -- the steps ------------------------------------------------------------------------------------------------

    def _train(
        self, executor: Executor, prepared: Prepared, folder: Path, record: RunRecord, progress: Progress
    ) -> RunRecord:
        loop = Loop(
            executor, prepared.data, prepared.model, prepared.training, self._settings(prepared, folder),
            on_step=self.listeners.on_step, on_checkpoint=self.listeners.on_checkpoint,
        )  # fmt: skip
        self.listeners.on_start(self._started(prepared, folder, progress))
        with Stop() as stop:
            try:
                outcome = loop.run(progress, stop)
            except FlopwiseError as error:
                self._ended(folder, replace(record, reason=error.what), "failed", loop)
                raise
            except BaseException as error:
                self._ended(folder, replace(record, reason=repr(error)), "failed", loop)
                raise
        if self.resumed is not None and self.writes:
            earlier = tuple(step for step in read_steps(folder) if step.step <= progress.step)
            outcome = replace(outcome, steps=(*earlier, *outcome.steps))
        if outcome.stopped_by:
            self.listeners.on_note(f"stopped by {outcome.stopped_by} after step {outcome.progress.step}, and saved")
        record = replace(
            record,
            steps_done=outcome.progress.step,
            reason=outcome.stopped_by,
            measurement=self._measured(executor, prepared, outcome),
            metrics=self._metrics(prepared, outcome),
        )
        return self._ended(folder, record, "interrupted" if outcome.stopped_by else "done", loop)

    def _ended(self, folder: Path, record: RunRecord, state: RunState, loop: Loop) -> RunRecord:
        saved = f"{CHECKPOINTS}/{loop.saved.name}" if loop.saved else record.resumed_from
        record = replace(record, state=state, ended=_now(), checkpoint=saved)
        if self.writes:
            write_record(folder, record)
            if state != "failed":
                self.listeners.on_end(record)
        return record

    def _settings(self, prepared: Prepared, folder: Path) -> LoopSettings:
        plan, promise = prepared.plan, prepared.promise
        work = describe(prepared.model, plan.sequence_tokens)
        language = prepared.training.task == "language"
        return LoopSettings(
            folder=folder,
            batch_sequences=promise.batch_sequences,
            evaluation_sequences=LANGUAGE_EVALUATION_SEQUENCES if language else None,
            checkpoint_every=self.request.checkpoint_every,
            keep_checkpoints=self.request.keep_checkpoints,
            evaluate_every=self.request.evaluate_every,
            writes=self.writes,
            flops_per_sequence=work.model_flops("causal"),
            peak_flops=promise.peak_flops,
            predicted_step_s=promise.step_s,
            template=self._template(prepared),
        )

    def _started(self, prepared: Prepared, folder: Path, progress: Progress) -> Started:
        promise, plan = prepared.promise, prepared.plan
        return Started(
            folder=folder,
            run=folder.name,
            model=prepared.model.name,
            hardware=prepared.hardware.title,
            training=prepared.training,
            first_step=progress.step,
            batch_sequences=promise.batch_sequences,
            batch_tokens=promise.batch_sequences * plan.sequence_tokens,
            sequence_tokens=plan.sequence_tokens,
            devices=self.rank.world,
            predicted_step_s=promise.step_s,
            predicted_tokens_per_s=promise.tokens_per_s,
            planned_device_bytes=promise.device_bytes,
            planned_host_bytes=promise.host_bytes,
            checks=prepared.checks,
            notes=prepared.notes,
        )

    # -- what it took ---------------------------------------------------------------------------------------------

    def _measured(self, executor: Executor, prepared: Prepared, outcome: Outcome) -> Measurement | None:
        steps = outcome.steps
        if not steps:
            return None
        timed = steps[WARM_UP_STEPS:] if len(steps) > 2 * WARM_UP_STEPS else steps
        seconds = sorted(step.step_s for step in timed)
        rates = sorted(step.tokens_per_s for step in timed)
        plan, promise, model = prepared.plan, prepared.promise, prepared.model
        work = describe(model, plan.sequence_tokens)
        batch = promise.batch_sequences
        flops = batch * work.model_flops("causal")
        executed = promise.hardware_flops or flops
        step_s, peak = statistics.median(seconds), promise.peak_flops
        micro = plan.micro_batch_sequences if isinstance(plan, ClusterPlan) else plan.sequences_per_round
        return Measurement(
            model=model.name,
            hardware=prepared.hardware.name,
            devices=self.rank.world,
            sequence_tokens=plan.sequence_tokens,
            batch_sequences=batch,
            micro_batch_sequences=min(micro, batch),
            batch_tokens=batch * plan.sequence_tokens,
            precision=plan.precision,
            optimizer=plan.optimizer,
            n_params=work.parameters,
            steps=len(timed),
            step_s=step_s,
            step_s_p20=_share_of(seconds, 0.2),
            step_s_p80=_share_of(seconds, 0.8),
            tokens_per_s=statistics.median(rates),
            tokens_per_s_p20=_share_of(rates, 0.2),
            tokens_per_s_p80=_share_of(rates, 0.8),
            model_flops=flops,
            hardware_flops=executed,
            convention="causal",
            mfu=flops / (step_s * peak) if peak else None,
            hfu=executed / (step_s * peak) if peak and promise.hardware_flops else None,
            peak_flops=peak,
            peak_format=promise.peak_format,
            first_loss=steps[0].loss,
            last_loss=steps[-1].loss,
            memory=executor.memory(),
            predicted_step_s=promise.step_s,
            predicted_tokens_per_s=promise.tokens_per_s,
        )

    def _metrics(self, prepared: Prepared, outcome: Outcome) -> dict[str, float | str]:
        """The block that Hugging Face's trainer prints, its rates over all ranks."""
        totals, done = outcome.progress.totals, outcome.progress.step
        samples, seconds = totals.get("samples", 0.0), max(totals.get("seconds", 0.0), 1e-9)
        work = describe(prepared.model, prepared.plan.sequence_tokens)
        figures: dict[str, float | str] = {
            "epoch": samples / prepared.data.count,
            "total_flos": float(total_flos(work, int(samples))),
            "train_loss": totals.get("loss", 0.0) / max(1, done),
            "train_runtime": seconds,
            "train_samples": samples,
            "train_samples_per_second": samples / seconds,
            "train_steps_per_second": done / seconds,
        }
        return {**figures, **outcome.evaluation}


def _share_of(values: Sequence[float], share: float) -> float:
    """The value below which that share of sorted values lies, the nearest one."""
    return values[min(len(values) - 1, int(share * len(values)))]


def _merged(record: RunRecord, request: TrainRequest) -> TrainRequest:
    """The request of a run that is resumed; steps and what says when to save may be new."""
    kept = msgspec.convert(record.request, TrainRequest)
    changes: dict[str, Any] = {
        name: getattr(request, name)
        for name in ("steps", "epochs", "checkpoint_every", "evaluate_every")
        if getattr(request, name) is not None
    }
    if "steps" in changes:
        changes["epochs"] = None
    elif "epochs" in changes:
        changes["steps"] = None
    return replace(
        kept,
        **changes,
        devices=request.devices,
        resume=request.resume,
        store=request.store,
        keep_checkpoints=request.keep_checkpoints,
    )


def _as_written(request: TrainRequest) -> dict[str, Any]:
    """A request for the record: sources by their full path, so that it can be resumed from another folder."""
    table = asdict(replace(request, resume=None, store=None))
    for name in ("data", "evaluation_data"):
        table[name] = [str(Path(source).resolve()) for source in table[name]]
    for name in ("tokenizer", "weights"):
        if table[name]:
            table[name] = str(Path(table[name]).resolve())
    return {name: value for name, value in table.items() if value is not None}


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _commit() -> dict[str, str]:
    """The commit of flopwise itself, where it runs from a checkout."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": answer.stdout.strip()}
