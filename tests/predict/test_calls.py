"""The kernels that a step is listed as, against the operators' exact counts and against shapes written out by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.catalog.load import load_model
from flopwise.predict.kernels.calls import GemmCall, Phase, StepCalls, StreamingCall, calls_for
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES
from flopwise.work.lstm import Lstm
from flopwise.work.model import Model
from flopwise.work.op import Attention, AttentionKernel, Gemm
from flopwise.work.optimizers import Optimizer
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES, Recompute
from tests.support.strategies import FAMILIES, recurrent, transformers

SEQUENCES = (1, 3, 8)
KERNELS: tuple[AttentionKernel, ...] = ("flash", "eager")


def calls_of(
    model: Model,
    tokens: int,
    policy: Recompute = "none",
    *,
    kernel: AttentionKernel = "flash",
    formats: str = "bf16",
    optimizer: Optimizer = "adamw",
) -> StepCalls:
    """The kernels of a micro-batch that is not the step's only one."""
    return calls_for(
        model,
        sequence_tokens=tokens,
        kernel=kernel,
        formats=POLICIES[formats],
        policy=policy,
        fusion="fused",
        optimizer=optimizer,
    )


def at(side: tuple[float, float], sequences: int) -> float:
    """A side of a product, or a number of bytes, for so many sequences."""
    return side[0] + side[1] * sequences


def gemm_flops(call: GemmCall, sequences: int) -> float:
    """2·m·k·n of every group and of every time that it runs."""
    return 2 * at(call.rows, sequences) * at(call.depth, sequences) * call.columns * call.groups * call.count


def executed(calls: StepCalls, sequences: int) -> float:
    """FLOPs of all kernels; an attention call is of one sequence."""
    products = sum(gemm_flops(call, sequences) for call in calls.gemms)
    return products + sum(call.flops * call.count * sequences for call in calls.attentions)


def gemms(calls: StepCalls, name: str, phase: Phase) -> list[GemmCall]:
    """The products of one operator in one phase."""
    return [call for call in calls.gemms if calls.names[call.op] == name and call.phase is phase]


def weight_gradient(calls: StepCalls, name: str) -> GemmCall:
    """The one product of an operator that sums over the batch."""
    (call,) = [call for call in gemms(calls, name, Phase.BACKWARD) if call.depth[1]]
    return call


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_kernels_execute_what_the_operators_count(
    family: str, policy: Recompute, kernel: AttentionKernel, data: st.DataObject
) -> None:
    """The sum over the kernels, against `Work`'s count for one sequence times the sequences.

    Flash executes what the mask leaves, eager the full square; so the eager count must not change with the mask.
    """
    tokens = data.draw(st.integers(1, 24))
    window = data.draw(st.none() | st.integers(1, 32))
    model = replace(data.draw(transformers(family)), window=window)
    work = describe(model, tokens, kernel)
    calls = calls_of(model, tokens, policy, kernel=kernel)
    for sequences in SEQUENCES:
        expected = sequences * work.total_hardware_flops("causal", policy)
        assert executed(calls, sequences) == pytest.approx(expected, rel=1e-12)
    if kernel == "eager":
        unmasked = describe(replace(model, causal=False, window=None), tokens, "flash")
        square = sum(op.forward_flops() for op in unmasked.ops if isinstance(op, Attention))
        forward = [call for call in calls.gemms if calls.kinds[call.op] == "attention" and call.phase is Phase.FORWARD]
        assert sum(gemm_flops(call, 1) for call in forward) == square
        assert not calls.attentions


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
def test_eager_values_that_are_narrower_than_keys_execute_what_the_operators_count(policy: Recompute) -> None:
    """Latent attention's: 192 channels of a key, 128 of a value. Flash kernels widen them."""
    model = load_model("deepseek-v2-lite")
    expected = describe(model, 256, "eager").total_hardware_flops("causal", policy)
    assert executed(calls_of(model, 256, policy, kernel="eager"), 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
@settings(max_examples=15, deadline=None)
@given(model=recurrent(), tokens=st.integers(1, 8))
def test_recurrent_kernels_execute_what_the_operators_count(policy: Recompute, model: Lstm, tokens: int) -> None:
    """The same for cells that run once a time step."""
    work = describe(model, tokens)
    calls = calls_of(model, tokens, policy)
    for sequences in SEQUENCES:
        expected = sequences * work.total_hardware_flops("causal", policy)
        assert executed(calls, sequences) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("formats", "optimizer", "bytes_per_parameter"),
    [
        # Gradient read; each moment and the master copy read and written; weight written, and read without a master.
        ("bf16", "adamw", 2 + 2 * 4 + 4),
        ("bf16", "lion", 2 + 4 + 4),
        ("bf16", "sgd", 2 + 4),
        ("bf16-mixed", "adamw", 2 + 2 * 8 + 8 + 2),
        ("bf16-amp", "adamw", 4 + 2 * 8 + 8),
        ("fp32", "adamw", 4 + 2 * 8 + 8),
    ],
)
@pytest.mark.parametrize("name", ["llama-3-1b", "gpt2", "mixtral-8x7b", "bert-base", "lstm-lm"])
def test_update_moves_every_parameters_state_once(
    name: str, formats: str, optimizer: Optimizer, bytes_per_parameter: int
) -> None:
    """The optimizer's one call, against bytes per parameter by hand; it does not grow with the batch."""
    model = load_model(name)
    calls = calls_of(model, 16, formats=formats, optimizer=optimizer)
    (update,) = [call for call in calls.streams if call.phase is Phase.UPDATE]
    assert (calls.names[update.op], calls.kinds[update.op], update.count) == ("optimizer", "optimizer", 1)
    assert update.bytes == (float(bytes_per_parameter * describe(model, 16).parameters), 0.0)


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
def test_experts_stay_groups_in_every_product(policy: Recompute) -> None:
    """Mixtral's experts, two of eight for a token, against shapes by hand: each its own product, forward and back."""
    calls = calls_of(load_model("mixtral-8x7b"), 1024, policy)
    for name, depth, columns in (("gate_up", 4096, 2 * 14_336), ("down", 14_336, 4096)):
        found = [call for call in calls.gemms if calls.names[call.op] == name]
        assert {(call.groups, call.count) for call in found} == {(8, 32)}
        gradient = weight_gradient(calls, name)
        assert (gradient.rows, gradient.depth, gradient.columns) == ((columns, 0), (0, 1024 * 2 / 8), depth)
    # The router is one product over all tokens.
    gradient = weight_gradient(calls, "router")
    assert (gradient.rows, gradient.depth, gradient.columns, gradient.groups) == ((8, 0), (0, 1024), 4096, 1)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_weight_gradients_have_the_shape_of_the_weights(family: str, data: st.DataObject) -> None:
    """Elements that the summed products write, against those of the matrices; no other call is summed."""
    model, tokens = data.draw(transformers(family)), data.draw(st.integers(1, 24))
    work = describe(model, tokens)
    calls = calls_of(model, tokens, "full")
    for op in work.ops:
        if isinstance(op, Gemm):
            call = weight_gradient(calls, op.name)
            assert call.rows[0] * call.columns * call.groups == op.weights[0].elements
            assert (call.rows[1], call.depth[0], call.count) == (0, 0, op.layers)
    assert sum(call.accumulate for call in calls.gemms) == sum(isinstance(op, Gemm) for op in work.ops)


