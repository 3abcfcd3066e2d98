"""Weights and configurations as Hugging Face `transformers` has them, in both directions.

A model that `transformers` has a class for is saved under that class's names, so that `from_pretrained` reads it. The
names here are those of `save_pretrained`, with the prefix of the network without its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.huggingface import from_config
from flopwise.engine.kernels.experts import split_terms, sum_terms
from flopwise.engine.weights.encoder_families import (
    BERT_LAYER,
    ENCODERS,
    bert_like_config,
    encoder_ends,
    head_config,
)
from flopwise.engine.weights.families import (
    DECODERS,
    LLAMA_ENDS,
    LLAMA_LAYER,
    NO_SPECIAL_TOKENS,
    Names,
    SavedFamily,
    activation_of,
    layer_types,
    rotary_scaling_of,
)
from flopwise.engine.weights.hybrid_families import HYBRIDS
from flopwise.engine.weights.initial import LEAST_DEVIATION
from flopwise.engine.weights.mixture_families import EXPERT, MIXTURES
from flopwise.engine.weights.mxfp4 import Dequantised
from flopwise.engine.weights.row_orders import RowOrder, gated_heads, states_by_key
from flopwise.work.attention_kinds import OtherAttention
from flopwise.work.latent import LatentAttention
from flopwise.work.parameters import Parameter, parameters_of
from flopwise.work.product_ops import SHARED
from flopwise.work.recurrence import Recurrence
from flopwise.work.state_ops import CONVOLUTION, DECAY, SKIP, STEP_BIAS
from flopwise.work.transformer import Dropout, Transformer

SAVED: dict[str, SavedFamily] = {**DECODERS, **MIXTURES, **HYBRIDS, **ENCODERS}
"""By `model_type`, the families whose configuration says more than the structure of the first six does."""

PREFIXES = (
    "language_model.model.",
    "model.language_model.",
    "model.text_model.",
    "language_model.",
    "model.",
    "backbone.",
    "transformer.",
    "bert.",
    "gpt_neox.",
    "roberta.",
    "electra.",
    "distilbert.",
)
"""What the names of the network without its head begin with in a file of the network with one."""

BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "embeddings.position_ids")
"""Ends of names that some files hold and that are no parameters."""

OTHER_PARTS = (
    *("vision_model.", "vision_tower.", "multi_modal_projector.", "visual.", "connector.", "image_newline", "mtp."),
)
"""Beside a language model's: those of one that sees."""

OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""Ends of names in the first files of BERT."""

FEW = 4
"""Names that an error repeats."""


@dataclass(frozen=True, slots=True)
class LoadedFolder:
    """Weights under our own names."""

    tensors: dict[str, Tensor]
    missing: tuple[str, ...]
    """Parameters of a classifier's head that the file does not hold; they begin with first values."""


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Of latent attention, rows by head: a file has a query's channels that turn behind the others, where ours come
    first, and each head's key and value together, where ours has all keys before all values."""

    heads: int
    turned: int
    own: int
    """Channels of a key that do not turn."""
    of_queries: bool

    def to_file(self, value: Tensor) -> Tensor:
        return self._swapped(value, self.turned) if self.of_queries else self._joined(value)

    def from_file(self, value: Tensor) -> Tensor:
        if self.of_queries:
            return self._swapped(value, self.own)
        by_head = torch.unflatten(value, 0, (self.heads, -1))
        return torch.cat((by_head[:, : self.own].flatten(0, 1), by_head[:, self.own :].flatten(0, 1)))

    def _joined(self, value: Tensor) -> Tensor:
        parts = torch.split(value, [self.heads * self.own, value.shape[0] - self.heads * self.own])
        return torch.cat([torch.unflatten(part, 0, (self.heads, -1)) for part in parts], 1).flatten(0, 1)

    def _swapped(self, value: Tensor, first: int) -> Tensor:
        """Each head's first channels behind its others; what lies below the heads stays where it is."""
        count = self.heads * (self.turned + self.own)
        by_head = torch.unflatten(value[:count], 0, (self.heads, -1))
        return torch.cat((torch.cat((by_head[:, first:], by_head[:, :first]), 1).flatten(0, 1), value[count:]))


