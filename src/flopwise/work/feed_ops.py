"""Feed-forward parts: dense ones, mixtures with their routing, and the experts that all tokens share."""

from __future__ import annotations

from math import ceil

from flopwise.work.block_kinds import DENSE, MIXTURE
from flopwise.work.op import SaveLevel, Streaming, Weight
from flopwise.work.product_ops import SHARED, ProductOps
from flopwise.work.routing import CORRECTION_TERMS


class FeedOps(ProductOps):
    """From a branch's input to the feed-forward part's result."""

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
