"""`flopwise train`: a training run, watched while it goes on, beside what was predicted for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from flopwise.base.errors import FlopwiseError, one_of, shown
from flopwise.base.units import parse_cap, parse_count, parse_sequences, parse_tokens, read_option, read_word
from flopwise.cli.options import parse_changes, takes_options, trained_words
from flopwise.cli.output import show
from flopwise.cli.train_options import TrainOptions

if TYPE_CHECKING:
    from flopwise.records.measurement import RunRecord
    from flopwise.train.request import TrainRequest

PACKAGES = ("torch", "safetensors", "tokenizers")
"""What the extra `train` brings."""


@takes_options
def train(options: TrainOptions) -> None:
    """Train a model, measured beside what was predicted.

    Without arguments: a small Llama on the sources of Python's library, in about a minute.
    """
    _join_launcher()
    form = one_of(options.output, ("table", "json"), "--output")
    with _telling_failures(options.store):
        request = make_request(options)
        check_packages()
        _check_request(request)
        _spawn_ranks(request)
        record = _run(request)
    if _speaks():
        _print(record, form, request.store)
    _end(exit_code(record))


@contextmanager
def _telling_failures(store: str) -> Iterator[None]:
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
    *("profile_steps", "on", "anywhere", "patience", "log"),
)
SETTINGS = (
    *("task", "learning_rate", "warmup_steps", "schedule", "min_learning_rate", "decay_share", "decay_shape"),
    *("weight_decay", "beta1", "beta2", "epsilon", "momentum", "clip_norm", "stochastic_rounding", "seed"),
    *("ema", "label_smoothing", "z_loss", "dpo_beta", "dpo_label_smoothing"),
)
"""Fields that the request has in common with the optimizer's settings."""
PLAN_SAYS = (
    *("seq", "micro", "precision", "optimizer", "device_mem", "host_mem"),
    *("lora", "lora_alpha", "lora_on", "rslora", "dora", "freeze", "base", "adapters"),
)


def _check_request(request: TrainRequest) -> None:
    """Before torch is imported: what is wrong with the model, with files or with the store is told at once."""
    import os

    from flopwise.catalog.load import is_plan
    from flopwise.engine.launch import rank_of
    from flopwise.train.data_checks import check_data, check_store
    from flopwise.train.trained_model import check_model

    check_model(request)
    check_data(request)
    if request.devices == 1 and request.model is not None and is_plan(request.model):
        from flopwise.train.launching import check_plan_device

        check_plan_device(request)
    if rank_of(os.environ).rank == 0:
        check_store(request)