def test_gradient_of_a_recurrent_cell_sums_over_time() -> None:
    """Going forward each time step is a product of its own; the gradient is one over all of them, by hand."""
    model = Lstm(name="lstm", title="lstm", source="test", layers=3, hidden=5, vocab=11, context=8)
    calls = calls_of(model, 7)
    (forward,) = gemms(calls, "cell", Phase.FORWARD)
    assert (forward.count, forward.rows, forward.depth, forward.columns) == (3 * 7, (0, 1), (10, 0), 20)
    gradient = weight_gradient(calls, "cell")
    assert (gradient.count, gradient.rows, gradient.depth, gradient.columns) == (3, (20, 0), (0, 7), 10)
    inputs = [call for call in gemms(calls, "cell", Phase.BACKWARD) if not call.accumulate]
    assert [(call.count, call.rows, call.depth, call.columns) for call in inputs] == [(3 * 7, (0, 1), (20, 0), 10)]


def casts(calls: StepCalls) -> list[StreamingCall]:
    """Calls bound by bytes that belong to a matrix product."""
    return [call for call in calls.streams if calls.kinds[call.op] == "gemm"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_only_products_of_the_blocks_are_cast_to_fp8(family: str, data: st.DataObject) -> None:
    """Which operators have casts, and what multiplies in fp8, against which of them stand in the block."""
    model, tokens = data.draw(transformers(family)), data.draw(st.integers(1, 24))
    work = describe(model, tokens)
    inside = {index for index, op in enumerate(work.ops) if isinstance(op, Gemm) and op.in_block}
    outside = {index for index, op in enumerate(work.ops) if isinstance(op, Gemm) and not op.in_block}
    assert outside
    assert not casts(calls_of(model, tokens, "full", formats="bf16"))
    calls = calls_of(model, tokens, "full", formats="fp8")
    assert {call.op for call in casts(calls)} == inside
    assert {call.op for call in calls.gemms if call.number_format == "fp8"} == inside
    assert {call.op for call in calls.gemms if call.number_format == "bf16"} == outside
    assert {call.number_format for call in calls.attentions} == {"bf16"}


def test_casts_to_fp8_read_two_bytes_and_write_one() -> None:
    """Llama's packed gate and up, by hand: weight and input before the forward; before the backward the gradient by
    rows and columns, the input and the weight by columns (which are read twice), and the sum of the weight's gradient.
    """
    calls = calls_of(load_model("llama-3-8b"), 1024, formats="fp8")
    found = [call for call in casts(calls) if calls.names[call.op] == "gate_up"]

    def moved(phase: Phase) -> tuple[float, float]:
        ours = [call for call in found if call.phase is phase]
        return sum(call.count * call.bytes[0] for call in ours), sum(call.count * call.bytes[1] for call in ours)

    assert moved(Phase.FORWARD) == (32 * 3 * 4096 * 2 * 14_336, 32 * 3 * 1024 * 4096)
    summed = 2 + 2 + 2
    assert moved(Phase.BACKWARD) == (
        32 * (5 + summed) * 4096 * 2 * 14_336,
        32 * 1024 * ((3 + 5) * 2 * 14_336 + 5 * 4096),
    )


@pytest.mark.parametrize(("formats", "block", "head"), [("fp8", "fp8", "bf16"), ("tf32", "tf32", "tf32")])
@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "bert-base", "lstm-lm"])
def test_head_keeps_out_of_fp8_alone(name: str, formats: str, block: str, head: str) -> None:
    """The formats that products multiply in, against the policy: activations' instead of fp8, but tf32 everywhere.

    The last product is the head's in all of these models, the first one the block's.
    """
    calls = calls_of(load_model(name), 16, formats=formats)
    last = max(call.op for call in calls.gemms)
    assert {call.number_format for call in calls.gemms if call.op == last} == {head}
    first = min(call.op for call in calls.gemms)
    assert {call.number_format for call in calls.gemms if call.op == first} == {block}


