"""One rank of the tests of distributed training, and what each of its cases should come to in one process.

`python -m tests.support.distributed_worker quick FOLDER` runs cases as one of several ranks; rank 0 writes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.nn import functional

from flopwise.engine.batch import NO_LABEL, Batch
from flopwise.engine.formats import TYPES
from flopwise.engine.kernels.quantised import Quantised
from flopwise.engine.kernels.updating import UpdateSettings
from flopwise.engine.launch import Group, leave, rank_of
from flopwise.engine.modules import PlainBlock, ReferenceModel
from flopwise.engine.sharded.distributed import DistributedExecutor
from flopwise.engine.streaming.updates import update_numbers
from flopwise.engine.weights.checkpoint import CheckpointState, load, save
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.outcome import Outcome
from flopwise.setup.parallel import Parallel
from flopwise.setup.training import Training
from flopwise.work.adapters import Adapters
from flopwise.work.formats import QUANTISED_BITS, parse_formats
from flopwise.work.optimizers import Moment, Optimizer, fields_of, rule_of_parameter
from flopwise.work.parameters import parameters_of
from flopwise.work.routing import BalanceOver
from flopwise.work.transformer import Dropout, Transformer
from flopwise.work.work import Recompute
from tests.support.dropped_reference import DocumentedDrops
from tests.support.routing_reference import balance_of, z_of
from tests.support.tiny_models import TINY, TOKENS, parameters, random_module

OVER: tuple[BalanceOver, ...] = ("model", "layer", "sequence")
FP64 = "fp32,matrix=fp64,compute=fp64,weights=fp64,gradients=fp64,moments=fp64"
STEPS = 5
SAVED_AFTER = 3
CPU = torch.device("cpu")

GRADIENTS = Training(steps=1, beta1=0.0, weight_decay=0.0, learning_rate=1e-3)
"""With these the first moment after a step is the gradient."""
LEARNING = Training(steps=STEPS, learning_rate=3e-3, warmup_steps=2, clip_norm=0.7, weight_decay=0.2)
# Without clipping: a norm's last bits depend on the order of its sum.
BY_CHANCE = replace(LEARNING, stochastic_rounding=True, seed=7, clip_norm=None)

PLAN = ClusterPlan(
    hardware="this-cpu",
    devices=2,
    sequence_tokens=TOKENS,
    batch_sequences=5,
    micro_batch_sequences=2,
    precision=FP64,
    recompute="none",
    attention="flash",
    fusion="eager",
    optimizer="adamw",
    stack="kernels",
    parallel=Parallel(data=2, zero=3),
    expected=Outcome(step_s=1.0, tokens_per_s=1.0, mfu=0.1, device_bytes=1 << 20),
)


DROPPED = {
    f"{name} dropped": replace(TINY[name], dropout=Dropout(embedding=0.1, hidden=0.3, attention=0.2, classifier=0.4))
    for name in ("llama", "gpt2", "bert")
}
"""Models that drop what the documented masks say."""


BESIDE = Adapters(rank=3, alpha=5.0)
ROUTED = {
    f"{name} over {over}": replace(
        TINY[name], routing=replace(TINY[name].routing, balance=0.7, balance_over=over, z_loss=0.03)
    )
    for name, over in zip(("mixtral", "glm4_moe", "qwen2_moe"), OVER, strict=True)
}
"""Mixtures whose routing has losses."""
PARTLY = {
    "llama adapters": replace(TINY["llama"], adapters=BESIDE),
    "llama some adapters": replace(
        TINY["llama"], adapters=BESIDE, layers=3, frozen=("blocks.0-1",), tied=True, loss_share=0.4
    ),
    "gpt2 adapters": replace(TINY["gpt2"], adapters=replace(BESIDE, targets=("o", "down"))),
    "mixture adapters": replace(TINY["qwen3_moe"], adapters=BESIDE),
    "llama magnitudes": replace(TINY["llama"], adapters=replace(BESIDE, magnitudes=True)),
    "gpt2 magnitudes": replace(TINY["gpt2"], adapters=replace(BESIDE, magnitudes=True)),
    "llama frozen": replace(TINY["llama"], layers=3, frozen=("embedding", "blocks.0", "blocks.2")),
    "gpt2 frozen head": replace(TINY["gpt2-untied"], frozen=("head", "blocks.1")),
}
"""Models that are trained in part."""
QUANTISED = (("nf4", "llama", 3), ("int8", "mixture", 3), ("fp8", "gpt2", 2))


@dataclass(frozen=True)
class Case:
    """A training of a few steps."""

    name: str
    model: str
    zero: int
    precision: str = FP64
    recompute: Recompute = "none"
    training: Training = LEARNING
    sequences: int = 5
    micro: int = 2
    reshard: bool = True
    shard: int | None = None
    optimizer: Optimizer = "adamw"

    @property
    def described(self) -> Transformer:
        return DROPPED.get(self.model) or ROUTED.get(self.model) or PARTLY.get(self.model) or TINY[self.model]

    def plan(self, world: int) -> ClusterPlan:
        shard = self.shard if world > 1 else None
        return replace(
            PLAN,
            devices=world,
            batch_sequences=self.sequences,
            micro_batch_sequences=self.micro,
            precision=self.precision,
            recompute=self.recompute,
            optimizer=self.optimizer,
            parallel=Parallel(data=world, zero=self.zero, reshard=self.reshard, shard=shard),
        )


RECOMPUTED: dict[str, Recompute] = {"llama": "none", "gpt2": "full", "bert": "input"}
GRADIENT_CASES = [
    Case(f"gradients {model} zero{zero}", model, zero, training=GRADIENTS, recompute=recompute)
    for model, recompute in RECOMPUTED.items()
    for zero in (0, 1, 2, 3)
]
LLAMA_CASES = [Case(f"llama zero{zero}", "llama", zero) for zero in (0, 1, 2, 3)]
EXACT_CASES = [
    *(Case(f"{model} zero{zero}", model, zero) for model in ("gpt2", "bert") for zero in (0, 2, 3)),
    Case("qwen3 again", "qwen3", 3, recompute="context"),
    Case("masked kept", "bert-masked", 3, reshard=False, recompute="pointwise"),
    Case("less sequences than ranks", "llama", 3, sequences=1),
    Case("many passes", "llama", 2, sequences=7, micro=1, recompute="full"),
    Case("lion", "llama", 3, optimizer="lion"),
    Case("sgd", "llama", 0, optimizer="sgd", training=replace(LEARNING, learning_rate=0.1)),
    Case("momentum", "gpt2", 2, optimizer="sgd-momentum", training=replace(LEARNING, nesterov=True)),
    Case("mean", "llama", 3, precision=f"{FP64},average=fp64", training=replace(LEARNING, ema=0.9)),
    # One pass of both ranks is the whole batch.
    Case("balanced model", "mixtral over model", 3, sequences=4),
    Case("balanced layers", "glm4_moe over layer", 2, sequences=3, recompute="full"),
    Case("balanced sequences", "qwen2_moe over sequence", 0, sequences=1),
    Case("dropped bert", "bert dropped", 3, recompute="input", training=replace(LEARNING, seed=5)),
    Case("dropped gpt2", "gpt2 dropped", 0, sequences=7, micro=1, recompute="full"),
    Case("dropped llama", "llama dropped", 2),
]
PARTLY_CASES = [
    *(Case(f"adapters zero{zero}", "llama adapters", zero) for zero in (0, 1, 2, 3)),
    Case("some adapters", "llama some adapters", 3, recompute="input"),
    Case("gpt2 adapters", "gpt2 adapters", 2, recompute="full", sequences=7, micro=1),
    Case("mixture adapters", "mixture adapters", 3),
    Case("magnitudes zero3", "llama magnitudes", 3, recompute="input"),
    Case("magnitudes zero2", "gpt2 magnitudes", 2, sequences=7, micro=1),
    *(Case(f"{base} adapters", f"{model} adapters", zero, f"{FP64},base={base}") for base, model, zero in QUANTISED),
    Case("nf4 magnitudes", "llama magnitudes", 0, f"{FP64},base=nf4"),
    Case("frozen parts", "llama frozen", 3, precision=f"{FP64},average=fp64", training=replace(LEARNING, ema=0.9)),
    Case("frozen head", "gpt2 frozen head", 2),
]
"""The first four are saved and go on elsewhere, too."""
FP32_CASES = [
    Case("fp32 llama zero3", "llama", 3, "fp32", recompute="input"),
    Case("fp32 gpt2 zero2", "gpt2", 2, "fp32"),
    Case("fp32 bert zero0", "bert", 0, "fp32"),
]
NARROW_CASES = [
    Case("mixed zero3", "llama", 3, "bf16-mixed", recompute="input"),
    Case("amp zero2", "gpt2", 2, "bf16-amp"),
    Case("amp adapters zero3", "llama adapters", 3, "bf16-amp,base=bf16", recompute="input"),
    Case("amp frozen zero2", "llama frozen", 2, "bf16-amp,base=bf16"),
    Case("amp magnitudes zero3", "llama magnitudes", 3, "bf16-amp,base=nf4"),
    Case("amp zero0", "llama", 0, "bf16-amp", recompute="full"),
    Case("bf16 zero1", "llama", 1, "bf16", training=BY_CHANCE),
]
CHANCE_CASES = [Case(f"chance zero{zero}", "llama", zero, "bf16", training=BY_CHANCE) for zero in (0, 2, 3)]
HYBRID_CASES = [
    Case(f"hybrid {model} zero{zero}", model, zero, shard=2, sequences=7, micro=1)
    for model, zero in (("llama", 3), ("gpt2", 2), ("bert", 1))
]
ALL_CASES = [*GRADIENT_CASES, *LLAMA_CASES, *EXACT_CASES, *PARTLY_CASES, *FP32_CASES, *NARROW_CASES]
RESUMED = "resumed"
"""The last of LLAMA_CASES, from its checkpoint on."""


def batch_of(case: Case, number: int) -> Batch:
    """Ragged sequences, of which some tokens have no loss; another width in every step."""
    model, generator = case.described, np.random.default_rng(100 + number)
    width = TOKENS - number
    ids = generator.integers(model.vocab, size=(case.sequences, width), dtype=np.int32)
    lengths = generator.integers(2, width + 1, size=case.sequences, dtype=np.int32)
    if model.head == "classifier":
        labels = generator.integers(model.labels or 0, size=case.sequences, dtype=np.int32)
        labels[1:2] = NO_LABEL
        return Batch(ids, labels, lengths)
    labels = np.roll(ids, -1, axis=1)
    labels[:, -1] = NO_LABEL
    labels[generator.random(labels.shape) < 0.2] = NO_LABEL
    labels[np.arange(width)[None, :] >= lengths[:, None]] = NO_LABEL
    return Batch(ids, labels, lengths)


def first_weights(case: Case) -> dict[str, Tensor]:
    return parameters(random_module(case.described, dtype=torch.float64))


@dataclass
class CaseOutcome:
    """What a case came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    with_loss: list[int] = field(default_factory=list)
    evaluated: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


