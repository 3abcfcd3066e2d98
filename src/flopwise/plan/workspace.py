"""What a block's forward and backward need beside what is kept: temporaries, by playing which of them live at once.

The engine's rules in numbers: results of one product lie beside each other, a sum and its norm are one call, and what a
norm or an activation made for one product alone is made again by its own backward, in the place of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

from flopwise.core.formats import Formats
from flopwise.core.fusion import is_sum_for_norm, makers_for_one_product
from flopwise.core.op import Attention, Gemm, Op, Streaming
from flopwise.core.parameters import op_groups
from flopwise.core.traffic import tensor_bytes
from flopwise.core.transformer import Transformer
from flopwise.core.work import Work
from flopwise.predict.memory import attention_sums_bytes

OUTSIDE = "outside"
"""Whose gradient lies in the residual stream."""


def workspace_bytes(model: Transformer, work: Work, formats: Formats) -> int:
    """Bytes of one sequence that a block's tasks need at once beside slots, stream, weights and gradients."""
    return _Block(model, work, formats).peak()


class _Block:
    def __init__(self, model: Transformer, work: Work, formats: Formats) -> None:
        self.ops: tuple[Op, ...] = op_groups(work)[1]
        self.size = {name: tensor_bytes(tensor, formats) for name, tensor in work.tensors.items()}
        self.placed = {tensor.name for tensor in work.saved("everything")} | {"input", "output"}
        self.makers = makers_for_one_product(self.ops)
        lazy = {maker.outputs[0] for maker in self.makers.values()}
        self.kept = {name for op in self.ops for name in op.needs} - lazy
        self.sums = attention_sums_bytes(model, formats) * work.sequence_tokens

    def peak(self) -> int:
        """The most of a pass forward, of one that makes everything again, and of backward beside what that kept."""
        return max(self._forward(), self._backward())

    def _room(self, names: Iterable[str]) -> int:
        return sum(self.size[name] for name in names)

    def _forward(self) -> int:
        last_use = {name: index for index, op in enumerate(self.ops) for name in op.inputs}
        live: dict[str, int] = {}
        most = 0
        for index, op in enumerate(self.ops):
            made = [name for name in op.outputs if name not in self.placed]
            if isinstance(op, Gemm) and made and len(op.outputs) > 1:
                # One tensor for all of them, also for those that are then brought to places of their own.
                live[made[0]] = self._room(op.outputs) - self._room(made[1:])
                made = made[1:]
            live.update((name, self.size[name]) for name in made)
            most = max(most, sum(live.values()))
            follows = is_sum_for_norm(op, self.ops[index + 1] if index + 1 < len(self.ops) else None)
            gone = [name for name in live if last_use.get(name, -1) <= index and name not in self.kept]
            if not follows:
                for name in gone:
                    del live[name]
        return most

    def _backward(self) -> int:
        base = self._room(self.kept - self.placed)
        held: dict[str, str] = {"output": OUTSIDE}
        """Gradient of → the tensor that it lies in, by the name of whose gradient it first was."""
        most, done = 0, set()
        for op in reversed(self.ops):
            if op.name in done:
                continue
            maker = self.makers.get(op.name)
            beside = self._step(op, held)
            most = max(most, self._live(held) + beside)
            if maker is not None:
                done.add(maker.name)
                self._made_again(maker, held)
                most = max(most, self._live(held))
                held.pop(maker.outputs[0], None)
            if not isinstance(op, Streaming):
                for name in op.outputs:
                    held.pop(name, None)
        return base + most

    def _live(self, held: dict[str, str]) -> int:
        return self._room({name for name in held.values() if name != OUTSIDE})

    def _step(self, op: Op, held: dict[str, str]) -> int:
        """An operator's backward up to the moment at which the most is held; returns what it needs beside that."""
        if isinstance(op, Attention):
            held.update((name, name) for name in ("query", "key", "value"))
            return self.sums
        if isinstance(op, Gemm):
            self._target(op.inputs[0], held)
        elif isinstance(op, Streaming) and op.kind == "residual":
            tensor = held.pop(op.outputs[0])
            for name in op.inputs:
                held.setdefault(name, tensor)
        elif isinstance(op, Streaming) and op.kind == "norm":
            if op.inputs[0] in held:
                self._target(op.inputs[0], held)
            else:
                held[op.inputs[0]] = held[op.outputs[0]]
            held.pop(op.outputs[0])
        elif op.name == "activation":
            held.update((name, name) for name in op.inputs)
            held.pop(op.outputs[0])
        else:
            for source, result in zip(op.inputs, op.outputs, strict=False):
                held[source] = held.pop(result)
        return 0

    def _made_again(self, maker: Op, held: dict[str, str]) -> None:
        if maker.name == "activation":
            # Gradients take the places of gate and up, which are kept in a slot.
            held.update((name, OUTSIDE) for name in maker.inputs)
        else:
            self._target(maker.inputs[0], held)

    @staticmethod
    def _target(name: str, held: dict[str, str]) -> None:
        """A gradient that is added to lies in a tensor of its own."""
        shared = sum(tensor == held.get(name) for tensor in held.values()) > 1
        if name not in held or shared:
            held[name] = name
