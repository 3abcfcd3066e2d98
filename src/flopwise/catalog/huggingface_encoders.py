"""How the families of encoders spell their shape in a `config.json`: BERT and its kin."""

from __future__ import annotations

from collections.abc import Callable

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.huggingface_rules import (
    GPT_LIKE,
    NO_CROSS_ATTENTION,
    USUAL_SIZES,
    Family,
    Head,
    Only,
    Rule,
    activation_of,
    architecture_of,
    dropout_of,
    fixed,
    labels_of,
    no_such_head,
    number_of,
    size_of,
)
from flopwise.catalog.huggingface_settings import ConfigKeys


def encoder_head(prefix: str, *also_masked: str) -> Callable[[ConfigKeys, Family], Head]:
    """The head that the class of a file names; `also_masked`: further classes with a masked head."""

    def rule(settings: ConfigKeys, family: Family) -> Head:
        architecture = architecture_of(settings)
        masked, classifier = f"{prefix}ForMaskedLM", f"{prefix}ForSequenceClassification"
        if architecture in (masked, *also_masked):
            return Head({"head": "masked", "tied": settings.flag("tie_word_embeddings", absent=True)})
        if architecture and architecture not in (classifier, *family.bare):
            raise no_such_head(settings, architecture, f'"architectures": ["{masked}"] for the nearest that can')
        labels = labels_of(settings)
        fields = {"head": "classifier", "labels": labels}
        if architecture == classifier:
            told = settings.table.get("id2label") is not None or settings.table.get("num_labels") is not None
            return Head(fields, "" if told else f"the file names no labels; {labels} are assumed")
        return Head(fields, f"{architecture or 'the file'} names no head; a classifier of {labels} labels is assumed")

    return rule


def _bert_like(*, epsilon: float = 1e-12, before_pooler: bool = False) -> dict[str, Rule]:
    return {
        **USUAL_SIZES,
        **GPT_LIKE,
        "context": size_of("max_position_embeddings", absent=512),
        "causal": lambda settings: settings.flag("is_decoder", absent=False),
        "positions": fixed("learned"),
        "position_rows": size_of("max_position_embeddings", absent=512),
        "activation": activation_of("hidden_act", absent="gelu"),
        "norm_place": fixed("post"),
        "embedding_norm": fixed(True),
        "final_norm": fixed(False),
        "head_bias": fixed(True),
        "token_types": size_of("type_vocab_size", absent=2),
        "norm_epsilon": number_of("layer_norm_eps", absent=epsilon),
        "dropout": dropout_of(
            0.1,
            attention="attention_probs_dropout_prob",
            hidden="hidden_dropout_prob",
            embedding="hidden_dropout_prob",
            classifier="classifier_dropout",
            before_pooler=before_pooler,
        ),
    }


def _first_position(settings: ConfigKeys) -> int:
    """The row behind the one of padding."""
    return settings.size("pad_token_id", absent=1, least=0) + 1


def _electra_width(settings: ConfigKeys) -> int:
    """That of the blocks, which the embedding's has to be."""
    hidden = settings.size("hidden_size")
    if settings.size("embedding_size", absent=128) != hidden:
        raise FlopwiseError(
            f"{settings.owner}: its embedding is narrower than its blocks, or wider",
            why="a description holds one width; ELECTRA's base and large models have one",
            hint="google/electra-base-discriminator",
        )
    return hidden


ONLY_BERT = (
    NO_CROSS_ATTENTION,
    Only("position_embedding_type", ("absolute",), "its positions are learned for each distance"),
)


def _roberta(title: str, prefix: str) -> Family:
    return Family(
        title=title,
        bare=(f"{prefix}Model",),
        head=encoder_head(prefix),
        only=(*ONLY_BERT, Only("is_decoder", (False,), "its classes of heads are for encoders")),
        rules={
            **_bert_like(before_pooler=True),
            "context": lambda settings: (
                settings.size("max_position_embeddings", absent=512, least=_first_position(settings) + 1)
                - _first_position(settings)
            ),
            "position_offset": _first_position,
            "transform_activation": fixed("gelu"),
        },
    )


ENCODERS: dict[str, Family] = {
    "bert": Family(
        title="BERT",
        bare=("BertModel",),
        head=encoder_head("Bert", "BertLMHeadModel"),
        only=ONLY_BERT,
        rules=_bert_like(),
    ),
    "roberta": _roberta("RoBERTa", "Roberta"),
    "xlm-roberta": _roberta("XLM-RoBERTa", "XLMRoberta"),
    "electra": Family(
        title="ELECTRA",
        bare=("ElectraModel", "ElectraForPreTraining"),
        head=encoder_head("Electra"),
        only=(*ONLY_BERT, Only("is_decoder", (False,), "its classes of heads are for encoders")),
        rules={
            **_bert_like(before_pooler=True),
            "hidden": _electra_width,
            "pooler_activation": fixed("gelu"),
            "transform_activation": fixed("gelu"),
        },
    ),
    "distilbert": Family(
        title="DistilBERT",
        bare=("DistilBertModel",),
        head=encoder_head("DistilBert"),
        only=(Only("sinusoidal_pos_embds", (False,), "its positions are not trained"),),
        rules={
            **_bert_like(),
            "layers": size_of("num_hidden_layers", "n_layers"),
            "hidden": size_of("hidden_size", "dim"),
            "heads": size_of("num_attention_heads", "n_heads"),
            "ffn": size_of("hidden_dim"),
            "causal": fixed(False),
            "token_types": fixed(0),
            "activation": activation_of("activation", absent="gelu"),
            "norm_epsilon": fixed(1e-12),
            "pooler_activation": fixed("relu"),
            "dropout": dropout_of(
                0.1,
                attention="attention_dropout",
                hidden="dropout",
                embedding="dropout",
                classifier="seq_classif_dropout",
                absent_of_classifier=0.2,
                both_branches=False,
            ),
        },
    ),
}
