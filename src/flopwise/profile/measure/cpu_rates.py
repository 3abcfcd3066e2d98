"""What this CPU reaches: products, attention, memory, calls of a program that trains on it, in about a second.

Times are those of the calling thread on a core, so that a busy machine gives the answer of an idle one. What trains
here is torch, so torch is what is timed, with as many threads as it takes; without it numpy says what it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from flopwise.base.processes import let_threads_sleep
from flopwise.setup.efficiency import AttentionEfficiency, PlainEfficiency
from flopwise.work.op import attention_flops, product_flops

SIDE = 1024
BLOCK_NUMBERS = 100_000
"""Of a block of rows that plain kernels work on: ten of its temporaries are 4 MiB."""
SOURCE_NUMBERS = 1 << 22
"""Out of the caches."""
LEAST_COPIED_BYTES, MOST_COPIED_BYTES = 128 * 2**20, 256 * 2**20
"""A virtual machine names its host's whole cache, 480 MiB: four times as much took 6 to 16 s, nearly all of them to be
given the memory, and copied no faster or slower than an eighth of it. Source and target together are more than that."""
PER_CALL = 10.0
"""What a call costs in a step of small operators, the program round it and cold caches included, over what the same
call costs in a loop of its own: 8 to 11 in steps of five models of width 64 to 256 on two processors."""
ATTENTION_SHAPES = ((32, 16), (128, 4))
"""(head size, heads): the narrower the heads, the more of the time are exponentials."""
ATTENTION_TOKENS, SEQUENCES = 256, 2
WHOLE_KEYS = 512
"""torch's kernel for CPUs takes blocks of so many keys whole, whatever a causal mask hides of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuRates:
    """Of this CPU, with the threads that torch takes."""

    product_flops: dict[str, float]
    """Per second, by number format."""
    copy_bytes_per_s: float
    """Read and written, out of the caches."""
    attention_s: dict[str, tuple[float, ...]] | None
    """Direction → seconds of a (query, key) pair for each of `ATTENTION_SHAPES`; None: not measured."""
    plain: PlainEfficiency | None


def measure_cpu(cache_bytes: int) -> CpuRates:
    """Time torch where it is installed, else numpy."""
    return _with_torch(cache_bytes) if find_spec("torch") is not None else _with_numpy(cache_bytes)


def least_seconds(run: Callable[[], object], budget_s: float) -> float:
    """The least of as many runs as fit the budget, at least five; the first only warms up.

    A thread that waits for another one spins on its core, and beside busy processes it waits long: the median of the
    runs was up to thirty times the least.
    """
    run()
    taken: list[float] = []
    while len(taken) < 5 or sum(taken) < budget_s:
        begin = time.thread_time()
        run()
        taken.append(time.thread_time() - begin)
    return min(taken)


