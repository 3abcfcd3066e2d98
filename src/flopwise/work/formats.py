"""Number formats: how many bytes each owner spends on a parameter, and what the matrix units multiply in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from flopwise.base.errors import FlopwiseError, unknown_name

WIDTH_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Bytes that a number of each format takes in memory."""

NARROW_BYTES = {"fp8": 1.0, "mxfp8": 1.0 + 1.0 / 32.0, "nvfp4": 0.5 + 1.0 / 16.0, "mxfp4": 0.5 + 1.0 / 32.0}
"""Formats that the blocks' products alone may be in: bytes of a number, with its part of its block's scale of one byte.
mxfp8 and mxfp4 have a scale for 32 neighbours (OCP Microscaling formats 1.0), nvfp4 one for 16 (and one in fp32 for the
whole tensor, which is not counted)."""
OPERAND_BYTES: dict[str, float] = {**WIDTH_BYTES, **NARROW_BYTES}
"""Bytes that an operand of a product takes of a number."""

Scaling = Literal["rowwise", "tensorwise", "delayed"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
"""Numbers of an fp8 operand that share a scale. rowwise: those that are summed over, so that what is summed over twice
is cast twice (torchao's rowwise, DeepSpeed's, ours). tensorwise: all of the tensor, whose largest is looked for first
(torchao's default, Transformer Engine's current scaling). delayed: the same, with the largest of steps before."""

FP8_MULTIPLE = 16
"""All sides of a product in fp8 are multiples of this: matrix units read sixteen bytes at once."""

QUANTISED_BITS = {"nf4": 4, "int8": 8, "fp8": 8}
"""Formats that frozen matrices may be kept in, dequantised where they are used: bits of a number."""
QUANTISED_BLOCK = {"nf4": 64, "int8": None, "fp8": None}
"""Neighbours in a row that share a scale in fp32; None: all of the row."""
SCALE_BYTES = 4

Copy = Literal["master", "average"]
COPIES: tuple[Copy, ...] = get_args(Copy)
ROLES = ("matrix", "compute", "weights", "gradients", "moments", "master", "average", "base")
"""The kinds of tensor that have a format of their own."""
RECIPE = ("scaling", "gathered")
"""How products in fp8 come by their operands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """A number-format policy: one format for each kind of tensor."""

    name: str
    matrix: str
    """What matrix products multiply in. fp8 and what is narrower are for the blocks' alone: attention and head keep to
    `compute`."""
    compute: str
    """Activations."""
    weights: str
    gradients: str
    moments: str
    """Each of the optimizer's moments."""
    master: str | None = None
    """A second, more exact copy of the weights; None: there is none."""
    average: str | None = None
    """A mean of the weights over the steps, the last ones counting most; None: there is none."""
    base: str | None = None
    """Of weights that are not trained; None: as those that are. Where it is quantised, so are the blocks' matrices, and
    everything else that is frozen is as the activations are."""
    scaling: Scaling | None = None
    """Of products in fp8; None: as the framework does, else for each row, or for tensors that are gathered in fp8.
    Narrower formats scale blocks."""
    gathered: str | None = None
    """What the blocks' weights are gathered from their shards in, cast before: fp8; None: in no less than `compute`."""

    def __post_init__(self) -> None:
        self._check_fp8()
        for field in ROLES:
            value = getattr(self, field)
            more = (*(QUANTISED_BITS if field == "base" else ()), *(NARROW_BYTES if field == "matrix" else ()))
            if value is not None and value not in WIDTH_BYTES and value not in more:
                raise unknown_name(f"number format (for {field})", value, WIDTH_BYTES, hint=f"--precision {field}=bf16")
        if OPERAND_BYTES[self.matrix] > WIDTH_BYTES[self.compute]:
            raise FlopwiseError(
                f"products in {self.matrix} cannot read activations in {self.compute}",
                why="a product multiplies what the activations hold, or fewer bits of it",
                hint=f"matrix={self.compute}, or compute={self.matrix}",
            )

    def _check_fp8(self) -> None:
        if self.scaling is not None and self.scaling not in SCALINGS:
            raise unknown_name("scaling", str(self.scaling), SCALINGS, hint=f"scaling={' | '.join(SCALINGS)}")
        if self.scaling is not None and self.matrix != "fp8":
            raise FlopwiseError(
                f"scaling={self.scaling} of products in {self.matrix}",
                why="products in fp8 alone have a scale for each row or tensor",
                hint=f"matrix=fp8,scaling={self.scaling}",
            )
        if self.gathered is not None and (self.gathered != "fp8" or self.matrix != "fp8"):
            raise FlopwiseError(
                f"weights gathered in {self.gathered} for products in {self.matrix}",
                why="what is cast before it is gathered is cast into what is multiplied: fp8",
                hint="matrix=fp8,scaling=tensorwise,gathered=fp8",
            )
        if self.gathered is not None and self.scaling == "rowwise":
            raise FlopwiseError(
                "weights gathered in fp8 with a scale for each row",
                why="backward multiplies the columns, whose scales are others: the wide weights are needed there",
                hint="scaling=tensorwise, or without gathered=fp8",
            )

    @property
    def scaled_by(self) -> str:
        """What shares a scale in the products' format: one of `SCALINGS`, or blocks."""
        if self.matrix != "fp8":
            return "blocks"
        return self.scaling or ("tensorwise" if self.gathered else "rowwise")

    @property
    def compute_bytes(self) -> int:
        return WIDTH_BYTES[self.compute]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """What is remembered of the weights that begins as they are."""
        return tuple(copy for copy in COPIES if getattr(self, copy))

    def kept_as(self, *, in_block: bool, matrix: bool) -> str:
        """The format that a frozen weight is kept in."""
        base = self.base or self.weights
        return base if base not in QUANTISED_BITS or (in_block and matrix) else self.compute

    @property
    def statistics_bytes(self) -> int:
        """Of what norms and attention keep to redo their sums, and of sums over chunks: fp32, or wider."""
        return max(WIDTH_BYTES["fp32"], self.compute_bytes)

    @property
    def weights_are_coarse(self) -> bool:
        """Whether weights are in bf16 alone: rounded to nearest, small steps would leave them as they are."""
        return self.weights == "bf16" and self.master is None

    @property
    def sensitive(self) -> str:
        """What attention and the products outside the blocks multiply in."""
        return self.compute if self.matrix in NARROW_BYTES else self.matrix


def _policy(name: str, **formats: str) -> Formats:
    compute = formats.get("compute", "bf16")
    return Formats(
        name=name,
        matrix=formats.get("matrix", compute),
        compute=compute,
        weights=formats.get("weights", compute),
        gradients=formats.get("gradients", compute),
        moments=formats.get("moments", compute),
        master=formats.get("master"),
    )


POLICIES: dict[str, Formats] = {
    policy.name: policy
    for policy in (
        # Everything in bf16, 8 bytes a parameter with AdamW; what `flopwise train` is made for.
        _policy("bf16"),
        # bf16 weights and gradients beside fp32 master weights and moments, 16 bytes.
        _policy("bf16-mixed", moments="fp32", master="fp32"),
        # fp32 state, bf16 products: torch.autocast, FSDP's default mixed precision. 16 bytes.
        _policy("bf16-amp", weights="fp32", gradients="fp32", moments="fp32"),
        # As above in fp16, for devices older than bf16.
        _policy("fp16-mixed", compute="fp16", moments="fp32", master="fp32"),
        _policy("fp16-amp", compute="fp16", weights="fp32", gradients="fp32", moments="fp32"),
        _policy("fp32", compute="fp32"),
        # fp32 everywhere, products rounded to tf32 on the way into the matrix unit.
        _policy("tf32", compute="fp32", matrix="tf32"),
        # bf16 state, the blocks' products in fp8.
        _policy("fp8", matrix="fp8"),
        # The same in formats whose scales are for a few neighbours, on devices that multiply in them.
        _policy("mxfp8", matrix="mxfp8"),
        _policy("nvfp4", matrix="nvfp4"),
    )
}


def parse_formats(text: str) -> Formats:
    """A policy by name (`bf16-mixed`), or a policy with changes: `bf16,gradients=fp32,master=fp32`."""
    text = text.lower()
    head, *changes = [part.strip() for part in text.split(",")]
    if "=" in head:
        head, changes = "bf16", [head, *changes]
    if head not in POLICIES:
        raise unknown_name(
            "precision", head, POLICIES, hint=f"--precision {' | '.join(POLICIES)}, or key=format changes"
        )
    base = POLICIES[head]
    values = {field: getattr(base, field) for field in (*ROLES, *RECIPE)}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in (*ROLES, *RECIPE) or not value:
            raise FlopwiseError(
                f"cannot read {change!r} in --precision {text}",
                why=f"a change is one of {', '.join((*ROLES, *RECIPE))} followed by = and what it is to be",
                hint="--precision bf16,gradients=fp32",
            )
        values[key] = None if key in ("master", "average", "base", *RECIPE) and value == "none" else value
    return replace(base, **values, name=text if changes else head)


def with_base(formats: Formats, base: str) -> Formats:
    """The same with frozen weights in another format."""
    check_base_name(base)
    others = [part for part in formats.name.split(",") if not part.startswith("base=")]
    return parse_formats(",".join([*others, f"base={base}"]))


def check_base_name(base: str) -> None:
    """Refuse a format of frozen weights that is none."""
    if base not in WIDTH_BYTES and base not in QUANTISED_BITS:
        known = ("nf4", "int8", "fp8", "bf16", "fp32")
        raise unknown_name("format of frozen weights", base, known, hint=f"--base {' | '.join(known)}")


def with_average(formats: Formats) -> Formats:
    """The same with a mean of the weights, in fp32 at least."""
    exact = "fp64" if formats.weights == "fp64" else "fp32"
    return formats if formats.average else parse_formats(f"{formats.name},average={exact}")


def quantised_bytes(rows: int, depth: int, number_format: str) -> int:
    """Bytes of a matrix whose rows are quantised, each beginning at a byte: its codes, and a scale for each block."""
    block = QUANTISED_BLOCK[number_format] or depth
    return rows * (-(-depth * QUANTISED_BITS[number_format] // 8) + SCALE_BYTES * -(-depth // block))
