"""What each task of a program does to its buffers.

`Player.action` binds a task once to a call; the executor then hands the calls, step after step, to the streams:

    program.tasks        Player.action(task)             Streams.run(index, stream, after, action)

    forward 3.1     ──▶  Block.forward                ──▶  compute    kernels, in the order of the program
    backward 3.1    ──▶  Block.recompute, .backward   ──▶  compute
    load weights 4  ──▶  slab[slot].copy_(slab[home]) ──▶  copy-in    beside the kernels
    store …         ──▶  slab[home].copy_(slab[slot]) ──▶  copy-out   beside both
    optimize 3      ──▶  Updates.update               ──▶  compute, or host: a thread

A task finds its memory by the owner and the role of the buffers that it uses, never by their names:

    slabs.buffers[i]   owner         role             what `Player` makes of its bytes
    ─────────────────  ────────────  ───────────────  ─────────────────────────────────────────────────
    one part's state   weights …     home, slot       `views`: the part's tensors by their names
    a (layer, chunk)   activations   slot             `_slot`: all that the level `full` keeps
                       activations   home             `_home`: what its own level keeps
    a chunk            residual      residual         `_residual`: a row for each token
    a sequence         context       keys             `_keys`: chunks lie side by side, read as one
                       context       key gradients    `key_sums`, in fp32
                       workspace     attention        `SequenceTensors`, where attention runs over it at once
                       workspace     inputs           rows, for the backward of what is before attention
    a task             workspace     temporaries      `Arena`, given back before the task ends
                       head          logits           `Arena`

Versions are not looked at here: `after` has them in it already. One remains: a gradient that a task writes without
reading it is a new sum, and is cleared first (`_gradient_to_clear`). When a batch is evaluated the same actions run,
but nothing that only training needs is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from flopwise.engine.batch import NO_LABEL
from flopwise.engine.formats import TYPES, statistics_type
from flopwise.engine.kernels.dispatch import LossTerms
from flopwise.engine.kernels.matrix_updates import OwnRoom
from flopwise.engine.streaming.arena import MOST_VIEWS, Arena
from flopwise.engine.streaming.block import Block, Chunk, Keys
from flopwise.engine.streaming.dropping import Drops, RowDrops
from flopwise.engine.streaming.embedding_head import EmbeddingHead, Loss
from flopwise.engine.streaming.gated import GatedKernels
from flopwise.engine.streaming.inputs import Inputs
from flopwise.engine.streaming.layout import SavedTensors
from flopwise.engine.streaming.operators import Operators
from flopwise.engine.streaming.preferences import Preferences
from flopwise.engine.streaming.products import HeadProducts, Products, rows_read_by_head
from flopwise.engine.streaming.quack_products import gated_kernels, products_for
from flopwise.engine.streaming.routing_losses import RoutingLosses, sums_bytes
from flopwise.engine.streaming.sequence import SequenceBlock, SequenceTensors
from flopwise.engine.streaming.slabs import Slabs
from flopwise.engine.streaming.trained import Stored, Trained
from flopwise.engine.streaming.updates import PartNumbers, Updates, as_numbers, numbers_by_part
from flopwise.engine.streaming.values import Values
from flopwise.engine.streaming.watching import MixtureWatch
from flopwise.records.plan import Plan
from flopwise.records.program import Kind, Owner, Program, Role, Task, Use, aligned
from flopwise.setup.training import Training
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.parameters import Part, parameters_of
from flopwise.work.transformer import Transformer

Action = Callable[[], None]


MOST_SPARE_BYTES = 1 << 29
"""Room for all heads of 67 million queries' numbers at once."""


def reads_columns(kind: Transformer) -> bool:
    """Whether what comes behind a block's products reads columns of a wider tensor: norms of heads alone do not."""
    turns = kind.positions == "rotary" and kind.turned_channels == kind.head_dim
    return not kind.qk_norm or kind.qk_norm_over == "all" or turns


