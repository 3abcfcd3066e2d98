"""The matrix products that a step really runs, counted call by call, against the description and the program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flopwise.engine.batch import Batch  # noqa: E402
from flopwise.plan.device.forecast import flops_of  # noqa: E402
from flopwise.plan.program.compile import compile_plan  # noqa: E402
from flopwise.records.plan import LETTERS, POLICY, Plan  # noqa: E402
from flopwise.records.program import Program  # noqa: E402
from flopwise.work.describe import describe, is_in  # noqa: E402
from flopwise.work.op import Attention, Gemm  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.tiny_models import TINY, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import cut_plan, everything_stays, executor_for, random_batch  # noqa: E402

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of products of matrices, and of attention where one operator does it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = args[-2:] if name == "aten::mm" else args[1:3]
            self.flops["products"] += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        elif name in (FLASH, f"{FLASH}_backward"):
            # Two products of (queries × keys × channels) forward; five backward, the scores made again among them.
            query, key = args[0:2] if name == FLASH else args[1:3]
            square = 2 * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * query.shape[3]
            self.flops["attention"] += (2 if name == FLASH else 5) * square
        elif name in ("aten::bmm", "aten::baddbmm", "aten::baddbmm_"):
            self.flops["tiles"] += 1
        return func(*args, **(kwargs or {}))


def counted(plan: Plan, model: Transformer) -> Counter[str]:
    """FLOPs of one full step."""
    executor = executor_for(plan, model, parameters(random_module(model)))
    sequences = plan.sequences_per_round * plan.rounds_per_step
    batch = random_batch(model, sequences, plan.sequence_tokens, 0)
    counting = Counting()
    with counting:
        executor.step(Batch(batch.ids, batch.labels), 0)
    return counting.flops


def products_described(plan: Plan, model: Transformer, program: Program) -> int:
    """Each product once forward and twice backward, and what the save levels make again of it."""
    work = describe(model, plan.sequence_tokens)
    products = [op for op in work.ops if isinstance(op, Gemm)]
    rounds = plan.rounds_per_step
    total = Fraction(3 * rounds * plan.sequences_per_round * sum(op.forward_flops() for op in products))
    for layer, row in enumerate(plan.saves):
        for chunk, letter in enumerate(row):
            level = LETTERS[letter.lower()]
            share = Fraction(plan.tokens_of(chunk), plan.sequence_tokens)
            for op in products:
                if not is_in(op, model, layer):
                    continue
                again = work.recomputed(POLICY[level]).get(op.name, Fraction(0))
                total += rounds * again * share * op.forward_flops() / op.layers
            if level == "input" and plan.chunks_per_sequence > 1:
                total += rounds * _keys_and_values(plan, model, program, layer, chunk)
    assert total.denominator == 1
    return int(total)


def of_shifts(plan: Plan, model: Transformer) -> int:
    """What biases of experts' results add to their weights' gradients: a product as large as the router's."""
    each = 2 * plan.sequence_tokens * model.hidden * model.experts * model.ffn_bias
    return plan.rounds_per_step * plan.sequences_per_round * (model.layers - len(model.dense_blocks)) * each


def of_unnormed_keys(plan: Plan, model: Transformer) -> int:
    """Keys that are kept, and that only blocks with a norm of keys make once more: all are described so."""
    bare = [layer for layer in range(model.layers) if model.qk_norm and not model.kind_of(layer).qk_norm]
    made = sum(
        plan.tokens_of(chunk) * (letter in "acAC") for layer in bare for chunk, letter in enumerate(plan.saves[layer])
    )
    return 2 * made * model.hidden * model.kv_width * plan.rounds_per_step


def _keys_and_values(plan: Plan, model: Transformer, program: Program, layer: int, chunk: int) -> int:
    """What is made more, or less, of the keys and values of a chunk whose input alone is kept.

    Those of the last layers are still there, so that no task makes them again; a norm of the keys asks for what it was
    made from all the same. Where attention runs by chunk, what that task made beside the keys is gone by backward.
    """
    one = 2 * plan.tokens_of(chunk) * model.hidden * model.kv_width
    made_again = any(
        task.kind == "context" and (task.layer, task.chunk, task.round) == (layer, chunk, 0) for task in program.tasks
    )
    if not made_again:
        return -one if model.qk_norm else -2 * one
    return one if model.qk_norm and plan.attention == "chunk" else 0


