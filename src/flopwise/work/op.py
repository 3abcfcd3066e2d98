"""The operators that a model is made of, and what one of them costs.

Every shape is for one sequence, so that a batch of b sequences is b times the work of one, exactly; only the
weights do not grow with the batch. Sequences of uneven length are described together, behind each other: sums over
tokens are those of all of them, and attention alone knows where each ends. FLOPs are exact integers: a matrix product
of (m × k)·(k × n) is 2·m·k·n.

Two conventions for counting *model* FLOPs, because published figures use both:

`causal`  matrix products only, and of attention's square only the half that a causal mask leaves (all of it
          for a bidirectional model). What the mathematics needs.
`palm`    2 FLOPs per parameter and token, embeddings and norms included, and attention's full square. For
          training this is 6·N + 12·L·d·S per token, as in the PaLM paper's appendix B and in most training logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from typing import Literal, get_args

from flopwise.work.adapters import DOWN, MAGNITUDE, UP
from flopwise.work.recurrence import Rule

Convention = Literal["causal", "palm"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)

AttentionKernel = Literal["flash", "eager"]
"""flash: tiles, skips what the mask hides, recomputes the scores in backward. eager: the full square, kept."""
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)


Pairs = Literal["mask", "reach", "square"]
"""Which (query, key) pairs count. mask: those that the mask leaves. reach: as far as the window reaches, both ways,
as `palm` counts. square: all of them, as eager kernels compute."""

StreamingKind = Literal["norm", "pointwise", "residual", "embedding", "choose", "cross_entropy"]


class SaveLevel(IntEnum):
    """What a block keeps for its backward, each level with all of those before it."""

    INPUT = 0
    CONTEXT = 1
    ATTENTION = 2
    EVERYTHING = 3
    TRANSIENT = 4
    """Cheap to make again without a matrix product: kept only when nothing at all is recomputed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A value that operators hand on, for one sequence and one call."""

    name: str
    elements: int
    level: SaveLevel = SaveLevel.TRANSIENT
    format: Literal["compute", "fp32", "index"] = "compute"
    """`compute`: the format of the activations. `fp32`: statistics. `index`: 4-byte integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A tensor of one copy of an operator that its model is made of."""

    module: str
    """What holds it: the operator, or one of an embedding's tables."""
    shape: tuple[int, ...]
    kind: Literal["weight", "bias"] = "weight"
    owned: bool = True
    """False for the second use of a tied matrix, so that it is counted once."""
    active: tuple[int, int] = (1, 1)
    """Numerator and denominator of the share that one token uses (experts)."""
    buffer: bool = False
    """A state beside the parameters, which no gradient reaches and nobody counts."""
    parts: tuple[int, ...] = ()
    """Rows of the matrices that are packed into it, one for each of its product's results; nothing: it is one."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.kind}"

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An operator: its place in the model, the tensors it touches, the weights it holds."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Tensors that its backward reads, beside the gradients of its outputs."""
    weights: tuple[Weight, ...] = ()
    layers: int = 1
    """Copies, each with weights of its own."""
    calls: int = 1
    """How often each copy runs in one pass: 1, but the time steps of a recurrent cell."""
    in_block: bool = True
    """Part of the repeated block, so recomputed under checkpointing; embedding and head are not."""
    block_kind: str = ""
    """Which blocks have it, where they come in kinds; empty: all of them."""
    first_layer: int = 0
    """Of a block's operators, the first block that has it."""
    frozen: int = 0
    """Copies whose weights are not trained."""
    unreached: int = 0
    """Copies that backward does not come to, since nothing in front of them is trained."""

    @property
    def parameters(self) -> int:
        """Parameters of all copies; a tied matrix counts where it is owned."""
        return self.layers * sum(weight.elements for weight in self.weights if weight.owned and not weight.buffer)

    @property
    def trained_parameters(self) -> int:
        """Those of them that are trained."""
        return self.parameters // self.layers * (self.layers - self.frozen)

    @property
    def reached(self) -> int:
        """Copies that backward runs through."""
        return self.layers - self.unreached

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, in all copies."""
        return self.layers * sum(
            weight.elements * weight.active[0] // weight.active[1]
            for weight in self.weights
            if weight.owned and not weight.buffer
        )

    def forward_flops(self, pairs: Pairs = "mask") -> int:  # noqa: ARG002 - for attention only
        """Matrix FLOPs of one forward pass over one sequence, all copies and calls."""
        return 0

    def backward_flops(self, kernel: AttentionKernel, pairs: Pairs = "mask") -> int:  # noqa: ARG002
        """Matrix FLOPs that the backward executes: gradient of the input, and of the weights that are trained."""
        return self.backward_copies * (self.forward_flops(pairs) // self.layers)

    @property
    def backward_copies(self) -> int:
        """How many forwards of one copy the backward of all of them is worth."""
        return self.reached + self.layers - self.frozen


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm(Op):
    """`groups` products (rows/groups × depth)·(depth × columns), rows summed over the groups."""

    rows: int
    depth: int
    columns: int
    groups: int = 1
    uneven: bool = False
    """Whether groups have other rows than each other; `rows` are those of all."""
    adds: bool = False
    """Its result is added to what the product before it made: an adapter's second matrix."""

    def forward_flops(self, pairs: Pairs = "mask") -> int:  # noqa: ARG002
        return product_flops(self.rows, self.depth, self.columns) * self.layers * self.calls


