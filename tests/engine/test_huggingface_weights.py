"""Weights to `transformers` and back: the same outputs through `save_pretrained` and `from_pretrained`, and errors."""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.huggingface import from_config
from flopwise.catalog.load import load_model
from flopwise.engine.weights.huggingface import config_of, family_of, from_huggingface, to_huggingface
from flopwise.work.transformer import Dropout, Transformer
from tests.support.strategies import transformers as random_transformers
from tests.support.tiny_models import (
    BERT,
    GPT2,
    LLAMA,
    TINY,
    TOKENS,
    names_and_shapes,
    parameters,
    random_ids,
    random_module,
    transformers_class,
    transformers_model,
)

Tensors = dict[str, Tensor]


def shape(model: Transformer) -> dict[str, object]:
    """Everything but the words."""
    return {
        field: value
        for field, value in dataclasses.asdict(model).items()
        if field not in ("name", "title", "source", "note", "family")
    }


def read_back(kind: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, told = kind.from_pretrained(
            folder, dtype=torch.float64, output_loading_info=True, experts_implementation="eager"
        )
    return theirs.eval(), told


def logits(network: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        result = network(ids)
    found: Tensor = result if isinstance(result, Tensor) else result.logits
    return found


@pytest.mark.parametrize("name", TINY)
def test_transformers_reads_what_we_write(name: str, tmp_path: Path) -> None:
    model = TINY[name]
    module = random_module(model)
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)), encoding="utf-8")
    written = {name: value.contiguous() for name, value in to_huggingface(model, parameters(module)).items()}
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs, told = read_back(transformers_class(model), tmp_path)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    expected = transformers_model(model, module).state_dict()
    assert theirs.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in theirs.state_dict().items())
    # Their norms compute in fp32 even here; the tests of the modules compare without that.
    ids = random_ids(model)
    # Nemotron-H hands out logits in fp32.
    torch.testing.assert_close(logits(module, ids), logits(theirs, ids).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_we_read_what_transformers_writes(name: str, tmp_path: Path) -> None:
    model = TINY[name]
    module = random_module(model, seed=4)
    theirs = transformers_model(model, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save_pretrained(tmp_path)
    described = from_config(json.loads((tmp_path / "config.json").read_text("utf-8")), "read")
    assert shape(described) == shape(model) | {"context": described.context}
    loaded = from_huggingface(described, load_file(tmp_path / "model.safetensors"), TOKENS)
    assert loaded.missing == ()
    assert {name: tuple(value.shape) for name, value in loaded.tensors.items()} == names_and_shapes(model)
    for parameter, value in parameters(module).items():
        assert torch.equal(loaded.tensors[parameter], value), parameter


@pytest.mark.parametrize("name", TINY)
def test_configuration_describes_the_same_model(name: str) -> None:
    model = TINY[name]
    read = from_config(config_of(model), name)
    assert shape(read) == shape(model)
    assert read.note is None


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("llama-3-1b", "llama"),
        ("llama-3-8b", "llama"),
        ("mistral-7b", "mistral"),
        ("qwen2.5-0.5b", "qwen2"),
        ("qwen3-0.6b", "qwen3"),
        ("gpt2-xl", "gpt2"),
        ("bert-base", "bert"),
    ],
)
def test_catalogue_models_have_their_class_and_configuration(name: str, family: str) -> None:
    model = load_model(name)
    assert isinstance(model, Transformer)
    assert family_of(model) == family
    assert shape(from_config(config_of(model), name)) == shape(model)


@pytest.mark.parametrize("classifier", [None, 0.0, 0.4])
@pytest.mark.parametrize("name", ["gpt2", "bert", "bert-masked", "qwen3"])
def test_dropout_comes_back_as_it_was(name: str, classifier: float | None) -> None:
    dropout = Dropout(attention=0.3)
    if name != "qwen3":
        dropout = Dropout(embedding=0.2, hidden=0.2, attention=0.3, classifier=classifier)
    model = replace(TINY[name], dropout=dropout)
    assert from_config(config_of(model), name).dropout == dropout
    kind = transformers_class(model)
    theirs = kind.config_class.from_dict(config_of(model)).to_dict()
    assert from_config({**theirs, "architectures": [kind.__name__]}, name).dropout == dropout


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_model_without_dropout_is_saved_without_it(name: str) -> None:
    written = config_of(TINY[name])
    assert {value for key, value in written.items() if "drop" in key and value is not None} == {0.0}


