"""Parallel set-ups: what is refused and why, and that the shares of all devices make up the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model, model_names
from flopwise.setup.parallel import Parallel, parse_parallel, why_illegal
from flopwise.work.describe import describe
from flopwise.work.exchange import exchange, is_expert, parameters_by_part, tied_parameters
from flopwise.work.formats import POLICIES
from flopwise.work.layout import Layout, illegal_layout
from flopwise.work.model import Model
from flopwise.work.op import AttentionKernel, Gemm
from flopwise.work.traffic import block_saved_bytes
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES, Recompute, Work
from tests.support.clusters import MIXTURE, SMALL

BF16 = POLICIES["bf16"]
LANGUAGE_MODELS = [
    name for name in model_names() if isinstance(model := load_model(name), Transformer) and model.head == "language"
]
KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)


def transformer(name: str) -> Transformer:
    model = load_model(name)
    assert isinstance(model, Transformer)
    return model


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what", "why", "hint"),
    [
        ({"data": 0}, "data must be at least 1, got 0", None, None),
        ({"expert": -2}, "expert must be at least 1, got -2", None, None),
        ({"chunks": 0}, "chunks must be at least 1, got 0", None, None),
        ({"schedule": "gpype"}, "'gpype'", "did you mean gpipe?", "one of gpipe, 1f1b, interleaved"),
        ({"balance": "tine"}, "'tine'", "did you mean time?", "one of layers, time"),
        ({"zero": 4}, "ZeRO stage 4", "3 weights too", "zero = 3"),
        ({"prefetch": -1}, "prefetch must be at least 0", None, "1"),
        ({"pipeline": 2, "chunks": 2}, "2 chunks on a device with the 1f1b schedule", "interleaved", "2 or more"),
        ({"pipeline": 2, "schedule": "interleaved"}, "1 chunks", "interleaved", "2 or more chunks"),
        ({"schedule": "interleaved", "chunks": 2}, "at least 2 stages", None, "pp2"),
        ({"sequence": True}, "sequence parallelism", None, "tp2"),
        ({"data": 6, "context": 2, "expert": 8}, "experts over 8 devices do not fit 12", "expert group", "ep6"),
        ({"data": 8, "shard": 3}, "shards over 3 ranks do not divide 8", None, "shard2"),
        ({"data": 8, "shard": 0}, "shards over 0 ranks", None, "shard1"),
        ({"tensor": 8, "sequence": True, "expert_tensor": 3}, "over 3 devices do not divide 8", "tensor ranks", "etp2"),
        ({"tensor": 2, "sequence": True, "expert_tensor": 4}, "over 4 devices do not divide 2", "tensor ranks", "etp2"),
        ({"tensor": 8, "expert_tensor": 1}, "experts of their own (etp1)", "sends its own tokens", "sp as well"),
        (
            {"tensor": 4, "data": 2, "sequence": True, "expert": 16, "expert_tensor": 1},
            "16 devices do not fit 8 data × context × tensor",
            "expert group",
            "ep8",
        ),
        ({"data": 8, "once_a_node": True}, "`once-a-node` without experts", "no token", "ep2"),
    ],
)
def test_impossible_set_ups_are_refused(changes: dict[str, Any], what: str, why: str | None, hint: str | None) -> None:
    with pytest.raises(FlopwiseError) as caught:
        Parallel(**changes)
    error = caught.value
    assert what in error.what
    assert (why is None) == (error.why is None)
    assert (why or "") in (error.why or "")
    assert (hint is None) == (error.hint is None)
    assert (hint or "") in (error.hint or "")


def test_words_of_experts_over_tensor_ranks() -> None:
    folded = parse_parallel("tp8 ep16 etp1 once-a-node sp zero1", 64)
    assert folded.label == "dp8 tp8 ep16 etp1 once-a-node zero1 sp"
    assert parse_parallel(folded.label, 64) == folded
    assert parse_parallel("tp8 ep4 etp8", 64) == parse_parallel("tp8 ep4", 64)


def test_devices_and_replicas() -> None:
    parallel = Parallel(data=3, tensor=2, pipeline=5, context=4, expert=6, sequence=True)
    assert parallel.devices == 3 * 2 * 5 * 4
    assert parallel.replicas == 12
    assert parallel.layout == Layout(tensor=2, sequence=True, context=4, expert=6)


LLAMA, MIXTRAL, LSTM = load_model("llama-3-8b"), load_model("mixtral-8x7b"), load_model("lstm-lm")


@pytest.mark.parametrize(
    ("model", "tokens", "parallel", "what", "why", "hint"),
    [
        (LLAMA, 8192, Parallel(pipeline=33), "33 stages", "it has 32 layers", "pp32 or less"),
        (
            LLAMA,
            8192,
            Parallel(pipeline=8, schedule="interleaved", chunks=5),
            "40 stages",
            "it has 32 layers",
            "pp6 or less",
        ),
        # 18 chunks on each of two devices are 36 stages, and no pipeline is shorter than two. (34 would do, embedding
        # and head counted as a layer each.)
        (
            LLAMA,
            8192,
            Parallel(pipeline=2, schedule="interleaved", chunks=18),
            "36 stages",
            "32 layers",
            "fewer chunks",
        ),
        (LLAMA, 8192, Parallel(tensor=3), "3 tensor ranks", "32 heads and 8 key-value heads", "tp2"),
        # 24 query and 8 key-value heads: 12 divides the first and fits the second in no way.
        (load_model("llama-3-3b"), 8192, Parallel(tensor=12), "12 tensor ranks", "24 heads and 8", "tp8"),
        (replace(SMALL, ffn=770), 512, Parallel(tensor=4), "4 tensor ranks", "feed-forward width is 770", "tp2"),
        (LLAMA, 100, Parallel(context=8), "100 tokens in 8 parts", "equal parts", "a sequence that 8 divides"),
        (LLAMA, 100, Parallel(tensor=8, sequence=True), "100 tokens in 8 parts", "equal parts", "that 8 divides"),
        (
            LLAMA,
            4096,
            Parallel(tensor=2, sequence=True, expert_tensor=1),
            "over 1 of 2 tensor ranks",
            "it has no experts",
            "no etp",
        ),
        (LLAMA, 4096, Parallel(data=2, expert=2), "experts over 2 devices", "it has no experts", "ep1"),
        (MIXTRAL, 4096, Parallel(data=6, expert=6), "experts over 6 devices", "it has 8 experts", "ep4"),
        (replace(SMALL, window=128), 512, Parallel(context=2), "over several devices", "full attention", "no cp"),
        (load_model("bert-base"), 512, Parallel(context=2), "over several devices", "every token", "no cp"),
        (LSTM, 20, Parallel(tensor=2), "layers and sequences", "time steps", "dp and pp"),
        (LSTM, 20, Parallel(context=2), "layers and sequences", "time steps", "dp and pp"),
    ],
)
def test_what_a_model_cannot_be_split_into(
    model: Model, tokens: int, parallel: Parallel, *, what: str, why: str, hint: str
) -> None:
    found = why_illegal(model, tokens, parallel)
    assert found is not None
    assert what in found[0]
    assert why in found[1]
    assert hint in found[2]
    with pytest.raises(FlopwiseError, match=f"{model.name} cannot be split that way") as caught:
        parallel.check(model, tokens)
    assert (caught.value.why, caught.value.hint) == (found[1], found[2])
    if "stages" not in what:
        with pytest.raises(FlopwiseError, match="cannot be split that way"):
            describe(model, tokens, layout=parallel.layout)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_hint_for_tensor_ranks_is_the_most_that_can_be(name: str) -> None:
    """A hint that is refused in its turn is worse than none."""
    model = transformer(name)
    legal = {ranks for ranks in range(1, 130) if illegal_layout(model, 512, Layout(tensor=ranks)) is None}
    assert legal >= {1}
    for ranks in set(range(1, 130)) - legal:
        refusal = illegal_layout(model, 512, Layout(tensor=ranks))
        assert refusal is not None
        assert refusal[2] == f"tp{max(other for other in legal if other < ranks)}"


def test_what_can_be_split_is_not_refused() -> None:
    Parallel(pipeline=32, data=3).check(LLAMA, 8192)
    Parallel(pipeline=8, schedule="interleaved", chunks=4).check(LLAMA, 8192)
    Parallel(tensor=16, context=4, sequence=True).check(LLAMA, 8192)
    Parallel(data=4, context=2, expert=8).check(MIXTRAL, 4096)
    Parallel(data=5, pipeline=2).check(LSTM, 20)


# -- the parts make up the whole ---------------------------------------------------------------------------------------


def repeated_flops(model: Transformer, work: Work) -> dict[str, int]:
    """Forward FLOPs of what every tensor rank runs whole, by operator: routers, and what makes latents, by hand."""
    routers = {op.name: op.forward_flops() for op in work.ops if op.name in ("router", "shared_router")}
    if model.latent is None:
        return routers
    columns = model.latent.rank + (model.rotary_dim or 0) + model.latent.query_rank
    return routers | {"latents": 2 * work.sequence_tokens * model.hidden * columns * model.layers}


def even_layouts(model: Transformer) -> list[Layout]:
    """Layouts that split every matrix: none repeats key-value heads, none pads the vocabulary."""
    ranks = [count for count in (1, 2, 4, 8) if model.vocab % count == 0 and model.kv_heads % count == 0]
    layouts = [Layout(tensor=count, sequence=count > 1, context=parts) for count in ranks for parts in (1, 2, 8)]
    if model.experts:
        layouts.append(Layout(tensor=ranks[-1], context=2, expert=4))
        layouts += [Layout(tensor=4, sequence=True, expert=4, expert_tensor=count) for count in (1, 2) if 4 in ranks]
    return [layout for layout in layouts if illegal_layout(model, 1024, layout) is None]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_flops_of_all_devices_are_those_of_the_model(name: str) -> None:
    """Forward and, by every policy, executed. Routers and latents alone are repeated: each tensor
    rank chooses for all its tokens, unless it has tokens of its own, and all heads share a latent.

    Expert ranks do not count: they are data ranks, each of which brings sequences of its own.
    """
    model = transformer(name)
    for kernel in KERNELS:
        whole = describe(model, 1024, kernel)
        layouts = even_layouts(model)
        assert len(layouts) >= 3 or model.window is not None or model.recurrence is not None
        for layout in layouts:
            part, devices = describe(model, 1024, kernel, layout), layout.tensor * layout.context
            repeated = {name: (layout.tensor - 1) * flops for name, flops in repeated_flops(model, whole).items()}
            repeated["router"] = 0 if layout.folded else repeated.get("router", 0)
            forward = sum(op.forward_flops() for op in part.ops) * devices
            assert forward == sum(op.forward_flops() for op in whole.ops) + sum(repeated.values())
            for policy in RECOMPUTE_POLICIES:
                executed = part.total_hardware_flops("causal", policy) * devices
                again = whole.recomputed(policy)
                more = sum(flops * (3 + again.get(name, 0)) for name, flops in repeated.items())
                expected = whole.total_hardware_flops("causal", policy) + more
                # Where queries are made with the latents, what is recomputed of both is not parted here.
                alone = model.latent is None or model.latent.query_rank > 0
                assert executed == pytest.approx(expected, rel=1e-12 if alone else 5e-3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [True, False])
def test_context_ranks_share_every_pair(kernel: AttentionKernel, causal: bool) -> None:
    """Of 512 × 512 pairs, or of half of them, a quarter each; eager kernels compute the whole square."""
    model = replace(SMALL, causal=causal)
    part = describe(model, 512, kernel, Layout(context=4))
    attention = next(op for op in part.ops if op.name == "attention")
    pairs = 512 * 512 // (2 if causal else 1) // 4
    # Two products of 2 FLOPs for each pair and channel: 8 heads of 32, 6 layers.
    assert attention.forward_flops() == 4 * pairs * 8 * 32 * 6
    assert attention.forward_flops("square") == 4 * (512 * 512 // 4) * 8 * 32 * 6


def repeated_parameters(model: Transformer, tokens: int) -> int:
    """By hand: what every tensor rank holds whole."""
    norm = model.hidden * (2 if model.norm_bias else 1)
    norms = 4 if model.norm_place == "sandwich" else 1 if model.shared_norm or model.one_branch else 2
    each = norms * norm + model.hidden * (model.output_bias + model.ffn_bias * max(1, model.experts))
    # Norms over all heads are parted as the heads are.
    of_heads = model.qk_norm and model.qk_norm_weights and model.qk_norm_over == "head"
    states = model.recurrence
    carrying = len(model.recurrent_blocks)
    looking = model.layers - carrying - len(model.feed_blocks)
    # Heads of the delta rule have one norm in common.
    of_states = states.head_dim if states is not None and states.rule == "gated_delta" else 0
    parted = 2 * model.head_dim * of_heads * looking + carrying * of_states
    if model.latent is not None:
        # What heads share is made, and normed, by every rank.
        made = model.latent.rank + (model.rotary_dim or 0) + model.latent.query_rank
        each += made * model.hidden + model.latent.rank + model.latent.query_rank
    routers = model.experts * (model.hidden + model.routing.bias) + model.shared_gate * model.hidden
    positions = (model.position_rows or tokens) * model.hidden if model.positions == "learned" else 0
    mixtures = len(model.feed_blocks) if model.one_branch else model.layers - len(model.dense_blocks)
    return model.layers * each + parted + mixtures * routers + norm * model.final_norm + positions


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_parameters_of_all_tensor_ranks(name: str) -> None:
    model = transformer(name)
    whole = describe(model, 1024)
    for layout in even_layouts(model):
        if layout.expert == 1:
            ranks = layout.tensor
            part = describe(model, 1024, layout=layout)
            assert part.parameters * ranks == whole.parameters + (ranks - 1) * repeated_parameters(model, 1024)


def test_vocabulary_is_padded_to_equal_parts() -> None:
    """GPT-2's 50,257 rows over 2 ranks are 25,129 each, one more than there are."""
    part = describe(load_model("gpt2-medium"), 1024, layout=Layout(tensor=2))
    assert next(op for op in part.ops if op.name == "embedding").weights[0].shape == (25_129, 1024)
    assert next(op for op in part.ops if op.name == "head").weights[0].shape == (25_129, 1024)


