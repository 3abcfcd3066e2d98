"""`Setup`: what is asked of a prediction, a plan or a training; `SettledSetup`: the same with nothing left open.

Whatever has to agree between two of its fields is checked here, when one is made, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.setup.efficiency import FLASH_KERNELS
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel
from flopwise.setup.stack import NO_STACK, Stack
from flopwise.setup.trained import check_base, trains_in_shards, trains_partly, usual_mask_share
from flopwise.setup.words import FUSIONS, Fusion
from flopwise.work.describe import check_lengths
from flopwise.work.formats import NARROW_BYTES, POLICIES, Formats
from flopwise.work.lengths import Lengths
from flopwise.work.model import Model
from flopwise.work.op import ATTENTION_KERNELS, AttentionKernel
from flopwise.work.optimizers import OPTIMIZERS, WHOLE_TENSORS, Optimizer
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES, Recompute

Narrowed = TypeVar("Narrowed", bound="Setup")
ONE_DEVICE = Parallel()
DEFAULT_SEQUENCE_TOKENS = 8192

COUNTS = ("sequence_tokens", "batch_sequences", "micro_batch_sequences", "device_cap_bytes")
WORDS: dict[str, tuple[str | None, ...]] = {
    "recompute": (*RECOMPUTE_POLICIES, None),
    "attention": ATTENTION_KERNELS,
    "fusion": FUSIONS,
    "optimizer": OPTIMIZERS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One optimizer step over a batch of sequences; None where flopwise is to choose."""

    model: Model
    hardware: Hardware
    hardware_name: str = ""
    """As the user named it; nothing: by its own name."""
    sequence_tokens: int | None = None
    """Of each sequence, or of the longest that there may be."""
    lengths: Lengths | None = None
    """How long sequences are, and whether what is left of `sequence_tokens` is computed; None: all have so many."""
    batch_sequences: int | None = None
    """Of all devices together."""
    micro_batch_sequences: int | None = None
    """Sequences that a data rank runs at once, their gradients being summed; the last of them may have fewer."""
    formats: Formats | None = None
    recompute: Recompute | None = None
    attention: AttentionKernel = "flash"
    flash_kernel: str | None = None
    """Family of kernels that flash attention calls; None: the stack's, or the first of the device's description."""
    fusion: Fusion = "fused"
    optimizer: Optimizer = "adamw"
    parallel: Parallel = ONE_DEVICE
    stack: Stack | None = None
    """None: what the kernels and the network allow."""
    device_cap_bytes: int | None = None
    """Of each device; None: all it has but a reserve."""
    host_cap_bytes: int | None = None
    """None: most of what the hardware's description says that there is."""
    clip: bool = False
    """Gradients are clipped by their global norm, so that no update can come before the last of them."""
    cuda_graphs: bool = False
    """A trainer of `predict` replays captured steps, so that its host does not start every kernel."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (value.__class__ is not int or value < 1):
                raise FlopwiseError(f"{name} must be a whole number of at least 1, got {value!r}", hint="None: auto")
        for name, known in WORDS.items():
            if getattr(self, name) not in known:
                words = [word for word in known if word]
                raise unknown_name(name, str(getattr(self, name)), words, hint=f"one of {', '.join(words)}")
        if self.flash_kernel is not None:
            self._check_flash_kernel(self.flash_kernel)
        # What an anchor scales is no framework.
        if self.stack is not None and self.stack.name != NO_STACK and isinstance(self.model, Transformer):
            object.__setattr__(self, "model", _behind(self.stack, self.model))
        if self.device_cap_bytes is not None:
            check_device_cap(self.hardware, self.device_cap_bytes)
        if self.batch_sequences is not None:
            self._check_batch(self.batch_sequences, self.parallel.data)
        if self.lengths is not None:
            self._check_lengths(self.lengths)
        if self.formats is not None:
            check_base(self.model, self.formats.base)
        if self.optimizer in WHOLE_TENSORS and self.parallel.devices > 1:
            raise FlopwiseError(
                f"{self.optimizer} on several devices",
                why="its update looks at whole matrices, and how several devices would bring them together is not "
                "described",
                hint="--optimizer adamw, or without --gpus",
            )
        if trains_partly(self.model) and not self.is_plain:
            self._check_partly()

    def _check_partly(self) -> None:
        """Refuse what is not described of a model that is trained in part, on several devices or behind a framework."""
        name = self.model.name
        if self.stack is not None:
            raise FlopwiseError(
                f"{name} behind a framework",
                why="nobody has measured how frameworks train a model in part",
                hint="without --stack, or without --lora and --freeze",
            )
        if not trains_in_shards(self.parallel):
            raise FlopwiseError(
                f"{name} with {self.parallel.label}",
                why="of a model that is trained in part, only devices that have sequences of their own are described",
                hint="--parallel zero3, or without --lora and --freeze",
            )

    def _check_flash_kernel(self, family: str) -> None:
        known = self.hardware.efficiency.attention.families
        if self.attention != "flash":
            raise FlopwiseError(
                f"{family} is a kernel of flash attention, and attention is {self.attention}",
                hint=f"--attention {family}",
            )
        if family not in known:
            raise FlopwiseError(
                f"there are no rates of {family} attention on {self.hardware.name}",
                why=f"its description has those of {', '.join(known)}" if known else "nobody says whose rates it has",
                hint=f"--attention {' or '.join(known)}" if known else "--attention flash",
            )

    def _check_lengths(self, lengths: Lengths) -> None:
        if self.sequence_tokens is not None and lengths.longest > self.sequence_tokens:
            raise FlopwiseError(
                f"a sequence of {lengths.longest:,} tokens is longer than --seq {self.sequence_tokens:,}",
                why="sequences have at most so many",
                hint=f"--seq {lengths.longest}",
            )
        if lengths.layout == "packed" and not self.is_plain:
            raise FlopwiseError(
                "packed sequences are for one device without a framework",
                why="what runs on several devices, and what frameworks run, fills sequences up",
                hint="--layout padded, or --layout longest",
            )
        check_lengths(self.model, lengths, self.attention)

    def _check_batch(self, batch: int, ranks: int) -> None:
        micro, mine = self.micro_batch_sequences, -(-batch // ranks)
        if micro is not None and micro > batch:
            raise FlopwiseError(
                f"a micro-batch of {micro} is larger than the batch of {batch}",
                why="a step runs the batch in micro-batches",
                hint=f"--micro {batch} or less",
            )
        if batch < ranks:
            raise FlopwiseError(
                f"a batch of {batch:,} sequences is less than one for each of {ranks:,} data ranks",
                why="a data rank without a sequence has nothing to do",
                hint=f"--batch {ranks}, or fewer data ranks",
            )
        if micro is not None and micro > mine:
            raise FlopwiseError(
                f"a micro-batch of {micro:,} is larger than a data rank's {mine:,} of the batch's sequences",
                why=f"each of {ranks:,} data ranks runs its own part in micro-batches",
                hint=f"--micro {mine} or less",
            )

    @property
    def flash_kernels(self) -> tuple[str, ...]:
        """Families that flash attention calls, the first that a device has and that can; nothing: as it describes."""
        if self.flash_kernel is not None:
            return (self.flash_kernel,)
        return self.stack.flash_kernels_on(self.hardware.device.architecture) if self.stack else ()

    @property
    def attention_word(self) -> str:
        """Attention as it is asked for: `flash`, `eager`, or a family of flash attention's kernels."""
        return self.flash_kernel or self.attention

    @property
    def is_plain(self) -> bool:
        """Whether it is one device with everything on it and no framework in the way."""
        return self.stack is None and self.parallel == ONE_DEVICE

    def settle(
        self, *, sequence_tokens: int, batch_sequences: int, micro: int, formats: Formats, recompute: Recompute
    ) -> SettledSetup:
        """The same with what it may leave open."""
        if self.stack is not None:
            formats = scaled_as(formats, self.stack)
        return _narrow(
            self,
            SettledSetup,
            sequence_tokens=sequence_tokens,
            batch_sequences=batch_sequences,
            micro_batch_sequences=micro,
            formats=formats,
            recompute=recompute,
        )

    def cap(self, *, sequence_tokens: int, formats: Formats, device: int, host: int) -> CappedSetup:
        """The same with what a plan of one device has to know."""
        return _narrow(
            self,
            CappedSetup,
            sequence_tokens=sequence_tokens,
            formats=formats,
            device_cap_bytes=device,
            host_cap_bytes=host,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledSetup(Setup):
    """A set-up that says all that a step's time and memory depend on."""

    sequence_tokens: int
    batch_sequences: int
    micro_batch_sequences: int
    formats: Formats
    recompute: Recompute = "none"

    @property
    def batch_tokens(self) -> int:
        """Without padding."""
        whole = self.padded_tokens
        return whole if self.lengths is None else self.lengths.batch_tokens(self.batch_sequences)

    @property
    def padded_tokens(self) -> int:
        """Of a batch whose sequences are filled up to as many tokens as they may have."""
        return self.batch_sequences * self.sequence_tokens

    @property
    def width(self) -> int:
        """To how many tokens sequences are filled up; packed ones have room for so many each."""
        if self.lengths is None:
            return self.sequence_tokens
        return self.lengths.width(self.sequence_tokens, self.micro_batch_sequences)

    @property
    def packed(self) -> Lengths | None:
        """The lengths of sequences that are computed without padding."""
        return self.lengths if self.lengths and self.lengths.layout == "packed" else None

    @property
    def rank_sequences(self) -> int:
        """Of the batch, what the fullest data rank has."""
        return -(-self.batch_sequences // self.parallel.data)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches in a step of a data rank, the last one perhaps smaller."""
        return -(-self.rank_sequences // self.micro_batch_sequences)

    def micro_batches(self) -> tuple[tuple[int, int], ...]:
        """(sequences, how many such) of the fullest data rank: 48 in elevens is four of 11 and one of 4."""
        whole, rest = divmod(self.rank_sequences, self.micro_batch_sequences)
        return ((self.micro_batch_sequences, whole), *(((rest, 1),) if rest else ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class CappedSetup(Setup):
    """A set-up for one device, that a plan is looked for under two caps; its micro-batch is a round's sequences."""

    sequence_tokens: int
    formats: Formats = POLICIES["bf16"]
    device_cap_bytes: int
    host_cap_bytes: int = 0

    def __post_init__(self) -> None:
        # Without arguments, `super` would look for the class that slots have replaced.
        Setup.__post_init__(self)
        if self.formats.matrix in NARROW_BYTES and self.formats.matrix != "fp8":
            raise FlopwiseError(
                f"a plan for one device cannot multiply in {self.formats.matrix}",
                why="flopwise's own trainer has no kernels for it",
                hint="--precision fp8, or --gpus 1 for a framework that has them",
            )
        refuse_fp8(self.model, self.formats)
        if self.formats.scaling not in (None, "rowwise") or self.formats.gathered is not None:
            raise FlopwiseError(
                f"a plan for one device cannot be {self.formats.name}",
                why="flopwise's own trainer has a scale for each row and column, and gathers nothing",
                hint="--precision fp8, or --stack with the framework that scales so",
            )

    def _check_lengths(self, lengths: Lengths) -> None:
        Setup._check_lengths(self, lengths)
        if lengths.layout != "packed":
            raise FlopwiseError(
                f"a plan for one device cannot have sequences {lengths.layout}",
                why="flopwise's own trainer computes no padding",
                hint="--layout packed, or --stack with the framework that runs it",
            )


def _behind(stack: Stack, model: Transformer) -> Transformer:
    """The model as frameworks run it, and are measured: with the head of all tokens."""
    if model.loss_share < 1 and (model.head == "language" or model.loss_share != usual_mask_share(model)):
        raise FlopwiseError(
            f"{model.name}: loss_share = {model.loss_share:g} behind {stack.name}",
            why="frameworks compute the head of every token",
            hint="without --loss-share, or without --stack",
        )
    return replace(model, loss_share=1.0) if model.loss_share < 1 else model


def scaled_as(formats: Formats, stack: Stack) -> Formats:
    """Formats whose products in fp8 are scaled as a framework does it, where they do not say how."""
    said = formats.scaling is not None or (formats.gathered is not None and stack.fp8_scaling == "rowwise")
    if formats.matrix != "fp8" or said:
        return formats
    return replace(formats, scaling=stack.fp8_scaling)


def _narrow(setup: Setup, kind: type[Narrowed], **settled: object) -> Narrowed:
    return kind(**{**{name: getattr(setup, name) for name in FIELDS}, **settled})


FIELDS = tuple(field.name for field in fields(Setup))


def read_attention(word: str) -> tuple[AttentionKernel, str | None]:
    """What backward keeps of attention, and whose kernels run, from one word for both."""
    if word in FLASH_KERNELS:
        return "flash", word
    for kernel in ATTENTION_KERNELS:
        if word == kernel:
            return kernel, None
    words = (*ATTENTION_KERNELS, *FLASH_KERNELS)
    raise unknown_name("attention", word, words, hint=f"one of {', '.join(words)}")


def check_device_cap(hardware: Hardware, cap: int) -> None:
    """Refuse a cap on device memory that is more than there is."""
    there = int(hardware.device.dram.size_bytes.value)
    if cap > there:
        raise FlopwiseError(
            f"a cap of {cap / 2**30:,.1f} GiB is more than {hardware.name} has",
            why=f"it has {there / 2**30:,.1f} GiB of device memory",
            hint="a smaller --device-mem, or leave it out to use all there is",
        )


def default_sequence(model: Model) -> int:
    """Tokens of a sequence where nobody says: the model's own, unless that is very long."""
    return min(model.context, DEFAULT_SEQUENCE_TOKENS)


def batch_in_sequences(model: Model, *, sequences: int | None, tokens: int | None, sequence: int | None) -> int | None:
    """A step's batch in sequences, be it given in those or in tokens; None where neither is."""
    if tokens is None:
        return sequences
    if sequences is not None:
        raise FlopwiseError(
            "both a batch in sequences and one in tokens were given",
            why="one follows from the other and the sequence length",
            hint="keep --batch or --batch-tokens",
        )
    sequence = sequence or default_sequence(model)
    if tokens % sequence:
        whole = max(1, round(tokens / sequence))
        raise FlopwiseError(
            f"{tokens:,} tokens are not a whole number of sequences of {sequence:,}",
            hint=f"--batch-tokens {whole * sequence}, or --batch {whole}",
        )
    return tokens // sequence


def refuse_fp8(model: Model, formats: Formats) -> None:
    """Refuse what flopwise's own trainer does not multiply in fp8."""
    if formats.matrix != "fp8" or not isinstance(model, Transformer):
        return
    without = {
        "products around its states have sides that those in fp8 do not take": model.carries,
        "there are no kernels for products of experts in fp8": model.experts > 0,
        "there are no kernels for products in fp8 beside adapters": model.adapters is not None,
    }
    for why, there in without.items():
        if there:
            raise FlopwiseError(
                f"{model.name} cannot be trained in {formats.name} yet", why=why, hint="--precision bf16"
            )
