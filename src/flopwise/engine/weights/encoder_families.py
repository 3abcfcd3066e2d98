"""How each family of encoders names its tensors and is written into a `config.json`; BERT is in `huggingface`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flopwise.engine.weights.families import (
    NO_PADDING,
    NO_SPECIAL_TOKENS,
    Config,
    Names,
    SavedFamily,
    activation_of,
    layer_types,
)
from flopwise.engine.weights.initial import LEAST_DEVIATION
from flopwise.work.transformer import Dropout, Transformer

BERT_LAYER = {
    "norm1": ("attention.output.LayerNorm",),
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "output": ("attention.output.dense",),
    "norm2": ("output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
}
DISTILBERT_LAYER = {
    "norm1": ("sa_layer_norm",),
    "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "output": ("attention.out_lin",),
    "norm2": ("output_layer_norm",),
    "up": ("ffn.lin1",),
    "down": ("ffn.lin2",),
}


def encoder_ends(prefix: str, **own: str) -> dict[str, str]:
    """Names of what is around the blocks."""
    return {
        "embedding": f"{prefix}.embeddings.word_embeddings",
        "positions": f"{prefix}.embeddings.position_embeddings",
        "token_types": f"{prefix}.embeddings.token_type_embeddings",
        "embedding_norm": f"{prefix}.embeddings.LayerNorm",
        **own,
    }


ROBERTA_HEADS = {
    "pooler": "classifier.dense",
    "classifier": "classifier.out_proj",
    "transform": "lm_head.dense",
    "transform_norm": "lm_head.layer_norm",
    "head": "lm_head",
}
ELECTRA_HEADS = {
    "pooler": "classifier.dense",
    "classifier": "classifier.out_proj",
    "transform": "generator_predictions.dense",
    "transform_norm": "generator_predictions.LayerNorm",
    "head": "generator_lm_head",
}
DISTILBERT_HEADS = {
    "pooler": "pre_classifier",
    "classifier": "classifier",
    "transform": "vocab_transform",
    "transform_norm": "vocab_layer_norm",
    "head": "vocab_projector",
}


def head_config(prefix: str, model: Transformer) -> Config:
    """The class, and what only its head has. A masked head's matrix is the embedding's in every class here."""
    if model.head != "classifier" or model.labels is None:
        return {"architectures": [f"{prefix}ForMaskedLM"], "tie_word_embeddings": True}
    labels = [f"LABEL_{label}" for label in range(model.labels)]
    return {
        "architectures": [f"{prefix}ForSequenceClassification"],
        "id2label": {str(label): name for label, name in enumerate(labels)},
        "label2id": {name: label for label, name in enumerate(labels)},
        "problem_type": "single_label_classification",
    }


def bert_like_config(model: Transformer, rows: int) -> Config:
    """The keys that BERT's nearest kin share."""
    dropout = model.dropout or Dropout()
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn,
        "max_position_embeddings": rows,
        "type_vocab_size": model.token_types,
        "vocab_size": model.vocab,
        "hidden_act": activation_of(model),
        "layer_norm_eps": model.norm_epsilon,
        "position_embedding_type": "absolute",
        "initializer_range": LEAST_DEVIATION,
        "hidden_dropout_prob": dropout.hidden,
        "attention_probs_dropout_prob": dropout.attention,
        "classifier_dropout": dropout.classifier,
    }


def _rows(model: Transformer) -> int:
    return model.position_rows or model.context + model.position_offset


def _roberta(model: Transformer) -> Config:
    return {**bert_like_config(model, _rows(model)), "pad_token_id": model.position_offset - 1}


def _electra(model: Transformer) -> Config:
    return {**bert_like_config(model, _rows(model)), "embedding_size": model.hidden}


def _distilbert(model: Transformer) -> Config:
    dropout = model.dropout or Dropout()
    return {
        "n_layers": model.layers,
        "dim": model.hidden,
        "n_heads": model.heads,
        "hidden_dim": model.ffn,
        "max_position_embeddings": _rows(model),
        "vocab_size": model.vocab,
        "activation": activation_of(model),
        "sinusoidal_pos_embds": False,
        "initializer_range": LEAST_DEVIATION,
        "dropout": dropout.hidden,
        "attention_dropout": dropout.attention,
        "seq_classif_dropout": dropout.of_classifier,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderFamily(SavedFamily):
    """How a family's encoders are saved. `architecture`: what the names of its classes begin with."""

    def config(self, family: str, model: Transformer) -> Config:
        """Its `config.json`."""
        return {"model_type": family, **self.own(model), **head_config(self.architecture, model)}


def _roberta_like(prefix: str) -> EncoderFamily:
    names = Names("roberta.encoder.layer", BERT_LAYER, encoder_ends("roberta", **ROBERTA_HEADS))
    return EncoderFamily(architecture=prefix, names=names, own=_roberta)


MODERNBERT_LAYER = {
    "norm1": ("attn_norm",),
    "qkv": ("attn.Wqkv",),
    "output": ("attn.Wo",),
    "norm2": ("mlp_norm",),
    "gate_up": ("mlp.Wi",),
    "down": ("mlp.Wo",),
}
MODERNBERT_ENDS = {
    "embedding": "model.embeddings.tok_embeddings",
    "embedding_norm": "model.embeddings.norm",
    "final_norm": "model.final_norm",
    "pooler": "head.dense",
    "pooler_norm": "head.norm",
    "classifier": "classifier",
    "transform": "head.dense",
    "transform_norm": "head.norm",
    "head": "decoder",
}


def _modernbert(model: Transformer) -> Config:
    dropout = model.dropout or Dropout()
    full = next((kind for kind in model.kinds if kind.window is None), model)
    bases = {"full_attention": full.rotary_base, "sliding_attention": model.rotary_base}
    groups = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    window = model.window or 1
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "hidden_activation": activation_of(model),
        "layer_types": layer_types(model),
        "rope_parameters": groups,
        # For earlier versions.
        "global_rope_theta": full.rotary_base,
        "local_rope_theta": model.rotary_base,
        "local_attention": 2 * (window - 1),
        "norm_eps": model.norm_epsilon,
        "norm_bias": model.norm_bias,
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.ffn_bias,
        "decoder_bias": model.head_bias,
        "classifier_bias": model.transform_bias,
        "classifier_activation": model.pooler_activation,
        "classifier_pooling": "cls" if model.pooling == "first" else model.pooling,
        "attention_dropout": 0.0,
        "mlp_dropout": 0.0,
        "embedding_dropout": dropout.embedding,
        "classifier_dropout": dropout.of_classifier,
        "initializer_range": LEAST_DEVIATION,
        **NO_SPECIAL_TOKENS,
        **NO_PADDING,
        **dict.fromkeys(("cls_token_id", "sep_token_id")),
    }


ENCODERS: Mapping[str, EncoderFamily] = {
    "modernbert": EncoderFamily(
        architecture="ModernBert",
        names=Names("model.layers", MODERNBERT_LAYER, MODERNBERT_ENDS),
        own=_modernbert,
    ),
    "roberta": _roberta_like("Roberta"),
    "xlm-roberta": _roberta_like("XLMRoberta"),
    "electra": EncoderFamily(
        architecture="Electra",
        names=Names("electra.encoder.layer", BERT_LAYER, encoder_ends("electra", **ELECTRA_HEADS)),
        own=_electra,
    ),
    "distilbert": EncoderFamily(
        architecture="DistilBert",
        names=Names("distilbert.transformer.layer", DISTILBERT_LAYER, encoder_ends("distilbert", **DISTILBERT_HEADS)),
        own=_distilbert,
    ),
}
