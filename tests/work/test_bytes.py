"""Bytes by hand: what one block moves, what lives in its backward, what a recurrent cell takes. No figure is ours."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware
from flopwise.predict.kernels.memory import LIBRARY_WORKSPACE_BYTES, device_bytes
from flopwise.setup.setup import SettledSetup
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES, Formats, parse_formats
from flopwise.work.held import temporary_bytes
from flopwise.work.lstm import Lstm
from flopwise.work.op import Gemm
from flopwise.work.traffic import backward_traffic, cast_back_bytes, cast_bytes, forward_traffic, least_bytes
from flopwise.work.transformer import Transformer
from flopwise.work.work import Recompute

TOKENS, WIDTH, INNER, KEYS, VOCAB = 10, 64, 96, 16, 100
BF16 = POLICIES["bf16"]
LLAMA = Transformer(
    name="tiny",
    title="tiny",
    source="test",
    layers=3,
    hidden=WIDTH,
    heads=8,
    kv_heads=2,
    ffn=INNER,
    vocab=VOCAB,
    context=32,
)
D, F, K, S = 2 * TOKENS * WIDTH, 2 * TOKENS * INNER, 2 * TOKENS * KEYS, 4 * TOKENS
"""Bytes in bf16 of a tensor as wide as the model, as the inner layer, as the keys, and of one fp32 number a token."""

# operator: forward fused, forward unfused, backward fused, backward unfused
BLOCK = {
    # the norm reads and writes; its backward reads the gradient, the input and the statistic and writes a gradient
    "norm1": (2 * D + S, 6 * (2 * D + S), 3 * D + S, 6 * (3 * D + S)),
    # queries and keys in place: read and written, both ways
    "rotary": (2 * D + 2 * K, 5 * (2 * D + 2 * K), 2 * D + 2 * K, 5 * (2 * D + 2 * K)),
    # two in, one out; backward adds the other branch's gradient
    "residual1": (3 * D, 3 * D, D, 3 * D),
    # behind the sum its input is still at hand
    "norm2": (D + S, 6 * (2 * D + S), 3 * D + S, 6 * (3 * D + S)),
    # gate and up in, product out; backward reads all three gradients' worth and writes two
    "activation": (3 * F, 2 * 3 * F, 5 * F, 2 * 5 * F),
    "residual2": (3 * D, 3 * D, D, 3 * D),
    "final_norm": (2 * D + S, 6 * (2 * D + S), 3 * D + S, 6 * (3 * D + S)),
    # a row of the table for each row written; backward reads a row, and reads and writes the table's
    "embedding": (2 * D, 2 * D, 3 * D, 3 * D),
    "loss": (2 * TOKENS * VOCAB, 4 * 2 * TOKENS * VOCAB, 2 * 2 * TOKENS * VOCAB, 3 * 2 * TOKENS * VOCAB),
}


@pytest.mark.parametrize("name", BLOCK)
def test_streaming_operators_by_hand(name: str) -> None:
    work = describe(LLAMA, TOKENS)
    op = next(op for op in work.ops if op.name == name)
    found = (
        forward_traffic(work, op, BF16, fused=True).per_sequence,
        forward_traffic(work, op, BF16, fused=False).per_sequence,
        backward_traffic(work, op, BF16, fused=True).per_sequence,
        backward_traffic(work, op, BF16, fused=False).per_sequence,
    )
    assert found == BLOCK[name]


def test_a_norm_made_again_alone_reads_its_input() -> None:
    work = describe(LLAMA, TOKENS)
    norm = next(op for op in work.ops if op.name == "norm2")
    assert forward_traffic(work, norm, BF16, fused=True, after=frozenset({"norm2"})).per_sequence == 2 * D + S
    both = frozenset({"residual1", "norm2"})
    assert forward_traffic(work, norm, BF16, fused=True, after=both).per_sequence == D + S


def test_products_and_attention_by_hand() -> None:
    work = describe(LLAMA, TOKENS)
    down = next(op for op in work.ops if op.name == "down")
    weight = 2 * WIDTH * INNER
    forward, backward = (
        forward_traffic(work, down, BF16, fused=True),
        backward_traffic(work, down, BF16, fused=True),
    )
    assert (forward.per_sequence, forward.fixed) == (F + D, weight)
    # for the input: gradient in, gradient out; for the weight: gradient and input in
    assert (backward.per_sequence, backward.fixed) == (D + F + D + F, weight)
    assert least_bytes(work, down, BF16, 5, Fraction(0)) == 3 * (
        5 * (F + D) + weight + 5 * (2 * D + 2 * F) + weight + weight
    )
    attention = next(op for op in work.ops if op.name == "attention")
    logsumexp = 4 * TOKENS * 8
    assert forward_traffic(work, attention, BF16, fused=True).per_sequence == 2 * D + 2 * K + logsumexp
    kept = 2 * D + 2 * K + logsumexp
    assert backward_traffic(work, attention, BF16, fused=True).per_sequence == (D + 2 * K) + D + kept


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("none", 0),
        # both norms' results and the inner product
        ("pointwise", 2 * D + F),
        # and the queries, the middle of the block, gate and up
        ("attention", 2 * D + F + D + D + 2 * F),
        # and attention's result with its statistic
        ("context", 2 * D + F + D + D + 2 * F + D + 4 * TOKENS * 8),
        # and keys, values and the norms' statistics
        ("input", 2 * D + F + D + D + 2 * F + D + 4 * TOKENS * 8 + 2 * K + 2 * S),
    ],
)
def test_temporaries_by_hand(policy: Recompute, again: int) -> None:
    """What is made again, the gradients round the widest operator (gate, up, their input), stream and queries."""
    work = describe(LLAMA, TOKENS)
    widest = max(3 * F, D + 2 * F)
    assert temporary_bytes(work, policy, BF16) == again + widest + D + 2 * D


def memory_of(model: Transformer, formats: Formats, batch: int, **changes: str) -> tuple[int, int]:
    base = SettledSetup(
        model=model,
        hardware=load_hardware("h200"),
        sequence_tokens=TOKENS,
        batch_sequences=batch,
        micro_batch_sequences=batch,
        formats=formats,
    )
    found = device_bytes(replace(base, **changes))  # type: ignore[arg-type]
    return found.logits, found.workspace


def test_temporaries_take_the_place_of_the_logits() -> None:
    logits, temporary = 2 * TOKENS * VOCAB, 3 * F + D + 2 * D
    assert temporary > logits
    assert memory_of(LLAMA, BF16, 7) == (7 * logits, 7 * (temporary - logits) + LIBRARY_WORKSPACE_BYTES)
    wide = replace(LLAMA, vocab=100_000)
    assert memory_of(wide, BF16, 7)[1] == LIBRARY_WORKSPACE_BYTES
    # plain code keeps the logits, their fp32 copy and the log-softmax
    assert memory_of(wide, BF16, 1, fusion="eager")[0] == 10 * TOKENS * 100_000


def test_wider_weights_are_cast_once_for_the_step() -> None:
    work = describe(LLAMA, TOKENS)
    matrices = sum(op.layers * op.weights[0].elements for op in work.ops if isinstance(op, Gemm))
    plain, amp = memory_of(LLAMA, BF16, 1)[1], memory_of(LLAMA, POLICIES["bf16-amp"], 1)[1]
    assert amp - plain == 2 * matrices
    down = next(op for op in work.ops if op.name == "down")
    assert cast_bytes(down, BF16).fixed == 0
    assert cast_bytes(down, POLICIES["bf16-amp"]).fixed == WIDTH * INNER * (4 + 2)
    fp8 = cast_bytes(down, POLICIES["fp8"])
    assert (fp8.fixed, fp8.per_sequence) == (WIDTH * INNER * 3, TOKENS * INNER * 3)
    head = next(op for op in work.ops if op.name == "head")
    assert cast_bytes(head, parse_formats("fp8")).fixed == 0


RECIPES = {
    # Of each number in bf16: read for the largest, read, written; backward by columns, or the same laid out anew.
    "rowwise": (2 + 1, 2 + 2 + 1, (2 + 1) + (2 + 2 + 1)),
    "tensorwise": (2 + 2 + 1, 1 + 1, (2 + 2 + 1) + (1 + 1)),
    "delayed": (2 + 1, 1 + 1, 2 + 1 + 1),
}
"""Bytes of the input's number going forward, of the same backward, and of the output's gradient."""


@pytest.mark.parametrize("scaling", RECIPES)
def test_casts_into_fp8_by_recipe(scaling: str) -> None:
    forward, again, gradient = RECIPES[scaling]
    formats = parse_formats(f"bf16,matrix=fp8,scaling={scaling}")
    down = next(op for op in describe(LLAMA, TOKENS).ops if op.name == "down")
    assert isinstance(down, Gemm)
    cast, back = cast_bytes(down, formats), cast_back_bytes(down, formats)
    assert (cast.fixed, cast.per_sequence) == (forward * WIDTH * INNER, forward * TOKENS * INNER)
    assert back.per_sequence == TOKENS * (gradient * WIDTH + again * INNER)
    # Our own fp8 kernels also add the matrix's gradient, in bf16, to the sum so far.
    assert back.fixed == WIDTH * INNER * (again + (2 + 2 + 2 if scaling == "rowwise" else 0))


def test_what_is_gathered_in_fp8_was_cast_before() -> None:
    down = next(op for op in describe(LLAMA, TOKENS).ops if op.name == "down")
    cast = cast_bytes(down, parse_formats("bf16,matrix=fp8,scaling=tensorwise,gathered=fp8"))
    assert (cast.fixed, cast.per_sequence) == (0, TOKENS * INNER * 5)


def test_blocks_need_no_look_at_a_whole_column() -> None:
    """MXFP8: 33/32 of a byte a number, by rows and by columns alike."""
    down = next(op for op in describe(LLAMA, TOKENS).ops if op.name == "down")
    assert isinstance(down, Gemm)
    back = cast_back_bytes(down, POLICIES["mxfp8"])
    assert back.per_sequence == round(TOKENS * (2 * WIDTH + INNER) * (2 + 33 / 32))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("bf16,scaling=tensorwise", "scaling=tensorwise of products in bf16"),
        ("fp8,scaling=columnwise", "no scaling is called 'columnwise'"),
        ("bf16,gathered=fp8", "weights gathered in fp8 for products in bf16"),
        ("fp8,gathered=bf16", "weights gathered in bf16"),
        ("fp8,scaling=rowwise,gathered=fp8", "with a scale for each row"),
        ("mxfp8,scaling=tensorwise", "scaling=tensorwise of products in mxfp8"),
        ("fp8,scaling=", "cannot read 'scaling='"),
    ],
)
def test_recipes_that_nobody_has(text: str, told: str) -> None:
    with pytest.raises(FlopwiseError, match=told) as caught:
        parse_formats(text)
    assert caught.value.hint


def test_a_recurrent_cell_by_hand() -> None:
    """Gates in and out, two states; backward reads what was kept and the gradients of state and memory."""
    hidden, steps = 24, 5
    model = Lstm(name="cell", title="cell", source="test", layers=2, hidden=hidden, vocab=50, context=steps)
    work = describe(model, steps)
    update = next(op for op in work.ops if op.name == "cell_update")
    wide = 2 * hidden
    # reads four raw gates and the memory; writes four gates, the memory, the state
    assert forward_traffic(work, update, BF16, fused=False).per_sequence == 9 * (5 + 6) * wide
    # gradients in: memory and state; kept: gates and memory; gradients out: raw gates and memory
    assert backward_traffic(work, update, BF16, fused=True).per_sequence == (2 + 5 + 5) * wide
    embedding = next(op for op in work.ops if op.name == "embedding")
    assert forward_traffic(work, embedding, BF16, fused=True).per_sequence == 2 * steps * wide
    # A layer made again needs the states, memories and gates of all its steps at once.
    widest = (4 + 1 + 4 + 1 + 1) * wide
    assert temporary_bytes(work, "input", BF16) == steps * (1 + 1 + 4) * wide + widest + wide
