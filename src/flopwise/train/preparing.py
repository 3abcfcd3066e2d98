"""From what was asked for to what is run: model, data, settings, device and plan, all checked before it begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import show_bytes, show_share
from flopwise.catalog.load import is_plan, load_plan, model_folder
from flopwise.engine.data import (
    DataRequest,
    ExampleData,
    FileData,
    StreamedData,
    holds_examples,
    is_streamed,
    open_classification_data,
    open_example_data,
    open_language_data,
    open_masked_data,
    open_preference_data,
    open_streamed_data,
)
from flopwise.engine.data.request import TokenNumbers
from flopwise.engine.data.sources import evaluation_of, held_out_alone
from flopwise.engine.executable import (
    check_formats,
    check_optimizer,
    check_several,
)
from flopwise.predict.choose import usual_formats
from flopwise.profile.measure.this_machine import Here
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.outcome import Outcome
from flopwise.records.plan import MOST_PAIRS, Plan
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import shard_all
from flopwise.setup.setup import Setup
from flopwise.setup.trained import usual_mask_share
from flopwise.setup.training import (
    OPTIMIZER_SETTINGS,
    Task,
    Training,
    settle_momentum,
)
from flopwise.setup.written import read_setup
from flopwise.train.hardware import check_planned, find_here, place_of
from flopwise.train.origin import adapter_notes, check_weights, choose_tokenizer, label_names
from flopwise.train.own_data import Data, OwnData
from flopwise.train.planning import FoundPlan, check_fits, find_plan, given_plan, note_clipping
from flopwise.train.request import TrainRequest
from flopwise.train.trained_model import CPU_BATCH_SEQUENCES, CPU_SEQUENCE_TOKENS, DEFAULT_STEPS, find_trained
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats, with_average, with_base
from flopwise.work.lengths import Lengths
from flopwise.work.model import Model, beyond_context
from flopwise.work.optimizers import Optimizer
from flopwise.work.transformer import Transformer

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSIFIER_SEQUENCE_TOKENS = 128
CLASSIFIER_BATCH_SEQUENCES = 8
"""As the usual fine-tuning script has it."""
CLASSIFIER_EPOCHS = 3
LANGUAGE_STEPS = 200
LANGUAGE_EPOCHS = 3
"""As many steps at most as see the data so often: most fine-tuning does no more."""
PREFERENCE_EPOCHS = 1

MOST_LOSS_SHARE = 0.9
"""With more the head is computed for all tokens: choosing them takes about as long as is gained."""
OTHER_LOSS_SHARE = 0.05
"""So far off a plan's share is told: the head of so many tokens is a few percent of a step."""

MANY_EPOCHS = 10
"""More than these are told: they are rarely meant, and the data is learnt by heart."""

TOKEN_FORMATS: dict[str, TokenNumbers] = {
    "tokens-uint16": "uint16",
    "tokens-uint32": "uint32",
    "tokens-int32": "int32",
}

SETTINGS = (
    *("learning_rate", "warmup_steps", "schedule", "min_learning_rate", "decay_share", "decay_shape", "weight_decay"),
    *("beta1", "beta2", "epsilon", "momentum", "nesterov"),
    *("ema", "label_smoothing", "z_loss", "dpo_beta", "dpo_label_smoothing"),
)
"""Fields of a request that go into the training's settings as they are, where they are given."""

FIRST_RATE = 1e-3
"""Learning rate of a small model that begins from nothing; larger ones want less."""
LARGE_RATE = 3e-4
LARGE_PARAMETERS = 10**8
FINE_TUNING_RATE = 5e-5
ADAPTER_RATE = 2e-4
"""Of adapters, as QLoRA's paper has it for models of 7 and 13 billion parameters."""
PREFERENCE_RATE = 1e-6
"""Of DPO, as TRL has it; of adapters ten times as much."""
PREFERENCE_ADAPTER_RATE = 1e-5
OPTIMIZER_SHARES: dict[Optimizer, tuple[float, float]] = {
    "lion": (0.2, 5.0),
    "adafactor": (20.0, 1.0),
    "sgd": (1.0, 0.0),
    "sgd-momentum": (1.0, 0.0),
}
"""Learning rate and weight decay in units of AdamW's, where nobody says: Lion's are those of its paper (3 to 10 times
less and more), Adafactor's rate is in units of a matrix' own size, which is some 0.02, and SGD has no decay, as torch
has it. SGD's rate is always said."""
USUAL_EMA = 0.999
"""Of a precision that has a mean of the weights, where nobody says how slow it is."""
FINE_TUNING_NORM = 1.0
"""What gradients are clipped to where a training begins from weights: what most fine-tuning has."""

