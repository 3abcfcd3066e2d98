"""The streaming executor: plays a plan's program on one device, step after step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import Batch
from flopwise.engine.executable import check_formats, check_optimizer, check_trainable
from flopwise.engine.executor import Evaluated, Left, Rewards, StepResult, never
from flopwise.engine.formats import TYPES
from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.quantised import Quantised
from flopwise.engine.streaming.embedding_head import Loss
from flopwise.engine.streaming.gated import GatedKernels
from flopwise.engine.streaming.inputs import RoundLayout
from flopwise.engine.streaming.player import Action, Player
from flopwise.engine.streaming.slabs import Slabs
from flopwise.engine.streaming.streams import Captured, CudaStreams, InOrder, Span, Streams
from flopwise.engine.streaming.trained import Stored
from flopwise.engine.streaming.updates import as_numbers
from flopwise.engine.streaming.watching import MixtureUse
from flopwise.engine.weights.adapter_files import row_norms
from flopwise.engine.weights.finite import not_finite
from flopwise.predict.kernels.memory import LIBRARY_WORKSPACE_BYTES
from flopwise.records.measurement import MemoryRow
from flopwise.records.plan import Plan
from flopwise.records.program import ALIGNMENT_BYTES, Kind, Program, Role, Value
from flopwise.setup.training import Training
from flopwise.work.formats import COPIES, parse_formats
from flopwise.work.held import attention_sums_bytes, carrying_room_bytes
from flopwise.work.optimizers import Moment, StateField, Stretch, by_parameter, update_blocks_bytes
from flopwise.work.parameters import Parameter, Part, Place, parameters_of
from flopwise.work.transformer import Transformer

FORWARD: tuple[Kind, ...] = ("embed", "forward", "forward-before", "attention", "forward-after", "head")
"""Kinds of tasks that an evaluation needs, beside the loads of weights."""

MOST_CAPTURED = 64
"""Shapes of steps that are captured; further ones are played task by task."""


class FrozenWeights(Mapping[str, Tensor]):
    """Tensors by name; what is quantised is dequantised whenever it is asked for."""

    def __init__(self, tensors: Mapping[str, Stored], compute: torch.dtype) -> None:
        self._tensors, self._compute = tensors, compute

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if isinstance(tensor, Quantised):
            return tensor.dequantise(out=tensor.codes.new_empty(tensor.shape, dtype=self._compute))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class StreamingExecutor:
    """Weights, their optimizer state and the program that trains them, in memory that is taken once."""

    def __init__(
        self,
        plan: Plan,
        program: Program,
        model: Transformer,
        training: Training,
        *,
        device: torch.device,
        deterministic: bool = False,
        packs: bool | None = None,
        gated: GatedKernels | None = None,
    ) -> None:
        """`packs`: whether products make all their results in one call; None: on a GPU, but for the same bits.

        `gated`: products with the activation in them; None: those that the device has, if any.
        """
        check_supported(plan, model, training)
        self.plan, self.program, self.model, self.training, self.device = plan, program, model, training, device
        self.formats = parse_formats(plan.precision)
        # What others hold of the device's memory is not this training's.
        self._others_bytes = int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0
        self.slabs = Slabs(program, device, left_to_libraries=left_to_libraries(plan, model))
        self.player = Player(
            plan, program, model, training, self.slabs, deterministic=deterministic, packs=packs, gated=gated
        )
        self._streams: Streams = InOrder()
        if device.type == "cuda":
            self.slabs.pin()
            torch.cuda.reset_peak_memory_stats(device)
            self._streams = CudaStreams(device, {other for task in program.tasks for other in task.after})
        self._actions = [self.player.action(task) for task in program.tasks]
        self._squares: dict[int, Tensor] = self._norms() if training.clip_norm is not None else {}
        self._first_update = next(
            (index for index, task in enumerate(program.tasks) if task.kind == "optimize"), len(program.tasks)
        )
        self._forward = self._forward_tasks()
        self.parameters = parameters_of(model, plan.sequence_tokens)
        self.submit_s = 0.0
        """Of the last step, the time until all tasks were handed to their streams."""
        self._watch = self.player.watch()
        self.times_tasks = False
        """Whether steps take the times of their tasks."""
        self._seen: set[tuple[RoundLayout, ...]] = set()
        """Shapes of steps that were played once."""
        self._captured: dict[tuple[tuple[RoundLayout, ...], bool], tuple[Captured, Tensor | None]] = {}

    # -- what it holds --------------------------------------------------------------------------------------------

    def set_weights(self, values: Mapping[str, Tensor]) -> None:
        """Give parameters their values, by name; to every buffer that holds them when a step begins."""
        for parameter in self.parameters:
            if parameter.name in values:
                for index in self._holders(Value("weights", parameter.part)):
                    target = self.player.weights_in(index, parameter.part)[parameter.local]
                    if isinstance(target, Quantised):
                        target.quantise(values[parameter.name])
                    else:
                        # In its own format first: what is copied to a GPU in another takes room there for a while.
                        target.copy_(values[parameter.name].to(target.dtype))
        self._copies_from_weights(values)

    def _copies_from_weights(self, values: Mapping[str, Tensor]) -> None:
        """A master copy begins as exact as what it was given, and so does the mean of the weights."""
        for copy in self.formats.copies:
            for parameter in self.parameters:
                if parameter.trained and parameter.name in values:
                    self.set_moment(parameter.name, copy, values[parameter.name])

    def weights(self) -> dict[str, Tensor]:
        """Trained parameters by name, where they are now: to read, not to keep."""
        found = {}
        for parameter in self.parameters:
            tensor = self._weight(parameter)
            if parameter.trained and isinstance(tensor, Tensor):
                found[parameter.name] = tensor
        return found

    def frozen_weights(self) -> FrozenWeights:
        """Those that are not trained."""
        tensors = {each.name: self._weight(each) for each in self.parameters if not each.trained}
        return FrozenWeights(tensors, self.player.compute)

    def row_lengths(self, name: str) -> Tensor:
        """Of a frozen matrix."""
        matrix = self.frozen_weights()[name]
        return row_norms(matrix if matrix.dtype == torch.float64 else matrix.float())

    def _weight(self, parameter: Parameter) -> Stored:
        index = self._holders(Value("weights", parameter.part))[0]
        return self.player.weights_in(index, parameter.part)[parameter.local]

    def moments(self) -> Iterator[tuple[str, Moment, Tensor]]:
        """(parameter, which, numbers) of the optimizer's state: to read, not to keep."""
        for part, numbers in self.player.numbers.items():
            if not numbers.count:
                continue
            state = list(self._state(part))
            for parameter, field in by_parameter(numbers.parameters, self.plan.optimizer, self.formats):
                parts = [
                    fields[field.name][_own(stretch, parameter, field)[0]]
                    for stretch, fields in state
                    if parameter in stretch.parameters
                ]
                whole = parts[0] if len(parts) == 1 else torch.cat(parts)
                yield parameter.name, field.name, whole.view(parameter.shape) if field.each == 1 else whole

    def not_finite(self) -> tuple[str, ...]:
        """What of the weights and the optimizer's state holds NaN or infinity."""
        state = ((f"{moment}/{name}", numbers) for name, moment, numbers in self.moments())
        return (*not_finite(self.weights().items()), *not_finite(state))

    def set_moment(self, name: str, moment: Moment, values: Tensor) -> None:
        """Give a parameter's optimizer state its values, wherever its pieces are."""
        parameter = next(parameter for parameter in self.parameters if parameter.name == name)
        flat = values.reshape(-1)
        for stretch, fields in self._state(parameter.part, every=True):
            if parameter in stretch.parameters:
                (field,) = (each for each in stretch.fields if each.name == moment)
                here, there = _own(stretch, parameter, field)
                target = fields[moment][here]
                target.copy_(flat[there].to(target.dtype))

    def remembered(self) -> Iterator[tuple[Parameter, StateField]]:
        """What the optimizer's state has of each trained parameter."""
        return by_parameter(self.parameters, self.plan.optimizer, self.formats)

    def clear_moments(self) -> None:
        """Nothing was learned yet."""
        for part in self.player.numbers:
            for _, fields in self._state(part, every=True):
                for name, values in fields.items():
                    if name not in COPIES:
                        values.zero_()

    def _holders(self, value: Value) -> list[int]:
        """Buffers that hold a value when a step begins."""
        return [index for index, held in self.program.at_start.items() if held == value]

    def _state(self, part: Part, *, every: bool = False) -> Iterator[tuple[Stretch, dict[Moment, Tensor]]]:
        """A part's optimizer state, stretch by stretch; `every`: in all places that hold it."""
        counts = self._piece_counts().get(part, [])
        first = 0
        for number, count in enumerate(counts):
            holders = self._holders(Value("optimizer", part, number))
            for index in holders if every else holders[:1]:
                for stretch in self.player.updates.layout(part, first, count):
                    yield stretch.what, stretch.of(self.slabs.buffers[index])
            first += count

    def _piece_counts(self) -> dict[Part, list[int]]:
        found: dict[Part, list[int]] = {}
        for task in self.program.tasks:
            if task.kind == "optimize":
                found.setdefault(self.player.part_of(task), []).append(task.parameters)
        return found

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, number: int, *, leaves: Callable[[], bool] = never) -> StepResult:
        """Train on a batch, in rounds of the plan's size; `number` counts from 0."""
        rounds = list(batch.micro_batches(self.plan.sequences_per_round))
        if len(rounds) != self.plan.rounds_per_step:
            raise FlopwiseError(
                f"a batch of {batch.sequences} sequences is no step of this plan",
                why=f"it has {self.plan.rounds_per_step} rounds of {self.plan.sequences_per_round}",
                hint="plan again with this --batch",
            )
        begun = time.perf_counter()
        with_loss = batch.with_loss
        player = self.player
        player.inputs.check(batch)
        layouts = player.inputs.prepare(rounds)
        player.scale.fill_(1.0 / max(1, with_loss))
        player.updates.begin(number)
        if player.drops is not None:
            player.drops.begin(number)
        try:
            norm = self._replay(layouts) if self._replays(layouts) else self._play_step(leaves)
            self.submit_s = time.perf_counter() - begun
            waited_s = self._streams.finish()
        except Left:
            self._abandon()
            self._bring_back()
            raise
        except BaseException:
            self._abandon()
            raise
        if len(self._seen) < MOST_CAPTURED:
            self._seen.add(layouts)
        routing = None if player.routing_losses is None else player.routing_losses.figures()
        beside = 0.0 if routing is None else routing.balance_loss + routing.z_loss
        return StepResult(
            loss=float(player.loss.total) / max(1, with_loss) + beside,
            with_loss=with_loss,
            gradient_norm=None if norm is None else float(norm),
            waited_s=waited_s if self.device.type == "cuda" else None,
            rewards=_rewards(player.loss, with_loss),
            routing=routing,
        )

    def _play_step(self, leaves: Callable[[], bool]) -> Tensor | None:
        """Hand the tasks over, one by one. Returns where the norm of the gradients will be, if they are clipped."""
        self._streams.begin(timed=self.times_tasks)
        return self._play(leaves)

    def _play(self, leaves: Callable[[], bool] = never) -> Tensor | None:
        player = self.player
        self._watch.begin(watched=self.times_tasks)
        player.loss.clear()
        losses = player.routing_losses
        if losses is not None:
            losses.begin()
        for total in self._squares.values():
            total.zero_()
        norm: Tensor | None = None
        current = -1
        for index, task in enumerate(self.program.tasks):
            if index <= self._first_update and leaves():
                raise Left
            if task.stream == "compute" and task.kind != "optimize" and task.round != current:
                current = task.round
                player.inputs.bring(current)
                if losses is not None:
                    losses.begin_round()
            if index == self._first_update and self._squares:
                norm = self._clip()
            self._streams.run(index, task.stream, task.after, self._actions[index])
        if losses is not None:
            losses.end()
        return norm

    def _abandon(self) -> None:
        """After a failure nothing of the step is left, so that an evaluation or another step begins clean."""
        self._streams.abandon()
        for arena in (self.player.head_arena, self.player.arena):
            arena.clear()

    # -- captured steps -------------------------------------------------------------------------------------------

    def _replays(self, layouts: tuple[RoundLayout, ...]) -> bool:
        """Whether a step of these shapes is replayed: from its second time on, when all its kernels are loaded."""
        if not self.plan.replay or not isinstance(self._streams, CudaStreams):
            return False
        if any(layout.padded for layout in layouts):
            # Kernels for them ask the device how long sequences are, which nobody can while a step is captured.
            return False
        if any(layout.rows is not None for layout in layouts) and not self.player.packs_at_once:
            return False
        return layouts in self._seen

    def _replay(self, layouts: tuple[RoundLayout, ...]) -> Tensor | None:
        assert isinstance(self._streams, CudaStreams)
        key = (layouts, self.times_tasks)
        if key not in self._captured:
            norms: list[Tensor | None] = []
            captured = self._streams.capture(lambda: norms.append(self._play()), timed=self.times_tasks)
            self._captured[key] = captured, norms[0]
        captured, norm = self._captured[key]
        self._streams.replay(captured)
        return norm

    def task_times(self) -> dict[int, Span]:
        """When the tasks of the last step ran, by their number in the program; empty where none were taken."""
        return dict(self._streams.taken)

    def mixture_use(self) -> MixtureUse | None:
        """What the last step whose tasks were timed spent on its experts, and how evenly it used them."""
        return self._watch.use()

    def _clip(self) -> Tensor:
        return self.player.updates.clip(torch.stack(list(self._squares.values())))

    def _norms(self) -> dict[int, Tensor]:
        """The last task that adds to each part's gradient, and the place of the sum of squares that it then makes.

        It belongs to the task: what waits for the task may write over the gradient.
        """
        last: dict[Part | None, tuple[int, int]] = {}
        for index, task in enumerate(self.program.tasks):
            for use in task.writes:
                if self.program.buffers[use.buffer].owner == "gradients" and task.stream == "compute":
                    last[use.value.part] = (index, use.buffer)
        found = {}
        for part, numbers in self.player.numbers.items():
            if not numbers.count:
                continue
            index, buffer = last[part]
            gradient = as_numbers(self.slabs.buffers[buffer], TYPES[self.formats.gradients], numbers.count)
            total = torch.zeros((), dtype=self.player.statistics, device=self.device)
            found[index] = total
            self._actions[index] = self._with_squares(self._actions[index], gradient, total)
        return found

    def _with_squares(self, action: Action, gradient: Tensor, total: Tensor) -> Action:
        def act() -> None:
            action()
            if not self.player.evaluating:
                dispatch.sum_of_squares(gradient, out=total)

        return act

    def evaluate(self, batches: Iterable[Batch]) -> Evaluated:
        """The loss and the right answers of held-out data; nothing is learned from it."""
        player = self.player
        training_loss = player.loss
        counted = torch.zeros((), dtype=torch.int64, device=self.device)
        player.loss = Loss(torch.zeros_like(training_loss.total), counted)
        if player.preferences is not None:
            player.loss = player.compared_loss()
        player.evaluating = True
        with_loss = sequences = 0
        try:
            for batch in batches:
                player.inputs.check(batch)
                for micro in batch.micro_batches(self.plan.sequences_per_round):
                    self._play_forward(micro)
                with_loss += batch.with_loss
                sequences += batch.sequences
            assert player.loss.correct is not None
            loss, correct = float(player.loss.total), int(player.loss.correct)
            rewards = _rewards(player.loss, with_loss)
        finally:
            player.evaluating = False
            player.loss = training_loss
        return Evaluated(loss / max(1, with_loss), correct, with_loss, sequences, rewards)

    def _play_forward(self, micro: Batch) -> None:
        self.player.inputs.prepare([micro])
        self.player.inputs.bring(0)
        for index in self._forward:
            task = self.program.tasks[index]
            self._streams.run(index, task.stream, task.after, self._actions[index])
        self._streams.finish()
        self._bring_back()

    def score(self, batches: Iterable[Batch]) -> Iterator[tuple[NDArray[np.float64], ...]]:
        """Of each batch's sequences, how likely the model without its adapters finds their answers, as logarithms."""
        player = self.player
        assert player.preferences is not None
        training_loss, player.loss = player.loss, player.compared_loss()
        player.evaluating = True
        player.with_adapters(False)
        try:
            for batch in batches:
                player.inputs.check(batch)
                found: list[NDArray[np.float64]] = []
                for micro in batch.micro_batches(self.plan.sequences_per_round):
                    self._play_forward(micro)
                    assert micro.documents is not None
                    scores = player.preferences.scores.cpu().numpy()
                    each = player.inputs.each
                    for first in range(0, micro.sequences, each):
                        counts = [lengths.size for lengths in micro.documents[first : first + each]]
                        told = scores[first // each, : sum(counts)]
                        found += np.split(told.copy(), np.cumsum(counts)[:-1])
                yield tuple(found)
        finally:
            player.evaluating = False
            player.with_adapters(True)
            player.loss = training_loss

    def _forward_tasks(self) -> list[int]:
        """The first round up to the loss, without what only backward needs."""
        heads = [index for index, task in enumerate(self.program.tasks) if task.kind == "head" and task.round == 0]
        return [
            index
            for index, task in enumerate(self.program.tasks[: heads[-1] + 1])
            if task.kind in FORWARD or (task.kind == "load" and task.what == "weights")
        ]

    def _bring_back(self) -> None:
        """Slots that weights pass through hold again what a step expects in them."""
        for index, value in self.program.at_start.items():
            buffer = self.program.buffers[index]
            if buffer.owner == "weights" and buffer.role == "slot":
                home = self._host_home(value.part)
                size = min(self.slabs.buffers[index].numel(), self.slabs.buffers[home].numel())
                self.slabs.buffers[index][:size].copy_(self.slabs.buffers[home][:size])

    def _host_home(self, part: Part | None) -> int:
        """Where the host has a part's weights."""
        return next(
            index
            for index in self.slabs.with_role("home")
            if (buffer := self.program.buffers[index]).owner == "weights"
            and buffer.place == "host"
            and buffer.part == part
        )

    def agree(self, asked: bool) -> bool:
        return asked

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[MemoryRow, ...]:
        """By place and owner, as planned and as it is; unaccounted is also what attention takes of a cap's rest."""
        rows: list[MemoryRow] = []
        places: tuple[Place, ...] = ("device", "host")
        for place in places:
            planned, taken = self.program.bytes_by_owner(place), self.slabs.bytes_by_owner(place)
            beyond = 0
            if place == "device":
                # Beside the slab: what kernels and libraries allocate, and temporaries that found no room.
                whole = taken.get("workspace", 0) + self._beside_bytes()
                taken["workspace"] = min(whole, planned.get("workspace", 0))
                beyond = whole - taken["workspace"]
            rows += [
                MemoryRow(place=place, owner=owner, planned_bytes=size, measured_bytes=taken.get(owner, 0))
                for owner, size in planned.items()
            ]
            if planned:
                rows.append(MemoryRow(place=place, owner="unaccounted", planned_bytes=0, measured_bytes=beyond))
        return tuple(rows)

    def _beside_bytes(self) -> int:
        """The most that was allocated beside the slab: asked of the allocator on a GPU, of the arena on a CPU."""
        if self.device.type == "cuda":
            slab = self.slabs.device_slab.numel()
            return max(0, int(torch.cuda.max_memory_allocated(self.device)) - self._others_bytes - slab)
        return self.player.arena.peak_beside_bytes

    def close(self) -> None:
        """Give back what does not go by itself."""
        self._streams.close()
        self.slabs.close()


def _rewards(loss: Loss, pairs: int) -> Rewards | None:
    """What became of a step's pairs, where answers are compared."""
    if loss.gains is None or loss.correct is None or not pairs:
        return None
    chosen, rejected = (loss.gains / pairs).tolist()
    return Rewards(chosen, rejected, int(loss.correct) / pairs)


def _own(stretch: Stretch, parameter: Parameter, field: StateField) -> tuple[slice, slice]:
    """Of one kind of a stretch's state, what is a parameter's; and where that is in the parameter's own."""
    if not field.each:
        return slice(None), slice(None)
    begin = max(stretch.first, parameter.first)
    end = min(stretch.last, parameter.first + parameter.elements)

    def within(first: int) -> slice:
        return slice((begin - first) // field.each, -(-(end - first) // field.each))

    return within(stretch.first), within(parameter.first)


def left_to_libraries(plan: Plan, model: Transformer) -> dict[Role, int]:
    """By role, what attention kernels and matrix libraries allocate for themselves and the slab leaves free for them.

    Kernels are called for so many heads at once that the planned fp32 sums of gradients are room enough.
    """
    formats = parse_formats(plan.precision)
    each = attention_sums_bytes(model, formats)
    blocks_bytes = update_blocks_bytes(parameters_of(model, plan.sequence_tokens), plan.optimizer)

    def whole_lines(size: int) -> int:
        # What lies behind in the slab begins at a line as well.
        return size // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    return {
        "temporaries": LIBRARY_WORKSPACE_BYTES
        + whole_lines(each * plan.tokens_of(0))
        + whole_lines(blocks_bytes)
        + whole_lines(carrying_room_bytes(model, plan.sequence_tokens, formats.statistics_bytes)),
        "attention": whole_lines(each * plan.sequence_tokens),
    }


def check_supported(plan: Plan, model: Transformer, training: Training) -> None:
    """Refuse what the streaming executor does not do."""
    check_formats(parse_formats(plan.precision))
    check_trainable(model)
    check_optimizer(plan.optimizer, ranks=1)
    if model.objective == "preference" and plan.chunks_per_sequence > 1:
        raise FlopwiseError(
            "the plan cuts sequences, and they hold pairs of answers",
            why="both answers of a pair are scored before either goes back",
            hint="plan with --task dpo, or a shorter --seq",
        )
    if training.clip_norm is not None and plan.update_when != "end":
        raise FlopwiseError(
            "the plan updates before all gradients are there, and they are to be clipped by their norm",
            why="the norm is known when the last of them is",
            hint="plan with --clip, or train without it",
        )
