"""`flopwise train`: a training run, watched while it goes on, beside what was predicted for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import typer

from flopwise.cli import train_options as options
from flopwise.cli.options import (
    BatchOption,
    DeviceMemoryOption,
    MicroOption,
    SequenceOption,
    counted,
    is_given,
    one_of,
    value_of,
)
from flopwise.cli.output import show

if TYPE_CHECKING:
    from flopwise.records.measurement import RunRecord
    from flopwise.train.request import TrainRequest

PACKAGES = ("torch", "safetensors", "tokenizers")
"""What the extra `train` brings."""


def train(
    context: typer.Context,
    model: options.ModelArgument = "",
    data: options.DataOption = None,
    eval_data: options.EvaluationDataOption = None,
    tokenizer: options.TokenizerOption = "",
    task: options.TaskOption = "auto",
    text_column: options.TextColumnOption = "text",
    label_column: options.LabelColumnOption = "label",
    padding: options.PaddingOption = "length",
    steps: options.StepsOption = "auto",
    epochs: options.EpochsOption = "auto",
    seq: SequenceOption = "auto",
    batch: BatchOption = "auto",
    micro: MicroOption = "auto",
    precision: options.PrecisionOption = "auto",
    learning_rate: options.LearningRateOption = "auto",
    warmup: options.WarmupOption = "auto",
    schedule: options.ScheduleOption = "auto",
    weight_decay: options.WeightDecayOption = "auto",
    beta1: options.Beta1Option = "auto",
    beta2: options.Beta2Option = "auto",
    clip: options.ClipOption = "auto",
    stochastic_rounding: options.StochasticRoundingOption = False,
    seed: options.SeedOption = "0",
    device_mem: DeviceMemoryOption = "auto",
    host_mem: options.HostMemoryOption = "auto",
    device: options.DeviceOption = "auto",
    on: options.OnOption = "",
    gpus: options.DevicesOption = "auto",
    weights: options.WeightsOption = "",
    from_scratch: options.FromScratchOption = False,
    anywhere: options.AnywhereOption = False,
    deterministic: options.DeterministicOption = False,
    checkpoint_every: options.CheckpointEveryOption = "auto",
    no_checkpoint: options.NoCheckpointOption = False,
    keep: options.KeepOption = "2",
    evaluate_every: options.EvaluateEveryOption = "auto",
    profile: options.ProfileOption = False,
    profile_steps: options.ProfileStepsOption = "auto",
    store: options.StoreOption = "",
    resume: options.ResumeOption = "",
    output: options.OutputOption = "table",
) -> None:
    """Train a model, measured beside what was predicted.

    Without arguments: a small Llama on the sources of Python's library, in about a minute.
    """
    words = dict(locals())
    _join_launcher()
    form = one_of(output, ("table", "json"), "--output")
    with _failures_told(store):
        request = train_request(context, words)
        check_packages()
        _spawn_ranks(request)
        record = _run(request)
    if _speaks():
        _print(record, form, request.store)
    _end(exit_code(record))


@contextmanager
def _failures_told(store: str) -> Iterator[None]:
    """Where a sweep has begun this process, it is told why it fails."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        from flopwise.store.runs import store_folder
        from flopwise.train.failures import tell_failure

        tell_failure(store_folder(store), error)
        raise


# -- from words to a request -----------------------------------------------------------------------------------------

RESUME_LEAVES_OPEN = (
    *("resume", "steps", "epochs", "checkpoint_every", "keep", "evaluate_every", "store", "output", "gpus", "profile"),
    *("profile_steps", "on", "anywhere"),
)
PLAN_SAYS = ("seq", "micro", "precision", "device_mem", "host_mem")


def train_request(context: typer.Context, words: dict[str, Any]) -> TrainRequest:
    """What was typed, checked as far as that needs neither data nor device; `auto` leaves a choice to flopwise."""
    from flopwise.base.errors import FlopwiseError
    from flopwise.base.units import parse_sequences, parse_tokens
    from flopwise.train.request import TrainRequest

    for name in ("resume", "weights", "on", "store", "tokenizer"):
        if is_given(context, name) and not words[name].strip():
            raise FlopwiseError(f"--{name} is empty", why="a variable was not set?", hint=f"leave --{name} out")
    devices = value_of(words, "gpus", counted(1, "--gpus 8"))
    request = TrainRequest(
        model=words["model"] or None,
        data=tuple(words["data"] or ()),
        evaluation_data=tuple(words["eval_data"] or ()),
        tokenizer=words["tokenizer"] or None,
        text_column=words["text_column"],
        label_column=words["label_column"],
        padding=one_of(words["padding"], ("length", "longest"), "--padding"),
        steps=value_of(words, "steps", counted(1, "--steps 100")),
        epochs=value_of(words, "epochs", _number("--epochs 3")),
        sequence_tokens=value_of(words, "seq", parse_tokens),
        batch_sequences=value_of(words, "batch", parse_sequences),
        micro_batch_sequences=value_of(words, "micro", parse_sequences),
        precision=value_of(words, "precision", _precision),
        **_settings(words),
        device_memory_bytes=value_of(words, "device_mem", _memory("device")),
        host_memory_bytes=value_of(words, "host_mem", _memory("host")),
        device=one_of(words["device"], ("auto", "cpu", "cuda"), "--device"),
        on=words["on"] or None,
        devices=devices or 1,
        from_scratch=words["from_scratch"],
        weights=words["weights"] or None,
        anywhere=words["anywhere"],
        deterministic=words["deterministic"],
        checkpoint_every=value_of(words, "checkpoint_every", counted(1, "--checkpoint-every 100")),
        checkpoint=not words["no_checkpoint"],
        keep_checkpoints=value_of(words, "keep", counted(1, "--keep 2")) or TrainRequest().keep_checkpoints,
        evaluate_every=value_of(words, "evaluate_every", counted(1, "--evaluate-every 100")),
        profile=words["profile"] or is_given(context, "profile_steps"),
        profile_steps=value_of(words, "profile_steps", counted(1, "--profile-steps 3")),
        store=words["store"] or None,
        resume=words["resume"] or None,
    )
    _check(context, request)
    settled = _with_devices(context, request)
    if settled.devices > 1:
        _check_several(settled)
    return settled