TrainingData = FileData | OwnData


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """All that a training needs."""

    model: Transformer
    training: Training
    plan: Plan | ClusterPlan
    expected: Outcome
    """What a step takes, as far as that is known."""
    data: TrainingData
    hardware: Hardware
    """What it is planned for."""
    place: str
    """What it runs on, for people: the same, unless --anywhere was told."""
    tokenizer: str | None
    """Its file, or bytes."""
    device: str
    """As torch calls it: cpu, cuda."""
    weights: Path | None
    """A folder whose weights are the first ones."""
    origin: Path | None
    """Where the configuration lies that a checkpoint's is made of."""
    checks: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def batch_sequences(self) -> int:
        """Of a step: the plan's, or fewer where its last round is not full."""
        return self.expected.batch_sequences or self.plan.batch_sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What is known before any data is read."""

    request: TrainRequest
    plan: tuple[Plan | ClusterPlan, Model] | None
    """None: one is still to be found."""
    resumed: bool
    setup: Setup
    """Model, hardware and sequence; the rest is the plan's."""
    place: str
    weights: Path | None
    task: Task
    notes: tuple[str, ...]

    @property
    def model(self) -> Transformer:
        assert isinstance(self.setup.model, Transformer)
        return self.setup.model


def settle(
    request: TrainRequest, here: Here, *, ranks: int, plan: tuple[Plan | ClusterPlan, Model] | None = None
) -> Settled:
    """Everything that needs neither data nor torch; `plan`: that of a run which is resumed."""
    resumed = plan is not None
    if plan is None and request.model is not None and is_plan(request.model):
        plan = load_plan(Path(request.model))
    name, hardware = find_here(request, plan[0] if plan else None, here)
    told: tuple[str, ...] = ()
    if plan is not None:
        told = check_planned(plan[0], hardware, request)
        if request.on is not None:
            plan = replace(plan[0], hardware=name), plan[1]
    request = replace(request, optimizer=settle_momentum(request.optimizer, request.momentum))
    check_optimizer(plan[0].optimizer if plan is not None else request.optimizer or "adamw", ranks=ranks)
    model, weights, task = find_trained(request, plan, hardware, ranks)
    if request.base is not None:
        formats = parse_formats(request.precision) if request.precision else usual_formats(hardware, model)
        request = replace(request, precision=with_base(formats, request.base).name)
    request = _with_average(request, plan, model, hardware)
    if request.precision is not None:
        check_formats(parse_formats(request.precision))
    if ranks > 1:
        _check_several(request, plan[0] if plan else None, resumed=resumed)
    sequence = _sequence_tokens(request, plan, model, here.device)
    if not resumed:
        check_weights(weights)
    request, clipping = _with_clipping(replace(request, tokenizer=choose_tokenizer(request, weights)), plan, weights)
    return Settled(
        request=request,
        plan=plan,
        resumed=resumed,
        setup=Setup(model=model, hardware=hardware, hardware_name=name, sequence_tokens=sequence),
        place=place_of(request, hardware, here),
        weights=weights,
        task=task,
        notes=(
            *told,
            *_drawn_note(request, weights),
            *clipping,
            *(adapter_notes(weights) if model.adapters is not None else ()),
        ),
    )


def _drawn_note(request: TrainRequest, weights: Path | None) -> tuple[str, ...]:
    """Where a folder of transformers' describes the model, weights are expected in it."""
    folder = None if weights is not None or request.from_scratch else _described_in(request)
    return () if folder is None else (f"first weights are drawn: {folder} holds none",)


