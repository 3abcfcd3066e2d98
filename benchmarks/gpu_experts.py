"""Mixtures of experts on one GPU: `python -m benchmarks.gpu_experts --output FOLDER`.

First the products of one mixture's experts, forward and backward, by every kernel that there is, each checked against
the plain form (with `--all-tiles` cut otherwise too). Then `--cells`: a model under caps, planned and trained as
`flopwise train` does, behind its ceiling (matrix products, grouped and dense, and attention alone, with the fastest
kernel of each). `--peer` times a layer's mixture as transformers runs it. Rows go to `products.csv`, `ceilings.csv`
and `cells.csv` as they are measured.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_ceiling import WHOLE, Shape, run_ceiling
from benchmarks.gpu_cells import Cell, Settings, run_cell
from flopwise.engine.kernels import plain_experts
from flopwise.engine.kernels.dispatch import sort_by_expert

KIND = "silu"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a mixture's products."""

    name: str
    tokens: int
    experts: int
    choices: int
    hidden: int
    inner: int

    @property
    def flops(self) -> int:
        """Of a product with one matrix of (hidden × inner) for every row."""
        return 2 * self.tokens * self.choices * self.hidden * self.inner


SIZES = {
    size.name: size
    for size in (
        Sizes("qwen3-30b", 16384, 128, 8, 2048, 768),
        Sizes("qwen3-30b-32k", 32768, 128, 8, 2048, 768),
        Sizes("gpt-oss-20b", 16384, 32, 4, 2880, 2880),
        Sizes("gpt-oss-20b-32k", 32768, 32, 4, 2880, 2880),
        Sizes("olmoe", 16384, 64, 8, 2048, 1024),
        Sizes("mixtral", 16384, 8, 2, 4096, 14336),
        Sizes("tiny", 24, 4, 2, 32, 16),
        Sizes("odd", 1111, 9, 1, 360, 200),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductRow:
    """One product by one kernel."""

    sizes: str
    skew: float
    product: str
    kernel: str
    call_s: float
    tflops_per_s: float
    error: float | None
    """Of all the results' numbers, relative to what the plain form makes of the same; None: another result."""
    compile_s: float


class Inputs:
    """Random numbers for a mixture's products, and where their results go."""

    def __init__(self, sizes: Sizes, skew: float, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def drawn(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype).mul_(scale)

        shares = torch.arange(1, sizes.experts + 1, device=device, dtype=torch.float32).pow(-skew)
        # The largest of each token's shares, each times the power of a random number, as sampling without putting back.
        noise = torch.rand(sizes.tokens, sizes.experts, generator=generator, device=device).log() / shares
        self.index = noise.topk(sizes.choices, -1)[1].int()
        self.sizes, rows = sizes, sizes.tokens * sizes.choices
        self.weights = torch.rand(sizes.tokens, sizes.choices, generator=generator, device=device)
        self.source, self.gradient = drawn(sizes.tokens, sizes.hidden), drawn(sizes.tokens, sizes.hidden)
        self.first = drawn(sizes.experts, 2 * sizes.inner, sizes.hidden, scale=sizes.hidden**-0.5)
        self.second = drawn(sizes.experts, sizes.hidden, sizes.inner, scale=sizes.inner**-0.5)
        self.both, self.activated = drawn(rows, 2 * sizes.inner), drawn(rows, sizes.inner)
        self.wide = self.source.new_empty(rows, sizes.hidden)
        self.total_first, self.total_second = torch.zeros_like(self.first), torch.zeros_like(self.second)
        self.routed = sort_by_expert(self.index, sizes.experts)
        self.of_rows = self.routed.weights_of(self.weights)

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        inner = self.sizes.inner
        return self.both[:, :inner], self.both[:, inner:]

    def restore(self) -> None:
        """Numbers that results were written over."""
        generator = torch.Generator(device=self.both.device).manual_seed(1)
        self.both.copy_(torch.randn(self.both.shape, generator=generator, device=self.both.device))
        self.activated.copy_(torch.randn(self.activated.shape, generator=generator, device=self.both.device))
        self.total_first.zero_()
        self.total_second.zero_()
        torch.index_select(self.source, 0, self.routed.tokens, out=self.wide)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel for a product."""

    product: str
    kernel: str
    call: Callable[[], object]
    result: Callable[[], Sequence[Tensor]]
    comparable: bool = True
    """Whether its results are the first ones of the plain form."""


PRODUCTS = {
    "gate+up, SwiGLU": 2,
    "down": 1,
    "sum of rows": 0,
    "down back, SwiGLU back": 1,
    "down, matrices": 1,
    "tokens laid out": 0,
    "gate+up, matrices": 2,
    "gate+up back": 2,
    "sum of rows back": 0,
}
"""Products in the order of training, each with how many matrices of (hidden × inner) it multiplies with."""


def back_to_inner(it: Inputs, form: ModuleType, **tiles: object) -> None:
    """The gradient of the weighted results brought back through the activation."""
    gate, up = it.halves
    form.product(it.gradient, it.second, None, it.routed, out=it.activated, gathers=True, back=True, **tiles)
    form.weigh_backward(KIND, it.activated, gate, up, it.of_rows)


def with_forms(inputs: Inputs, form: ModuleType, name: str, **tiles: object) -> dict[str, Candidate]:
    """The products by kernels with the interface of `plain_experts`; `tiles`: where they can be cut otherwise."""
    it, routed = inputs, inputs.routed
    gate, up = it.halves
    out, back = torch.empty_like(it.source), torch.zeros_like(it.source)
    calls: dict[str, tuple[Callable[[], object], Callable[[], Sequence[Tensor]]]] = {
        "gate+up, SwiGLU": (
            partial(
                form.gated_product, it.source, it.first, None, routed, kind=KIND, gate=gate, up=up,
                activated=it.activated, **tiles,
            ),
            lambda: (it.both, it.activated),
        ),
        "down": (
            partial(form.product, it.activated, it.second, None, routed, out=it.wide, **tiles),
            lambda: (it.wide,),
        ),
        "sum of rows": (
            partial(form.sum_rows, it.wide, routed, it.weights, out=out, accumulate=False), lambda: (out,),
        ),
        "down back, SwiGLU back": (
            lambda: back_to_inner(it, form, **tiles),
            lambda: (it.both, it.activated),
        ),
        "down, matrices": (
            partial(
                form.wgrad, it.gradient, it.activated, routed, total=it.total_second, gathers="gradient", **tiles
            ),
            lambda: (it.total_second,),
        ),
        "tokens laid out": (partial(form.lay_out, it.source, routed, out=it.wide), lambda: (it.wide,)),
        "gate+up, matrices": (
            partial(form.wgrad, it.both, it.wide, routed, total=it.total_first, gathers="", **tiles),
            lambda: (it.total_first,),
        ),
        "gate+up back": (
            partial(form.product, it.both, it.first, None, routed, out=it.wide, back=True, **tiles),
            lambda: (it.wide,),
        ),
        "sum of rows back": (
            partial(form.sum_rows, it.wide, routed, None, out=back, accumulate=False), lambda: (back,),
        ),
    }  # fmt: skip
    return {product: Candidate(product, name, *each) for product, each in calls.items()}


def by_torch(inputs: Inputs) -> dict[str, Candidate]:
    """torch's grouped product alone, on rows that lie ready; what is added and activated is not in it."""
    it, ends = inputs, inputs.routed.starts[1:]
    gathered = it.source.index_select(0, it.routed.tokens)
    made: dict[str, Tensor] = {}

    def grouped(name: str, left: Tensor, right: Tensor) -> None:
        made[name] = torch._grouped_mm(left, right, offs=ends)

    def candidate(product: str, left: Tensor, right: Tensor) -> Candidate:
        call = partial(grouped, product, left, right)
        comparable = product != "down back, SwiGLU back"
        return Candidate(product, "torch._grouped_mm", call, lambda: (made[product],), comparable)

    return {
        each.product: each
        for each in (
            candidate("gate+up, SwiGLU", gathered, it.first.mT),
            candidate("down", it.activated, it.second.mT),
            candidate("down back, SwiGLU back", gathered, it.second),
            candidate("down, matrices", gathered.t(), it.activated),
            candidate("gate+up back", it.both, it.first),
            candidate("gate+up, matrices", it.both.t(), gathered),
        )
    }


def tiles_of() -> dict[str, list[Any]]:
    """Tiles that are tried for each product."""
    from flopwise.engine.kernels.expert_tiles import ExpertTile as Tile

    products = [
        Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 4, 3), Tile(128, 128, 64, 8, 4),
        Tile(256, 128, 64, 8, 3),
    ]  # fmt: skip
    gated = [Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 4, 3), Tile(256, 64, 64, 8, 3)]
    matrices = [
        Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 5), Tile(256, 128, 64, 8, 5), Tile(128, 128, 64, 4, 3),
        Tile(128, 128, 64, 4, 5), Tile(128, 128, 32, 4, 5),
    ]  # fmt: skip
    return {
        "gate+up, SwiGLU": gated,
        "down": products,
        "down back, SwiGLU back": products,
        "down, matrices": matrices,
        "gate+up, matrices": matrices,
        "gate+up back": products,
    }


