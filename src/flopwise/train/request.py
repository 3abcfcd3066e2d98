"""`TrainRequest`: what a person asks for, most of it left open."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.catalog.load import is_plan, load_plan
from flopwise.engine.data.request import check_mask_share
from flopwise.engine.executable import check_optimizer
from flopwise.records.measurement import RunRecord
from flopwise.setup.trained import TrainedWords
from flopwise.setup.training import TASKS, DecayShape, Schedule, Task, check_settings, settle_momentum
from flopwise.setup.written import WrittenBatch
from flopwise.store.runs import RECORD
from flopwise.train.trackers import check_trackers
from flopwise.work.optimizers import Optimizer

DataFormat = Literal["tokens-uint16", "tokens-uint32", "tokens-int32"]
DATA_FORMATS: tuple[DataFormat, ...] = get_args(DataFormat)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest(WrittenBatch):
    """Everything that `flopwise train` takes; None and empty stand for what flopwise chooses."""

    model: str | None = None
    """Catalogue name, description, config.json or its folder (whose weights are then the first ones), or a plan.toml;
    None: a small Llama that learns on this machine in about a minute."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's description that are others, `{"layers": 4}`."""
    data: tuple[str, ...] = ()
    """Files and folders; empty: sources of Python's standard library."""
    evaluation_data: tuple[str, ...] = ()
    tokenizer: str | None = None
    text_column: str = "text"
    label_column: str = "label"
    padding: Literal["length", "longest"] = "length"
    train_on: Literal["answers", "all"] = "answers"
    """Of conversations and other rows with answers."""
    own_data: bool = False
    """An object of the caller's makes the batches; it is no part of a record, and is brought along again to resume."""
    data_format: DataFormat | None = None
    """The data are token identifiers; None: text, or rows."""
    mask_share: float | None = None
    """Of a text's tokens, those that are hidden; None: as the model's family was trained, else 0.15."""
    whole_words: bool = False
    """The tokens of a word are hidden together."""
    packing: bool = True
    """Several examples share a sequence, where the plan can have it."""
    stream_data: bool | None = None
    """Steps begin before all text is tokenized; None: where it is large, and it is said how many there are."""
    task: Task | None = None
    steps: int | None = None
    epochs: float | None = None
    batch_sequences: int | None = None
    micro_batch_sequences: int | None = None
    """None: from the plan."""
    learning_rate: float | None = None
    warmup_steps: int | None = None
    warmup_share: float | None = None
    """The same as a share of all steps."""
    schedule: Schedule | None = None
    min_learning_rate: float | None = None
    decay_share: float | None = None
    decay_shape: DecayShape | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    dropout: float | None = None
    """The share that is dropped at every site, 0 for none; None: the shares of the model's description."""
    clip_norm: float | None = None
    """0: no clipping; None: 1 for a training that begins from weights, as far as its plan allows."""
    stochastic_rounding: bool | None = None
    """None: where weights are kept in bf16 alone."""
    lora: int | None = None
    """Rank of adapters that are trained beside the model; None: the model itself is."""
    lora_alpha: float | None = None
    lora_on: str | None = None
    rslora: bool = False
    dora: bool = False
    freeze: str | None = None
    """Parts that are not trained."""
    base: str | None = None
    """Format of frozen weights; None: that of the activations beside adapters, else the trained ones'."""
    adapters: str | None = None
    """A folder of adapters that PEFT or flopwise saved, to go on with; it says their rank and the rest."""
    merge: bool = False
    """Write the whole model with its adapters merged into it, at the end."""
    ema: float | None = None
    """What a mean of the weights keeps of itself in a step; it is saved as a model of its own at the end."""
    label_smoothing: float | None = None
    z_loss: float | None = None
    dpo_beta: float | None = None
    dpo_label_smoothing: float | None = None
    seed: int = 0
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    on: str | None = None
    """A description of this machine's device, as `flopwise calibrate` writes it; None: the catalogue's, or that of the
    run which is resumed."""
    hardware: None = field(default=None, init=False)
    """The machine that it runs on, which `on` may describe."""
    optimizer: Optimizer | None = None
    """None: AdamW, or the plan's."""
    lengths: None = field(default=None, init=False)
    """The data's own."""
    devices: int = 1
    from_scratch: bool = False
    """First values are drawn even where the model's folder has weights."""
    weights: str | None = None
    """A folder of Hugging Face weights, or a checkpoint, to begin with."""
    anywhere: bool = False
    """Run a plan on other hardware than it was made for."""
    deterministic: bool = False
    """Only kernels that give the same bits every time, on a GPU too."""
    checkpoint_every: int | None = None
    """Steps; None: at the end alone, and when it is stopped."""
    checkpoint: bool = True
    """False: none at all, for a run that is only measured."""
    keep_checkpoints: int = 2
    evaluate_every: int | None = None
    """Steps; None: at the end."""
    patience: int | None = None
    """The training ends when so many evaluations in a row have not been better than the best before; None: it never
    does."""
    keep_best: bool = False
    """The checkpoint of the best evaluation is kept beside the last ones."""
    log: tuple[str, ...] = ()
    """Trackers that are told of every step: wandb, trackio, tensorboard, perhaps with a project, `wandb:project`."""
    profile: bool = False
    """Look at a window of steady steps: `profile.json` and a trace in the run's folder."""
    profile_steps: int | None = None
    """That are traced; None: three."""
    store: str | None = None
    resume: str | None = None
    """A run's number or folder, or `last`: go on from its last checkpoint."""


