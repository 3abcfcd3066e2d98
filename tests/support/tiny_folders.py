"""Folders as people fetch them: tiny weights that transformers wrote, a tokenizer, a chat template and the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen's, with marks around what the assistant says."""
SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>", "<pad>")
VOCABULARY = 256 + len(SPECIAL)


def byte_level(folder: Path, *, begins: bool = True) -> Path:
    """A tokenizer.json of single bytes and four special tokens; with `begins` it puts <s> before a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def chat_folder(folder: Path, *, family: str = "Llama") -> Path:
    """A tiny Llama, or one of its kin, that chats, as `save_pretrained` leaves it."""
    transformers: Any = pytest.importorskip("transformers")
    settings = getattr(transformers, f"{family}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=259,
        attention_dropout=0.125,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        head_dim=8,
    )
    torch.manual_seed(0)
    network = getattr(transformers, f"{family}ForCausalLM")(settings)
    network.generation_config.temperature = 0.5
    network.generation_config.do_sample = True
    network.save_pretrained(folder)
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"mine": {"kept": [1, 2]}}))
    byte_level(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return folder
