"""The ceiling's products with a second kernel: turns, the head's too, and the faster one counts."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_products
from benchmarks.gpu_attention import Candidate
from benchmarks.gpu_ceiling import Load, Shape, Watch, ceiling_rows
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.products import Products
from flopwise.profile.measure.sampling import Counters

IN_BLOCKS = ("qkv", "output", "gate_up", "down")
PASSES = ("forward", "to-input", "to-weight")
SPARED = {"forward": 0.5, "to-input": -0.5, "to-weight": 0.25}
"""Seconds by which the second kernel is faster than a second."""


class Clock(Watch):
    """A clock on which every call takes a second, unless something turns it."""

    now = 0.0

    def mark(self) -> float:
        Clock.now += 1.0
        return Clock.now


class Second(Products):
    """Stands in for another kernel: turns the clock, and keeps what it was called on."""

    seen: ClassVar[Counter[tuple[str, tuple[int, ...]]]] = Counter()

    def __init__(self, arena: Arena, *, always: bool) -> None:
        super().__init__(arena)
        assert always, "small ones would be torch's"

    def forward(self, source: Tensor, matrix: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
        assert bias is None
        self.told("forward", source, matrix, out)

    def dgrad(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
        assert not add
        self.told("to-input", gradient, matrix, out)

    def wgrad(self, gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
        self.told("to-weight", gradient, source, total)

    def told(self, passed: str, *tensors: Tensor) -> None:
        Clock.now -= SPARED[passed]
        self.seen[passed, tuple(tensor.data_ptr() for tensor in tensors)] += 1


class Broken(Second):
    """Fails on one of the products, as a kernel may that is not for a shape."""

    def wgrad(self, gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
        if total.shape[0] == 512:
            raise RuntimeError("not for this shape")
        super().wgrad(gradient, source, total=total)


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_products, "are_right", lambda *_: True)
    monkeypatch.setattr(gpu_products, "QuackProducts", Second)
    monkeypatch.setattr(Second, "seen", Counter())


def load_of(*, chunk_tokens: int = 64, sequence_tokens: int = 64, attentions: int = 3, precision: str = "fp32") -> Load:
    """On a clock that is turned by hand, with so many kernels of attention that do nothing."""
    load = Load(
        Shape(
            name="tiny", model="tiny", sequence_tokens=sequence_tokens, precision=precision, chunk_tokens=chunk_tokens
        ),
        "cpu",
    )
    load.watch = Clock("cpu")
    load.attention = [Candidate(f"attention {number}", object, object) for number in range(attentions)]
    return load


@pytest.mark.usefixtures("two_kernels")
def test_kernels_of_a_product_take_turns_and_the_faster_one_counts() -> None:
    load = load_of()
    times = load.kept_up(0.0)
    for op in IN_BLOCKS:
        for passed in PASSES:
            # Three kernels of attention with each of the two.
            assert times[op, passed, "float32"] == [1.0] * 3
            assert times[op, passed, "quack"] == [1.0 - SPARED[passed]] * 3
    load.choose(times)
    times = load.kept_up(0.0)
    assert load.runs == 1
    rows = ceiling_rows(load, times, Counters())
    counted = {(row.op, row.passed): row.kernel for row in rows if row.counted and row.op != "attention"}
    faster = {"forward": "quack", "to-input": "float32", "to-weight": "quack"}
    assert counted == {(op, passed): faster[passed] for op in (*IN_BLOCKS, "head") for passed in PASSES}
    # Four products in each of three layers, and the head, on 64 tokens.
    assert rows[-1].products_us_per_token == pytest.approx((4 * 3 + 1) * (0.5 + 1.0 + 0.75) / 64 * 1e6)


@pytest.mark.usefixtures("two_kernels")
def test_every_kernel_of_a_product_meets_every_one_of_attention() -> None:
    load = load_of()
    met: list[tuple[str, str]] = []
    for _ in range(6):
        keys = [key for key, _, _ in load._layer()]
        (attention,) = {kernel for op, _, kernel in keys if op == "attention"}
        (product,) = {kernel for op, _, kernel in keys if op in IN_BLOCKS}
        met.append((attention, product))
    assert met == [(f"attention {number}", kernel) for kernel in ("float32", "quack") for number in range(3)]


@pytest.mark.usefixtures("two_kernels")
def test_all_kernels_of_the_head_are_seen_whenever_it_comes() -> None:
    load = load_of(attentions=1)
    assert load.layers == 3
    times = load.kept_up(0.0)
    assert load.runs == 2, "the head comes in the first of them only"
    assert {key[1:] for key in times if key[0] == "head"} == {(p, k) for p in PASSES for k in ("float32", "quack")}
    assert all(len(seconds) == 1 for key, seconds in times.items() if key[0] == "head")


@pytest.mark.usefixtures("two_kernels")
def test_chunks_of_a_long_sequence_take_turns_within_a_run() -> None:
    load = load_of(sequence_tokens=256, attentions=2)
    times = load.kept_up(0.0)
    assert load.runs == 2, "no more runs than attention needs"
    assert len(times["down", "forward", "float32"]) == len(times["down", "forward", "quack"]) == 2 * 4 / 2
    assert median(times["down", "to-weight", "quack"]) == 0.75


@pytest.mark.usefixtures("two_kernels")
def test_both_kernels_multiply_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []
    plain = torch.randn

    def counted(shape: tuple[int, ...], **options: object) -> Tensor:
        drawn.append(shape)
        return plain(shape, **options)  # type: ignore[call-overload, no-any-return]

    class First(Second):
        seen: ClassVar[Counter[tuple[str, tuple[int, ...]]]] = Counter()

        def __init__(self, arena: Arena) -> None:
            super().__init__(arena, always=True)

    monkeypatch.setattr(torch, "randn", counted)
    monkeypatch.setattr(gpu_products, "Products", First)
    load_of().kept_up(0.0)
    assert len(drawn) == 5 * 3 + 4, "three tensors of each product, four of attention"
    assert set(First.seen) == set(Second.seen) and len(First.seen) == 5 * 3


@pytest.mark.usefixtures("two_kernels")
def test_a_kernel_that_fails_is_left_out_where_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_products, "QuackProducts", Broken)
    load = load_of()
    kernels = {part.name: [kernel.name for kernel in part.kernels] for part in load.parts}
    assert kernels == {**{op: ["float32", "quack"] for op in IN_BLOCKS}, "head": ["float32"]}
    assert "head by quack: RuntimeError: not for this shape" in capsys.readouterr().err


@pytest.mark.usefixtures("two_kernels")
def test_fp8_stays_alone_and_needs_no_more_runs() -> None:
    load = load_of(precision="fp8")
    kernels = {part.name: [kernel.name for kernel in part.kernels] for part in load.parts}
    assert kernels == {**{op: ["fp8 row-wise"] for op in IN_BLOCKS}, "head": ["bfloat16", "quack"]}
    load.kept_up(0.0)
    assert load.runs == 3


def test_without_another_kernel_there_is_torchs_alone() -> None:
    load = load_of(precision="bf16")
    assert [[kernel.name for kernel in part.kernels] for part in load.parts] == [["bfloat16"]] * 5