# -- in one process ---------------------------------------------------------------------------------------------------


class Reference:
    """The plain module on whole batches, and AdamW over whole tensors."""

    def __init__(self, case: Case) -> None:
        formats = parse_formats(case.precision)
        assert formats.master is None and formats.weights == formats.compute
        self.case = case
        self.module: ReferenceModel = random_module(case.described).to(TYPES[formats.weights])
        if formats.base in QUANTISED_BITS:
            self.quantise(formats.base)
        begun = parameters(self.module)
        self.listed = {each.name: each for each in parameters_of(case.described, TOKENS) if each.trained}
        for name, value in self.module.named_parameters():
            value.requires_grad_(name in self.listed)
        self.moments: dict[str, dict[Moment, Tensor]] = {
            name: {
                field.name: begun[name].clone() if field.name == "average" else torch.zeros_like(value)
                for field in fields_of(case.optimizer, self.listed[name], parse_formats(case.precision))
            }
            for name, value in parameters(self.module).items()
            if name in self.listed
        }

    @torch.no_grad()
    def quantise(self, kind: str) -> None:
        """Frozen matrices of blocks, as they are when they are dequantised."""
        for each in parameters_of(self.case.described, TOKENS):
            if not each.trained and isinstance(each.part, int) and each.role == "matrix":
                value = self.module.get_parameter(each.name)
                room = torch.empty(value.numel() * 8, dtype=torch.uint8)
                matrix = Quantised.within(room, tuple(value.shape), kind)
                matrix.quantise(value)
                matrix.dequantise(out=value)

    def step(self, number: int) -> tuple[float, float | None]:
        case, training = self.case, self.case.training
        batch = batch_of(case, number)
        self.module.zero_grad()
        assert batch.lengths is not None
        drops = None
        if case.described.dropout is not None:
            drops = DocumentedDrops(case.described, seed=training.seed, step=number, sequence_tokens=TOKENS)
        loss = self.module.loss(
            torch.from_numpy(batch.ids), torch.from_numpy(batch.labels), torch.from_numpy(batch.lengths), drops
        )
        loss = loss + batch.with_loss * self.beside(batch)
        torch.autograd.backward(loss / batch.with_loss)
        norm, scale = None, 1.0
        if training.clip_norm is not None:
            gradients = [value.grad for value in self.module.parameters() if value.grad is not None]
            norm = float(torch.cat([gradient.reshape(-1) for gradient in gradients]).norm())
            scale = min(1.0, training.clip_norm / (norm + 1e-6))
        settings = UpdateSettings(
            rate=training.rate_at(number),
            beta1=training.beta1,
            beta2=training.beta2,
            epsilon=training.epsilon,
            momentum=training.momentum,
            nesterov=training.nesterov,
            weight_decay=training.weight_decay,
            step=number + 1,
            gradient_scale=scale,
        )
        for name, value in self.module.named_parameters():
            if name not in self.listed:
                continue
            assert value.grad is not None
            decay = training.weight_decay if self.listed[name].decays else 0.0
            update_numbers(
                rule_of_parameter(case.optimizer, self.listed[name]),
                value.data.view(-1),
                value.grad.view(-1),
                {moment: numbers.view(-1) for moment, numbers in self.moments[name].items()},
                settings=replace(settings, weight_decay=decay),
                offset=0,
            )
            if "average" in self.moments[name]:
                self.moments[name]["average"].lerp_(value.data, 1.0 - training.ema)
        return float(loss.detach()) / batch.with_loss, norm

    def beside(self, batch: Batch) -> Tensor | float:
        """What the routing of a batch adds to its loss."""
        model = self.case.described
        if not model.routing.has_losses:
            return 0.0
        blocks = [block for block in self.module.layers if isinstance(block, PlainBlock) and block.model.experts]
        routed = [block.take_routed() for block in blocks]
        assert batch.lengths is not None
        there = torch.arange(batch.ids.shape[1]) < torch.from_numpy(batch.lengths)[:, None]
        balance = model.routing.balance * balance_of(routed, model.routing, model.experts, there)
        return balance + model.routing.z_loss * z_of(routed, model.routing, there)

    def restore(self, checkpoint: Path) -> None:
        loaded = load(checkpoint)
        for name, value in self.module.named_parameters():
            value.data.copy_(loaded.weights[name])
            for moment, numbers in self.moments[name].items():
                numbers.copy_(loaded.optimizer[f"{moment}/{name}"])

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        batches = [batch_of(self.case, number) for number in (10, 11)]
        loss = correct = with_loss = 0.0
        for batch in batches:
            assert batch.lengths is not None
            logits = self.module(torch.from_numpy(batch.ids), torch.from_numpy(batch.lengths))
            flat, labels = logits.reshape(-1, logits.shape[-1]), torch.from_numpy(batch.labels).reshape(-1).long()
            known = labels != NO_LABEL
            loss += float(functional.cross_entropy(flat[known], labels[known], reduction="sum"))
            correct += float((flat.argmax(-1) == labels)[known].sum())
            with_loss += batch.with_loss
        return {
            "loss": loss / with_loss,
            "correct": correct,
            "with_loss": with_loss,
            "sequences": 2 * self.case.sequences,
        }