def _with_numpy(cache_bytes: int) -> CpuRates:
    def rate(number_format: type[np.floating]) -> float:
        left, right = (np.ones((SIDE, SIDE), number_format) for _ in range(2))
        result = np.empty_like(left)
        return product_flops(SIDE, SIDE, SIDE) / least_seconds(lambda: np.matmul(left, right, out=result), 0.15)

    source = np.ones(_copied_bytes(cache_bytes) // 8)
    target = np.empty_like(source)
    copied = 2 * source.nbytes / least_seconds(lambda: np.copyto(target, source), 0.15)
    return CpuRates(
        product_flops={"fp32": rate(np.float32), "fp64": rate(np.float64)},
        copy_bytes_per_s=copied,
        attention_s=None,
        plain=None,
    )


def _with_torch(cache_bytes: int) -> CpuRates:
    # As training's threads wait.
    let_threads_sleep()
    import torch

    def rate(number_format: torch.dtype) -> float:
        left, right, result = (torch.ones((SIDE, SIDE), dtype=number_format) for _ in range(3))
        return product_flops(SIDE, SIDE, SIDE) / least_seconds(lambda: torch.mm(left, right, out=result), 0.15)

    pairs = [_attention_with_torch(*shape) for shape in ATTENTION_SHAPES]
    threads = torch.get_num_threads()
    # Most of what plain kernels call is too small to be parted among threads.
    torch.set_num_threads(1)
    try:
        plain = _plain_with_torch()
    finally:
        torch.set_num_threads(threads)
    return CpuRates(
        product_flops={"fp32": rate(torch.float32), "fp64": rate(torch.float64)},
        copy_bytes_per_s=_copy_with_torch(_copied_bytes(cache_bytes)),
        attention_s={"forward": tuple(there for there, _ in pairs), "backward": tuple(back for _, back in pairs)},
        plain=plain,
    )


def _copied_bytes(cache_bytes: int) -> int:
    """Out of the caches, and no more memory than that takes."""
    return min(max(4 * cache_bytes, LEAST_COPIED_BYTES), MOST_COPIED_BYTES)


def _copy_with_torch(size_bytes: int) -> float:
    import torch

    source = torch.ones(size_bytes // 4)
    target = torch.empty_like(source)
    return 2 * source.nbytes / least_seconds(lambda: target.copy_(source), 0.15)


def _attention_with_torch(head_dim: int, heads: int) -> tuple[float, float]:
    """Seconds of a pair of query and key, forward and backward, nothing masked."""
    import torch

    # As training has them: a token's heads beside each other.
    shape = (SEQUENCES, ATTENTION_TOKENS, heads, head_dim)
    query, key, value = (torch.ones(shape).transpose(1, 2) for _ in range(3))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attend_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, sums = attend(query, key, value)[:2]
    pairs = SEQUENCES * heads * ATTENTION_TOKENS**2
    return (
        least_seconds(lambda: attend(query, key, value), 0.04) / pairs,
        least_seconds(lambda: attend_back(out, query, key, value, out, sums, 0.0, False), 0.06) / pairs,
    )


def _plain_with_torch() -> PlainEfficiency:
    """Sums and products as plain kernels chain them, over blocks of rows of tensors out of the caches."""
    import torch

    source, target = torch.full((SOURCE_NUMBERS,), 0.5), torch.empty(SOURCE_NUMBERS)
    blocks = [slice(first, first + BLOCK_NUMBERS) for first in range(0, SOURCE_NUMBERS, BLOCK_NUMBERS)]
    # Places of their own: whether memory that is given back goes to the system, and comes from there page by page, is
    # up to what the process has allocated before, and took six times as long in some.
    places = [torch.empty(BLOCK_NUMBERS) for _ in range(CHAIN)]

    def chain() -> None:
        for block in blocks:
            made = [source[block]]
            for place in places:
                made.append(torch.add(made[-1], made[len(made) // 2], out=place[: len(made[0])]))
            target[block] = made[-1]

    small, result = torch.ones(64), torch.empty(64)

    def calls() -> None:
        for _ in range(CALLS):
            torch.add(small, small, out=result)

    values = torch.full((BLOCK_NUMBERS,), 0.5)
    found = torch.empty_like(values)
    moved_s = least_seconds(chain, 0.1) / (SOURCE_NUMBERS * CHAIN_MOVED * 4)
    function_s = least_seconds(lambda: torch.exp(values, out=found), 0.05) / BLOCK_NUMBERS - 2 * 4 * moved_s
    return PlainEfficiency(
        source="measured",
        call_s=PER_CALL * least_seconds(calls, 0.05) / CALLS,
        bytes_per_s=1.0 / moved_s,
        function_s=max(0.0, function_s),
    )


CALLS = 1000
CHAIN = 9
CHAIN_MOVED = 2 + 3 * CHAIN
"""Numbers that a chain of so many sums reads and writes for each of its own."""


def attention_efficiency(rates: CpuRates, assumed: AttentionEfficiency) -> AttentionEfficiency:
    """Shares of the peak, and seconds of a pair beside its products, by two head sizes; as assumed if not measured."""
    if rates.attention_s is None:
        return assumed
    shares, pairs = [], []
    for direction in ("forward", "backward"):
        (narrow, narrow_s), (wide, wide_s) = zip(
            [head_dim for head_dim, _ in ATTENTION_SHAPES], rates.attention_s[direction], strict=True
        )
        flops = attention_flops(direction, 2, 1, 1)
        channel_s = max(wide_s / wide / 2, (wide_s - narrow_s) / (wide - narrow))
        shares.append(min(1.0, flops / channel_s / rates.product_flops["fp32"]))
        pairs.append(max(0.0, narrow_s - narrow * channel_s))
    forward, backward = shares
    return AttentionEfficiency(
        source="measured",
        forward=((128.0, forward),),
        backward=((128.0, backward),),
        tail=0.0,
        pair_s=(pairs[0], pairs[1]),
        whole_keys=WHOLE_KEYS,
    )
