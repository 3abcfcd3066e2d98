"""`Parallel`: how a step is spread over devices.

Devices are numbered so that tensor ranks are neighbours, then context, then data, and pipeline stages lie farthest
apart: what talks most stays inside a node. A mixture's experts are dealt out among the context and data ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from flopwise.core.errors import FlopwiseError, unknown_name
from flopwise.core.lstm import Lstm
from flopwise.core.model import Model

Schedule = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
"""gpipe: all forwards, then all backwards. 1f1b: a backward as soon as there is one. interleaved: the same with
several short stages on each device."""

Balance = Literal["layers", "time"]
BALANCES: tuple[Balance, ...] = get_args(Balance)
"""layers: equal numbers of layers on every stage. time: the last stage has fewer, for the head's sake."""

DEGREES = ("data", "tensor", "pipeline", "context", "expert")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What of a parallel set-up changes the operators of one device."""

    tensor: int = 1
    sequence: bool = False
    """Norms and residual sums on 1/tensor of the tokens."""
    context: int = 1
    expert: int = 1


WHOLE = Layout()
"""One device does everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """Degrees of parallelism and how state is sharded."""

    data: int = 1
    """Ranks that see different sequences."""
    tensor: int = 1
    """Devices that share each matrix (Shoeybi et al., arXiv 1909.08053)."""
    pipeline: int = 1
    """Stages."""
    context: int = 1
    """Devices that share each sequence, keys and values passed around in a ring (Liu et al., arXiv 2310.01889)."""
    expert: int = 1
    """Devices that share a layer's experts, out of the data × context ranks."""
    sequence: bool = False
    """With tensor > 1: norms and residual sums sharded by token (Korthikanti et al., arXiv 2205.05198)."""
    zero: int = 0
    """What data ranks shard (Rajbhandari et al., arXiv 1910.02054): 1 optimizer state, 2 gradients, 3 weights."""
    shard: int | None = None
    """Data × context ranks that share one copy of the state; None: all of them. Fewer: hybrid sharding."""
    reshard: bool = True
    """zero 3: a layer's weights are dropped after forward and gathered again for backward."""
    prefetch: int = 1
    """zero 3: layers that are gathered ahead of their use."""
    schedule: Schedule = "1f1b"
    chunks: int = 1
    """Stages on each device, for the interleaved schedule."""
    balance: Balance = "layers"
    offload_optimizer: bool = False
    """Optimizer state in host memory, updated there or streamed through."""
    offload_activations: bool = False
    """Kept activations go to host memory and come back."""

    def __post_init__(self) -> None:
        for field in (*DEGREES, "chunks"):
            if getattr(self, field) < 1:
                raise FlopwiseError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.schedule not in SCHEDULES:
            raise unknown_name("schedule", str(self.schedule), SCHEDULES, hint=f"one of {', '.join(SCHEDULES)}")
        if self.balance not in BALANCES:
            raise unknown_name("balance", str(self.balance), BALANCES, hint=f"one of {', '.join(BALANCES)}")
        if self.zero not in (0, 1, 2, 3):
            raise FlopwiseError(
                f"ZeRO stage {self.zero} does not exist",
                why="0 shards nothing, 1 the optimizer state, 2 gradients too, 3 weights too",
                hint="zero = 3",
            )
        if self.prefetch < 0:
            raise FlopwiseError(f"prefetch must be at least 0, got {self.prefetch}", hint="1")
        if (self.chunks > 1) != (self.schedule == "interleaved"):
            raise FlopwiseError(
                f"{self.chunks} chunks on a device with the {self.schedule} schedule",
                why="several stages on a device are what the interleaved schedule is",
                hint="schedule interleaved with 2 or more chunks, or another with 1",
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise FlopwiseError("an interleaved pipeline needs at least 2 stages", hint="--pp 2, or another schedule")
        if self.sequence and self.tensor == 1:
            raise FlopwiseError("sequence parallelism splits what tensor ranks repeat", hint="--tp 2 or more")
        if self.replicas % self.expert:
            raise FlopwiseError(
                f"experts over {self.expert} devices do not fit {self.replicas} data × context ranks",
                why="an expert group is made of data and context ranks",
                hint=f"--ep {_divisor(self.replicas, self.expert)}",
            )
        if self.shard is not None and (self.shard < 1 or self.replicas % self.shard):
            raise FlopwiseError(
                f"shards over {self.shard} ranks do not divide {self.replicas} data × context ranks",
                hint=f"--shard {_divisor(self.replicas, max(1, self.shard))}",
            )

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights: data and context together."""
        return self.data * self.context

    @property
    def layout(self) -> Layout:
        return Layout(tensor=self.tensor, sequence=self.sequence, context=self.context, expert=self.expert)

    def check(self, model: Model, sequence_tokens: int) -> None:
        """Refuse what this model cannot be split into."""
        illegal = why_illegal(model, sequence_tokens, self)
        if illegal:
            raise FlopwiseError(f"{model.name} cannot be split that way: {illegal[0]}", why=illegal[1], hint=illegal[2])


def why_illegal(model: Model, sequence_tokens: int, parallel: Parallel) -> tuple[str, str, str] | None:
    """What of a set-up does not suit the model: what, why, hint; None when all does."""
    if parallel.pipeline * parallel.chunks > model.layers:
        stages = parallel.pipeline * parallel.chunks
        return f"{stages} stages", f"it has {model.layers} layers", f"--pp {model.layers} or less"
    return illegal_layout(model, sequence_tokens, parallel.layout)


def illegal_layout(model: Model, sequence_tokens: int, layout: Layout) -> tuple[str, str, str] | None:
    """The same for what one device computes."""
    if isinstance(model, Lstm):
        if layout != WHOLE:
            return (
                "only its layers and sequences can be dealt out",
                "a cell's time steps follow each other",
                "--dp, --pp",
            )
        return None
    tensor = layout.tensor
    if model.heads % tensor or (model.kv_heads % tensor and tensor % model.kv_heads):
        heads = f"it has {model.heads} heads and {model.kv_heads} key-value heads"
        return f"{tensor} tensor ranks", heads, f"--tp {_divisor(model.heads, tensor)}"
    if model.ffn % tensor:
        return f"{tensor} tensor ranks", f"its feed-forward width is {model.ffn}", f"--tp {_divisor(model.ffn, tensor)}"
    parts = layout.context * (tensor if layout.sequence else 1)
    if sequence_tokens % parts:
        return (
            f"{sequence_tokens:,} tokens in {parts} parts",
            "context and sequence ranks take equal parts",
            f"a sequence that {parts} divides",
        )
    if layout.context > 1 and (model.head == "classifier" or model.window is not None):
        return "a sequence over several devices", "the ring is for full attention with a loss on every token", "--cp 1"
    if layout.expert > 1 and (not model.experts or model.experts % layout.expert):
        return (
            f"experts over {layout.expert} devices",
            f"it has {model.experts or 'no'} experts",
            f"--ep {_divisor(max(1, model.experts), layout.expert)}",
        )
    return None


def _divisor(number: int, limit: int) -> int:
    return next(candidate for candidate in range(min(limit, number), 0, -1) if number % candidate == 0)
