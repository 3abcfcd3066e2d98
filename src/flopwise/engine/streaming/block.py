"""A block, forward and backward, over a chunk of tokens: in one piece, or before and after attention.

What a chunk keeps and what is recomputed follows from the description: backward asks what it needs, takes what the save
level kept and recomputes the rest, operator by operator, as forward did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.attention import (
    Kernel,
    attention_backward,
    attention_forward,
    choose_kernel,
)
from flopwise.engine.kernels.packed_attention import Packed, packed_backward, packed_forward, takes_all
from flopwise.engine.kernels.plain_attention import Saved, mask_for
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.carrying import SequenceRows
from flopwise.engine.streaming.dropping import RowDrops, mask_of
from flopwise.engine.streaming.layout import SavedTensors
from flopwise.engine.streaming.operators import Operators
from flopwise.engine.streaming.rotary import rotation_of
from flopwise.engine.streaming.rows import Rows
from flopwise.engine.streaming.trained import Trained, Weights, plain_weight
from flopwise.engine.streaming.values import Gradients, Values
from flopwise.engine.streaming.watching import BlockPart, MixtureWatch, part_of
from flopwise.work.adapters import DOWN
from flopwise.work.fusion import (
    is_activation,
    is_sum_for_norm,
    kept_of_heads,
    last_uses,
    makers_for_one_product,
    sums_for_activations,
)
from flopwise.work.op import Attention, Gemm, Op, Streaming
from flopwise.work.parameters import op_groups, split_at_attention
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work

SINKS = "sinks.bias"
"""A block's attention sinks among its weights."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of a task: whole sequences, or a part of one."""

    sequences: int
    tokens: int
    """Of each sequence, those that are in the chunk; of packed sequences the most that one may have."""
    first: int
    """Place of the first of them within the sequence."""
    positions: Tensor
    """Of each row."""
    lengths: Tensor | None
    """Tokens of each sequence that are no padding; None: all."""
    starts: Tensor | None = None
    """Rows at which whole sequences begin, with the end of the last; behind packed ones, those that fill up."""
    packed: bool = False
    """Whether sequences of uneven length lie behind each other, without padding."""
    drops: RowDrops | None = None
    """What dropout drops; None: nothing."""
    types: Tensor | None = None
    """Of each row; None: all are of the first type."""

    @property
    def count(self) -> int:
        """Rows of all sequences together."""
        return int(self.positions.shape[0])

    @property
    def begins(self) -> Tensor:
        """The first row of each sequence, where it is in the chunk."""
        assert self.starts is not None
        return self.starts[: self.sequences if self.first == 0 else 0]

    @property
    def whole_sequences(self) -> SequenceRows:
        """Of which sequences its rows are, where none is cut."""
        if self.packed:
            return SequenceRows(self.sequences, self.tokens, self.starts, self.positions)
        return SequenceRows(self.sequences, self.tokens)

    @property
    def sums_shape(self) -> tuple[int, int]:
        """Sequences and tokens that attention's sums are laid out by: packed ones are one."""
        return (1, self.count) if self.packed else (self.sequences, self.tokens)

    @property
    def last(self) -> int:
        return self.first + self.tokens


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values that queries look at: (sequences, tokens, width) of a chunk itself, or of a whole sequence."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Queries that look back in one chunk of attention's."""

    chunk: Chunk
    """As if that were the sequence."""
    sequence: int
    columns: slice
    """The queries within their sequence's chunk."""
    rows: slice
    """And among all of the chunk's."""
    seen: slice
    """Rows of keys."""

    def of(self, keys: Keys) -> Keys:
        """What the queries see."""
        return Keys(keys.key[self.seen], keys.value[self.seen])


