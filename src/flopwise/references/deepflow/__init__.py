"""The reference analytical model, DeepFlow of June 2019, as it was: for comparison with published results.

Formulas and fixtures come from nanocad-lab/DeepFlow (Ardalani, Pal, Gupta; arXiv 2211.03309); the code is our own. A
prediction to rely on is `flopwise.predict.step`'s. What is odd about the reference lives in this package alone:

Device
  - Kernels reach 0.7 of the arithmetic and of the DRAM's bandwidth, while the hardware is printed without that factor.
  - Shares of power need not add up to 1, and the L2's may be negative: without an L2 every operand is loaded once.
  - The network's power is divided by the links of the whole system, not of a device.
Kernels
  - Only the DRAM decides whether a kernel is bound by arithmetic; the L2's time is added to the others alone.
  - A product prints its straight time even where its transpose was faster.
  - The memory latency is 50 ns whatever the configuration says; its `line_latency` is that of messages.
Model
  - The backward pass of a cell lacks the gates in its pointwise terms, and the width of a number where it adds to the
    gradients of the weights.
  - One hidden layer is updated, whatever their number; the projection is printed and added to nothing.
  - Memory holds neither gradients nor optimizer state, and gives the softmax the projection's depth, whose time is
    that of the hidden width.
Several devices
  - A split softmax has the projection's depth in its forward pass and, column-row, in its backward pass too.
  - A column-row split counts the gathering of its backward pass twice.
  - Messages between the gates of a split cell are counted in elements, not in bytes; row-column counts them for all
    rows in the backward pass.
  - A row-column projection costs the same backward as forward.
  - A reduction of less than 128 bytes takes as many seconds as it has bytes.
  - Splitting the embedding changes its memory, never its time; its table is on every device.
  - Under the memory of one device, weights, activations and pointwise are those of the whole data shard.

With degrees above 1 no published output of that revision is known. The times follow the public revision that lies
nearest to it, one device's memory a later one; how the links of a ring were counted is not known and is reconstructed
(as those of a mesh). Debugging lines that it prints between the others are left out.
"""

from __future__ import annotations

from flopwise.references.deepflow.configuration import (
    Configuration,
    DeepflowParallel,
    DeepflowTechnology,
    LanguageModel,
    Power,
    Split,
    for_model,
)
from flopwise.references.deepflow.printout import printout, summary
from flopwise.references.deepflow.step import DeepflowResult, DeepflowTimes, run, step_s
from flopwise.references.deepflow.table import PUBLISHED, from_table

__all__ = [
    "PUBLISHED",
    "Configuration",
    "DeepflowParallel",
    "DeepflowResult",
    "DeepflowTechnology",
    "DeepflowTimes",
    "LanguageModel",
    "Power",
    "Split",
    "for_model",
    "from_table",
    "printout",
    "run",
    "step_s",
    "summary",
]
