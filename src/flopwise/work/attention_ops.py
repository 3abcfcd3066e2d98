"""Attention: queries, keys and values of the block's input or of latents, what they attend to, and the gate behind."""

from __future__ import annotations

from flopwise.work.latent import LatentAttention
from flopwise.work.op import Attention, SaveLevel, Weight
from flopwise.work.product_ops import ProductOps
from flopwise.work.work import SCORES

QUERY_LATENT_NORM, LATENT_NORM, SPREAD_KEY = "query_latent_norm", "latent_norm", "spread_key"
"""Of latent attention: norms of its latents, and what gives every head's key the channels that all have in common."""
TEMPERATURE = "temperature"
"""What queries are multiplied by, by their position."""
GATING = "gating"
"""The gate behind attention."""


class AttentionOps(ProductOps):
    """From a branch's input to attention's result on its way to the residual stream."""

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
