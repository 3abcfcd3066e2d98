"""How GPT-2's kin spell their shape in a `config.json`: GPT-NeoX, GPT-J, OPT, and MPT, BLOOM and Falcon with ALiBi."""

from __future__ import annotations

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.huggingface_rules import (
    GPT_LIKE,
    NO_CROSS_ATTENTION,
    USUAL_SIZES,
    Family,
    Only,
    activation_of,
    dropout_of,
    fixed,
    flag_of,
    number_of,
    rotary_base,
    rotary_dim,
    rotary_scaling,
    size_of,
)
from flopwise.catalog.huggingface_settings import ConfigKeys
from flopwise.work.transformer import Dropout


def _gpt2_ffn(settings: ConfigKeys) -> int:
    return settings.size("n_inner", absent=0, null=0) or 4 * settings.size("hidden_size", "n_embd")


def _gpt2_note(settings: ConfigKeys) -> str:
    """Scores that are divided by a number of each layer have other values, but are counted the same."""
    by_layer = settings.flag("scale_attn_by_inverse_layer_idx", absent=False)
    return "attention scores are taken to be divided by √head_dim, as in the released GPT-2" if by_layer else ""


def _mpt_positions(settings: ConfigKeys) -> str:
    if settings.group("attn_config").flag("alibi", absent=True):
        return "alibi"
    return "learned" if settings.flag("learned_pos_emb", absent=True) else "none"


def _mpt_position_rows(settings: ConfigKeys) -> int | None:
    return settings.size("max_seq_len", absent=2048) if _mpt_positions(settings) == "learned" else None


def _mpt_ffn(settings: ConfigKeys) -> int:
    return settings.size("expansion_ratio", absent=4) * settings.size("hidden_size", "d_model")


def _mpt_bias(settings: ConfigKeys) -> bool:
    return not settings.flag("no_bias", absent=True)


def _mpt_note(settings: ConfigKeys) -> str:
    """`transformers` has one kind of MPT and overlooks these keys; the library that writes the files heeds them."""
    usual = (_mpt_positions(settings), _mpt_bias(settings), settings.size("expansion_ratio", absent=4))
    notes = []
    if usual != ("alibi", False, 4):
        notes.append("positions, biases and expansion as in llm-foundry; transformers builds ALiBi, no biases and 4")
    if settings.group("attn_config").table.get("clip_qkv") is not None:
        notes.append("clip_qkv is left out: queries, keys and values are not cut off")
    if settings.table.get("logit_scale") is not None:
        notes.append("logit_scale is left out, as transformers does")
    return "; ".join(notes)


def _mpt_score_scale(settings: ConfigKeys) -> float | None:
    attention = settings.group("attn_config")
    return None if attention.table.get("softmax_scale") is None else attention.number("softmax_scale")


def _falcon_is_new(settings: ConfigKeys) -> bool:
    return settings.flag("new_decoder_architecture", absent=False)


def _falcon_is_parallel(settings: ConfigKeys) -> bool:
    return _falcon_is_new(settings) or settings.flag("parallel_attn", absent=True)


def _falcon_kv_heads(settings: ConfigKeys) -> int:
    heads = settings.size("num_attention_heads")
    if _falcon_is_new(settings):
        return settings.size("num_kv_heads", absent=heads, null=heads)
    return 1 if settings.flag("multi_query", absent=True) else heads


def _falcon_shares_norm(settings: ConfigKeys) -> bool:
    """Falcon 7B's blocks have one norm for both branches, Falcon 40B's one each, Falcon 11B's one again."""
    separate = _falcon_is_new(settings) and settings.size("num_ln_in_parallel_attn", absent=2, null=2) == 2
    return _falcon_is_parallel(settings) and not separate


def _falcon_positions(settings: ConfigKeys) -> str:
    return "alibi" if settings.flag("alibi", absent=False) else "rotary"


def _four_times_hidden(settings: ConfigKeys) -> int:
    return settings.size("ffn_hidden_size", absent=0, null=0) or 4 * settings.size("n_embed", "hidden_size")


def _opt_width(settings: ConfigKeys) -> int:
    """That of the blocks, which the embedding's has to be."""
    hidden = settings.size("hidden_size")
    if settings.size("word_embed_proj_dim", absent=hidden, null=hidden) != hidden:
        raise FlopwiseError(
            f"{settings.owner}: its embedding is narrower than its blocks, or wider",
            why="a description holds one width; all released OPT models but that of 350M have one",
            hint="facebook/opt-125m",
        )
    return hidden