def test_key_value_heads_are_repeated_beyond_their_number() -> None:
    """16 ranks for 32 query and 8 key-value heads: 2 and 1 each, so a matrix of 4096 × (2 + 2)·128."""
    part = describe(LLAMA, 1024, layout=Layout(tensor=16))
    assert next(op for op in part.ops if op.name == "qkv").weights[0].shape == (4 * 128, 4096)


def test_experts_are_dealt_out() -> None:
    """Mixtral: 8 experts of three 4096 × 14336 matrices in a layer; 4 expert ranks of 2 tensor ranks hold an eighth."""
    expert = 3 * 4096 * 14336
    dense = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    norms, router = 2 * 4096, 8 * 4096
    for layout, parts, ranks in ((Layout(), 1, 1), (Layout(expert=4), 4, 1), (Layout(expert=4, tensor=2), 8, 2)):
        (embedding, layer, head), experts = parameters_by_part(describe(MIXTRAL, 1024, layout=layout))
        assert experts == 8 * expert // parts
        assert layer == dense // ranks + norms + router
        assert (embedding, head) == (32_000 * 4096 // ranks, 32_000 * 4096 // ranks + 4096)


def test_experts_are_dealt_out_over_tensor_ranks_too() -> None:
    """Mixtral over 4 tensor ranks: whole experts, two or four of eight on each, or halves of them on pairs."""
    expert = 3 * 4096 * 14336
    for expert_ranks, sharing, parts in ((4, 1, 4), (2, 1, 2), (1, 1, 1), (4, 2, 8), (8, 2, 16)):
        layout = Layout(tensor=4, sequence=True, expert=expert_ranks, expert_tensor=sharing)
        work = describe(MIXTRAL, 1024, layout=layout)
        assert parameters_by_part(work)[1] == 8 * expert // parts
        rows = {op.name: op.rows for op in work.ops if isinstance(op, Gemm)}
        # A rank routes its 256 tokens, and computes two copies of as many; a pair those of both.
        assert (rows["router"], rows["gate_up"], rows["qkv"]) == (256, 2 * 256 * sharing, 1024)


def test_experts_are_experts_even_where_a_token_uses_all() -> None:
    every = replace(MIXTURE, experts_per_token=4)
    for model in (MIXTURE, every):
        work = describe(model, 512, layout=Layout(expert=2))
        assert [op.name for op in work.ops if is_expert(op)] == ["gate_up", "down"]
        assert parameters_by_part(work)[1] == 2 * 3 * 256 * 768
    assert not any(is_expert(op) for op in describe(SMALL, 512).ops)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-1b", "llama-3-8b", "mixtral-8x7b", "lstm-lm", "bert-base"])
def test_parameters_by_part_add_up(name: str) -> None:
    model = load_model(name)
    work = describe(model, 20)
    (embedding, layer, head), experts = parameters_by_part(work)
    assert embedding + model.layers * (layer + experts) + head == work.parameters + tied_parameters(work)
    assert tied_parameters(work) == (model.vocab * model.hidden if getattr(model, "tied", False) else 0)


# -- kept activations --------------------------------------------------------------------------------------------------


def kept(layout: Layout, kernel: AttentionKernel, policy: Recompute = "none") -> int:
    work = describe(load_model("gpt-3-175b"), 2048, kernel, layout)
    return block_saved_bytes(work, policy, BF16)


def test_kept_activations_are_korthikanti_s() -> None:
    """Korthikanti et al., arXiv 2205.05198: a layer of GPT-3 keeps sbh·(10 + 24/t + 5as/(ht)), with sequence
    parallelism sbh·(34 + 5as/h)/t.

    Their 10 are the inputs of two norms (4), of the products behind them (4) and two dropout masks (2), their 24 the
    queries, keys and values (6), attention's result (2), the activation's input (8) and output (8). Their 5as/h are
    the softmax's output (2), its dropout mask (1) and the dropout's output (2). flopwise has no dropout: 8 and 2 are
    left, and the softmax's output is all that backward reads. Beside it there are what they neglect, the norms' fp32
    mean and deviation: 2 norms · 2 · 4 bytes for each token.
    """
    stream = 2048 * 12288
    statistics = 2 * 2 * 4 * 2048
    # as/h = 96 · 2048 / 12288 = 16, t = 8: 8 + 24/8 + 2·16/8 = 15; with sequence parallelism (32 + 32)/8 = 8
    assert kept(Layout(), "eager") == (32 + 32) * stream + statistics
    assert kept(Layout(tensor=8), "eager") == 15 * stream + statistics == 377_520_128
    assert kept(Layout(tensor=8, sequence=True), "eager") == 8 * stream + statistics // 8 == 201_330_688
    # Flash attention keeps a sum of 4 bytes for each head and token instead of the square: 96 heads, 12 a rank.
    assert kept(Layout(tensor=8), "flash") == 11 * stream + statistics + 12 * 4 * 2048
    assert kept(Layout(tensor=8, sequence=True), "flash") == 4 * stream + statistics // 8 + 12 * 4 * 2048


def test_full_recompute_keeps_two_bytes_of_the_stream() -> None:
    """Their 2sbh; the input is whole on every tensor rank unless sequence parallelism splits it."""
    assert kept(Layout(tensor=8), "eager", "full") == 2 * 2048 * 12288
    assert kept(Layout(tensor=8, sequence=True), "eager", "full") == 2 * 2048 * 12288 // 8


def test_context_ranks_keep_a_part_of_everything() -> None:
    assert kept(Layout(context=4), "eager") * 4 == kept(Layout(), "eager")
    assert kept(Layout(context=4), "flash") * 4 == kept(Layout(), "flash")


# -- what is passed on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel_residual", "policy", "reductions", "again"),
    [
        (False, "none", 2, 0),
        (False, "pointwise", 2, 0),
        # The feed-forward product is the block's last, which nothing in its backward reads.
        (False, "input", 2, 1),
        (False, "full", 2, 2),
        # Both branches are summed before they are reduced.
        (True, "none", 1, 0),
        (True, "input", 1, 0),
        (True, "full", 1, 1),
    ],
)
def test_reductions_of_tensor_ranks(parallel_residual: bool, policy: Recompute, reductions: int, again: int) -> None:
    model = replace(SMALL, parallel_residual=parallel_residual)
    found = exchange(
        describe(model, 512, layout=Layout(tensor=2)), policy, BF16, hidden=model.hidden, stream_tokens=512
    )
    assert (found.reductions, found.reductions_again) == (reductions, again)
    assert found.stream_bytes == 512 * 256 * 2


