"""Models that see: their language model is read out of their files, and computes what `transformers` does of a text."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from flopwise.catalog.load import load_model  # noqa: E402
from flopwise.engine.modules import build  # noqa: E402
from flopwise.engine.weights.huggingface import config_of, from_huggingface, to_huggingface  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support import tiny_models  # noqa: E402, F401 - tells `transformers` not to look for files elsewhere

TOKENS = 13
TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_SIGHT = {
    "depth": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "out_hidden_size": 32,
}
AXES = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
CASES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**TEXT, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 7}},
    "mistral3": {"text_config": {**TEXT, "model_type": "mistral", "head_dim": 12}, "tie_word_embeddings": False},
    "qwen2_vl": {"text_config": {**TEXT, "rope_parameters": AXES}, "vision_config": QWEN_SIGHT},
    "qwen2_5_vl": {"text_config": {**TEXT, "rope_parameters": AXES}, "vision_config": QWEN_SIGHT},
    "qwen3_vl": {"text_config": {**TEXT, "rope_parameters": AXES, "head_dim": 8}, "vision_config": QWEN_SIGHT},
    "smolvlm": {"text_config": {**TEXT, "model_type": "llama"}},
    "internvl": {"text_config": {**TEXT, "model_type": "qwen2"}, "tie_word_embeddings": False},
}


def saved(folder: Path, family: str) -> Any:
    """A tiny random model that sees, as `transformers` saves it."""
    transformers: Any = pytest.importorskip("transformers")

    settings = {"vision_config": SIGHT, **CASES[family]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **settings)
        theirs = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        theirs.save_pretrained(folder)
    return theirs


def logits_of(model: Transformer, tensors: dict[str, Any], ids: Any) -> Any:
    module = build(model, TOKENS, dtype=torch.float32, device="cpu")
    module.load_state_dict(tensors)
    with torch.no_grad():
        return module(ids)


@pytest.mark.parametrize("family", CASES)
def test_the_language_model_computes_what_it_does_beside_its_eyes(tmp_path: Path, family: str) -> None:
    theirs = saved(tmp_path, family)
    model = load_model(str(tmp_path))
    assert isinstance(model, Transformer)
    assert model.note is not None and "vision part is left out" in model.note
    tensors = from_huggingface(model, load_file(tmp_path / "model.safetensors"), TOKENS).tensors
    ids = torch.randint(0, 61, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
    torch.testing.assert_close(logits_of(model, tensors, ids), expected, rtol=1e-4, atol=1e-5)
    # A checkpoint is the language model alone.
    transformers: Any = pytest.importorskip("transformers")
    config = config_of(model, TOKENS)
    assert "vision_config" not in config
    alone = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    alone.load_state_dict(dict(to_huggingface(model, tensors)), strict=not model.tied)
    with torch.no_grad():
        torch.testing.assert_close(alone(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_older_files_have_the_language_models_keys_beside_those_of_the_eyes(tmp_path: Path) -> None:
    """As Qwen2.5-VL was released."""
    config = {
        **{"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]},
        **TEXT,
        **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "use_sliding_window": False},
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "vision_config": QWEN_SIGHT,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(str(tmp_path))
    assert isinstance(model, Transformer)
    assert (model.family, model.tied, model.qkv_bias, model.rotary_scaling) == ("qwen2", True, True, None)


def test_gemma_3_leaves_sizes_to_its_class(tmp_path: Path) -> None:
    """The whole text_config of google/gemma-3-4b-it."""
    text = {
        **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34},
        **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    found, described = load_model(str(tmp_path)), load_model("gemma-3-4b")
    assert isinstance(found, Transformer)
    words = {name: getattr(described, name) for name in ("name", "title", "source", "note")}
    assert replace(found, **words) == described