def expected(case: Case) -> CaseOutcome:
    """The same training without ranks."""
    reference, outcome = Reference(case), CaseOutcome()
    for number in range(case.training.steps):
        loss, norm = reference.step(number)
        outcome.losses.append(loss)
        outcome.norms.append(norm)
        outcome.with_loss.append(batch_of(case, number).with_loss)
    outcome.evaluated = reference.evaluate()
    for name, value in parameters(reference.module).items():
        if name not in reference.listed:
            continue
        outcome.tensors[f"weights/{name}"] = value
        outcome.tensors |= {f"{moment}/{name}": numbers for moment, numbers in reference.moments[name].items()}
    return outcome


# -- as a rank --------------------------------------------------------------------------------------------------------


def executor_of(case: Case) -> DistributedExecutor:
    world = distributed.get_world_size()
    return DistributedExecutor(
        case.plan(world), case.described, case.training, device=CPU, rank=distributed.get_rank(), world=world
    )


def state_of(executor: DistributedExecutor) -> dict[str, Tensor]:
    """Weights and moments, on rank 0."""
    found = {f"weights/{name}": value.clone() for name, value in executor.weights().items()}
    found |= {f"{moment}/{name}": value.clone() for name, moment, value in executor.moments()}
    assert bool(found) == (executor.rank == 0)
    return found


