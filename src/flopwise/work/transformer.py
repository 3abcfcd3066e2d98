"""The description of a transformer: decoders of the Llama, GPT and MPT kind, mixtures of experts, BERT encoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flopwise.base.errors import FlopwiseError, shown
from flopwise.work.adapters import EMBEDDING, HEAD, Adapters, frozen_layers
from flopwise.work.attention_kinds import OtherAttention, RotaryScaling, Temperature
from flopwise.work.block_kinds import DENSE, MIXTURE, adapted_alike, built_alike, fed_alike, kinds_of, of_kind
from flopwise.work.checks import check_name, check_positive
from flopwise.work.latent import LatentAttention
from flopwise.work.recurrence import ATTENDING, FEEDING, RECURRENT, Recurrence
from flopwise.work.routing import USUAL_ROUTING, Routing
from flopwise.work.transformer_checks import check_transformer


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
    before_pooler: bool = False
    """Whether the same share is dropped of what a classifier's first product reads, as RoBERTa has it."""
    both_branches: bool = True
    """Whether `hidden` is of both branches' results, or of the feed-forward part's alone, as DistilBERT has it."""

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
    """A stack of blocks between an embedding and a head.

    Blocks are equal in their parameters and in what they keep; the attention of some may see less, or turn otherwise
    (`other_attention`).
    """

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
    """How far back a token looks, itself included; None: as far as there is. Where tokens look ahead, as far ahead."""
    positions: Literal["rotary", "learned", "alibi", "none"] = "rotary"
    position_rows: int | None = None
    """Rows of the learned position table; None: one for each token of the sequence, as MPT trains."""
    position_offset: int = 0
    """The row of a sequence's first token, 2 for RoBERTa; the last token that has one is that many earlier."""
    alibi_rounded: bool = False
    """ALiBi's biases are rounded to bf16 and then scaled as scores are, as Falcon has them."""
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_place: Literal["pre", "post", "behind", "sandwich"] = "pre"
    """pre: of a branch's input. post: of the sum, as BERT. behind: of a branch's result, as OLMo 2. sandwich: of its
    input and its result, as Gemma 2."""
    unnormed_attention: Literal["none", "first", "all"] = "none"
    """Blocks whose attention reads the residual stream without a norm: ModernBERT's first. all: of a kind of block."""
    norm_adds_one: bool = False
    """A norm's scale is one more than its weight, as Gemma has it."""
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
    qk_norm_over: Literal["head", "all"] = "head"
    """all: over the channels of all heads at once, as OLMo 2."""
    qk_norm_weights: bool = True
    """False: these norms scale no channel, as Llama 4's."""
    parallel_residual: bool = False
    """Attention and feed-forward both read the block's input."""
    shared_norm: bool = False
    """Both branches of a parallel residual read one norm's result."""
    experts: int = 0
    experts_per_token: int = 0
    routing: Routing = USUAL_ROUTING
    """How a token's experts are chosen and weighed."""
    shared_ffn: int = 0
    """Inner width of what every token goes through beside its experts; 0: nothing."""
    shared_gate: bool = False
    """What that makes is multiplied by the sigmoid of a score of the token, as Qwen2-MoE has it."""
    dense_blocks: tuple[int, ...] = ()
    """The blocks of a mixture that have no experts, from 0: the first ones of DeepSeek's."""
    dense_ffn: int = 0
    """Inner width of their feed-forward part."""
    latent: LatentAttention | None = None
    """Keys and values are made from a latent of each token; None: from the block's input."""
    sinks: bool = False
    """A score of each head that takes part in the softmax beside the keys', and has no value, as gpt-oss."""
    attention_gate: bool = False
    """Attention's result is multiplied by the sigmoid of what a product makes of the block's input, as Qwen3-Next."""
    recurrence: Recurrence | None = None
    """What carries a state along the sequence in some blocks, in the place of attention."""
    recurrent_blocks: tuple[int, ...] = ()
    """The blocks that have `recurrence`, from 0."""
    one_branch: bool = False
    """A block is attention, a recurrence or a feed-forward part alone, as Nemotron-H and Mamba-2 have it."""
    feed_blocks: tuple[int, ...] = ()
    """Of such blocks those that are a feed-forward part, from 0."""
    head: Literal["language", "masked", "classifier"] = "language"
    tied: bool = False
    """The head's matrix is the token embedding's."""
    labels: int | None = None
    """Classes of a classifier."""
    pooling: Literal["first", "mean"] = "first"
    """What of a sequence a classifier reads: its first token, or the mean of all."""
    pooler_activation: str = "tanh"
    """Behind the first product of a classifier."""
    pooler_norm: bool = False
    """A norm behind that."""
    transform_bias: bool = True
    """Of the first product of a classifier or of a masked head."""
    transform_activation: str | None = None
    """Behind the first product of a masked head; None: the model's own."""
    token_types: int = 0
    norm_epsilon: float = 1e-5
    """What every norm adds to the variance. Like the two below it changes values only, not what is counted."""
    rotary_base: float = 10_000.0
    """The slowest rotary pair turns by almost 1 ÷ this per token."""
    rotary_scaling: RotaryScaling | None = None
    rotary_dim: int | None = None
    """Channels of a head that are turned, the first ones; None: all."""
    rotary_pairs: Literal["halves", "neighbours"] = "halves"
    """Which channels turn together: one of each half of those that are turned, or neighbours."""
    other_attention: OtherAttention | None = None
    other_blocks: tuple[int, ...] = ()
    """The blocks that have `other_attention`, from 0."""
    attention_scale: float | None = None
    """What scores are multiplied by; None: 1 ÷ √head_dim."""
    attention_chunk: int | None = None
    """A token sees those before it in its own chunk of so many tokens, as Llama 4; None: all before it."""
    temperature: Temperature | None = None
    attention_cap: float | None = None
    """Scores s become cap · tanh(s ÷ cap)."""
    logit_cap: float | None = None
    """The same of the logits."""
    embedding_scale: float = 1.0
    """What the token embedding is multiplied by."""
    residual_scale: float = 1.0
    """What a branch's result is multiplied by before it is added to the residual stream."""
    logit_scale: float = 1.0
    family: str = ""
    """The `model_type` of the class of `transformers` that it was read from and is saved for; empty: what fits."""
    adapters: Adapters | None = None
    """What is trained beside the matrices, which are frozen then, and all else with them; None: the model itself is."""
    frozen: tuple[str, ...] | None = None
    """Parts that are not trained: `embedding`, `head`, `blocks.0-15`; None: all are."""
    dropout: Dropout | None = None
    """What training drops; an evaluation drops nothing. None: nothing."""
    objective: Literal["likelihood", "preference"] = "likelihood"
    """preference: of pairs of answers the better one is made likelier than the other, as DPO does; what each is worth
    follows from the whole of it, so that the head runs twice."""
    loss_share: float = 1.0
    """Of the tokens, those that have a loss. Below 1 the head is computed for these alone, as of masked language models
    and of conversations of which only answers are learned."""
    note: str | None = None
    """What a reader of a prediction should know, such as what had to be assumed."""

    def __post_init__(self) -> None:
        check_name(self.name)
        # A frozen dataclass with derived defaults: set once, here, before anybody sees it.
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        check_positive(self.name, layers=self.layers, hidden=self.hidden, heads=self.heads, vocab=self.vocab)
        if not self.one_branch or self.feed_blocks:
            check_positive(self.name, ffn=self.ffn)
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
        check_transformer(self)

    @property
    def frozen_layers(self) -> frozenset[int]:
        """Blocks of which nothing is trained: beside adapters, those that have none."""
        return frozen_layers(self.frozen or (), self.layers)

    def is_frozen(self, part: str) -> bool:
        """Whether nothing of the embedding, or of the head, is trained; a classifier's is, beside adapters too."""
        if self.adapters is not None:
            return part != HEAD or self.head != "classifier"
        return part in (self.frozen or ())

    @property
    def first_reached(self) -> int:
        """The lowest block that backward comes to; as many as there are blocks: none."""
        if not self.is_frozen(EMBEDDING):
            return 0
        trained = (layer for layer in range(self.layers) if layer not in self.frozen_layers)
        return next(trained, self.layers)

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def value_width(self) -> int:
        """Channels of all values."""
        return self.kv_heads * self.value_dim

    @property
    def attended_width(self) -> int:
        """Channels of attention's result."""
        return self.heads * self.value_dim

    @property
    def turned_channels(self) -> int:
        """Channels of a head that rotary positions turn."""
        return self.rotary_dim or self.head_dim

    @property
    def score_scale(self) -> float:
        """What attention's scores are multiplied by."""
        return float(self.head_dim**-0.5) if self.attention_scale is None else self.attention_scale

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        """What each head's scores lose with each token of distance under ALiBi (Press et al., arXiv 2108.12409).

        A power of two of heads has 2^(-8 k ÷ heads); the heads beyond one take every other slope of twice as many.
        """
        if self.positions != "alibi":
            return ()
        whole = 1 << (self.heads.bit_length() - 1)
        first = (2.0 ** (-8.0 * number / whole) for number in range(1, whole + 1))
        beyond = (2.0 ** (-4.0 * number / whole) for number in range(1, 2 * (self.heads - whole), 2))
        return (*first, *beyond)

    @property
    def averages(self) -> bool:
        """Whether a classifier reads the mean of a sequence."""
        return self.head == "classifier" and self.pooling == "mean"

    @property
    def carries(self) -> bool:
        """Whether some of its operators are those of blocks that carry a state, or of a gate behind attention."""
        return self.recurrence is not None or self.attention_gate

    @property
    def uncut(self) -> bool:
        """Whether a sequence goes through in one piece: a mean is taken of it, or a state carried along it."""
        return self.averages or self.has_kinds or self.carries

    @property
    def unusual(self) -> tuple[str, ...]:
        """What it has that other trainers' configurations and rules do not tell, in words."""
        scaling, scales = self.rotary_scaling, (self.embedding_scale, self.residual_scale, self.logit_scale)
        had = {
            "blocks with other attention": self.other_attention is not None,
            "norms of the branches' results": self.norm_place in ("behind", "sandwich"),
            "norms whose scale is one more than their weight": self.norm_adds_one,
            "attention in chunks": self.attention_chunk is not None,
            "queries scaled by their position": self.temperature is not None,
            "norms of queries and keys without weights": self.qk_norm and not self.qk_norm_weights,
            "norms of queries and keys over all heads": self.qk_norm and self.qk_norm_over == "all",
            "one norm for both branches": self.shared_norm,
            "rotary positions of some channels": self.turned_channels != self.head_dim,
            "rotary pairs of neighbours": self.rotary_pairs == "neighbours",
            "its own rotary scaling": scaling is not None and scaling.method in ("dynamic", "yarn", "longrope"),
            "its own scale of scores": self.attention_scale is not None,
            "scaled embeddings, branches or logits": scales != (1.0, 1.0, 1.0),
            "positions that begin at a later row": self.position_offset != 0,
            "its own activation in the head": self.head != "language"
            and (self.pooler_activation, self.transform_activation) != ("tanh", None),
            "a block without a norm before its attention": self.unnormed_attention != "none",
            "its own norm, mean or product without a bias in the head": self.head != "language"
            and (self.pooler_norm, self.pooling, self.transform_bias) != (False, "first", True),
            "biases of its scores that are rounded": self.alibi_rounded,
            "sinks in its attention": self.sinks,
            "a gate behind its attention": self.attention_gate,
            "blocks that carry a state": self.recurrence is not None,
            "blocks of one branch": self.one_branch,
            "keys and values made from a latent": self.latent is not None,
            "its own routing": self.routing.network != Routing(normalised=self.routing.normalised),
            "losses of its routing": self.routing.has_losses,
            "shared experts": self.shared_ffn > 0,
            "blocks without experts": bool(self.dense_blocks),
            "capped scores or logits": (self.attention_cap, self.logit_cap) != (None, None),
        }
        return tuple(words for words, there in had.items() if there)

    def kind_of(self, layer: int) -> Transformer:
        """The description of which all blocks are like this one."""
        if self.has_kinds:
            return built_alike(self, self.block_kind(layer))
        normed = self.normed_from <= layer
        found = of_kind(self, layer in self.other_blocks, layer in self.dense_blocks, normed)
        return adapted_alike(found, layer not in self.frozen_layers)

    @property
    def has_kinds(self) -> bool:
        """Whether blocks are of the kinds that carry a state, look back, or are a feed-forward part alone."""
        return self.recurrence is not None or self.one_branch

    def block_kind(self, layer: int) -> str:
        """What this block has that not all have, by the word that its operators have for it."""
        if self.has_kinds:
            if layer in self.recurrent_blocks:
                return RECURRENT
            return FEEDING if layer in self.feed_blocks else ATTENDING
        return DENSE if layer in self.dense_blocks else MIXTURE

    def blocks_of(self, kind: str) -> frozenset[int]:
        """The blocks of a kind, where they come in kinds."""
        return frozenset(layer for layer in range(self.layers) if self.block_kind(layer) == kind)

    @property
    def mixed_blocks(self) -> tuple[int, ...]:
        """The blocks that have experts."""
        without = frozenset(self.dense_blocks)
        if self.one_branch:
            without = frozenset(range(self.layers)) - frozenset(self.feed_blocks)
        return tuple(layer for layer in range(self.layers) if layer not in without) if self.experts else ()

    @property
    def kinds(self) -> tuple[Transformer, ...]:
        """Each kind of block, as a description of which all are alike."""
        return kinds_of(self)

    @property
    def attention_kinds(self) -> tuple[tuple[Transformer, int, bool], ...]:
        """Each kind of attention with how many blocks have it, and whether they are the `other_blocks`."""
        others = len(self.other_blocks)
        found = ((False, self.layers - others), (True, others))
        return tuple((of_kind(self, other, False, True), each, other) for other, each in found if each)

    @property
    def product_kinds(self) -> tuple[tuple[Transformer, frozenset[int]], ...]:
        """Blocks by their products, as a description of which all have them: experts or none, adapters or none; or by
        what they are, attention, a state or a feed-forward part."""
        if self.has_kinds:
            listed = [(kind, self.blocks_of(kind)) for kind in (RECURRENT, ATTENDING, FEEDING)]
            return tuple((built_alike(self, kind), blocks) for kind, blocks in listed if blocks)
        dense, without = frozenset(self.dense_blocks), self.frozen_layers if self.adapters is not None else frozenset()
        everything = frozenset(range(self.layers))
        found = (
            (adapted_alike(fed_alike(self, fed is dense), adapted is not without), fed & adapted)
            for fed in (everything - dense, dense)
            for adapted in (everything - without, without)
        )
        return tuple((kind, blocks) for kind, blocks in found if blocks)

    @property
    def normed_from(self) -> int:
        """The first block with a norm before its attention, where norms are before the branches."""
        return {"none": 0, "first": 1, "all": self.layers}[self.unnormed_attention]

    def check_sequence(self, tokens: int) -> None:
        """Refuse a sequence that the position table cannot number."""
        if self.positions != "learned" or self.position_rows is None:
            return
        most = self.position_rows - self.position_offset
        if tokens > most:
            raise FlopwiseError(
                f"{self.name} has learned positions for {most:,} tokens, not for {tokens:,}",
                why="there is no row for the later tokens",
                hint=f"--seq {most} or less, or a model with rotary positions",
            )