def candidates(inputs: Inputs, device: torch.device, *, all_tiles: bool) -> Iterator[Candidate]:
    """All kernels of all products, those of a product behind each other, the plain form first."""
    plain = with_forms(inputs, plain_experts, "plain")
    if device.type != "cuda":
        yield from plain.values()
        return
    from flopwise.engine.kernels import fused_experts

    own, library = with_forms(inputs, fused_experts, "triton"), by_torch(inputs)
    tried = tiles_of() if all_tiles else {}
    others = {product: [with_forms(inputs, fused_experts, "triton", tile=tile) for tile in tiles]
              for product, tiles in tried.items()}  # fmt: skip
    for product in PRODUCTS:
        yield plain[product]
        yield own[product]
        if product in library:
            yield library[product]
        for forms, tile in zip(others.get(product, []), tried.get(product, []), strict=True):
            found = forms[product]
            yield Candidate(product, f"triton {'×'.join(map(str, tile))}", found.call, found.result)


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 12) -> float:
    """Median of so many calls behind each other."""
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return float(median(before.elapsed_time(after) for before, after in pairwise(marks))) * 1e-3


def measure_products(
    sizes: Sizes, skew: float, device: torch.device, path: Path, *, all_tiles: bool = False
) -> list[ProductRow]:
    """Every product by every kernel."""
    inputs, rows = Inputs(sizes, skew, device), []
    expected: Sequence[Tensor] = ()
    for each in candidates(inputs, device, all_tiles=all_tiles):
        begun = time.perf_counter()
        try:
            inputs.restore()
            each.call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            compile_s = time.perf_counter() - begun
            if each.kernel == "plain":
                expected = [result.clone() for result in each.result()]
            error = error_of(each.result(), expected) if each.comparable else None
            call_s = seconds_of(each.call, device, repeats=1 if each.kernel == "plain" else 12)
        except Exception as failed:  # a tile that a card has no room for is no reason to measure none
            print(f"  {each.product} by {each.kernel}: {type(failed).__name__}: {str(failed)[:120]}", flush=True)
            continue
        flops = PRODUCTS[each.product] * sizes.flops
        row = ProductRow(
            sizes=sizes.name, skew=skew, product=each.product, kernel=each.kernel, call_s=call_s,
            tflops_per_s=flops / call_s / 1e12, error=error, compile_s=compile_s,
        )  # fmt: skip
        off = "" if error is None else f"  off {error:.4f}"
        print(
            f"{row.product:24}{row.kernel:26}{1e3 * call_s:8.3f} ms {row.tflops_per_s:6.0f} TFLOP/s"
            f"{off}  first {compile_s:.1f} s", flush=True,
        )  # fmt: skip
        rows.append(row)
        write_rows(path, [asdict(row)])
    return rows