def save_step(executor: DistributedExecutor, case: Case, step: int, folder: Path) -> None:
    """A checkpoint, written by rank 0."""
    weights = executor.weights()
    optimizer = {f"{moment}/{name}": values for name, moment, values in executor.moments()}
    if executor.rank:
        return
    state = CheckpointState(
        step=step,
        position=step * case.sequences,
        model=asdict(case.described),
        training=case.training,
        data={},
        precision=case.precision,
        batch_sequences=case.sequences,
        sequence_tokens=TOKENS,
        totals={},
        files={},
        not_finite=(),
    )
    save(folder, weights=weights, optimizer=optimizer, state=state, config=None, keep=2)


def trained(case: Case, folder: Path, *, begin: int = 0, checkpoint: Path | None = None) -> CaseOutcome:
    """From the first weights, or from a checkpoint."""
    executor, outcome = executor_of(case), CaseOutcome()
    if checkpoint is None:
        executor.set_weights(first_weights(case))
    else:
        loaded = load(checkpoint)
        executor.set_weights(loaded.weights)
        for name in loaded.optimizer:
            moment, _, parameter = name.partition("/")
            executor.set_moment(parameter, moment, loaded.optimizer[name])  # type: ignore[arg-type]
    for number in range(begin, case.training.steps):
        if number == SAVED_AFTER and begin == 0 and case.zero == 3:
            save_step(executor, case, number, folder)
            # Nothing of what an evaluation gathers may be left for the step behind it.
            executor.evaluate([batch_of(case, 12)])
        result = executor.step(batch_of(case, number), number)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.gradient_norm)
        outcome.with_loss.append(result.with_loss)
    outcome.evaluated = asdict(executor.evaluate(batch_of(case, number) for number in (10, 11)))
    assert outcome.evaluated.pop("rewards") is None
    outcome.tensors = state_of(executor)
    outcome.memory = {row.owner: [row.planned_bytes, row.measured_bytes] for row in executor.memory()}
    assert executor.agree(executor.rank == 0) and not executor.agree(False)
    executor.close()
    return outcome