@dataclass(frozen=True, slots=True)
class Place:
    """Where the numbers of one parameter lie: the rows of one tensor or of several, one below the other."""

    names: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Of each tensor, where there are several."""
    transposed: bool = False
    """GPT-2 keeps its matrices with the inputs as rows."""
    experts: int = 0
    """Of a mixture, where each expert's matrices are tensors of their own; ours has them in one."""
    interleaved: bool = False
    """Whether the file has gate and up number by number, where ours has all gates before all of up."""
    groups: tuple[int, int] | None = None
    """Key heads and a head's channels, where each key head's queries, key and value lie together in the file."""
    order: RowOrder | None = None
    """In which order the rows lie, where it is another."""
    apart: bool = False
    """Whether the file has a side of 1 between the others', as convolutions of torch have."""
    summed: bool = False
    """Whether the file has the sum of our terms: see `engine.kernels.experts.split_terms`."""

    def split(self, value: Tensor) -> dict[str, Tensor]:
        """The tensors of a file: views of the parameter, so that a model on a device needs no second place there."""
        if self.summed:
            return {self.names[0]: sum_terms(value, torch.float32)}
        if self.interleaved:
            value = _turn_pairs(value, 2, -1)
        if self.transposed:
            value = value.transpose(-1, -2)
        if self.groups is not None:
            value = _together(value, *self.groups)
        if self.order is not None:
            value = self.order.to_file(value)
        if self.apart:
            value = value[:, None]
        if not self.rows:
            return {self.names[0]: value}
        value = value.flatten(0, 1) if self.experts else value
        return dict(zip(self.names, torch.split(value, list(self.rows)), strict=True))

    def shapes(self, parameter: Parameter) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors."""
        if self.transposed:
            *lead, outputs, inputs = parameter.shape
            return ((*lead, inputs, outputs),)
        if self.interleaved:
            return (parameter.shape,)
        if self.summed:
            return (parameter.shape[1:],)
        if self.apart:
            return ((parameter.shape[0], 1, *parameter.shape[1:]),)
        sides = parameter.shape[2:] if self.experts else parameter.shape[1:]
        return tuple((rows, *sides) for rows in self.rows or parameter.shape[:1])

    def join(self, parts: list[Tensor]) -> Tensor:
        """The parameter that the tensors make up."""
        if self.summed:
            return split_terms(parts[0])
        if self.transposed or self.interleaved:
            whole = parts[0].transpose(-1, -2) if self.transposed else parts[0]
            return (_turn_pairs(whole, -1, 2) if self.interleaved else whole).contiguous()
        if self.groups is not None:
            return _apart(parts[0], *self.groups)
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self.apart:
            return whole[:, 0]
        if self.order is not None:
            return self.order.from_file(whole)
        return torch.unflatten(whole, 0, (self.experts, -1)) if self.experts else whole


def _turn_pairs(value: Tensor, *sides: int) -> Tensor:
    """Each expert's rows from two halves to pairs, or back."""
    return torch.unflatten(value, 1, sides).transpose(1, 2).flatten(1, 2)


def _together(value: Tensor, key_heads: int, head_dim: int) -> Tensor:
    """Rows of all queries, keys and values → those of each key head beside each other."""
    width = key_heads * head_dim
    parts = torch.split(value, [value.shape[0] - 2 * width, width, width])
    return torch.cat([torch.unflatten(part, 0, (key_heads, -1)) for part in parts], 1).flatten(0, 1)


def _apart(value: Tensor, key_heads: int, head_dim: int) -> Tensor:
    """The way back of `_together`."""
    by_head = torch.unflatten(value, 0, (key_heads, -1))
    queries = by_head.shape[1] - 2 * head_dim
    return torch.cat([part.flatten(0, 1) for part in torch.split(by_head, [queries, head_dim, head_dim], 1)])


# -- which class of transformers a description is ---------------------------------------------------------------------


def family_of(model: Transformer) -> str:
    """The `model_type` of the class that has exactly this network: the one it was read from, or the first that fits."""
    if model.family in SAVED and _comes_back(model):
        return model.family
    for family, matches in (("gpt2", _is_gpt2), ("bert", _is_bert)):
        if matches(model):
            return family
    if _is_llama_like(model):
        attention_biases = (model.qkv_bias, model.output_bias)
        biased = any((*attention_biases, model.ffn_bias))
        if (
            model.qk_norm
            and model.norm_place == "pre"
            and attention_biases in ((False, False), (True, True))
            and not model.ffn_bias
        ):
            return "qwen3"
        if not model.qk_norm and attention_biases == (True, False) and not model.ffn_bias:
            return "qwen2"
        if not model.qk_norm and not biased and model.window is not None and model.other_attention is None:
            return "mistral"
        # The configuration of Llama alone insists on a width that its heads divide.
        whole = model.hidden % model.heads == 0 and model.window is None and model.other_attention is None
        if not model.qk_norm and model.qkv_bias == model.output_bias and whole:
            return "llama"
    raise FlopwiseError(
        f"{model.name}: transformers has no class for this network",
        why="its norms, positions, biases, scales or head are not together in any family that is known here",
        hint="save it under flopwise's own names, which `flopwise train` reads back",
    )


PLAIN = Transformer(name="plain", title="", source="", layers=1, hidden=2, heads=1, ffn=1, vocab=1, context=1)
VALUES_ONLY = (
    *("attention_gate", "recurrence", "recurrent_blocks", "one_branch", "feed_blocks"),
    *("unnormed_attention", "pooling", "pooler_norm", "transform_bias"),
    *("alibi_rounded", "norm_adds_one", "qk_norm_over", "shared_norm", "rotary_dim", "rotary_pairs"),
    *("position_offset", "pooler_activation", "transform_activation"),
    *("attention_cap", "logit_cap", "embedding_scale", "residual_scale", "logit_scale"),
)
"""Fields that the first six families leave as they are."""


def _comes_back(model: Transformer) -> bool:
    """Whether the configuration that is written for its family describes this very network."""
    return _shape(from_config(SAVED[model.family].config(model.family, model), model.name)) == _shape(model)


def _shape(model: Transformer) -> dict[str, Any]:
    """Everything but the words, and what is trained of it."""
    turned = model.turned_channels
    same = replace(model, rotary_dim=None if turned == model.head_dim else turned, routing=model.routing.network)
    left_out = ("name", "title", "source", "note", "adapters", "frozen", "objective", "loss_share")
    return {item.name: getattr(same, item.name) for item in fields(same) if item.name not in left_out}


def has_class(model: Transformer) -> bool:
    """Whether transformers has a class for this network."""
    try:
        family_of(model)
    except FlopwiseError:
        return False
    return True


def _seeing_all(model: Transformer) -> OtherAttention:
    """Attention that differs in its window alone."""
    return OtherAttention(rotary_base=model.rotary_base, rotary_scaling=model.rotary_scaling)


def _is_llama_like(model: Transformer) -> bool:
    return (
        _is_plain(model)
        and model.causal
        and model.head == "language"
        and model.attention_scale is None
        and model.other_attention in (None, _seeing_all(model))
        and model.positions == "rotary"
        and (model.norm, model.norm_bias, model.norm_place) == ("rms", False, "pre")
        and model.final_norm
        and model.gated
        and not (model.embedding_norm or model.head_bias or model.parallel_residual)
        and not (model.experts or model.token_types)
    )


def _is_plain(model: Transformer) -> bool:
    """Whether it has nothing that only later families have."""
    return all(getattr(model, name) == getattr(PLAIN, name) for name in VALUES_ONLY)


def _has_gpt_blocks(model: Transformer) -> bool:
    """Learned positions, LayerNorm, two matrices in the feed-forward part, biases in all of them."""
    return (
        _is_plain(model)
        and model.other_attention is None
        and model.positions == "learned"
        and (model.norm, model.norm_bias) == ("layer", True)
        and model.qkv_bias
        and model.output_bias
        and model.ffn_bias
        and model.kv_heads == model.heads
        and model.query_width == model.hidden
        and model.window is None
        and not (model.gated or model.qk_norm or model.parallel_residual or model.experts)
    )


def _is_gpt2(model: Transformer) -> bool:
    plain = not (model.embedding_norm or model.head_bias or model.token_types)
    pre_norm = model.norm_place == "pre" and model.final_norm and model.attention_scale in (None, 1.0)
    return _has_gpt_blocks(model) and model.causal and model.head == "language" and pre_norm and plain


def _is_bert(model: Transformer) -> bool:
    post_norm = (
        model.norm_place == "post" and model.attention_scale is None and model.embedding_norm and not model.final_norm
    )
    head = model.head == "classifier" or (model.head == "masked" and model.tied and model.head_bias)
    return _has_gpt_blocks(model) and not model.causal and head and post_norm and model.token_types > 0


# -- names ------------------------------------------------------------------------------------------------------------

GPT2_LAYER = {
    "norm1": ("ln_1",),
    "qkv": ("attn.c_attn",),
    "output": ("attn.c_proj",),
    "norm2": ("ln_2",),
    "up": ("mlp.c_fc",),
    "down": ("mlp.c_proj",),
}
GPT2_ENDS = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
BERT_ENDS = encoder_ends(
    "bert",
    pooler="bert.pooler.dense",
    classifier="classifier",
    transform="cls.predictions.transform.dense",
    transform_norm="cls.predictions.transform.LayerNorm",
    head="cls.predictions",
)


LLAMA_NAMES = Names("model.layers", LLAMA_LAYER, LLAMA_ENDS)
NAMES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), LLAMA_NAMES),
    "gpt2": Names("transformer.h", GPT2_LAYER, GPT2_ENDS, transposed=True),
    "bert": Names("bert.encoder.layer", BERT_LAYER, BERT_ENDS),
    **{family: saved.names for family, saved in SAVED.items()},
}


def names_of(model: Transformer) -> Names:
    """How the files of a model's family call its parts."""
    family = family_of(model)
    names = NAMES[family]
    own = SAVED[family].layer_names(model) if family in SAVED else {}
    return replace(names, layer={**names.layer, **own}) if own else names


def place_of(model: Transformer, names: Names, parameter: Parameter) -> Place:
    """Where one of our parameters lies in a file of the model's family."""
    module, kind = parameter.weight.module, parameter.weight.kind
    if not isinstance(parameter.part, int):
        if model.tied and (module, kind) == ("head", "weight"):
            module = "embedding"
        return Place((f"{names.ends[module]}.{kind}",))
    if model.kind_of(parameter.part).experts and module in (*names.stacked, *names.experts):
        return _place_of_experts(model, names, parameter)
    layer = f"{names.layers}.{parameter.part}"
    if module in ("sinks", "routing", STEP_BIAS, DECAY, SKIP):
        return Place((f"{layer}.{names.layer[module][0]}",), summed=module == "routing")
    own = tuple(f"{layer}.{name}.{kind}" for name in _names_in_layer(names, module))
    if model.latent is not None and module in ("latents", "query_up", "latent_up"):
        return _place_of_latents(model, model.latent, module, own)
    return _place_in_layer(model, names, parameter, own)


def _place_in_layer(model: Transformer, names: Names, parameter: Parameter, own: tuple[str, ...]) -> Place:
    """Of one of a block's products or norms, which a file has under these names."""
    module = parameter.weight.module
    if module == CONVOLUTION and parameter.weight.kind == "weight":
        return Place(own, apart=True)
    if module == "mix_in" and model.recurrence is not None:
        return _place_of_states(model.recurrence, names, own)
    if module == "qkv" and names.gated_heads:
        return Place(own, (2 * model.query_width, model.kv_width, model.kv_width), order=gated_heads(model))
    if len(own) > 1:
        halves = (parameter.shape[0] // 2,) * 2
        rows = halves if module.endswith("gate_up") else (model.query_width, model.kv_width, model.kv_width)
        return Place(own, rows)
    if names.heads_together and module == "qkv":
        return Place(own, groups=(model.kv_heads, model.head_dim))
    return Place(own, transposed=names.transposed and parameter.role == "matrix")


def _place_of_states(states: Recurrence, names: Names, own: tuple[str, ...]) -> Place:
    """Of the product in front of a state: in one, in two by key head, or gate, mixed and steps by themselves."""
    if names.states_by_key:
        return Place(own, (states.width + states.channels, states.steps), order=states_by_key(states))
    rows = (states.width, states.channels, states.heads, states.heads)
    return Place(own, rows if len(own) > 1 else ())


def latent_rows(model: Transformer, *, of_queries: bool) -> LatentRows:
    """How the rows of heads lie that are made from latents: of queries, or of keys and values."""
    turned = model.turned_channels
    return LatentRows(model.heads, turned, model.head_dim - turned, of_queries=of_queries)


def _place_of_latents(model: Transformer, latent: LatentAttention, module: str, own: tuple[str, ...]) -> Place:
    heads = latent_rows(model, of_queries=module != "latent_up")
    if module != "latents":
        return Place(own, order=heads)
    rows = (latent.query_rank or model.query_width, latent.rank + model.turned_channels)
    return Place(own, rows, order=None if latent.query_rank else heads)


def _names_in_layer(names: Names, module: str) -> tuple[str, ...]:
    """How a file calls one of our modules, within its layer."""
    if names.shared and module.startswith(SHARED) and module not in names.layer:
        each = {**EXPERT, **names.experts}[module.removeprefix(SHARED)]
        return tuple(f"{names.shared}.{name}" for name in each)
    return names.layer[module]


def _place_of_experts(model: Transformer, names: Names, parameter: Parameter) -> Place:
    """Of what a mixture has for each of its experts: one tensor for all of them, or some for each."""
    module, kind = parameter.weight.module, parameter.weight.kind
    layer = f"{names.layers}.{parameter.part}"
    if module in names.stacked:
        matrix = kind == "weight"
        place = f"{layer}.{names.stacked[module]}{'' if matrix else '_bias'}"
        return Place((place,), transposed=matrix, interleaved=module == "gate_up" and names.pairs_stacked)
    each = names.experts[module]
    # A mixture of one expert has its matrix as it is.
    wide = parameter.shape[-2] // len(each)
    listed = (f"{names.expert.format(number)}.{name}" for number in range(model.experts) for name in each)
    found = tuple(f"{layer}.{name}.{kind}" for name in listed)
    return Place(found, (wide,) * len(found), experts=model.experts if model.experts > 1 else 0)


def to_huggingface(model: Transformer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters, all or some, as the tensors of a file that `from_pretrained` reads.

    What is cut or turned is copied, the rest is handed on: converting a few parameters at a time saves memory.
    """
    names = names_of(model)
    # Which parameters there are does not depend on the tokens.
    known = {parameter.name: parameter for parameter in parameters_of(model, 1)}
    found: dict[str, Tensor] = {}
    for name, value in parameters.items():
        found.update(place_of(model, names, known[name]).split(value.detach()))
    return found


HEAD = "lm_head.weight"
"""What most files call the head of a language model, without prefixes."""


def from_huggingface(
    model: Transformer,
    tensors: Mapping[str, Tensor],
    sequence_tokens: int,
    take: Callable[[str, Tensor], None] | None = None,
) -> LoadedFolder:
    """A file's tensors under our names, in the types that they have; adapters are no part of it.

    With `take` each is handed over as soon as it is read, so that a model never lies whole in memory.
    A classifier may be begun from an encoder that has no such head, or another one, and a masked head from an encoder
    without: `missing` tells what it lacks.
    """
    names = names_of(model)
    if names.stacked:
        tensors = Dequantised(tensors)
    given = _without_prefixes(model, tensors)
    found: dict[str, Tensor] = {}
    lacking: list[str] = []
    missing: list[str] = []
    misshapen: list[str] = []
    for parameter in parameters_of(replace(model, adapters=None), sequence_tokens):
        place = place_of(model, names, parameter)
        parts = [given.pop(_bare(name), None) for name in place.names]
        present = [tensors[part] for part in parts if part is not None]
        if len(present) < len(parts):
            missing.append(parameter.name)
            lacking += [name for name, part in zip(place.names, parts, strict=True) if part is None]
            continue
        for name, part, shape in zip(place.names, present, place.shapes(parameter), strict=True):
            if tuple(part.shape) != shape:
                misshapen.append(f"{name} is {_sides(part.shape)}, not {_sides(shape)}")
        if not misshapen and take is not None:
            take(parameter.name, place.join(present))
        elif not misshapen:
            found[parameter.name] = place.join(present)
    if _only_a_new_head(model, missing):
        lacking = []
    _refuse(model, "lacks tensors", lacking, "a file of another model, or only one of its parts?")
    _refuse(model, "has tensors of other shapes", misshapen, "a file of a model of another size, or with other labels?")
    unexpected = [name for name in given if not _beside_the_model(model, name)]
    _refuse(model, "has tensors that the model has not", unexpected, "a file of another kind of model?")
    _check_tied(model, tensors, given)
    return LoadedFolder(found, tuple(missing))


def _check_tied(model: Transformer, tensors: Mapping[str, Tensor], left: Mapping[str, str]) -> None:
    """Refuse a head that would be left out though it is another matrix than the one that it is tied to."""
    if model.head != "language" or not model.tied or HEAD not in left:
        return
    names = names_of(model)
    (tied,) = place_of(model, names, next(each for each in parameters_of(model, 1) if each.name == "head.weight")).names
    embedding = _without_prefixes(model, tensors)[_bare(tied)]
    if not torch.equal(tensors[left[HEAD]], tensors[embedding]):
        raise FlopwiseError(
            f"{model.name}: the file of weights has a head that is not its embedding",
            why=f"tie_word_embeddings says that they are one matrix, and {left[HEAD]} is another than {embedding}",
            hint='"tie_word_embeddings": false in the config.json if both are meant, or a file without the head',
        )


def _without_prefixes(model: Transformer, tensors: Iterable[str]) -> dict[str, str]:
    """Names without their prefixes → as they are in the file."""
    found: dict[str, str] = {}
    twice: list[str] = []
    for name in tensors:
        if name.endswith(BUFFERS):
            continue
        bare = _bare(name)
        for old, new in OLD_NAMES.items():
            bare = bare.removesuffix(old) + new if bare.endswith(old) else bare
        if bare in found:
            twice.append(name)
        found[bare] = name
    _refuse(model, "has tensors twice, with a prefix and without", twice, "which of the two is meant?")
    return found


def _bare(name: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def _only_a_new_head(model: Transformer, missing: Iterable[str]) -> bool:
    """Whether what is missing is a classifier's last layer, or that and the pooler before it, but not half of one; or
    a whole masked head, of which ModernBERT's classifiers have all but the bias.
    """
    lacking = {*missing}
    if model.head == "masked":
        hidden = {each.name for each in parameters_of(model, 1) if each.name.startswith("transform")} | {"head.bias"}
        return lacking == hidden or (model.family == "modernbert" and lacking == {"head.bias"})
    first = {name for name in lacking if name.startswith(("pooler.", "pooler_norm."))}
    there = {parameter.name for parameter in parameters_of(model, 1) if parameter.name.startswith("pooler")}
    last = {"classifier.weight", "classifier.bias"}
    return model.head == "classifier" and lacking - first == last and first in (set(), there)


def _beside_the_model(model: Transformer, name: str) -> bool:
    """What files hold that a model of this head has no use for: other heads, and a tied matrix once more."""
    if model.head == "classifier":
        return name.startswith(("cls.", "pooler.", "lm_head.", "vocab_", "generator_", "discriminator_", "decoder."))
    if model.head == "masked":
        others = (
            "pooler.",
            "classifier.",
            "pre_classifier.",
            "cls.seq_relationship.",
            "cls.predictions.decoder.",
            "lm_head.decoder.",
        )
        tied = ("vocab_projector.weight", "generator_lm_head.weight", "decoder.weight")
        return name.startswith(others) or name in tied
    if name.startswith(OTHER_PARTS):
        return True
    # Of DeepSeek's and GLM's kin, what foretells a further token lies behind the blocks.
    further = model.routing.correction and name.startswith(f"layers.{model.layers}.")
    return further or (model.tied and name == HEAD)


def _sides(shape: Iterable[int]) -> str:
    return " × ".join(str(side) for side in shape)


def _refuse(model: Transformer, what: str, names: list[str], hint: str) -> None:
    if names:
        more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
        raise FlopwiseError(f"{model.name}: the file of weights {what}", why=", ".join(names[:FEW]) + more, hint=hint)


# -- configuration ----------------------------------------------------------------------------------------------------


def config_of(model: Transformer, sequence_tokens: int | None = None) -> dict[str, Any]:
    """The `config.json` that `transformers` builds this network from, in keys that old and new versions read.

    `sequence_tokens` sizes a position table whose rows the description leaves open. The caller adds what a network
    does not know: the type of its numbers and the special tokens.
    """
    family = family_of(model)
    rows = model.position_rows or sequence_tokens or model.context
    if family in SAVED:
        return SAVED[family].config(family, model)
    if family == "gpt2":
        return _gpt2_config(model, rows)
    return _bert_config(model, rows) if family == "bert" else _llama_config(model, family)


CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _llama_config(model: Transformer, family: str) -> dict[str, Any]:
    if family == "llama":
        own: dict[str, Any] = {"attention_bias": model.qkv_bias, "mlp_bias": model.ffn_bias}
    else:
        own = {
            "use_sliding_window": model.window is not None,
            "sliding_window": model.window,
            # The first block with a window, where those are the upper ones.
            "max_window_layers": len(model.other_blocks) if model.window is not None else model.layers,
        }
    if model.other_blocks:
        own["layer_types"] = layer_types(model)
    if family == "qwen3":
        own["attention_bias"] = model.qkv_bias
    return {
        "model_type": family,
        "architectures": [CLASSES[family]],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "hidden_act": activation_of(model),
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": rotary_scaling_of(model.rotary_scaling),
        "tie_word_embeddings": model.tied,
        "initializer_range": LEAST_DEVIATION,
        "attention_dropout": (model.dropout or Dropout()).attention,
        **NO_SPECIAL_TOKENS,
        **own,
    }


def _gpt2_config(model: Transformer, rows: int) -> dict[str, Any]:
    dropout = model.dropout or Dropout()
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": rows,
        "vocab_size": model.vocab,
        "activation_function": activation_of(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "scale_attn_weights": model.attention_scale is None,
        "tie_word_embeddings": model.tied,
        "initializer_range": LEAST_DEVIATION,
        **NO_SPECIAL_TOKENS,
        # Without these `transformers` would drop a tenth when it trains on.
        "resid_pdrop": dropout.hidden,
        "embd_pdrop": dropout.embedding,
        "attn_pdrop": dropout.attention,
        "summary_first_dropout": dropout.of_classifier,
    }


def _bert_config(model: Transformer, rows: int) -> dict[str, Any]:
    return {"model_type": "bert", **head_config("Bert", model), **bert_like_config(model, rows)}
