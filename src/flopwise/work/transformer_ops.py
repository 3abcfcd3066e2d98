"""A transformer's operators for one sequence, in the order of its forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import Literal, NamedTuple

from flopwise.work.adapters import DIRECTION, DOWN, EMBEDDING, HEAD, LOW, MAGNITUDE, RESULTS, UP, Target
from flopwise.work.latent import LatentAttention
from flopwise.work.layer_names import inner_names, targets_of
from flopwise.work.layout import WHOLE, Layout
from flopwise.work.lengths import Lengths
from flopwise.work.op import (
    Attention,
    AttentionKernel,
    Gemm,
    Op,
    SaveLevel,
    Scan,
    Streaming,
    StreamingKind,
    Tensor,
    Weight,
)
from flopwise.work.recurrence import ATTENDING, FEEDING, RECURRENT, Recurrence
from flopwise.work.routing import CORRECTION_TERMS
from flopwise.work.transformer import DENSE, MIXTURE, Transformer
from flopwise.work.work import SCORES, Work

SHARED = "shared_"
"""What the names of shared experts' operators and tensors begin with."""

Format = Literal["compute", "fp32", "index"]
QUERY_LATENT_NORM, LATENT_NORM, SPREAD_KEY = "query_latent_norm", "latent_norm", "spread_key"
"""Of latent attention: norms of its latents, and what gives every head's key the channels that all have in common."""
CONVOLUTION, SCAN, GATED_NORM, GATING = "convolution", "scan", "mix_norm", "gating"
"""Of blocks that carry a state: the convolution in front of it, what carries it, and the norm with a gate behind it;
and the gate behind attention."""
STEP_BIAS, DECAY, SKIP = "steps", "decay", "skip"
"""Weights of a scan: what is added to the steps, logarithms of how fast states fade, and the part of the values that
goes past the state."""
TEMPERATURE = "temperature"
"""What queries are multiplied by, by their position."""
POOL = "pool"
"""The mean of a sequence's tokens, for a classifier."""


def transformer_work(
    model: Transformer,
    sequence_tokens: int,
    kernel: AttentionKernel = "flash",
    layout: Layout = WHOLE,
    lengths: Lengths | None = None,
) -> Work:
    """Describe one forward pass over one sequence, or over those of `lengths`; backward and recompute follow from it.

    With a `layout` it is what one device of it does: its heads, its columns of the feed-forward part and of the
    vocabulary (padded to equal parts), its tokens and its experts, each of which gets an equal part of the tokens.
    """
    model.check_sequence(sequence_tokens)
    builder = _Builder(model, sequence_tokens, kernel, layout, lengths)
    builder.embedding()
    builder.block()
    builder.head()
    return Work(
        name=model.name,
        sequence_tokens=sequence_tokens if lengths is None else lengths.tokens,
        ops=tuple(builder.ops),
        tensors=builder.tensors,
        copies=builder.copies,
        kernel=kernel,
        sequences=builder.sequences,
        forward_twice=builder.forward_twice(),
    )


def _direction(result: str) -> str:
    """What a result is called before its magnitude."""
    return f"{result}_{DIRECTION}"


def split_prefix(product: str) -> tuple[str, str]:
    """What the name of a product of shared experts, or of a block without experts, begins with, and the rest."""
    prefix = next((each for each in (SHARED, f"{DENSE}_") if product.startswith(each)), "")
    return prefix, product.removeprefix(prefix)


