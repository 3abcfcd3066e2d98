"""Both ends of a transformer: the embedding in front of its blocks, and the head with the loss behind them."""

from __future__ import annotations

from math import ceil

from flopwise.work.adapters import EMBEDDING, HEAD
from flopwise.work.op import SaveLevel, Weight
from flopwise.work.product_ops import ProductOps

POOL = "pool"
"""The mean of a sequence's tokens, for a classifier."""
CHOOSE = "choose"
"""The tokens that have a loss, where not all do: what is behind the blocks is computed for them alone."""


class EndOps(ProductOps):
    """What is there once, and not in each block."""

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

    def head(self) -> None:
        model, tokens = self.model, self.tokens
        self.frozen = int(model.is_frozen(HEAD))
        if model.head == "classifier":
            self.classifier()
            return
        last = self.tensor("last", self.stream_tokens * model.hidden)
        rows, tokens = self.with_loss(self.stream_tokens), self.with_loss(tokens)
        if model.loss_share < 1:
            chosen = self.tensor("chosen", rows * model.hidden)
            self.streaming(CHOOSE, (last,), (chosen,), kind="choose")
            last = chosen
        if model.final_norm:
            final = self.tensor("final", rows * model.hidden)
            self.norm("final_norm", last, final, rows=rows)
            last = final
        if model.head == "masked":
            last = self.masked_transform(last, rows)
        logits = self.tensor("logits", tokens * model.vocab)
        self.gemm("head", last, (logits,), rows=tokens, depth=model.hidden, columns=model.vocab, bias=model.head_bias)
        self.loss(logits, rows=tokens)

    def with_loss(self, tokens: int) -> int:
        """Of so many tokens, those that have a loss."""
        return tokens if self.model.loss_share == 1 else ceil(self.model.loss_share * tokens)

    def masked_transform(self, source: str, rows: int) -> str:
        """BERT's masked-word head: a dense layer, its activation and a norm before the decoder."""
        width = rows * self.model.hidden
        before, after = self.tensor("transformed", width), self.tensor("transformed_activated", width)
        hidden, bias = self.model.hidden, self.model.transform_bias
        self.gemm(
            "transform", source, (before,), rows=self.with_loss(self.tokens), depth=hidden, columns=hidden, bias=bias
        )
        function = self.model.transform_activation or self.model.activation
        self.streaming("transform_activation", (before,), (after,), needs=(before,), function=function)
        final = self.tensor("transformed_normed" if self.model.final_norm else "final", width)
        self.norm("transform_norm", after, final, rows=rows)
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

    def pooled_rows(self) -> str:
        """A row for each sequence; with a norm behind the blocks, of what that makes of them."""
        model, rows = self.model, self.sequences
        # A norm behind the blocks is theirs: beside adapters it is as frozen as they are.
        head_frozen, self.frozen = self.frozen, int(model.adapters is not None or bool(self.frozen))
        first = self._pooled(rows)
        self.frozen = head_frozen
        return first

    def _pooled(self, rows: int) -> str:
        model = self.model
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

    def forward_twice(self) -> tuple[str, ...]:
        """What of a pair's answers is weighed is known when all of both was scored: the head then runs again."""
        if self.model.objective != "preference":
            return ()
        last = max(index for index, op in enumerate(self.ops) if op.in_block)
        return tuple(op.name for op in self.ops[last + 1 :])
