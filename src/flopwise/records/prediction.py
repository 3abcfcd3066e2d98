"""`Prediction`: an `Outcome` with the operators and stages that it adds up from."""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwise.base.shown import Shown
from flopwise.base.units import show_bytes, show_seconds, show_share, significant
from flopwise.records.outcome import Outcome, check_finite
from flopwise.setup.parallel import Parallel
from flopwise.setup.stack import NO_STACK
from flopwise.setup.words import Fusion
from flopwise.work.op import Convention
from flopwise.work.optimizers import Optimizer
from flopwise.work.work import Recompute


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
class StagePrediction:
    """One pipeline stage's share of the layers, and the memory of one of its devices."""

    stage: int
    layers: int
    device_bytes: DeviceBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OpPrediction:
    """One operator over a whole step: all its layers and micro-batches, forward, backward and recompute.

    With several devices, FLOPs are those of all of them; bytes and time are those of one on the slowest stage.
    """

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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Prediction(Shown, Outcome):
    """A training step of a model, on one device or many, by the rates of its kernels and networks."""

    model: str
    hardware: str
    devices: int = 1
    sequence_tokens: int
    batch_sequences: int
    micro_batch_sequences: int
    accumulation_steps: int
    batch_tokens: int
    precision: str
    recompute: Recompute
    attention: str
    attention_kernel: str | None = None
    """Families of flash attention's kernels that are assumed, one or several; None: nobody says whose they are."""
    fusion: Fusion
    optimizer: Optimizer
    stack: str = NO_STACK
    parallel: Parallel = field(default_factory=Parallel)
    n_params: int
    n_active_params: int
    n_trained_params: int | None = None
    """None: all of them."""
    step_s: float
    tokens_per_s: float
    mfu: float
    hfu: float
    model_flops: int
    hardware_flops: int
    convention: Convention
    peak_flops: float
    """Of one device."""
    peak_format: str
    peak_source: str
    bound: str
    fits: bool
    device_bytes: DeviceBytes  # type: ignore[assignment] # by owner and in all, which is no dict
    """Of one device, on the fullest stage."""
    device_capacity_bytes: int
    """The user's cap, or the device's memory less a reserve for driver and allocator."""
    host_bytes: int = 0
    """What one device keeps in host memory, on the stage that keeps the most there."""
    parts: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ops: tuple[OpPrediction, ...]
    """Their times add up to the step's, with what is not an operator (communication, waiting) at the end."""
    stages: tuple[StagePrediction, ...] = ()
    """One for each pipeline stage; none on a single device."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Settings that were left open → why they have the value they have."""

    def __post_init__(self) -> None:
        check_finite(self)

    @property
    def device_total(self) -> int:
        return self.device_bytes.total

    @property
    def ceiling_mfu(self) -> float | None:
        """MFU at the kernels' ceiling; None where the step is no more than that."""
        return None if self.ceiling_s is None else self.mfu * self.step_s / self.ceiling_s

    @property
    def _ceiling(self) -> dict[str, str]:
        if self.ceiling_s is None or self.ceiling_mfu is None:
            return {}
        return {"the kernels' ceiling": f"{show_seconds(self.ceiling_s)}, {show_share(self.ceiling_mfu)} MFU"}

    @property
    def figures(self) -> dict[str, str]:
        several = f"{self.devices:,} × " if self.devices > 1 else ""
        memory = f"{show_bytes(self.device_bytes.total)} of {show_bytes(self.device_capacity_bytes)}"
        interval = self.interval.figures() if self.interval else {}
        strategy = {"strategy": f"{self.parallel.label}, stack {self.stack}"} if self.devices > 1 else {}
        return {
            "model": f"{self.model} on {several}{self.hardware}",
            **strategy,
            "step": show_seconds(self.step_s),
            **interval,
            **self._ceiling,
            "tokens/s": significant(self.tokens_per_s),
            "MFU": f"{show_share(self.mfu)}, HFU {show_share(self.hfu)}",
            "memory": memory if self.fits else f"does not fit: {memory}",
            "bound by": self.bound,
            "set-up": f"sequence {self.sequence_tokens:,}, batch {self.batch_sequences:,}, micro-batch"
            f" {self.micro_batch_sequences:,}, {self.precision}, recompute {self.recompute}",
        }