def prepare(
    request: TrainRequest,
    *,
    ranks: int,
    plan: tuple[Plan | ClusterPlan, Model] | None = None,
    training: Training | None = None,
    tell: Callable[[str, int, int], None] | None = None,
    own: Data | None = None,
) -> Prepared:
    """Settle everything that was left open.

    `plan` and `training`: those of a run which is resumed. With another number of ranks than the plan is for it is made
    anew for the same sequences, batch and formats. `own`: data that the caller brings.
    """
    here = _here(request.device)
    settled = settle(request, here, ranks=ranks, plan=plan)
    request, model, task, weights = settled.request, settled.model, settled.task, settled.weights
    hardware, sequence = settled.setup.hardware, settled.setup.sequence_tokens
    assert sequence is not None
    data = OwnData(own, sequence) if own is not None else _open_data(settled, sequence, tell)
    if request.stream_data and not isinstance(data, StreamedData):
        raise FlopwiseError(
            "--stream-data is for text of a language model",
            why="rows of examples, labels and hidden tokens are read before the first step",
            hint="without it",
        )
    if task == "classification" and own is None:
        # Its labels are what the data has; a plan for another number of them differs by a few rows.
        model = replace(model, labels=len(getattr(data, "labels", ())))
    if settled.plan is None and own is None and isinstance(data, ExampleData):
        model = replace(model, loss_share=_rounded_share(data.loss_share))
    own_plan, expected = plan_of_run(settled, model, ranks, _layout(data, request, ranks))
    if isinstance(data, ExampleData) and not _shares(request, own_plan):
        # Attention knows where examples begin in chunks of whole sequences on one device.
        data.lay_out(packed=False)
        own_plan, expected = plan_of_run(settled, model, ranks, _layout(data, request, ranks))
    batch = expected.batch_sequences or own_plan.batch_sequences
    steps = _steps(request, task, data.count, batch)
    resumed = training is not None
    if training is not None:
        asked = request.steps is not None or request.epochs is not None
        training = replace(training, steps=steps if asked else training.steps)
    else:
        training = _training(request, task, model, sequence, own_plan, steps=steps, from_weights=weights is not None)
    return Prepared(
        model=model,
        training=training,
        plan=own_plan,
        expected=expected,
        data=data,
        hardware=hardware,
        place=settled.place,
        tokenizer=request.tokenizer,
        device=here.device,
        weights=weights,
        origin=weights or _described_in(request),
        checks=(
            *_checks(hardware, settled.place, expected, data.describe(), weights),
            *_dropout_check(model, training),
        ),
        notes=(
            *settled.notes,
            *held_out_alone(request.data, tokens=request.data_format is not None),
            *data.notes,
            *([] if resumed else _share_notes(model, data)),
            *_notes(model, hardware, expected, training, data),
            *([] if resumed else _length_notes(request, task, training, batch, data.count)),
            *_rounding_notes(own_plan, training),
            *([note_clipping(own_plan, model, hardware)] if training.clip_norm is not None else []),
        ),
    )


def _shares(request: TrainRequest, plan: Plan | ClusterPlan) -> bool:
    """Whether several examples share a sequence."""
    return request.packing and isinstance(plan, Plan) and plan.chunks_per_sequence == 1


def _layout(data: TrainingData, request: TrainRequest, ranks: int) -> Lengths | None:
    """The data's lengths as they are run: one device leaves padding out, several compute it."""
    if data.lengths is None or ranks == 1:
        return data.lengths
    to_longest = request.padding == "longest" or isinstance(data, ExampleData)
    return replace(data.lengths, layout="longest" if to_longest else "padded")


def _here(wanted: str) -> Here:
    # With torch, which those who only look at a request do without.
    from flopwise.engine.devices import device_here

    return device_here(wanted)


def _within_caps(found: FoundPlan, model: Transformer, hardware: Hardware, *, anywhere: bool) -> FoundPlan:
    """A plan that holds no more than it says that it may; each of several devices, than there is."""
    plan, expected = found
    if isinstance(plan, ClusterPlan):
        # What was planned for other devices is run as it is, if that is wanted.
        return found if anywhere else check_fits(found, model, hardware)
    held = (
        ("device", expected.device_total, plan.device_memory_bytes),
        ("host", expected.host_total, plan.host_memory_bytes),
    )
    for place, taken, most in held:
        if taken is not None and taken > most:
            raise FlopwiseError(
                f"the plan holds {show_bytes(taken)} of {place} memory, and its own cap is {show_bytes(most)}",
                why=f"{place}_memory_bytes says how much it may take at most",
                hint=f"plan again for that cap, or correct {place}_memory_bytes",
            )
    return found


def _check_several(request: TrainRequest, plan: Plan | ClusterPlan | None, *, resumed: bool) -> None:
    """Refuse formats that several devices do not train in, before any data is read."""
    precision = plan.precision if plan is not None else request.precision
    if precision is not None and resumed:
        check_several(parse_formats(precision), "--gpus 1")
    elif precision is not None:
        check_several(parse_formats(precision))


