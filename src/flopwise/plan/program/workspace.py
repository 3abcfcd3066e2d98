"""What a block's forward and backward need beside what is kept: temporaries, played one after another.

The engine's rules in numbers: results of one product lie beside each other, a sum and its norm are one call, and what a
norm or an activation made for one product alone is recomputed by its own backward, in the place of its gradient.
Temporaries get the first place that is large enough, as they do there, so that gaps count as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

from flopwise.records.plan import POLICY
from flopwise.work.adapters import DOWN, UP
from flopwise.work.attention_ops import GATING, SPREAD_KEY
from flopwise.work.formats import Formats
from flopwise.work.fusion import (
    is_activation,
    is_sum_for_norm,
    last_uses,
    makers_for_one_product,
    sums_for_activations,
)
from flopwise.work.op import Attention, Gemm, Op, Scan, Streaming
from flopwise.work.parameters import op_groups
from flopwise.work.state_ops import CONVOLUTION, GATED_NORM
from flopwise.work.traffic import tensor_bytes
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work

MIXED = ("routing", "dispatch", "shared_sum", SPREAD_KEY, CONVOLUTION, GATED_NORM, GATING)
"""Operators of whose inputs each has its gradient in a tensor of its own."""
OUTSIDE = "outside"
"""Whose gradient lies in the residual stream, or in a slot."""


def workspace_bytes(model: Transformer, work: Work, formats: Formats) -> int:
    """Bytes of one sequence that a block's tasks need beside slots, residual stream, weights and gradients.

    What attention's kernels sum up in is theirs alone: it comes beside the most of all kinds of blocks.
    """
    block = _Block(work, formats, drops=model.dropout is not None and model.dropout.hidden > 0)
    return max(
        max(block.forward(packs=packs), *(block.backward(kept, packs=packs) for kept in block.levels))
        for packs in (True, False)
    )


class _FirstFit:
    """Places in a row; who asks gets the first that is large enough."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, int]] = {}
        self.peak = 0

    def take(self, name: str, size: int) -> None:
        start = 0
        for begin, end in sorted(self._held.values()):
            if begin - start >= size:
                break
            start = max(start, end)
        self._held[name] = (start, start + size)
        self.peak = max(self.peak, start + size)

    def holds(self, name: str) -> bool:
        return name in self._held

    def hand_over(self, name: str, by: str) -> None:
        """The place of one for another."""
        self._held[by] = self._held.pop(name)

    def give(self, name: str) -> None:
        self._held.pop(name, None)