def test_open_position_table_takes_the_rows_of_the_training() -> None:
    """MPT with learned positions and biases is the network of GPT-2's class."""
    model = load_model("mpt-125m")
    assert isinstance(model, Transformer)
    read = from_config(config_of(model, 512), "mpt")
    assert shape(read) == shape(model) | {"position_rows": 512, "context": 512}
    assert config_of(model)["n_positions"] == model.context


@settings(max_examples=80, deadline=None)
@given(random_transformers())
def test_any_model_comes_back_or_has_no_class(model: Transformer) -> None:
    try:
        family = family_of(model)
    except FlopwiseError as error:
        assert error.hint
        return
    assert config_of(model)["model_type"] == family
    values = {name: torch.randn(shape) for name, shape in names_and_shapes(model).items()}
    loaded = from_huggingface(model, to_huggingface(model, values), TOKENS)
    assert loaded.missing == ()
    assert all(torch.equal(loaded.tensors[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    "model",
    [
        replace(LLAMA, qkv_bias=True, ffn_bias=True),
        replace(LLAMA, window=4, output_bias=True, qkv_bias=True),
        replace(LLAMA, hidden=22),
        replace(LLAMA, norm="layer"),
        replace(LLAMA, experts=2, experts_per_token=1),
        replace(LLAMA, head="classifier", labels=2),
        replace(GPT2, norm_bias=False),
        replace(GPT2, parallel_residual=True),
        replace(GPT2, head_bias=True),
        replace(BERT, causal=True),
        replace(BERT, token_types=0),
        replace(BERT, head="masked"),
    ],
)
def test_networks_without_a_class_are_refused(model: Transformer) -> None:
    with pytest.raises(FlopwiseError, match="transformers has no class for this network"):
        config_of(model)
    with pytest.raises(FlopwiseError, match="transformers has no class for this network"):
        from_huggingface(model, {}, TOKENS)


def file_of(model: Transformer) -> Tensors:
    return to_huggingface(model, {name: torch.randn(shape) for name, shape in names_and_shapes(model).items()})


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): value for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("name", "prefix"), [("llama", "model."), ("gpt2", "transformer."), ("bert", "bert."), ("bert-masked", "bert.")]
)
def test_prefix_may_be_absent(name: str, prefix: str) -> None:
    model = TINY[name]
    tensors = file_of(model)
    bare = {name.removeprefix(prefix): value for name, value in tensors.items()}
    assert bare.keys() != tensors.keys()
    expected = from_huggingface(model, tensors, TOKENS).tensors
    assert all(
        torch.equal(expected[name], value) for name, value in from_huggingface(model, bare, TOKENS).tensors.items()
    )


def test_a_language_model_is_found_beside_a_vision_part() -> None:
    model = TINY["llama4_text"]
    tensors = file_of(model)
    beside = {f"language_model.{name}": value for name, value in tensors.items()}
    expected, found = (from_huggingface(model, each, TOKENS).tensors for each in (tensors, beside))
    assert found.keys() == expected.keys()
    assert all(torch.equal(expected[name], value) for name, value in found.items())