def _settings(words: dict[str, Any]) -> dict[str, Any]:
    """Those of the optimizer, which check themselves."""
    from dataclasses import asdict

    from flopwise.setup.training import SCHEDULES, TASKS, Training

    task = one_of(words["task"], ("auto", *TASKS), "--task")
    schedule = one_of(words["schedule"], ("auto", *SCHEDULES), "--schedule")
    given = {
        "task": None if task == "auto" else task,
        "learning_rate": value_of(words, "learning_rate", _number("--learning-rate 3e-4")),
        "warmup_steps": value_of(words, "warmup", counted(0, "--warmup 10")),
        "schedule": None if schedule == "auto" else schedule,
        "weight_decay": value_of(words, "weight_decay", _number("--weight-decay 0.1")),
        "beta1": value_of(words, "beta1", _number("--beta1 0.9")),
        "beta2": value_of(words, "beta2", _number("--beta2 0.95")),
        "clip_norm": value_of(words, "clip", _number("--clip 1.0")),
        "stochastic_rounding": words["stochastic_rounding"],
        "seed": value_of(words, "seed", counted(0, "--seed 0")) or 0,
    }
    checked = asdict(Training(steps=1, **{name: value for name, value in given.items() if value is not None}))
    return {name: None if value is None else checked[name] for name, value in given.items()}


def _number(example: str) -> Callable[[str], float]:
    """Reads numbers that are not negative: 3e-4, 0.1."""
    from math import isfinite

    from flopwise.base.errors import FlopwiseError, shown

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not isfinite(number) or number < 0:
            raise FlopwiseError(
                f"cannot be {shown(text)}", why="a number that is not negative is expected", hint=example
            )
        return number

    return read


def _precision(text: str) -> str:
    """As typed, if it can be read."""
    from flopwise.work.formats import parse_formats

    parse_formats(text)
    return text


def _memory(place: Literal["device", "host"]) -> Callable[[str], int]:
    """Reads a cap."""
    from flopwise.base.units import check_cap, parse_bytes

    return lambda text: check_cap(parse_bytes(text), text, place)


def _check(context: typer.Context, request: TrainRequest) -> None:
    """Refuse what cannot be meant together."""
    from flopwise.base.errors import FlopwiseError

    if request.resume:
        _check_resume(context)
    if request.steps is not None and request.epochs is not None:
        raise FlopwiseError("--steps beside --epochs", why="each says how long it goes on", hint="one of them")
    if request.checkpoint_every is not None and not request.checkpoint:
        raise FlopwiseError(
            "--checkpoint-every beside --no-checkpoint", why="one wants checkpoints, the other none", hint="one of them"
        )
    if request.epochs == 0:
        raise FlopwiseError("--epochs: nothing is learned in 0 epochs", hint="--epochs 3")
    if request.weights and request.from_scratch:
        raise FlopwiseError(
            "--weights beside --from-scratch", why="they say where first weights come from", hint="one of them"
        )
    micro, batch = request.micro_batch_sequences, request.batch_sequences
    if micro is not None and batch is not None and micro > batch:
        raise FlopwiseError(
            f"--micro {micro:,} beside --batch {batch:,}",
            why="a micro-batch is a part of the batch",
            hint=f"--micro {batch}, or less",
        )