def updated_by_chance(case: Case) -> CaseOutcome:
    """Updates with gradients that are the same numbers at every world size."""
    executor = executor_of(case)
    executor.set_weights(first_weights(case))
    places = dict(executor.module.named_parameters())
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        for parameter in executor.parameters:
            place = places[parameter.name]
            assert isinstance(place, DTensor)
            whole = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
            local = place.to_local().shape[0]
            # Rows by the rule that torch documents for splitting a dimension.
            parts = torch.chunk(whole, distributed.get_world_size() if case.zero else 1)
            mine = parts[executor.rank if case.zero else 0] if local else whole[:0]
            place.grad = DTensor.from_local(
                mine.contiguous(), place.device_mesh, place.placements, shape=whole.shape, stride=whole.stride()
            )
        executor.update(number)
    return CaseOutcome(tensors=state_of(executor))


def write(outcome: CaseOutcome, folder: Path, name: str) -> None:
    tensors = {key: value.contiguous() for key, value in outcome.tensors.items()}
    save_file(tensors, folder / f"{name}.safetensors")
    outcome.tensors = {}
    (folder / f"{name}.json").write_text(json.dumps(asdict(outcome)))


def train(folder: Path, cases: Sequence[Case], by_chance: Sequence[Case] = ()) -> None:
    """Each case in turn."""
    with Group(rank_of(os.environ), "cpu", meeting_s=300, late_s=300) as group:
        for case in (*cases, *by_chance):
            saves = folder / f"run {case.name}"
            saves.mkdir(exist_ok=True)
            outcome = updated_by_chance(case) if case in by_chance else trained(case, saves)
            if group.rank.rank == 0:
                write(outcome, folder, case.name)


def resume(folder: Path) -> None:
    """Go on with what another number of ranks has saved."""
    case = LLAMA_CASES[-1]
    with Group(rank_of(os.environ), "cpu"):
        write(trained(case, folder, begin=SAVED_AFTER, checkpoint=checkpoint_in(folder)), folder, RESUMED)


def checkpoint_in(folder: Path) -> Path:
    return folder / f"run {LLAMA_CASES[-1].name}" / "checkpoints" / f"step-{SAVED_AFTER:08d}"


def lose_the_other(_folder: Path) -> None:
    """Rank 1 leaves while rank 0 still counts on it."""
    with Group(rank_of(os.environ), "cpu", meeting_s=30, late_s=30) as group:
        if group.rank.rank == 1:
            os._exit(9)
        for _ in range(1000):
            distributed.all_reduce(torch.ones(1))


COMMANDS: dict[str, Callable[[Path], None]] = {
    "all": partial(train, cases=ALL_CASES, by_chance=CHANCE_CASES),
    "narrow": partial(train, cases=NARROW_CASES, by_chance=CHANCE_CASES),
    "hybrid": partial(train, cases=HYBRID_CASES),
    "resume": resume,
    "lose": lose_the_other,
}

if __name__ == "__main__":
    faulthandler.enable()
    COMMANDS[sys.argv[1]](Path(sys.argv[2]))
    leave()