@pytest.mark.parametrize("name", ["llama", "mixtral", "mistral", "qwen3_moe", "gpt_oss"])
def test_what_is_trained_and_how_changes_no_class(name: str) -> None:
    model = TINY[name]
    routing = replace(model.routing, balance=0.1, balance_over="layer", z_loss=0.1, skew=0.5) if model.experts else None
    trained = replace(model, objective="preference", routing=routing or model.routing)
    assert family_of(trained) == family_of(model)


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        (LLAMA, ["model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"]),
        (replace(LLAMA, tied=True), ["lm_head.weight"]),
        (GPT2, ["h.0.attn.bias", "transformer.h.1.attn.masked_bias", "lm_head.weight"]),
        (BERT, ["bert.embeddings.position_ids", "cls.predictions.bias", "cls.seq_relationship.weight"]),
        (TINY["llama4_text"], ["vision_model.class_embedding", "multi_modal_projector.linear_1.weight"]),
        (TINY["bert-masked"], ["bert.pooler.dense.weight", "cls.predictions.decoder.bias"]),
    ],
)
def test_what_is_no_parameter_of_the_model_is_left(model: Transformer, extra: list[str]) -> None:
    tensors = file_of(model)
    embeddings = [values for name, values in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight"))]
    tensors |= {name: embeddings[0] if name == "lm_head.weight" else torch.zeros(1) for name in extra}
    assert from_huggingface(model, tensors, TOKENS).tensors.keys() == names_and_shapes(model).keys()


def test_a_head_that_is_not_the_embedding_that_it_is_tied_to_is_refused() -> None:
    for model in (replace(LLAMA, tied=True), GPT2):
        tensors = file_of(model)
        (other,) = (values + 1 for name, values in tensors.items() if name.endswith(("tokens.weight", "wte.weight")))
        with pytest.raises(FlopwiseError, match="a head that is not its embedding") as caught:
            from_huggingface(model, tensors | {"lm_head.weight": other}, TOKENS)
        assert caught.value.hint


def test_first_files_of_bert_name_their_norms_otherwise() -> None:
    tensors = file_of(BERT)
    old = renamed(renamed(tensors, "LayerNorm.weight", "LayerNorm.gamma"), "LayerNorm.bias", "LayerNorm.beta")
    assert old.keys() != tensors.keys()
    loaded = from_huggingface(BERT, old, TOKENS).tensors
    assert torch.equal(loaded["embedding_norm.bias"], tensors["bert.embeddings.LayerNorm.bias"])


def test_classifier_begins_from_a_bare_encoder(tmp_path: Path) -> None:
    """The files of BertModel and BertForMaskedLM, written by their own classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        config = transformers.BertConfig(**config_of(BERT))
        for kind, folder in ((transformers.BertModel, "bare"), (transformers.BertForMaskedLM, "masked")):
            make: Any = kind
            make(config).save_pretrained(tmp_path / folder)
    last = ("classifier.weight", "classifier.bias")
    bare = from_huggingface(BERT, load_file(tmp_path / "bare" / "model.safetensors"), TOKENS)
    assert bare.missing == last
    assert bare.tensors.keys() == names_and_shapes(BERT).keys() - set(last)
    masked = from_huggingface(BERT, load_file(tmp_path / "masked" / "model.safetensors"), TOKENS)
    assert set(masked.missing) == {"pooler.weight", "pooler.bias", *last}


@pytest.mark.parametrize(
    ("model", "taken", "added", "words"),
    [
        (LLAMA, ("model.norm.weight",), {}, ("lacks tensors", "model.norm.weight")),
        (LLAMA, ("lm_head.weight",), {}, ("lacks tensors", "lm_head.weight")),
        (LLAMA, ("model.layers.1.self_attn.k_proj.weight",), {}, ("lacks tensors", "layers.1.self_attn.k_proj.weight")),
        (BERT, ("classifier.bias",), {}, ("lacks tensors", "classifier.bias")),
        (BERT, ("bert.pooler.dense.bias",), {}, ("lacks tensors", "bert.pooler.dense.bias")),
        (LLAMA, (), {"model.layers.2.mlp.up_proj.weight": (3,)}, ("has tensors that the model has not", "layers.2.")),
        (LLAMA, (), {"model.layers.0.self_attn.q_proj.bias": (24,)}, ("that the model has not", "q_proj.bias")),
        (LLAMA, (), {"norm.weight": (24,)}, ("twice", "norm.weight")),
        (LLAMA, (), {"model.layers.0.self_attn.v_proj.weight": (9, 24)}, ("v_proj.weight is 9 × 24, not 8 × 24",)),
        (GPT2, (), {"transformer.h.0.attn.c_attn.weight": (60, 20)}, ("c_attn.weight is 60 × 20, not 20 × 60",)),
        (GPT2, (), {"transformer.wpe.weight": (18, 20)}, ("wpe.weight is 18 × 20, not 19 × 20",)),
        (BERT, (), {"classifier.weight": (2, 20)}, ("classifier.weight is 2 × 20, not 3 × 20", "other labels")),
    ],
)
def test_mistakes_in_a_file_are_named(
    model: Transformer, taken: tuple[str, ...], added: dict[str, tuple[int, ...]], words: tuple[str, ...]
) -> None:
    tensors = file_of(model)
    for name in taken:
        del tensors[name]
    tensors |= {name: torch.zeros(sides) for name, sides in added.items()}
    with pytest.raises(FlopwiseError) as caught:
        from_huggingface(model, tensors, TOKENS)
    assert all(word in str(caught.value) for word in words)
    assert str(caught.value).startswith(f"{model.name}: the file of weights ")


def test_only_the_first_few_names_are_told() -> None:
    with pytest.raises(FlopwiseError) as caught:
        from_huggingface(LLAMA, {}, TOKENS)
    assert str(caught.value.why).endswith(" more")
    assert len(str(caught.value.why)) < 300
