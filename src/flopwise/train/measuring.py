"""What a training took: a `Measurement`, and the block of figures that Hugging Face's trainer prints."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from flopwise.predict.step import model_flops
from flopwise.records.measurement import Measurement, MemoryRow, StepRecord, measured_bytes
from flopwise.setup.written import words_of
from flopwise.store.statistics import LEAST_WARM_UP, warm_up_steps
from flopwise.train.loop import LoopEnd
from flopwise.train.preparing import Prepared
from flopwise.work.describe import describe
from flopwise.work.lengths import parse_lengths


def measure(
    prepared: Prepared,
    outcome: LoopEnd,
    memory: tuple[MemoryRow, ...],
    *,
    earlier: Sequence[StepRecord],
    ranks: int,
    slowed: range = range(0),
) -> Measurement | None:
    """The steps of this process; those of an `earlier` one, perhaps on another machine, tell the first loss alone.

    Steps that a profiler has `slowed` down are left out, unless there are hardly any others; so is the warm-up.
    """
    steps = outcome.steps
    if not steps:
        return None
    untraced = tuple(step for step in steps if step.step not in slowed)
    # Warm steps that were traced say more than the first one alone.
    chosen = untraced if len(untraced) > LEAST_WARM_UP else steps
    timed = chosen[warm_up_steps([step.step_s for step in chosen]) :]
    seconds = sorted(step.step_s for step in timed)
    rates = sorted(step.tokens_per_s for step in timed)
    shares = [step.mfu for step in timed if step.mfu is not None]
    plan, expected, model = prepared.plan, prepared.expected, prepared.model
    work = describe(model, plan.sequence_tokens)
    batch, flops = prepared.batch_sequences, outcome.model_flops // len(steps)
    mfu = statistics.median(shares) if shares else None
    lengths = parse_lengths(plan.lengths) if plan.lengths else None
    whole = model_flops(model, plan.sequence_tokens, lengths, batch, "causal")
    executed = None if expected.hardware_flops is None else expected.hardware_flops * flops // whole
    words = words_of(plan, "recompute") | {"model": model.name, "hardware": prepared.hardware.name, "devices": ranks}
    tokens, padded = sum(step.tokens for step in timed) / len(timed), batch * plan.sequence_tokens
    return Measurement(
        **words | {"batch_sequences": batch, "micro_batch_sequences": min(plan.micro_batch_sequences, batch)},
        batch_tokens=round(tokens),
        n_params=work.parameters,
        steps=len(timed),
        step_s=statistics.median(seconds),
        step_s_p20=_share_of(seconds, 0.2),
        step_s_p80=_share_of(seconds, 0.8),
        tokens_per_s=statistics.median(rates),
        padded_tokens_per_s=padded / statistics.median(seconds) if padded > tokens else None,
        tokens_per_s_p20=_share_of(rates, 0.2),
        tokens_per_s_p80=_share_of(rates, 0.8),
        model_flops=flops,
        hardware_flops=flops if executed is None else executed,
        convention="causal",
        mfu=mfu,
        hfu=None if mfu is None or executed is None else mfu * executed / flops,
        peak_flops=expected.peak_flops,
        peak_format=expected.peak_format,
        device_bytes=measured_bytes(memory, "device"),
        host_bytes=measured_bytes(memory, "host"),
        first_loss=(*earlier, *steps)[0].loss,
        last_loss=steps[-1].loss,
        memory=memory,
        predicted_step_s=expected.step_s,
        # Of the tokens that the steps had, which are not quite those of the mean batch.
        predicted_tokens_per_s=tokens / expected.step_s if expected.step_s else None,
    )


def metrics(prepared: Prepared, outcome: LoopEnd) -> dict[str, float | str]:
    """The trainer's block, its rates over all ranks; the runtime holds evaluations and checkpoints as its does."""
    totals, done = outcome.progress.totals, outcome.progress.step
    samples, seconds = totals.get("samples", 0.0), max(totals.get("seconds", 0.0), 1e-9)
    figures: dict[str, float | str] = {
        "epoch": samples / prepared.data.count,
        "total_flos": totals.get("flos", 0.0),
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


def commit() -> dict[str, str]:
    """The commit of flopwise itself, where it runs from a checkout that tracks it."""
    here = Path(__file__)
    if not _git(here.parent, "log", "-1", "--format=%H", "--", here.name).strip():
        return {}
    head = _git(here.parent, "rev-parse", "HEAD").strip()
    # What is not committed is code that nobody can get by that commit.
    changed = _git(here.parent, "status", "--porcelain", "--", str(here.parents[1])).strip()
    return {"commit": f"{head} with changes" if changed else head}


def _git(folder: Path, *words: str) -> str:
    """What git says, in a word or two; nothing where it cannot tell."""
    command = ["git", "-C", str(folder), *words]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout
