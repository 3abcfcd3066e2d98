"""Reading config.json: the same shapes as the catalogue, the defaults of transformers, and errors a user can act on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.huggingface import from_config
from flopwise.catalog.huggingface_families import FAMILIES
from flopwise.catalog.load import model_aliases
from flopwise.work.attention_kinds import RotaryScaling
from flopwise.work.describe import describe
from flopwise.work.op import Attention
from flopwise.work.transformer import Dropout, Transformer
from tests.catalog.hub_configs import HUB, PUBLISHED
from tests.catalog.hybrid_configs import GRANITE_MIXTURE, GRANITE_SHARED
from tests.catalog.mixture_configs import LLAMA4_TEXT
from tests.catalog.test_model_catalog import transformer, transformer_parameters

Config = dict[str, object]

LLAMA: Config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL: Config = LLAMA | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MIXTRAL: Config = MISTRAL | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
QWEN2: Config = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3: Config = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT2: Config = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
GPT_NEOX: Config = {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50432,
}
MPT: Config = {
    "model_type": "mpt",
    "architectures": ["MPTForCausalLM"],
    "attn_config": {"alibi": True, "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False},
    "d_model": 4096,
    "expansion_ratio": 4,
    "learned_pos_emb": True,
    "max_seq_len": 2048,
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "vocab_size": 50432,
}
BERT: Config = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
LLAMA_SCALING: Config = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
SIX_LABELS: Config = {
    "architectures": ["BertForSequenceClassification"],
    "id2label": {str(index): f"LABEL_{index}" for index in range(6)},
}
GRANITES = (GRANITE_MIXTURE, GRANITE_SHARED)
CONFIGS = {
    str(config["model_type"]): config
    for config in (
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        GPT2,
        GPT_NEOX,
        MPT,
        BERT,
        LLAMA4_TEXT,
        *GRANITES,
        *HUB.values(),
    )
    if "text_config" not in config
}


def without(config: Config, *keys: str) -> Config:
    """The same file with some keys left out."""
    return {key: value for key, value in config.items() if key not in keys}


def shape(model: Transformer) -> dict[str, object]:
    """Everything but the words."""
    words = ("name", "title", "source", "note", "family")
    return {field: value for field, value in dataclasses.asdict(model).items() if field not in words}


def error_of(config: Config) -> FlopwiseError:
    """The error that a file is answered with."""
    with pytest.raises(FlopwiseError) as caught:
        from_config(config, "mine")
    return caught.value


def test_every_family_has_an_example() -> None:
    assert set(CONFIGS) == set(FAMILIES)


def test_blocks_come_in_kinds() -> None:
    mixed = from_config(QWEN2 | {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 21}, "mine")
    assert [mixed.kind_of(layer).window for layer in range(24)] == [None] * 21 + [99] * 3
    gemma = from_config(HUB["google/gemma-3-1b-pt"], "mine")
    assert gemma.other_blocks == (5, 11, 17, 23)
    kinds = [(kind.window, kind.rotary_base) for kind in gemma.kinds]
    assert kinds == [(512, 10_000.0), (None, 1e6)]
    smol = from_config(HUB["HuggingFaceTB/SmolLM3-3B"], "mine")
    assert [kind.positions for kind in smol.kinds] == ["rotary", "none"]
    # Attention's pairs are those of each kind's window.
    tokens, full = 4096, describe(dataclasses.replace(gemma, other_attention=None, other_blocks=(), window=None), 4096)
    plain, found = (next(op for op in work.ops if op.name == "attention") for work in (full, describe(gemma, tokens)))
    band = tokens**2 - (tokens - 512) ** 2
    assert found.forward_flops() * 26 * tokens**2 == plain.forward_flops() * (4 * tokens**2 + 22 * band)


def test_a_language_model_beside_a_vision_part_is_described() -> None:
    scout = from_config(HUB["meta-llama/Llama-4-Scout-17B-16E-Instruct"], "mine")
    assert scout.note is not None and "vision part is left out" in scout.note
    assert (scout.other_blocks[:3], scout.dense_blocks, scout.attention_chunk) == ((3, 7, 11), (), 8192)
    # As the class of transformers counts them, all and with the one expert of each block that a token has.
    work = describe(scout, 4096)
    assert (work.parameters, work.active_parameters) == (107_769_861_120, 17_172_894_720)
    maverick = from_config(HUB["meta-llama/Llama-4-Maverick-17B-128E-Instruct"], "mine")
    assert maverick.dense_blocks == tuple(range(0, 48, 2)) and not maverick.qk_norm
    assert describe(maverick, 4096).active_parameters == 17_184_691_200


@pytest.mark.parametrize("tokens", [4096, 8192, 20_000])
def test_pairs_of_attention_in_chunks_are_those_within_each_chunk(tokens: int) -> None:
    scout = from_config(HUB["meta-llama/Llama-4-Scout-17B-16E-Instruct"], "mine")
    attention = next(op for op in describe(scout, tokens).ops if isinstance(op, Attention))
    chunked, whole = attention.by_kind()
    sides = [8192] * (tokens // 8192) + [tokens % 8192]
    assert (chunked.layers, whole.layers) == (36, 12)
    assert chunked.twice_pairs("mask") == sum(side**2 for side in sides)
    assert whole.twice_pairs("mask") == tokens**2
    parts = [(0, 5_000), (5_000, 9_000), (9_000, tokens)] if tokens > 9_000 else [(0, 77), (77, tokens)]
    assert sum(chunked.twice_pairs_of(*part) for part in parts) == chunked.twice_pairs("mask")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers cannot be described"),
        ({"moe_layers": [48]}, "moe_layers are no blocks"),
        ({"layer_types": ["full_attention"] * 48}, "layer_types cannot be described"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ],
)
def test_what_of_llama_4_is_not_known_is_refused(change: dict[str, Any], told: str) -> None:
    scout = HUB["meta-llama/Llama-4-Scout-17B-16E-Instruct"]
    text: Any = scout["text_config"]
    with pytest.raises(FlopwiseError, match=told):
        from_config(scout | {"text_config": text | change}, "mine")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name: str) -> None:
    model = from_config(HUB[name], name)
    assert model.note is None
    assert describe(model, min(1024, model.context)).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama-3-8b"),
        (MISTRAL, "mistral-7b"),
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN2, "qwen2.5-0.5b"),
        (QWEN3, "qwen3-0.6b"),
        (GPT2, "gpt2"),
        (GPT_NEOX, "pythia-6.9b"),
        (BERT | SIX_LABELS, "bert-base"),
        (HUB["openai/gpt-oss-20b"], "gpt-oss-20b"),
        (HUB["zai-org/GLM-4.5-Air"], "glm-4.5-air"),
        (HUB["Qwen/Qwen2-57B-A14B"], "qwen2-57b-a14b"),
        (HUB["Qwen/Qwen1.5-MoE-A2.7B"], "qwen1.5-moe-a2.7b"),
        (HUB["FacebookAI/roberta-base"], "roberta-base"),
        (HUB["answerdotai/ModernBERT-base"], "modernbert-base"),
        (HUB["answerdotai/ModernBERT-large"], "modernbert-large"),
        (HUB["distilbert/distilbert-base-uncased"], "distilbert-base"),
        *((HUB[name], name) for name in HUB if name.lower() in model_aliases()),
    ],
)
def test_shape_is_that_of_the_catalogue(config: Config, name: str) -> None:
    described, listed = from_config(config, "mine"), transformer(model_aliases().get(name.lower(), name))
    assert shape(described) == shape(listed)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (MPT, 6_649_286_656),
        (BERT, 109_514_298),
        (BERT | SIX_LABELS, 109_486_854),
        (without(BERT, "architectures"), 109_483_778),
        # Llama 2 7B, whose file leaves the key-value heads to the default.
        (
            without(LLAMA, "num_key_value_heads") | {"vocab_size": 32000, "intermediate_size": 11008},
            6_738_415_616,
        ),
    ],
)
def test_parameters_are_the_published_ones(config: Config, parameters: int) -> None:
    assert transformer_parameters(from_config(config, "mine"), 512) == parameters


def test_words_name_the_file_and_the_family() -> None:
    model = from_config(LLAMA, "mine")
    assert model.name == "mine"
    assert model.title == "mine (Llama)"
    assert model.source == 'Hugging Face config.json, model_type "llama"'
    assert model.note is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (without(LLAMA, "num_key_value_heads"), {"kv_heads": 32}),
        (LLAMA | {"num_key_value_heads": None}, {"kv_heads": 32}),
        (LLAMA | {"head_dim": 96}, {"head_dim": 96}),
        (LLAMA | {"head_dim": None}, {"head_dim": 128}),
        (LLAMA | {"attention_bias": True}, {"qkv_bias": True, "output_bias": True, "ffn_bias": False}),
        (LLAMA | {"mlp_bias": True}, {"qkv_bias": False, "ffn_bias": True}),
        (LLAMA | {"tie_word_embeddings": True}, {"tied": True}),
        (LLAMA | {"hidden_act": "gelu_pytorch_tanh"}, {"activation": "gelu_tanh"}),
        (LLAMA | {"hidden_act": "gelu_python"}, {"activation": "gelu"}),
        (without(LLAMA, "max_position_embeddings"), {"context": 2048}),
        (without(MISTRAL, "num_key_value_heads", "sliding_window"), {"kv_heads": 8, "window": 4096}),
        (MISTRAL | {"num_key_value_heads": None, "sliding_window": None}, {"kv_heads": 32, "window": None}),
        (without(MISTRAL, "max_position_embeddings"), {"context": 131072}),
        (without(MIXTRAL, "num_local_experts", "sliding_window"), {"experts": 8, "window": None}),
        (MIXTRAL | {"num_experts": 16}, {"experts": 16}),
        (QWEN2 | {"use_sliding_window": True}, {"window": None}),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, {"window": 32768}),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 24}, {"window": 32768}),
        (without(QWEN3, "head_dim"), {"head_dim": 128}),
        (QWEN3 | {"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
        (QWEN3, {"qk_norm": True, "qkv_bias": False}),
        (GPT2 | {"n_inner": None}, {"ffn": 3072}),
        (GPT2 | {"n_inner": 1000}, {"ffn": 1000}),
        (GPT2 | {"tie_word_embeddings": False}, {"tied": False}),
        (GPT2 | {"n_positions": 2048}, {"context": 2048, "position_rows": 2048}),
        (without(GPT2, "n_embd") | {"hidden_size": 1536}, {"hidden": 1536, "ffn": 6144}),
        (GPT_NEOX | {"attention_bias": False}, {"qkv_bias": False, "output_bias": False, "ffn_bias": True}),
        (GPT_NEOX | {"use_parallel_residual": False}, {"parallel_residual": False}),
        (without(GPT_NEOX, "use_parallel_residual", "tie_word_embeddings"), {"parallel_residual": True, "tied": False}),
        (without(MPT, "attn_config", "no_bias", "expansion_ratio"), {"positions": "alibi", "ffn": 16384}),
        (MPT | {"attn_config": None}, {"positions": "alibi", "norm_bias": False, "tied": True}),
        (BERT, {"head": "masked", "tied": True, "head_bias": True, "causal": False, "labels": None}),
        (BERT | {"tie_word_embeddings": False}, {"tied": False}),
        (BERT | {"architectures": ["BertLMHeadModel"], "is_decoder": True}, {"head": "masked", "causal": True}),
        (BERT | {"architectures": ["BertForSequenceClassification"]}, {"labels": 2, "tied": False}),
        (BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 5}, {"labels": 5}),
        (BERT | SIX_LABELS | {"num_labels": 5}, {"labels": 6}),
        (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"hidden": 4096}),
    ],
)
def test_options_and_defaults_are_those_of_transformers(config: Config, expected: dict[str, object]) -> None:
    read = shape(from_config(config, "mine"))
    assert {field: read[field] for field in expected} == expected


LLAMA_3_2 = RotaryScaling(factor=32.0, original_context=8192, low_frequency_factor=1.0, high_frequency_factor=4.0)


@pytest.mark.parametrize(
    ("config", "epsilon", "base", "scaling"),
    [
        (LLAMA, 1e-5, 500_000.0, None),
        (without(LLAMA, "rms_norm_eps", "rope_theta"), 1e-6, 10_000.0, None),
        (without(MIXTRAL, "rms_norm_eps", "rope_theta"), 1e-5, 1e6, None),
        (QWEN3, 1e-6, 1e6, None),
        (without(BERT, "layer_norm_eps"), 1e-12, 10_000.0, None),
        (BERT | {"layer_norm_eps": 1e-7}, 1e-7, 10_000.0, None),
        (GPT2 | {"layer_norm_epsilon": 1e-6}, 1e-6, 10_000.0, None),
        (MPT | {"layer_norm_epsilon": 1e-6}, 1e-6, 10_000.0, None),
        (GPT_NEOX | {"rotary_emb_base": 20000, "rope_theta": 3.0}, 1e-5, 20_000.0, None),
        (LLAMA | {"rope_scaling": LLAMA_SCALING}, 1e-5, 500_000.0, LLAMA_3_2),
        # transformers 5 writes the base and the scaling into one object; the older key still goes before it.
        (without(LLAMA, "rope_theta") | {"rope_parameters": {"rope_theta": 7.0}}, 1e-5, 7.0, None),
        (LLAMA | {"rope_parameters": LLAMA_SCALING | {"rope_theta": 7.0}}, 1e-5, 7.0, LLAMA_3_2),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": LLAMA_SCALING},
            *(1e-5, 500_000.0, RotaryScaling(factor=2.0)),
        ),
        (
            LLAMA | {"rope_scaling": without(LLAMA_SCALING, "original_max_position_embeddings")},
            *(1e-5, 500_000.0, dataclasses.replace(LLAMA_3_2, original_context=8192)),
        ),
        (
            LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            *(1e-5, 500_000.0, RotaryScaling(method="yarn", factor=4.0, original_context=8192)),
        ),
        (
            QWEN2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            *(1e-6, 1e6, RotaryScaling(method="dynamic", factor=2.0, original_context=32768)),
        ),
        (LLAMA | {"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, 1e-5, 500_000.0, None),
    ],
)
def test_numbers_that_only_values_depend_on(
    config: Config, epsilon: float, base: float, scaling: RotaryScaling | None
) -> None:
    model = from_config(config, "mine")
    assert (model.norm_epsilon, model.rotary_base, model.rotary_scaling) == (epsilon, base, scaling)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BERT, Dropout(embedding=0.1, hidden=0.1, attention=0.1)),
        (
            BERT | {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0, "classifier_dropout": 0.3},
            Dropout(embedding=0.2, hidden=0.2, classifier=0.3),
        ),
        (BERT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, None),
        (GPT2, Dropout(embedding=0.1, hidden=0.1, attention=0.1)),
        (
            GPT2 | {"embd_pdrop": 0.05, "resid_pdrop": 0.2, "attn_pdrop": 0.0, "summary_first_dropout": 0.4},
            Dropout(embedding=0.05, hidden=0.2, classifier=0.4),
        ),
        (LLAMA, None),
        (LLAMA | {"attention_dropout": 0.1}, Dropout(attention=0.1)),
    ],
)
def test_dropout_is_what_transformers_would_drop(config: Config, expected: Dropout | None) -> None:
    assert from_config(config, "mine").dropout == expected


@pytest.mark.parametrize("share", [1, -0.1, "a tenth", True])
def test_a_share_that_cannot_be_dropped_is_refused(share: object) -> None:
    with pytest.raises(FlopwiseError, match="hidden_dropout_prob"):
        from_config(BERT | {"hidden_dropout_prob": share}, "mine")


def test_scaled_rotary_positions_are_those_of_the_catalogue() -> None:
    assert transformer("llama-3-1b").rotary_scaling == LLAMA_3_2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (without(BERT, "architectures"), "the file names no head; a classifier of 2 labels is assumed"),
        (BERT | {"architectures": ["BertModel"]}, "BertModel names no head; a classifier of 2 labels is assumed"),
        (LLAMA | {"architectures": ["LlamaModel"]}, "LlamaModel has no head; a language head is assumed"),
        (BERT | {"architectures": ["BertForSequenceClassification"]}, "names no labels; 2 are assumed"),
        (MPT | {"no_bias": False}, "as in llm-foundry"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config is ignored"),
        (LLAMA | {"rope_scaling": {"type": "spiral", "factor": 4.0}}, "rotary scaling 'spiral' is left out"),
        (QWEN2 | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "'by kind of block' is left out"),
        (LLAMA | {"hidden_act": "gelu_10"}, "gelu_10 is taken for gelu"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "divided by √head_dim"),
    ],
)
def test_note_tells_what_was_assumed(config: Config, words: str) -> None:
    model = from_config(config, "mine")
    assert words in str(model.note)
    assert words not in model.source


def test_mpt_with_biases_and_learned_positions_is_that_of_the_benchmarks() -> None:
    config = MPT | {"no_bias": False, "attn_config": {"alibi": False}, "vocab_size": 50368}
    assert shape(from_config(config, "mine")) == shape(transformer("mpt-7b")) | {"position_rows": 2048}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "t5"}, "no family of models is known for model_type 't5'"),
        ({"model_type": ["llama"]}, "model_type a list of 1"),
        ({"model_type": "paligemma", "text_config": LLAMA}, "save the object under text_config as a config.json"),
        ({"model_type": "gemma3", "text_config": None}, "gemma3 without its language model"),
        (without(LLAMA, "hidden_size"), "hidden_size is missing"),
        (without(LLAMA, "vocab_size"), "vocab_size is missing"),
        (without(GPT2, "n_layer"), "n_layer is missing"),
        (without(GPT2, "n_layer") | {"n_layers": 12}, "there is 'n_layers'; is that a misspelling?"),
        (LLAMA | {"hidden_size": "4096"}, "write 4096 without quotation marks"),
        (LLAMA | {"hidden_size": True}, "hidden_size must be a whole number, got true"),
        (LLAMA | {"hidden_size": 4096.0}, "hidden_size must be a whole number, got 4096.0"),
        (LLAMA | {"hidden_size": None}, "hidden_size must be a whole number, got null"),
        (LLAMA | {"hidden_size": [4096]}, "hidden_size must be a whole number, got a list of 1"),
        (LLAMA | {"hidden_size": -4096}, "hidden_size must be between 1 and 2,147,483,647, got -4096"),
        (LLAMA | {"vocab_size": 10**5000}, "a number of more than 18 digits"),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads must be between 1"),
        (LLAMA | {"num_key_value_heads": 5}, "5 key-value heads do not divide 32 query heads"),
        (LLAMA | {"num_attention_heads": 30, "num_key_value_heads": 30}, "30 heads do not divide a width of 4096"),
        (LLAMA | {"attention_bias": "no"}, "attention_bias must be true or false, got 'no'"),
        (LLAMA | {"hidden_act": 3}, "hidden_act must be a string, got 3"),
        (LLAMA | {"hidden_act": "gulu"}, "'gulu' is no activation of transformers"),
        (LLAMA | {"rms_norm_eps": 0}, "rms_norm_eps must be above 0 and finite, got 0"),
        (LLAMA | {"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, got '1e-5'"),
        (LLAMA | {"rope_theta": 10**400}, "a number of more than 18 digits"),
        (LLAMA | {"rope_theta": float("nan")}, "rope_theta must be above 0 and finite, got nan"),
        (LLAMA | {"rope_scaling": 2.0}, "rope_scaling must be an object, got 2.0"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3"}}, "mine: rope_scaling: factor is missing"),
        (LLAMA | {"rope_scaling": {"rope_type": 3}}, "rope_type must be a string, got 3"),
        (LLAMA | {"rope_scaling": LLAMA_SCALING | {"low_freq_factor": 4.5}}, "is above high_frequency_factor"),
        (LLAMA | {"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "cannot be described"),
        (LLAMA | {"architectures": ["LlamaForTokenClassification"]}, "cannot be described"),
        (GPT2 | {"architectures": ["GPT2DoubleHeadsModel"]}, "cannot be described"),
        (BERT | {"architectures": ["BertForPreTraining"]}, '"architectures": ["BertForMaskedLM"]'),
        (LLAMA | {"per_layer_config": {"0": {"hidden_size": 8}}}, "a description repeats one block"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "9 of 8 experts per token"),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types cannot be described"),
        (CONFIGS["gemma2"] | {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is too large"),
        (CONFIGS["smollm3"] | {"no_rope_layers": [1]}, "no_rope_layers or layer_types cannot be described"),
        (QWEN3 | {"head_dim": None}, "head_dim must be a whole number, got null"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention = true cannot be described"),
        (MPT | {"attn_config": 3}, "attn_config must be an object, got 3"),
        (MPT | {"attn_config": {"alibi": 1}}, "mine: attn_config: alibi must be true or false, got 1"),
        (MPT | {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type = 'multiquery_attention'"),
        (MPT | {"norm_type": "rmsnorm"}, "it has another norm"),
        (HUB["google/electra-base-discriminator"] | {"embedding_size": 128}, "its embedding is narrower"),
        (HUB["FacebookAI/roberta-base"] | {"max_position_embeddings": 2}, "max_position_embeddings must be between 3"),
        (HUB["distilbert/distilbert-base-uncased"] | {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds = true"),
        (BERT | {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        (BERT | SIX_LABELS | {"id2label": {}}, "labels must be at least 1"),
        (BERT | SIX_LABELS | {"id2label": ["a", "b"]}, "id2label must be an object, got a list of 2"),
    ],
)
def test_mistakes_are_named(config: Config, words: str) -> None:
    error = error_of(config)
    assert words in str(error)
    assert error.what.startswith("mine: ")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**31, 2**63, 10**30, -(10**400)])
    | st.floats()
    | st.text(max_size=80)
    | st.sampled_from(["4096", "silu", "LlamaForCausalLM", "sliding_attention"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
KEYS = sorted(
    {key for config in CONFIGS.values() for key in config}
    | {"head_dim", "id2label", "num_labels", "layer_types", "text_config", "ffn_config", "is_decoder", "n_inner"}
    | {"rope_parameters", "layer_norm_epsilon", "scale_attn_weights", *LLAMA_SCALING}
    | {"attention_bias", "mlp_bias", "num_experts", "add_cross_attention", "per_layer_config", "pruned_heads"}
)


def read_or_refuse(config: Config) -> None:
    """Only FlopwiseError may come out, and only a description that its own checks accept."""
    try:
        model = from_config(config, "mine")
    except FlopwiseError as error:
        assert str(error)
    else:
        assert transformer_parameters(model, model.context) > 0


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=4))
def test_any_value_in_any_field_is_read_or_refused(family: str, changes: Config) -> None:
    read_or_refuse(CONFIGS[family] | changes)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.sets(st.sampled_from(KEYS), max_size=6))
def test_any_missing_field_is_read_or_refused(family: str, keys: set[str]) -> None:
    read_or_refuse(without(CONFIGS[family], *keys))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.dictionaries(
        st.sampled_from(["alibi", "attn_type", "qk_ln", "prefix_lm", "rope", "ffn_type", "type", *LLAMA_SCALING]),
        JSON | st.sampled_from(["llama3", "linear"]),
    ),
)
def test_any_value_in_a_group_is_read_or_refused(family: str, group: Config) -> None:
    read_or_refuse(
        CONFIGS[family] | {"attn_config": group, "ffn_config": group, "id2label": group, "rope_parameters": group}
    )


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=12), JSON, max_size=8))
def test_any_json_object_is_read_or_refused(config: Config) -> None:
    read_or_refuse(config)