def _with_average(
    request: TrainRequest, plan: tuple[Plan | ClusterPlan, Model] | None, model: Model, hardware: Hardware
) -> TrainRequest:
    """Where a mean of the weights is asked for, it is a part of what is planned."""
    if request.ema is None:
        return request
    if plan is not None:
        if parse_formats(plan[0].precision).average is None:
            raise FlopwiseError(
                "--ema beside a plan without room for a mean of the weights",
                why=f"its precision is {plan[0].precision}",
                hint=f"plan again with --precision {plan[0].precision},average=fp32",
            )
        return request
    formats = parse_formats(request.precision) if request.precision else usual_formats(hardware, model)
    return replace(request, precision=with_average(formats).name)


def _described_in(request: TrainRequest) -> Path | None:
    """The folder whose config.json describes the model, where its weights are not begun with."""
    folder = model_folder(request.model) if request.model is not None and not is_plan(request.model) else None
    return folder if request.model is not None and not request.model.endswith(".toml") else None


def _dropout_check(model: Transformer, training: Training) -> list[str]:
    """What training drops, where the model says that it drops anything."""
    if model.dropout is None or not model.dropout.sites:
        return []
    if not training.drops:
        return ["no dropout"]
    by_share: dict[float, list[str]] = {}
    for site, share in model.dropout.sites.items():
        by_share.setdefault(share, []).append(site)
    return ["dropout " + ", ".join(f"{share:g} ({', '.join(sites)})" for share, sites in by_share.items())]


def _share_notes(model: Transformer, data: TrainingData) -> list[str]:
    """Where a plan computes the head of tokens that have no loss, or is for another share of them than the data has."""
    if isinstance(data, OwnData):
        return []
    share = _rounded_share(data.loss_share) if isinstance(data, ExampleData) else 1.0
    if model.loss_share < 1 and abs(model.loss_share - share) > OTHER_LOSS_SHARE:
        wanted = f"with --loss-share {share:g}" if share < 1 else "without --loss-share"
        has = f"the data has {100 * share:.3g} %: plan {wanted}"
        return [f"the plan is for {100 * model.loss_share:.3g} % of the tokens with a loss, {has}"]
    if model.loss_share < 1 or share == 1:
        return []
    return [
        f"the plan computes the head of every token; with --loss-share {share:g} it would of those with a loss alone"
    ]


def _rounded_share(share: float) -> float:
    """A share of tokens with a loss as a plan has it: in whole percent, and all where nearly all have one."""
    # 100 · 0.07 is a little more than 7.
    return 1.0 if share > MOST_LOSS_SHARE else ceil(round(100 * share, 6)) / 100


def _sequence_tokens(
    request: TrainRequest, plan: tuple[Plan | ClusterPlan, Model] | None, model: Transformer, device: str
) -> int:
    if plan is not None:
        return plan[0].sequence_tokens
    if request.sequence_tokens is not None:
        model.check_sequence(request.sequence_tokens)
        return request.sequence_tokens
    most = model.context
    if model.head == "classifier":
        return min(most, CLASSIFIER_SEQUENCE_TOKENS)
    return min(most, CPU_SEQUENCE_TOKENS) if device == "cpu" else most


def _open_data(settled: Settled, sequence: int, tell: Callable[[str, int, int], None] | None) -> FileData:
    request, model, task = settled.request, settled.model, settled.task
    wanted = DataRequest(
        sources=request.data,
        tokenizer=request.tokenizer,
        sequence_tokens=sequence,
        vocab=model.vocab,
        token_types=model.token_types,
        seed=request.seed,
        text_column=request.text_column,
        label_column=request.label_column,
        padding=request.padding,
        train_on=request.train_on,
        tokens=TOKEN_FORMATS.get(request.data_format or ""),
        labels=label_names(settled.weights) if task == "classification" else (),
        pairs=task == "dpo",
        whole_words=request.whole_words,
        mask_share=request.mask_share or usual_mask_share(model),
        evaluation=evaluation_of(request.evaluation_data, request.data, tokens=request.data_format is not None),
    )
    if task == "classification":
        return open_classification_data(wanted, tell=tell)
    if task == "dpo":
        return open_preference_data(wanted, tell=tell)
    if task == "masked":
        return open_masked_data(wanted, tell=tell)
    if holds_examples(wanted):
        return open_example_data(wanted, tell=tell)
    if _streams(request, wanted, resumed=settled.resumed):
        return open_streamed_data(wanted, tell=tell)
    return open_language_data(wanted, tell=tell)


