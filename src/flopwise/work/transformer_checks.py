"""What the fields of a transformer's description must be together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.work.activations import ACTIVATIONS
from flopwise.work.adapters import EMBEDDING, GROUPS, HEAD, frozen_layers
from flopwise.work.attention_kinds import OtherAttention, RotaryScaling
from flopwise.work.checks import check_positive, check_real
from flopwise.work.layer_names import check_targets, layer_names
from flopwise.work.recurrence import check_states

if TYPE_CHECKING:
    from flopwise.work.transformer import Transformer


def check_transformer(model: Transformer) -> None:
    """Refuse a description whose fields contradict each other, and what cannot be counted or trained."""
    _check_attention(model)
    _check_recurrence(model)
    _check_options(model)
    _check_trained(model)


def _check_attention(model: Transformer) -> None:
    if model.heads % model.kv_heads:
        raise FlopwiseError(
            f"{model.name}: {model.kv_heads} key-value heads do not divide {model.heads} query heads",
            why="each key-value head serves the same number of query heads",
            hint=f"kv_heads = {_divisor_below(model.heads, model.kv_heads)}",
        )
    turned = model.rotary_dim
    if model.positions == "rotary" and turned is not None and (turned % 2 or not 0 < turned <= model.head_dim):
        raise FlopwiseError(
            f"{model.name}: rotary_dim = {shown(turned)} of {model.head_dim} channels cannot be turned",
            why="rotary positions turn pairs of a head's channels",
            hint="an even rotary_dim, at most head_dim",
        )
    if model.positions == "rotary" and model.turned_channels % 2:
        raise FlopwiseError(
            f"{model.name}: rotary positions turn pairs of channels, so head_dim = {model.head_dim} must be even",
            hint=f"head_dim = {model.head_dim + 1}, or other positions",
        )
    if model.window is not None:
        check_positive(model.name, window=model.window)
    check_real(model.name, norm_epsilon=model.norm_epsilon, rotary_base=model.rotary_base)
    scales = {"attention_scale": model.attention_scale, "attention_cap": model.attention_cap}
    check_real(model.name, **{field: value for field, value in scales.items() if value is not None})
    _check_scaling(model, model.rotary_base, model.rotary_scaling)
    _check_others(model)
    _check_chunks(model, model.name, model, turned=model.positions == "rotary" or model.qk_norm)
    _check_latent(model)


def _check_latent(model: Transformer) -> None:
    latent = model.latent
    if latent is None:
        return
    check_positive(f"{model.name}: latent", rank=latent.rank, value_dim=latent.value_dim)
    if latent.query_rank:
        check_positive(f"{model.name}: latent", query_rank=latent.query_rank)
    wrong = {
        "a head has channels that turn and channels that do not": model.turned_channels == model.head_dim,
        "its positions are rotary": model.positions != "rotary" or model.other_attention is not None,
        "each head has a key and a value of its own": model.kv_heads != model.heads,
        "values are no wider than keys": latent.value_dim > model.head_dim,
        "it is causal, with norms of its latents and without biases": not model.causal
        or model.qk_norm
        or model.qkv_bias
        or model.norm != "rms",
    }
    for why, there in wrong.items():
        if there:
            raise FlopwiseError(
                f"{model.name}: latent attention cannot be described so", why=why, hint="leave `latent` out, or that"
            )


def _check_chunks(model: Transformer, owner: str, attention: Transformer | OtherAttention, *, turned: bool) -> None:
    """Refuse chunks that nobody can look back in, and temperatures that are none."""
    if attention.attention_chunk is not None:
        check_positive(owner, attention_chunk=attention.attention_chunk)
        if attention.window is not None or not model.causal:
            raise FlopwiseError(
                f"{owner}: attention_chunk is of tokens that see all those before them",
                hint="leave out `window`, or attention_chunk",
            )
    if attention.temperature is not None:
        if turned:
            raise FlopwiseError(
                f"{owner}: temperature is of queries that have no positions and no norm",
                hint="rotary = false and qk_norm = false, or leave out temperature",
            )
        check_positive(f"{owner}: temperature", floor=attention.temperature.floor)
        check_real(f"{owner}: temperature", scale=attention.temperature.scale)


def _check_scaling(model: Transformer, base: float, scaling: RotaryScaling | None) -> None:
    """Refuse what no angles follow from."""
    if scaling is None or model.positions != "rotary":
        return
    pairs = model.turned_channels // 2
    given = {len(scaling.short_factors), len(scaling.long_factors)}
    wrong = {
        "longrope has a number for each pair": scaling.method == "longrope" and given != {pairs},
        "longrope takes a logarithm of the context": scaling.method == "longrope" and scaling.original_context == 1,
        "dynamic scaling needs more than a pair": scaling.method == "dynamic" and pairs < 2,
        "YaRN takes a logarithm of the base": scaling.method == "yarn" and base == 1.0,
    }
    for why, there in wrong.items():
        if there:
            raise FlopwiseError(
                f"{model.name}: rotary_scaling does not fit {pairs} pairs of channels",
                why=why,
                hint="as many short and long factors as pairs, an original context above 1, a base that is not 1",
            )


def _check_others(model: Transformer) -> None:
    if bool(model.other_blocks) != (model.other_attention is not None):
        raise FlopwiseError(
            f"{model.name}: other_attention and other_blocks come together",
            why="one says how some blocks differ, the other which they are",
            hint="give both, or leave both out",
        )
    if model.other_attention is None:
        return
    _check_listed(model, "other_blocks", model.other_blocks)
    if model.other_attention.window is not None:
        check_positive(f"{model.name}: other_attention", window=model.other_attention.window)
    other = model.other_attention
    turned = (other.rotary and model.positions == "rotary") or (other.qk_norm and model.qk_norm)
    _check_chunks(model, f"{model.name}: other_attention", other, turned=turned)
    check_real(f"{model.name}: other_attention", rotary_base=model.other_attention.rotary_base)
    _check_scaling(model, model.other_attention.rotary_base, model.other_attention.rotary_scaling)


def _check_recurrence(model: Transformer) -> None:
    """Refuse kinds of blocks that cannot be told apart, and what is not described beside them."""
    recurrence = model.recurrence
    if bool(model.recurrent_blocks) != (recurrence is not None):
        raise FlopwiseError(
            f"{model.name}: recurrence and recurrent_blocks come together",
            why="one says what carries a state, the other which blocks have it",
            hint="give both, or leave both out",
        )
    if model.recurrent_blocks:
        _check_listed(model, "recurrent_blocks", model.recurrent_blocks)
    if model.feed_blocks:
        _check_listed(model, "feed_blocks", model.feed_blocks)
    both = {*model.feed_blocks} & {*model.recurrent_blocks}
    if both or (model.feed_blocks and not model.one_branch):
        raise FlopwiseError(
            f"{model.name}: feed_blocks are blocks of one branch, which no other list has",
            why=f"block {min(both)} is in recurrent_blocks too" if both else "its blocks have two branches",
            hint="one_branch = true, and each block in one list",
        )
    usual = model.norm_place == "pre" and not model.parallel_residual and model.unnormed_attention == "none"
    if (recurrence is not None or model.one_branch) and not (
        usual and model.norm == "rms" and not model.dense_blocks and model.other_attention is None and model.causal
    ):
        raise FlopwiseError(
            f"{model.name}: blocks of these kinds cannot be described together",
            why="beside blocks that carry a state, or have one branch, the others are causal, with RMSNorm before "
            "their branches, equal attention and equal feed-forward parts",
            hint="leave out recurrence and one_branch, or what is beside them",
        )
    if recurrence is not None:
        check_states(recurrence, f"{model.name}: recurrence")


def _check_options(model: Transformer) -> None:
    for activation in (model.activation, model.pooler_activation, model.transform_activation or model.activation):
        if activation not in ACTIVATIONS:
            raise unknown_name(
                "activation", activation, ACTIVATIONS, hint=f"activation is one of {', '.join(ACTIVATIONS)}"
            ).within(model.name)
    if model.activation == "clamped_swiglu" and not model.gated:
        raise FlopwiseError(f"{model.name}: {model.activation} has a gate", hint="gated = true")
    _check_positions(model)
    if model.token_types:
        check_positive(model.name, token_types=model.token_types)
    scales = {"embedding_scale": model.embedding_scale, "residual_scale": model.residual_scale}
    check_real(model.name, **scales, logit_scale=model.logit_scale)
    if model.logit_cap is not None:
        check_real(model.name, logit_cap=model.logit_cap)
    if model.shared_norm and not (model.parallel_residual and model.norm_place == "pre"):
        raise FlopwiseError(
            f"{model.name}: a shared norm is one before both branches of a parallel residual",
            hint='parallel_residual = true and norm_place = "pre", or leave out shared_norm',
        )
    if model.unnormed_attention != "none" and (model.parallel_residual or model.norm_place != "pre"):
        raise FlopwiseError(
            f"{model.name}: unnormed_attention leaves out a norm before attention, and there is none",
            hint='norm_place = "pre" without parallel_residual, or leave it out',
        )
    if model.parallel_residual and model.norm_place != "pre":
        raise FlopwiseError(
            f"{model.name}: norms of a parallel residual are before its branches", hint='norm_place = "pre"'
        )
    _check_experts(model)
    if model.labels is not None:
        check_positive(model.name, labels=model.labels)
    elif model.head == "classifier":
        raise FlopwiseError(f"{model.name}: a classifier needs `labels`, the number of its classes", hint="labels = 2")


def _check_positions(model: Transformer) -> None:
    if model.position_rows is not None:
        check_positive(model.name, position_rows=model.position_rows)
        if model.positions != "learned":
            raise FlopwiseError(
                f"{model.name}: position_rows is for learned positions, and these are {model.positions}",
                hint='leave out position_rows, or positions = "learned"',
            )
    if model.alibi_rounded and model.positions != "alibi":
        raise FlopwiseError(
            f"{model.name}: alibi_rounded is for ALiBi, and these positions are {model.positions}",
            hint='leave out alibi_rounded, or positions = "alibi"',
        )
    if model.position_offset and not 0 < model.position_offset < (model.position_rows or 0):
        raise FlopwiseError(
            f"{model.name}: position_offset = {shown(model.position_offset)} is none of the position table's rows",
            why="it is the row that the first token has",
            hint="position_offset = 2 and position_rows = 514, as RoBERTa has them, or neither",
        )


def _check_trained(model: Transformer) -> None:
    """Refuse what leaves nothing to train, and adapters where there are none for."""
    if model.adapters is not None:
        if len(model.frozen_layers) == model.layers:
            raise FlopwiseError(
                f"{model.name}: all blocks are frozen, and none has adapters",
                why="with adapters everything else is frozen already",
                hint=f"--freeze blocks.0-{model.layers // 2 - 1}, or without it"
                if model.layers > 1
                else "without --freeze",
            )
        without = {
            "blocks of other kinds than attention, and gated attention,": model.has_kinds or model.attention_gate,
        }
        for kind, there in without.items():
            if there:
                raise FlopwiseError(
                    f"{model.name}: {kind} cannot have adapters yet",
                    why="there are no layers of it by name that an adapter is saved under",
                    hint="train it without --lora, or with --freeze",
                )
        if model.adapters.magnitudes and model.experts and {*model.adapters.targets} & {*GROUPS["mlp"]}:
            raise FlopwiseError(
                f"{model.name}: DoRA beside its experts cannot be trained yet",
                why="there are no kernels that scale what each expert makes by magnitudes of its own",
                hint="--lora-on attention, or without --dora",
            )
        if model.experts and model.routing.on_inputs and {*model.adapters.targets} & {*GROUPS["mlp"]}:
            raise FlopwiseError(
                f"{model.name}: adapters beside its experts cannot be trained yet",
                why="its experts read rows that their weights have multiplied, of which PEFT has no layers by name",
                hint="--lora-on attention",
            )
        if not {*model.adapters.targets} & {*layer_names(model)}:
            named = ", ".join(model.adapters.targets)
            raise FlopwiseError(f"{model.name} has no {named} for an adapter", hint="--lora-on all-linear")
        check_targets(model, model.adapters.targets)
    if model.objective == "preference" and model.head != "language":
        raise FlopwiseError(
            f"{model.name}: answers are preferred to others by models that write them",
            why=f"its head is for another task: {model.head}",
            hint='head = "language", or leave out objective',
        )
    _check_loss_share(model)
    if model.frozen is None:
        return
    layers = frozen_layers(model.frozen, model.layers)
    if model.adapters is not None:
        return
    if model.tied and (EMBEDDING in model.frozen) != (HEAD in model.frozen):
        raise FlopwiseError(
            f"{model.name}: embedding and head are one matrix",
            why="it is frozen for both or for neither",
            hint="both of them, or neither",
        )
    if len(layers) == model.layers and EMBEDDING in model.frozen:
        raise FlopwiseError(
            f"{model.name}: embedding and all blocks are frozen",
            why="a head alone is not trained here",
            hint="--freeze embedding,blocks.0-15",
        )


def _check_loss_share(model: Transformer) -> None:
    if not 0 < model.loss_share <= 1:
        raise FlopwiseError(
            f"{model.name}: loss_share = {shown(model.loss_share)}",
            why="a share above 0 and up to 1 is expected",
            hint="loss_share = 0.3, or leave it out",
        )
    if model.loss_share < 1 and model.head == "classifier":
        raise FlopwiseError(
            f"{model.name}: loss_share = {model.loss_share:g} of a classifier",
            why="a sequence has one label, whatever its tokens",
            hint="leave loss_share out",
        )


def _check_experts(model: Transformer) -> None:
    if model.experts:
        check_positive(model.name, experts=model.experts)
    if not model.experts and model.experts_per_token:
        raise FlopwiseError(
            f"{model.name}: experts_per_token = {shown(model.experts_per_token)} without experts",
            hint="give `experts`, or leave out experts_per_token",
        )
    if model.experts and not 1 <= model.experts_per_token <= model.experts:
        raise FlopwiseError(
            f"{model.name}: {shown(model.experts_per_token)} of {model.experts} experts per token is not possible",
            hint="experts_per_token between 1 and experts",
        )
    model.routing.check(model.name, model.experts, model.experts_per_token)
    rows, mixed = len(model.routing.shares), len(model.mixed_blocks)
    if rows not in (0, 1, mixed):
        raise FlopwiseError(
            f"{model.name}: routing.shares has {rows} rows, and {mixed} blocks have experts",
            why="there is one for each of them, or one for all",
            hint="one row, or as many as there are blocks",
        )
    if model.shared_ffn:
        check_positive(model.name, shared_ffn=model.shared_ffn)
    _check_dense(model)
    if (model.shared_ffn and not model.experts) or (model.shared_gate and not model.shared_ffn):
        raise FlopwiseError(
            f"{model.name}: shared experts stand beside others, and a gate weighs what they make",
            hint="give `experts` and shared_ffn, or leave out shared_ffn and shared_gate",
        )


def _check_dense(model: Transformer) -> None:
    if bool(model.dense_blocks) != bool(model.dense_ffn) or (model.dense_blocks and not model.experts):
        raise FlopwiseError(
            f"{model.name}: dense_blocks and dense_ffn come together, in a mixture",
            why="one says which blocks have no experts, the other how wide these are",
            hint="give both beside `experts`, or leave both out",
        )
    if not model.dense_blocks:
        return
    check_positive(model.name, dense_ffn=model.dense_ffn)
    _check_listed(model, "dense_blocks", model.dense_blocks)
    if len(model.dense_blocks) == model.layers:
        raise FlopwiseError(
            f"{model.name}: none of its blocks has experts",
            why=f"it has {model.layers}, of which dense_blocks says that all are dense",
            hint=f"layers={model.layers + 1} or more, or leave out `experts`, dense_blocks and dense_ffn",
        )


def _check_listed(model: Transformer, field: str, blocks: tuple[int, ...]) -> None:
    if list(blocks) != sorted({*blocks}) or blocks[0] < 0 or blocks[-1] >= model.layers:
        raise FlopwiseError(
            f"{model.name}: {field} are no blocks of {model.layers} in their order",
            why=f"blocks are counted from 0 to {model.layers - 1}",
            hint=f"{field} = [1, 3, 5]",
        )


def _divisor_below(number: int, limit: int) -> int:
    return next(candidate for candidate in range(min(limit, number), 0, -1) if number % candidate == 0)
