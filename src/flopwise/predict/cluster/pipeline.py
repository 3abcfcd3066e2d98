"""Pipeline schedules: seconds of a step from the seconds of its stages.

With f and b a stage's forward and backward of one micro-batch, m micro-batches and p stages:

    gpipe        Σ f + (m − 1) · max f + Σ b + (m − 1) · max b
    1f1b         Σ (f + b) + (m − 1) · max (f + b) + min (m − 1, p − 2) · (max f + max b − max (f + b))
    interleaved  m · max (f + b) + (Σ (f + b) − max (f + b)) / chunks, and Σ (f + b) at the least

For equal stages these are the known bubbles: (p − 1) / m of the useful time for the first two (Huang et al., arXiv
1811.06965; Narayanan et al., arXiv 1806.03377), divided by the chunks for the third (Narayanan et al., arXiv
2104.04473). The first is exact for any stages. The second is exact for equal stages and never too short for others: a
slow first stage hides part of the others' start. Its last term is for stages of which one is slowest forward and
another backward, as in gpipe: while the pipeline fills and empties, up to p − 2 micro-batches wait for both. The third
holds where m is a multiple of p, as Megatron-LM demands; with fewer micro-batches than stages there is nothing to
interleave, and one micro-batch still passes all stages.

How many micro-batches a stage holds: gpipe all m; 1f1b as many as stages follow, itself included; interleaved
2·(stages that follow) + (chunks − 1)·p + 1 chunks' worth.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flopwise.predict.kernels.calls import Floats

GPIPE, ONE_FORWARD, INTERLEAVED = 0, 1, 2
"""Indices of the schedules, in the order of `setup.parallel.SCHEDULES`."""


def pipeline_seconds(
    schedule: NDArray[np.intp],
    chunks: Floats,
    micro_batches: Floats,
    stages: Floats,
    *,
    forward_sum: Floats,
    backward_sum: Floats,
    forward_most: Floats,
    backward_most: Floats,
    both_most: Floats,
) -> Floats:
    """Seconds from the first forward to the last backward; sums and maxima are over stages."""
    more = micro_batches - 1
    total = forward_sum + backward_sum
    gpipe = total + more * (forward_most + backward_most)
    apart = np.clip(stages - 2, 0.0, more)
    alternating = total + more * both_most + apart * (forward_most + backward_most - both_most)
    interleaved = np.maximum(micro_batches * both_most + (total - both_most) / chunks, total)
    return np.where(schedule == GPIPE, gpipe, np.where(schedule == ONE_FORWARD, alternating, interleaved))


def held_micro_batches(
    schedule: NDArray[np.intp], chunks: Floats, micro_batches: Floats, stages: Floats, stage: Floats
) -> Floats:
    """Micro-batches whose activations a stage holds at its worst moment; parts of one where it has chunks."""
    following = stages - stage - 1
    alternating = np.minimum(micro_batches, following + 1)
    warm_up = 2 * following + (chunks - 1) * stages + 1
    interleaved = np.minimum(micro_batches, warm_up / chunks)
    return np.where(schedule == GPIPE, micro_batches, np.where(schedule == ONE_FORWARD, alternating, interleaved))