def _check_resume(context: typer.Context) -> None:
    from flopwise.base.errors import FlopwiseError

    given = [name for name in context.params if name not in RESUME_LEAVES_OPEN and is_given(context, name)]
    if given:
        name = given[0]
        told = f"the model {context.params[name]}" if name == "model" else _option(name)
        raise FlopwiseError(
            f"{told} beside --resume",
            why="the run that is resumed says it",
            hint=f"--resume alone; it leaves open {', '.join(map(_option, RESUME_LEAVES_OPEN[1:]))}",
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_devices(context: typer.Context, request: TrainRequest) -> TrainRequest:
    """The request with as many devices as its plan, or the run that it resumes, is for; and nothing beside a plan."""
    from dataclasses import replace
    from pathlib import Path

    from flopwise.base.errors import FlopwiseError
    from flopwise.catalog.load import is_plan, load_plan
    from flopwise.records.cluster_plan import ClusterPlan
    from flopwise.store.runs import find_run, read_record, store_folder

    if request.resume and is_given(context, "gpus"):
        return request
    if request.resume:
        run = read_record(find_run(store_folder(request.store), request.resume))
        planned = run.plan.get("devices")
        return replace(request, devices=planned if isinstance(planned, int) and planned > 1 else 1)
    if request.model is None or not is_plan(request.model):
        return request
    plan, _ = load_plan(Path(request.model))
    devices = plan.devices if isinstance(plan, ClusterPlan) else 1
    said = [name for name in (*PLAN_SAYS, *(("batch",) if devices > 1 else ())) if is_given(context, name)]
    if said:
        raise FlopwiseError(
            f"{_option(said[0])} beside {request.model}",
            why="the plan says it",
            hint=f"the plan alone, or `flopwise plan … {_option(said[0])} … -w plan.toml` for another one",
        )
    if is_given(context, "gpus") and request.devices != devices:
        raise FlopwiseError(
            f"--gpus {request.devices} beside a plan for {devices}",
            why="what each device holds follows from how many there are",
            hint=f"--gpus {devices}, or `flopwise plan … --gpus {request.devices} -w plan.toml`",
        )
    return replace(request, devices=devices)


def _check_several(request: TrainRequest) -> None:
    """Refuse formats that several devices do not train in, before a process is started for each of them."""
    from pathlib import Path

    from flopwise.catalog.load import is_plan, load_plan
    from flopwise.engine.executable import check_several
    from flopwise.store.runs import find_run, read_record, store_folder
    from flopwise.work.formats import parse_formats

    if request.resume:
        precision = read_record(find_run(store_folder(request.store), request.resume)).plan.get("precision")
        if isinstance(precision, str):
            check_several(parse_formats(precision), "--gpus 1")
    elif request.model is not None and is_plan(request.model):
        hint = "`flopwise plan … --precision bf16 -w plan.toml`, or a plan with --gpus 1"
        check_several(parse_formats(load_plan(Path(request.model))[0].precision), hint)
    elif request.precision is not None:
        check_several(parse_formats(request.precision))


# -- running ---------------------------------------------------------------------------------------------------------


def check_packages() -> None:
    from importlib.util import find_spec

    from flopwise.base.errors import FlopwiseError

    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise FlopwiseError(
            f"training needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            hint="pip install 'flopwise[train]'",
        )


def _spawn_ranks(request: TrainRequest) -> None:
    """Where several devices are wanted and nobody has started processes for them, do so, and end as they end."""
    import os
    import sys

    from flopwise.engine.launch import rank_of
    from flopwise.engine.spawning import spawn
    from flopwise.train.launching import check_launch

    # A job of one task, as Slurm and torchrun have them too, is as good as none.
    if request.devices > 1 and rank_of(os.environ).world == 1:
        check_launch(request)
        raise typer.Exit(spawn(sys.argv[1:], request.devices))


def _join_launcher() -> None:
    """One of several processes that `flopwise train` has started does not outlive it."""
    import os

    from flopwise.engine.launch import SPAWNED, end_with_launcher

    if SPAWNED in os.environ:
        end_with_launcher()


def exit_code(record: RunRecord) -> int:
    """0 for a training that is done; for one that was asked to end, what a shell makes of that signal."""
    import signal

    if record.state != "interrupted":
        return 0
    # Another rank was asked, and has not said by what.
    known = {number.name: number for number in signal.Signals}
    return 128 + known.get(record.reason or "", signal.SIGTERM)


def _end(code: int) -> None:
    """Of several processes each ends here, and at once."""
    import os

    from flopwise.engine.launch import leave, rank_of

    if rank_of(os.environ).world > 1:
        leave(code)
    if code:
        raise typer.Exit(code)


def _speaks() -> bool:
    """Whether this is the one process, or the first of several."""
    import os

    from flopwise.engine.launch import rank_of

    return rank_of(os.environ).rank == 0


def _run(request: TrainRequest) -> RunRecord:
    """Train, and be watched at it where this process speaks."""
    from flopwise.cli.train_progress import watching

    _import_engine()
    from flopwise.train import run

    if not _speaks():
        return run(request)
    with watching() as callback:
        return run(request, callbacks=[callback])


def _import_engine() -> None:
    """Import what trains. An interrupt waits for the end of it: modules that are half imported cannot be left."""
    import importlib
    import signal
    import sys

    asked: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _frame: asked.append(number))
    try:
        importlib.import_module("flopwise.train.running")
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        sys.exit(130)


def _print(record: RunRecord, form: str, store: str | None) -> None:
    from flopwise.report.training import end_document

    show(end_document(record, store), record, form, schema="run")
