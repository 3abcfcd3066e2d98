"""`Work`: a model's operators for one sequence, and the exact counts that follow from them.

This is the one place that counts FLOPs and parameters and that decides what is saved and what is made again;
`traffic.py` beside it counts bytes. Prediction, planning, training and reports all ask here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

from flopwise.work.op import (
    Attention,
    AttentionKernel,
    Convention,
    Op,
    Pairs,
    SaveLevel,
    Scan,
    Streaming,
    Tensor,
)

Recompute = Literal["none", "selective", "pointwise", "attention", "context", "input", "full"]
RECOMPUTE_POLICIES: tuple[Recompute, ...] = get_args(Recompute)
"""From the most memory to the least.

none        keep all that backward reads; nothing is made again
selective   all but the scores of eager attention, which are made again from queries and keys (Korthikanti et al., arXiv
            2205.05198); flash attention keeps none, so that there it is `none`
pointwise   keep what a matrix product or attention has made; norms and activations are made again
attention   keep the block's input, keys, values and attention's result
context     keep the block's input, keys and values
input       keep the block's input and make again what backward reads: not the last product. torch's checkpoint does so
full        keep the block's input and run the whole block again, as checkpointing without an early stop does
"""

SCORES = "probabilities"
"""What eager attention keeps of the square of queries and keys."""

_LEVEL: dict[Recompute, SaveLevel] = {
    "pointwise": SaveLevel.EVERYTHING,
    "attention": SaveLevel.ATTENTION,
    "context": SaveLevel.CONTEXT,
    "input": SaveLevel.INPUT,
    "full": SaveLevel.INPUT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One model on one sequence, or on several of uneven length: the operators in the order of the forward pass."""

    name: str
    sequence_tokens: int
    """Of all its sequences together."""
    ops: tuple[Op, ...]
    tensors: dict[str, Tensor]
    copies: dict[str, int] = field(default_factory=dict)
    """How many copies of a tensor one sequence makes: one for each layer and call; 1 when not named."""
    kernel: AttentionKernel = "flash"
    sequences: int = 1
    """That are described together, where they are uneven; every count is that of all of them."""
    forward_twice: tuple[str, ...] = ()
    """Operators around the blocks whose forward runs again for backward, whatever is kept."""

    def __post_init__(self) -> None:
        known = set(self.tensors)
        for op in self.ops:
            assert known.issuperset((*op.inputs, *op.outputs, *op.needs)), f"{op.name} names an unknown tensor"

    @property
    def layers(self) -> int:
        """Blocks, of all kinds together."""
        return max((op.layers for op in self.ops if op.in_block), default=1)

    @property
    def block_kinds(self) -> tuple[tuple[Op, ...], ...]:
        """The operators of each kind of block."""
        inside = tuple(op for op in self.ops if op.in_block)
        kinds = dict.fromkeys(op.block_kind for op in inside if op.block_kind) or {"": None}
        return tuple(tuple(op for op in inside if op.block_kind in ("", kind)) for kind in kinds)

    @property
    def parameters(self) -> int:
        """Every number of the weights, once."""
        return sum(op.parameters for op in self.ops)

    @property
    def trained_parameters(self) -> int:
        """Those that are trained: all, unless parts are frozen or adapters lie beside them."""
        return sum(op.trained_parameters for op in self.ops)

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses: fewer than all in a mixture of experts."""
        return sum(op.active_parameters for op in self.ops)

    def of_batch(self, counted: int, sequences: int) -> int:
        """What so many sequences have in the mean of something that all of these together have."""
        return (2 * counted * sequences + self.sequences) // (2 * self.sequences)

    def forward_flops(self, op: Op, convention: Convention) -> int:
        """Model FLOPs of one operator's forward pass over one sequence."""
        if convention == "causal":
            return op.forward_flops("mask")
        if isinstance(op, Attention | Scan):
            return op.forward_flops("reach")
        return 2 * op.active_parameters * self.sequence_tokens

    def model_flops(self, convention: Convention) -> int:
        """FLOPs of forward and backward over one sequence."""
        return sum(self.model_flops_of(op, convention) for op in self.ops)

    def model_flops_of(self, op: Op, convention: Convention) -> int:
        """The same of one operator: three times the forward, less what frozen weights do without."""
        forward = self.forward_flops(op, convention)
        return forward + op.backward_copies * forward // op.layers

    def hardware_flops(self, op: Op, convention: Convention, again: Fraction) -> int:
        """FLOPs that one operator executes for one sequence, `again` being the share of it that is recomputed.

        A product runs once forward and twice backward. Flash attention makes its scores anew in backward: 2.5
        forward units instead of 2, so 3.5 in all and 4.5 under checkpointing. Eager attention computes the
        masked half as well, as a scan does within its chunks. The convention changes what a unit is, not how many there
        are.
        """
        forward = self.forward_flops(op, convention)
        backward = op.backward_copies * forward // op.layers
        if isinstance(op, Attention):
            counted: Pairs = "mask" if convention == "causal" else "reach"
            pairs: Pairs = counted if self.kernel == "flash" else "square"
            forward = op.forward_flops(pairs)
            backward = op.backward_flops(self.kernel, pairs)
        if isinstance(op, Scan):
            forward, backward = op.forward_flops("square"), op.backward_flops(self.kernel, "square")
        return forward + backward + int(forward * again * op.reached / op.layers)

    def total_hardware_flops(self, convention: Convention, policy: Recompute) -> int:
        """FLOPs that a device executes for forward, recompute and backward over one sequence."""
        again = self.recomputed(policy)
        return sum(self.hardware_flops(op, convention, again.get(op.name, Fraction(0))) for op in self.ops)

    def saved(self, policy: Recompute) -> tuple[Tensor, ...]:
        """The tensors that are kept from forward to backward; the logits are not among them (they have an owner)."""
        inside, outside = self._needed()
        kept = set(outside)
        if policy in ("none", "selective"):
            kept.update(name for op in self.ops if isinstance(op, Streaming) for name in op.also_kept)
            kept |= inside - ({SCORES} if policy == "selective" else set())
        else:
            produced = {name for op in self.ops if op.in_block for name in (*op.inputs, *op.outputs)}
            kept |= {name for name in produced if self.tensors[name].level <= _LEVEL[policy]}
        return tuple(tensor for name, tensor in self.tensors.items() if name in kept and name != "logits")

    def recomputed(self, policy: Recompute) -> dict[str, Fraction]:
        """Operator → share of its forward that backward runs again (part of a packed product may be enough)."""
        outside = {name: Fraction(1) for name in self.forward_twice}
        if policy == "none":
            return outside
        if policy == "full":
            return {op.name: Fraction(1) for op in self.ops if op.in_block} | outside
        made = self.made_again(policy)
        inside = [op for op in self.ops if op.in_block and made.intersection(op.outputs)]
        return {op.name: self._share_made(op, made) for op in inside} | outside

    def made_again(self, policy: Recompute) -> set[str]:
        """The tensors of a block that backward makes again: those that it reads and that were not kept, and theirs."""
        kept = {tensor.name for tensor in self.saved(policy)}
        return self.made_for(self._needed()[0], kept)

    def made_for(self, needed: Iterable[str], kept: Collection[str]) -> set[str]:
        """The tensors of a block that have to be made to have those that are needed, where some are kept."""
        makers: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in op.outputs if op.in_block else ():
                makers.setdefault(name, []).append(op)
        wanted = [name for name in needed if name not in kept]
        made: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name in made or name in kept or name not in makers:
                continue
            made.add(name)
            # What an adapter adds is a second maker of the same tensor.
            for op in makers[name]:
                pairwise = isinstance(op, Streaming) and op.pairwise
                wanted.extend([op.inputs[op.outputs.index(name)]] if pairwise else op.inputs)
        return made

    def _needed(self) -> tuple[set[str], set[str]]:
        """What the backward of the blocks reads, and what that of the other operators reads."""
        inside = {name for op in self.ops if op.in_block for name in op.needs}
        return inside, {name for op in self.ops if not op.in_block for name in op.needs}

    def _share_made(self, op: Op, made: set[str]) -> Fraction:
        if isinstance(op, Attention):
            # Eager attention is two products: scores, and their sum with the values. The scores alone are half, or more
            # where values are narrower than keys.
            whole = self.kernel == "flash" or "attended" in made
            return Fraction(1) if whole else Fraction(op.head_dim, op.head_dim + (op.value_dim or op.head_dim))
        main = [name for name in op.outputs if self.tensors[name].format == "compute"] or list(op.outputs)
        again = sum(self.tensors[name].elements for name in main if name in made)
        # Only a by-product (a norm's statistics) is missing: it costs the whole kernel all the same.
        return Fraction(again, sum(self.tensors[name].elements for name in main)) if again else Fraction(1)

    def copies_of(self, tensor: Tensor) -> int:
        """How many of this tensor one sequence makes."""
        return self.copies.get(tensor.name, 1)
