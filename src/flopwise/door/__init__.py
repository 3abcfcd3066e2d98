"""What `import flopwise as fw` offers: predict, plan, train, profiles and results, from Python.

Models and hardware are taken by name, by the path of a file, or as descriptions; quantities as numbers or as people
write them (`seq="8k"`, `device_mem="40GiB"`); what is left out is chosen, and the answer says why.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, overload

from flopwise.base.errors import FlopwiseError, one_of, shown
from flopwise.base.units import Quantity, parse_cap, parse_devices, parse_sequences, parse_tokens, read_option
from flopwise.catalog.load import load_model as _load_model
from flopwise.door.asking import hardware_of, model_of, name_of, paths_of, setup_of
from flopwise.door.python_words import in_python, options_of, reword
from flopwise.profile.measure.this_machine import find_hardware
from flopwise.setup.trained import TrainedWords

if TYPE_CHECKING:
    from flopwise.door.rows import Results
    from flopwise.profile.explain.verdicts import Thresholds
    from flopwise.records.cluster_plan import PlannedCluster
    from flopwise.records.measurement import RunRecord
    from flopwise.records.plan import Planned
    from flopwise.records.prediction import Prediction
    from flopwise.records.profile import Profile, Verdict
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.parallel import Parallel
    from flopwise.setup.stack import Stack
    from flopwise.setup.training import DecayShape, Schedule, Task
    from flopwise.setup.words import Fusion
    from flopwise.train.events import Callback, Logger
    from flopwise.train.own_data import Data
    from flopwise.train.request import DataFormat, TrainRequest
    from flopwise.work.formats import Formats
    from flopwise.work.lengths import Lengths, SequenceLayout
    from flopwise.work.model import Model
    from flopwise.work.op import Convention
    from flopwise.work.optimizers import Optimizer
    from flopwise.work.work import Recompute

__all__ = ["load_hardware", "load_model", "plan", "predict", "read_profile", "results", "train", "verdicts"]


@in_python
def load_model(model: str | Path, *, changes: Mapping[str, object] | None = None) -> Model:
    """A model by catalogue name, or by the path of a TOML or of a Hugging Face config.json or its folder.

    `changes` replace fields before the description is checked.

    >>> fw.load_model("llama-3-8b", changes={"layers": 2}).name
    'llama-3-8b+layers=2'
    """
    return _load_model(model, changes)


@in_python
def load_hardware(on: str | Path) -> Hardware:
    """A device by catalogue name or alias, or by the path of a TOML; `this-machine` is what we run on.

    >>> fw.load_hardware("h100").name
    'h100-sxm'
    """
    return find_hardware(on)


@in_python
def predict(
    model: str | Path | Model,
    *,
    on: str | Path | Hardware = "this-machine",
    power: Quantity | None = None,
    seq: Quantity | None = None,
    lengths: str | Path | Sequence[int] | Lengths | None = None,
    layout: SequenceLayout | None = None,
    tokenizer: str | Path | None = None,
    routing: str | Path | Sequence[float] | Sequence[Sequence[float]] | None = None,
    batch: Quantity | None = None,
    batch_tokens: Quantity | None = None,
    micro: Quantity | None = None,
    precision: str | Formats | None = None,
    recompute: Recompute | None = None,
    optimizer: Optimizer = "adamw",
    attention: str | None = None,
    fusion: Fusion | None = None,
    cuda_graphs: bool = False,
    convention: Convention = "causal",
    device_mem: Quantity | None = None,
    devices: Quantity | None = None,
    parallel: str | Parallel | None = None,
    stack: str | Path | Stack | None = None,
    anchor: str | Path | None = None,
    changes: Mapping[str, object] | None = None,
    lora: int | None = None,
    lora_alpha: float | None = None,
    lora_on: str | None = None,
    rslora: bool = False,
    dora: bool = False,
    freeze: str | None = None,
    base: str | None = None,
    task: Task | None = None,
    loss_share: float | None = None,
) -> Prediction:
    """Predict a training step: time with its interval, tokens/s, MFU, memory by owner, what binds each operator.

    What is None is chosen, and `Prediction.chosen` says why. A set-up that does not fit is predicted too: `fits` tells.
    `lengths` of sequences that are not all as long as `seq`: a list, a file of data or of numbers, or words such as
    `mean=24`; `layout` says whether their padding is computed. `anchor`, a measured step that all is predicted from: a
    run, a trainer's log, a trace, or a figure and what it is of.

    >>> step = fw.predict("llama-3-8b", on="h100-sxm", seq="8k", batch=16)
    >>> step.fits, step.devices, step.interval is not None
    (True, 1, True)
    >>> fw.predict("llama-3-8b", on="h100-sxm", devices=64, stack="torchtitan").fits
    True
    >>> far = fw.predict("llama-3-8b", on="h100-sxm", devices=64, anchor="tokens_per_s=47000@gpus=8 seq=8k batch=16")
    >>> far.interval.basis
    'the measured step tokens_per_s=47000'
    >>> fw.predict("bert-base", on="h200", seq=128, batch=2, lengths=[24, 40]).batch_tokens
    64
    """
    from flopwise.door.intervals import predict_step

    setup = setup_of(
        model_of(
            model,
            changes,
            TrainedWords(
                lora=lora,
                lora_alpha=lora_alpha,
                lora_on=lora_on,
                rslora=rslora,
                dora=dora,
                freeze=freeze,
                task=task,
                loss_share=loss_share,
            ),
        ),
        hardware_of(on, power),
        name=name_of(on, power),
        seq=seq,
        lengths=lengths,
        layout=layout,
        tokenizer=tokenizer,
        routing=routing,
        batch=batch,
        batch_tokens=batch_tokens,
        precision=precision,
        base=base,
        optimizer=optimizer,
        micro=micro,
        recompute=recompute,
        attention=attention,
        fusion=fusion,
        cuda_graphs=cuda_graphs,
        device_mem=device_mem,
        devices=devices,
        parallel=parallel,
        stack=stack,
    )
    return predict_step(setup, convention, anchor)


@overload
def plan(
    model: str | Path | Model,
    *,
    on: str | Path | Hardware = "this-machine",
    power: Quantity | None = None,
    devices: None = None,
    seq: Quantity | None = None,
    lengths: str | Path | Sequence[int] | Lengths | None = None,
    layout: SequenceLayout | None = None,
    tokenizer: str | Path | None = None,
    routing: str | Path | Sequence[float] | Sequence[Sequence[float]] | None = None,
    batch: Quantity | None = None,
    batch_tokens: Quantity | None = None,
    precision: str | Formats | None = None,
    optimizer: Optimizer = "adamw",
    convention: Convention = "causal",
    device_mem: Quantity | None = None,
    host_mem: Quantity | None = None,
    clip: bool = False,
    changes: Mapping[str, object] | None = None,
    lora: int | None = None,
    lora_alpha: float | None = None,
    lora_on: str | None = None,
    rslora: bool = False,
    dora: bool = False,
    freeze: str | None = None,
    base: str | None = None,
    task: Task | None = None,
    loss_share: float | None = None,
    write: str | Path | None = None,
) -> Planned: ...


@overload
def plan(
    model: str | Path | Model,
    *,
    on: str | Path | Hardware = "this-machine",
    power: Quantity | None = None,
    devices: Quantity,
    seq: Quantity | None = None,
    lengths: str | Path | Sequence[int] | Lengths | None = None,
    layout: SequenceLayout | None = None,
    tokenizer: str | Path | None = None,
    routing: str | Path | Sequence[float] | Sequence[Sequence[float]] | None = None,
    batch: Quantity | None = None,
    batch_tokens: Quantity | None = None,
    precision: str | Formats | None = None,
    optimizer: Optimizer = "adamw",
    convention: Convention = "causal",
    device_mem: Quantity | None = None,
    micro: Quantity | None = None,
    recompute: Recompute | None = None,
    attention: str | None = None,
    fusion: Fusion | None = None,
    stack: str | Path | Stack | None = None,
    anchor: str | Path | None = None,
    offload: bool = False,
    changes: Mapping[str, object] | None = None,
    lora: int | None = None,
    lora_alpha: float | None = None,
    lora_on: str | None = None,
    rslora: bool = False,
    dora: bool = False,
    freeze: str | None = None,
    base: str | None = None,
    task: Task | None = None,
    loss_share: float | None = None,
    write: str | Path | None = None,
) -> PlannedCluster: ...


@in_python
def plan(
    model: str | Path | Model,
    *,
    on: str | Path | Hardware = "this-machine",
    power: Quantity | None = None,
    devices: Quantity | None = None,
    seq: Quantity | None = None,
    lengths: str | Path | Sequence[int] | Lengths | None = None,
    layout: SequenceLayout | None = None,
    tokenizer: str | Path | None = None,
    routing: str | Path | Sequence[float] | Sequence[Sequence[float]] | None = None,
    batch: Quantity | None = None,
    batch_tokens: Quantity | None = None,
    precision: str | Formats | None = None,
    optimizer: Optimizer = "adamw",
    convention: Convention = "causal",
    device_mem: Quantity | None = None,
    host_mem: Quantity | None = None,
    clip: bool = False,
    micro: Quantity | None = None,
    recompute: Recompute | None = None,
    attention: str | None = None,
    fusion: Fusion | None = None,
    stack: str | Path | Stack | None = None,
    anchor: str | Path | None = None,
    offload: bool = False,
    changes: Mapping[str, object] | None = None,
    lora: int | None = None,
    lora_alpha: float | None = None,
    lora_on: str | None = None,
    rslora: bool = False,
    dora: bool = False,
    freeze: str | None = None,
    base: str | None = None,
    task: Task | None = None,
    loss_share: float | None = None,
    write: str | Path | None = None,
) -> Planned | PlannedCluster:
    """Find the fastest set-up that fits; `DoesNotFit` is raised where nothing does.

    Without `devices`: a schedule for one device that flopwise itself runs, under a cap on device and one on host memory
    (`host_mem`, `clip`). With `devices`: the strategy for so many of them in a framework (`micro`, `recompute`,
    `attention`, `fusion`, `stack`, `anchor`, `offload`). `write` names a file for the plan, which `train` takes as its
    model.

    >>> one = fw.plan("llama-3-1b", on="h100-sxm", seq="8k", device_mem="40GiB", host_mem="110GiB")
    >>> one.forecast.device_total <= 40 * 2**30
    True
    >>> many = fw.plan("llama-3-8b", on="h100-sxm", devices=64, seq="8k", batch=64)
    >>> many.plan.devices, many.prediction.fits
    (64, True)
    """
    frameworks = {
        "micro": micro,
        "recompute": recompute,
        "attention": attention,
        "fusion": fusion,
        "stack": stack,
        "anchor": anchor,
        "offload": offload or None,
    }
    own = {"host-mem": host_mem, "clip": clip or None}
    _refuse_others(frameworks if devices is None else own, one_device=devices is None)
    described = model_of(
        model,
        changes,
        TrainedWords(
            lora=lora,
            lora_alpha=lora_alpha,
            lora_on=lora_on,
            rslora=rslora,
            dora=dora,
            freeze=freeze,
            task=task,
            loss_share=loss_share,
        ),
    )
    setup = setup_of(
        described,
        hardware_of(on, power),
        name=name_of(on, power),
        seq=seq,
        lengths=lengths,
        layout=layout,
        tokenizer=tokenizer,
        routing=routing,
        batch=batch,
        batch_tokens=batch_tokens,
        precision=precision,
        base=base,
        optimizer=optimizer,
        micro=micro,
        recompute=recompute,
        attention=attention,
        fusion=fusion,
        device_mem=device_mem,
        host_mem=host_mem,
        clip=clip,
        stack=stack,
    )
    from flopwise.door import planning
    from flopwise.door.anchors import read_anchor, with_anchor
    from flopwise.plan.cluster.answer import answer
    from flopwise.setup.parallel import shard_all

    found: Planned | PlannedCluster
    count = read_option(devices, "gpus", parse_devices)
    if count is None:
        one = planning.plan_under_caps(setup, convention=convention)
        found = replace(one, notes=tuple(reword(note, options_of(plan)) for note in one.notes))
    else:
        step = None if anchor is None else read_anchor(str(anchor), replace(setup, parallel=shard_all(count)))
        asked = with_anchor(setup, step) if step else setup
        best = answer(asked, count, offload=offload)
        found = planning.plan_cluster(asked, best, convention=convention, anchor=step)
    if write is not None:
        planning.write_plan(Path(write), planning.for_file(found), described)
    return found


def _refuse_others(others: Mapping[str, object], *, one_device: bool) -> None:
    """Options that are for the other kind of plan."""
    given = next((name for name, value in others.items() if value is not None), None)
    if given is None:
        return
    if one_device:
        raise FlopwiseError(
            f"--{given} without --gpus", why="it is for set-ups that a framework runs", hint="--gpus 1, or more"
        )
    raise FlopwiseError(
        f"--{given} beside --gpus", why="it is for one device that flopwise itself runs", hint="one of them"
    )


@in_python
def train(
    model: str | Path | Model | None = None,
    *,
    changes: Mapping[str, object] | None = None,
    data: str | Path | Sequence[str | Path] | Data = (),
    eval_data: str | Path | Sequence[str | Path] = (),
    tokenizer: str | Path | None = None,
    task: Task | None = None,
    text_column: str = "text",
    label_column: str = "label",
    padding: Literal["length", "longest"] = "length",
    train_on: Literal["answers", "all"] = "answers",
    data_format: DataFormat | None = None,
    mask_share: float | None = None,
    whole_words: bool = False,
    packing: bool = True,
    stream_data: bool | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    seq: Quantity | None = None,
    batch: Quantity | None = None,
    micro: Quantity | None = None,
    precision: str | None = None,
    optimizer: Optimizer | None = None,
    lora: int | None = None,
    lora_alpha: float | None = None,
    lora_on: str | None = None,
    rslora: bool = False,
    dora: bool = False,
    freeze: str | None = None,
    base: str | None = None,
    adapters: str | Path | None = None,
    merge: bool = False,
    learning_rate: float | None = None,
    warmup: float | str | None = None,
    schedule: Schedule | None = None,
    min_learning_rate: float | None = None,
    decay_share: float | None = None,
    decay_shape: DecayShape | None = None,
    weight_decay: float | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    epsilon: float | None = None,
    momentum: float | None = None,
    nesterov: bool = False,
    beta: float | None = None,
    ema: float | None = None,
    label_smoothing: float | None = None,
    z_loss: float | None = None,
    dpo_label_smoothing: float | None = None,
    dropout: float | None = None,
    clip: float | None = None,
    stochastic_rounding: bool | None = None,
    seed: int = 0,
    device_mem: Quantity | None = None,
    host_mem: Quantity | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    on: str | Path | None = None,
    devices: int = 1,
    weights: str | Path | None = None,
    from_scratch: bool = False,
    anywhere: bool = False,
    deterministic: bool = False,
    checkpoint: bool = True,
    checkpoint_every: int | None = None,
    keep: int = 2,
    evaluate_every: int | None = None,
    patience: int | None = None,
    keep_best: bool = False,
    log: str | Sequence[str] = (),
    profile: bool = False,
    profile_steps: int | None = None,
    store: str | Path | None = None,
    resume: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
) -> RunRecord:
    """Train a model, measured beside what was predicted; the record is what the run's folder keeps.

    `model` may be a plan's file too, and None is a small Llama that learns in about a minute. `data` are files and
    folders, or an object with `count`, `batch` and `evaluation` (`flopwise.train.own_data.Data`). A callback is a
    `flopwise.train.Callback`; a logger anything with `log(dict)`. Several devices need a process for each, which
    `flopwise train`, torchrun or srun start.

    >>> run = fw.train(steps=8, batch=4, seq=64, device="cpu", profile=True, store="runs")
    >>> run.id, run.state
    ('0001', 'done')
    """
    from flopwise.setup.training import parse_warmup
    from flopwise.train.request import TrainRequest

    # What has paths in it counts them too, but makes no batches.
    own = cast("Data", data) if hasattr(data, "batch") and hasattr(data, "evaluation") else None
    with ExitStack() as until_done:
        request = TrainRequest(
            model=_model_file(model, until_done),
            changes=dict(changes or {}),
            data=() if own is not None else paths_of(cast("str | Path | Sequence[str | Path]", data)),
            own_data=own is not None,
            evaluation_data=paths_of(eval_data),
            tokenizer=_text(tokenizer),
            text_column=text_column,
            label_column=label_column,
            padding=padding,
            train_on=train_on,
            data_format=data_format,
            mask_share=mask_share,
            whole_words=whole_words,
            packing=packing,
            stream_data=stream_data,
            task=task,
            steps=steps,
            epochs=epochs,
            sequence_tokens=read_option(seq, "seq", parse_tokens),
            batch_sequences=read_option(batch, "batch", parse_sequences),
            micro_batch_sequences=read_option(micro, "micro", parse_sequences),
            precision=precision,
            optimizer=_optimizer(optimizer),
            lora=lora,
            lora_alpha=lora_alpha,
            lora_on=lora_on,
            rslora=rslora,
            dora=dora,
            freeze=freeze,
            base=base,
            adapters=_text(adapters),
            merge=merge,
            learning_rate=learning_rate,
            **({} if warmup is None else parse_warmup(warmup)),
            schedule=schedule,
            min_learning_rate=min_learning_rate,
            decay_share=decay_share,
            decay_shape=decay_shape,
            weight_decay=weight_decay,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            momentum=momentum,
            nesterov=nesterov or None,
            dpo_beta=beta,
            ema=ema,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            dpo_label_smoothing=dpo_label_smoothing,
            dropout=dropout,
            clip_norm=clip,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            device_memory_bytes=read_option(device_mem, "device-mem", parse_cap("device")),
            host_memory_bytes=read_option(host_mem, "host-mem", parse_cap("host")),
            device=device,
            on=_text(on),
            devices=devices,
            from_scratch=from_scratch,
            weights=_text(weights),
            anywhere=anywhere,
            deterministic=deterministic,
            checkpoint_every=checkpoint_every,
            checkpoint=checkpoint,
            keep_checkpoints=keep,
            evaluate_every=evaluate_every,
            patience=patience,
            keep_best=keep_best,
            log=(log,) if isinstance(log, str) else tuple(log),
            profile=profile or profile_steps is not None,
            profile_steps=profile_steps,
            store=_text(store),
            resume=_text(resume),
        )
        return _train(request, own, callbacks, loggers)


def _optimizer(named: str | None) -> Optimizer | None:
    from flopwise.work.optimizers import OPTIMIZERS

    return None if named is None else one_of(named, OPTIMIZERS, "--optimizer")


def _train(
    request: TrainRequest, own: Data | None, callbacks: Sequence[Callback], loggers: Sequence[Logger]
) -> RunRecord:
    """What can be refused without torch is; then it is imported."""
    from flopwise.train.data_checks import check_data
    from flopwise.train.request import check_request
    from flopwise.train.trained_model import check_model

    if request.resume is None:
        check_request(request)
    check_model(request)
    check_data(request)
    from flopwise.train import run

    return run(request, own_data=own, callbacks=callbacks, loggers=loggers)


def _model_file(model: str | Path | Model | None, until_done: ExitStack) -> str | None:
    """The name or the file of a model; a description is written to one, as the run's own plan then holds it."""
    if model is None or isinstance(model, str | Path):
        return _text(model)
    from flopwise.base.files import to_toml, write_whole
    from flopwise.catalog.load import model_table

    path = Path(until_done.enter_context(tempfile.TemporaryDirectory())) / "model.toml"
    write_whole(path, to_toml(model_table(model_of(model))))
    return str(path)


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