def _streams(request: TrainRequest, wanted: DataRequest, *, resumed: bool) -> bool:
    """Whether steps begin before all text is tokenized: as asked, or for large texts where it is said how many."""
    # How many steps a resumed run has is in its record.
    if request.stream_data is None:
        return not resumed and request.steps is not None and is_streamed(wanted)
    return request.stream_data


def _for_other_ranks(request: TrainRequest, plan: Plan | ClusterPlan) -> TrainRequest:
    """A request for the same training on another number of devices."""
    asked = None if isinstance(plan, ClusterPlan) else request.batch_sequences
    return replace(
        request,
        batch_sequences=asked or plan.batch_sequences,
        micro_batch_sequences=None,
        precision=plan.precision,
    )


def plan_of_run(settled: Settled, model: Transformer, ranks: int, lengths: Lengths | None = None) -> FoundPlan:
    """The plan that is given, or the one that is found, with what it takes where sequences have these lengths."""
    request, plan, hardware = settled.request, settled.plan, settled.setup.hardware
    if plan is not None and settled.resumed and plan[0].devices != ranks:
        request, plan = _for_other_ranks(request, plan[0]), None
    if plan is not None:
        devices = plan[0].devices
        if devices != ranks:
            raise FlopwiseError(
                f"the plan is for {devices} device{'s' if devices > 1 else ''}, and {ranks} run",
                hint=f"--gpus {devices}, or plan again",
            )
        found = given_plan(plan[0], model, hardware, request.batch_sequences, lengths)
        return found if settled.resumed else _within_caps(found, model, hardware, anywhere=request.anywhere)
    batch = request.batch_sequences
    if batch is not None and batch > MOST_PAIRS:
        raise FlopwiseError(
            f"a batch of {batch:,} sequences is more than can be planned",
            why=f"at most {MOST_PAIRS:,} are",
            hint="--batch 48",
        )
    if batch is None and model.head == "classifier":
        batch = CLASSIFIER_BATCH_SEQUENCES * ranks
    elif batch is None and (hardware.link is None or ranks > 1 or request.model is None):
        batch = CPU_BATCH_SEQUENCES * ranks
    more = {
        "lengths": lengths,
        "batch_sequences": batch,
        "clip": request.clip_norm is not None,
        "parallel": shard_all(ranks),
    }
    settled_already = {name: getattr(settled.setup, name) for name in ("hardware_name", "sequence_tokens")}
    return find_plan(read_setup(request, Setup, model, hardware, **more | settled_already))


def _with_clipping(
    request: TrainRequest, plan: tuple[Plan | ClusterPlan, Model] | None, weights: Path | None
) -> tuple[TrainRequest, tuple[str, ...]]:
    """The largest norm of gradients settled: as asked, else what is usual from weights, where the plan allows it."""
    if request.clip_norm is not None:
        return replace(request, clip_norm=request.clip_norm or None), ()
    if weights is None:
        return request, ()
    if plan is not None and isinstance(plan[0], Plan) and plan[0].update_when != "end":
        told = (
            "gradients are not clipped: the plan updates before all of them are there; `flopwise plan … --clip` waits"
        )
        return request, (told,)
    return replace(request, clip_norm=FINE_TUNING_NORM), ()


def _steps(request: TrainRequest, task: Task, count: int, batch: int) -> int:
    if request.steps is not None and request.epochs is not None:
        raise FlopwiseError("both --steps and --epochs", why="one follows from the other", hint="one of them")
    steps = request.steps
    if steps is None and (request.epochs is not None or task == "classification"):
        epochs = CLASSIFIER_EPOCHS if request.epochs is None else request.epochs
        if not 0 < epochs < 10**6:
            raise FlopwiseError(f"a training cannot have {epochs} epochs", hint="--epochs 3")
        steps = max(1, ceil(epochs * count / batch))
    if steps is None:
        steps = DEFAULT_STEPS if request.model is None else LANGUAGE_STEPS
        if request.data or request.own_data:
            epochs = PREFERENCE_EPOCHS if task == "dpo" else LANGUAGE_EPOCHS
            steps = min(steps, max(1, ceil(epochs * count / batch)))
    return steps


def _length_notes(request: TrainRequest, task: Task, training: Training, batch: int, count: int) -> list[str]:
    """How often the data is seen, where nobody said how long a language model is trained on it."""
    if task == "classification" or not (request.data or request.own_data):
        return []
    if request.steps is not None or request.epochs is not None:
        return []
    seen = training.steps * batch / count
    told = f"{seen:.1f} times" if seen >= 1 else f"as far as {show_share(seen)}"
    return [f"{training.steps:,} steps see the {count:,} sequences {told}: --epochs 3 or --steps says otherwise"]


