"""The description of a transformer: decoders of the Llama, GPT and MPT kind, mixtures of experts, BERT encoders."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.work.adapters import EMBEDDING, HEAD, Adapters, frozen_layers

LARGEST_SIDE = 2**31 - 1
"""Shapes beyond this overflow the 32-bit sizes of today's kernels; such a number is a typing mistake."""

ACTIVATIONS = (
    *("silu", "gelu", "gelu_tanh", "relu", "relu2", "relu6", "leaky_relu", "mish", "sigmoid", "tanh", "linear"),
)
"""Activations that a feed-forward part may have; all read and write the same bytes.

`gelu` is the exact one, `gelu_tanh` the approximation by a tanh that GPT-2 was trained with.
"""


def check_name(name: str) -> None:
    """Refuse a name that a table or a file could not print."""
    if not name.strip() or not name.isprintable():
        raise FlopwiseError(
            f"a model cannot be called {shown(name)}",
            why="a name is printed in tables: it has letters, and no line breaks or control characters",
            hint='name = "my-model"',
        )


def check_positive(owner: str, **numbers: int) -> None:
    """Refuse sizes that no tensor can have, by the name of the field."""
    for field, number in numbers.items():
        if number < 1:
            raise FlopwiseError(
                f"{owner}: {field} must be at least 1, got {shown(number)}",
                why="a size counts layers, heads, tokens or channels",
                hint=f"{field} = 1 or more",
            )
        if number > LARGEST_SIDE:
            raise FlopwiseError(
                f"{owner}: {field} = {shown(number)} is too large",
                why=f"a side of a tensor is at most {LARGEST_SIDE:,}",
                hint="check the number for a digit too many",
            )


