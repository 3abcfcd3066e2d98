"""The training loop: steps, evaluations, checkpoints, and an end that loses nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_json
from flopwise.engine.batch import Batch
from flopwise.engine.executor import Executor, Left, Rewards
from flopwise.engine.signals import Stop
from flopwise.engine.weights import checkpoint
from flopwise.engine.weights.adapter_files import Merged, from_peft, to_peft
from flopwise.engine.weights.checkpoint import CheckpointState
from flopwise.engine.weights.handed_on import config_to_save
from flopwise.engine.weights.huggingface import from_huggingface, has_class, to_huggingface
from flopwise.records.measurement import StepRecord
from flopwise.setup.training import Training
from flopwise.store.runs import StepLog
from flopwise.train.own_data import Data
from flopwise.work.formats import COPIES
from flopwise.work.transformer import Transformer

EVALUATION = "eval_loss"
"""The figure of an evaluation that tells whether it went well."""

LONG_STEP_S = 5.0
"""A step or an evaluation that takes longer is not waited for: what stops a container ends it 10 s after it has asked,
and the checkpoint has to be written by then."""

STOP = "stop"
"""What a callback says to end a training."""

BEST_LOSS, BEST_STEP, WITHOUT_GAIN = "best_eval_loss", "best_eval_step", "evaluations_without_gain"
"""What a checkpoint's running sums also hold: the best evaluation, and how many came since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """What a loop is told beside the training itself."""

    folder: Path
    batch_sequences: int
    checkpoints: bool
    """Whether there are any."""
    checkpoint_every: int | None
    keep_checkpoints: int
    evaluate_every: int | None
    patience: int | None
    """The training ends when so many evaluations in a row have brought nothing."""
    keep_best: bool
    """The checkpoint of the best evaluation is written at once, and stays."""
    writes: bool
    """Whether this process writes files: one of several ranks does."""
    model_flops: Callable[[int], int]
    """Of a sequence of so many tokens."""
    total_flos: Callable[[int], int]
    """The same as Hugging Face's trainer counts them."""
    peak_flops: float | None
    predicted_step_s: float | None
    template: CheckpointState
    """A checkpoint's state, but for what changes from step to step."""
    origin: dict[str, Any] | None
    """The config.json that the training began with."""
    handed_on: Mapping[str, bytes]
    """Files that every checkpoint holds beside its numbers: the tokenizer's."""
    end_token: int | None
    """Of the tokenizer, what ends a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a training has come."""

    step: int = 0
    position: int = 0
    totals: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopEnd:
    """How a loop ended."""

    progress: Progress
    steps: tuple[StepRecord, ...]
    stopped_by: str | None
    """The signal that it was asked by."""
    ended_early: str | None
    """Why it ended in good order before its last step."""
    evaluation: dict[str, float]
    checkpoint: Path | None
    model_flops: int
    """Of the steps, at the lengths that they had."""


class Watch(Protocol):
    """Looks at steps while they run: a profiler."""

    def around(self, step: int) -> AbstractContextManager[None]:
        """Entered while the step of that number (from 1) runs, its data loaded within."""


