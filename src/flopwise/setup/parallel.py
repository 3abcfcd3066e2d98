"""`Parallel`: how a step is spread over devices.

Devices are numbered so that tensor ranks are neighbours, then context, then data, and pipeline stages lie farthest
apart: what talks most stays inside a node. A mixture's experts are dealt out among the context and data ranks, or,
where tensor ranks do not share them (`expert_tensor`), among tensor, context and data ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.work.layout import Layout, illegal_layout, largest_divisor
from flopwise.work.model import Model

Schedule = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
"""gpipe: all forwards, then all backwards. 1f1b: a backward as soon as there is one. interleaved: the same with
several short stages on each device."""

Balance = Literal["layers", "time"]
BALANCES: tuple[Balance, ...] = get_args(Balance)
"""layers: equal numbers of layers on every stage. time: the last stage has fewer, for the head's sake."""

Overlap = Literal["tensor", "stages", "weights", "experts"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
"""Exchanges that may run beside kernels: of tensor ranks, in pieces beside the product that feeds or reads them (async
TP, Transformer Engine's overlap); from stage to stage; the gather of updated weights, behind the next forward; of
experts, beside another micro-batch's kernels."""

MOST_DIGITS = 7


def check_overlap(overlap: tuple[Overlap, ...]) -> None:
    """Refuse what is no exchange."""
    for name in overlap:
        if name not in OVERLAPS:
            raise unknown_name("overlap", str(name), OVERLAPS, hint=f"one of {', '.join(OVERLAPS)}")


DEGREES = ("data", "tensor", "pipeline", "context", "expert")


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
    expert_tensor: int | None = None
    """Devices that share each expert's matrices (Liu et al., arXiv 2504.14960); None: the tensor ranks. Fewer: expert
    ranks are dealt out of the tensor ranks too."""
    once_a_node: bool = False
    """A token is sent to a node once, and there to its experts (DeepEP), not a copy for each of them."""
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
    overlap: tuple[Overlap, ...] = ()
    """Exchanges that run beside kernels, whatever the stack does by itself."""

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
        check_overlap(self.overlap)
        if self.prefetch < 0:
            raise FlopwiseError(f"prefetch must be at least 0, got {self.prefetch}", hint="1")
        if (self.chunks > 1) != (self.schedule == "interleaved"):
            raise FlopwiseError(
                f"{self.chunks} chunks on a device with the {self.schedule} schedule",
                why="several stages on a device are what the interleaved schedule is",
                hint="schedule interleaved with 2 or more chunks, or another with 1",
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise FlopwiseError(
                "an interleaved pipeline needs at least 2 stages", hint="pp2 or more, or another schedule"
            )
        if self.sequence and self.tensor == 1:
            raise FlopwiseError("sequence parallelism splits what tensor ranks repeat", hint="tp2 or more")
        self._check_experts()
        if self.shard is not None and (self.shard < 1 or self.replicas % self.shard):
            raise FlopwiseError(
                f"shards over {self.shard} ranks do not divide {self.replicas} data × context ranks",
                hint=f"shard{largest_divisor(self.replicas, max(1, self.shard))}",
            )

    def _check_experts(self) -> None:
        sharing = self.sharing_experts
        if not 1 <= sharing <= self.tensor or self.tensor % sharing:
            raise FlopwiseError(
                f"experts' matrices over {sharing} devices do not divide {self.tensor} tensor ranks",
                why="those who share an expert are tensor ranks",
                hint=f"etp{largest_divisor(self.tensor, max(1, sharing))}",
            )
        if sharing < self.tensor and not self.sequence:
            raise FlopwiseError(
                f"tensor ranks with experts of their own (etp{sharing}) without sequence parallelism",
                why="each of them sends its own tokens, and without it all have the same",
                hint="sp as well, or without etp, which is for mixtures of experts",
            )
        ranks = self.replicas * self.tensor // sharing
        if ranks % self.expert:
            among = "data × context" if sharing == self.tensor else "data × context × tensor"
            raise FlopwiseError(
                f"experts over {self.expert} devices do not fit {ranks} {among} ranks",
                why="an expert group is made of data and context ranks, and of tensor ranks that share no experts",
                hint=f"ep{largest_divisor(ranks, self.expert)}",
            )
        if self.once_a_node and self.expert == 1:
            raise FlopwiseError(
                "`once-a-node` without experts over devices", why="no token is sent", hint="ep2 or more"
            )

    @property
    def sharing_experts(self) -> int:
        """Devices that share each expert's matrices."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights: data and context together."""
        return self.data * self.context

    @property
    def label(self) -> str:
        """The set-up in the short words that people use: `dp8 tp8 pp4 zero1 sp`."""
        degrees = {"dp": self.data, "tp": self.tensor, "pp": self.pipeline, "cp": self.context, "ep": self.expert}
        words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        words += [f"etp{self.sharing_experts}"] if self.sharing_experts != self.tensor else []
        words += ["once-a-node"] if self.once_a_node else []
        words += [f"zero{self.zero}"] if self.zero else []
        words += [f"shard{self.shard}"] if self.shard else []
        words += [f"prefetch{self.prefetch}"] if self.zero == 3 and self.prefetch != 1 else []
        words += ["kept"] if self.zero == 3 and not self.reshard else []
        words += ["sp"] if self.sequence else []
        words += ["gpipe"] if self.schedule == "gpipe" and self.pipeline > 1 else []
        words += ["balanced"] if self.balance == "time" and self.pipeline > 1 else []
        words += [f"chunks{self.chunks}"] if self.chunks > 1 else []
        words += ["optimizer-on-host"] if self.offload_optimizer else []
        words += ["activations-on-host"] if self.offload_activations else []
        words += [f"overlap-{name}" for name in self.overlap]
        return " ".join(words) or "one device"

    @property
    def features(self) -> tuple[str, ...]:
        """What of a set-up is not everybody's, in words: whether measurements have it decides how much they say."""
        rare = {
            "context parallelism": self.context > 1,
            "expert parallelism": self.expert > 1,
            "hybrid sharding": self.shard is not None and self.shard != self.replicas,
            "interleaved stages": self.chunks > 1,
            "host offload": self.offload_optimizer or self.offload_activations,
        }
        return tuple(name for name, there in rare.items() if there)

    @property
    def layout(self) -> Layout:
        return Layout(
            tensor=self.tensor,
            sequence=self.sequence,
            context=self.context,
            expert=self.expert,
            expert_tensor=None if self.sharing_experts == self.tensor else self.expert_tensor,
        )

    def check(self, model: Model, sequence_tokens: int) -> None:
        """Refuse what this model cannot be split into."""
        illegal = why_illegal(model, sequence_tokens, self)
        if illegal:
            raise FlopwiseError(f"{model.name} cannot be split that way: {illegal[0]}", why=illegal[1], hint=illegal[2])


def shard_all(devices: int) -> Parallel:
    """Devices that see different sequences and shard everything, as FSDP does."""
    return Parallel(data=devices, zero=3) if devices > 1 else Parallel()


def why_illegal(model: Model, sequence_tokens: int, parallel: Parallel) -> tuple[str, str, str] | None:
    """What of a set-up does not suit the model: what, why, hint; None when all does."""
    if parallel.pipeline * parallel.chunks > model.layers + (2 if parallel.chunks > 1 else 0):
        stages, most = parallel.pipeline * parallel.chunks, model.layers // parallel.chunks
        # Chunks need 2 devices at least, so where no such pipeline is short enough they are what is too many.
        hint = "fewer chunks" if parallel.chunks > 1 and most < 2 else f"pp{most} or less"
        return f"{stages} stages", f"it has {model.layers} layers", hint
    if parallel.chunks > 1 and (
        uneven(model.layers, parallel.pipeline * parallel.chunks) or parallel.balance == "time"
    ):
        why = f"interleaved stages are equal parts of its {model.layers} layers, embedding and head counted or not"
        return f"{parallel.pipeline} × {parallel.chunks} interleaved stages", why, "chunks that divide, not `balanced`"
    return illegal_layout(model, sequence_tokens, parallel.layout)


def uneven(layers: int, parts: int) -> bool:
    """Whether interleaved stages cannot be equal: not even where embedding and head count as a layer each, as
    Megatron-LM deals them out on request (Llama 3's 126 layers over 16 stages, arXiv 2407.21783)."""
    return layers % parts != 0 and (layers + 2) % parts != 0


NUMBERED = {
    "dp": "data",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "zero": "zero",
    "shard": "shard",
    "prefetch": "prefetch",
    "chunks": "chunks",
}
FLAGGED: dict[str, tuple[str, object]] = {
    "kept": ("reshard", False),
    "sp": ("sequence", True),
    "gpipe": ("schedule", "gpipe"),
    "1f1b": ("schedule", "1f1b"),
    "balanced": ("balance", "time"),
    "once-a-node": ("once_a_node", True),
    "optimizer-on-host": ("offload_optimizer", True),
    "activations-on-host": ("offload_activations", True),
}
"""The words of a label: with a number behind them, and without."""
OVERLAP_WORDS: dict[str, Overlap] = {f"overlap-{name}": name for name in OVERLAPS}


def parse_parallel(text: str, devices: int | None) -> Parallel:
    """A set-up from its label, `tp8 pp4 zero1 sp`; data ranks not named are what the devices leave."""
    fields: dict[str, Any] = {}
    for word in text.lower().replace(",", " ").split():
        if word in OVERLAP_WORDS:
            fields["overlap"] = (*fields.get("overlap", ()), OVERLAP_WORDS[word])
            continue
        name, digits = word.rstrip("0123456789"), word[len(word.rstrip("0123456789")) :]
        key, value = (NUMBERED[name], int(digits)) if name in NUMBERED and digits else FLAGGED.get(word, ("", None))
        if not key or len(digits) > MOST_DIGITS:
            raise FlopwiseError(
                f"cannot read {shown(word)} in a parallel set-up",
                why=f"it is made of {', '.join((*(f'{known}N' for known in NUMBERED), *FLAGGED, *OVERLAP_WORDS))}",
                hint='"tp8 pp4 zero1 sp"',
            )
        if key in fields:
            raise FlopwiseError(f"{shown(text)} gives {key} twice", hint="keep one of the two")
        fields[key] = value
    if fields.get("chunks", 1) > 1:
        fields.setdefault("schedule", "interleaved")
    _check_meaning(fields)
    named = fields.get("tensor", 1) * fields.get("pipeline", 1) * fields.get("context", 1)
    if devices is not None and "data" not in fields and named and devices % named == 0:
        fields["data"] = devices // named
    parallel = Parallel(**fields)
    if parallel.expert_tensor == parallel.tensor:
        # All of them, as where nobody says.
        parallel = replace(parallel, expert_tensor=None)
    if parallel.replicas == 1:
        # Shards of one rank are the whole: the same set-up goes by one name.
        parallel = replace(parallel, zero=0, shard=None, reshard=True, prefetch=1)
    if devices is not None and parallel.devices != devices:
        raise FlopwiseError(
            f"{parallel.label} is for {parallel.devices:,} devices, not for {devices:,}",
            why="the degrees multiplied are the number of devices",
            hint=f"--gpus {parallel.devices}, or other degrees",
        )
    return parallel


def _check_meaning(fields: dict[str, Any]) -> None:
    """Refuse words that would change nothing: they were typed for a reason."""
    of_stages = {"schedule", "balance"} & set(fields)
    if of_stages and fields.get("pipeline", 1) == 1:
        raise FlopwiseError("a schedule or `balanced` without stages", why="they order a pipeline", hint="pp2 or more")
    if "shard" in fields and not fields.get("zero"):
        raise FlopwiseError("`shard` without zero", why="nothing is sharded", hint="zero1, zero2 or zero3")
    of_many = {"tensor": "tensor", "stages": "pipeline", "experts": "expert"}
    for name in fields.get("overlap", ()):
        if name in of_many and fields.get(of_many[name], 1) == 1:
            raise FlopwiseError(f"`overlap-{name}` without {name}", why="nothing is exchanged", hint="leave it out")
        if fields["overlap"].count(name) > 1:
            raise FlopwiseError(f"overlap-{name} stands there twice", hint="keep one of the two")
    if {"reshard", "prefetch"} & set(fields) and fields.get("zero") != 3:
        raise FlopwiseError("`kept` or `prefetch` without zero3", why="only zero3 gathers weights", hint="zero3")
