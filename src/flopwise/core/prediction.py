"""`Prediction`: what a step will take, with everything it was divided by."""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwise.core.op import Convention
from flopwise.core.work import Recompute
from flopwise.core.workload import Fusion, Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBytes:
    """Peak device memory by owner."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OpPrediction:
    """One operator over a whole step: all its layers and micro-batches, forward, backward and recompute."""

    name: str
    kind: str
    flops: int
    """Executed, recompute included; these sum to `hardware_flops`."""
    model_flops: int
    bytes: int
    """Moved to and from the device's main memory."""
    least_bytes: int
    """What perfect caching would move: every operand read once, every result written once."""
    time_s: float
    share: float
    bound: str
    forward_s: float
    backward_s: float
    recompute_s: float
    update_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A training step of a model on one device."""

    model: str
    hardware: str
    sequence_tokens: int
    batch_sequences: int
    micro_batch_sequences: int
    accumulation_steps: int
    batch_tokens: int
    precision: str
    recompute: Recompute
    attention: str
    fusion: Fusion
    optimizer: Optimizer
    n_params: int
    n_active_params: int
    model_flops: int
    hardware_flops: int
    convention: Convention
    step_s: float
    tokens_per_s: float
    mfu: float
    hfu: float
    peak_flops: float
    peak_format: str
    peak_source: str
    bound: str
    device_bytes: DeviceBytes
    device_capacity_bytes: int
    """The user's cap, or the device's memory less a reserve for driver and allocator."""
    fits: bool
    ops: tuple[OpPrediction, ...]
    chosen: dict[str, str] = field(default_factory=dict)
    """Settings that were left open → why they have the value they have."""
    notes: tuple[str, ...] = ()
    """What a reader should know before trusting the figures."""