def make_request(options: TrainOptions) -> TrainRequest:
    """What was typed, checked as far as that needs neither data nor device; `auto` leaves a choice to flopwise."""
    from flopwise.setup.training import DECAY_SHAPES, SCHEDULES, TASKS, parse_share, parse_warmup
    from flopwise.train.request import DATA_FORMATS, TrainRequest, check_request
    from flopwise.work.optimizers import OPTIMIZERS

    for name in ("resume", "weights", "on", "store", "tokenizer", "adapters"):
        if options.is_given(name) and not getattr(options, name).strip():  # spaces alone
            raise FlopwiseError(f"--{name} is empty", why="a variable was not set?", hint=f"leave --{name} out")
    if options.resume:
        _check_resume(options)
    devices = read_option(options.gpus, "gpus", parse_count(1, "--gpus 8"))
    trained = trained_words(options)
    request = TrainRequest(
        model=options.model or None,
        changes=parse_changes(options.change),
        data=tuple(options.data or ()),
        evaluation_data=tuple(options.eval_data or ()),
        tokenizer=options.tokenizer or None,
        text_column=options.text_column,
        label_column=options.label_column,
        train_on=one_of(options.train_on, ("answers", "all"), "--train-on"),
        data_format=read_word(options.data_format, DATA_FORMATS, "data-format"),
        mask_share=read_option(options.mask_share, "mask-share", parse_share),
        whole_words=options.whole_words,
        packing=not options.no_packing,
        stream_data=options.stream_data,
        padding=one_of(options.padding, ("length", "longest"), "--padding"),
        steps=read_option(options.steps, "steps", parse_count(1, "--steps 100")),
        epochs=read_option(options.epochs, "epochs", _parse_number("--epochs 3")),
        sequence_tokens=read_option(options.seq, "seq", parse_tokens),
        batch_sequences=read_option(options.batch, "batch", parse_sequences),
        micro_batch_sequences=read_option(options.micro, "micro", parse_sequences),
        precision=read_option(options.precision, "precision", _check_precision),
        optimizer=read_word(options.optimizer, OPTIMIZERS, "optimizer"),
        lora=trained.lora,
        lora_alpha=trained.lora_alpha,
        lora_on=trained.lora_on,
        rslora=trained.rslora,
        dora=trained.dora,
        freeze=trained.freeze,
        base=read_option(options.base, "base", str.lower),
        adapters=options.adapters or None,
        merge=options.merge,
        task=read_word(options.task, TASKS, "task"),
        learning_rate=read_option(options.learning_rate, "learning-rate", _parse_number("--learning-rate 3e-4")),
        **(read_option(options.warmup, "warmup", parse_warmup) or {}),
        schedule=read_word(options.schedule, SCHEDULES, "schedule"),
        min_learning_rate=read_option(
            options.min_learning_rate, "min-learning-rate", _parse_number("--min-learning-rate 3e-5")
        ),
        decay_share=read_option(options.decay_share, "decay-share", parse_share),
        decay_shape=read_word(options.decay_shape, DECAY_SHAPES, "decay-shape"),
        weight_decay=read_option(options.weight_decay, "weight-decay", _parse_number("--weight-decay 0.1")),
        beta1=read_option(options.beta1, "beta1", _parse_number("--beta1 0.9")),
        beta2=read_option(options.beta2, "beta2", _parse_number("--beta2 0.95")),
        epsilon=read_option(options.epsilon, "epsilon", _parse_number("--epsilon 1e-8")),
        momentum=read_option(options.momentum, "momentum", _parse_number("--momentum 0.9")),
        nesterov=options.nesterov or None,
        dpo_beta=read_option(options.beta, "beta", _parse_number("--beta 0.1")),
        ema=read_option(options.ema, "ema", _parse_number("--ema 0.999")),
        label_smoothing=read_option(options.label_smoothing, "label-smoothing", _parse_number("--label-smoothing 0.1")),
        z_loss=read_option(options.z_loss, "z-loss", _parse_number("--z-loss 1e-4")),
        dpo_label_smoothing=read_option(
            options.dpo_label_smoothing, "dpo-label-smoothing", _parse_number("--dpo-label-smoothing 0.1")
        ),
        dropout=read_option(options.dropout, "dropout", _parse_number("--dropout 0.1")),
        clip_norm=read_option(options.clip, "clip", _parse_number("--clip 1.0")),
        stochastic_rounding=options.stochastic_rounding,
        seed=read_option(options.seed, "seed", parse_count(0, "--seed 0")) or 0,
        device_memory_bytes=read_option(options.device_mem, "device-mem", parse_cap("device")),
        host_memory_bytes=read_option(options.host_mem, "host-mem", parse_cap("host")),
        device=one_of(options.device, ("auto", "cpu", "cuda"), "--device"),
        on=options.on or None,
        devices=devices or 1,
        from_scratch=options.from_scratch,
        weights=options.weights or None,
        anywhere=options.anywhere,
        deterministic=options.deterministic,
        checkpoint_every=read_option(
            options.checkpoint_every, "checkpoint-every", parse_count(1, "--checkpoint-every 100")
        ),
        checkpoint=not options.no_checkpoint,
        keep_checkpoints=read_option(options.keep, "keep", parse_count(1, "--keep 2"))
        or TrainRequest().keep_checkpoints,
        evaluate_every=read_option(options.evaluate_every, "evaluate-every", parse_count(1, "--evaluate-every 100")),
        patience=read_option(options.patience, "patience", parse_count(1, "--patience 3")),
        keep_best=options.keep_best,
        log=tuple(options.log or ()),
        profile=options.profile or options.is_given("profile_steps"),
        profile_steps=read_option(options.profile_steps, "profile-steps", parse_count(1, "--profile-steps 3")),
        store=options.store or None,
        resume=options.resume or None,
    )
    _check_settings(request)
    if request.resume is None:
        check_request(request)
    _check(request)
    settled = _with_devices(options, request)
    if settled.devices > 1:
        _check_several(settled)
    return settled


def _check_settings(request: TrainRequest) -> None:
    """Those of the optimizer check themselves."""
    from flopwise.setup.training import Training

    given = {name: getattr(request, name) for name in SETTINGS}
    given["clip_norm"] = request.clip_norm or None
    if request.learning_rate is None:
        # It is below a rate that nobody knows yet.
        given["min_learning_rate"] = None
    Training(steps=1, **{name: value for name, value in given.items() if value is not None})


def _parse_number(example: str) -> Callable[[str], float]:
    """Reads numbers that are not negative: 3e-4, 0.1."""
    from math import isfinite

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


def _check_precision(text: str) -> str:
    """As typed, if it can be read."""
    from flopwise.work.formats import parse_formats

    parse_formats(text)
    return text


def _check(request: TrainRequest) -> None:
    """Refuse what cannot be meant together."""
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


def _check_resume(options: TrainOptions) -> None:

    given = [name for name in options.given if name not in RESUME_LEAVES_OPEN]
    if given:
        name = given[0]
        told = f"the model {options.model}" if name == "model" else _option(name)
        raise FlopwiseError(
            f"{told} beside --resume",
            why="the run that is resumed says it",
            hint=f"--resume alone; it leaves open {', '.join(map(_option, RESUME_LEAVES_OPEN[1:]))}",
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_devices(options: TrainOptions, request: TrainRequest) -> TrainRequest:
    """The request with as many devices as its plan, or the run that it resumes, is for; and nothing beside a plan."""
    from dataclasses import replace
    from pathlib import Path

    from flopwise.catalog.load import is_plan, load_plan
    from flopwise.store.runs import find_run, read_record, store_folder
    from flopwise.train.request import check_goes_on

    if request.resume:
        run = read_record(find_run(store_folder(request.store), request.resume))
        check_goes_on(run, request)
        if options.is_given("gpus"):
            return request
        planned = run.plan.get("devices")
        return replace(request, devices=planned if isinstance(planned, int) and planned > 1 else 1)
    if request.model is None or not is_plan(request.model):
        return request
    plan, _ = load_plan(Path(request.model))
    devices = plan.devices
    said = [name for name in (*PLAN_SAYS, *(("batch",) if devices > 1 else ())) if options.is_given(name)]
    if said:
        raise FlopwiseError(
            f"{_option(said[0])} beside {request.model}",
            why="the plan says it",
            hint=f"the plan alone, or `flopwise plan … {_option(said[0])} … -w plan.toml` for another one",
        )
    if options.is_given("gpus") and request.devices != devices:
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