def _shared(recurrence: Recurrence | None, ranks: int) -> Recurrence | None:
    """What one of so many tensor ranks has of it."""
    if recurrence is None:
        return None
    return replace(
        recurrence,
        heads=recurrence.heads // ranks,
        key_heads=recurrence.key_heads // ranks,
        norm_groups=max(1, recurrence.norm_groups // ranks),
    )


class _Copies(NamedTuple):
    """How often a product is there: its rows, among so many experts, and which share of them a token uses."""

    rows: int
    groups: int
    active: tuple[int, int]


class _Builder:
    """Collects operators and tensors; each method appends one part of the model."""

    def __init__(
        self,
        model: Transformer,
        sequence_tokens: int,
        kernel: AttentionKernel,
        layout: Layout,
        lengths: Lengths | None,
    ) -> None:
        self.model = replace(
            model,
            heads=model.heads // layout.tensor,
            kv_heads=max(1, model.kv_heads // layout.tensor),
            ffn=model.ffn // (layout.sharing_experts if model.experts else layout.tensor),
            shared_ffn=model.shared_ffn // layout.tensor,
            dense_ffn=model.dense_ffn // layout.tensor,
            recurrence=_shared(model.recurrence, layout.tensor),
            vocab=-(-model.vocab // layout.tensor),
        )
        self.layout = layout
        self.sequence_tokens = sequence_tokens
        self.lengths = lengths.counted if lengths else ()
        self.sequences = lengths.sequences if lengths else 1
        self.tokens = lengths.tokens if lengths else sequence_tokens // layout.context
        # Tokens of the residual stream, of which sequence parallelism gives each tensor rank a part.
        self.stream_tokens = self.tokens // layout.tensor if layout.sequence else self.tokens
        # Ranks that do not share their experts send what each of them has of the tokens.
        self.routed_tokens = self.stream_tokens if layout.folded else self.tokens
        self.kernel = kernel
        self.ops: list[Op] = []
        self.tensors: dict[str, Tensor] = {}
        self.copies: dict[str, int] = {}
        self.layers = 1
        self.in_block = False
        self.block_kind = ""
        self.first_layer = 0
        """The first block that has the operators to come."""
        self.frozen = self.unreached = 0
        """Copies of the operators to come whose weights are not trained, and that backward does not come to."""
        self.adapted_layers = 0
        """Copies that may have adapters."""

    # -- small makers ---------------------------------------------------------------------------------------------

    def tensor(
        self, name: str, elements: int, level: SaveLevel = SaveLevel.TRANSIENT, number_format: Format = "compute"
    ) -> str:
        # What is made again at another level is the same tensor.
        assert name not in self.tensors or self.tensors[name].elements == elements, f"two tensors are called {name}"
        self.tensors[name] = Tensor(name=name, elements=elements, level=level, format=number_format)
        self.copies[name] = self.layers - self.unreached if self.in_block else self.layers
        return name

    def gemm(
        self,
        name: str,
        source: str,
        outputs: tuple[str, ...],
        *,
        depth: int,
        columns: int,
        bias: bool = False,
        rows: int | None = None,
        groups: int = 1,
        active: tuple[int, int] = (1, 1),
        weight_owned: bool = True,
    ) -> None:
        made, beside = outputs, self.adapted(name, outputs)
        if beside and self.has_magnitudes:
            outputs = self.directions(beside, outputs)
            beside = [(target, _direction(result)) for target, result in beside]
        lead = (groups,) if groups > 1 else ()
        per_row = [self.tensors[output].elements // (self.tokens if rows is None else rows) for output in outputs]
        parts = tuple(per_row) if len(outputs) > 1 else ()
        weights = [Weight(module=name, shape=(*lead, columns, depth), active=active, owned=weight_owned, parts=parts)]
        if bias:
            weights.append(Weight(module=name, kind="bias", shape=(*lead, columns), active=active))
        copies = _Copies(self.tokens if rows is None else rows, groups, active)
        if beside:
            self.lower(name, source, beside, copies, depth=depth)
        self.ops.append(
            Gemm(
                name=name,
                inputs=(source,),
                outputs=outputs,
                # The gradient of the input alone reads nothing but the matrix.
                needs=(source,) if self.frozen < self.layers else (),
                weights=tuple(weights),
                layers=self.layers,
                in_block=self.in_block,
                block_kind=self.block_kind,
                frozen=self.frozen,
                unreached=self.unreached,
                rows=self.tokens if rows is None else rows,
                depth=depth,
                columns=columns,
                groups=groups,
                uneven=groups > 1 and not self.model.routing.is_even,
            )
        )
        for target, result in beside:
            columns = self.tensors[result].elements // copies.rows
            inner = f"{self.inner_of(name, target)}_{LOW}"
            self.adapt(f"{target}_{UP}", inner, (result,), copies, depth=self.rank, columns=columns, adds=True)
        if made != outputs:
            self.scale_rows(name, [target for target, _ in beside], zip(outputs, made, strict=True), depth)

    @property
    def targets(self) -> tuple[Target, ...]:
        return () if self.model.adapters is None else self.model.adapters.targets

    @property
    def has_magnitudes(self) -> bool:
        return self.model.adapters is not None and self.model.adapters.magnitudes

    def directions(self, beside: list[tuple[str, str]], outputs: tuple[str, ...]) -> tuple[str, ...]:
        """What a product makes where magnitudes scale some of its results: those, before they are.

        They are kept. The results follow from them without a product, and are kept only where attention looks for them.
        """
        scaled = {result for _, result in beside}
        for name in scaled:
            result = self.tensors[name]
            self.copies[self.tensor(_direction(name), result.elements, SaveLevel.EVERYTHING)] = self.adapted_layers
            if result.level == SaveLevel.EVERYTHING:
                self.tensors[name] = replace(result, level=SaveLevel.TRANSIENT)
        return tuple(_direction(name) if name in scaled else name for name in outputs)

    def scale_rows(self, product: str, targets: list[str], pairs: Iterable[tuple[str, str]], depth: int) -> None:
        """DoRA's magnitudes over the norms of a product's rows, which its results are multiplied by."""
        scaled = [(source, made) for source, made in pairs if source != made]
        widths = [self.tensors[made].elements // self.tokens for _, made in scaled]
        self.ops.append(
            Streaming(
                name=f"{product}_{MAGNITUDE}",
                inputs=tuple(source for source, _ in scaled),
                outputs=tuple(made for _, made in scaled),
                needs=tuple(source for source, _ in scaled),
                weights=tuple(
                    Weight(module=f"{target}_{MAGNITUDE}", shape=(width,))
                    for target, width in zip(targets, widths, strict=True)
                ),
                layers=self.adapted_layers,
                in_block=True,
                block_kind=self.block_kind,
                # Less the bias, times the magnitude, and the bias again.
                eager_kernels=3,
                function=MAGNITUDE,
                pairwise=True,
                normed=tuple((width, depth) for width in widths),
            )
        )

    def adapted(self, product: str, outputs: tuple[str, ...]) -> list[tuple[str, str]]:
        """A product's results that have an adapter, each with its target's name."""
        adapters, (prefix, plain) = self.model.adapters, split_prefix(product)
        if adapters is None or not self.in_block or plain not in RESULTS:
            return []
        beside = zip(targets_of(self.model, plain), outputs, strict=True)
        return [(f"{prefix}{target}", name) for target, name in beside if target in adapters.targets]

    def inner_of(self, product: str, target: str) -> str:
        """What the adapter of a product's result calls its own inner one."""
        prefix, plain = split_prefix(product)
        return next(
            inner for each, inner in inner_names(self.model, plain, prefix).items() if f"{prefix}{each}" == target
        )

    @property
    def rank(self) -> int:
        assert self.model.adapters is not None
        return self.model.adapters.rank

    def lower(self, product: str, source: str, beside: list[tuple[str, str]], copies: _Copies, *, depth: int) -> None:
        """The first matrices of a product's adapters, as one.

        It comes before the product: backward then adds to what the wide product has written, and reads its input last.
        """
        inner = dict.fromkeys(self.inner_of(product, target) for target, _ in beside)
        low = [self.tensor(f"{each}_{LOW}", copies.rows * self.rank, SaveLevel.EVERYTHING) for each in inner]
        self.copies |= dict.fromkeys(low, self.adapted_layers)
        columns = self.rank * len(low)
        self.adapt(f"{product}_{DOWN}", source, tuple(low), copies, depth=depth, columns=columns, adds=False)

    def adapt(
        self,
        name: str,
        source: str,
        outputs: tuple[str, ...],
        copies: _Copies,
        *,
        depth: int,
        columns: int,
        adds: bool,
    ) -> None:
        """A narrow product of an adapter, which is trained; of an expert's matrix it is one for each expert."""
        parts = (columns // len(outputs),) * len(outputs) if len(outputs) > 1 else ()
        lead = (copies.groups,) if copies.groups > 1 else ()
        self.ops.append(
            Gemm(
                name=name,
                inputs=(source,),
                outputs=outputs,
                needs=(source,),
                weights=(Weight(module=name, shape=(*lead, columns, depth), active=copies.active, parts=parts),),
                layers=self.adapted_layers,
                in_block=True,
                block_kind=self.block_kind,
                rows=copies.rows,
                depth=depth,
                columns=columns,
                groups=copies.groups,
                adds=adds,
            )
        )

    def streaming(
        self,
        name: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        *,
        kind: StreamingKind = "pointwise",
        needs: tuple[str, ...] = (),
        also_kept: tuple[str, ...] = (),
        weights: tuple[Weight, ...] = (),
        eager_kernels: int = 1,
        function: str = "",
        pairwise: bool = False,
    ) -> None:
        self.ops.append(
            Streaming(
                name=name,
                inputs=inputs,
                outputs=outputs,
                needs=needs,
                weights=weights,
                layers=self.layers,
                first_layer=self.first_layer,
                in_block=self.in_block,
                block_kind=self.block_kind,
                frozen=self.frozen if weights else 0,
                unreached=self.unreached,
                kind=kind,
                also_kept=also_kept,
                eager_kernels=eager_kernels,
                function=function,
                pairwise=pairwise,
            )
        )

    def norm(
        self,
        name: str,
        source: str,
        output: str,
        *,
        rows: int | None = None,
        width: int = 0,
        weights_of: str = "",
        scales: bool = True,
    ) -> None:
        """RMSNorm or LayerNorm over `width` channels; keeps the input and its statistics in fp32.

        `weights_of`: the norm that has its weights, where it is made a second time. `scales`: whether it has any.
        """
        model = self.model
        width = width or model.hidden
        rows = rows or self.stream_tokens
        statistics = self.tensor(
            f"{name}.statistics", rows * (2 if model.norm == "layer" else 1), SaveLevel.CONTEXT, "fp32"
        )
        module, owned = weights_of or name, not weights_of
        weights = [Weight(module=module, shape=(width,), owned=owned)]
        if model.norm_bias:
            weights.append(Weight(module=module, kind="bias", shape=(width,), owned=owned))
        # Unfused RMSNorm is a cast, a square, a mean, a reciprocal root, two products and a cast back.
        self.streaming(
            name,
            (source,),
            (output, statistics),
            kind="norm",
            needs=(source, statistics),
            weights=tuple(weights) if scales else (),
            eager_kernels=6 if model.norm == "rms" else 1,
            function=model.norm,
        )

    # -- parts of the model ---------------------------------------------------------------------------------------

    def embedding(self) -> None:
        model, tokens = self.model, self.stream_tokens
        self.frozen = self.unreached = int(model.is_frozen(EMBEDDING))
        ids = self.tensor("ids", tokens, number_format="index")
        weights = [Weight(module="embedding", shape=(model.vocab, model.hidden), owned=not model.tied)]
        if model.positions == "learned":
            weights.append(
                Weight(module="positions", shape=(model.position_rows or self.sequence_tokens, model.hidden))
            )
        if model.token_types:
            weights.append(Weight(module="token_types", shape=(model.token_types, model.hidden)))
        self.layers = model.layers
        block_input = self.tensor("input", tokens * model.hidden, SaveLevel.INPUT)
        self.copies[block_input] -= model.first_reached
        self.layers = 1
        target = self.tensor("embedded", tokens * model.hidden) if model.embedding_norm else block_input
        self.streaming(
            "embedding",
            (ids,),
            (target,),
            kind="embedding",
            needs=(ids,),
            weights=tuple(weights),
            eager_kernels=len(weights),
        )
        if model.embedding_norm:
            self.norm("embedding_norm", target, block_input)

    def block(self) -> None:
        model = self.model
        self.layers, self.in_block = model.layers, True
        self.frozen = model.layers if model.adapters is not None else len(model.frozen_layers)
        self.unreached = model.first_reached
        self.adapted_layers = model.layers - len(model.frozen_layers)
        width = self.stream_tokens * model.hidden
        if model.one_branch:
            self.one_branch(width)
        elif model.norm_place == "post":
            attended = self.attention_branch("input")
            self.tensor("middle_sum", width, SaveLevel.EVERYTHING)
            self.streaming("residual1", ("input", attended), ("middle_sum",), kind="residual")
            self.tensor("middle", width)
            self.norm("norm1", "middle_sum", "middle")
            fed = self.feed_branch("middle")
            self.tensor("output_sum", width, SaveLevel.EVERYTHING)
            self.streaming("residual2", ("middle", fed), ("output_sum",), kind="residual")
            self.tensor("output", width)
            self.norm("norm2", "output_sum", "output")
        elif model.parallel_residual:
            self.tensor("normed1", width)
            self.norm("norm1", "input", "normed1")
            attended = self.attention_branch("normed1")
            self.tensor("normed2", width)
            # A norm that both read is made for each of them, so that what is before attention and what is after it
            # hand on nothing but the block's input.
            self.norm("norm2", "input", "normed2", weights_of="norm1" if model.shared_norm else "")
            branches = ("input", attended, self.feed_branch("normed2"))
            self.tensor("output", width)
            self.streaming("residual", branches, ("output",), kind="residual", eager_kernels=2)
        else:
            before, bare = model.norm_place != "behind", model.normed_from
            if before and bare < model.layers:
                self.begin_at(bare)
                self.tensor("normed1", width)
                self.norm("norm1", "input", "normed1")
                self.begin_at(0)
            attended = self.attention_branch("normed1" if before and bare < model.layers else "input")
            if before:
                self.tensor("normed2", width)
            self.tensor("middle", width, SaveLevel.EVERYTHING)
            self.streaming("residual1", ("input", attended), ("middle",), kind="residual")
            if before:
                self.norm("norm2", "middle", "normed2")
            fed = self.feed_branch("normed2" if before else "middle")
            self.tensor("output", width)
            self.streaming("residual2", ("middle", fed), ("output",), kind="residual")
        self.layers, self.in_block = 1, False
        self.frozen = self.unreached = 0

    def one_branch(self, width: int) -> None:
        """A block that is attention, carries a state, or feeds forward."""
        self.tensor("normed1", width)
        self.norm("norm1", "input", "normed1")
        self.tensor("projected", width)
        branch = self.mixing_branch("normed1", feeds=True)
        self.tensor("output", width)
        self.streaming("residual1", ("input", branch), ("output",), kind="residual")

    def mixing_branch(self, source: str, *, feeds: bool = False) -> str:
        """The first branch of blocks that come in kinds: the name of its result."""
        model = self.model
        with self.only_in(model.blocks_of(RECURRENT), RECURRENT) as some:
            if some and model.recurrence is not None:
                self.carry(source, model.recurrence)
        with self.only_in(model.blocks_of(ATTENDING), ATTENDING) as some:
            if some:
                self.attention(source)
        with self.only_in(model.blocks_of(FEEDING), FEEDING) as some:
            if some and feeds:
                self.fed_by(source, "projected")
        return self.to_residual("projected", None)

    def carry(self, source: str, recurrence: Recurrence) -> None:
        """A state along the sequence in the place of attention, up to the product that leads to the residual stream."""
        model, tokens = self.model, self.tokens
        gate = self.tensor("mix_gate", tokens * recurrence.width, SaveLevel.EVERYTHING)
        raw = self.tensor("carried_raw", tokens * recurrence.channels, SaveLevel.EVERYTHING)
        steps = self.tensor("steps", tokens * recurrence.steps, SaveLevel.EVERYTHING)
        columns = recurrence.width + recurrence.channels + recurrence.steps
        self.gemm("mix_in", source, (gate, raw, steps), depth=model.hidden, columns=columns, bias=recurrence.bias)
        filters = [Weight(module=CONVOLUTION, shape=(recurrence.channels, recurrence.conv))]
        if recurrence.conv_bias:
            filters.append(Weight(module=CONVOLUTION, kind="bias", shape=(recurrence.channels,)))
        mixed = self.tensor("carried", tokens * recurrence.channels)
        # Unfused: a transposed copy, the convolution, its activation, and a copy back.
        self.streaming(CONVOLUTION, (raw,), (mixed,), needs=(raw,), weights=tuple(filters), eager_kernels=4)
        scanned = self.tensor("scanned", tokens * recurrence.width, SaveLevel.ATTENTION)
        self.scan((mixed, steps), scanned, recurrence)
        normed = self.tensor("mix_normed", tokens * recurrence.width)
        self.streaming(
            GATED_NORM,
            (scanned, gate),
            (normed,),
            needs=(scanned, gate),
            weights=(Weight(module=GATED_NORM, shape=(recurrence.norm_weights,)),),
            # Those of an RMSNorm, and the gate's activation and product.
            eager_kernels=8,
        )
        self.project("mix_out", normed, depth=recurrence.width, bias=recurrence.bias)

    def scan(self, inputs: tuple[str, ...], output: str, recurrence: Recurrence) -> None:
        per_head = (recurrence.heads,)
        weights = [Weight(module=STEP_BIAS, kind="bias", shape=per_head), Weight(module=DECAY, shape=per_head)]
        if recurrence.rule == "mamba2":
            weights.append(Weight(module=SKIP, shape=per_head))
        self.ops.append(
            Scan(
                name=SCAN,
                inputs=inputs,
                outputs=(output,),
                needs=inputs,
                weights=tuple(weights),
                layers=self.layers,
                in_block=self.in_block,
                block_kind=self.block_kind,
                frozen=self.frozen,
                unreached=self.unreached,
                tokens=self.tokens,
                rule=recurrence.rule,
                heads=recurrence.heads,
                head_dim=recurrence.head_dim,
                key_heads=recurrence.key_heads,
                key_dim=recurrence.key_dim,
                chunk=recurrence.chunk,
            )
        )

    def begin_at(self, layer: int) -> None:
        """What is described from here on, the blocks from this one on have."""
        model, self.first_layer = self.model, layer
        self.layers = model.layers - layer
        of_frozen = sum(frozen >= layer for frozen in model.frozen_layers)
        self.frozen = self.layers if model.adapters is not None else of_frozen
        self.unreached = max(0, model.first_reached - layer)

    def attention_branch(self, source: str) -> str:
        """Attention and what follows it up to the sum with the residual stream: the name of its result."""
        if self.model.has_kinds:
            self.tensor("projected", self.stream_tokens * self.model.hidden)
            return self.mixing_branch(source)
        self.attention(source)
        names = {"behind": "norm1", "sandwich": "attention_norm"}
        return self.to_residual("projected", names.get(self.model.norm_place))

    def feed_branch(self, source: str) -> str:
        """The same of the feed-forward part."""
        self.feed_forward(source)
        names = {"behind": "norm2", "sandwich": "feed_norm"}
        return self.to_residual("fed", names.get(self.model.norm_place))

    def to_residual(self, name: str, norm: str | None) -> str:
        """A branch's result, normed and scaled where a model does so."""
        width = self.stream_tokens * self.model.hidden
        if norm is not None:
            # The norm's backward reads what the product wrote.
            self.tensor(name, width, SaveLevel.EVERYTHING)
            self.norm(norm, name, self.tensor(f"{name}_normed", width))
            name = f"{name}_normed"
        if self.model.residual_scale != 1.0:
            scaled = self.tensor(f"{name}_scaled", width)
            self.streaming(f"{name}_scale", (name,), (scaled,))
            name = scaled
        return name

    def attention(self, source: str) -> None:
        model, tokens = self.model, self.tokens
        query_size, kv_size = tokens * model.query_width, tokens * model.kv_width
        rotary = model.positions == "rotary"
        if model.latent is not None:
            self.latent_heads(source, model.latent)
            self.attention_core()
            self.project()
            return
        # With a norm or magnitudes on the queries, what the product wrote is kept, and they follow from it without one.
        follows = model.qk_norm or (self.has_magnitudes and "q" in self.targets)
        self.tensor("query", query_size, SaveLevel.TRANSIENT if follows else SaveLevel.EVERYTHING)
        self.tensor("key", kv_size, SaveLevel.CONTEXT)
        self.tensor("value", kv_size, SaveLevel.CONTEXT)
        query, key = "query", "key"
        tempered = model.temperature is not None and self.sequence_tokens >= model.temperature.floor
        if tempered and not (model.qk_norm or rotary):
            query = self.tensor("query_raw", query_size)
        if model.qk_norm or rotary:
            # What the product writes; the norm's backward reads it, the rotation's does not.
            level = SaveLevel.EVERYTHING if model.qk_norm else SaveLevel.TRANSIENT
            query, key = self.tensor("query_raw", query_size, level), self.tensor("key_raw", kv_size, level)
        made: tuple[str, ...] = (query, key, "value")
        columns = model.query_width + 2 * model.kv_width
        if model.attention_gate:
            gate = self.tensor("attention_gate", query_size, SaveLevel.EVERYTHING)
            made, columns = (*made, gate), columns + model.query_width
        self.gemm("qkv", source, made, depth=model.hidden, columns=columns, bias=model.qkv_bias)
        if model.qk_norm:
            heads = (("query", model.heads, query_size), ("key", model.kv_heads, kv_size))
            for part, count, size in heads:
                output = self.tensor(f"{part}_normed", size) if rotary else part
                each = 1 if model.qk_norm_over == "all" else count
                self.norm(
                    f"{part}_norm",
                    f"{part}_raw",
                    output,
                    rows=tokens * each,
                    width=count // each * model.head_dim,
                    scales=model.qk_norm_weights,
                )
            query, key = "query_normed", "key_normed"
        if rotary:
            # Unfused: two products, a negation, a concatenation and a sum, for queries and keys alike.
            self.streaming("rotary", (query, key), ("query", "key"), eager_kernels=5, pairwise=True)
        elif tempered:
            self.streaming(TEMPERATURE, (query,), ("query",))
        self.attention_core()
        attended = "attended"
        if model.attention_gate:
            attended = self.tensor("gated", query_size)
            both = ("attended", "attention_gate")
            self.streaming(GATING, both, (attended,), needs=both, eager_kernels=2)
        self.project(source=attended)

    def project(self, name: str = "output", source: str = "attended", *, depth: int = 0, bias: bool = False) -> None:
        """A branch's result on its way to the residual stream: attention's, unless said otherwise."""
        model = self.model
        if "projected" not in self.tensors:
            self.tensor("projected", self.stream_tokens * model.hidden)
        self.gemm(
            name,
            source,
            ("projected",),
            depth=depth or model.attended_width,
            columns=model.hidden,
            bias=bias if depth else model.output_bias,
        )

    def latent_heads(self, source: str, latent: LatentAttention) -> None:
        """Queries, keys and values from their latents; of a head the channels that turn come first."""
        model, tokens = self.model, self.tokens
        query_size, kv_size, turned = tokens * model.query_width, tokens * model.kv_width, model.turned_channels
        self.tensor("query", query_size, SaveLevel.EVERYTHING)
        self.tensor("key", kv_size, SaveLevel.CONTEXT)
        self.tensor("value", tokens * model.value_width, SaveLevel.CONTEXT)
        self.tensor("query_raw", query_size)
        first = "query_raw"
        if latent.query_rank:
            first = self.tensor("query_latent", tokens * latent.query_rank, SaveLevel.EVERYTHING)
        narrow = (first, self.tensor("latent", tokens * latent.rank, SaveLevel.EVERYTHING))
        parts = (*narrow, self.tensor("key_turned", tokens * turned))
        widths = (latent.query_rank or model.query_width) + latent.rank + turned
        self.gemm("latents", source, parts, depth=model.hidden, columns=widths)
        if latent.query_rank:
            self.tensor("query_latent_normed", tokens * latent.query_rank)
            self.norm(QUERY_LATENT_NORM, first, "query_latent_normed", rows=tokens, width=latent.query_rank)
            self.gemm(
                "query_up", "query_latent_normed", ("query_raw",), depth=latent.query_rank, columns=model.query_width
            )
        self.tensor("latent_normed", tokens * latent.rank)
        self.norm(LATENT_NORM, "latent", "latent_normed", rows=tokens, width=latent.rank)
        plain = self.tensor("key_plain", tokens * (model.kv_width - model.kv_heads * turned))
        columns = model.kv_width - model.kv_heads * turned + model.value_width
        self.gemm("latent_up", "latent_normed", (plain, "value"), depth=latent.rank, columns=columns)
        self.tensor("key_raw", kv_size)
        self.streaming(SPREAD_KEY, ("key_turned", plain), ("key_raw",), eager_kernels=2)
        self.streaming("rotary", ("query_raw", "key_raw"), ("query", "key"), eager_kernels=5, pairwise=True)

    def attention_core(self) -> None:
        model, tokens = self.model, self.tokens
        self.tensor("attended", tokens * model.attended_width, SaveLevel.ATTENTION)
        if self.kernel == "flash":
            kept = self.tensor("logsumexp", tokens * model.heads, SaveLevel.ATTENTION, "fp32")
            needs: tuple[str, ...] = ("query", "key", "value", "attended", kept)
        else:
            pairs = tokens * self.sequence_tokens * model.heads
            kept = self.tensor(SCORES, pairs, SaveLevel.EVERYTHING)
            needs = ("query", "key", "value", kept)
        self.ops.append(
            Attention(
                name="attention",
                inputs=("query", "key", "value"),
                outputs=("attended", kept),
                needs=needs,
                weights=(Weight(module="sinks", kind="bias", shape=(model.heads,)),) if model.sinks else (),
                layers=self.layers,
                in_block=self.in_block,
                block_kind=self.block_kind,
                frozen=self.frozen if model.sinks else 0,
                unreached=self.unreached,
                tokens=tokens,
                heads=model.heads,
                kv_heads=model.kv_heads,
                head_dim=model.head_dim,
                value_dim=model.value_dim,
                causal=model.causal,
                window=model.window,
                chunk=model.attention_chunk,
                kinds=self.attention_kinds(),
                parts=self.layout.context,
                lengths=self.lengths,
            )
        )

    def attention_kinds(self) -> tuple[tuple[int | None, int | None, int, int], ...]:
        """Window, chunk, copies and those of them that backward does not come to, of each kind of block."""
        model = self.model
        if model.other_attention is None:
            return ()
        unreached = sum(layer in model.other_blocks for layer in range(self.unreached))
        none_of = {True: unreached, False: self.unreached - unreached}
        return tuple(
            (kind.window, kind.attention_chunk, each, none_of[other]) for kind, each, other in model.attention_kinds
        )

    def feed_forward(self, source: str) -> None:
        model = self.model
        self.tensor("fed", self.stream_tokens * model.hidden)
        if model.dense_blocks:
            dense = frozenset(model.dense_blocks)
            with self.only_in(dense, DENSE):
                self.feed(f"{DENSE}_", source, "fed", width=model.dense_ffn)
            with self.only_in(frozenset(range(model.layers)) - dense, MIXTURE):
                self.mixture(source, "fed")
        else:
            self.fed_by(source, "fed")

    def fed_by(self, source: str, result: str) -> None:
        """What all feed-forward parts are: experts, or none."""
        if self.model.experts:
            self.mixture(source, result)
        else:
            self.feed("", source, result, width=self.model.ffn)

    @contextmanager
    def only_in(self, blocks: frozenset[int], kind: str) -> Iterator[bool]:
        """What follows is in these blocks alone; whether there are any."""
        before = (self.layers, self.frozen, self.unreached, self.adapted_layers)
        self.layers, self.block_kind = len(blocks), kind
        self.adapted_layers = len(blocks - self.model.frozen_layers)
        self.frozen = len(blocks) if self.model.adapters is not None else len(self.model.frozen_layers & blocks)
        self.unreached = sum(layer < self.model.first_reached for layer in blocks)
        yield bool(blocks)
        (self.layers, self.frozen, self.unreached, self.adapted_layers), self.block_kind = before, ""

    def mixture(self, source: str, result: str) -> None:
        """Each token through its experts, and through those that all share."""
        model = self.model
        dispatched = self.route(source)
        rows = self.routed_rows
        self.tensor("expert_output", rows * model.hidden)
        active, groups = (model.experts_per_token, model.experts), max(1, model.experts // self.layout.expert)
        self.feed("", dispatched, "expert_output", width=model.ffn, rows=rows, groups=groups, active=active)
        # What experts read is weighed already, or what they make is.
        weighing = ("routing_index",) if model.routing.on_inputs else ("routing_weights", "routing_index")
        mixed = self.tensor("mixed", self.routed_tokens * model.hidden) if model.shared_ffn else result
        # A weight's gradient is the product of what the down product read and its gradient: no result is needed.
        self.streaming(
            "combine",
            ("expert_output", *weighing),
            (mixed,),
            needs=weighing,
            also_kept=("expert_output",),
            eager_kernels=2,
        )
        if not model.shared_ffn:
            return
        shared = self.shared_expert(source)
        if model.shared_gate:
            self.streaming("shared_sum", (mixed, *shared), (result,), needs=shared, eager_kernels=3)
        else:
            self.streaming("shared_sum", (mixed, *shared), (result,), kind="residual")

    def shared_expert(self, source: str) -> tuple[str, ...]:
        """What every token goes through beside its experts: the names of its result, and of the score of its gate."""
        model = self.model
        # The gate's gradient is a sum over what it multiplies.
        level = SaveLevel.EVERYTHING if model.shared_gate else SaveLevel.TRANSIENT
        result = self.tensor("shared_output", self.routed_tokens * model.hidden, level)
        self.feed(SHARED, source, result, width=model.shared_ffn)
        if not model.shared_gate:
            return (result,)
        score = self.tensor("shared_score", self.tokens, SaveLevel.EVERYTHING)
        self.gemm("shared_router", source, (score,), depth=model.hidden, columns=1)
        return (result, score)

    def feed(
        self,
        prefix: str,
        source: str,
        result: str,
        *,
        width: int,
        rows: int | None = None,
        groups: int = 1,
        active: tuple[int, int] = (1, 1),
    ) -> None:
        """Two or three products with an activation between them; `prefix`: of the names of all that belongs to them."""
        model, rows = self.model, self.tokens if rows is None else rows
        inner = [self.tensor(f"{prefix}up", rows * width, SaveLevel.EVERYTHING)]
        if model.gated:
            inner.insert(0, self.tensor(f"{prefix}gate", rows * width, SaveLevel.EVERYTHING))
        self.gemm(
            f"{prefix}gate_up" if model.gated else f"{prefix}up",
            source,
            tuple(inner),
            depth=model.hidden,
            columns=width * len(inner),
            bias=model.ffn_bias,
            active=active,
            rows=rows,
            groups=groups,
        )
        activated = self.tensor(f"{prefix}activated", rows * width)
        self.streaming(
            f"{prefix}activation",
            tuple(inner),
            (activated,),
            needs=tuple(inner),
            eager_kernels=len(inner),
            function=model.activation,
        )
        self.gemm(
            f"{prefix}down",
            activated,
            (result,),
            depth=width,
            columns=model.hidden,
            bias=model.ffn_bias,
            active=active,
            rows=rows,
            groups=groups,
        )

    def route(self, source: str) -> str:
        """Choose each token's experts and lay the tokens out by expert; returns the tensor the experts read."""
        model, tokens = self.model, self.routed_tokens
        chosen = tokens * model.experts_per_token
        scores = self.tensor("router_scores", tokens * model.experts, SaveLevel.EVERYTHING)
        weights = self.tensor("routing_weights", chosen, SaveLevel.EVERYTHING, "fp32")
        index = self.tensor("routing_index", chosen, SaveLevel.EVERYTHING, "index")
        self.gemm(
            "router",
            source,
            (scores,),
            depth=model.hidden,
            columns=model.experts,
            bias=model.routing.bias,
            rows=tokens,
        )
        self.ops.append(
            Streaming(
                name="routing",
                inputs=(scores,),
                outputs=(weights, index),
                needs=(scores, index),
                weights=self.correction(),
                layers=self.layers,
                in_block=self.in_block,
                block_kind=self.block_kind,
                frozen=self.layers if model.routing.correction else 0,
                unreached=self.unreached,
                eager_kernels=3,
            )
        )
        dispatched = self.tensor("dispatched", self.routed_rows * model.hidden)
        if model.routing.on_inputs:
            read = (source, weights, index)
            self.streaming("dispatch", read, (dispatched,), needs=read, eager_kernels=2)
        else:
            self.streaming("dispatch", (source, index), (dispatched,), needs=(index,))
        return dispatched

    @property
    def routed_rows(self) -> int:
        """That the experts of a device read: of several expert ranks the most loaded one's."""
        # Those who share an expert all need what any of them was sent.
        sharing = self.layout.sharing_experts if self.layout.folded else 1
        model, even = self.model, self.routed_tokens * self.model.experts_per_token * sharing
        load = model.routing.load(model.experts, model.experts_per_token, self.layout.expert)
        return even if load == 1.0 else ceil(even * load)

    def correction(self) -> tuple[Weight, ...]:
        """What is added to the experts' shares for the choice alone, where there is any."""
        if not self.model.routing.correction:
            return ()
        shape = (CORRECTION_TERMS, self.model.experts)
        return (Weight(module="routing", kind="bias", shape=shape, buffer=True),)

    def head(self) -> None:
        model, tokens = self.model, self.tokens
        self.frozen = int(model.is_frozen(HEAD))
        if model.head == "classifier":
            self.classifier()
            return
        width = self.stream_tokens * model.hidden
        last = self.tensor("last", width)
        if model.final_norm:
            final = self.tensor("final", width)
            self.norm("final_norm", last, final)
            last = final
        if model.head == "masked":
            last = self.masked_transform(last)
        logits = self.tensor("logits", tokens * model.vocab)
        self.gemm("head", last, (logits,), depth=model.hidden, columns=model.vocab, bias=model.head_bias)
        self.loss(logits, rows=tokens)

    def masked_transform(self, source: str) -> str:
        """BERT's masked-word head: a dense layer, its activation and a norm before the decoder."""
        width = self.stream_tokens * self.model.hidden
        before, after = self.tensor("transformed", width), self.tensor("transformed_activated", width)
        hidden, bias = self.model.hidden, self.model.transform_bias
        self.gemm("transform", source, (before,), depth=hidden, columns=hidden, bias=bias)
        function = self.model.transform_activation or self.model.activation
        self.streaming("transform_activation", (before,), (after,), needs=(before,), function=function)
        final = self.tensor("transformed_normed" if self.model.final_norm else "final", width)
        self.norm("transform_norm", after, final)
        return final

    def classifier(self) -> None:
        """The first token, or the mean of all, through a dense layer and its activation, then to the labels."""
        hidden, labels, rows = self.model.hidden, self.model.labels or 1, self.sequences
        function = self.model.pooler_activation
        first = self.pooled_rows()
        pooled = self.tensor("pooled_raw", rows * hidden)
        # What the last product reads has the same name with a norm and without.
        activated = self.tensor("pooled_activated" if self.model.pooler_norm else "pooled", rows * hidden)
        bias = self.model.transform_bias
        self.gemm("pooler", first, (pooled,), rows=rows, depth=hidden, columns=hidden, bias=bias)
        # The slope of a tanh follows from its result.
        needs = (activated,) if function == "tanh" else (pooled,)
        self.streaming("pooler_activation", (pooled,), (activated,), needs=needs, function=function)
        if self.model.pooler_norm:
            normed = self.tensor("pooled", rows * hidden)
            self.norm("pooler_norm", activated, normed, rows=rows)
            activated = normed
        scores = self.tensor("logits", rows * labels)
        self.gemm("classifier", activated, (scores,), rows=rows, depth=hidden, columns=labels, bias=True)
        self.loss(scores, rows=rows)

    def forward_twice(self) -> tuple[str, ...]:
        """What of a pair's answers is weighed is known when all of both was scored: the head then runs again."""
        if self.model.objective != "preference":
            return ()
        last = max(index for index, op in enumerate(self.ops) if op.in_block)
        return tuple(op.name for op in self.ops[last + 1 :])

    def pooled_rows(self) -> str:
        """A row for each sequence; with a norm behind the blocks, of what that makes of them."""
        model, rows = self.model, self.sequences
        if model.pooling == "first":
            first = self.tensor("first", rows * model.hidden)
            if model.final_norm:
                last = self.tensor("last", rows * model.hidden)
                self.norm("final_norm", last, first, rows=rows)
            return first
        source = self.tensor("last", self.stream_tokens * model.hidden)
        if model.final_norm:
            final = self.tensor("final", self.stream_tokens * model.hidden)
            self.norm("final_norm", source, final)
            source = final
        first = self.tensor("first", rows * model.hidden)
        self.streaming(POOL, (source,), (first,), eager_kernels=2)
        return first

    def loss(self, logits: str, *, rows: int) -> None:
        loss = self.tensor("loss", rows, number_format="fp32")
        self.streaming("loss", (logits,), (loss,), kind="cross_entropy", needs=(logits,), eager_kernels=2)