def error_of(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest distance of a result from what it should be, over its length."""
    return max(
        float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30))
        for one, other in zip(found, expected, strict=False)
    )


def tell_layer(rows: Sequence[ProductRow], sizes: Sizes) -> None:
    """The fastest of each, and what forward and backward come to with all passes around them."""
    own = [row for row in rows if row.kernel.startswith("triton")] or rows
    best = {product: min((row for row in own if row.product == product), key=lambda row: row.call_s, default=None)
            for product in PRODUCTS}  # fmt: skip
    print(f"\n{sizes.name}, {sizes.tokens:,} tokens: fastest")
    for product, row in best.items():
        if row is not None:
            print(f"  {product:24}{row.kernel:26}{1e3 * row.call_s:8.3f} ms {row.tflops_per_s:6.0f} TFLOP/s")
    order = list(PRODUCTS)
    for name, products in (("forward", order[:3]), ("backward", order[3:])):
        chosen = [row for row in map(best.get, products) if row is not None]
        total, flops = sum(row.call_s for row in chosen), sum(PRODUCTS[row.product] for row in chosen) * sizes.flops
        if total:
            print(f"  {name} with everything around it: {1e3 * total:.2f} ms, {flops / total / 1e12:.0f} TFLOP/s")


# -- cells ------------------------------------------------------------------------------------------------------------

CELLS = {
    cell.name: cell
    for cell in (
        Cell(name="qwen3-30b", model="qwen3-30b-a3b", sequence_tokens=4096, batch_tokens=131072, device_gib=136,
             host_gib=108, least_steps=2, step_s=8, set_up_s=100),
        Cell(name="qwen3-30b-8-layers", model="qwen3-30b-a3b:8", sequence_tokens=4096, batch_tokens=131072,
             device_gib=130, host_gib=0, least_steps=3, step_s=2, set_up_s=25),
        Cell(name="gpt-oss-20b", model="gpt-oss-20b", sequence_tokens=4096, batch_tokens=131072, device_gib=136,
             host_gib=100, least_steps=2, step_s=7, set_up_s=80),
        Cell(name="olmoe-16", model="olmoe-1b-7b", sequence_tokens=4096, batch_tokens=131072, device_gib=16,
             host_gib=80, least_steps=2, step_s=5, set_up_s=60),
        Cell(name="olmoe", model="olmoe-1b-7b", sequence_tokens=4096, batch_tokens=131072, device_gib=130,
             host_gib=0, least_steps=3, step_s=3, set_up_s=25),
    )
}  # fmt: skip


def measure_cell(cell: Cell, settings: Settings, ceilings: dict[str, float], *, with_ceiling: bool) -> dict[str, Any]:
    """The cell's row, behind its ceiling."""
    begun = time.perf_counter()
    if with_ceiling and cell.ceiling not in ceilings:
        shape = Shape(
            name=cell.ceiling, model=cell.model, sequence_tokens=cell.sequence_tokens, precision=cell.precision
        )
        found = run_ceiling(shape, settings)
        write_rows(settings.output / "ceilings.csv", found)
        ceilings[cell.ceiling] = next(row["tokens_per_s"] for row in found if row["op"] == WHOLE)
        for row in found:
            if row["counted"]:
                print(f"  {row['op']:10}{row['passed']:10}{row['kernel']:20}{row['tflops_per_s']:6.0f} TFLOP/s")
        print(f"ceiling {cell.ceiling}: {ceilings[cell.ceiling]:,.0f} tok/s", flush=True)
        free()
    row = asdict(run_cell(cell, settings))
    ceiling = ceilings.get(cell.ceiling)
    row |= {"ceiling_tokens_per_s": ceiling, "wall_s": time.perf_counter() - begun}
    write_rows(settings.output / "cells.csv", [row])
    free()
    return row


def free() -> None:
    """Give back what nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows, with the names of their columns where the file is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


def peer_layer(sizes: Sizes, device: torch.device) -> None:
    """A layer's mixture as transformers runs it with grouped products, forward and backward."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden, moe_intermediate_size=sizes.inner, num_experts=sizes.experts,
        num_experts_per_tok=sizes.choices, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device(device):
        block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    source = torch.randn(1, sizes.tokens, sizes.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(source)

    def forward() -> Tensor:
        made = block(source)
        result: Tensor = made[0] if isinstance(made, tuple) else made
        return result

    def both() -> None:
        forward().backward(gradient.view(1, sizes.tokens, sizes.hidden))  # type: ignore[no-untyped-call]

    for name, call, flops in (("forward", forward, 3), ("forward and backward", both, 9)):
        for _ in range(3):
            call()
        call_s = seconds_of(call, device)
        rate = flops * sizes.flops / call_s / 1e12
        print(f"transformers, grouped_mm, {name}: {1e3 * call_s:.2f} ms, {rate:.0f} TFLOP/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--products", default="", help=f"sizes separated by commas, of {', '.join(SIZES)}")
    parser.add_argument("--skew", type=float, default=0.0, help="experts' shares follow a power law with this exponent")
    parser.add_argument("--all-tiles", action="store_true", help="try other cuts of the products than ours")
    parser.add_argument("--cells", default="", help=f"separated by commas, of {', '.join(CELLS)}")
    parser.add_argument("--no-ceiling", action="store_true", help="of the cells")
    parser.add_argument("--peer", action="store_true", help="transformers' layer at the sizes of the products")
    parser.add_argument("--profile", action="store_true", help="a trace of each cell by kernel")
    parser.add_argument("--warm-up", type=float, default=4.0)
    parser.add_argument("--measure", type=float, default=10.0)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    device = torch.device(given.device)
    for name in filter(None, given.products.split(",")):
        rows = measure_products(
            SIZES[name], given.skew, device, given.output / "products.csv", all_tiles=given.all_tiles
        )
        tell_layer(rows, SIZES[name])
        free()
        if given.peer:
            peer_layer(SIZES[name], device)
            free()
    settings = Settings(
        device=given.device, output=given.output, warm_up_s=given.warm_up, measure_s=given.measure,
        ceiling_warm_up_s=3.0, ceiling_measure_s=4.0, profile=given.profile,
    )  # fmt: skip
    ceilings: dict[str, float] = {}
    table, failed = [], 0
    for name in filter(None, given.cells.split(",")):
        try:
            table.append(measure_cell(CELLS[name], settings, ceilings, with_ceiling=not given.no_ceiling))
        except Exception:  # the other cells are measured all the same
            failed += 1
            print(f"{name} failed\n{traceback.format_exc()[-1500:]}", flush=True)
            free()
    for row in table:
        share = f"{row['tokens_per_s'] / row['ceiling_tokens_per_s']:.1%} of its ceiling, " * bool(
            row["ceiling_tokens_per_s"]
        )
        print(
            f"{row['cell']:20}{row['tokens_per_s']:9,.0f} tok/s, {share}predicted ÷ measured "
            f"{row['predicted_per_measured'] or 0:.2f}, {row['wall_s']:.0f} s"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
