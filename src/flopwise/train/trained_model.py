"""What is trained of which model for which task, as a request or a plan says it. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import is_plan, load_model, load_plan
from flopwise.engine.executable import check_adapters, check_optimizer, check_trainable
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.plan import Plan
from flopwise.setup.hardware import Hardware
from flopwise.setup.trained import TrainedWords, check_base, classify, hide, prefer, task_of
from flopwise.setup.training import Task, settle_momentum
from flopwise.train.origin import find_weights, read_adapters
from flopwise.train.request import TrainRequest, check_hiding, several_of_dpo, trained_words
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.model import Model
from flopwise.work.transformer import Dropout, Transformer

CPU_SEQUENCE_TOKENS = 256
"""On a CPU a sequence is no longer than this unless it is asked for."""
CPU_BATCH_SEQUENCES = 8
DEFAULT_STEPS = 400
DEFAULT_SECONDS = 50.0
"""What the training without any argument should take on this machine."""
DEFAULT_SHARE = 0.3
"""Of the peak, what a small model reaches: 0.34 on two cores of an EPYC."""
DEFAULT_WIDTHS = (512, 384, 256, 192, 128, 96, 64)


class TrainedModel(NamedTuple):
    """What a training is about."""

    model: Transformer
    weights: Path | None
    """The folder of first weights; None: they are drawn."""
    task: Task


def find_trained(
    request: TrainRequest, plan: tuple[Plan | ClusterPlan, Model] | None, hardware: Hardware | None, ranks: int
) -> TrainedModel:
    """With the head that its task needs; without hardware the model that nobody names is the smallest there is."""
    model, weights = _model(request, plan, hardware, ranks)
    task = request.task or task_of(model)
    if plan is not None:
        _check_planned_task(model, task)
    if task == "dpo" and ranks > 1:
        raise several_of_dpo()
    check_hiding(request, task)
    model = _with_dropout(_for_task(model, task), request.dropout)
    check_trainable(model)
    precision = plan[0].precision if plan is not None else request.precision
    check_adapters(model, parse_formats(precision) if precision else None)
    check_base(model, request.base)
    if request.merge and model.adapters is None:
        raise FlopwiseError("--merge without --lora", why="there are no adapters to be merged", hint="--lora 16")
    return TrainedModel(model, weights, task)


def check_model(request: TrainRequest) -> None:
    """Refuse a model, a task or adapters that a new training would refuse: at once, whatever it would run on."""
    if request.resume is not None:
        return
    plan = load_plan(Path(request.model)) if request.model is not None and is_plan(request.model) else None
    optimizer = plan[0].optimizer if plan is not None else settle_momentum(request.optimizer, request.momentum)
    check_optimizer(optimizer or "adamw", ranks=request.devices)
    model = find_trained(request, plan, None, request.devices).model
    if plan is None and request.sequence_tokens is not None:
        model.check_sequence(request.sequence_tokens)


def _model(
    request: TrainRequest, plan: tuple[Plan | ClusterPlan, Model] | None, hardware: Hardware | None, ranks: int
) -> tuple[Transformer, Path | None]:
    """The description, and the folder of its first weights."""
    weights = find_weights(request)
    if plan is not None:
        described: Model = plan[1]
    elif request.model is None:
        # Each rank measures this machine for itself, and all have to train the same.
        widths = DEFAULT_WIDTHS if ranks == 1 and hardware is not None else DEFAULT_WIDTHS[-1:]
        described = _trained_of(request, _default_model(hardware, widths))
    else:
        described = _trained_of(request, load_model(request.model, request.changes))
    if not isinstance(described, Transformer):
        raise FlopwiseError(
            f"{described.name} cannot be trained yet",
            why="its layers run time step by time step, for which there are no operators",
            hint="a transformer: `flopwise ls models`",
        )
    return described, weights


def _trained_of(request: TrainRequest, model: Model) -> Model:
    """The model of which as much is trained as asked, or as its adapters say."""
    words = _words_of(request)
    try:
        return words.of(model)
    except FlopwiseError as error:
        if request.adapters is None:
            raise
        raise FlopwiseError(
            f"the adapters in {request.adapters} are not for {model.name}",
            why="; ".join(filter(None, (error.what, error.why))),
            hint="the model beside which they were trained, which their adapter_config.json names",
        ) from None


def _words_of(request: TrainRequest) -> TrainedWords:
    """What of the model is trained: as asked, or as the adapters say that it goes on with."""
    asked = trained_words(request)
    if request.adapters is None:
        return asked
    if replace(asked, task=None, loss_share=None) != TrainedWords():
        raise FlopwiseError(
            "--adapters beside --lora or --freeze", why="the adapters' own file says what they are", hint="one of them"
        )
    return replace(read_adapters(Path(request.adapters)), task=asked.task, loss_share=asked.loss_share)


def _default_model(hardware: Hardware | None, widths: Sequence[int]) -> Transformer:
    """A small Llama over bytes: the widest of those tried that this machine should train in under a minute."""
    for width in widths:
        model = Transformer(
            name=f"tiny-llama-{width}",
            title=f"Small Llama of width {width}, over bytes",
            source="what `flopwise train` trains when it is told nothing",
            layers=4,
            hidden=width,
            heads=width // 32,
            kv_heads=max(1, width // 64),
            ffn=width * 8 // 3 // 32 * 32,
            vocab=264,
            context=CPU_SEQUENCE_TOKENS,
            tied=True,
        )
        if hardware is None or width == widths[-1]:
            return model
        work = describe(model, CPU_SEQUENCE_TOKENS)
        peaks = hardware.device.peak_flops
        peak = peaks["bf16" if "bf16" in peaks else "fp32"].value
        seconds = DEFAULT_STEPS * CPU_BATCH_SEQUENCES * work.model_flops("causal") / (DEFAULT_SHARE * peak)
        if seconds <= DEFAULT_SECONDS:
            return model
    raise AssertionError("the smallest width is always taken")


def _with_dropout(model: Transformer, share: float | None) -> Transformer:
    """The model with the share that is asked for; where none is, its own stays in the description, unused."""
    if not share:
        return model
    if not 0 < share < 1:
        raise FlopwiseError(
            f"a dropout of {share:g} is not possible",
            why="it is the share of numbers that training sets to zero",
            hint="--dropout 0.1, or 0 for none",
        )
    return replace(model, dropout=Dropout(embedding=share, hidden=share, attention=share))


def _for_task(model: Transformer, task: Task) -> Transformer:
    """The model with the head that the task needs."""
    if task == "classification":
        return classify(model)
    if task == "dpo":
        return prefer(model)
    if task == "masked":
        return hide(model)
    if not model.causal:
        raise FlopwiseError(
            f"{model.name} sees what comes after; it cannot learn to foretell it",
            why="language modelling here is the next token's, and it is no part of this model",
            hint="--task masked, --task classification, or a decoder such as gpt2",
        )
    return model


def _check_planned_task(model: Transformer, task: Task) -> None:
    """Refuse a plan whose head is another than the task's."""
    if (task == "dpo") != (model.objective == "preference"):
        raise FlopwiseError(
            f"the plan is not for --task {task}",
            why="preferences run the head once more, over both answers of a pair",
            hint=f"plan again with --task {task}",
        )
    if task == "masked" and task_of(model) != "masked":
        raise FlopwiseError(
            "the plan is not for --task masked",
            why=f"its model is for another task: {task_of(model)}",
            hint="plan again with --task masked",
        )
