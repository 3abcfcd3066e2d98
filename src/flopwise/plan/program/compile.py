"""A plan as a program: every task of a step, in the order of each stream.

Tasks are written down where their value is needed; `ordering` then brings them into the order of each stream.
"""

from __future__ import annotations

from dataclasses import replace

from flopwise.base.errors import FlopwiseError
from flopwise.plan.program.builder import Builder, FreeSlots
from flopwise.plan.program.ordering import NominalSeconds, in_order_of_need, in_order_of_release
from flopwise.plan.program.runs import check_runs
from flopwise.plan.program.sizes import Sizes, context_sets, level_bytes, sizes_of, slot_bytes, working_bytes
from flopwise.plan.program.state import Kept, OptimizerState, Part, ends_of, place_of
from flopwise.records.plan import LETTERS, Plan
from flopwise.records.program import Kind, Program, aligned
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.model import Model
from flopwise.work.op import Attention
from flopwise.work.parameters import End, Place, op_groups
from flopwise.work.transformer import Transformer

END_OF: dict[Kind, End] = {"embed": "embedding", "embed-backward": "embedding", "head": "head"}
"""Tasks around the blocks, and whose they are."""

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
    return _Compiler(shorter, plan, model, sizes).compiled()


class _Compiler:
    def __init__(self, plan: Plan, whole: Plan, model: Model, sizes: Sizes) -> None:
        self.plan, self.sizes = plan, sizes
        self.builder = Builder()
        self.weights = Kept(self.builder, whole, sizes, "weights", plan.weights)
        self.gradients = Kept(self.builder, whole, sizes, "gradients", plan.gradients)
        self.state = OptimizerState(self.builder, whole, sizes)
        self.ends = list(ends_of(sizes))
        self.embedding: Part = "embedding" if "embedding" in self.ends else "head"
        assert isinstance(model, Transformer)  # sizes_of refuses others
        self.causal, self.embedding_norm = model.causal, model.embedding_norm
        self.nominal = NominalSeconds.of_model(sizes.block.parameters, sizes.head.parameters, plan, model)
        self.cut = plan.chunks_per_sequence > 1
        self.whole_sequence = self.cut and plan.attention == "sequence"
        self._operators(model)
        self._activation_buffers()
        self._working_buffers()
        self.round = 0
        self.waiting: list[Part] = []
        """Parts whose weights the host has updated and the device has not fetched yet."""

    # -- buffers --------------------------------------------------------------------------------------------------

    def _operators(self, model: Model) -> None:
        before, inside, behind = op_groups(describe(model, self.plan.sequence_tokens))
        place = next(index for index, op in enumerate(inside) if isinstance(op, Attention))
        names = [op.name for op in inside]
        self.names: dict[str, tuple[str, ...]] = {
            "embed": tuple(op.name for op in before),
            "before": tuple(names[:place]),
            "attention": (names[place],),
            "after": tuple(names[place + 1 :]),
            "block": tuple(names),
            "head": tuple(op.name for op in behind),
            "moved": (),
        }

    def _activation_buffers(self) -> None:
        plan, builder = self.plan, self.builder
        size = slot_bytes(self.sizes, plan.tokens_of(0))
        self.free = FreeSlots(
            builder.buffer(f"activation slot {number}", "activations", "device", size)
            for number in range(plan.activation_slots)
        )
        self.slots: dict[tuple[int, int], int] = {}
        self.homes: dict[tuple[int, int], int] = {}
        for layer, row in enumerate(plan.saves):
            for chunk, letter in enumerate(row):
                if letter != "F":
                    level = LETTERS[letter.lower()]
                    kept = level_bytes(self.sizes, level, plan.tokens_of(chunk))
                    name = f"activations {layer}.{chunk}"
                    place: Place = "device" if letter.isupper() else "host"
                    self.homes[layer, chunk] = builder.buffer(f"{place} {name}", "activations", place, kept)

    def _working_buffers(self) -> None:
        plan, sizes, builder = self.plan, self.sizes, self.builder
        chunks, parts_of = plan.chunks_per_round, plan.chunks_per_sequence
        bytes_of = working_bytes(sizes, plan)
        self.stream = [
            builder.buffer(f"stream {chunk}", "stream", "device", aligned(sizes.stream * plan.tokens_of(chunk)))
            for chunk in range(chunks)
        ]
        self.contexts: list[list[int]] = []
        self.context_gradients: tuple[int, ...] = ()
        self.inputs: list[int] = []
        self.sequence: tuple[int, ...] = ()
        workspace = bytes_of["workspace"]
        if self.cut:
            room = [aligned(sizes.context * plan.tokens_of(part)) for part in range(parts_of)]
            self.contexts = [
                [builder.buffer(f"context {part}", "context", "device", size) for part, size in enumerate(room)]
                for _ in range(context_sets(sizes, plan))
            ]
        if self.whole_sequence:
            self.inputs = [
                builder.buffer(f"inputs {part}", "workspace", "device", aligned(sizes.stream * plan.tokens_of(part)))
                for part in range(parts_of)
            ]
            size = aligned(sizes.sequence_attention * plan.sequence_tokens)
            self.sequence = (builder.buffer("attention of a sequence", "workspace", "device", size),)
            workspace -= size + sum(builder.buffers[buffer].bytes for buffer in self.inputs)
        elif self.cut:
            size = aligned(sizes.context_gradients * plan.sequence_tokens)
            self.context_gradients = (builder.buffer("context gradients", "context", "device", size),)
        self.workspace = builder.buffer("workspace", "workspace", "device", workspace)
        self.logits = builder.buffer("head chunk", "head", "device", bytes_of["head"])

    # -- a step ---------------------------------------------------------------------------------------------------

    def compiled(self) -> Program:
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
        return in_order_of_release(program) if plan.fetch == "at once" else in_order_of_need(program, self.nominal)

    @property
    def last_round(self) -> bool:
        return self.round == self.plan.rounds_per_step - 1

    def _at_end(self) -> dict[int, str]:
        """Every part's new weights and state where they belong, and the device as the next step expects it."""
        found: dict[int, str] = {}
        for part in self.weights.parts:
            value = f"weights {part} v1"
            if part in self.weights.staying:
                found[self.weights.slot[part]] = value
            if part in self.weights.host:
                found[self.weights.host[part]] = value
            for index, piece in enumerate(self.state.pieces[part]):
                for buffer in (piece.device, piece.host):
                    if buffer is not None:
                        found[buffer] = f"optimizer {part}.{index} v1"
        for buffer, value in self.builder.at_start.items():
            found.setdefault(buffer, value.replace(" v0", " v1"))
        return found

    # -- forward --------------------------------------------------------------------------------------------------

    def _forward_pass(self) -> None:
        plan = self.plan
        for chunk in range(plan.chunks_per_round):
            table = self.weights.bring(self.embedding, self.round)
            self._compute("embed", "embed", chunk, reads=(table,), writes=(self._stream(chunk, "embedded"),))
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
                "forward-before", "before", chunk, layer=layer,
                reads=(weights, self.stream[chunk], *(self.sequence if chunk > chunks[0] else ())),
                writes=(self._context(layer, chunk), (self.sequence[0], f"queries {layer}.{chunk} r{self.round}")),
            )  # fmt: skip
        self._compute(
            "attention", "attention", chunks[-1], layer=layer,
            reads=(*self._context_of(layer, chunks[0]), *self.sequence),
            writes=((self.sequence[0], f"attended {layer}.{chunks[0]} r{self.round}"),),
        )  # fmt: skip

    def _forward(self, layer: int, chunk: int, weights: int) -> None:
        """A chunk through a layer, and what it keeps on its way to where it is kept."""
        letter, home = self.plan.saves[layer][chunk], self.homes.get((layer, chunk))
        slot = self.free.take()
        value = f"activations {layer}.{chunk} r{self.round}"
        reads = [weights, self.stream[chunk]]
        writes = [(slot, value), self._stream(chunk, f"layer {layer}")]
        if self.whole_sequence:
            reads += [*self.sequence, self._context(layer, chunk)[0]]
        elif self.cut:
            reads += self._context_of(layer, chunk)[: chunk % self.plan.chunks_per_sequence]
            writes.append(self._context(layer, chunk))
        if letter.isupper() and home is not None:
            writes.append((home, value))
        kind: Kind = "forward-after" if self.whole_sequence else "forward"
        names = "after" if self.whole_sequence else "block"
        level = LETTERS[letter.lower()]
        self._compute(kind, names, chunk, layer=layer, level=level, reads=reads, writes=writes)
        if letter == "F":
            self.slots[layer, chunk] = slot
            return
        if letter.islower():
            assert home is not None  # everything that is not in a slot has a buffer of its own
            self._copy("store", layer, chunk, slot, home, self.builder.buffers[home].bytes)
        self.free.give(slot)

    # -- head -----------------------------------------------------------------------------------------------------

    def _head_pass(self) -> None:
        plan = self.plan
        weights = self.weights.bring("head", self.round)
        gradients = self._gradient_slot("head")
        for chunk in reversed(range(plan.chunks_per_round)):
            tokens = plan.tokens_of(chunk)
            for first in range(0, tokens, plan.head_chunk_tokens):
                self._compute(
                    "head", "head", chunk, first=first,
                    tokens=min(plan.head_chunk_tokens, tokens - first),
                    reads=(weights, self.stream[chunk], *self._summed("head")),
                    writes=(self._stream(chunk, f"head {first}"), (gradients, self._gradient("head", chunk, first))),
                )  # fmt: skip
        if self.embedding != "head":
            self._gradient_done("head")

    # -- backward -------------------------------------------------------------------------------------------------

    def _backward_pass(self) -> None:
        plan = self.plan
        for layer in reversed(range(plan.layers)):
            weights = self.weights.bring(layer, self.round)
            gradients = self._gradient_slot(layer)
            for first in reversed(range(0, plan.chunks_per_round, plan.chunks_per_sequence)):
                chunks = range(first, first + plan.chunks_per_sequence)
                if self.whole_sequence:
                    self._bring_context(layer, chunks, weights)
                for chunk in reversed(chunks):
                    if self.cut and not self.whole_sequence and chunk == chunks[-1]:
                        self._bring_context(layer, chunks, weights)
                    self._backward(layer, chunk, weights, gradients)
                if self.whole_sequence:
                    self._backward_before(layer, chunks, weights, gradients)
            self._gradient_done(layer)
        gradients = self._gradient_slot(self.embedding)
        # A norm behind the tables is run again from their rows.
        table = (self.weights.bring(self.embedding, self.round),) if self.embedding_norm else ()
        for chunk in reversed(range(plan.chunks_per_round)):
            self._compute(
                "embed-backward", "embed", chunk,
                reads=(*table, self.stream[chunk], *self._summed(self.embedding)),
                writes=((gradients, self._gradient(self.embedding, chunk, -1)),),
            )  # fmt: skip
        self._gradient_done(self.embedding)

    def _bring_context(self, layer: int, chunks: range, weights: int) -> None:
        """Keys and values of a sequence's chunks, to where attention looks for them."""
        for chunk in reversed(chunks):
            buffer, value = self._context(layer, chunk)
            letter, home = self.plan.saves[layer][chunk], self.homes.get((layer, chunk))
            there = self.builder.values[buffer] == value
            if letter == "i" and (self.whole_sequence or not there):
                assert home is not None
                source = self.inputs[chunk % self.plan.chunks_per_sequence] if self.whole_sequence else self.free.take()
                self._copy("load", layer, chunk, home, source, self.builder.buffers[home].bytes)
                if not self.whole_sequence:
                    # Backward of the chunk itself will load it a second time; until then the slot serves others.
                    self.free.give(source)
            elif letter in "fac" and not there:
                assert home is not None
                size = aligned(self.sizes.context * self.plan.tokens_of(chunk))
                self._copy("load", layer, chunk, home, buffer, size, what="context", value=value)
                continue
            else:
                source = self.slots[layer, chunk] if home is None else home
            if not there:
                reads = (weights, source)
                level = LETTERS[letter.lower()]
                names = "before" if level == "input" else "moved"
                writes = ((buffer, value),)
                self._compute("context", names, chunk, layer=layer, level=level, reads=reads, writes=writes)

    def _backward(self, layer: int, chunk: int, weights: int, gradients: int) -> None:
        """A chunk back through a layer: what was kept is fetched, the rest made again."""
        letter, home = self.plan.saves[layer][chunk], self.homes.get((layer, chunk))
        value = f"activations {layer}.{chunk} r{self.round}"
        writes = [self._stream(chunk, f"gradient {layer}"), (gradients, self._gradient(layer, chunk, 0))]
        reads = [weights, self.stream[chunk], *self._summed(layer)]
        if letter == "F":
            slot = self.slots.pop((layer, chunk))
            reads.append(slot)
        else:
            assert home is not None
            slot = self.free.take()
            writes.append((slot, f"{value} whole"))
            reads.append(self._fetched(layer, chunk, home, slot))
        if self.whole_sequence:
            part = chunk % self.plan.chunks_per_sequence
            if letter.lower() in "ci":
                context = self._context_of(layer, chunk)
                reads += context[: part + 1] if self.causal else context
            if part < self.plan.chunks_per_sequence - 1:
                reads += self.sequence
            writes.append((self.sequence[0], f"gradients {layer}.{chunk} r{self.round}"))
            if letter != "i":
                writes.append((self.inputs[part], f"inputs {layer}.{chunk} r{self.round}"))
        elif self.cut:
            reads += self._context_of(layer, chunk)[: chunk % self.plan.chunks_per_sequence + 1]
            if (chunk + 1) % self.plan.chunks_per_sequence:
                reads += self.context_gradients
            writes.append((self.context_gradients[0], f"gradients {layer}.{chunk} r{self.round}"))
        kind: Kind = "backward-after" if self.whole_sequence else "backward"
        names = "after" if self.whole_sequence else "block"
        level = LETTERS[letter.lower()]
        self._compute(kind, names, chunk, layer=layer, level=level, reads=reads, writes=writes)
        self.free.give(slot)

    def _fetched(self, layer: int, chunk: int, home: int, slot: int) -> int:
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
        self._copy("load", layer, chunk, home, slot, max(0, size))
        return slot

    def _backward_before(self, layer: int, chunks: range, weights: int, gradients: int) -> None:
        last = chunks[-1]
        self._compute(
            "attention-backward", "attention", last, layer=layer,
            reads=(*self._context_of(layer, chunks[0]), *self.sequence),
            writes=((self.sequence[0], f"attention gradients {layer}.{chunks[0]} r{self.round}"),),
        )  # fmt: skip
        for chunk in reversed(chunks):
            self._compute(
                "backward-before", "before", chunk, layer=layer,
                reads=(weights, self.stream[chunk], self.inputs[chunk - chunks[0]], *self.sequence, gradients),
                writes=(
                    self._stream(chunk, f"gradient {layer} whole"), (gradients, self._gradient(layer, chunk, 1)),
                ),
            )  # fmt: skip

    # -- gradients and updates ------------------------------------------------------------------------------------

    def _gradient(self, part: Part, chunk: int, piece: int) -> str:
        return f"gradients {part} r{self.round}.{chunk}.{piece}"

    def _summed(self, part: Part) -> tuple[int, ...]:
        """The gradient so far, if there is one to add to."""
        return (self.gradients.slot[part],) if self.gradients.here(part) else ()

    def _gradient_slot(self, part: Part) -> int:
        """Where the part's gradient is summed; the sum of earlier rounds is fetched."""
        if self.round and not self.gradients.here(part):
            return self.gradients.bring(part, self.round)
        return self.gradients.slot[part]

    def _gradient_done(self, part: Part) -> None:
        """After a part's last backward of a round: the gradient leaves, or is used up."""
        plan = self.plan
        if self.last_round and plan.update_when == "backward":
            self._update(part)
        elif part not in self.gradients.staying or (plan.host_copies and part in self.gradients.host):
            self.gradients.send(part, self.round)
        self._fetch()

    def _update_at_end(self) -> None:
        self.builder.also_after = (*self.builder.last("compute"), *self.builder.last("copy-out"))
        order: tuple[Part, ...] = ("head", *reversed(range(self.plan.layers)), "embedding")
        for part in order:
            if part in self.weights.parts:
                self._update(part)

    def _update(self, part: Part) -> None:
        if self.plan.update_place == "host":
            self._update_on_host(part)
            return
        builder, round_ = self.builder, self.round
        place = place_of(part)
        weights = self.weights.bring(part, round_)
        gradients = self.gradients.bring(part, round_)
        pieces, first = self.state.pieces[part], 0
        for index, piece in enumerate(pieces):
            new = f"optimizer {part}.{index} v1"
            slot = self.state.slot() if piece.device is None else piece.device
            if piece.device is None:
                assert piece.host is not None
                builder.task(
                    "load", "copy-in", reads=(piece.host,), writes=((slot, builder.values[piece.host]),),
                    round_=round_, **place, what="optimizer", size=piece.size, first=first,
                )  # fmt: skip
            version = f"weights {part} v1" if index == len(pieces) - 1 else f"weights {part} v0+{index + 1}"
            builder.task(
                "optimize", "compute", reads=(weights, gradients, slot), writes=((weights, version), (slot, new)),
                round_=round_, **place, what="optimizer", parameters=piece.parameters, first=first,
            )  # fmt: skip
            if piece.host is not None:
                builder.task(
                    "store", "copy-out", reads=(slot,), writes=((piece.host, new),),
                    round_=round_, **place, what="optimizer", size=piece.size, first=first,
                )  # fmt: skip
            first += piece.parameters
        if part in self.weights.host:
            self.weights.send(part, round_)

    def _update_on_host(self, part: Part) -> None:
        builder = self.builder
        slot, home = self.gradients.slot[part], self.gradients.host[part]
        if self.gradients.here(part) and builder.values[slot] != builder.values[home]:
            self.gradients.send(part, self.round)
        piece = self.state.pieces[part][0]
        assert piece.host is not None
        weights, gradients = self.weights.host[part], self.gradients.host[part]
        builder.task(
            "optimize", "host", reads=(weights, gradients, piece.host),
            writes=((weights, f"weights {part} v1"), (piece.host, f"optimizer {part}.0 v1")),
            round_=self.round, **place_of(part), what="optimizer", parameters=piece.parameters,
        )  # fmt: skip
        self.waiting.append(part)

    def _fetch(self, *, everything: bool = False) -> None:
        """Bring weights that the host has updated back to where they stay."""
        while self.waiting and (everything or len(self.waiting) > RELOAD_AFTER_LAYERS):
            part = self.waiting.pop(0)
            slot = self.weights.slot[part]
            if part in self.weights.staying or self.weights.here(part):
                self.builder.values[slot] = ""
            if part in self.weights.staying:
                self.weights.bring(part, self.round)

    # -- small makers ---------------------------------------------------------------------------------------------

    def _stream(self, chunk: int, value: str) -> tuple[int, str]:
        return self.stream[chunk], f"stream {chunk} {value} r{self.round}"

    def _context_of(self, layer: int, chunk: int) -> list[int]:
        """Where the keys and values of a chunk's sequence are: layers and sequences take turns."""
        parts = self.plan.chunks_per_sequence
        turn = layer * (self.plan.chunks_per_round // parts) + chunk // parts
        return self.contexts[turn % len(self.contexts)]

    def _context(self, layer: int, chunk: int) -> tuple[int, str]:
        part = chunk % self.plan.chunks_per_sequence
        return self._context_of(layer, chunk)[part], f"context {layer}.{chunk} r{self.round}"

    def _compute(
        self,
        kind: Kind,
        names: str,
        chunk: int,
        *,
        reads: tuple[int, ...] | list[int],
        writes: tuple[tuple[int, str], ...] | list[tuple[int, str]],
        layer: int | None = None,
        level: str = "",
        tokens: int | None = None,
        first: int = 0,
    ) -> None:
        end = END_OF.get(kind)
        room = self.logits if kind == "head" else self.workspace
        self.builder.task(
            kind, "compute", reads=reads, writes=(*writes, (room, "temporaries")), round_=self.round, layer=layer,
            chunk=chunk, level=level,
            end=end, first=first,
            tokens=self.plan.tokens_of(chunk) if tokens is None else tokens, operators=self.names[names],
        )  # fmt: skip

    def _copy(  # noqa: PLR0917 - from where to where, and how much
        self, kind: Kind, layer: int, chunk: int, source: int, target: int, size: int,
        *, what: str = "activations", value: str | None = None,
    ) -> None:  # fmt: skip
        plan = self.plan
        self.builder.task(
            kind, "copy-in" if kind == "load" else "copy-out",
            reads=(source,), writes=((target, value or self.builder.values[source]),), round_=self.round, layer=layer,
            chunk=chunk, what=what, level=LETTERS[plan.saves[layer][chunk].lower()], tokens=plan.tokens_of(chunk),
            size=size,
        )  # fmt: skip
