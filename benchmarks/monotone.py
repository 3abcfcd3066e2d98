"""Whether a better machine is ever predicted slower: `python -m benchmarks.monotone [PAIRS]`, 3,500 pairs by default.

A pair is a set-up of any kind (five models, eight machines, five frameworks, tensor, pipeline, context, data and
expert ranks, ZeRO 0 to 3) and the same work with faster links, higher peaks, more memory, lower latencies, or half of
the data ranks with half of the batch. Those of the second must not take longer; 300 pairs are a test
(tests/predict/test_scaling.py).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from math import gcd

import numpy as np

from flopwise.catalog.load import load_hardware, load_model, load_stack
from flopwise.predict.step import steps
from flopwise.records.prediction import Prediction
from flopwise.setup.hardware import Hardware, Network
from flopwise.setup.parallel import Parallel, why_illegal
from flopwise.setup.setup import Setup
from flopwise.work.formats import parse_formats
from flopwise.work.work import RECOMPUTE_POLICIES

machine, described, framework = cache(load_hardware), cache(load_model), cache(load_stack)

MODELS = ("llama-3-8b", "llama-2-13b", "llama-3-70b", "mixtral-8x7b", "qwen3-8b")
MACHINES = ("h100-sxm", "h100-efa", "a100-80gb", "a100-pcie-80gb", "b200", "l40s", "mi300x", "tpu-v5p")
STACKS = (None, "megatron-core", "torchtitan", "nanotron", "deepspeed")


def random_setup(random: np.random.Generator) -> Setup:
    """A set-up of any kind that a model allows."""
    while True:
        model, hardware = described(str(random.choice(MODELS))), machine(str(random.choice(MACHINES)))
        tensor, pipeline, context, data = (int(2 ** random.integers(0, most)) for most in (4, 4, 3, 7))
        parallel = Parallel(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            sequence=tensor > 1 and bool(random.integers(2)),
            zero=int(random.integers(4)) if data * context > 1 else 0,
        )
        if model.name.startswith("mixtral"):
            parallel = _with_experts(parallel, random)
        stack = STACKS[int(random.integers(len(STACKS)))]
        setup = Setup(
            model=model,
            hardware=hardware,
            parallel=parallel,
            sequence_tokens=int(2 ** random.integers(10, 14)),
            batch_sequences=data * int(2 ** random.integers(0, 5)),
            micro_batch_sequences=1,
            stack=framework(stack) if stack else None,
            formats=parse_formats("bf16-mixed"),
            recompute=RECOMPUTE_POLICIES[int(random.integers(len(RECOMPUTE_POLICIES)))],
        )
        reach = hardware.networks[-1].devices
        within = reach is None or parallel.devices <= reach
        if within and parallel.devices > 1 and _legal(setup):
            return setup


def _with_experts(parallel: Parallel, random: np.random.Generator) -> Parallel:
    """Experts over some of the ranks that may hold different ones."""
    sharing = 1 if parallel.sequence and random.integers(2) else parallel.tensor
    ranks = parallel.replicas * parallel.tensor // sharing
    expert = gcd(int(2 ** random.integers(0, 4)), ranks)
    return replace(parallel, expert=expert, expert_tensor=sharing, once_a_node=expert > 1 and bool(random.integers(2)))


def _legal(setup: Setup) -> bool:
    assert setup.sequence_tokens is not None
    return why_illegal(setup.model, setup.sequence_tokens, setup.parallel) is None


def better(setup: Setup, random: np.random.Generator) -> tuple[str, Setup]:
    """The same work on a machine that is better in one thing, or half of a weak-scaled job."""
    factor = float(random.uniform(1.05, 4.0))
    kind = str(random.choice(["links", "peaks", "memory", "latency", "fewer"]))
    hardware, parallel = setup.hardware, setup.parallel
    # Part of a torus has fewer links than the whole, and a PCIe box may be slower inside than its adapters are.
    rates = [network.sustained_bytes_per_s for network in hardware.networks]
    switched = all(network.topology != "torus" for network in hardware.networks) and rates == sorted(rates)[::-1]
    ranks = parallel.replicas // 2 * parallel.tensor // parallel.sharing_experts
    dealt = ranks % parallel.expert == 0
    if kind == "fewer" and switched and dealt and parallel.data % 2 == 0 and setup.batch_sequences:
        half = replace(parallel, data=parallel.data // 2, zero=parallel.zero if parallel.replicas > 2 else 0)
        if (half.zero == parallel.zero) and half.replicas > 1:
            return kind, replace(setup, parallel=half, batch_sequences=setup.batch_sequences // 2)
    if kind in ("links", "latency", "fewer"):
        networks = tuple(faster(one, factor, latency=kind == "latency") for one in hardware.networks)
        return kind, replace(setup, hardware=replace(hardware, networks=networks))
    return kind, replace(setup, hardware=stronger(hardware, factor, memory=kind == "memory"))


def faster(network: Network, factor: float, *, latency: bool) -> Network:
    if latency:
        known = network.latency_s
        return replace(network, latency_s=None if known is None else replace(known, value=known.value / factor))
    rate = network.bandwidth_bytes_per_s
    return replace(network, bandwidth_bytes_per_s=replace(rate, value=rate.value * factor))


def stronger(hardware: Hardware, factor: float, *, memory: bool) -> Hardware:
    device = hardware.device
    if not memory:
        peaks = {name: replace(fact, value=fact.value * factor) for name, fact in device.peak_flops.items()}
        return replace(hardware, device=replace(device, peak_flops=peaks))

    *near, dram = device.memory
    rate, size = dram.bandwidth_bytes_per_s, replace(dram.size_bytes, value=dram.size_bytes.value * factor)
    faster_rate = None if rate is None else replace(rate, value=rate.value * factor)
    grown = replace(dram, size_bytes=size, bandwidth_bytes_per_s=faster_rate)
    return replace(hardware, device=replace(device, memory=(*near, grown)))


def violations(count: int, seed: int) -> list[str]:
    """Of so many random pairs those where the better machine is slower."""
    random = np.random.default_rng(seed)
    pairs = [(setup, *better(setup, random)) for setup in (random_setup(random) for _ in range(count))]
    worse = steps([setup for setup, _, _ in pairs], operators=False)
    best = steps([setup for _, _, setup in pairs], operators=False)
    return [
        f"{kind}: {one.step_s:.6g} s, better {other.step_s:.6g} s: {setup.model.name} on {setup.hardware.name} "
        f"{setup.parallel.label} {setup.recompute} s{setup.sequence_tokens} {setup.stack and setup.stack.name}"
        for (setup, kind, _), one, other in zip(pairs, worse, best, strict=True)
        if compared(other, kind) > compared(one, kind) * (1 + 1e-9)
    ]


def compared(found: Prediction, kind: str) -> float:
    """Seconds of a step; fewer ranks that share the state have more of it to update each."""
    return found.step_s - found.parts["update"] if kind == "fewer" else found.step_s


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3500
    found = violations(count, seed=23)
    print("\n".join([*found, f"{len(found)} of {count:,} better machines are slower"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