@in_python
def read_profile(path: str | Path, *, section: str | None = None) -> Profile:
    """What a profiler wrote, or a run of flopwise's: a file or a folder. `section` names one of several profiles.

    >>> fw.read_profile("runs/0001").format
    'flopwise'
    """
    from flopwise.profile.explain.comparing import column_names, column_of
    from flopwise.profile.read.reading import read_profiles

    found = [profile for one in read_profiles([Path(path)]) for profile in one.profiles]
    names = column_names(found)
    if section is not None:
        return found[column_of(names, section)]
    if len(found) != 1:
        raise FlopwiseError(
            f"there are {len(found)} profiles in {path}", why=", ".join(names[:8]) or None, hint="--section NAME"
        )
    return found[0]


@in_python
def verdicts(profile: Profile, *, thresholds: Thresholds | None = None) -> tuple[Verdict, ...]:
    """What limits a profiled run, the most time at stake first, each with its evidence and what to try.

    >>> fw.verdicts(fw.read_profile("runs/0001"))
    (...)
    """
    from flopwise.profile.explain.verdicts import verdicts as judged
    from flopwise.records.profile import Profile

    if not isinstance(profile, Profile):
        raise FlopwiseError(f"{shown(profile)} is no profile", hint='fw.read_profile("trace.json")')
    return judged(profile, thresholds)