class Loop:
    """Trains until the last step, or until it is asked to stop."""

    def __init__(
        self,
        executor: Executor,
        data: Data,
        model: Transformer,
        training: Training,
        settings: LoopSettings,
        *,
        on_step: Callable[[StepRecord], str | None],
        on_checkpoint: Callable[[Path], None],
        watch: Watch | None = None,
    ) -> None:
        self.executor, self.data, self.model, self.training, self.settings = executor, data, model, training, settings
        self.on_step, self.on_checkpoint, self.watch = on_step, on_checkpoint, watch
        self.saved: Path | None = None
        """The last checkpoint that is good."""
        self.progress = Progress()
        self.flops = 0
        self._last_step_s = 0.0
        self._mark = time.perf_counter()

    @property
    def best(self) -> Path | None:
        """The checkpoint of the best evaluation, where it is kept."""
        step = self.progress.totals.get(BEST_STEP)
        return checkpoint.path_of(self.settings.folder, int(step)) if self.settings.keep_best and step else None

    def run(self, begin: Progress, stop: Stop) -> LoopEnd:
        """From where it stands to the end."""
        progress, evaluation = begin, dict[str, float]()
        records: list[StepRecord] = []
        self._mark = time.perf_counter()
        log = StepLog(self.settings.folder) if self.settings.writes else None
        stopped: str | None = None
        early: str | None = None
        try:
            while progress.step < self.training.steps and stopped is None and early is None:
                try:
                    progress, record = self._step(progress, stop)
                except Left:
                    stopped = stop.asked
                    if records and self.settings.checkpoints:
                        self._save_once(progress, records[-1].evaluation)
                    break
                better = False
                if self.executor.agree(stop.asked is not None):
                    stopped = stop.asked or "another rank"
                last = progress.step == self.training.steps
                if last:
                    # There is nothing to go on with: it ends as if nobody had asked.
                    stopped = None
                bad = _not_finite(record)
                if not bad and not stopped and (last or _due(progress.step, self.settings.evaluate_every)):
                    try:
                        evaluation = self.evaluate(stop)
                        record = replace(record, evaluation=evaluation or None)
                        progress, better, early = self._judge(progress, evaluation)
                    except Left:
                        # Also behind the last step: who goes on with it, evaluates then.
                        stopped = stop.asked or "another rank"
                if log:
                    log.append(record)
                records.append(record)
                wants_end = self.executor.agree(self.on_step(record) == STOP)
                if bad:
                    raise self._diverged(bad)
                early = _why_early(early, wants_end) if not last and stopped is None else None
                self._leave(progress, record, ends=last or stopped is not None or early is not None, better=better)
        finally:
            if log:
                log.close()
        if not records and stopped is None:
            evaluation = self.evaluate()
            self._check_evaluation(progress.step, evaluation)
        return LoopEnd(
            progress=progress,
            steps=tuple(records),
            stopped_by=stopped,
            ended_early=early,
            evaluation=evaluation,
            checkpoint=self.saved,
            model_flops=self.flops,
        )

    def _step(self, progress: Progress, stop: Stop) -> tuple[Progress, StepRecord]:
        settings = self.settings
        expected_s = max(settings.predicted_step_s or 0.0, self._last_step_s)
        with self.watch.around(progress.step + 1) if self.watch else nullcontext():
            begun = time.perf_counter()
            batch = self.data.batch(progress.position, settings.batch_sequences)

            def leaves() -> bool:
                return stop.asked is not None and max(expected_s, time.perf_counter() - begun) > LONG_STEP_S

            result = self.executor.step(batch, progress.step, leaves=leaves)
            self._last_step_s = took_s = time.perf_counter() - begun
        peak, width = settings.peak_flops, int(batch.ids.shape[1])
        # Padding is nothing that a model is asked to compute.
        flops = sum(count * settings.model_flops(tokens) for tokens, count in batch.lengths_counted())
        self.flops += flops
        # With what came between this step and the one before: an evaluation, a checkpoint.
        mark = time.perf_counter()
        passed_s, self._mark = mark - self._mark, mark
        done = self.progress = Progress(
            step=progress.step + 1,
            position=progress.position + batch.sequences,
            totals=progress.totals
            | _add_up(
                progress.totals,
                loss=result.loss,
                seconds=passed_s,
                samples=batch.sequences,
                tokens=batch.tokens,
                flos=batch.sequences * settings.total_flos(width),
            ),
        )
        memory = self.executor.memory()
        return done, StepRecord(
            step=done.step,
            loss=result.loss,
            learning_rate=self.training.rate_at(progress.step),
            step_s=took_s,
            tokens=batch.tokens,
            samples=batch.sequences,
            tokens_per_s=batch.tokens / took_s,
            mfu=flops / (took_s * peak) if peak else None,
            gradient_norm=result.gradient_norm,
            predicted_s=settings.predicted_step_s,
            exposed_copy_s=result.waited_s,
            rewards=None if result.rewards is None else _reward_figures(result.rewards),
            routing=None if result.routing is None else asdict(result.routing),
            device_bytes=sum(row.measured_bytes for row in memory if row.place == "device") or None,
            host_bytes=sum(row.measured_bytes for row in memory if row.place == "host") or None,
        )

    def _leave(self, progress: Progress, record: StepRecord, *, ends: bool, better: bool) -> None:
        """What a step leaves on the disk, where it ends the training, was the best so far, or a checkpoint is due."""
        due = _due(progress.step, self.settings.checkpoint_every) or (better and self.settings.keep_best)
        if self.settings.checkpoints and (ends or due):
            self.save(progress, record.evaluation)
        elif ends:
            self._check_numbers(progress.step, self.executor.not_finite())
        self._check_evaluation(progress.step, record.evaluation)

    def _judge(self, progress: Progress, figures: dict[str, float]) -> tuple[Progress, bool, str | None]:
        """After an evaluation: what is remembered of it, whether it is the best, and why to end here, if at all."""
        if EVALUATION not in figures or _is_bad(figures):
            return progress, False, None
        totals, loss, patience = progress.totals, figures[EVALUATION], self.settings.patience
        better = loss < totals.get(BEST_LOSS, math.inf)
        if better:
            totals = totals | {BEST_LOSS: loss, BEST_STEP: float(progress.step), WITHOUT_GAIN: 0.0}
        else:
            totals = totals | {WITHOUT_GAIN: totals.get(WITHOUT_GAIN, 0.0) + 1}
        self.progress = replace(progress, totals=totals)
        early = None
        if patience is not None and totals[WITHOUT_GAIN] >= patience:
            early = f"no evaluation was better than that after step {totals[BEST_STEP]:.0f}, {patience} in a row"
        return self.progress, better, early

    def _check_numbers(self, step: int, bad: tuple[str, ...]) -> None:
        """End where numbers are not finite on any rank: the loss of a step does not know yet what its update did."""
        if self.executor.agree(bool(bad)):
            what = "optimizer state" if bad and "/" in bad[0] else "weights"
            raise self._diverged(f"{what} after step {step} are not finite", *bad[:1])

    def _check_evaluation(self, step: int, figures: dict[str, float] | None) -> None:
        if figures is not None and _is_bad(figures):
            raise self._diverged(f"the evaluation after step {step} has a loss of {figures[EVALUATION]}")

    def _diverged(self, what: str, *places: str) -> FlopwiseError:
        """The same on all ranks, but for the place of a checkpoint, which only the one that writes knows."""
        found = "".join(f", first in {place}" for place in places)
        hint = f"--learning-rate {self.training.learning_rate / 3:.2g}"
        if self.training.clip_norm is None:
            hint += ", or --clip 1.0"
        if self.saved is None:
            kept = "there is no good checkpoint yet"
        else:
            kept = f"the last good checkpoint is {self.saved.name}"
            if self.settings.writes:
                hint += f", in a new run with --weights {self.saved}; --resume goes on from there with nothing changed"
        return FlopwiseError(what, why=f"the training has diverged{found}; {kept}", hint=hint)

    def evaluate(self, stop: Stop | None = None) -> dict[str, float]:
        """The held-out data, under the names that the trainer's logs have; nothing where none was held out.

        Once `stop` is asked, one that is long is `Left` behind the batch in flight.
        """
        begun = time.perf_counter()
        sequences = self.settings.batch_sequences
        batches = self.data.evaluation(sequences)
        counted, left = 0, False

        def chosen() -> Iterator[Batch]:
            nonlocal counted, left
            for batch in batches:
                long = time.perf_counter() - begun > LONG_STEP_S
                left = stop is not None and self.executor.agree(stop.asked is not None and long)
                if left:
                    return
                counted += 1
                yield batch

        found = self.executor.evaluate(chosen())
        if left:
            raise Left
        if not found.sequences:
            return {}
        took_s = max(time.perf_counter() - begun, 1e-9)
        figures = {
            EVALUATION: found.loss,
            "eval_accuracy": found.correct / max(1, found.with_loss),
            "eval_runtime": took_s,
            "eval_samples": float(found.sequences),
            "eval_samples_per_second": found.sequences / took_s,
            "eval_steps_per_second": counted / took_s,
        }
        if found.rewards is not None:
            rewards = _reward_figures(found.rewards)
            # `eval_accuracy` says already how often the better answer gained more.
            figures |= {f"eval_rewards_{name}": value for name, value in rewards.items() if name != "accuracy"}
        if self.training.task in ("language", "masked"):
            figures["eval_perplexity"] = math.exp(min(found.loss, 700.0))
        return figures

    def _save_once(self, progress: Progress, evaluation: dict[str, float] | None) -> None:
        """Unless the step before has left it already."""
        if self.saved != checkpoint.path_of(self.settings.folder, progress.step):
            self.save(progress, evaluation)

    def save(self, progress: Progress, evaluation: dict[str, float] | None = None) -> None:
        """A checkpoint of now. Every rank takes part, one writes; all end where its numbers are not finite."""
        weights = self.executor.weights()
        if self.model.frozen is not None and self.model.adapters is None:
            weights |= dict(self.executor.frozen_weights())
        optimizer = {f"{moment}/{name}": values for name, moment, values in self.executor.moments()}
        bad = self._write(progress, weights, optimizer, evaluation) if self.settings.writes else ()
        self._check_numbers(progress.step, bad)
        if _is_bad(evaluation):
            return
        self.saved = checkpoint.path_of(self.settings.folder, progress.step)
        if self.settings.writes:
            self.on_checkpoint(self.saved)

    def save_averaged(self, target: Path) -> Path:
        """The whole model with its trained weights' means in their place. Every rank takes part, one writes."""
        weights, frozen = self.executor.weights(), self.executor.frozen_weights()
        for name, moment, values in self.executor.moments():
            if moment == "average":
                weights[name] = values.to(weights[name].dtype, copy=True)
        if not self.settings.writes:
            return target
        if self.model.adapters is not None:
            return self._save_model(target, Merged(self.model, weights, frozen))
        if self.model.frozen is not None:
            weights |= dict(frozen)
        has_config = self._config(self.model, "float32") is not None
        return self._save_model(target, to_huggingface(self.model, weights) if has_config else weights)

    def save_merged(self, target: Path) -> Path:
        """The whole model with its adapters merged into it, as transformers reads it. Every rank takes part."""
        weights, frozen = self.executor.weights(), self.executor.frozen_weights()
        return self._save_model(target, Merged(self.model, weights, frozen)) if self.settings.writes else target

    def _save_model(self, target: Path, weights: Mapping[str, Tensor]) -> Path:
        config = self._config(replace(self.model, adapters=None), str(next(iter(weights.values())).dtype))
        texts = {name: text for name, text in self.settings.handed_on.items() if name != checkpoint.ADAPTER_CONFIG}
        if config is not None:
            texts[checkpoint.CONFIG] = to_json(config).encode() + b"\n"
        return checkpoint.save_model(target, weights=weights, texts=texts)

    def _config(self, model: Transformer, dtype: str) -> dict[str, Any] | None:
        template = self.settings.template
        return config_to_save(
            model,
            template.sequence_tokens,
            origin=self.settings.origin,
            labels=tuple(template.data.get("labels", ())),
            dtype=dtype.removeprefix("torch."),
            end=self.settings.end_token,
        )

    def _write(
        self,
        progress: Progress,
        weights: dict[str, Tensor],
        optimizer: dict[str, Tensor],
        evaluation: dict[str, float] | None,
    ) -> tuple[str, ...]:
        """Save, and tell which tensors are not finite."""
        template = self.settings.template
        state = replace(
            template,
            step=progress.step,
            position=progress.position,
            totals=dict(progress.totals),
            not_finite=(EVALUATION,) if _is_bad(evaluation) else (),
        )
        config = self._config(self.model, str(next(iter(weights.values())).dtype))
        if self.model.adapters is not None:
            # A configuration beside adapters would pass for that of a whole model.
            config, weights = None, to_peft(self.model, weights)
        elif config is not None:
            weights = to_huggingface(self.model, weights)
        saved = checkpoint.save(
            self.settings.folder,
            weights=weights,
            optimizer=optimizer,
            state=state,
            config=config,
            handed_on=self.settings.handed_on,
            keep=self.settings.keep_checkpoints,
            best=int(progress.totals.get(BEST_STEP, 0)) if self.settings.keep_best else None,
        )
        return tuple(name for name in checkpoint.read_state(saved).not_finite if name != EVALUATION)