def check_real(owner: str, **numbers: float) -> None:
    """Refuse real numbers that are not above zero or not finite, by the name of the field."""
    for field, number in numbers.items():
        if not (number > 0 and isfinite(number)):
            raise FlopwiseError(
                f"{owner}: {field} must be a number above 0, got {shown(number)}", hint=f"correct {field}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryScaling:
    """How the rotary frequencies are lowered for a context longer than the first one: as Llama 3.1 does, or linearly.

    Llama 3.1 divides by `factor` the frequencies that turn less than `low_frequency_factor` times in the original
    context, leaves those that turn more than `high_frequency_factor` times, and goes over smoothly in between.
    """

    factor: float
    original_context: int | None = None
    """Tokens of the context before; None: linear scaling, which divides all frequencies."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0

    def __post_init__(self) -> None:
        low, high = self.low_frequency_factor, self.high_frequency_factor
        check_real("rotary_scaling", factor=self.factor, low_frequency_factor=low, high_frequency_factor=high)
        if self.original_context is not None:
            check_positive("rotary_scaling", original_context=self.original_context)
        if low >= high:
            raise FlopwiseError(
                f"rotary_scaling: low_frequency_factor = {low} is not below high_frequency_factor = {high}",
                why="frequencies between the two are scaled in part",
                hint="Llama 3.1 has 1 and 4",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """With which probability training sets numbers to zero, dividing what is left by what is kept of them.

    It moves no bytes of its own: each site is a part of the kernel that writes the numbers, and which of them are
    dropped follows from seed, step, layer, site and place, so that backward draws the same mask again and none is kept.
    """

    embedding: float = 0.0
    """Of what the first block reads."""
    hidden: float = 0.0
    """Of attention's and the feed-forward part's results, before they are added to the residual stream."""
    attention: float = 0.0
    """Of the softmax's weights."""
    classifier: float | None = None
    """Of what a classifier's last product reads; None: as `hidden`."""

    def __post_init__(self) -> None:
        for field, share in (("embedding", self.embedding), ("hidden", self.hidden), ("attention", self.attention)):
            _check_dropped(field, share)
        if self.classifier is not None:
            _check_dropped("classifier", self.classifier)

    @property
    def of_classifier(self) -> float:
        """The last site's probability, whether it has one of its own or not."""
        return self.hidden if self.classifier is None else self.classifier

    @property
    def sites(self) -> dict[str, float]:
        """Site → probability, where anything is dropped."""
        shares = {"attention": self.attention, "hidden": self.hidden, "embedding": self.embedding}
        return {site: share for site, share in shares.items() if share}


def _check_dropped(field: str, share: float) -> None:
    if not 0.0 <= share < 1.0:
        raise FlopwiseError(
            f"dropout: {field} = {shown(share)} is not possible",
            why="it is the share that is set to zero: from 0 to less than 1",
            hint=f"{field} = 0.1",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """A stack of equal blocks between an embedding and a head."""

    name: str
    title: str
    source: str
    """Where the shape comes from: a paper, a model card, a configuration file."""
    layers: int
    hidden: int
    """Width of the residual stream."""
    heads: int
    ffn: int
    """Inner width of the feed-forward part (of one expert)."""
    vocab: int
    context: int
    """Longest sequence that it is made for, and the default one."""
    kv_heads: int = 0
    """Key and value heads; 0 stands for as many as query heads."""
    head_dim: int = 0
    """Channels of a head; 0 stands for hidden ÷ heads."""
    causal: bool = True
    window: int | None = None
    """How far back a token looks, itself included; None: as far as there is."""
    positions: Literal["rotary", "learned", "alibi", "none"] = "rotary"
    position_rows: int | None = None
    """Rows of the learned position table; None: one for each token of the sequence, as MPT trains."""
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_place: Literal["pre", "post"] = "pre"
    embedding_norm: bool = False
    final_norm: bool = True
    gated: bool = True
    """Feed-forward of three matrices (SwiGLU and its like) instead of two."""
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over the channels of each query and key head, before the rotary embedding."""
    parallel_residual: bool = False
    """Attention and feed-forward both read the block's input."""
    experts: int = 0
    experts_per_token: int = 0
    head: Literal["language", "masked", "classifier"] = "language"
    tied: bool = False
    """The head's matrix is the token embedding's."""
    labels: int | None = None
    """Classes of a classifier."""
    token_types: int = 0
    norm_epsilon: float = 1e-5
    """What every norm adds to the variance. Like the two below it changes values only, not what is counted."""
    rotary_base: float = 10_000.0
    """The slowest rotary pair turns by almost 1 ÷ this per token."""
    rotary_scaling: RotaryScaling | None = None
    adapters: Adapters | None = None
    """What is trained beside the matrices, which are frozen then, and all else with them; None: the model itself is."""
    frozen: tuple[str, ...] | None = None
    """Parts that are not trained: `embedding`, `head`, `blocks.0-15`; None: all are."""
    dropout: Dropout | None = None
    """What training drops; an evaluation drops nothing. None: nothing."""
    note: str | None = None
    """What a reader of a prediction should know, such as what had to be assumed."""

    def __post_init__(self) -> None:
        check_name(self.name)
        # A frozen dataclass with derived defaults: set once, here, before anybody sees it.
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        check_positive(
            self.name, layers=self.layers, hidden=self.hidden, heads=self.heads, ffn=self.ffn, vocab=self.vocab
        )
        check_positive(self.name, context=self.context, kv_heads=self.kv_heads)
        if self.head_dim == 0:
            if self.hidden % self.heads:
                raise FlopwiseError(
                    f"{self.name}: {self.heads} heads do not divide a width of {self.hidden}",
                    why="without head_dim a head has hidden ÷ heads channels",
                    hint="give head_dim, or other heads",
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        check_positive(self.name, head_dim=self.head_dim)
        self._check_attention()
        self._check_options()
        self._check_trained()

    def _check_attention(self) -> None:
        if self.heads % self.kv_heads:
            raise FlopwiseError(
                f"{self.name}: {self.kv_heads} key-value heads do not divide {self.heads} query heads",
                why="each key-value head serves the same number of query heads",
                hint=f"kv_heads = {_divisor_below(self.heads, self.kv_heads)}",
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise FlopwiseError(
                f"{self.name}: rotary positions turn pairs of channels, so head_dim = {self.head_dim} must be even",
                hint=f"head_dim = {self.head_dim + 1}, or other positions",
            )
        if self.window is not None:
            check_positive(self.name, window=self.window)
        check_real(self.name, norm_epsilon=self.norm_epsilon, rotary_base=self.rotary_base)

    def _check_options(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise unknown_name(
                "activation", self.activation, ACTIVATIONS, hint=f"activation is one of {', '.join(ACTIVATIONS)}"
            ).within(self.name)
        if self.position_rows is not None:
            check_positive(self.name, position_rows=self.position_rows)
            if self.positions != "learned":
                raise FlopwiseError(
                    f"{self.name}: position_rows is for learned positions, and these are {self.positions}",
                    hint='leave out position_rows, or positions = "learned"',
                )
        if self.token_types:
            check_positive(self.name, token_types=self.token_types)
        self._check_experts()
        if self.labels is not None:
            check_positive(self.name, labels=self.labels)
        elif self.head == "classifier":
            raise FlopwiseError(
                f"{self.name}: a classifier needs `labels`, the number of its classes", hint="labels = 2"
            )

    def _check_trained(self) -> None:
        """Refuse what leaves nothing to train, and adapters where there are none for."""
        if self.adapters is not None:
            if self.frozen is not None:
                raise FlopwiseError(
                    f"{self.name}: frozen parts beside adapters",
                    why="with adapters everything else is frozen already",
                    hint="one of --lora and --freeze",
                )
            if self.experts or self.head == "classifier":
                kind = "a mixture of experts" if self.experts else "a classifier"
                raise FlopwiseError(
                    f"{self.name}: {kind} cannot have adapters yet", hint="train it without --lora, or with --freeze"
                )
            if not self.gated and self.adapters.targets == ("gate",):
                raise FlopwiseError(f"{self.name} has no gate for an adapter", hint="--lora-on all-linear")
        if self.frozen is None:
            return
        layers = frozen_layers(self.frozen, self.layers)
        if self.tied and (EMBEDDING in self.frozen) != (HEAD in self.frozen):
            raise FlopwiseError(
                f"{self.name}: embedding and head are one matrix",
                why="it is frozen for both or for neither",
                hint="both of them, or neither",
            )
        if len(layers) == self.layers and EMBEDDING in self.frozen:
            raise FlopwiseError(
                f"{self.name}: embedding and all blocks are frozen",
                why="a head alone is not trained here",
                hint="--freeze embedding,blocks.0-15",
            )

    @property
    def frozen_layers(self) -> frozenset[int]:
        """Blocks of which nothing is trained."""
        return frozen_layers(self.frozen or (), self.layers)

    def is_frozen(self, part: str) -> bool:
        """Whether nothing of the embedding, or of the head, is trained."""
        return self.adapters is not None or part in (self.frozen or ())

    @property
    def first_reached(self) -> int:
        """The lowest block that backward comes to; as many as there are blocks: none."""
        if self.adapters is not None:
            return 0
        if not self.is_frozen(EMBEDDING):
            return 0
        trained = (layer for layer in range(self.layers) if layer not in self.frozen_layers)
        return next(trained, self.layers)

    def _check_experts(self) -> None:
        if self.experts:
            check_positive(self.name, experts=self.experts)
        if not self.experts and self.experts_per_token:
            raise FlopwiseError(
                f"{self.name}: experts_per_token = {shown(self.experts_per_token)} without experts",
                hint="give `experts`, or leave out experts_per_token",
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise FlopwiseError(
                f"{self.name}: {shown(self.experts_per_token)} of {self.experts} experts per token is not possible",
                hint="experts_per_token between 1 and experts",
            )

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    def check_sequence(self, tokens: int) -> None:
        """Refuse a sequence that the position table cannot number."""
        if self.positions == "learned" and self.position_rows is not None and tokens > self.position_rows:
            raise FlopwiseError(
                f"{self.name} has learned positions for {self.position_rows:,} tokens, not for {tokens:,}",
                why="there is no row for the later tokens",
                hint=f"--seq {self.position_rows} or less, or a model with rotary positions",
            )


def _divisor_below(number: int, limit: int) -> int:
    return next(candidate for candidate in range(min(limit, number), 0, -1) if number % candidate == 0)