class _Block:
    def __init__(self, work: Work, formats: Formats, *, drops: bool) -> None:
        self.work, self.drops = work, drops
        self.ops: tuple[Op, ...] = op_groups(work)[1]
        self.size = {name: tensor_bytes(tensor, formats) for name, tensor in work.tensors.items()}
        self.placed = {tensor.name for tensor in work.saved("pointwise")} | {"input", "output"}
        self.branches = {norm.name: op.inputs[1] for op, norm in pairwise(self.ops) if is_sum_for_norm(op, norm)}
        """Norms that read a sum of two → its second term."""
        self.makers = makers_for_one_product(self.ops)
        lazy = {maker.outputs[0] for maker in self.makers.values()}
        self.needed = {name for op in self.ops for name in op.needs} - lazy
        self.first_need = {name: op.name for op in reversed(self.ops) for name in op.needs}
        self.mixes = any(op.name == "combine" for op in self.ops)
        self.read_as: dict[str, str] = {}
        """Names under which another value is read."""
        self.levels = [{tensor.name for tensor in work.saved(policy)} for policy in POLICY.values()]

    # -- forward, and what is recomputed ---------------------------------------------------------------------------

    def forward(self, *, packs: bool) -> int:
        """The most of a pass that keeps nothing but what has a place."""
        arena = _FirstFit()
        self._run(arena, {name for op in self.ops for name in op.outputs}, (), packs=packs)
        return arena.peak

    def _run(self, arena: _FirstFit, made: set[str], keep: Collection[str], *, packs: bool) -> None:
        running = [op for op in self.ops if not made.isdisjoint(op.outputs)]
        last_use = last_uses(running)
        sums = sums_for_activations(running)
        waiting = {each.name for added in sums.values() for each in added}
        summed: Op | None = None
        for index, op in enumerate(running):
            if op.name in waiting:
                continue
            if is_sum_for_norm(op, running[index + 1] if index + 1 < len(running) else None):
                summed = op
                continue
            gone = [name for name, last in last_use.items() if last == index]
            gathered = op.name == "dispatch" and "routing_weights" not in op.inputs
            if gathered:
                # The experts read the tokens where they lie, under another name.
                last_use[op.inputs[0]] = max(last_use[op.inputs[0]], last_use.get(op.outputs[0], index))
                self.read_as[op.outputs[0]] = op.inputs[0]
                gone = [name for name in gone if name != op.inputs[0]]
            read = [self.read_as[name] for name in gone if name in self.read_as]
            gone += [name for name in read if last_use[name] == index]
            if summed is not None:
                self._take(arena, summed.outputs)
                done = [name for name in summed.inputs if last_use[name] < index]
                free = next((name for name in done if name not in keep and arena.holds(name)), None)
                if free is not None and op.outputs[0] not in self.placed:
                    arena.hand_over(free, op.outputs[0])
                gone += done
                summed = None
            of_experts = self.mixes and op.name == "gate_up"
            together = isinstance(op, Gemm) and (packs or of_experts)
            whole = together and len(op.outputs) > 1 and made.issuperset(op.outputs)
            if gathered:
                pass
            elif whole and op.outputs[0] not in self.placed:
                self._take_pack(arena, op.outputs, last_use)
            elif not (isinstance(op, Gemm) and op.adds):
                partly = isinstance(op, Gemm) or (isinstance(op, Streaming) and op.pairwise)
                self._take(arena, [name for name in op.outputs if name in made or not partly])
            following = self.ops[self.ops.index(op) + 1] if of_experts else op
            if is_activation(following) and of_experts and following in running:
                # The product has the activation in it, and still reads the tokens.
                self._take(arena, following.outputs)
            gone += [name for name in op.outputs if name not in last_use]
            for name in gone:
                if name not in keep and name not in self.placed:
                    arena.give(name)

    def _take(self, arena: _FirstFit, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.placed and not arena.holds(name):
                arena.take(name, self.size[name])

    def _take_pack(self, arena: _FirstFit, names: tuple[str, ...], last_use: dict[str, int]) -> None:
        """One place for all of a product's results, until the last of those that have no other is done with."""
        apart = [name for name in names if name not in self.placed]
        last = max(apart, key=lambda name: last_use.get(name, 0))
        arena.take(last, sum(self.size[name] for name in names))

    # -- backward -------------------------------------------------------------------------------------------------

    def backward(self, kept: set[str], *, packs: bool) -> int:
        """The most of a backward that finds these and recomputes the rest."""
        arena = _FirstFit()
        made = self.work.made_for(self.needed, kept)
        self._run(arena, made, self.needed, packs=packs)
        held: dict[str, str] = {"output": OUTSIDE}
        """Gradient of → the tensor that it lies in."""
        done: set[str] = set()
        for op in reversed(self.ops):
            if op.name in done:
                continue
            if op.name == "combine":
                done |= self._experts(op, held, arena)
                continue
            self._step(op, held, arena, packs=packs)
            maker = self.makers.get(op.name)
            if maker is not None:
                done.add(maker.name)
                self._recompute(maker, held, arena)
            # The product that an adapter adds to comes after it, and reads the same gradient.
            if not isinstance(op, Streaming) and not (isinstance(op, Gemm) and op.adds):
                for name in op.outputs:
                    self._drop(name, held, arena)
            if maker is not None:
                self._drop(maker.outputs[0], held, arena)
            for each in (op, maker) if maker is not None and not is_activation(maker) else (op,):
                for name in each.needs:
                    if self.first_need[name] == each.name and name not in self.placed:
                        arena.give(name)
        return arena.peak

    def _step(self, op: Op, held: dict[str, str], arena: _FirstFit, *, packs: bool) -> None:
        """An operator's backward up to the moment at which the most is held."""
        if isinstance(op, Attention):
            self._attention(held, arena, packs=packs)
        elif isinstance(op, Gemm):
            if op.adds and self.mixes and op.name in (f"gate_{UP}", f"up_{UP}"):
                # An expert's adapter scales what it reads.
                arena.take("scaled", self.size[op.inputs[0]])
                arena.give("scaled")
            self._source(op, held, arena, packs=packs)
        elif isinstance(op, Streaming) and op.kind == "residual":
            for name in op.inputs[1:] if self.drops else ():
                self._target(name, held, arena)
            tensor = held.pop(op.outputs[0])
            for name in op.inputs:
                held.setdefault(name, tensor)
        elif isinstance(op, Streaming) and op.kind == "norm":
            self._norm(op, held, arena)
        elif is_activation(op):
            for name in op.inputs[:-1]:
                self._target(name, held, arena)
            self._replace(op.outputs[0], op.inputs[-1], held, arena)
        elif isinstance(op, Scan) or op.name in MIXED:
            self._mix(op, held, arena)
        else:
            for source, result in zip(op.inputs, op.outputs, strict=False):
                self._replace(result, source, held, arena)

    def _norm(self, op: Op, held: dict[str, str], arena: _FirstFit) -> None:
        """The gradient of what it reads is added to one that is there, or takes its result's place."""
        if op.inputs[0] in held:
            self._target(op.inputs[0], held, arena)
            self._branch(op, held, arena)
            self._drop(op.outputs[0], held, arena)
        else:
            self._replace(op.outputs[0], op.inputs[0], held, arena)
            self._branch(op, held, arena)

    def _experts(self, combine: Op, held: dict[str, str], arena: _FirstFit) -> set[str]:
        """From a mixture's result to gate and up, whose gradients take their places; returns what is done."""
        down, activation = (next(op for op in self.ops if op.name == name) for name in ("down", "activation"))
        beside = [op for op in self.ops if op.name in (f"down_{DOWN}", f"down_{UP}")]
        self._target(activation.outputs[0], held, arena)
        for op in beside[:1]:
            arena.take("back to its adapter", self.size[op.outputs[0]])
            arena.give("back to its adapter")
        if "routing_weights" in combine.inputs:
            self._target("routing_weights", held, arena)
        self._drop(activation.outputs[0], held, arena)
        held.update((name, OUTSIDE) for name in activation.inputs)
        self._drop(combine.outputs[0], held, arena)
        used = (combine, down, *beside)
        for each in used:
            for name in each.needs:
                if self.first_need[name] == each.name and name not in self.placed:
                    arena.give(name)
        return {activation.name, *(each.name for each in used)}

    def _mix(self, op: Op, held: dict[str, str], arena: _FirstFit) -> None:
        """None takes another's place: experts have more rows than tokens, gradients of states are sums of pieces."""
        sums = op.name == "shared_sum"
        for name in op.inputs[1 if sums else 0 :]:
            if self.work.tensors[name].format != "index":
                self._target(name, held, arena)
        if sums:
            held[op.inputs[0]] = held[op.outputs[0]]
        for name in op.outputs:
            self._drop(name, held, arena)

    def _attention(self, held: dict[str, str], arena: _FirstFit, *, packs: bool) -> None:
        names = ("query", "key", "value")
        if packs:
            arena.take("gradient of query", sum(self.size[name] for name in names))
            held.update((name, "gradient of query") for name in names)
            return
        for name in names:
            self._target(name, held, arena)

    def _source(self, op: Gemm, held: dict[str, str], arena: _FirstFit, *, packs: bool) -> None:
        """The gradient of a product's input; those of adapters' inner results that one product makes lie together."""
        if not (op.adds and packs):
            self._target(op.inputs[0], held, arena)
        elif op.inputs[0] not in held:
            lows = next(other.outputs for other in self.ops if op.inputs[0] in other.outputs)
            arena.take(f"gradient of {lows[0]}", sum(self.size[name] for name in lows))
            held.update((name, f"gradient of {lows[0]}") for name in lows)

    def _recompute(self, maker: Op, held: dict[str, str], arena: _FirstFit) -> None:
        if is_activation(maker):
            # Gradients take the places of gate and up, which are kept in a slot, or there till the end.
            held.update((name, f"{OUTSIDE} {name}") for name in maker.inputs)
        else:
            self._target(maker.inputs[0], held, arena)
            self._branch(maker, held, arena)

    def _branch(self, norm: Op, held: dict[str, str], arena: _FirstFit) -> None:
        """A norm's backward leaves beside the gradient of the sum that it read what a mask keeps of it."""
        if self.drops and norm.name in self.branches:
            self._target(self.branches[norm.name], held, arena)

    def _target(self, name: str, held: dict[str, str], arena: _FirstFit) -> None:
        """A gradient that is added to lies in a tensor of its own."""
        shared = sum(tensor == held.get(name) for tensor in held.values()) > 1
        if name not in held or (shared and not self._of_a_pack(name, held)):
            held[name] = f"gradient of {name}"
            arena.take(held[name], self.size[name])

    @staticmethod
    def _of_a_pack(name: str, held: dict[str, str]) -> bool:
        return held[name] == "gradient of query" and name in ("query", "key", "value")

    def _replace(self, name: str, by: str, held: dict[str, str], arena: _FirstFit) -> None:
        """A gradient in the place of another, or in one of its own where others lie there too."""
        tensor = held.pop(name)
        shared = tensor in held.values() and tensor != "gradient of query"
        if shared:
            arena.take(f"gradient of {by}", self.size[by])
        held[by] = f"gradient of {by}" if shared else tensor

    def _drop(self, name: str, held: dict[str, str], arena: _FirstFit) -> None:
        tensor = held.pop(name, None)
        if tensor is not None and tensor not in held.values():
            arena.give(tensor)