def restore(executor: Executor, loaded: checkpoint.Loaded, model: Transformer) -> Progress:
    """Bring a checkpoint's numbers into an executor."""
    tokens = loaded.state.sequence_tokens
    if model.adapters is not None:
        executor.set_weights(from_peft(model, loaded.weights))
    elif not has_class(model):
        executor.set_weights(loaded.weights)
    else:
        executor.set_weights(from_huggingface(model, loaded.weights, tokens).tensors)
    for parameter, kept in executor.remembered():
        name = f"{kept.name}/{parameter.name}"
        if name in loaded.optimizer:
            executor.set_moment(parameter.name, kept.name, loaded.optimizer[name])
        elif kept.name not in COPIES:
            raise FlopwiseError(f"the checkpoint has no {name}", hint="resume from another checkpoint")
    state = loaded.state
    return Progress(step=state.step, position=state.position, totals=dict(state.totals))


def _reward_figures(rewards: Rewards) -> dict[str, float]:
    """Under the names that they have in logs."""
    return {
        "chosen": rewards.chosen,
        "rejected": rewards.rejected,
        "margin": rewards.margin,
        "accuracy": rewards.accuracy,
    }


def _is_bad(figures: dict[str, float] | None) -> bool:
    """Whether there was an evaluation, and its loss is not finite."""
    return figures is not None and EVALUATION in figures and not math.isfinite(figures[EVALUATION])


def _not_finite(record: StepRecord) -> str:
    """What of a step is not finite, in words; empty where all is well."""
    if not math.isfinite(record.loss):
        return f"the loss of step {record.step} is {record.loss}"
    # Gradients were scaled by it. That was the last update of any use, and has mostly made every weight NaN.
    if record.gradient_norm is not None and not math.isfinite(record.gradient_norm):
        return f"the norm of the gradients of step {record.step} is {record.gradient_norm}"
    return ""


def _why_early(found: str | None, wants_end: bool) -> str | None:
    """Why a training ends before its last step; None: it does not."""
    return "a callback has ended it" if wants_end else found


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _add_up(totals: dict[str, float], **more: float) -> dict[str, float]:
    return {name: totals.get(name, 0.0) + value for name, value in more.items()}
