"""Products with a transformer's matrices, and what adapters beside them make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from flopwise.work.adapters import DIRECTION, DOWN, LOW, MAGNITUDE, RESULTS, UP, Target
from flopwise.work.block_kinds import DENSE
from flopwise.work.layer_names import inner_names, targets_of
from flopwise.work.op import Gemm, SaveLevel, Streaming, Weight
from flopwise.work.op_maker import OpMaker

SHARED = "shared_"
"""What the names of shared experts' operators and tensors begin with."""


def _direction(result: str) -> str:
    """What a result is called before its magnitude."""
    return f"{result}_{DIRECTION}"


def split_prefix(product: str) -> tuple[str, str]:
    """What the name of a product of shared experts, or of a block without experts, begins with, and the rest."""
    prefix = next((each for each in (SHARED, f"{DENSE}_") if product.startswith(each)), "")
    return prefix, product.removeprefix(prefix)


class _Copies(NamedTuple):
    """How often a product is there: its rows, among so many experts, and which share of them a token uses."""

    rows: int
    groups: int
    active: tuple[int, int]


class ProductOps(OpMaker):
    """A product is one operator, or with adapters several: their narrow products lie around the wide one."""

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