EACH = ("F", "A", "C", "I", "f", "a", "c", "i", "faciFACI")
PAIRED = ("F", "aC", "iA", "cI", "f")
"""Each level on either side, in layers that stand beside each other: of blocks of one kind that is the mean of both."""


@pytest.mark.parametrize(
    ("family", "letters"),
    [
        (name, letters)
        for name, model in TINY.items()
        if not model.carries
        for letters in (EACH if name in ("llama", "qwen3", "bert") or model.has_kinds or model.other_blocks else PAIRED)
    ],
)
def test_products_of_whole_sequences_are_those_of_the_forecast(family: str, letters: str) -> None:
    model = TINY[family]
    saves = tuple(letters[layer % len(letters)] for layer in range(model.layers))
    sequences = 3 if len(letters) > 1 else 2
    plan = everything_stays(model, sequence=TOKENS, sequences=sequences, saves=saves, rounds_per_step=2)
    found = counted(plan, model)
    found["products"] -= of_shifts(plan, model)
    found["products"] += of_unnormed_keys(plan, model)
    assert found["products"] == products_described(plan, model, compile_plan(plan, model))
    work = describe(model, TOKENS)
    attention = next(op for op in work.ops if isinstance(op, Attention))
    again = sum(work.recomputed(POLICY[LETTERS[row.lower()]]).get("attention", 0) for row in saves) / model.layers
    count = plan.rounds_per_step * plan.sequences_per_round

    def of_attention(pairs: Any, op: Attention) -> int:
        forward = op.forward_flops(pairs)
        return int(count * (forward + op.backward_flops("flash", pairs) + Fraction(again) * forward))

    if model.window is None:
        assert not found["tiles"]
        # A library's kernel takes values as wide as keys.
        kinds = [replace(kind, value_dim=0) for kind in attention.by_kind()]
        # Each of attention's chunks is a square of its own.
        squares = [
            of_attention("square", kind) if kind.chunk is None else 2 * of_attention("mask", kind) for kind in kinds
        ]
        assert found["attention"] == sum(squares)
    assert found["products"] + of_attention("mask", attention) == flops_of(plan, model, "causal")[1]


@pytest.mark.parametrize("attention", ["chunk", "sequence"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-biased", "gpt2", "bert-masked"])
def test_products_of_cut_sequences_are_those_of_the_program(family: str, attention: str) -> None:
    model = TINY[family]
    if not model.causal and attention == "chunk":
        pytest.skip("a model that looks ahead has no attention by chunk")
    for letters in ("F", "f", "A", "c", "i", "I", "faciFACI"):
        plan = cut_plan(model, sequence=TOKENS, chunk=9, letters=letters, attention=attention, groups=2)
        program = compile_plan(plan, model)
        found = counted(plan, model)
        assert found["products"] == products_described(plan, model, program)
        assert found["tiles"]


@pytest.mark.parametrize("attention", ["chunk", "sequence"])
def test_where_all_keys_are_made_again_the_forecast_counts_each_product(attention: str) -> None:
    model = TINY["llama"]
    # With room for one sequence's keys and values, and another sequence behind it, none are there any more.
    plan = cut_plan(model, sequence=TOKENS, chunk=9, letters="i", attention=attention, groups=2, rule="one room")
    program = compile_plan(plan, model)
    made = {(task.layer, task.chunk) for task in program.tasks if task.kind == "context"}
    expected = flops_of(plan, model, "causal")[1] - _attention_forecast(plan, model)
    there = (model.layers - 1, plan.chunks_per_sequence)
    missing = [(layer, chunk) for layer in range(model.layers) for chunk in range(plan.chunks_per_round)]
    left = [pair for pair in missing if pair not in made]
    assert all(pair[0] == there[0] and pair[1] >= there[1] for pair in left)
    less = sum(2 * 2 * plan.tokens_of(chunk) * model.hidden * model.kv_width for _, chunk in left)
    assert counted(plan, model)["products"] == expected - less


def _attention_forecast(plan: Plan, model: Transformer) -> int:
    """Attention's share of the forecast where every (layer, chunk) makes it again once."""
    work = describe(model, plan.sequence_tokens)
    op = next(op for op in work.ops if isinstance(op, Attention))
    return plan.sequences_per_round * (2 * op.forward_flops() + op.backward_flops("flash"))
