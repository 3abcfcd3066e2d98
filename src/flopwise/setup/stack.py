"""`Stack`: what a training framework adds to, or takes from, what the kernels could do.

A stack is data: at most six numbers, each with how it was found. A number that a stack does not name is neutral: the
framework is as good there as the kernels and the network of the hardware description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.setup.efficiency import FLASH_KERNELS
from flopwise.setup.parallel import Overlap, check_overlap
from flopwise.setup.words import Fusion
from flopwise.work.formats import SCALINGS, Scaling
from flopwise.work.op import AttentionKernel

NO_STACK = "kernels"
"""The name for what the kernels and the network allow, no framework in the way."""
MOST_CONSTANTS = 6
MOST_BUCKET_MIB = 1e6
ANY = "any"
"""Architecture: all that have no line of their own."""
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3

NEUTRAL: dict[str, float] = {
    # Time of matrix products and of attention, over what the hardware description says its kernels take.
    "products": 1.0,
    "attention": 1.0,
    # Time of kernels bound by bytes, over the same.
    "streaming": 1.0,
    # Time of casts into fp8 with a scale for each row and each column, over that of other products' casts.
    "rowwise": 1.0,
    # Host seconds to start the kernels of one layer once (forward; backward the same again). A floor, not a sum.
    "host_layer_s": 0.0,
    # Host seconds for each collective of a layer's tensor ranks, and more for each of these ranks when the job spans
    # several islands of the nearest network. Part of the same floor.
    "tensor_call_s": 0.0,
    "tensor_rank_s": 0.0,
    # Seconds of every step in which the device has nothing to do.
    "step_s": 0.0,
    # Time of collectives, over what the network's rate and latency give.
    "network": 1.0,
    # Share of a hidden collective's time that the compute beside it loses all the same.
    "interference": 0.0,
    # Memory that activations take, over what the description keeps.
    "activations": 1.0,
}
"""The constants that a stack may name, and the value that changes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A number and how it was found."""

    value: float
    how: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A training framework, as far as time and memory go."""

    name: str
    title: str
    attention_kernel: AttentionKernel = "flash"
    flash_kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Architecture, or `any` → families of flash attention's kernels that it calls there, the first that a device has
    and that can being taken. Nothing: as the device is described."""
    fusion: Fusion = "fused"
    fp8_scaling: Scaling | None = None
    """How operands of products in fp8 are scaled where a set-up does not say; None: for each row."""
    gradient_overlap: bool = True
    """Gradients are reduced layer by layer behind the last micro-batch's backward; False: after it."""
    tensor_overlap: bool = False
    """Collectives of tensor parallelism run behind the weight gradients' products."""
    overlap: tuple[Overlap, ...] = ()
    """Exchanges that run beside kernels; those of tensor ranks then in pieces, forward and backward."""
    bucket_mib: float = 0.0
    """Gradients are summed over data ranks in messages of so many MiB; 0: a layer's at once."""
    gathered_kept: bool = False
    """Sequence parallelism: products keep their gathered input instead of gathering it again in backward."""
    reduce_always: bool = True
    """zero 3: gradients are reduced after each micro-batch; False: only after the last, and held whole until then."""
    parted_hops: bool = False
    """A stage sends each tensor rank a part of its output, and they gather it; False: all of it to each."""
    dropout: bool = False
    """Masks of dropout are kept beside the activations, and eager attention's scores a second time."""
    reduce_staged: bool = True
    """The same with stages; False: a pipeline's gradients are only reduced after the last micro-batch."""
    plain_loss: bool = False
    """The loss holds fp32 logits, their log-softmax and the gradient of both, even where `fusion` is fused."""
    kept_products: float = 0.0
    """Recompute `attention`: share of the products whose results are kept as well, and not made again."""
    fused_loss: bool = False
    """The loss is one kernel that keeps nothing but the logits, even where `fusion` is eager."""
    source: str
    """What says that the framework works this way."""
    constants: dict[str, Constant] = field(default_factory=dict)
    """By name; `attention.Hopper` is the constant `attention` on devices of that architecture."""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_overlap(self.overlap)
        if self.fp8_scaling is not None and self.fp8_scaling not in SCALINGS:
            raise unknown_name("fp8_scaling", str(self.fp8_scaling), SCALINGS, hint=f"one of {', '.join(SCALINGS)}")
        if not 0 <= self.kept_products <= 1:
            raise FlopwiseError(f"kept_products is a share, got {self.kept_products!r}", hint="0.5: every second one")
        if not 0 <= self.bucket_mib <= MOST_BUCKET_MIB:
            raise FlopwiseError(f"bucket_mib cannot be {self.bucket_mib!r}", hint="25, or 0 for a layer at once")
        for family in (name for names in self.flash_kernels.values() for name in names):
            if family not in FLASH_KERNELS:
                raise unknown_name("attention kernel", family, FLASH_KERNELS, hint=f"one of {', '.join(FLASH_KERNELS)}")
        for key, constant in self.constants.items():
            name = key.partition(".")[0]
            if name not in NEUTRAL:
                raise unknown_name("constant", name, NEUTRAL, hint=f"one of {', '.join(NEUTRAL)}")
            least = LEAST_FACTOR if NEUTRAL[name] else 0.0
            if not least <= constant.value <= MOST_FACTOR:
                raise FlopwiseError(
                    f"{key} of the stack {self.name} must lie between {least:g} and {MOST_FACTOR:g}",
                    why="a factor multiplies time or memory" if least else "it is added to a time",
                    hint=f"value = {NEUTRAL[name]:g} changes nothing",
                )

    def check_few(self) -> None:
        """Refuse a framework with more constants than describe one."""
        if len(self.constants) > MOST_CONSTANTS:
            raise FlopwiseError(
                f"the stack {self.name} has {len(self.constants)} constants",
                why=f"with more than {MOST_CONSTANTS} a stack describes its measurements, not a framework",
                hint="leave out those that matter least",
            )

    def value(self, name: str) -> float:
        """A constant's value; the neutral one where the stack does not name it."""
        return self.constants[name].value if name in self.constants else NEUTRAL[name]

    def flash_kernels_on(self, architecture: str) -> tuple[str, ...]:
        """Families of flash attention's kernels that it calls on an architecture."""
        own = (names for key, names in self.flash_kernels.items() if key.lower() == architecture.lower())
        return next(own, self.flash_kernels.get(ANY, ()))

    def on(self, architecture: str) -> Stack:
        """The same with the constants that hold on an architecture."""
        own = {key.partition(".")[0]: value for key, value in self.constants.items() if _holds(key, architecture)}
        shared = {key: value for key, value in self.constants.items() if "." not in key}
        return replace(self, constants=shared | own)

    def with_values(self, values: Mapping[str, float]) -> Stack:
        """The same with other values of some constants."""
        changed = {key: Constant(value=value, how="being fitted") for key, value in values.items()}
        return replace(self, constants=self.constants | changed)


def _holds(key: str, architecture: str) -> bool:
    return key.partition(".")[2].lower() == architecture.lower()
