"""The distributed executor: the plain modules on several devices, sharded by PyTorch's FSDP2.

Every rank is given the same batch and takes its share of the sequences. A plan's ZeRO stage is run as

    0  whole copies: a shard is all of it, and gradients are all-reduced after the last micro-batch
    1  gradients are summed whole, scattered after the last micro-batch; weights are gathered once a step
    2  gradients are scattered after every micro-batch; weights are gathered once a step
    3  as 2, with weights gathered for a block's forward and again for its backward (`kept`: not again)

and `shard` as that many ranks to a copy. Embedding and head are gathered as one, from the beginning of forward to the
end of backward. What backward makes again is

    none, selective, everything        nothing, everything being kept
    attention, context, input          what it reads of a block, from the block's input
    full                               the whole block

so that `pointwise` takes more memory than planned and `attention` and `context` less. Attention is that of the
modules, and how far ahead weights are gathered is up to FSDP.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import cast

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import NO_LABEL, Batch
from flopwise.engine.executable import check_executed
from flopwise.engine.executor import Evaluated, StepResult, never
from flopwise.engine.formats import STATE_TYPES, TYPES, statistics_type
from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.updating import follow
from flopwise.engine.modules import PlainBlock, ReferenceModel, at_least_fp32, build
from flopwise.engine.sharded.dropping import BatchDrops
from flopwise.engine.sharded.quantised import QuantisedLinear, dequantise_rows, quantise_rows
from flopwise.engine.sharded.routing_losses import PassLosses
from flopwise.engine.streaming.dropping import Drops
from flopwise.engine.streaming.updates import Updates, update_numbers
from flopwise.engine.weights.adapter_files import row_norms
from flopwise.engine.weights.finite import not_finite
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.measurement import MemoryRow
from flopwise.setup.parallel import Parallel
from flopwise.setup.training import Training
from flopwise.work.adapters import MAGNITUDE
from flopwise.work.formats import COPIES, QUANTISED_BITS, WIDTH_BYTES, Formats, parse_formats
from flopwise.work.optimizers import Moment, StateField, by_parameter, fields_of, rule_of_parameter
from flopwise.work.parameters import Parameter, parameters_of
from flopwise.work.transformer import Transformer

RECOMPUTED = ("attention", "context", "input", "full")
"""Policies that run a block again, from its input."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's rows of a parameter: neighbours, whatever the number of ranks."""

    parameter: Parameter
    place: DTensor
    first: int
    """Of the parameter's numbers, the first that is here."""
    offset: int
    """The same among the numbers of all parameters."""
    most: int
    """Numbers that a rank may have of it; the last ranks have fewer, or none."""
    moments: dict[Moment, Tensor]
    quantised: str = ""
    """How a matrix is kept that is in few bits, a byte counting as a number; empty: it is as it is."""

    @property
    def weights(self) -> Tensor:
        """Its numbers in a row."""
        return self.place.to_local().view(-1)

    @property
    def gradients(self) -> Tensor:
        assert isinstance(self.place.grad, DTensor), f"{self.parameter.name} has no gradient"
        return self.place.grad.to_local().reshape(-1)

    def piece(self, values: Tensor) -> Tensor:
        """Of a whole tensor, the numbers that are here."""
        assert values.shape == self.parameter.shape, f"{self.parameter.name} of {tuple(values.shape)}"
        if self.quantised:
            # What FSDP deals out are rows, or experts: of these the bytes.
            size = self.place.numel() // self.place.shape[0]
            first = self.first // size
            return quantise_rows(values[first : first + self.weights.numel() // size], self.quantised).reshape(-1)
        return values.reshape(-1)[self.first : self.first + self.weights.numel()]

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is kept."""
        return tuple(self.place.shape)

    def numbers(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """What is kept of it, as numbers."""
        return dequantise_rows(kept, self.parameter.shape[-1], self.quantised, dtype) if self.quantised else kept


class DistributedExecutor:
    """A rank's part of a model, its optimizer state, and the steps that all ranks take together.

    The ranks must have met (`flopwise.engine.launch.Group`). `step`, `evaluate`, `agree`, `weights` and `moments`
    are to be called by all of them; what the last two gather is for rank 0 alone.
    """

    def __init__(
        self, plan: ClusterPlan, model: Transformer, training: Training, *, device: torch.device, rank: int, world: int
    ) -> None:
        check_executed(plan, model, world)
        self.plan, self.model, self.training, self.device = plan, model, training, device
        self.rank, self.world = rank, world
        self.formats = parse_formats(plan.precision)
        self.parameters = parameters_of(model, plan.sequence_tokens)
        self._sharers = _sharers(plan.parallel)
        self._mesh = _mesh(device, world, self._sharers)
        self.module = _build_sharded(plan, model, self.formats, self._mesh).to_empty(device=device)
        self._units = [unit for unit in self.module.modules() if isinstance(unit, FSDPModule)]
        self._shards = {shard.parameter.name: shard for shard in self._all_shards()}
        self._updates = Updates(training, self.formats, {}, self.device)
        dropout = model.dropout if training.drops else None
        self._drops = None if dropout is None else Drops(model, dropout, training.seed, device)
        blocks = [block for block in self.module.layers if isinstance(block, PlainBlock)]
        self._routing = PassLosses(model, blocks, device) if model.routing.has_losses else None
        self.clear_moments()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def _all_shards(self) -> Iterator[Shard]:
        places = dict(self.module.named_parameters())
        assert set(places) == {parameter.name for parameter in self.parameters}
        offset = 0
        for parameter in self.parameters:
            place = cast(DTensor, places[parameter.name])
            rows, row = place.shape[0], prod(place.shape[1:])
            most = -(-rows // self._sharers)
            first = min(rows, most * (self.rank % self._sharers))
            assert place.to_local().numel() == min(most, rows - first) * row
            fields = fields_of(self.plan.optimizer, parameter, self.formats) if parameter.trained else ()
            moments = {
                field.name: torch.empty(place.to_local().numel(), dtype=STATE_TYPES[field.format], device=self.device)
                for field in fields
            }
            quantised = quantised_kind(parameter, self.formats)
            yield Shard(parameter, place, first * row, offset + first * row, most * row, moments, quantised)
            offset += parameter.elements

    # -- what it holds --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_weights(self, values: Mapping[str, Tensor]) -> None:
        """Give parameters their values, whole, by name; each rank takes its own part. A master copy follows."""
        for name, shard in self._shards.items():
            if name in values:
                whole = values[name]
                shard.weights.copy_(shard.piece(whole.to(self.device) if shard.quantised else whole))
                for copy in self.formats.copies if shard.parameter.trained else ():
                    self.set_moment(name, copy, whole)

    @torch.no_grad()
    def set_moment(self, name: str, moment: Moment, values: Tensor) -> None:
        """Give a parameter's optimizer state its values, whole; each rank takes its own part."""
        shard = self._shards[name]
        shard.moments[moment].copy_(shard.piece(values))

    def remembered(self) -> Iterator[tuple[Parameter, StateField]]:
        """What the optimizer's state has of each trained parameter."""
        return by_parameter(self.parameters, self.plan.optimizer, self.formats)

    def clear_moments(self) -> None:
        """Nothing was learned yet."""
        for shard in self._shards.values():
            for name, numbers in shard.moments.items():
                if name not in COPIES:
                    numbers.zero_()

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """What is trained by name, whole, on rank 0's host: to read, not to keep. All ranks call it, others get {}."""
        return self._gathered(trained=True)

    @torch.no_grad()
    def frozen_weights(self) -> Mapping[str, Tensor]:
        """The same of what is not trained."""
        return self._gathered(trained=False)

    def _gathered(self, *, trained: bool) -> dict[str, Tensor]:
        found = {}
        for name, shard in self._shards.items():
            whole = self._gather(shard, shard.weights) if shard.parameter.trained == trained else None
            if whole is not None:
                found[name] = shard.numbers(whole, TYPES[self.formats.compute])
        return found

    @torch.no_grad()
    def row_lengths(self, name: str) -> Tensor:
        """Of a frozen matrix' rows, whole, on every rank."""
        shard = self._shards[name]
        here = shard.numbers(shard.place.to_local(), statistics_type(self.formats)).to(statistics_type(self.formats))
        lengths = torch.zeros(-(-shard.shape[0] // self._sharers), dtype=here.dtype, device=self.device)
        lengths[: here.shape[0]] = row_norms(here)
        if self._sharers == 1:
            return lengths
        parts = [torch.empty_like(lengths) for _ in range(self._sharers)]
        distributed.all_gather(parts, lengths, group=self._mesh.get_group("shard"))
        return torch.cat(parts)[: shard.shape[0]]

    @property
    def _trained(self) -> Iterator[Shard]:
        return (shard for shard in self._shards.values() if shard.parameter.trained)

    def moments(self) -> Iterator[tuple[str, Moment, Tensor]]:
        """(parameter, which, numbers) of the optimizer's state, whole, on rank 0's host: to read, not to keep.

        All ranks must go through it to the end; the others are given nothing.
        """
        for name, shard in self._shards.items():
            for moment, numbers in shard.moments.items():
                whole = self._gather(shard, numbers)
                if whole is not None:
                    yield name, moment, whole

    def not_finite(self) -> tuple[str, ...]:
        """What of this rank's weights and optimizer state holds NaN or infinity; another rank may have more."""
        shards = self._shards.items()
        state = ((f"{moment}/{name}", numbers) for name, shard in shards for moment, numbers in shard.moments.items())
        return (*not_finite((name, shard.weights) for name, shard in shards), *not_finite(state))

    def _gather(self, shard: Shard, numbers: Tensor) -> Tensor | None:
        """A parameter's numbers of all ranks that share a copy, on rank 0."""
        if self.rank >= self._sharers:
            # The first copy is enough.
            return None
        if self._sharers > 1:
            filled_up = numbers.new_zeros(shard.most)
            filled_up[: numbers.numel()] = numbers
            parts = [torch.empty_like(filled_up) for _ in range(self._sharers)] if self.rank == 0 else None
            distributed.gather(filled_up, parts, group=self._mesh.get_group("shard"), group_dst=0)
            if parts is None:
                return None
            # Only the last ranks have less than `most`, so that what they lack is behind everything.
            numbers = torch.cat(parts)[: prod(shard.shape)]
        return numbers.view(shard.shape).cpu()

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, number: int, *, leaves: Callable[[], bool] = never) -> StepResult:
        """Train on a batch, each rank on its share of it; `number` counts from 0."""
        del leaves  # All ranks would have to give it up at the same place.
        with_loss = batch.with_loss
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        passes = self._passes(batch)
        first = share_of(batch.sequences, self.rank, self.world)[0]
        if self._drops is not None:
            self._drops.begin(number)
        if self._routing is not None:
            self._routing.begin()
        with _products(self.formats):
            for index, micro in enumerate(passes):
                self._announce(last=index == len(passes) - 1)
                loss, _ = self._loss(micro, self._drops_of(micro, first + index * self.plan.micro_batch_sequences))
                # Over all that has a loss in the whole batch: the ranks' gradients are summed, not averaged.
                torch.autograd.backward(loss / max(1, with_loss) + self._beside(micro, 1.0 / len(passes)))
                total += loss.detach()
        distributed.all_reduce(total)
        norm = self.update(number)
        routing = None if self._routing is None else self._routing.figures()
        beside = 0.0 if routing is None else routing.balance_loss + routing.z_loss
        return StepResult(
            loss=float(total) / max(1, with_loss) + beside,
            with_loss=with_loss,
            gradient_norm=None if norm is None else float(norm),
            waited_s=None,
            routing=routing,
        )

    def _beside(self, micro: Batch, share: float) -> Tensor | float:
        """What a micro-batch's loss has beside that of the data, of a pass that is so much of the step."""
        if self._routing is None:
            return 0.0
        there = np.ones(micro.ids.shape, dtype=np.bool_)
        if micro.lengths is not None:
            there = np.arange(micro.ids.shape[1]) < micro.lengths[:, None]
        if micro.ids.size == 1 and not micro.with_loss:
            # A rank that has nothing left to do.
            there[:] = False
        return self._routing.of_pass(torch.from_numpy(there).to(self.device), share)

    @torch.no_grad()
    def update(self, number: int) -> Tensor | None:
        """A step's end, once all gradients are there: clip, update, forget them. Returns their norm if it clips."""
        self._updates.begin(number)
        norm = self._updates.clip(self._squares()) if self.training.clip_norm is not None else None
        for shard in self._trained:
            if shard.weights.numel():
                update_numbers(
                    rule_of_parameter(self.plan.optimizer, shard.parameter),
                    shard.weights,
                    shard.gradients,
                    shard.moments,
                    settings=self._updates.settings(decays=shard.parameter.decays),
                    offset=shard.offset,
                )
                if "average" in shard.moments:
                    kept = self._updates.settings(decays=True).average_kept
                    follow(shard.moments["average"], shard.moments.get("master", shard.weights), kept)
            shard.place.grad = None
        return norm

    def _squares(self) -> Tensor:
        """Of the gradients of all ranks that share a copy."""
        squares = torch.zeros((), dtype=statistics_type(self.formats), device=self.device)
        for shard in self._trained:
            if shard.weights.numel():
                dispatch.sum_of_squares(shard.gradients, out=squares)
        if self._sharers > 1:
            distributed.all_reduce(squares, group=self._mesh.get_group("shard"))
        return squares

    def _announce(self, *, last: bool) -> None:
        """Tell FSDP what the next backward is for."""
        zero = self.plan.parallel.zero
        self._root.set_requires_gradient_sync(last or zero >= 2)
        # From one micro-batch to the next the weights stay gathered where the plan has them whole.
        self._root.set_reshard_after_backward(last or zero in (0, 3))

    @property
    def _root(self) -> FSDPModule:
        return self._units[0]

    def _passes(self, batch: Batch) -> list[Batch]:
        """This rank's micro-batches: as many as any rank has, since all of them take part in each collective."""
        if batch.ids.shape[1] > self.plan.sequence_tokens:
            raise FlopwiseError(
                f"sequences of {batch.ids.shape[1]:,} tokens do not fit the plan",
                why=f"it is for {self.plan.sequence_tokens:,}",
                hint="plan again with this --seq",
            )
        size = self.plan.micro_batch_sequences
        first, last = share_of(batch.sequences, self.rank, self.world)
        found = list(batch.part(first, last).micro_batches(size))
        # The first rank has the largest share.
        passes = max(1, -(-share_of(batch.sequences, 0, self.world)[1] // size))
        return found + [_without_loss(batch)] * (passes - len(found))

    def _drops_of(self, batch: Batch, first_sequence: int) -> BatchDrops | None:
        """What training drops of a micro-batch that begins at this sequence of the batch."""
        if self._drops is None:
            return None
        sequences, tokens = batch.ids.shape
        return BatchDrops(
            self.model,
            self._drops,
            first_sequence=first_sequence,
            sequences=sequences,
            tokens=tokens,
            sequence_tokens=self.plan.sequence_tokens,
        )

    def _loss(self, batch: Batch, drops: BatchDrops | None = None) -> tuple[Tensor, Tensor]:
        """The sum of the cross-entropies of a micro-batch, in fp32 at least, and how many answers are right."""
        # Copied, since data may come from files that nobody may write to.
        ids = torch.tensor(batch.ids, device=self.device)
        foretold, chosen = batch.labels.reshape(-1), None
        if self.model.loss_share < 1:
            places = np.flatnonzero(foretold != NO_LABEL)
            # Of a micro-batch without any, one that has no loss: backward must come to every rank's weights.
            places = places if places.size else np.zeros(1, dtype=np.int64)
            foretold, chosen = foretold[places], torch.tensor(places, device=self.device)
        labels = torch.tensor(foretold, device=self.device, dtype=torch.int64)
        lengths = None if batch.lengths is None else torch.tensor(batch.lengths, device=self.device)
        types = None if batch.types is None else torch.tensor(batch.types, device=self.device)
        with warnings.catch_warnings():
            # FSDP warns that its hook would be lost if the logits were changed in place, which they are not.
            warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
            logits = self.module(ids, lengths, drops, types, chosen)
        wide = logits.to(at_least_fp32(logits.dtype)).view(-1, logits.shape[-1])
        # An evaluation is of the right answers alone.
        smoothing, z_loss = (
            (self.training.label_smoothing, self.training.z_loss) if torch.is_grad_enabled() else (0.0, 0.0)
        )
        loss = functional.cross_entropy(wide, labels, ignore_index=NO_LABEL, reduction="sum", label_smoothing=smoothing)
        if z_loss:
            loss = loss + z_loss * (wide.logsumexp(-1).square() * (labels != NO_LABEL)).sum()
        with torch.no_grad():
            return loss, ((wide.argmax(-1) == labels) & (labels != NO_LABEL)).sum()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Evaluated:
        """The loss and the right answers of held-out data, each rank doing its share."""
        # Losses, and right answers, which are exact in float64.
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        with_loss = sequences = 0
        with _products(self.formats):
            for batch in batches:
                for micro in self._passes(batch):
                    totals += torch.stack([value.to(totals.dtype) for value in self._loss(micro)])
                with_loss += batch.with_loss
                sequences += batch.sequences
        # Without a backward nobody else drops what was gathered.
        for unit in self._units:
            unit.reshard()
        distributed.all_reduce(totals)
        loss, correct = totals.tolist()
        return Evaluated(loss / max(1, with_loss), int(correct), with_loss, sequences)

    def agree(self, asked: bool) -> bool:
        """Whether any rank was asked to stop: all have to do it after the same step."""
        anyone = torch.tensor(int(asked), device=self.device)
        distributed.all_reduce(anyone, op=distributed.ReduceOp.MAX)
        return bool(anyone)

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[MemoryRow, ...]:
        """This rank's, as planned and as it is.

        State is counted by its tensors, with weights and gradients as whole as the stage of ZeRO keeps them over a
        step. `activations` is all else that is planned; only a GPU's allocator tells what it came to, on a CPU it is
        left at 0. What goes beyond the plan, or has none, is `unaccounted`.
        """
        planned, measured = self._planned_state(), self._measured_state()
        taken = self.plan.expected and self.plan.expected.device_total
        rest = max(0, taken - sum(planned.values())) if taken else 0
        used = 0
        if self.device.type == "cuda":
            used = max(0, int(torch.cuda.max_memory_allocated(self.device)) - sum(measured.values()))
        rows = [(owner, size, measured[owner]) for owner, size in planned.items()]
        rows += [("activations", rest, min(rest, used)), ("unaccounted", 0, max(0, used - rest))]
        return tuple(
            MemoryRow(place="device", owner=owner, planned_bytes=size, measured_bytes=there)
            for owner, size, there in rows
        )

    def _planned_state(self) -> dict[str, int]:
        formats, zero = self.formats, self.plan.parallel.zero
        count = sum(parameter.elements for parameter in self.parameters if parameter.trained)
        # Adapters, and parts that are not frozen, lie beside weights in another format.
        kept = sum(prod(shard.shape) * shard.place.dtype.itemsize for shard in self._shards.values())
        whole = {
            "weights": (kept, 3),
            "gradients": (count * WIDTH_BYTES[formats.gradients], 2),
            "optimizer": (sum(field.bytes for _, field in self.remembered()), 1),
        }
        return {owner: size // (self._sharers if zero >= stage else 1) for owner, (size, stage) in whole.items()}

    def _measured_state(self) -> dict[str, int]:
        zero, shards = self.plan.parallel.zero, self._shards.values()
        weights = sum(shard.weights.nbytes for shard in shards)
        if zero in (1, 2):
            width = TYPES[self.formats.compute].itemsize
            weights += sum(prod(each.shape) * (1 if each.quantised else width) for each in self._shards.values())
        gradients = sum(shard.weights.nbytes for shard in self._trained)
        if zero < 2:
            count = sum(shard.parameter.elements for shard in self._trained)
            gradients = count * TYPES[self.formats.gradients].itemsize
        optimizer = sum(numbers.nbytes for shard in shards for numbers in shard.moments.values())
        return {"weights": weights, "gradients": gradients, "optimizer": optimizer}

    def close(self) -> None:
        """Everything here goes by itself; the group of ranks is its caller's."""


def share_of(sequences: int, rank: int, world: int) -> tuple[int, int]:
    """The first sequence of a rank and the one behind its last: 5 over 2 ranks are 3 and 2."""
    each, rest = divmod(sequences, world)
    first = rank * each + min(rank, rest)
    return first, first + each + (rank < rest)


def _without_loss(batch: Batch) -> Batch:
    """A token for a rank that has nothing left to do: it takes part, and adds nothing."""
    labels = np.full((1, *([1] * (batch.labels.ndim - 1))), NO_LABEL, dtype=np.int32)
    return Batch(np.zeros((1, 1), dtype=np.int32), labels)


def _sharers(parallel: Parallel) -> int:
    """Ranks that share one copy of the state: those of neighbouring numbers."""
    return (parallel.shard or parallel.data) if parallel.zero else 1


def _mesh(device: torch.device, world: int, sharers: int) -> DeviceMesh:
    if sharers == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world // sharers, sharers), mesh_dim_names=("copy", "shard"))


def _build_sharded(plan: ClusterPlan, model: Transformer, formats: Formats, mesh: DeviceMesh) -> ReferenceModel:
    """The network without memory for its numbers: a rank takes only that of its shards."""
    module = build(model, plan.sequence_tokens, dtype=TYPES[formats.weights], device="meta")
    _freeze(module, model, formats, plan.sequence_tokens)
    policy = MixedPrecisionPolicy(param_dtype=TYPES[formats.compute], reduce_dtype=TYPES[formats.gradients])
    parallel = plan.parallel
    # What only one rank has is not gathered but copied, which is cheap enough to be done again.
    drops = parallel.zero == 0 or (parallel.zero == 3 and parallel.reshard)
    units: list[FSDPModule] = []
    for block in module.layers:
        if plan.recompute in RECOMPUTED:
            # Inside of FSDP's hooks, so that a block's weights are there when it runs again.
            block.forward = partial(
                checkpoint,
                block.forward,
                use_reentrant=False,
                preserve_rng_state=False,
                early_stop=plan.recompute != "full",
            )
        lengths = [each for name, each in block.named_children() if name.endswith(f"_{MAGNITUDE}")]
        if lengths:
            # Not in the products' format, which is too coarse for them; they are few, and stay until backward.
            exact = MixedPrecisionPolicy(reduce_dtype=TYPES[formats.gradients], cast_forward_inputs=False)
            fully_shard(lengths, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
            units.append(cast(FSDPModule, lengths[0]))
        units.append(fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=drops))
    units.append(fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False))
    for unit in units:
        # FSDP's mean over ranks would weigh a rank's tokens by how few it has. A plain sum is what all backends know.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return module


def kept_as(parameter: Parameter, formats: Formats) -> str:
    """The format that a parameter is kept in."""
    in_block = isinstance(parameter.part, int)
    return (
        formats.weights if parameter.trained else formats.kept_as(in_block=in_block, matrix=parameter.role == "matrix")
    )


def quantised_kind(parameter: Parameter, formats: Formats) -> str:
    """How a parameter is kept that is in few bits; empty: it is as it is."""
    kept = kept_as(parameter, formats)
    return kept if not parameter.trained and kept in QUANTISED_BITS else ""


def _freeze(module: ReferenceModel, model: Transformer, formats: Formats, sequence_tokens: int) -> None:
    """What is not trained has no gradient, and a type of its own."""
    for parameter in parameters_of(model, sequence_tokens):
        if parameter.trained:
            continue
        owner, _, name = parameter.name.rpartition(".")
        kind = quantised_kind(parameter, formats)
        if kind:
            module.set_submodule(owner, QuantisedLinear(module.get_submodule(owner), kind))
            continue
        kept = module.get_parameter(parameter.name).to(TYPES[kept_as(parameter, formats)])
        module.get_submodule(owner).register_parameter(name, nn.Parameter(kept, requires_grad=False))


@contextmanager
def _products(formats: Formats) -> Iterator[None]:
    """Matrix products in tf32 where that is asked for."""
    before = torch.get_float32_matmul_precision()
    if formats.matrix == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