def check_request(request: TrainRequest) -> None:
    """Refuse what cannot be meant together; no torch."""
    for name, given in (("--patience", request.patience is not None), ("--keep-best", request.keep_best)):
        if given and request.evaluate_every is None:
            raise FlopwiseError(
                f"{name} without --evaluate-every",
                why="there would be one evaluation, at the end",
                hint=f"--evaluate-every 100 {name}",
            )
    endless = request.steps is None and request.resume is None
    if request.stream_data and (request.epochs is not None or endless):
        raise FlopwiseError(
            "--stream-data without --steps",
            why="how many sequences an epoch has is known when all text is tokenized",
            hint="--steps 1000, or --no-stream-data",
        )
    if request.changes and request.model is None:
        raise FlopwiseError(
            "--set without a model",
            why="it changes fields of a model's description",
            hint="flopwise train MODEL --set layers=4",
        )
    if request.changes and request.model is not None and is_plan(request.model):
        raise FlopwiseError(
            f"--set beside {request.model}",
            why="the plan has a description that is settled",
            hint="`flopwise plan MODEL --set layers=4 -w plan.toml`",
        )
    if request.patience is not None and request.patience < 1:
        raise FlopwiseError(
            f"--patience {request.patience} would end it before anything is judged", hint="--patience 3"
        )
    if request.keep_best and not request.checkpoint:
        raise FlopwiseError("--keep-best beside --no-checkpoint", why="nothing is saved then", hint="one of them")
    if request.warmup_steps is not None and request.warmup_share is not None:
        raise FlopwiseError("a warm-up in steps and as a share", why="each says how long it is", hint="one of them")
    if request.schedule != "wsd" and (request.decay_share is not None or request.decay_shape is not None):
        raise FlopwiseError(
            "a decay's share and shape are of another schedule",
            why="WSD alone has a decay of its own",
            hint="--schedule wsd",
        )
    _check_task(request)
    check_mask_share(0.5 if request.mask_share is None else request.mask_share)
    check_trackers(request.log)
    _check_optimizer(request)


def _check_task(request: TrainRequest) -> None:
    """Refuse a task that is not known, and what is only for preferences, or not for them."""
    if request.task is not None and request.task not in TASKS:
        raise unknown_name("task", str(request.task), TASKS, hint=f"--task {' | '.join(TASKS)}")
    of_dpo = {"beta": request.dpo_beta, "dpo-label-smoothing": request.dpo_label_smoothing}
    for name, value in of_dpo.items():
        if value is not None and request.task not in (None, "dpo"):
            raise FlopwiseError(
                f"--{name}, and the task is {request.task}",
                why="it is for preferences",
                hint=f"--{name} with --task dpo, or without it",
            )
    if request.task == "dpo" and request.own_data:
        raise FlopwiseError(
            "DPO is not trained on data of a program's own yet",
            why="pairs are read, packed and scored by a reference from files",
            hint="files of rows with chosen and rejected",
        )
    if request.task == "dpo" and request.devices > 1:
        raise several_of_dpo()


