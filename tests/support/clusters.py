"""Machines, stacks and small models for the tests of parallel set-ups, with numbers that a hand can compute with."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from flopwise.catalog.load import load_hardware, load_model
from flopwise.predict.cluster.costing import Costed, evaluate
from flopwise.predict.cluster.pieces import BLOCK, EMBEDDING, HEAD
from flopwise.predict.cluster.strategies import listed
from flopwise.predict.kernels.calls import Phase
from flopwise.setup.hardware import Fact, Hardware, Host, Link, Network, Source
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import SettledSetup
from flopwise.setup.stack import Constant, Stack
from flopwise.work.formats import POLICIES
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer

NEUTRAL = Stack(name="neutral", title="neutral", source="test", reduce_always=False)
"""The framework adds nothing."""

SMALL = Transformer(
    name="small",
    title="small",
    source="test",
    layers=6,
    hidden=256,
    heads=8,
    kv_heads=4,
    ffn=768,
    vocab=1000,
    context=512,
)
MIXTURE = replace(SMALL, name="mixture", experts=4, experts_per_token=2)


def fact(value: float) -> Fact:
    return Fact(value=value, source="test")


def network(rate: float, latency_s: float | None = None, devices: int | None = None) -> Network:
    """A level on which everyone reaches everyone at once: n ranks pass (n−1)/n of a vector in one latency."""
    latency = None if latency_s is None else fact(latency_s)
    return Network(name="flat", bandwidth_bytes_per_s=fact(rate), devices=devices, latency_s=latency)


def machine(
    *networks: Network,
    name: str = "h100-sxm",
    link_bytes_per_s: float | None = None,
    host_bytes_per_s: float | None = None,
    faster: float = 1.0,
) -> Hardware:
    """A device of the catalogue in other surroundings; `faster` multiplies its peaks and its memory's rates."""
    hardware = _catalogued(name)
    device = hardware.device
    levels = tuple(
        replace(level, bandwidth_bytes_per_s=_times(level.bandwidth_bytes_per_s, faster)) for level in device.memory
    )
    peaks = {key: replace(peak, value=faster * peak.value) for key, peak in device.peak_flops.items()}
    return replace(
        hardware,
        device=replace(device, memory=levels, peak_flops=peaks),
        networks=networks,
        link=Link(name="link", bandwidth_bytes_per_s=fact(link_bytes_per_s)) if link_bytes_per_s else None,
        host=Host(memory_bandwidth_bytes_per_s=fact(host_bytes_per_s)) if host_bytes_per_s else None,
        sources={**hardware.sources, "test": Source(title="test", kind="estimated")},
    )


@cache
def _catalogued(name: str) -> Hardware:
    return load_hardware(name)


def _times(known: Fact | None, factor: float) -> Fact | None:
    return replace(known, value=factor * known.value) if known else None


def stack(**constants: float) -> Stack:
    """A framework with these constants."""
    return replace(NEUTRAL, constants={name: Constant(value=value, how="test") for name, value in constants.items()})


def workload(batch: int = 8, micro: int = 1, tokens: int = 512, **others: object) -> SettledSetup:
    """A step of the small model on one device; mixed precision unless told otherwise: 16 bytes a parameter."""
    sizes = {"sequence_tokens": tokens, "batch_sequences": batch, "micro_batch_sequences": micro}
    words = {"formats": POLICIES["bf16-mixed"], "model": SMALL, "hardware": _catalogued("h100-sxm"), **others}
    return SettledSetup(**sizes, **words)  # type: ignore[arg-type]


def placed(work: SettledSetup, model: Model, parallel: Parallel, hardware: Hardware) -> SettledSetup:
    """A step's sizes for another model and other devices, each data rank of which has something to do."""
    batch = max(work.batch_sequences, parallel.data)
    micro = min(work.micro_batch_sequences, -(-batch // parallel.data))
    return replace(
        work,
        model=model,
        hardware=hardware,
        parallel=parallel,
        batch_sequences=batch,
        micro_batch_sequences=micro,
    )


def evaluated(
    model: Model | str, parallel: Parallel, work: SettledSetup, hardware: Hardware, framework: Stack = NEUTRAL
) -> Costed:
    """One set-up."""
    model = load_model(model) if isinstance(model, str) else model
    return evaluate(listed([placed(work, model, parallel, hardware)]), hardware, framework)


class Kernels:
    """Seconds of one micro-batch's kernels by part, as the table of pieces has them; `again` is the recompute."""

    def __init__(self, model: Model, parallel: Parallel, work: SettledSetup, hardware: Hardware) -> None:
        laid_out = listed([placed(work, model, parallel, hardware)])
        seconds = laid_out.table.seconds[laid_out.strategies.row[0]]
        self.by_class = seconds
        whole = seconds.sum(axis=-1)
        self.forward = whole[:, Phase.FORWARD]
        self.backward = whole[:, Phase.BACKWARD] + whole[:, Phase.RECOMPUTE]
        self.layers = model.layers

    def total(self) -> float:
        """All layers, embedding and head, forward and backward."""
        both = self.forward + self.backward
        return float(both[EMBEDDING] + self.layers * both[BLOCK] + both[HEAD])


def one(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """The only element."""
    assert values.shape == (1,)
    return float(values[0])