@in_python
def results(
    store: str | Path | None = None, *, what: Sequence[str] = (), price: float | None = None, best: bool = False
) -> Results:
    """Rows of runs and sweeps of a store; None: the folder that FLOPWISE_STORE names, else `runs`.

    `what` names runs (`0142`, `3-17`, `last`), sweeps or cells. `price` of a device's hour in dollars adds tokens per
    dollar; `best` keeps the fastest of each model, hardware, devices, sequence and precision.

    >>> fw.results("runs")
    <Results: 1 row>
    """
    from flopwise.door.rows import Results
    from flopwise.store.collecting import collect
    from flopwise.store.results import add_price, check_result, fastest
    from flopwise.store.runs import store_folder
    from flopwise.store.sweeps import sweep_names

    folder = store_folder(_text(store))
    hint = "the folder of runs, as `flopwise train` made it"
    if not folder.is_dir():
        raise FlopwiseError(f"there is no store {folder}", hint=hint)
    found = collect(folder, what)
    if not found.rows and not found.problems and any(folder.iterdir()) and not sweep_names(folder):
        raise FlopwiseError(f"{folder} is no store", why="there are files in it, but no run and no sweep", hint=hint)
    rows = [check_result(row) for row in found.rows]
    if price is not None:
        rows = [add_price(row, price) for row in rows]
    problems = tuple(f"{problem.path}: {problem.why}" for problem in found.problems)
    return Results(fastest(rows) if best else rows, problems=problems)
