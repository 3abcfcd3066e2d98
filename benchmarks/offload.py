"""Fit a card's product rate and attention to the offload trainer's steps: `python -m benchmarks.offload NAME EVERY`.

Every EVERY-th row of the card (a100-pcie-80gb or rtx-3090) of the table `offload-ampere` is simulated with the plan
that it ran with. What is fitted: `sustained`, the shares of FlashAttention-3's forward at a few lengths, and how many
times as fast its backward is. Held out: each device cap is predicted by a fit to the rows of the other caps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.forecast import times_of
from flopwise.predict.kernels.calls import Floats
from flopwise.records.plan import Plan
from flopwise.references.dataflow.recorded import plan_of_run
from flopwise.references.published.offload import OffloadRun, read_offload
from flopwise.references.validate.fitting import least
from flopwise.setup.hardware import Hardware
from flopwise.work.transformer import Transformer

LENGTHS = {"a100-pcie-80gb": (512, 4096, 32_768, 262_144, 524_288), "rtx-3090": (512, 4096, 32_768, 131_072)}
USUAL_RATIO, DOUBT = 2.5, 0.5
"""Backward over forward on the RTX 3090, whose rows tell them apart less well: a weak pull towards it."""

Pairs = Sequence[tuple[OffloadRun, Plan]]


def rows_of(name: str, every: int) -> list[tuple[OffloadRun, Plan]]:
    """A card's runs, and the plans that they ran with."""
    hardware, model = load_hardware(name), transformer()
    runs = [run for run in read_offload(table="offload-ampere") if run.succeeded and run.hardware == name]
    return [(run, plan_of_run(run, model, hardware)) for run in runs[::every]]


def transformer() -> Transformer:
    model = load_model("llama-3-8b")
    assert isinstance(model, Transformer)
    return model


def residuals(hardware: Hardware, pairs: Pairs) -> Floats:
    """ln(predicted ÷ measured)"""
    return np.array([np.log(times_of(plan, transformer(), hardware).step_s / run.step_s) for run, plan in pairs])


def with_constants(hardware: Hardware, logarithms: Floats) -> Hardware:
    """The hardware with `sustained`, backward over forward, and forward shares."""
    sustained, ratio, *shares = np.exp(logarithms).tolist()
    lengths = LENGTHS[hardware.name]
    attention = replace(
        hardware.efficiency.attention.preferring(("flash-3",)),
        forward=tuple((float(n), min(1.0, share)) for n, share in zip(lengths, shares, strict=True)),
        backward=tuple((float(n), min(1.0, share * ratio)) for n, share in zip(lengths, shares, strict=True)),
        others=None,
    )
    gemm = replace(hardware.efficiency.gemm, sustained=min(1.0, sustained))
    return replace(hardware, efficiency=replace(hardware.efficiency, attention=attention, gemm=gemm))


def fitted(hardware: Hardware, pairs: Pairs) -> Hardware:
    """Fitted to these rows."""
    doubt = DOUBT if hardware.name == "rtx-3090" else 0.0

    def loss(place: Floats) -> Floats:
        pull = doubt * (place[1] - np.log(USUAL_RATIO))
        return np.append(residuals(with_constants(hardware, place), pairs), pull)

    start = np.log([hardware.efficiency.gemm.sustained, USUAL_RATIO, *([0.2] * len(LENGTHS[hardware.name]))])
    return with_constants(hardware, least(loss, start))


def main() -> None:
    name = sys.argv[1] if sys.argv[1:] else "rtx-3090"
    every = int(sys.argv[2]) if sys.argv[2:] else 8
    hardware, pairs = load_hardware(name), rows_of(name, every)
    found = fitted(hardware, pairs)
    attention = found.efficiency.attention
    print(f"{name}, {len(pairs)} rows: sustained {found.efficiency.gemm.sustained:.3f}", flush=True)
    for way in ("forward", "backward"):
        print(way, ", ".join(f"{tokens:.0f}: {share:.3f}" for tokens, share in getattr(attention, way)), flush=True)
    errors: list[float] = []
    for cap in sorted({run.device_bytes for run, _ in pairs}):
        others = [pair for pair in pairs if pair[0].device_bytes != cap]
        mine = [pair for pair in pairs if pair[0].device_bytes == cap]
        off = np.abs(np.expm1(-residuals(fitted(hardware, others), mine)))
        errors += off.tolist()
        print(f"held out {cap / 2**30:.0f} GiB: median {np.median(off):.2%} of {len(mine)} rows", flush=True)
    print(f"held out: median {np.median(errors):.2%}, mean {np.mean(errors):.2%}, largest {max(errors):.2%}")


if __name__ == "__main__":
    main()