def product_flops(rows: int, depth: int, columns: int) -> int:
    """A multiplication and an addition for each of rows × depth × columns."""
    return 2 * rows * depth * columns


ATTENTION_PRODUCTS = {"forward": 2, "backward": 5}
"""Of flash attention: scores and their sum with the values; backward four, and the scores once more."""


VALUE_PRODUCTS = {"forward": 1, "backward": 2}
"""Of these, those with values: their sum, and backward its gradients."""


def attention_flops(
    direction: Literal["forward", "backward"], twice_pairs: int, heads: int, head_dim: int, value_dim: int = 0
) -> int:
    """Matrix FLOPs of flash attention over so many (query, key) pairs of a head, counted twice.

    `value_dim`: channels of a value; 0: as many as a key has.
    """
    with_values = VALUE_PRODUCTS[direction]
    channels = (ATTENTION_PRODUCTS[direction] - with_values) * head_dim + with_values * (value_dim or head_dim)
    return twice_pairs * heads * channels


def attention_elements(direction: Literal["forward", "backward"], tokens: int, heads: int, head_dim: int) -> int:
    """Numbers that flash attention moves for so many tokens; `heads` are those of queries and of keys together.

    Queries, keys, values and results once forward, two times and a half backward.
    """
    return {"forward": 2, "backward": 5}[direction] * tokens * head_dim * heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention(Op):
    """softmax(q·kᵀ)·v over one sequence: two products forward, four backward, one more where flash redoes q·kᵀ."""

    tokens: int
    """Queries; the keys are those of all parts."""
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    value_dim: int = 0
    """Channels of a value; 0: as many as a key has."""
    window: int | None = None
    chunk: int | None = None
    """A query sees keys of its own chunk of so many tokens alone."""
    kinds: tuple[tuple[int | None, int | None, int, int], ...] = ()
    """Window, chunk, copies and those of them that are not reached, of each kind, where some blocks look back
    otherwise than others; empty: all are alike."""
    parts: int = 1
    """Devices that share the sequence, each with an equal part of its pairs."""
    lengths: tuple[tuple[int, int], ...] = ()
    """Of sequences that lie behind each other: (tokens, sequences that have so many), `tokens` being all of theirs.
    None: one sequence."""

    def each(self) -> Iterator[tuple[Attention, int]]:
        """The same over one sequence of each length, and how many sequences have it."""
        for tokens, count in self.lengths or ((self.tokens, 1),):
            yield replace(self, tokens=tokens, lengths=()), count

    def by_kind(self) -> tuple[Attention, ...]:
        """The same attention as one operator for each kind of block."""
        if not self.kinds:
            return (self,)
        return tuple(
            replace(self, window=window, chunk=chunk, layers=copies, unreached=unreached, kinds=())
            for window, chunk, copies, unreached in self.kinds
        )

    def twice_pairs(self, pairs: Pairs) -> int:
        """Twice the number of (query, key) pairs of a head: S² under a causal mask, 2·S² without one.

        The diagonal is halved too: the usual S²/2 and not S·(S+1)/2, a difference of 1/S. A window w leaves the
        band w·S − w²/2 of a causal square; where tokens look ahead all pairs are counted. Of one copy: where copies
        differ, `by_kind` tells them apart.
        """
        assert not self.kinds
        if self.lengths:
            return sum(count * one.twice_pairs(pairs) for one, count in self.each())
        keys = self.tokens * self.parts
        if pairs == "square":
            return 2 * self.tokens * keys
        reach = self._reach(keys)
        if pairs == "reach":
            return 2 * self.tokens * (reach if self.causal else min(2 * reach - 1, keys))
        return self.twice_pairs_of(0, keys) // self.parts

    def twice_pairs_of(self, first: int, last: int) -> int:
        """The same for the queries `first` to before `last` alone, of what the mask leaves."""
        assert not self.kinds
        keys = self.tokens * self.parts
        reach = self._reach(keys)
        if self.chunk is not None:
            return _in_chunks(last, self.chunk) - _in_chunks(first, self.chunk)
        if not self.causal:
            behind = _before(last, reach) - _before(first, reach)
            # Seen from the sequence's end, what is ahead is behind.
            ahead = _before(keys - first, reach) - _before(keys - last, reach)
            return behind + ahead + 2 * (last - first)
        return last**2 - max(0, last - reach) ** 2 - (first**2 - max(0, first - reach) ** 2)

    def _reach(self, keys: int) -> int:
        """Of so many keys, how many a query sees at most."""
        return min(each for each in (keys, self.window, self.chunk) if each is not None)

    def forward_flops(self, pairs: Pairs = "mask") -> int:
        if self.kinds:
            return sum(kind.forward_flops(pairs) for kind in self.by_kind())
        forward = attention_flops("forward", self.twice_pairs(pairs), self.heads, self.head_dim, self.value_dim)
        return forward * self.layers * self.calls

    def backward_flops(self, kernel: AttentionKernel, pairs: Pairs = "mask") -> int:
        if kernel != "flash":
            return self.backward_copies * (self.forward_flops(pairs) // self.layers)
        if self.kinds:
            return sum(kind.backward_flops(kernel, pairs) for kind in self.by_kind())
        backward = attention_flops("backward", self.twice_pairs(pairs), self.heads, self.head_dim, self.value_dim)
        return backward * self.reached * self.calls

    @property
    def backward_copies(self) -> int:
        """Both of its inputs' gradients: it has no weights."""
        return 2 * self.reached


def _in_chunks(queries: int, chunk: int) -> int:
    """Twice the keys that the first queries of a sequence see in their own chunks."""
    whole, rest = divmod(queries, chunk)
    return whole * chunk**2 + rest**2


def _before(queries: int, reach: int) -> int:
    """Twice the keys that the first queries of a sequence see before their own."""
    short = min(queries, reach)
    return short * (short - 1) + 2 * (queries - short) * (reach - 1)


@dataclass(frozen=True, slots=True)
class ScanProduct:
    """One of the products of a scan: (rows × depth)·(depth × columns) for each chunk of so many heads."""

    rows: int
    depth: int
    columns: int
    heads: int
    masked: bool = False
    """Between tokens of a chunk, of which later ones see earlier ones alone."""
    again: bool = False
    """Backward makes it again, as it makes scores again in flash attention."""
    handed: int = 0
    """How often its result is written by one kernel and read by another: a state twice, where decays are applied to all
    chunks' states by a kernel of its own."""

    @property
    def results(self) -> int:
        """Numbers that it makes for a chunk."""
        return self.rows * self.columns * self.heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan(Op):
    """A state for each head, carried along the sequence in chunks: see `recurrence.Recurrence`."""

    tokens: int
    rule: Rule
    heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    chunk: int

    @property
    def products(self) -> tuple[ScanProduct, ...]:
        """Those of one forward pass, for a chunk.

        Of the delta rule the system of a chunk is solved for values and keys: as products with its inverse.
        """
        tokens, keys, values, heads = self.chunk, self.key_dim, self.head_dim, self.heads
        if self.rule == "mamba2":
            return (
                ScanProduct(tokens, keys, tokens, self.key_heads, masked=True, again=True, handed=1),
                ScanProduct(tokens, tokens, values, heads, masked=True),
                ScanProduct(keys, tokens, values, heads, again=True, handed=2),
                ScanProduct(tokens, keys, values, heads),
            )
        return (
            ScanProduct(tokens, keys, tokens, heads, masked=True, handed=1),
            ScanProduct(tokens, keys, tokens, heads, masked=True, again=True),
            ScanProduct(tokens, tokens, values, heads, masked=True, again=True, handed=1),
            ScanProduct(tokens, tokens, keys, heads, masked=True, again=True, handed=1),
            ScanProduct(tokens, keys, values, heads, again=True, handed=1),
            ScanProduct(tokens, keys, values, heads),
            ScanProduct(tokens, tokens, values, heads, masked=True),
            ScanProduct(keys, tokens, values, heads, again=True, handed=1),
        )

    @property
    def chunks(self) -> int:
        """The last one may be shorter; kernels fill it up."""
        return -(-self.tokens // self.chunk)

    @property
    def square_elements(self) -> int:
        """Pairs of a chunk's tokens, of all heads and chunks: each has a decay from one to the other."""
        return self.chunks * self.heads * self.chunk**2

    @property
    def state_elements(self) -> int:
        """Numbers of the states that chunks hand on."""
        return self.chunks * self.heads * self.key_dim * self.head_dim

    @property
    def handed_elements(self) -> int:
        """Numbers that its kernels write and read again, going forward."""
        return self.chunks * sum(product.handed * product.results for product in self.products)

    def product_flops(self, product: ScanProduct, pairs: Pairs) -> int:
        """Matrix FLOPs of one product over all chunks: all that kernels compute, or what the mask leaves."""
        rows, columns = product.rows, product.columns
        if pairs == "square":
            return self.chunks * product.heads * product_flops(rows, product.depth, columns)
        whole, rest = divmod(self.tokens, self.chunk)
        if not product.masked:
            inner = rows * product.depth * columns // self.chunk
            return 2 * self.tokens * product.heads * inner
        # Twice the pairs of a chunk are its square, as attention counts them.
        inner = rows * product.depth * columns // self.chunk**2
        return (whole * self.chunk**2 + rest**2) * product.heads * inner

    def forward_flops(self, pairs: Pairs = "mask") -> int:
        return self.layers * sum(self.product_flops(product, pairs) for product in self.products)

    def backward_flops(self, kernel: AttentionKernel, pairs: Pairs = "mask") -> int:  # noqa: ARG002
        """Two for each product, and those that are made again."""
        each = sum((3 if product.again else 2) * self.product_flops(product, pairs) for product in self.products)
        return self.reached * each

    @property
    def backward_copies(self) -> int:
        """Both of a product's inputs have a gradient: what it has of weights is no matrix."""
        return 2 * self.reached


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming(Op):
    """An operator bound by the bytes it moves: norms, activations, rotary, residual sums, look-ups, losses."""

    kind: StreamingKind = "pointwise"
    eager_kernels: int = 1
    """Kernels, each reading and writing whole tensors, that unfused code takes for it."""
    function: str = ""
    """Which norm or activation it is, by its name in the model's description."""
    also_kept: tuple[str, ...] = ()
    """What is kept for its backward where every operator has one of its own, and not where it runs with another."""
    pairwise: bool = False
    """Output i follows from input i alone, so that one can be made again without the others."""
    normed: tuple[tuple[int, int], ...] = ()
    """Rows and depth of matrices, the norms of whose rows every call takes."""


def is_beside(op: Op) -> bool:
    """Whether an operator is an adapter's, which lies beside a matrix."""
    return op.name.endswith((f"_{DOWN}", f"_{UP}", f"_{MAGNITUDE}"))


def kind_of(op: Op) -> str:
    """The operator's kind in one word, as tables print it."""
    if isinstance(op, Streaming):
        return op.kind
    if isinstance(op, Scan):
        return "scan"
    return "gemm" if isinstance(op, Gemm) else "attention"