def _training(
    request: TrainRequest,
    task: Task,
    model: Transformer,
    sequence: int,
    plan: Plan | ClusterPlan,
    *,
    steps: int,
    from_weights: bool,
) -> Training:
    """The settings; what was left open is as small models and fine-tuning have it."""
    formats, optimizer = parse_formats(plan.precision), plan.optimizer
    large = describe(model, sequence).parameters >= LARGE_PARAMETERS
    tuned = FINE_TUNING_RATE if model.adapters is None else ADAPTER_RATE
    if task == "dpo":
        tuned = PREFERENCE_RATE if model.adapters is None else PREFERENCE_ADAPTER_RATE
    rate = tuned if from_weights else LARGE_RATE if large else FIRST_RATE
    rate_share, decay_share = OPTIMIZER_SHARES.get(optimizer, (1.0, 1.0))
    chosen: dict[str, Any] = {
        "learning_rate": rate_share * rate,
        "warmup_steps": min(100, steps // 10),
        "schedule": "linear" if task == "classification" else "cosine",
        "weight_decay": decay_share * (0.01 if task == "classification" else 0.1),
        **OPTIMIZER_SETTINGS[optimizer],
        "ema": USUAL_EMA if formats.average else 0.0,
    }
    if request.warmup_share is not None:
        chosen["warmup_steps"] = round(request.warmup_share * steps)
    chosen |= {name: getattr(request, name) for name in SETTINGS if getattr(request, name) is not None}
    return Training(
        steps=steps,
        task=task,
        optimizer=optimizer,
        clip_norm=request.clip_norm,
        stochastic_rounding=formats.weights_are_coarse
        if request.stochastic_rounding is None
        else request.stochastic_rounding,
        # How likely an answer is does not depend on chance, neither for the model nor for its reference.
        drops=request.dropout != 0 if task != "dpo" else bool(request.dropout),
        seed=request.seed,
        **chosen,
    )


def _notes(
    model: Transformer,
    hardware: Hardware,
    expected: Outcome,
    training: Training,
    data: TrainingData,
) -> list[str]:
    """What a reader should know before the first step."""
    beyond = beyond_context(model, expected.sequence_tokens or 0)
    found = [told for told in (model.note, beyond) if told]
    found += [model.routing.words] if model.routing.has_losses else []
    if expected.step_s is None:
        found.append(f"nothing is predicted: {hardware.name} has no measured rate for this set-up")
    if training.warmup_steps >= training.steps:
        found.append(f"the warm-up of {training.warmup_steps:,} steps outlasts the training")
    epochs = training.steps * (expected.batch_sequences or 0) / data.count
    if epochs > MANY_EPOCHS:
        streams = isinstance(data, StreamedData)
        seen, usual = ("about", "three times is") if streams else ("the", "--epochs 3 is")
        found.append(f"{training.steps:,} steps see {seen} {data.count:,} sequences {epochs:,.0f} times; {usual} usual")
    return found


def _rounding_notes(plan: Plan | ClusterPlan, training: Training) -> list[str]:
    """How weights are rounded that have no more exact copy."""
    if not parse_formats(plan.precision).weights_are_coarse:
        return []
    if training.stochastic_rounding:
        return ["bf16 weights are rounded up or down by chance, so that small steps count"]
    return ["bf16 weights are rounded to nearest: most steps of a small learning rate leave them as they are"]


def _checks(
    hardware: Hardware, place: str, expected: Outcome, data: dict[str, Any], weights: Path | None
) -> tuple[str, ...]:
    memory = int(hardware.device.dram.size_bytes.value) / 2**30
    found = [f"{hardware.title}, {memory:,.0f} GiB"] if place == hardware.title else []
    if weights is not None:
        found.append(f"weights from {weights.name}")
    if expected.device_total:
        found.append(f"plan takes {expected.device_total / 2**30:,.2f} GiB")
    if expected.host_total:
        found.append(f"{expected.host_total / 2**30:,.1f} GiB of host memory")
    if "sequences_about" in data:
        found.append(f"about {int(data['sequences_about']):,} sequences")
    sequences = data.get("sequences") or data.get("train_samples") or data.get("samples")
    if sequences:
        found.append(f"{int(sequences):,} sequences")
    return tuple(found)
