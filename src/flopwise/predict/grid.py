"""Many steps at once: every model on every device at every batch size, as arrays.

The kernels of a model are listed once; a device then costs them for all batch sizes in one pass of numpy. It is the
same code that `step` runs for a single prediction, so the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flopwise.predict.kernels.calls import Floats, calls_of
from flopwise.predict.kernels.costs import peak_flops, step_costs
from flopwise.predict.kernels.memory import memory_line, usable_bytes
from flopwise.setup.hardware import Hardware
from flopwise.setup.workload import Workload
from flopwise.work.describe import describe
from flopwise.work.model import Model
from flopwise.work.op import Convention


@dataclass(frozen=True, slots=True)
class Grid:
    """Predictions over models × devices × batches."""

    step_s: Floats
    tokens_per_s: Floats
    mfu: Floats
    device_bytes: Floats
    """Total; the same on every device."""
    fits: NDArray[np.bool_]


def step_grid(
    models: Sequence[Model],
    devices: Sequence[Hardware],
    batches: Sequence[int],
    workload: Workload,
    convention: Convention = "causal",
) -> Grid:
    """Predict one step of each batch (sequences, as one micro-batch); all else is as in `workload`."""
    sequences = np.array(batches, dtype=np.float64)
    tokens = sequences * workload.sequence_tokens
    shape = (len(models), len(devices), len(batches))
    step_s, flops = np.empty(shape), np.empty((len(models), 1, len(batches)))
    memory = np.empty((len(models), 1, len(batches)))
    for row, model in enumerate(models):
        calls = calls_of(model, workload)
        work = describe(model, workload.sequence_tokens, workload.attention)
        flops[row, 0] = sequences * float(work.model_flops(convention))
        one, each = memory_line(work, workload)
        memory[row, 0] = one + (sequences - 1) * each
        for column, hardware in enumerate(devices):
            step_s[row, column] = step_costs(calls, hardware, sequences).seconds.sum(axis=0)
    peaks = np.array([peak_flops(hardware, workload.formats.matrix) for hardware in devices])[None, :, None]
    capacity = np.array([usable_bytes(hardware) for hardware in devices])[None, :, None]
    return Grid(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        mfu=flops / (step_s * peaks),
        device_bytes=np.broadcast_to(memory, shape),
        fits=memory <= capacity,
    )
