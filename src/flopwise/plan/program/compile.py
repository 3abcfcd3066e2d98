"""A plan as a program: every task of a step, in the order of each stream.

Three layers and one chunk, of a plan that has two slots each for weights, optimizer state and activations, offloads all
activations and updates in backward. `w` weights, `o` optimizer state, `a` activations; F forward, B backward, U update:

    time ─▶
    copy-in    o2         w2   o1       a2    a1                a0   o0   w0
    compute    embed  F0  F1   F2  head U     B2   U2       B1  U1   B0   U0      embed-backward  U
    copy-out              a0   a1  a2              o2   w2           o1   w1      o0   w0
    host       (all U here, where the plan updates on the host)

    F2 ◀─ w2 ◀─ F0                layer 2 takes over the slot of layer 0: the load waits for the slot's last reader
    F2 ◀─ store a0 ◀─ F0          and its activations take over a slot that must have been copied out
    B1 ◀─ a1 ◀─ store a1 ◀─ F1    what was offloaded comes back, prefetched as soon as a slot is free
    B0 ◀─ w0 ◀─ store w2 ◀─ U2    on the way down the slots are handed back: updated weights leave first

What flows. The residual stream of a chunk stays in one buffer: forward writes a layer's output over its input, backward
the gradient of the input over that of the output. Everything else is in its *home*, one part's own place on device or
host, or in flight in a *slot* that layers share.

Versions. A buffer holds one `Value` at a time, and every write leaves another one:

    weights slot 0   weights 0 v0 ▶ weights 2 v0 ▶ weights 2 v1 ▶ weights 0 v0 ▶ weights 0 v1
    residual 0       embedding ▶ 0 ▶ 1 ▶ 2 ▶ gradient head ▶ gradient 2 ▶ gradient 1 ▶ gradient 0

Weights and optimizer state are v0 until their update and v1 from then on. A step ends when all that began as v0 is v1,
so the next step is the same program. Gradients have the round and the chunk that was added last: a sum over three
rounds is three values. What a task waits for follows from its reads and writes alone: it is behind the writer of all
that it reads, and behind every reader of what it writes over (`Builder.task`).

Tasks are written down where their value is needed; `ordering` then brings them into the order of each stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from flopwise.base.errors import FlopwiseError
from flopwise.plan.program.builder import Builder, FreeSlots
from flopwise.plan.program.ordering import NominalSeconds, in_order_of_release, order_by_need
from flopwise.plan.program.runs import check_runs
from flopwise.plan.program.sizes import Sizes, context_sets, level_bytes, sizes_of, slot_bytes, working_bytes
from flopwise.plan.program.state import Kept, OptimizerState, copy_state, ends_of, parts_of, place_of
from flopwise.records.plan import LETTERS, NO_BACKWARD, Plan
from flopwise.records.program import Buffer, Kind, Owner, Program, Value, ValueKind, aligned
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.model import Model
from flopwise.work.op import Op
from flopwise.work.parameters import End, Part, Place, op_groups, split_at_attention
from flopwise.work.transformer import Transformer

END_OF: dict[Kind, End] = {"embed": "embedding", "embed-backward": "embedding", "head": "head"}
"""Tasks around the blocks, and whose they are."""

Segment = Literal["embed", "before", "attention", "after", "block", "head", "nothing"]
"""Operators that a task runs: around the blocks, in a block around attention, or none where it only moves bytes."""

Writes = Sequence[tuple[int, Value]]
TEMPORARIES = Value("temporaries")

RELOAD_AFTER_LAYERS = 2
"""Weights that the host has updated are fetched when so many further layers are done, so that no copy waits for it."""


def compile_plan(plan: Plan, model: Model, *, rounds: int | None = None) -> Program:
    """The tasks of one step; with `rounds`, of one that has so many."""
    shorter = plan if rounds is None else replace(plan, rounds_per_step=rounds)
    sizes = sizes_of(model, plan.sequence_tokens, parse_formats(plan.precision), plan.optimizer)
    if plan.layers != sizes.layers:
        raise FlopwiseError(
            f"the plan saves {plan.layers} layers, {model.name} has {sizes.layers}", hint="plan this model anew"
        )
    check_runs(plan, model)
    # Whether gradients have a place on the host is the whole plan's, not that of its first rounds.
    return _Compiler(shorter, plan, model, sizes).compile()


class _Compiler:
    def __init__(self, plan: Plan, whole: Plan, model: Model, sizes: Sizes) -> None:
        self.plan, self.sizes = plan, sizes
        self.builder = Builder()
        self.weights = Kept(self.builder, whole, sizes, "weights", plan.weights)
        self.gradients = Kept(self.builder, whole, sizes, "gradients", plan.gradients)
        self.state = OptimizerState(self.builder, whole, sizes)
        self.ends = list(ends_of(sizes))
        self.trained = {part for part, state in parts_of(sizes).items() if state.parameters}
        """Parts that have gradients and an update."""
        self.embedding: Part = "embedding" if "embedding" in self.ends else "head"
        assert isinstance(model, Transformer)  # sizes_of refuses others
        self.causal, self.embedding_norm = model.causal, model.embedding_norm
        self.nominal = NominalSeconds.of_model(sizes.block.numbers, sizes.head.numbers, plan, model)
        self.cut = plan.chunks_per_sequence > 1
        self.whole_sequence = self.cut and plan.attention == "sequence"
        self._find_operators(model)
        self._activation_buffers()
        self._working_buffers()
        self.round = 0
        self.waiting: list[Part] = []
        """Parts whose weights the host has updated and the device has not fetched yet."""

    # -- buffers --------------------------------------------------------------------------------------------------

    def _find_operators(self, model: Model) -> None:
        before, inside, behind = op_groups(describe(model, self.plan.sequence_tokens))
        first, attention, then = split_at_attention(inside)
        segments: dict[Segment, tuple[Op, ...]] = {
            "embed": before,
            "before": first,
            "attention": () if attention is None else (attention,),
            "after": then,
            "block": inside,
            "head": behind,
            "nothing": (),
        }
        self.operators = {segment: tuple(op.name for op in ops) for segment, ops in segments.items()}

    def _activation_buffers(self) -> None:
        plan, builder = self.plan, self.builder
        size = slot_bytes(self.sizes, plan.tokens_of(0))
        self.free = FreeSlots(
            builder.buffer(Buffer("activations", "device", "slot", size, number=number))
            for number in range(plan.activation_slots)
        )
        self.slots: dict[tuple[int, int], int] = {}
        self.homes: dict[tuple[int, int], int] = {}
        for layer, row in enumerate(plan.saves):
            for chunk, letter in enumerate(row):
                if letter not in ("F", NO_BACKWARD):
                    kept = level_bytes(self.sizes, LETTERS[letter.lower()], plan.tokens_of(chunk))
                    place: Place = "device" if letter.isupper() else "host"
                    home = Buffer("activations", place, "home", kept, layer, chunk)
                    self.homes[layer, chunk] = builder.buffer(home)

    def _working_buffers(self) -> None:
        plan, sizes, builder = self.plan, self.sizes, self.builder
        chunks, parts_of = plan.chunks_per_round, plan.chunks_per_sequence
        bytes_of = working_bytes(sizes, plan)
        residual = [aligned(sizes.residual * plan.tokens_of(chunk)) for chunk in range(chunks)]
        self.residual = [
            builder.buffer(Buffer("residual", "device", "residual", size, number=chunk))
            for chunk, size in enumerate(residual)
        ]
        self.contexts: list[list[int]] = []
        self.key_gradients: tuple[int, ...] = ()
        self.inputs: list[int] = []
        self.sequence: tuple[int, ...] = ()
        workspace = bytes_of["workspace"]
        if self.cut:
            keys = [aligned(sizes.context * plan.tokens_of(part)) for part in range(parts_of)]
            self.contexts = [
                [
                    builder.buffer(Buffer("context", "device", "keys", size, number=part))
                    for part, size in enumerate(keys)
                ]
                for _ in range(context_sets(sizes, plan))
            ]
        if self.whole_sequence:
            self.inputs = [
                builder.buffer(Buffer("workspace", "device", "inputs", residual[part], number=part))
                for part in range(parts_of)
            ]
            size = aligned(sizes.sequence_attention * plan.sequence_tokens)
            self.sequence = (builder.buffer(Buffer("workspace", "device", "attention", size)),)
            workspace -= size + sum(residual[:parts_of])
        elif self.cut:
            size = aligned(sizes.context_gradients * plan.sequence_tokens)
            self.key_gradients = (builder.buffer(Buffer("context", "device", "key gradients", size)),)
        self.workspace = builder.buffer(Buffer("workspace", "device", "temporaries", workspace))
        self.logits = builder.buffer(Buffer("head", "device", "logits", bytes_of["head"]))

    # -- a step ---------------------------------------------------------------------------------------------------

    def compile(self) -> Program:
        plan = self.plan
        for round_ in range(plan.rounds_per_step):
            self.round = round_
            self._forward_pass()
            self._head_pass()
            self._backward_pass()
        if plan.update_when == "end":
            self._update_at_end()
        self._fetch(everything=True)
        program = self.builder.program(self._at_end(), plan.rounds_per_step)
        return in_order_of_release(program) if plan.fetch == "at once" else order_by_need(program, self.nominal)

    @property
    def last_round(self) -> bool:
        return self.round == self.plan.rounds_per_step - 1

    def _at_end(self) -> dict[int, Value]:
        """Every part's new weights and state where they belong, and the device as the next step expects it."""
        found: dict[int, Value] = {}
        for part in self.weights.parts:
            value = Value("weights", part, version=int(part in self.trained))
            if part in self.weights.staying:
                found[self.weights.slot[part]] = value
            if part in self.weights.host:
                found[self.weights.host[part]] = value
            for index, piece in enumerate(self.state.pieces[part]):
                for buffer in (piece.device, piece.host):
                    if buffer is not None:
                        found[buffer] = Value("optimizer", part, index, version=1)
        for buffer, value in self.builder.at_start.items():
            found.setdefault(buffer, value._replace(version=int(value.part in self.trained)))
        return found

    # -- forward --------------------------------------------------------------------------------------------------

    def _forward_pass(self) -> None:
        plan = self.plan
        for chunk in range(plan.chunks_per_round):
            table = self.weights.bring(self.embedding, self.round)
            self._compute("embed", "embed", chunk, reads=(table,), writes=(self._residual(chunk, "embedding"),))
        for layer in range(plan.layers):
            weights = self.weights.bring(layer, self.round)
            for first in range(0, plan.chunks_per_round, plan.chunks_per_sequence):
                chunks = range(first, first + plan.chunks_per_sequence)
                if self.whole_sequence:
                    self._forward_before(layer, chunks, weights)
                for chunk in chunks:
                    self._forward(layer, chunk, weights)

    def _forward_before(self, layer: int, chunks: range, weights: int) -> None:
        for chunk in chunks:
            self._compute(
                "forward-before",
                "before",
                chunk,
                layer=layer,
                reads=(weights, self.residual[chunk], *(self.sequence if chunk > chunks[0] else ())),
                writes=(self._context(layer, chunk), (self.sequence[0], self._value("queries", layer, chunk))),
            )
        self._compute(
            "attention",
            "attention",
            chunks[-1],
            layer=layer,
            reads=(*self._context_of(layer, chunks[0]), *self.sequence),
            writes=((self.sequence[0], self._value("attended", layer, chunks[0])),),
        )

    def _forward(self, layer: int, chunk: int, weights: int) -> None:
        """A chunk through a layer, and what it keeps on its way to where it is kept."""
        letter, home = self.plan.saves[layer][chunk], self.homes.get((layer, chunk))
        level = LETTERS.get(letter.lower(), "input")
        # Every forward works in a slot, whatever its level: what is not kept is gone when the slot is given back.
        slot = self.free.take()
        value = self._value("activations", layer, chunk)
        reads = [weights, self.residual[chunk]]
        writes = [(slot, value), self._residual(chunk, layer)]
        if self.whole_sequence:
            reads += [*self.sequence, self._context(layer, chunk)[0]]
        elif self.cut:
            reads += self._context_of(layer, chunk)[: chunk % self.plan.chunks_per_sequence]
            writes.append(self._context(layer, chunk))
        if letter.isupper() and home is not None:
            writes.append((home, value))
        kind: Kind = "forward-after" if self.whole_sequence else "forward"
        segment: Segment = "after" if self.whole_sequence else "block"
        self._compute(kind, segment, chunk, layer=layer, level=level, reads=reads, writes=writes)
        if letter == "F":
            self.slots[layer, chunk] = slot
            return
        if letter.islower():
            assert home is not None  # everything that is not in a slot has a buffer of its own
            self._copy("store", layer, chunk, source=slot, target=home, size=self.builder.buffers[home].bytes)
        self.free.give(slot)

    # -- head -----------------------------------------------------------------------------------------------------

    def _head_pass(self) -> None:
        plan = self.plan
        weights = self.weights.bring("head", self.round)
        self._gradient_slot("head")
        for chunk in reversed(range(plan.chunks_per_round)):
            tokens = plan.tokens_of(chunk)
            for first in range(0, tokens, plan.head_chunk_tokens):
                self._compute(
                    "head",
                    "head",
                    chunk,
                    first=first,
                    tokens=min(plan.head_chunk_tokens, tokens - first),
                    reads=(weights, self.residual[chunk], *self._summed("head")),
                    writes=(
                        self._residual_gradient(chunk, "head", first),
                        *self._gradient_writes("head", chunk, first),
                    ),
                )
        if self.embedding != "head" or self.embedding not in self.trained:
            self._gradient_done("head")

    # -- backward -------------------------------------------------------------------------------------------------

    def _backward_pass(self) -> None:
        plan = self.plan
        for layer in reversed(range(self.sizes.first_reached, plan.layers)):
            weights = self.weights.bring(layer, self.round)
            self._gradient_slot(layer)
            # The last chunk first: a chunk's keys have their whole gradient when all queries behind them are done.
            for first in reversed(range(0, plan.chunks_per_round, plan.chunks_per_sequence)):
                chunks = range(first, first + plan.chunks_per_sequence)
                if self.whole_sequence:
                    self._bring_context(layer, chunks, weights)
                for chunk in reversed(chunks):
                    if self.cut and not self.whole_sequence and chunk == chunks[-1]:
                        self._bring_context(layer, chunks, weights)
                    self._backward(layer, chunk, weights)
                if self.whole_sequence:
                    self._backward_before(layer, chunks, weights)
            self._gradient_done(layer)
        if self.embedding not in self.trained:
            return
        self._gradient_slot(self.embedding)
        # A norm behind the tables is recomputed from their rows.
        table = (self.weights.bring(self.embedding, self.round),) if self.embedding_norm else ()
        for chunk in reversed(range(plan.chunks_per_round)):
            self._compute(
                "embed-backward",
                "embed",
                chunk,
                reads=(*table, self.residual[chunk], *self._summed(self.embedding)),
                # A tied matrix gets its head's gradient before, whose versions are first tokens.
                writes=self._gradient_writes(self.embedding, chunk, -1),
            )
        self._gradient_done(self.embedding)

    def _bring_context(self, layer: int, chunks: range, weights: int) -> None:
        """Keys and values of a sequence's chunks, to where attention looks for them."""
        for chunk in reversed(chunks):
            buffer, value = self._context(layer, chunk)
            letter, home = self.plan.saves[layer][chunk], self.homes.get((layer, chunk))
            there = self.builder.value(buffer) == value
            if letter == "i" and (self.whole_sequence or not there):
                assert home is not None
                source = self.inputs[chunk % self.plan.chunks_per_sequence] if self.whole_sequence else self.free.take()
                size = self.builder.buffers[home].bytes
                self._copy("load", layer, chunk, source=home, target=source, size=size)
                if not self.whole_sequence:
                    # Backward of the chunk itself will load it a second time; until then the slot serves others.
                    self.free.give(source)
            elif letter in "fac" and not there:
                assert home is not None
                size = aligned(self.sizes.context * self.plan.tokens_of(chunk))
                self._copy("load", layer, chunk, source=home, target=buffer, size=size, what="context", value=value)
                continue
            else:
                source = self.slots[layer, chunk] if home is None else home
            if not there:
                reads = (weights, source)
                level = LETTERS[letter.lower()]
                segment: Segment = "before" if level == "input" else "nothing"
                writes = ((buffer, value),)
                self._compute("context", segment, chunk, layer=layer, level=level, reads=reads, writes=writes)

    def _backward(self, layer: int, chunk: int, weights: int) -> None:
        """A chunk back through a layer: what was kept is fetched, the rest recomputed."""
        letter, home = self.plan.saves[layer][chunk], self.homes.get((layer, chunk))
        writes = [self._residual_gradient(chunk, layer, 0), *self._gradient_writes(layer, chunk, 0)]
        reads = [weights, self.residual[chunk], *self._summed(layer)]
        if letter == "F":
            slot = self.slots.pop((layer, chunk))
            reads.append(slot)
        else:
            assert home is not None
            slot = self.free.take()
            writes.append((slot, self._value("activations", layer, chunk, 1)))
            reads.append(self._find_saved(layer, chunk, home, slot))
        if self.whole_sequence:
            part = chunk % self.plan.chunks_per_sequence
            if letter.lower() in "ci":
                context = self._context_of(layer, chunk)
                reads += context[: part + 1] if self.causal else context
            if part < self.plan.chunks_per_sequence - 1:
                reads += self.sequence
            writes.append((self.sequence[0], self._value("attended gradients", layer, chunk)))
            if letter != "i":
                writes.append((self.inputs[part], self._value("inputs", layer, chunk)))
        elif self.cut:
            reads += self._context_of(layer, chunk)[: chunk % self.plan.chunks_per_sequence + 1]
            if (chunk + 1) % self.plan.chunks_per_sequence:
                reads += self.key_gradients
            writes.append((self.key_gradients[0], self._value("key gradients", layer, chunk)))
        kind: Kind = "backward-after" if self.whole_sequence else "backward"
        segment: Segment = "after" if self.whole_sequence else "block"
        level = LETTERS[letter.lower()]
        self._compute(kind, segment, chunk, layer=layer, level=level, reads=reads, writes=writes)
        self.free.give(slot)

    def _find_saved(self, layer: int, chunk: int, home: int, slot: int) -> int:
        """Where backward finds what a (layer, chunk) kept: it stayed, it has come already, or it is loaded now."""
        letter = self.plan.saves[layer][chunk]
        if letter.isupper():
            return home
        if letter == "i" and self.whole_sequence:
            return self.inputs[chunk % self.plan.chunks_per_sequence]
        size = self.builder.buffers[home].bytes
        if self.cut and letter != "i":
            # Its keys and values have come before it.
            size -= aligned(self.sizes.context * self.plan.tokens_of(chunk))
        self._copy("load", layer, chunk, source=home, target=slot, size=max(0, size))
        return slot

    def _backward_before(self, layer: int, chunks: range, weights: int) -> None:
        self._compute(
            "attention-backward",
            "attention",
            chunks[-1],
            layer=layer,
            reads=(*self._context_of(layer, chunks[0]), *self.sequence),
            writes=((self.sequence[0], self._value("attention gradients", layer, chunks[0])),),
        )
        for chunk in reversed(chunks):
            self._compute(
                "backward-before",
                "before",
                chunk,
                layer=layer,
                reads=(
                    *(weights, self.residual[chunk], self.inputs[chunk - chunks[0]], *self.sequence),
                    *self._summed(layer),
                ),
                writes=(self._residual_gradient(chunk, layer, 1), *self._gradient_writes(layer, chunk, 1)),
            )

    # -- gradients and updates ------------------------------------------------------------------------------------

    def _gradient_writes(self, part: Part, chunk: int, version: int) -> Writes:
        """The sum with one more added to it; nothing of a part that is not trained."""
        if part not in self.trained:
            return ()
        return ((self.gradients.slot[part], Value("gradients", part, chunk, self.round, version)),)

    def _summed(self, part: Part) -> tuple[int, ...]:
        """The gradient so far, if there is one to add to."""
        return (self.gradients.slot[part],) if part in self.trained and self.gradients.here(part) else ()

    def _gradient_slot(self, part: Part) -> None:
        """The sum of earlier rounds is fetched to where the part's gradient is summed."""
        if self.round and part in self.trained:
            self.gradients.bring(part, self.round)

    def _gradient_done(self, part: Part) -> None:
        """After a part's last backward of a round: the gradient leaves, or is used up."""
        plan = self.plan
        if part not in self.trained:
            return
        if self.last_round and plan.update_when == "backward":
            self._update(part)
        elif part not in self.gradients.staying or (plan.host_copies and part in self.gradients.host):
            self.gradients.send(part, self.round)
        self._fetch()

    def _update_at_end(self) -> None:
        # State may pass through memory that activations lend: everybody must be done with those.
        self.builder.also_after = (*self.builder.last("compute"), *self.builder.last("copy-out"))
        order: tuple[Part, ...] = ("head", *reversed(range(self.plan.layers)), "embedding")
        for part in order:
            if part in self.trained:
                self._update(part)

    def _update(self, part: Part) -> None:
        if self.plan.update_place == "host":
            self._update_on_host(part)
            return
        builder, round_ = self.builder, self.round
        weights = self.weights.bring(part, round_)
        gradients = self.gradients.bring(part, round_)
        pieces, first = self.state.pieces[part], 0
        for index, piece in enumerate(pieces):
            new = Value("optimizer", part, index, version=1)
            slot = self.state.slot() if piece.device is None else piece.device
            if piece.device is None:
                assert piece.host is not None
                source, size = piece.host, piece.size
                copy_state(
                    builder, "load", "optimizer", part, round_, source=source, target=slot, size=size, first=first
                )
            is_last = index == len(pieces) - 1
            updated = Value("weights", part, version=1) if is_last else Value("weights", part, index + 1)
            builder.task(
                "optimize",
                "compute",
                reads=(weights, gradients, slot),
                writes=((weights, updated), (slot, new)),
                round_=round_,
                **place_of(part),
                what="optimizer",
                parameters=piece.parameters,
                first=first,
            )
            if piece.host is not None:
                target, size = piece.host, piece.size
                copy_state(
                    builder, "store", "optimizer", part, round_, source=slot, target=target, size=size, first=first
                )
            first += piece.parameters
        # Also where they stay in flight: the next step's program begins with the host's copy up to date.
        if part in self.weights.host:
            self.weights.send(part, round_)

    def _update_on_host(self, part: Part) -> None:
        builder = self.builder
        slot, home = self.gradients.slot[part], self.gradients.host[part]
        if self.gradients.here(part) and builder.value(slot) != builder.value(home):
            self.gradients.send(part, self.round)
        piece = self.state.pieces[part][0]
        assert piece.host is not None
        weights, gradients = self.weights.host[part], self.gradients.host[part]
        builder.task(
            "optimize",
            "host",
            reads=(weights, gradients, piece.host),
            writes=((weights, Value("weights", part, version=1)), (piece.host, Value("optimizer", part, 0, version=1))),
            round_=self.round,
            **place_of(part),
            what="optimizer",
            parameters=piece.parameters,
        )
        self.waiting.append(part)

    def _fetch(self, *, everything: bool = False) -> None:
        """Bring weights that the host has updated back to where they stay."""
        while self.waiting and (everything or len(self.waiting) > RELOAD_AFTER_LAYERS):
            part = self.waiting.pop(0)
            slot = self.weights.slot[part]
            if part in self.weights.staying or self.weights.here(part):
                self.builder.forget(slot)
            if part in self.weights.staying:
                self.weights.bring(part, self.round)

    # -- values and tasks -----------------------------------------------------------------------------------------

    def _value(self, kind: ValueKind, part: Part, chunk: int, version: int = 0) -> Value:
        return Value(kind, part, chunk, self.round, version)

    def _residual(self, chunk: int, part: Part) -> tuple[int, Value]:
        """The residual stream of a chunk behind a part."""
        return self.residual[chunk], Value("residual", part, chunk, self.round)

    def _residual_gradient(self, chunk: int, part: Part, version: int) -> tuple[int, Value]:
        """Its gradient in front of a part, which takes its place: the head and a block in pieces write it in turns."""
        return self.residual[chunk], Value("residual gradient", part, chunk, self.round, version)

    def _context_of(self, layer: int, chunk: int) -> list[int]:
        """Where the keys and values of a chunk's sequence are: layers and sequences take turns."""
        parts = self.plan.chunks_per_sequence
        turn = layer * (self.plan.chunks_per_round // parts) + chunk // parts
        return self.contexts[turn % len(self.contexts)]

    def _context(self, layer: int, chunk: int) -> tuple[int, Value]:
        part = chunk % self.plan.chunks_per_sequence
        return self._context_of(layer, chunk)[part], self._value("context", layer, chunk)

    def _compute(
        self,
        kind: Kind,
        segment: Segment,
        chunk: int,
        *,
        reads: Sequence[int],
        writes: Writes,
        layer: int | None = None,
        level: str = "",
        tokens: int | None = None,
        first: int = 0,
    ) -> None:
        temporaries = self.logits if kind == "head" else self.workspace
        self.builder.task(
            kind,
            "compute",
            reads=reads,
            writes=(*writes, (temporaries, TEMPORARIES)),
            round_=self.round,
            layer=layer,
            chunk=chunk,
            level=level,
            end=END_OF.get(kind),
            first=first,
            tokens=self.plan.tokens_of(chunk) if tokens is None else tokens,
            operators=self.operators[segment],
        )

    def _copy(
        self,
        kind: Literal["load", "store"],
        layer: int,
        chunk: int,
        *,
        source: int,
        target: int,
        size: int,
        what: Owner = "activations",
        value: Value | None = None,
    ) -> None:
        """What a (layer, chunk) kept, over the link; `value`: where it is another one at the target."""
        plan = self.plan
        self.builder.task(
            kind,
            "copy-in" if kind == "load" else "copy-out",
            reads=(source,),
            writes=((target, value or self.builder.require(source)),),
            round_=self.round,
            layer=layer,
            chunk=chunk,
            what=what,
            level=LETTERS[plan.saves[layer][chunk].lower()],
            tokens=plan.tokens_of(chunk),
            size=size,
        )