# Columns of Llama-3-8B's and Qwen3-8B's packed products that each policy makes again: queries 4096, keys and values
# 1024 each. Qwen3 has a norm over each head, whose backward reads the keys and queries before it.
PACKED: list[tuple[str, Recompute, int, int]] = [
    ("llama-3-8b", "none", 0, 0),
    ("llama-3-8b", "pointwise", 0, 0),
    ("llama-3-8b", "attention", 4096, 2 * 14_336),
    ("llama-3-8b", "context", 4096, 2 * 14_336),
    ("llama-3-8b", "input", 4096 + 2 * 1024, 2 * 14_336),
    ("llama-3-8b", "full", 4096 + 2 * 1024, 2 * 14_336),
    ("qwen3-8b", "pointwise", 0, 0),
    ("qwen3-8b", "attention", 4096 + 1024, 2 * 12_288),
    ("qwen3-8b", "context", 4096 + 1024, 2 * 12_288),
    ("qwen3-8b", "input", 4096 + 2 * 1024, 2 * 12_288),
]


@pytest.mark.parametrize(("name", "policy", "qkv", "gate_up"), PACKED)
def test_packed_products_make_only_the_needed_columns_again(
    name: str, policy: Recompute, qkv: int, gate_up: int
) -> None:
    """Columns of the recompute calls, against the widths of what the policy does not keep and backward reads."""
    calls = calls_of(load_model(name), 1024, policy)
    for op, columns in (("qkv", qkv), ("gate_up", gate_up)):
        found = gemms(calls, op, Phase.RECOMPUTE)
        assert [call.columns for call in found] == ([pytest.approx(columns, rel=1e-12)] if columns else [])
        assert all((call.rows, call.depth) == ((0, 1024), (4096, 0)) for call in found)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_eager_attention_makes_only_its_scores_again_where_its_result_is_kept(family: str, data: st.DataObject) -> None:
    """Policy `attention` keeps the weighted sum but not the probabilities: q·kᵀ again, half of the forward."""
    model: Transformer = data.draw(transformers(family))
    tokens = data.draw(st.integers(1, 24))
    assert describe(model, tokens, "eager").recomputed("attention")["attention"] == Fraction(1, 2)
    found = gemms(calls_of(model, tokens, "attention", kernel="eager"), "attention", Phase.RECOMPUTE)
    shapes = [(call.rows, call.depth, call.columns, call.groups, call.count) for call in found]
    assert shapes == [((0, tokens), (model.head_dim, 0), tokens, model.heads, model.layers)]


@pytest.mark.parametrize(
    ("kernel", "policy", "share"),
    [
        ("flash", "pointwise", 0),
        ("flash", "attention", 0),
        ("flash", "context", 1),
        ("flash", "input", 1),
        ("flash", "full", 1),
        ("eager", "pointwise", 0),
        ("eager", "context", 1),
        ("eager", "input", 1),
        ("eager", "full", 1),
    ],
)
def test_attention_is_made_again_where_its_result_is_not_kept(
    kernel: AttentionKernel, policy: Recompute, share: int
) -> None:
    """Recomputed FLOPs of attention's kernels, against its forward's: flash and eager alike but at `attention`."""
    calls = calls_of(load_model("gpt2"), 64, policy, kernel=kernel)

    def flops(phase: Phase) -> float:
        products = sum(gemm_flops(call, 1) for call in gemms(calls, "attention", phase))
        return products + sum(call.flops * call.count for call in calls.attentions if call.phase is phase)

    assert flops(Phase.FORWARD) > 0
    assert flops(Phase.RECOMPUTE) == share * flops(Phase.FORWARD)