def test_ring_and_dispatch_bytes() -> None:
    """Keys and values of 8192/4 tokens with 8/2 heads of 128; two copies of each of 2048 tokens of 4096 channels."""
    layout = Layout(tensor=2, context=4)
    llama = exchange(describe(LLAMA, 8192, layout=layout), "none", BF16, hidden=4096, stream_tokens=2048)
    assert llama.ring_bytes == 2 * 2048 * 4 * 128 * 2
    assert llama.dispatch_bytes == 0
    for policy, again in (("none", 0), ("full", 2)):
        work = describe(MIXTRAL, 8192, layout=replace(layout, expert=2))
        mixtral = exchange(work, policy, BF16, hidden=4096, stream_tokens=2048)  # type: ignore[arg-type]
        assert mixtral.dispatch_bytes == 2 * 2048 * 4096 * 2
        assert mixtral.dispatches_again == again


def test_what_folded_experts_pass_on() -> None:
    """A rank's 256 of 1024 tokens, two copies; what shares an expert gathers them; the experts' sum is no reduction."""
    for sharing, shared in ((1, 0), (2, 2 * 2 * 256 * 4096 * 2)):
        layout = Layout(tensor=4, sequence=True, expert=4, expert_tensor=sharing)
        work = describe(MIXTRAL, 1024, layout=layout)
        found = exchange(work, "full", BF16, hidden=4096, stream_tokens=1024, layout=layout)
        assert (found.dispatch_bytes, found.shared_bytes) == (2 * 256 * 4096 * 2, shared)
        assert (found.reductions, found.reductions_again, found.stream_bytes) == (1, 1, 1024 * 4096 * 2)
    # DeepSeek-V3: three of 61 blocks are dense, the others' shared expert is summed over tensor ranks.
    layout = Layout(tensor=4, sequence=True, expert=4, expert_tensor=1)
    work = describe(load_model("deepseek-v3"), 1024, layout=layout)
    found = exchange(work, "none", BF16, hidden=7168, stream_tokens=1024, layout=layout)
    assert found.reductions == pytest.approx(2)


def test_a_recurrent_model_passes_on_its_stream_alone() -> None:
    found = exchange(describe(LSTM, 20), "none", BF16, hidden=LSTM.hidden, stream_tokens=20)
    assert found.stream_bytes == 20 * 19_968 * 2
    assert found.reductions == found.reductions_again == found.ring_bytes == found.dispatch_bytes == 0


def test_products_that_split_their_depth_are_those_that_are_reduced() -> None:
    """Of a tensor rank's products, the output and the down projection alone have a part of the whole depth."""
    whole, part = describe(SMALL, 512), describe(SMALL, 512, layout=Layout(tensor=2))
    depths = {op.name: op.depth for op in whole.ops if isinstance(op, Gemm)}
    split = [op.name for op in part.ops if isinstance(op, Gemm) and op.depth < depths[op.name]]
    assert split == ["output", "down"]