class Block:
    """One kind of block of a model; which layer it is only the weights know."""

    def __init__(
        self,
        model: Transformer,
        work: Work,
        operators: Operators,
        saved: SavedTensors,
        *,
        deterministic: bool,
        spare_bytes: int = 0,
    ) -> None:
        """`spare_bytes`: what attention's kernels may take beside what is planned for them."""
        self.model, self.work, self.operators, self.saved = model, work, operators, saved
        self.arena: Arena = operators.arena
        self.deterministic, self.spare_bytes = deterministic, spare_bytes
        ops = op_groups(work)[1]
        self.before, self.attention_op, self.after = split_at_attention(ops)
        self.ops = ops
        self._first_need = {name: op for op in reversed(ops) for name in op.needs}
        """Of the block's operators the first that needs a value: the last that backward comes to."""
        self._makers = makers_for_one_product(ops)
        self.lazy = {maker.outputs[0] for maker in self._makers.values()}
        """What backward needs and recomputes itself, so that nobody else has to."""
        first = ops[0]
        self.begins_with_norm = isinstance(first, Streaming) and first.kind == "norm" and first.inputs == ("input",)
        assert model.other_attention is None, "a block is of one kind"
        self.mask = mask_for(model)
        self.rotation = rotation_of(model, work.sequence_tokens, operators.device)
        of_queries, self.key_extras = kept_of_heads(work, normed=model.qk_norm)
        """What the backward in front of attention reads of keys and values, beside the block's input."""
        self.extras = (*of_queries, *self.key_extras)
        self.drops_weights = False
        """Whether training drops weights of attention."""
        self.watch = MixtureWatch(operators.device)

    # -- one operator after another -------------------------------------------------------------------------------

    def run(
        self,
        ops: Sequence[Op],
        values: Values,
        weights: Weights,
        chunk: Chunk,
        wanted: set[str],
        *,
        keep: Collection[str] = (),
        keys: Keys | None = None,
    ) -> None:
        """Make the wanted tensors of these operators; temporaries go as soon as nobody reads them any more."""
        running = [op for op in ops if not wanted.isdisjoint(op.outputs)]
        last_use = last_uses(running)
        sums = sums_for_activations(running)
        waiting = {each.name for added in sums.values() for each in added}
        summed: Op | None = None
        for index, op in enumerate(running):
            if op.name in waiting:
                continue
            made = [name for name in op.outputs if name in wanted]
            following = running[index + 1] if index + 1 < len(running) else None
            part = self._part(op)
            begun = self.watch.begun(part)
            if isinstance(op, Attention):
                self._attend(values, weights, chunk, keys)
            elif summed is not None:
                done = [name for name in summed.inputs if last_use[name] < index and name not in keep]
                free = None if op.outputs[0] in values.places else next(filter(values.is_temporary, done), None)
                self.operators.norms.residual_norm(summed, op, values, weights, self._rows(chunk), over=free)
                values.drop(done)
                summed = None
            elif is_sum_for_norm(op, following):
                summed = op
                continue
            elif self.operators.is_of_experts(op):
                activates = following is not None and following.name == "activation"
                self.operators.expert_product(op, values, weights, made, activates=activates)
            elif self.operators.is_paired(op):
                activates = following is not None and is_activation(following)
                self.operators.paired_product(op, values, weights, activates=activates)
            elif op.name in sums:
                self.operators.activate_sums(op, sums[op.name], values, weights)
            elif not (is_activation(op) and op.outputs[0] in values):
                self.operators.forward(op, values, weights, self._rows(chunk), made)
            self.watch.ended(part, begun)
            if op.name == "dispatch" and values.routed is not None:
                self.watch.loaded(values.routed.starts)
            used_up = [name for name, last in last_use.items() if last == index]
            unread = [name for name in op.outputs if name not in last_use]
            values.drop(name for name in (*used_up, *unread) if name not in keep)

    def _part(self, op: Op) -> BlockPart | None:
        """What an operator's time is counted as, in a mixture."""
        return part_of(op, of_experts=self.operators.is_of_experts(op)) if self.model.experts else None

    def _rows(self, chunk: Chunk) -> Rows:
        return Rows(chunk.positions, chunk.drops, self.rotation, chunk.whole_sequences)

    def _attend(self, values: Values, weights: Weights, chunk: Chunk, keys: Keys | None) -> None:
        query = values["query"]
        out = values.allocate("attended", (query.shape[0], self.model.attended_width), query.dtype)
        sequences, tokens = chunk.sums_shape
        shape = (sequences, self.model.heads, tokens)
        logsumexp = values.allocate("logsumexp", shape, self.operators.statistics)
        if keys is None:
            keys = Keys(values["key"], values["value"])
        self.attend(query, keys, out, logsumexp.view(shape), chunk)
        self.add_sinks(weights, out, logsumexp.view(shape))

    def add_sinks(self, weights: Weights, out: Tensor, logsumexp: Tensor) -> None:
        """Sinks, where there are any, take from attention's result, (rows, width); sums are by sequence and head."""
        if not self.model.sinks:
            return
        rows, tokens = self._heads(out, 1)[0], logsumexp.shape[-1]
        scores = plain_weight(weights, SINKS)
        for number, sums in enumerate(logsumexp):
            dispatch.add_sinks(scores, out=rows[number * tokens : (number + 1) * tokens], logsumexp=sums)

    def sinks_backward(self, gradient: Tensor, trained: Trained, out: Tensor, logsumexp: Tensor) -> None:
        """The gradient of the sinks, from that of attention's result."""
        total = trained.sums.get(SINKS)
        if total is None:
            return
        above, rows, tokens = self._heads(gradient, 1)[0], self._heads(out, 1)[0], logsumexp.shape[-1]
        scores = plain_weight(trained.weights, SINKS)
        for number, sums in enumerate(logsumexp):
            part = slice(number * tokens, (number + 1) * tokens)
            dispatch.sinks_backward(above[part], scores, out=rows[part], logsumexp=sums, total=total)

    def attend(self, query: Tensor, keys: Keys, out: Tensor, logsumexp: Tensor, chunk: Chunk) -> None:
        """Attention of a chunk's queries; they are the last of those that see the keys."""
        if self._looks_in_chunks(chunk):
            for part in self._attention_parts(chunk, keys):
                sums = self.arena.take((1, self.model.heads, part.chunk.tokens), logsumexp.dtype)
                self.attend(query[part.rows], part.of(keys), out[part.rows], sums, part.chunk)
                logsumexp[part.sequence, :, part.columns].copy_(sums[0])
                self.arena.give(sums)
            return
        drop = mask_of(chunk.drops, "attention")
        if chunk.packed:
            assert chunk.starts is not None
            rows = [self._heads(query, 1)[0], self._heads(keys.key, 1)[0]]
            rows += [self._value_heads(each, 1)[0] for each in (keys.value, out)]
            packed = Packed(chunk.starts, chunk.tokens)
            packed_forward(rows[0], rows[1], rows[2], self.mask, packed, out=rows[3], logsumexp=logsumexp[0], drop=drop)
            return
        key, value = self._heads(keys.key, chunk.sequences), self._value_heads(keys.value, chunk.sequences)
        ahead = 0 if self.model.causal else key.shape[1] - chunk.last
        attention_forward(
            self._heads(query, chunk.sequences),
            key,
            value,
            self.mask,
            out=self._value_heads(out, chunk.sequences),
            logsumexp=logsumexp,
            lengths=chunk.lengths,
            kernel=self._kernel(query, chunk, key.shape[1]),
            drop=drop,
            ahead=ahead,
        )

    def _looks_in_chunks(self, chunk: Chunk) -> bool:
        """Whether some of a chunk's queries look back within another chunk of attention's than the first."""
        size = self.model.attention_chunk
        return size is not None and chunk.last > size

    def _attention_parts(self, chunk: Chunk, keys: Keys) -> Iterator[AttentionPart]:
        """A chunk's queries by the chunks that attention looks back in, sequence by sequence."""
        size = self.model.attention_chunk
        assert size is not None
        assert not chunk.packed, "documents that lie behind each other are no longer than one"
        of_keys = keys.key.shape[0] // chunk.sequences
        for sequence in range(chunk.sequences):
            for begin in range(chunk.first // size * size, chunk.last, size):
                first, last = max(begin, chunk.first), min(begin + size, chunk.last)
                columns = slice(first - chunk.first, last - chunk.first)
                rows = slice(sequence * chunk.tokens + columns.start, sequence * chunk.tokens + columns.stop)
                seen = slice(sequence * of_keys + begin, sequence * of_keys + last)
                inner = Chunk(1, last - first, first - begin, chunk.positions[:0], None)
                yield AttentionPart(inner, sequence, columns, rows, seen)

    def attends_whole(self, query: Tensor, drops: RowDrops | None) -> bool:
        """Whether attention over a whole sequence is one call: where a kernel is much faster that way."""
        whole = Chunk(1, query.shape[0], 0, query.new_empty(0), None, drops=drops)
        kernel = self._kernel(query, whole, query.shape[0])
        return kernel in ("cudnn", "flash-4") or (kernel == "flash" and self.mask.looks_around)

    @property
    def packs_at_once(self) -> bool:
        """Whether attention over packed sequences is one call, which does not ask the device where they begin."""
        return takes_all(self.operators.device, self.operators.compute, self.mask, drops=self.drops_weights)

    def _heads(self, tensor: Tensor, sequences: int) -> Tensor:
        return tensor.view(sequences, -1, tensor.shape[-1] // self.model.head_dim, self.model.head_dim)

    def _value_heads(self, tensor: Tensor, sequences: int) -> Tensor:
        """The same of values, and of attention's result, whose heads may have other channels."""
        return tensor.view(sequences, -1, tensor.shape[-1] // self.model.value_dim, self.model.value_dim)

    def _kernel(self, query: Tensor, chunk: Chunk, keys: int) -> Kernel:
        return choose_kernel(
            query.device,
            query.dtype,
            self.mask,
            chunk.tokens,
            keys,
            padded=chunk.lengths is not None,
            deterministic=self.deterministic,
            drops=mask_of(chunk.drops, "attention") is not None,
        )

    # -- a chunk through a block in one piece ---------------------------------------------------------------------

    def forward(self, values: Values, weights: Weights, chunk: Chunk, keys: Keys | None) -> None:
        """From `input` to `output`; what has a place in `values` stays there. `keys`: of a sequence that is cut."""
        if keys is None:
            self.run(self.ops, values, weights, chunk, self._all(self.ops), keep=values.places)
            return
        keep = {*values.places, "key", "value"}
        self.run(self.before, values, weights, chunk, self._all(self.before), keep={*keep, "query", "input"})
        keys.key[chunk.first : chunk.last].copy_(values["key"])
        keys.value[chunk.first : chunk.last].copy_(values["value"])
        seen = self.select_visible(keys, chunk)
        assert self.attention_op is not None, "sequences of blocks without attention are not cut"
        rest = (self.attention_op, *self.after)
        self.run(rest, values, weights, chunk, self._all(rest), keep=values.places, keys=seen)

    def select_visible(self, keys: Keys, chunk: Chunk) -> Keys:
        """Of a whole sequence's keys those that the chunk's queries may look at."""
        last = chunk.last if self.model.causal else keys.key.shape[0]
        return Keys(keys.key[:last], keys.value[:last])

    @staticmethod
    def _all(ops: Iterable[Op]) -> set[str]:
        return {name for op in ops for name in op.outputs}

    def recompute(
        self, values: Values, weights: Weights, chunk: Chunk, kept: Collection[str], *, keys: Keys | None = None
    ) -> None:
        """Everything that the block's backward reads and that was not kept."""
        needed = {name for op in self.ops for name in op.needs} - self.lazy
        made = self.work.made_for(needed, kept)
        self.run(self.ops, values, weights, chunk, made, keep=needed, keys=keys)

    def backward(
        self,
        values: Values,
        trained: Trained,
        gradient: Tensor,
        chunk: Chunk,
        *,
        keys: Keys | None = None,
        key_sums: Keys | None = None,
    ) -> None:
        """From the gradient of the output to that of the input, which is written over it."""
        gradients = Gradients(self.arena)
        gradients.put("output", gradient)
        if self.attention_op is None:
            self.back(self.ops, values, gradients, trained, chunk)
        else:
            self.back(self.after, values, gradients, trained, chunk)
            sums = values["logsumexp"].view(-1, self.model.heads, chunk.sums_shape[1])
            self.sinks_backward(gradients["attended"], trained, values["attended"], sums)
            begun = self.watch.begun("attention" if self.model.experts else None)
            self._attention_back(values, gradients, chunk, keys, key_sums)
            self.watch.ended("attention", begun)
            self.back(self.before, values, gradients, trained, chunk)
        if gradients["input"] is not gradient:
            gradient.copy_(gradients["input"])
        gradients.drop("input")

    def back(self, ops: Sequence[Op], values: Values, gradients: Gradients, trained: Trained, chunk: Chunk) -> None:
        """Operators in the opposite order; a value goes when the first of the block that needs it is done."""
        done: set[str] = set()
        for op in reversed(ops):
            if op.name in done:
                continue
            used = [op]
            part: BlockPart | None = "experts" if op.name == "combine" else self._part(op)
            begun = self.watch.begun(part)
            if op.name == "combine":
                # What experts made is not kept: back to what their down product read, in one go.
                down, activation = (next(each for each in ops if each.name == name) for name in ("down", "activation"))
                assert isinstance(down, Gemm)
                beside = self._beside(down)
                self.operators.experts_backward((op, down, activation), values, gradients, trained, beside=beside)
                self.watch.ended(part, begun)
                # What the activation read holds gradients now.
                used = [op, down, *(beside or ())]
                done |= {activation.name, *(each.name for each in used)}
                for each in used:
                    values.drop(name for name in each.needs if self._first_need[name] in used)
                continue
            maker = self._makers.get(op.name)
            if maker is not None and isinstance(op, Gemm) and op.inputs[0] not in values:
                # The weight's gradient waits until the product's input is there again.
                source = self._back_to_maker(op, maker, values, gradients, trained, rows=self._rows(chunk))
                self.operators.wgrad(op, source, gradients, trained)
                gradients.drop(maker.outputs[0])
                done.add(maker.name)
                # What an activation read holds gradients now.
                used += [] if is_activation(maker) else [maker]
            else:
                self.operators.backward(op, values, gradients, trained, self._rows(chunk))
            self.watch.ended(part, begun)
            for each in used:
                values.drop(name for name in each.needs if self._first_need[name] is each)

    def _beside(self, product: Gemm) -> tuple[Gemm, Gemm] | None:
        """The two products of the adapter beside one of the experts' products."""
        first = next((op for op in self.ops if op.name == f"{product.name}_{DOWN}"), None)
        if first is None:
            return None
        second = next(op for op in self.ops if isinstance(op, Gemm) and op.adds and op.inputs == first.outputs)
        assert isinstance(first, Gemm)
        return first, second

    def _back_to_maker(
        self, op: Gemm, maker: Op, values: Values, gradients: Gradients, trained: Trained, *, rows: Rows
    ) -> Tensor:
        """Back through a product to what its input was made of; returns that input, recomputed."""
        if is_activation(maker) and self.operators.gated is not None:
            return self.operators.activated_backward(op, maker, values, gradients, trained)
        if is_activation(maker) and op.name.endswith(f"_{DOWN}"):
            return self.operators.activate_sums_backward(op, maker, values, gradients, trained)
        self.operators.dgrad(op, gradients, trained)
        return self.operators.backward_recomputing(maker, values, gradients, trained, rows)

    def _attention_back(
        self, values: Values, gradients: Gradients, chunk: Chunk, keys: Keys | None, key_sums: Keys | None
    ) -> None:
        query = values["query"]
        if self.operators.packs:
            kv_width = self.model.kv_width
            widths = (query.shape[1], kv_width, self.model.value_width)
            gradients.pack(("query", "key", "value"), widths, query.shape[0], query.dtype)
        query_gradient, _ = gradients.target("query", tuple(query.shape), query.dtype)
        if keys is None or key_sums is None:
            own = Keys(values["key"], values["value"])
            found = Keys(
                gradients.target("key", tuple(own.key.shape), query.dtype)[0],
                gradients.target("value", tuple(own.value.shape), query.dtype)[0],
            )
            adds = False
        else:
            own, found = self.select_visible(keys, chunk), self.select_visible(key_sums, chunk)
            adds = True
        self.attention_back(
            gradients["attended"], values, own, chunk, query_gradient=query_gradient, found=found, accumulate=adds
        )
        if key_sums is not None:
            for name, sums in (("key", key_sums.key), ("value", key_sums.value)):
                part = sums[chunk.first : chunk.last]
                gradients.target(name, tuple(part.shape), query.dtype)[0].copy_(part)
        gradients.drop("attended")
        values.drop(("query", "key", "value", "attended", "logsumexp"))

    def attention_back(
        self,
        gradient: Tensor,
        values: Values,
        keys: Keys,
        chunk: Chunk,
        *,
        query_gradient: Tensor,
        found: Keys,
        accumulate: bool,
    ) -> None:
        """Gradients of queries, and of the keys and values that they looked at."""
        if self._looks_in_chunks(chunk):
            for part in self._attention_parts(chunk, keys):
                inner = Values(self.arena)
                for name in ("query", "attended"):
                    inner[name] = values[name][part.rows]
                sums = values["logsumexp"].view(chunk.sequences, self.model.heads, chunk.tokens)
                inner["logsumexp"] = sums[part.sequence, :, part.columns].contiguous()
                self.attention_back(
                    gradient[part.rows],
                    inner,
                    part.of(keys),
                    part.chunk,
                    query_gradient=query_gradient[part.rows],
                    found=part.of(found),
                    accumulate=accumulate,
                )
                inner.close()
            return
        if chunk.packed:
            self._packed_back(gradient, values, keys, chunk, query_gradient=query_gradient, found=found)
            return
        sequences = chunk.sequences
        query, key = self._heads(values["query"], sequences), self._heads(keys.key, sequences)
        attention_backward(
            self._value_heads(gradient, sequences),
            query,
            key,
            self._value_heads(keys.value, sequences),
            self._value_heads(values["attended"], sequences),
            values["logsumexp"].view(sequences, self.model.heads, chunk.tokens),
            self.mask,
            query_gradient=self._heads(query_gradient, sequences),
            key_gradient=self._heads(found.key, sequences),
            value_gradient=self._value_heads(found.value, sequences),
            accumulate=accumulate,
            lengths=chunk.lengths,
            kernel=self._kernel(query, chunk, key.shape[1]),
            drop=mask_of(chunk.drops, "attention"),
            spare_bytes=self.spare_bytes,
        )

    def _packed_back(
        self, gradient: Tensor, values: Values, keys: Keys, chunk: Chunk, *, query_gradient: Tensor, found: Keys
    ) -> None:
        assert chunk.starts is not None
        of_values = (gradient, keys.value, values["attended"], found.value)
        above, value, out, value_gradient = (self._value_heads(each, 1)[0] for each in of_values)
        of_keys = (values["query"], keys.key, query_gradient, found.key)
        query, key, query_rows, key_gradient = (self._heads(each, 1)[0] for each in of_keys)
        sums = values["logsumexp"].view(self.model.heads, chunk.count)
        packed_backward(
            Saved(above, query, key, value, out, sums),
            self.mask,
            Packed(chunk.starts, chunk.tokens),
            query_gradient=query_rows,
            key_gradient=key_gradient,
            value_gradient=value_gradient,
            drop=mask_of(chunk.drops, "attention"),
        )

    # -- keys and values recomputed --------------------------------------------------------------------------------

    def make_keys(self, values: Values, weights: Weights, chunk: Chunk) -> None:
        """Keys and values from a chunk's input, to where `values` has a place for them."""
        made = self.work.made_for(("key", "value"), ("input",))
        self.run(self.before, values, weights, chunk, made, keep=("key", "value", *values.places))
