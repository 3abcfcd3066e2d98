"""What makes a transformer's operators: one device's share of it, tensors by name, streaming operators and norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from flopwise.work.layout import Layout
from flopwise.work.lengths import Lengths
from flopwise.work.op import AttentionKernel, Op, SaveLevel, Streaming, StreamingKind, Tensor, Weight
from flopwise.work.recurrence import Recurrence
from flopwise.work.transformer import Transformer

Format = Literal["compute", "fp32", "index"]


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


class OpMaker:
    """Collects operators and tensors of one device's part of a model."""

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

    def tensor(
        self, name: str, elements: int, level: SaveLevel = SaveLevel.TRANSIENT, number_format: Format = "compute"
    ) -> str:
        # What is made again at another level is the same tensor.
        assert name not in self.tensors or self.tensors[name].elements == elements, f"two tensors are called {name}"
        self.tensors[name] = Tensor(name=name, elements=elements, level=level, format=number_format)
        self.copies[name] = self.layers - self.unreached if self.in_block else self.layers
        return name

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

    def begin_at(self, layer: int) -> None:
        """What is described from here on, the blocks from this one on have."""
        model, self.first_layer = self.model, layer
        self.layers = model.layers - layer
        of_frozen = sum(frozen >= layer for frozen in model.frozen_layers)
        self.frozen = self.layers if model.adapters is not None else of_frozen
        self.unreached = max(0, model.first_reached - layer)

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
