"""Our own attention on one GPU, cut in several ways, beside a library's: `python -m benchmarks.gpu_own_attention`.

Shapes of small models, with dropout and without. The rates of `--output FOLDER/own_attention.csv` are what a hardware
file says of the family `flopwise`; the fastest cut of each pass is what `fused_attention.CUTS` should be.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flopwise.engine.kernels import fused_attention
from flopwise.engine.kernels.attention import attention_backward, attention_forward, choose_kernel
from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.fused_attention import CUTS, Pass, PassCut
from flopwise.engine.kernels.plain_attention import AttentionMask, Saved
from flopwise.predict.kernels.attention import Direction
from flopwise.work.op import attention_flops


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention of a layer."""

    name: str
    sequences: int
    tokens: int
    heads: int
    head_dim: int
    causal: bool

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(self.heads, self.heads, self.head_dim, self.causal, None)

    def flops(self, which: Pass) -> int:
        """Of a pass; backward's of its two kernels together."""
        pairs = self.tokens * (self.tokens + 1 if self.causal else 2 * self.tokens)
        direction: Direction = "forward" if which == "forward" else "backward"
        return attention_flops(direction, pairs, self.heads, self.head_dim) * self.sequences


SHAPES = (
    Shape("bert-64", 64, 128, 12, 64, causal=False),
    Shape("bert-256", 256, 128, 12, 64, causal=False),
    Shape("gpt2", 32, 1024, 12, 64, causal=True),
    Shape("wide", 8, 2048, 16, 128, causal=True),
)
FORWARD = (PassCut(64, 64), PassCut(128, 64, 8), PassCut(128, 64, 4, 3), PassCut(64, 64, 4, 3), PassCut(128, 128, 8))
BACKWARD = (
    PassCut(64, 64),
    PassCut(64, 64, 4, 3),
    PassCut(64, 64, 8),
    PassCut(128, 64, 8),
    PassCut(64, 128, 8),
    PassCut(64, 32),
    PassCut(32, 64),
)
DROPPED = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """A pass of one shape by one kernel."""

    shape: str
    kernel: str
    drops: bool
    which: str
    cut: str
    microseconds: float
    tflops_per_s: float


class Given:
    """Random numbers of a shape, and what forward made of them."""

    def __init__(self, shape: Shape, *, drops: bool) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)

        def drawn() -> Tensor:
            size = (shape.sequences, shape.tokens, shape.heads, shape.head_dim)
            return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.shape, self.mask = shape, shape.mask
        self.query, self.key, self.value, self.gradient = (drawn() for _ in range(4))
        self.out = torch.empty_like(self.query)
        self.sums = torch.empty(shape.sequences, shape.heads, shape.tokens, device="cuda")
        self.gradients = tuple(torch.empty_like(self.query) for _ in range(3))
        tokens = torch.arange(shape.sequences * shape.tokens, device="cuda", dtype=torch.int32)
        keys = torch.tensor([7, 11], dtype=torch.int32, device="cuda")
        self.drop = DropMask(DROPPED, keys, tokens) if drops else None

    def forward(self) -> None:
        given = (self.query, self.key, self.value, self.mask, self.drop)
        fused_attention.forward(*given, lengths=None, out=self.out, logsumexp=self.sums)

    def backward(self) -> None:
        saved = Saved(self.gradient, self.query, self.key, self.value, self.out, self.sums)
        of = (self.gradients[0], self.gradients[1], self.gradients[2])
        fused_attention.backward(saved, self.mask, self.drop, of, lengths=None, accumulate=False)


def seconds_of(call: Callable[[], object], *, repeats: int = 15) -> float:
    """The median of some calls, timed by the device."""
    for _ in range(3):
        call()
    found: list[float] = []
    made: Any = torch.cuda.Event
    for _ in range(repeats):
        begin, end = made(enable_timing=True), made(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return median(found)


def own_rows(shape: Shape, *, drops: bool) -> Iterator[Row]:
    """Every cut of a pass, the others as they are."""
    given = Given(shape, drops=drops)
    given.forward()
    passes: tuple[tuple[Pass, tuple[PassCut, ...]], ...] = (
        ("forward", FORWARD),
        ("of queries", BACKWARD),
        ("of keys", BACKWARD),
    )
    for which, cuts in passes:
        usual = CUTS[which]
        for cut in cuts:
            CUTS[which] = cut
            try:
                # Both kernels of backward run: the one that is not cut otherwise takes the same time in all rows.
                took = seconds_of(given.forward if which == "forward" else given.backward)
            except Exception as error:
                # A cut that the card has no room for.
                print(f"{shape.name} {which} {tuple(cut)}: {type(error).__name__}", flush=True)
                continue
            finally:
                CUTS[which] = usual
            yield _row(shape, "flopwise", which, str(tuple(cut)), took, drops=drops)


def library_rows(shape: Shape) -> Iterator[Row]:
    """The kernel that training takes where nothing is dropped."""
    given = Given(shape, drops=False)
    device, dtype = given.query.device, given.query.dtype
    tokens = (shape.tokens, shape.tokens)
    kernel = choose_kernel(device, dtype, given.mask, *tokens, padded=False, deterministic=False)
    read = (given.query, given.key, given.value)

    def forward() -> None:
        attention_forward(*read, given.mask, out=given.out, logsumexp=given.sums, kernel=kernel)

    def backward() -> None:
        attention_backward(
            given.gradient,
            *read,
            given.out,
            given.sums,
            given.mask,
            query_gradient=given.gradients[0],
            key_gradient=given.gradients[1],
            value_gradient=given.gradients[2],
            accumulate=False,
            kernel=kernel,
        )

    yield _row(shape, kernel, "forward", "", seconds_of(forward), drops=False)
    yield _row(shape, kernel, "backward", "", seconds_of(backward), drops=False)


def _row(shape: Shape, kernel: str, which: str, cut: str, took_s: float, *, drops: bool) -> Row:
    flops = shape.flops("forward" if which == "forward" else "of keys")
    return Row(shape.name, kernel, drops, which, cut, 1e6 * took_s, flops / took_s / 1e12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--dropped", action="store_true", help="with dropout alone: a kernel takes seconds to compile")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for shape in SHAPES:
        if shape.name not in given.shapes.split(","):
            continue
        own = [own_rows(shape, drops=drops) for drops in ((True,) if given.dropped else (True, False))]
        for found in (library_rows(shape), *own):
            for row in found:
                rows.append(row)
                words = f"{row.shape:9} {row.kernel:9} {'drops' if row.drops else '-':6} {row.which:11} {row.cut:18}"
                print(f"{words} {row.microseconds:8.1f} us {row.tflops_per_s:7.1f} TFLOP/s", flush=True)
    with (given.output / "own_attention.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()