def _opt_dropout(settings: ConfigKeys) -> Dropout | None:
    hidden, attention = settings.share("dropout", 0.1), settings.share("attention_dropout", 0.0)
    return Dropout(hidden=hidden, attention=attention) if hidden or attention else None


GPTS: dict[str, Family] = {
    "gpt2": Family(
        title="GPT-2",
        bare=("GPT2Model",),
        note=_gpt2_note,
        only=(NO_CROSS_ATTENTION,),
        rules={
            **GPT_LIKE,
            # transformers takes the usual name too, and prefers it to the family's own.
            "layers": size_of("num_hidden_layers", "n_layer"),
            "hidden": size_of("hidden_size", "n_embd"),
            "heads": size_of("num_attention_heads", "n_head"),
            "ffn": _gpt2_ffn,
            "vocab": size_of("vocab_size"),
            "context": size_of("max_position_embeddings", "n_positions", absent=1024),
            "positions": fixed("learned"),
            "attention_scale": lambda settings: None if settings.flag("scale_attn_weights", absent=True) else 1.0,
            "position_rows": size_of("max_position_embeddings", "n_positions", absent=1024),
            "activation": activation_of("activation_function", absent="gelu_new"),
            "norm_epsilon": number_of("layer_norm_epsilon", absent=1e-5),
            "tied": flag_of("tie_word_embeddings", absent=True),
            "dropout": dropout_of(
                0.1,
                attention="attn_pdrop",
                hidden="resid_pdrop",
                embedding="embd_pdrop",
                classifier="summary_first_dropout",
            ),
        },
    ),
    "gpt_neox": Family(
        title="GPT-NeoX",
        bare=("GPTNeoXModel",),
        rules={
            **USUAL_SIZES,
            **GPT_LIKE,
            "context": size_of("max_position_embeddings", absent=2048),
            "activation": activation_of("hidden_act", absent="gelu"),
            "qkv_bias": flag_of("attention_bias", absent=True),
            "output_bias": flag_of("attention_bias", absent=True),
            "parallel_residual": flag_of("use_parallel_residual", absent=True),
            "tied": flag_of("tie_word_embeddings", absent=False),
            "norm_epsilon": number_of("layer_norm_eps", absent=1e-5),
            "rotary_base": rotary_base("rotary_emb_base", absent=10_000.0),
            "rotary_scaling": rotary_scaling,
            "rotary_dim": rotary_dim(0.25, "rotary_pct"),
            "dropout": dropout_of(attention="attention_dropout", hidden="hidden_dropout", embedding="hidden_dropout"),
        },
    ),
    "mpt": Family(
        title="MPT",
        bare=("MptModel", "MPTModel"),
        note=_mpt_note,
        only=(
            Only("attn_type", ("multihead_attention",), "its heads share keys in another way", "attn_config"),
            Only("qk_ln", (False,), "it normalises queries and keys over all heads at once", "attn_config"),
            Only("prefix_lm", (False,), "its prefix looks ahead", "attn_config"),
            Only("rope", (False,), "it adds rotary positions", "attn_config"),
            Only("ffn_type", ("mptmlp",), "it has another feed-forward part", "ffn_config"),
            Only("norm_type", ("low_precision_layernorm", "layernorm"), "it has another norm"),
            Only("alibi_bias_max", (8,), "its biases are steeper or flatter", "attn_config"),
        ),
        rules={
            **GPT_LIKE,
            "layers": size_of("num_hidden_layers", "n_layers"),
            "hidden": size_of("hidden_size", "d_model"),
            "heads": size_of("num_attention_heads", "n_heads"),
            "ffn": _mpt_ffn,
            "vocab": size_of("vocab_size"),
            "context": size_of("max_seq_len", absent=2048),
            "positions": _mpt_positions,
            "position_rows": _mpt_position_rows,
            "attention_scale": _mpt_score_scale,
            "activation": fixed("gelu"),
            "norm_epsilon": number_of("layer_norm_epsilon", absent=1e-5),
            "norm_bias": _mpt_bias,
            "qkv_bias": _mpt_bias,
            "output_bias": _mpt_bias,
            "ffn_bias": _mpt_bias,
            "dropout": dropout_of(
                group="attn_config", attention="attn_pdrop", hidden="resid_pdrop", embedding="emb_pdrop"
            ),
            "tied": flag_of("tie_word_embeddings", absent=True),
        },
    ),
    "bloom": Family(
        title="BLOOM",
        bare=("BloomModel",),
        only=(
            Only("apply_residual_connection_post_layernorm", (False,), "its residual stream is normed"),
            Only("slow_but_exact", (False,), "its products are sums of parts"),
        ),
        rules={
            **GPT_LIKE,
            "layers": size_of("num_hidden_layers", "n_layer"),
            "hidden": size_of("n_embed", "hidden_size"),
            "heads": size_of("num_attention_heads", "n_head"),
            "ffn": _four_times_hidden,
            "vocab": size_of("vocab_size"),
            "context": size_of("seq_length", absent=2048),
            "positions": fixed("alibi"),
            "embedding_norm": fixed(True),
            "activation": fixed("gelu_tanh"),
            "norm_epsilon": number_of("layer_norm_epsilon", absent=1e-5),
            "tied": flag_of("tie_word_embeddings", absent=True),
            "dropout": dropout_of(attention="attention_dropout", hidden="hidden_dropout"),
        },
    ),
    "falcon": Family(
        title="Falcon",
        bare=("FalconModel",),
        only=(
            Only("hidden_dropout", (0.0, 0), "it drops of the sum of both branches"),
            Only("attention_dropout", (0.0, 0), "whether it drops depends on its positions"),
        ),
        rules={
            **USUAL_SIZES,
            **GPT_LIKE,
            "hidden": size_of("n_embed", "hidden_size"),
            "ffn": _four_times_hidden,
            "kv_heads": _falcon_kv_heads,
            "context": size_of("max_position_embeddings", absent=2048),
            "parallel_residual": _falcon_is_parallel,
            "shared_norm": _falcon_shares_norm,
            "positions": _falcon_positions,
            "alibi_rounded": lambda settings: _falcon_positions(settings) == "alibi",
            **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), flag_of("bias", absent=False)),
            "activation": activation_of("activation", absent="gelu"),
            "norm_epsilon": number_of("layer_norm_epsilon", absent=1e-5),
            "rotary_base": rotary_base("rope_theta", absent=10_000.0),
            "rotary_scaling": rotary_scaling,
            "tied": flag_of("tie_word_embeddings", absent=True),
        },
    ),
    "gptj": Family(
        title="GPT-J",
        bare=("GPTJModel",),
        rules={
            "layers": size_of("num_hidden_layers", "n_layer"),
            "hidden": size_of("hidden_size", "n_embd"),
            "heads": size_of("num_attention_heads", "n_head"),
            "ffn": _gpt2_ffn,
            "vocab": size_of("vocab_size"),
            "context": size_of("max_position_embeddings", "n_positions", absent=2048),
            "norm": fixed("layer"),
            "norm_bias": fixed(True),
            "gated": fixed(False),
            "ffn_bias": fixed(True),
            "head_bias": fixed(True),
            "parallel_residual": fixed(True),
            "shared_norm": fixed(True),
            "rotary_dim": size_of("rotary_dim", absent=64),
            "rotary_pairs": fixed("neighbours"),
            "activation": activation_of("activation_function", absent="gelu_new"),
            "norm_epsilon": number_of("layer_norm_epsilon", absent=1e-5),
            "tied": flag_of("tie_word_embeddings", absent=False),
            "dropout": dropout_of(attention="attn_pdrop", hidden="resid_pdrop", embedding="embd_pdrop"),
        },
    ),
    "opt": Family(
        title="OPT",
        bare=("OPTModel",),
        only=(
            Only("do_layer_norm_before", (True,), "only OPT 350M has its norms behind, and its embedding is narrower"),
            Only("_remove_final_layer_norm", (False,), "its blocks' result has no norm"),
            Only("layer_norm_elementwise_affine", (True,), "its norms have no weights"),
            Only("layerdrop", (0.0, 0), "it leaves out whole blocks in training"),
        ),
        rules={
            **USUAL_SIZES,
            **GPT_LIKE,
            "hidden": _opt_width,
            "ffn": size_of("ffn_dim"),
            "context": size_of("max_position_embeddings", absent=2048),
            "positions": fixed("learned"),
            "position_rows": lambda settings: settings.size("max_position_embeddings", absent=2048) + 2,
            "position_offset": fixed(2),
            **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), flag_of("enable_bias", absent=True)),
            "activation": activation_of("activation_function", absent="relu"),
            "tied": flag_of("tie_word_embeddings", absent=True),
            "dropout": _opt_dropout,
        },
    ),
}