def _check_optimizer(request: TrainRequest) -> None:
    """Refuse an optimizer that nothing here updates with, and settings that it has not."""
    planned = request.model is not None and is_plan(request.model)
    if planned and request.optimizer is not None:
        raise FlopwiseError(
            f"--optimizer beside {request.model}",
            why="the plan says it",
            hint="the plan alone, or `flopwise plan … --optimizer … -w plan.toml` for another one",
        )
    if planned and request.model is not None:
        optimizer = load_plan(Path(request.model))[0].optimizer
    else:
        optimizer = settle_momentum(request.optimizer or "adamw", request.momentum) or "adamw"
    check_settings(optimizer, {name: getattr(request, name) for name in OPTIMIZER_WORDS})
    check_optimizer(optimizer, ranks=request.devices)
    if optimizer in ("sgd", "sgd-momentum") and request.learning_rate is None and request.resume is None:
        raise FlopwiseError(
            "SGD without a learning rate",
            why="it goes by the size of the gradients, which is another for every model",
            hint="--learning-rate 0.1",
        )


OPTIMIZER_WORDS = ("beta1", "beta2", "epsilon", "momentum", "nesterov")
"""Fields that only some optimizers have."""


def several_of_dpo() -> FlopwiseError:
    """For preferences on several devices."""
    return FlopwiseError(
        "DPO is not trained on several devices yet",
        why="the modules that are sharded do not know where an answer begins",
        hint="--gpus 1, which streams what does not fit through the host's memory",
    )


def check_hiding(request: TrainRequest, task: Task) -> None:
    """Refuse to hide where nothing is foretold from what is around it, and data that does not say what may be."""
    if (request.mask_share is not None or request.whole_words) and task != "masked":
        option = "--whole-words" if request.whole_words else "--mask-share"
        raise FlopwiseError(
            f"{option}, and the task is {task}", why="nothing is hidden there", hint="--task masked, or without it"
        )
    if request.data_format is not None and task == "masked":
        raise FlopwiseError(
            f"--data-format {request.data_format} beside masked language modelling",
            why="which identifiers are marks, and where a text ends, is not in such files",
            hint="the text itself, or rows with a text",
        )


def trained_words(request: TrainRequest) -> TrainedWords:
    """What of the model is trained."""
    return TrainedWords(
        lora=request.lora,
        lora_alpha=request.lora_alpha,
        lora_on=request.lora_on,
        rslora=request.rslora,
        dora=request.dora,
        freeze=request.freeze,
        task=request.task if request.task in ("dpo", "masked") else None,
        loss_share=request.mask_share,
    )


def has_done(run: str, steps: int) -> FlopwiseError:
    """For a run that nothing is left to do of."""
    return FlopwiseError(f"run {run} has done its {steps:,} steps", hint=f"--steps {2 * steps} to go on")


def check_goes_on(record: RunRecord, request: TrainRequest) -> None:
    """Refuse to go on with a run that has ended, as far as its record tells; its checkpoint has the last word."""
    wanted = request.steps if request.steps is not None else record.training.steps
    if record.state == "done" and request.epochs is None and wanted <= record.steps_done:
        raise has_done(record.id, record.steps_done)


def merge_resumed(record: RunRecord, request: TrainRequest) -> TrainRequest:
    """The request of a run that is resumed; steps, ranks, hardware and what says when to save may be new."""
    try:
        kept = msgspec.convert(record.request, TrainRequest)
    except msgspec.ValidationError as error:
        raise FlopwiseError(
            f"{RECORD} of run {record.id} is damaged",
            why=f"its request cannot be read: {error}",
            hint="begin a new run, with --weights and the last checkpoint",
        ) from None
    changes: dict[str, Any] = {
        name: getattr(request, name)
        for name in ("checkpoint_every", "evaluate_every", "patience", "on")
        if getattr(request, name) is not None
    }
    return replace(
        kept,
        **changes,
        anywhere=kept.anywhere or request.anywhere,
        log=request.log or kept.log,
        steps=request.steps,
        epochs=request.epochs,
        devices=request.devices,
        resume=request.resume,
        store=request.store,
        keep_checkpoints=request.keep_checkpoints,
        profile=request.profile,
        profile_steps=request.profile_steps,
    )