def spare_under_cap(plan: Plan, program: Program) -> int:
    """What attention may take beside its planned room: half of what the plan leaves under its cap, or the most."""
    planned = sum(program.bytes_by_owner("device").values())
    return min(MOST_SPARE_BYTES, max(0, plan.device_memory_bytes - planned) // 2)


class Player:
    """Turns tasks into calls. It holds what a step changes: the round's tokens, the sums of the loss."""

    def __init__(
        self,
        plan: Plan,
        program: Program,
        model: Transformer,
        training: Training,
        slabs: Slabs,
        *,
        deterministic: bool,
        packs: bool | None = None,
        gated: GatedKernels | None = None,
    ) -> None:
        self.plan, self.program, self.slabs = plan, program, slabs
        self.formats = parse_formats(plan.precision)
        self.compute, self.statistics = TYPES[self.formats.compute], statistics_type(self.formats)
        self.model = model
        self.numbers: dict[Part, PartNumbers] = numbers_by_part(
            parameters_of(model, plan.sequence_tokens), self.formats
        )
        dropout = model.dropout if training.drops else None
        self.drops = None if dropout is None else Drops(model, dropout, training.seed, slabs.device)
        self._share_workspace()
        self.head_arena = Arena(self._only("logits"), spill=self.arena)
        self.preferences = Preferences(training, self.inputs, self.arena) if self.inputs.compares else None
        if packs is None:
            packs = slabs.device.type == "cuda" and not deterministic and all(map(reads_columns, model.kinds))
        products = self._products(deterministic=deterministic)
        if gated is None and not deterministic:
            gated = gated_kernels(model, self.formats, slabs.device)
        paired = ("gate", "up") if gated is not None else ()
        # What is copied to a lower level, or into a sequence's context, goes by whole tensors.
        whole_products = packs and plan.chunks_per_sequence == 1 and not set("".join(plan.saves)).intersection("ac")

        def operators_of(kind: Transformer) -> Operators:
            return Operators(
                kind,
                describe(kind, plan.sequence_tokens),
                self.formats,
                self.arena,
                packs=packs,
                gated=gated,
                products=products,
                head_products=self._head_products(products),
            )

        operators = {kind: operators_of(kind) for kind in model.kinds}
        self.saved = {
            kind: SavedTensors(each.work, self.formats, packed=packs, paired=paired, whole_products=whole_products)
            for kind, each in operators.items()
        }
        spare_bytes = spare_under_cap(plan, program) if slabs.device.type == "cuda" else 0
        self.blocks = self._make_blocks(operators, deterministic=deterministic, spare_bytes=spare_bytes)
        self.cut = plan.chunks_per_sequence > 1
        # A kind without adapters beside others that have some has other ends than the model.
        ends = next(each for kind, each in operators.items() if kind.adapters == model.adapters)
        self.embedding_head = EmbeddingHead(
            model, ends.work, ends, LossTerms(training.label_smoothing, training.z_loss)
        )
        self.updates = Updates(training, self.formats, self.numbers, slabs.device, plan.optimizer)
        self.loss = Loss(torch.zeros((), dtype=self.statistics, device=slabs.device))
        if self.preferences is not None:
            self.loss = self.compared_loss()
        self._counted_elsewhere = Loss(torch.zeros_like(self.loss.total))
        self.scale = torch.zeros((), dtype=self.statistics, device=slabs.device)
        """One over what has a loss in the step."""
        self._remember()
        self._contexts()
        self._sequence_blocks()
        self.evaluating = False

    def _share_workspace(self) -> None:
        """What is known of the tokens comes first, then what routing counts, and temporaries have the rest."""
        plan, model, workspace = self.plan, self.model, self._only("temporaries")
        self.inputs = Inputs(
            plan,
            workspace,
            vocabulary=model.vocab,
            classifies=model.head == "classifier",
            causal=model.causal,
            numbered=self.drops is not None or model.routing.has_losses,
            marked=model.routing.has_losses,
            compares=model.objective == "preference",
            chooses=model.loss_share < 1,
            types=model.token_types,
            longest_packed=model.attention_chunk,
        )
        counted = workspace[aligned(self.inputs.bytes) :]
        self.routing_losses = RoutingLosses(model, plan, self.statistics, counted) if model.routing.has_losses else None
        self.arena = Arena(counted[aligned(sums_bytes(model, plan)) :])

    def _remember(self) -> None:
        """Views that every step asks for again."""
        self._weight_views: dict[tuple[int, Part], dict[str, Stored]] = {}
        self._sum_views: dict[tuple[int, Part], dict[str, Tensor]] = {}
        self._saved_views: dict[tuple[int, Transformer, str, int], dict[str, Tensor]] = {}
        """Of what layers keep, by buffer, kind, level and tokens."""

    def _products(self, *, deterministic: bool) -> Products:
        if deterministic:
            return Products(self.arena)
        return products_for(self.slabs.device, self.compute, TYPES[self.formats.gradients], self.arena)

    def compared_loss(self) -> Loss:
        """Sums over pairs of answers."""
        device = self.slabs.device
        return Loss(
            torch.zeros((), dtype=self.statistics, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros(2, dtype=torch.float64, device=device),
        )

    def _head_products(self, products: Products) -> Products | None:
        """Those for a vocabulary that is no multiple of what the matrix unit reads; None where it is one."""
        if self.slabs.device.type != "cuda" or type(products) is not Products:
            return None
        rows = rows_read_by_head(self.numbers["head"].parameters, self.compute)
        same = TYPES[self.formats.weights] == self.compute
        return HeadProducts(self.arena, rows) if same and rows else None

    # -- buffers --------------------------------------------------------------------------------------------------

    def _contexts(self) -> None:
        """Keys and values of a sequence lie in one piece, whatever chunks they come in."""
        self._keys: dict[int, Keys] = {}
        parts = self.plan.chunks_per_sequence
        found = self.slabs.with_role("keys")
        for begin in range(0, len(found), parts):
            chunks = found[begin : begin + parts]
            keys = self._as_keys(_join([self.slabs.buffers[index] for index in chunks]), self.compute)
            self._keys.update(dict.fromkeys(chunks, keys))
        self.key_sums: Keys | None = None
        for index in self.slabs.with_role("key gradients"):
            self.key_sums = self._as_keys(self.slabs.buffers[index], self.statistics)

    def _as_keys(self, buffer: Tensor, dtype: torch.dtype) -> Keys:
        """Keys of a whole sequence in a buffer, its values behind them."""
        width, tokens = self.model.kv_width, self.plan.sequence_tokens
        numbers = as_numbers(buffer, dtype, tokens * (width + self.model.value_width))
        return Keys(numbers[: tokens * width].view(tokens, width), numbers[tokens * width :].view(tokens, -1))

    def _sequence_blocks(self) -> None:
        self.sequences: dict[Transformer, SequenceBlock] = {}
        """The same where attention runs over a whole sequence at once."""
        for index in self.slabs.with_role("attention"):
            for kind, block in self.blocks.items():
                packed = block.operators.packs
                buffer, tokens = self.slabs.buffers[index], self.plan.sequence_tokens
                tensors = SequenceTensors(buffer, self.saved[kind], tokens, block.extras, packed=packed)
                self.sequences[kind] = SequenceBlock(block, tensors)

    def _make_blocks(
        self, operators: dict[Transformer, Operators], *, deterministic: bool, spare_bytes: int
    ) -> dict[Transformer, Block]:
        """One for each kind of block."""
        dropout = None if self.drops is None else self.model.dropout
        found = {}
        for kind, mine in operators.items():
            block = Block(kind, mine.work, mine, self.saved[kind], deterministic=deterministic, spare_bytes=spare_bytes)
            block.drops_weights = dropout is not None and dropout.attention > 0
            mine.mixture.losses = self.routing_losses
            found[kind] = block
        return found

    def watch(self) -> MixtureWatch:
        """One that all blocks tell what they do."""
        found = next(iter(self.blocks.values())).watch
        for block in self.blocks.values():
            block.watch = found
        return found

    def with_adapters(self, adapts: bool) -> None:
        """Whether what is played takes part in the model with its adapters, or in the one that lies below them."""
        for block in self.blocks.values():
            block.operators.adapts = adapts

    def _kind(self, task: Task) -> Transformer:
        """The kind of the block that a task is about."""
        assert task.layer is not None
        return self.model.kind_of(task.layer)

    def _block(self, task: Task) -> Block:
        return self.blocks[self._kind(task)]

    def _sequence(self, task: Task) -> SequenceBlock:
        return self.sequences[self._kind(task)]

    @property
    def packs_at_once(self) -> bool:
        """Whether attention over packed sequences is one call in every block."""
        return all(block.packs_at_once for block in self.blocks.values())

    def _only(self, role: Role) -> Tensor:
        """The buffer of a role that every program has once."""
        (index,) = self.slabs.with_role(role)
        return self.slabs.buffers[index]

    def _of(self, uses: Sequence[Use], owner: Owner, role: Role | None = None) -> int | None:
        """The buffer among these that has the owner, and the role where one is given."""
        for use in uses:
            buffer = self.program.buffers[use.buffer]
            if buffer.owner == owner and role in (None, buffer.role):
                return use.buffer
        return None

    def weights_in(self, index: int, part: Part) -> dict[str, Stored]:
        """A part's tensors in a buffer of weights."""
        found = self._weight_views.get((index, part))
        if found is None:
            found = self._weight_views[index, part] = self.numbers[part].weights(self.slabs.buffers[index])
        return found

    def sums_in(self, index: int, part: Part) -> dict[str, Tensor]:
        """A part's gradients in a buffer."""
        found = self._sum_views.get((index, part))
        if found is None:
            numbers = self.numbers[part]
            flat = as_numbers(self.slabs.buffers[index], TYPES[self.formats.gradients], numbers.count)
            found = self._sum_views[index, part] = numbers.views(flat)
        return found

    def part_of(self, task: Task) -> Part:
        """The part whose numbers a task is about."""
        if task.layer is not None:
            return task.layer
        assert task.end is not None
        return task.end if task.end in self.numbers else "head"

    def _rows(self, index: int, tokens: int) -> Tensor:
        numbers = as_numbers(self.slabs.buffers[index], self.compute, tokens * self.model.hidden)
        return numbers.view(tokens, self.model.hidden)

    # -- tasks ----------------------------------------------------------------------------------------------------

    def action(self, task: Task) -> Action:
        """What a task does, bound to its buffers."""
        if task.kind in ("load", "store"):
            return self._copy(task)
        if task.kind == "optimize":
            return self._optimize(task)
        actions: dict[Kind, Callable[[Task, Chunk], None]] = {
            "embed": self._embed,
            "embed-backward": self._embed_backward,
            "head": self._head,
            "forward": self._forward,
            "backward": self._backward,
            "forward-before": self._forward_before,
            "attention": self._attention,
            "forward-after": self._forward_after,
            "context": self._context,
            "backward-after": self._backward_after,
            "attention-backward": self._attention_backward,
            "backward-before": self._backward_before,
        }
        chunk_action = actions[task.kind]
        assert task.chunk is not None
        number = task.chunk
        zeroed = self._gradient_to_clear(task)

        def act() -> None:
            if zeroed is not None and not self.evaluating:
                zeroed.zero_()
            chunk = self._chunk(task, number)
            if chunk is not None:
                self._count_routing(task)
                chunk_action(task, chunk)

        return act

    def _chunk(self, task: Task, number: int) -> Chunk | None:
        """The tokens of a chunk, and in training what a task's layer drops of them."""
        chunk = self.inputs.chunk(number)
        if chunk is None or self.drops is None or self.evaluating:
            return chunk
        return replace(chunk, drops=self.drops.of_layer(task.layer, self.inputs.tokens_of(number)))

    def _count_routing(self, task: Task) -> None:
        """Tell the routing's losses what the task is of, and whether it routes for the first time."""
        if self.routing_losses is not None and task.layer is not None and task.chunk is not None:
            counts = task.kind in ("forward", "forward-after") and not self.evaluating
            self.routing_losses.at(task.layer, self.inputs.tokens_of(task.chunk), counts=counts)

    def _gradient_to_clear(self, task: Task) -> Tensor | None:
        """A gradient that is written without being read begins anew."""
        index = self._of(task.writes, "gradients")
        if index is None or self._of(task.reads, "gradients") is not None:
            return None
        return self.slabs.buffers[index]

    def _weights(self, task: Task) -> dict[str, Stored]:
        index = self._of(task.reads, "weights")
        assert index is not None
        return self.weights_in(index, self.part_of(task))

    def _sums(self, task: Task) -> dict[str, Tensor]:
        """Of a part that is not trained there are none."""
        index = self._of(task.writes, "gradients")
        return {} if index is None else self.sums_in(index, self.part_of(task))

    def _trained(self, task: Task) -> Trained:
        return Trained(self._weights(task), self._sums(task))

    def _residual(self, task: Task, chunk: Chunk) -> Tensor:
        index = self._of((*task.writes, *task.reads), "residual")
        assert index is not None
        return self._rows(index, chunk.count)

    def _context_keys(self, task: Task) -> Keys:
        return next(self._keys[use.buffer] for use in (*task.writes, *task.reads) if use.buffer in self._keys)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _embed(self, task: Task, chunk: Chunk) -> None:
        assert task.chunk is not None
        self.embedding_head.embed(self.inputs.ids(task.chunk), chunk, self._weights(task), self._residual(task, chunk))

    def _embed_backward(self, task: Task, chunk: Chunk) -> None:
        assert task.chunk is not None
        sums = self._sums(task)
        gradient = self._residual(task, chunk)
        self.embedding_head.embed_backward(
            self.inputs.ids(task.chunk), chunk, self._weights_of_embedding(task), sums, gradient
        )

    def _weights_of_embedding(self, task: Task) -> dict[str, Stored]:
        """The norm behind the tables is small and stays where the tables do; others need no weights to go back."""
        index = self._of(task.reads, "weights")
        return {} if index is None else self.weights_in(index, self.part_of(task))

    def _head(self, task: Task, chunk: Chunk) -> None:
        assert task.chunk is not None
        last = min(chunk.count, task.first + task.tokens)
        if self.embedding_head.classifies:
            # A sequence's first row speaks for all of it: the first of a chunk's pieces takes all of these.
            if task.first == 0:
                self._classify(task, chunk)
        elif self.preferences is not None:
            self._compare(self.preferences, task, chunk)
        elif (chosen := self.inputs.chosen(task.chunk)) is not None:
            self._loss_of_chosen(task, chunk, chosen)
        elif task.first < last:
            rows = slice(task.first, last)
            self._loss(task, self._residual(task, chunk)[rows], self.inputs.labels(task.chunk)[rows])

    def _loss_of_chosen(self, task: Task, chunk: Chunk, chosen: Tensor) -> None:
        """The head over the rows that have a loss: they fill the first of a chunk's pieces, the others are empty."""
        assert task.chunk is not None
        residual, labels = self._residual(task, chunk), self.inputs.labels(task.chunk)
        if task.first == 0 and not self.evaluating:
            # Nobody reads the rows without a loss any more; their gradients are zeros.
            without = self.head_arena.take(labels.shape, torch.bool)
            residual.masked_fill_(torch.eq(labels, NO_LABEL, out=without)[:, None], 0)
            self.head_arena.give(without)
        chosen = chosen[task.first : task.first + task.tokens]
        if not chosen.numel():
            return
        scales = None if self.preferences is None else self.inputs.answers(task.chunk)[1]
        with self._of_chosen(chosen, residual, labels, *(() if scales is None else (scales,))) as (
            rows,
            found,
            *weighed,
        ):
            self._loss(task, rows, found, scale=weighed[0] if weighed else None)
            if not self.evaluating:
                places = self.head_arena.take(chosen.shape, torch.int64)
                residual.index_copy_(0, places.copy_(chosen), rows)
                self.head_arena.give(places)

    @contextmanager
    def _of_chosen(self, chosen: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Rows of some tensors, behind each other."""
        found = [self.head_arena.take((chosen.numel(), *each.shape[1:]), each.dtype) for each in tensors]
        for each, rows in zip(tensors, found, strict=True):
            torch.index_select(each, 0, chosen, out=rows)
        yield found
        for rows in reversed(found):
            self.head_arena.give(rows)

    def _compare(self, preferences: Preferences, task: Task, chunk: Chunk) -> None:
        """The first of a chunk's pieces scores all of its answers, before any of them goes back."""
        assert task.chunk is not None
        residual, labels = self._residual(task, chunk), self.inputs.labels(task.chunk)
        answers, _, _ = self.inputs.answers(task.chunk)
        chosen = self.inputs.chosen(task.chunk)
        if task.first == 0:
            preferences.begin(task.chunk)
            count = chunk.count if chosen is None else chosen.numel()
            for first in range(0, count, task.tokens):
                rows = slice(first, min(first + task.tokens, count))
                if chosen is None:
                    self._score(preferences, task, residual[rows], labels[rows], answers[rows])
                    continue
                with self._of_chosen(chosen[rows], residual, labels, answers) as found:
                    self._score(preferences, task, *found)
            preferences.weigh(task.chunk, self.scale, self.loss)
        if chosen is not None:
            if not self.evaluating:
                self._loss_of_chosen(task, chunk, chosen)
            return
        rows = slice(task.first, min(chunk.count, task.first + task.tokens))
        if not self.evaluating and rows.start < rows.stop:
            _, scales, _ = self.inputs.answers(task.chunk)
            self._loss(task, residual[rows], labels[rows], scale=scales[rows])

    def _score(self, preferences: Preferences, task: Task, rows: Tensor, labels: Tensor, answers: Tensor) -> None:
        """How likely some tokens are, each of an answer."""
        assert task.chunk is not None
        losses = self.arena.take(labels.shape, self.statistics)
        self.embedding_head.score(rows, labels, self._weights(task), arena=self.head_arena, out=losses)
        preferences.add(task.chunk, answers, losses)
        self.arena.give(losses)

    def _classify(self, task: Task, chunk: Chunk) -> None:
        assert task.chunk is not None
        residual, begins = self._residual(task, chunk), chunk.begins
        if not len(begins):
            if not self.evaluating:
                residual.zero_()
            return
        pooled = self.arena.take((len(begins), self.model.hidden), self.compute)
        averages = self.model.pooling == "mean"
        if averages:
            self.embedding_head.pool(residual, chunk, self._weights(task), out=pooled)
        else:
            torch.index_select(residual, 0, begins, out=pooled)
        drops = chunk.drops
        if drops is not None:
            drops = drops.with_tokens(drops.tokens.index_select(0, begins))
        self._loss(task, pooled, self.inputs.labels(task.chunk), drops)
        if averages and not self.evaluating:
            self.embedding_head.pool_backward(pooled, residual, chunk, self._trained(task))
        elif not self.evaluating:
            residual.zero_().index_copy_(0, begins.long(), pooled)
        self.arena.give(pooled)

    def _loss(
        self, task: Task, rows: Tensor, labels: Tensor, drops: RowDrops | None = None, *, scale: Tensor | None = None
    ) -> None:
        """The loss of some rows, and their gradients in their place.

        `scale`: what each row's gradient is multiplied by, where its loss is counted elsewhere.
        """
        self.embedding_head.head(
            rows,
            labels,
            self._weights(task),
            None if self.evaluating else self._sums(task),
            loss=self.loss if scale is None else self._counted_elsewhere,
            arena=self.head_arena,
            scale=self.scale if scale is None else scale,
            drops=drops,
        )

    # -- blocks in one piece --------------------------------------------------------------------------------------

    def _slot(self, task: Task, tokens: int) -> dict[str, Tensor]:
        index = self._of((*task.writes, *task.reads), "activations", "slot")
        assert index is not None
        return self._kept_in(index, task, "full", tokens)

    def _saved(self, task: Task) -> SavedTensors:
        """What the block of a task keeps."""
        return self.saved[self._kind(task)]

    def _kept_in(self, index: int, task: Task, level: str, tokens: int) -> dict[str, Tensor]:
        key = (index, self._kind(task), level, tokens)
        found = self._saved_views.get(key)
        if found is None:
            if len(self._saved_views) >= MOST_VIEWS:
                self._saved_views.clear()
            found = self._saved_views[key] = self._saved(task).views(self.slabs.buffers[index], level, tokens)
        return found

    def _home(self, task: Task, uses: Sequence[Use], tokens: int) -> dict[str, Tensor] | None:
        index = self._of(uses, "activations", "home")
        return None if index is None else self._kept_in(index, task, task.level, tokens)

    def _forward(self, task: Task, chunk: Chunk) -> None:
        tokens = chunk.count
        slot, residual = self._slot(task, tokens), self._residual(task, chunk)
        values = Values(self.arena, {**slot, "output": residual})
        block = self._block(task)
        if block.begins_with_norm:
            # The norm reads it anyway.
            values["input"], values.copies["input"] = residual, slot["input"]
        else:
            slot["input"].copy_(residual)
            values["input"] = slot["input"]
        block.forward(values, self._weights(task), chunk, self._context_keys(task) if self.cut else None)
        values.close()
        self._keep(task, slot, tokens)

    def _keep(self, task: Task, slot: dict[str, Tensor], tokens: int) -> None:
        """What stays on the device at a lower level is brought to its own place."""
        home = self._home(task, task.writes, tokens)
        if home is not None and not self.evaluating:
            for name, tensor in home.items():
                tensor.copy_(slot[name])

    def _kept_values(self, task: Task, chunk: Chunk) -> Values:
        """What backward finds of a (layer, chunk): in its home, in its slot, or among the inputs."""
        tokens = chunk.count
        slot = self._slot(task, tokens)
        values = Values(self.arena, slot)
        found = self._home(task, task.reads, tokens)
        if found is None:
            found = {name: slot[name] for name in self._saved(task).names(task.level)}
            source = self._of(task.reads, "workspace", "inputs")
            if source is not None and task.level == "input":
                found["input"] = self._rows(source, tokens)
        for name, tensor in found.items():
            if not (self.cut and name in ("key", "value")):
                values[name] = tensor
        return values

    def _backward(self, task: Task, chunk: Chunk) -> None:
        values, trained, block = self._kept_values(task, chunk), self._trained(task), self._block(task)
        weights = trained.weights
        kept = {*self._saved(task).names(task.level)}
        gradient = self._residual(task, chunk)
        if not self.cut:
            block.recompute(values, weights, chunk, kept)
            block.backward(values, trained, gradient, chunk)
            values.close()
            return
        keys, key_sums = self._context_keys(task), self.key_sums
        assert key_sums is not None
        if chunk.last == self.plan.sequence_tokens:
            # A sequence's last chunk goes back first: it begins the sums that the chunks before it add to.
            key_sums.key.zero_()
            key_sums.value.zero_()
        # Keys and values have come by the task `context`, whatever the level keeps.
        kept |= {"key", "value"}
        block.recompute(values, weights, chunk, kept, keys=block.select_visible(keys, chunk))
        block.backward(values, trained, gradient, chunk, keys=keys, key_sums=key_sums)
        values.close()

    def _context(self, task: Task, chunk: Chunk) -> None:
        keys = self._context_keys(task)
        tokens = chunk.count
        home = self._home(task, task.reads, tokens)
        if task.level != "input":
            source = home or self._slot(task, tokens)
            keys.key[chunk.first : chunk.last].copy_(source["key"])
            keys.value[chunk.first : chunk.last].copy_(source["value"])
            return
        inputs = self._of(task.reads, "workspace", "inputs")
        if home is not None:
            source_rows = home["input"]
        else:
            source_rows = self._slot(task, tokens)["input"] if inputs is None else self._rows(inputs, tokens)
        if self.sequences:
            self._sequence(task).make_keys(source_rows, self._weights(task), chunk, keys)
            return
        places = {"key": keys.key[chunk.first : chunk.last], "value": keys.value[chunk.first : chunk.last]}
        values = Values(self.arena, places)
        values["input"] = source_rows
        self._block(task).make_keys(values, self._weights(task), chunk)
        values.close()

    # -- blocks in three pieces -----------------------------------------------------------------------------------

    def _chunks(self, task: Task) -> list[Chunk]:
        """All chunks of the sequence that a task's chunk is of."""
        assert task.chunk is not None
        parts = self.plan.chunks_per_sequence
        first = task.chunk // parts * parts
        return [chunk for number in range(first, first + parts) if (chunk := self._chunk(task, number)) is not None]

    def _forward_before(self, task: Task, chunk: Chunk) -> None:
        residual = self._residual(task, chunk)
        self._sequence(task).forward_before(residual, self._weights(task), chunk, self._context_keys(task))

    def _attention(self, task: Task, chunk: Chunk) -> None:
        del chunk
        self._sequence(task).attention(self._chunks(task), self._context_keys(task))

    def _forward_after(self, task: Task, chunk: Chunk) -> None:
        tokens = chunk.tokens
        slot, residual = self._slot(task, tokens), self._residual(task, chunk)
        kept = self._saved(task).names(task.level)
        self._sequence(task).forward_after(
            residual, slot, self._weights(task), chunk, self._context_keys(task), kept=kept
        )
        self._keep(task, slot, tokens)

    def _backward_after(self, task: Task, chunk: Chunk) -> None:
        values = self._kept_values(task, chunk)
        inputs = self._of(task.writes, "workspace", "inputs")
        if inputs is not None:
            self._rows(inputs, chunk.tokens).copy_(values["input"])
        keys = self._whole_keys(task)
        gradient = self._residual(task, chunk)
        self._sequence(task).backward_after(values, self._trained(task), gradient, chunk, keys, level=task.level)

    def _whole_keys(self, task: Task) -> Keys:
        """Where the keys of a task's layer and sequence are; at levels that keep attention's result none are read."""
        used = (self._keys[use.buffer] for use in task.reads if use.buffer in self._keys)
        return next(used, next(iter(self._keys.values())))

    def _attention_backward(self, task: Task, chunk: Chunk) -> None:
        del chunk
        self._sequence(task).attention_backward(self._chunks(task), self._context_keys(task))

    def _backward_before(self, task: Task, chunk: Chunk) -> None:
        inputs = self._of(task.reads, "workspace", "inputs")
        assert inputs is not None
        source, gradient = self._rows(inputs, chunk.tokens), self._residual(task, chunk)
        self._sequence(task).backward_before(source, self._trained(task), gradient, chunk)

    # -- updates and copies ---------------------------------------------------------------------------------------

    def _optimize(self, task: Task) -> Action:
        part = self.part_of(task)
        owners: tuple[Owner, ...] = ("weights", "gradients", "optimizer")
        found = [self._of(task.reads, owner) for owner in owners]
        weights, gradients, state = (self.slabs.buffers[index] for index in found if index is not None)
        # On the host another thread updates, beside whom the compute stream takes what room there is.
        room = self.arena if task.stream == "compute" else OwnRoom(weights.device)
        first, count = task.first, task.parameters
        return lambda: self.updates.update(part, weights, gradients, state, first=first, count=count, room=room)

    def _copy(self, task: Task) -> Action:
        source, target = self.slabs.buffers[task.reads[0].buffer], self.slabs.buffers[task.writes[0].buffer]
        if task.what not in ("activations", "context"):
            size = task.bytes

            def copy() -> None:
                target[:size].copy_(source[:size], non_blocking=True)

            return copy
        number = task.chunk
        assert number is not None

        def copy_kept() -> None:
            chunk = self.inputs.chunk(number)
            if chunk is not None:
                self._copy_kept(task, chunk, source, target)

        return copy_kept

    def _copy_kept(self, task: Task, chunk: Chunk, source: Tensor, target: Tensor) -> None:
        tokens = chunk.count
        if task.what == "context":
            keys = self._keys[task.writes[0].buffer]
            home = self._saved(task).views(source, task.level, tokens)
            keys.key[chunk.first : chunk.last].copy_(home["key"], non_blocking=True)
            keys.value[chunk.first : chunk.last].copy_(home["value"], non_blocking=True)
            return
        if self.program.buffers[task.writes[0].buffer].role == "inputs":
            size = tokens * self.model.hidden * self.compute.itemsize
            target[:size].copy_(source[:size], non_blocking=True)
            return
        # Where sequences are cut, keys and values come back on their own, before the rest.
        apart = ("key", "value") if task.kind == "load" and self.cut else ()
        for low, full, size in self._saved(task).copies(task.level, "full", tokens, without=apart):
            at_source, at_target = (full, low) if task.kind == "store" else (low, full)
            target[at_target : at_target + size].copy_(source[at_source : at_source + size], non_blocking=True)


def _join(buffers: Sequence[Tensor]) -> Tensor:
    """Neighbouring buffers as one."""
    size = sum(buffer.numel() for buffer in buffers)
    assert buffers[-1].data_ptr() + buffers[-1].numel() == buffers[0].data_ptr() + size
    return torch.as_strided(buffers[0], (size,), (1,))
