"""A state along the sequence in the place of attention: the convolution in front, the scan, the norm with a gate."""

from __future__ import annotations

from flopwise.work.op import SaveLevel, Scan, Weight
from flopwise.work.product_ops import ProductOps
from flopwise.work.recurrence import Recurrence

CONVOLUTION, SCAN, GATED_NORM = "convolution", "scan", "mix_norm"
"""Of blocks that carry a state: the convolution in front of it, what carries it, and the norm with a gate behind it."""
STEP_BIAS, DECAY, SKIP = "steps", "decay", "skip"
"""Weights of a scan: what is added to the steps, logarithms of how fast states fade, and the part of the values that
goes past the state."""


class StateOps(ProductOps):
    """From a branch's input to what was read of its states, on its way to the residual stream."""

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
