"""Folders of tiny encoders as `transformers` saves them, with tokenizers that have a mask."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
BERT_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_MARKS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
FAMILIES = ("bert", "roberta", "distilbert", "modernbert")
VOCAB = 40
"""More than the tokenizers have."""


def mask_tokenizer(folder: Path, family: str = "bert") -> Path:
    """Letters as words, marked as BERT or RoBERTa marks them."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    marks = ROBERTA_MARKS if family == "roberta" else BERT_MARKS
    vocab = {word: number for number, word in enumerate((*marks, *LETTERS))}
    first, pad, last, unknown, mask = (
        marks if family == "roberta" else (marks[2], marks[0], marks[3], marks[1], marks[4])
    )
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=unknown))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(list(marks))
    pair = f"{first} $A {last} {last} $B {last}" if family == "roberta" else f"{first}:0 $A:0 {last}:0 $B:1 {last}:1"
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=pair, special_tokens=[(first, vocab[first]), (last, vocab[last])]
    )
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": mask, "pad_token": pad, "unk_token": unknown}
    config |= {"cls_token": first, "sep_token": last}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def config_of_family(family: str) -> dict[str, Any]:
    """Sizes of a tiny one without dropout."""
    shape: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 64}
    if family == "distilbert":
        return shape | {
            "n_layers": 2,
            "dim": 16,
            "n_heads": 2,
            "hidden_dim": 24,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
        }
    shape |= {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    if family == "modernbert":
        own = {"local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0, "cls_token_id": 2}
        return shape | own | {"sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    return shape | {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "type_vocab_size": 1 if family == "roberta" else 2,
        "pad_token_id": 1 if family == "roberta" else 0,
    }


def encoder_folder(folder: Path, family: str, head: str = "ForMaskedLM", **changes: Any) -> Path:
    """Random weights of a family with its tokenizer; every number counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        names = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert", "modernbert": "ModernBert"}
        config = getattr(transformers, f"{names[family]}Config")(**config_of_family(family), **changes)
        torch.manual_seed(7)
        model = getattr(transformers, f"{names[family]}{head}")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder)
    mask_tokenizer(folder, family)
    return folder
