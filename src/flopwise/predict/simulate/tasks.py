"""Seconds of a program's tasks, from the kernels that they run on a device or from what the host's memory moves.

A chunk's kernels are those of the model's description, at the chunk's share of a sequence's tokens. Attention alone
knows where the chunk lies: its queries look at all keys before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.predict.kernels.attention import Direction, attention_times
from flopwise.predict.kernels.bandwidth import plain_times, streaming_times
from flopwise.predict.kernels.calls import (
    GemmCall,
    Phase,
    StepCalls,
    StreamingCall,
    calls_for,
    update_calls,
    update_pieces,
)
from flopwise.predict.kernels.costs import Costs, attention_costs, gemm_costs, peak_flops, streaming_costs
from flopwise.predict.simulate.own_kernels import (
    ROUTING_FORWARD,
    ROUTING_S,
    calls_own_attention,
    experts_activate,
    in_own_tiles,
    slower_experts,
    slower_rows,
    slower_update,
    with_own_attention,
)
from flopwise.records.plan import POLICY, Plan
from flopwise.records.program import Kind, Program, Task
from flopwise.setup.hardware import Hardware
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES, WIDTH_BYTES, Formats, parse_formats, with_average
from flopwise.work.fusion import swiglu_in_products
from flopwise.work.lengths import granule_of
from flopwise.work.model import Model
from flopwise.work.op import Attention, Gemm, attention_flops
from flopwise.work.optimizers import UpdateWork, update_work
from flopwise.work.parameters import op_groups, split_at_attention
from flopwise.work.plain import COPY, Passes, plain_update
from flopwise.work.recurrence import ATTENDING
from flopwise.work.traffic import (
    backward_traffic,
    forward_traffic,
    key_sums_bytes,
    tensor_bytes,
)
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work

Group = Literal["embed", "before", "attention", "after", "head"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""The model's operators in the parts that tasks run: around the blocks, and in a block around attention."""

BESIDE_KERNELS: dict[Kind, int] = {"forward": 4, "backward": 22, "head": 8, "embed-backward": 12}
"""Kernels that the engine launches beside those of the description, counted in a trace of BERT."""


@dataclass(frozen=True, slots=True)
class GroupSeconds:
    """Seconds of one copy of a group for one chunk."""

    forward: dict[Group, float]
    backward: dict[Group, float]
    wgrad: dict[Group, float]
    """Of backward, the gradients of matrices: a block that is frozen does without."""
    recompute: dict[str, dict[Group, float]]
    """Save level → group → seconds of what is recomputed, attention left out."""
    products: float
    """Of forward and backward over all groups, those of matrix products alone, every layer."""

    @property
    def head_s(self) -> float:
        """All that a piece of the head does; what of it runs twice does so at every save level."""
        return self.forward["head"] + self.recompute["full"]["head"] + self.backward["head"]


class TaskSeconds:
    """What the tasks of one plan take on one hardware; equal ones are costed once."""

    def __init__(self, plan: Plan, model: Model, hardware: Hardware) -> None:
        self.plan = plan
        self.owns_attention = calls_own_attention(model, plan.packed)
        self.hardware = with_own_attention(hardware) if self.owns_attention else hardware
        self.model = model
        self.formats: Formats = parse_formats(plan.precision)
        self.work: Work = describe(model, plan.sequence_tokens, lengths=plan.packed)
        self.filled = self._filled()
        self.layers = plan.layers
        self.frozen_layers: frozenset[int] = getattr(model, "frozen_layers", frozenset())
        self.attention = next((op for op in self.work.ops if isinstance(op, Attention)), None)
        self._groups: dict[int, GroupSeconds] = {}
        self._tasks: dict[tuple[object, ...], float] = {}
        self._attention: dict[tuple[int | None, Direction, Attention], float] = {}
        self._updates: dict[tuple[bool | None, bool], tuple[UpdateWork, float]] = {}
        others = getattr(model, "other_blocks", ())
        self._kind_of = {
            layer: self._kinds[-1 if layer in others else 0] for layer in self._attending(model) if self._kinds
        }
        """Layer → its kind's attention, where it has any."""
        self._fed: list[tuple[TaskSeconds, frozenset[int]]] = []
        """Where blocks differ in their operators, each kind's seconds and the blocks that are of it."""
        if isinstance(model, Transformer) and len(model.product_kinds) > 1:
            self._fed = [(TaskSeconds(plan, kind, hardware), blocks) for kind, blocks in model.product_kinds]

    @cached_property
    def _kinds(self) -> tuple[Attention, ...]:
        return () if self.attention is None else self.attention.by_kind()

    def _attending(self, model: Model) -> Iterable[int]:
        """The blocks that have attention."""
        if isinstance(model, Transformer) and model.has_kinds:
            return sorted(model.blocks_of(ATTENDING))
        return range(self.plan.layers)

    def _filled(self) -> float:
        """Rows of a packed chunk over the tokens that it has: on a GPU chunks come in a few sizes."""
        plan, packed = self.plan, self.plan.packed
        if packed is None:
            return 1.0
        room = plan.tokens_of(0)
        sequences = room // plan.sequence_tokens
        granule = 1 if self.hardware.device.kind == "cpu" else granule_of(room)
        chunks = plan.chunks_per_round * plan.rounds_per_step if plan.replay else 1
        return packed.rows(sequences, chunks=chunks, room=room, granule=granule) / (sequences * packed.mean)

    def _sequences(self, tokens: int) -> float:
        """Of a chunk with room for so many tokens, or of a part of it; what fills it up counted as such."""
        return self.filled * tokens / self.plan.sequence_tokens

    def of(self, program: Program) -> list[float]:
        """Seconds of every task; copies, which the link decides, take none here."""
        found = []
        for task in program.tasks:
            if task.kind in ("load", "store"):
                found.append(0.0)
                continue
            part = (task.chunk or 0) % self.plan.chunks_per_sequence
            frozen = task.layer in self.frozen_layers
            attention = None if task.layer is None else self._kind_of.get(task.layer)
            in_block = task.layer is not None
            fed = next((number for number, (_, blocks) in enumerate(self._fed) if task.layer in blocks), None)
            kind = (frozen, attention, fed, in_block)
            key = (task.kind, task.stream, task.level, task.tokens, task.parameters, part, kind)
            seconds = self._tasks.get(key)
            if seconds is None:
                seconds = self._seconds(task, part) + self._beside_s(task) + self._routing_s(task)
                self._tasks[key] = seconds
            found.append(seconds)
        return found

    def _seconds(self, task: Task, part: int) -> float:
        if task.kind == "optimize":
            on_host = task.stream == "host"
            return self.update_s(task.parameters, on_host=on_host, in_block=task.layer is not None)
        group = self.groups(task.tokens, task.layer)
        if task.kind in ("embed", "embed-backward"):
            return (group.forward if task.kind == "embed" else group.backward)["embed"]
        if task.kind == "head":
            return self.head_s(task.tokens)
        if task.kind == "context":
            return self._context_s(task, group)
        return self._block_s(task, group, part)

    def head_s(self, tokens: int) -> float:
        """A piece of the head, of so many tokens.

        Where not all tokens have a loss, those of a chunk that do fill the first pieces: it is their share of these.
        """
        if getattr(self.model, "loss_share", 1.0) == 1:
            return self.groups(tokens).head_s
        # So many tokens as have a piece's rows, and none more: a product of one row more may take a tile more.
        head = next(op for op in self.work.ops if isinstance(op, Gemm) and op.name == "head")
        described = self.plan.packed.tokens if self.plan.packed else self.plan.sequence_tokens
        full = min(self.plan.tokens_of(0), max(1, self.plan.head_chunk_tokens * described // head.rows))
        return self.groups(full).head_s * tokens / full

    def _beside_s(self, task: Task) -> float:
        """What kernels beside the description's take, where they are short enough to count: where a step is replayed.

        Attention's results and gradients are copied to their places, biases and norms sum over rows and then add up.
        """
        beside = BESIDE_KERNELS.get(task.kind, 0)
        if not self.plan.replay or not beside:
            return 0.0
        copied = {"forward": ("attended",), "backward": ("query", "key", "value")}.get(task.kind, ())
        read = (*copied, *copied, *(self._biased if task.kind == "backward" else ()))
        found = (self.work.tensors[name].elements for name in read if name in self.work.tensors)
        elements = sum(found) / self.work.sequences
        moved = elements * self._sequences(task.tokens) * WIDTH_BYTES[self.formats.compute]
        return beside * self.hardware.efficiency.launch_s + self._streaming(moved)

    def _routing_s(self, task: Task) -> float:
        """Of a mixture's block, what choosing and sorting takes of a GPU in kernels too small to be described."""
        model = self.model
        if not (isinstance(model, Transformer) and model.experts and self.hardware.device.kind == "gpu"):
            return 0.0
        if task.layer not in model.mixed_blocks or task.kind not in ("forward", "backward"):
            return 0.0
        return ROUTING_S * (ROUTING_FORWARD if task.kind == "forward" else 1.0 - ROUTING_FORWARD)

    @cached_property
    def _biased(self) -> tuple[str, ...]:
        """Results of a block's products that have a bias."""
        products = [op for op in self.work.ops if op.in_block and isinstance(op, Gemm)]
        biased = [op for op in products if any(weight.kind == "bias" for weight in op.weights)]
        return tuple(name for op in biased for name in op.outputs)

    def _block_s(self, task: Task, group: GroupSeconds, part: int) -> float:
        """A layer over a chunk, or one of the three pieces that attention cuts it into."""
        cut = self.plan.chunks_per_sequence > 1
        forward, backward, kind = group.forward, group.backward, task.kind
        if kind == "forward":
            return forward["before"] + forward["after"] + self.attention_s(part, "forward", task.layer)
        if task.layer in self.frozen_layers:
            backward = {name: seconds - group.wgrad[name] for name, seconds in backward.items()}
        if kind in ("forward-before", "backward-before"):
            return (forward if kind == "forward-before" else backward)["before"]
        if kind == "forward-after":
            return forward["after"]
        if kind in ("attention", "attention-backward"):
            return self.attention_s(None, "forward" if kind == "attention" else "backward", task.layer)
        # Where the sequence is cut, keys and values are there before: the task `context` has brought them.
        recompute = group.recompute["context" if cut and task.level == "input" else task.level]
        seconds = recompute["before"] + recompute["after"] + backward["after"]
        if task.level in ("context", "input"):
            seconds += self.attention_s(part, "forward", task.layer)
        if kind == "backward":
            seconds += backward["before"] + self.attention_s(part, "backward", task.layer)
        return seconds

    def recompute_s(self, level: str, tokens: int, part: int) -> float:
        """What backward of a (layer, chunk) at a save level recomputes, beyond what it does at the level `full`."""
        groups = self.groups(tokens).recompute
        around: tuple[Group, ...] = ("before", "after")
        seconds = sum(groups[level][name] - groups["full"][name] for name in around)
        return seconds + (self.attention_s(part, "forward") if level in ("context", "input") else 0.0)

    def _context_s(self, task: Task, group: GroupSeconds) -> float:
        """Keys and values recomputed from the chunk's input, or moved from its slot."""
        if task.level == "input":
            return group.recompute["input"]["before"] - group.recompute["context"]["before"]
        return self._streaming(2.0 * self.context_bytes * task.tokens)

    # -- kernels --------------------------------------------------------------------------------------------------

    @cached_property
    def context_bytes(self) -> float:
        """Keys and values of a token."""
        tensors = (self.work.tensors["key"], self.work.tensors["value"])
        return sum(tensor_bytes(tensor, self.formats) for tensor in tensors) / self.plan.sequence_tokens

    def update_s(self, parameters: int, *, on_host: bool = False, in_block: bool | None = None) -> float:
        """An update of so many parameters: of blocks, of what is around them, or of all as they come.

        On the host it takes as long as in fp32 whatever the formats: its cores turn narrower ones into fp32 and back,
        which costs them what the fewer bytes would save.
        """
        whole, products_s = self._update(in_block, on_host=on_host)
        moved = float(parameters * whole.share(whole.moved_bytes))
        if on_host:
            return moved / host_bytes_per_s(self.hardware)
        parts = max(1, round(update_pieces(self.work) * parameters / max(1, self.work.trained_parameters)))
        seconds = self._streaming(moved, plain_update(parameters, parts))
        seconds *= slower_update(self.plan.optimizer, self.hardware)
        return seconds + products_s * parameters / max(1, whole.numbers)

    def _update(self, in_block: bool | None, *, on_host: bool) -> tuple[UpdateWork, float]:
        """What an update of all does, and the seconds of its products."""
        found = self._updates.get((in_block, on_host))
        if found is None:
            formats = self._on_host if on_host else self.formats
            whole = update_work(self.work, self.plan.optimizer, formats, in_block=in_block)
            calls = update_calls(len(self.work.ops), whole.products)
            products_s = float(gemm_costs(calls, self.hardware, np.ones(1)).seconds.sum()) if calls else 0.0
            found = self._updates[in_block, on_host] = whole, products_s
        return found

    @property
    def _on_host(self) -> Formats:
        """As wide as its cores compute; a mean of the weights is one number more."""
        return with_average(POLICIES["fp32"]) if self.formats.average else POLICIES["fp32"]

    def _streaming(self, moved: float, passes: Passes = COPY) -> float:
        device, efficiency = self.hardware.device, self.hardware.efficiency
        if efficiency.plain is not None:
            calls, numbers, functions = passes
            times = plain_times(device, efficiency, moved, calls=calls, numbers=numbers, functions=functions)
            return float(times.seconds)
        return float(streaming_times(device, efficiency, moved).seconds)

    def groups(self, tokens: int, layer: int | None = None) -> GroupSeconds:
        """Seconds of the model's groups of operators for a chunk of `tokens`; of no layer: the mean of the blocks."""
        for kind, blocks in self._fed:
            if layer in blocks:
                return kind.groups(tokens)
        found = self._groups.get(tokens)
        if found is None:
            found = self._groups[tokens] = self._mean(tokens) if self._fed else self._costed(tokens)
        return found

    def _mean(self, tokens: int) -> GroupSeconds:
        """Of a block in the mean of its kinds."""
        groups = [kind.groups(tokens) for kind, _ in self._fed]
        shares = [len(blocks) / self.layers for _, blocks in self._fed]

        def mean(parts: Sequence[dict[Group, float]]) -> dict[Group, float]:
            found = {
                name: sum(share * part[name] for share, part in zip(shares, parts, strict=True)) for name in GROUPS
            }
            # What is around the blocks is that of the first: a kind without adapters has another embedding.
            return found | {name: parts[0][name] for name in ("embed", "head")}

        return GroupSeconds(
            forward=mean([group.forward for group in groups]),
            backward=mean([group.backward for group in groups]),
            wgrad=mean([group.wgrad for group in groups]),
            recompute={level: mean([group.recompute[level] for group in groups]) for level in POLICY},
            # Of a kind without adapters backward comes to some blocks and not to others.
            products=self._sums(self._calls("full"), tokens)[1],
        )

    def _costed(self, tokens: int) -> GroupSeconds:
        sums = {level: self._sums(self._calls(level), tokens) for level in POLICY}
        plain, _, wgrad = sums["full"]
        return GroupSeconds(
            forward={name: plain[index, Phase.FORWARD] for index, name in enumerate(GROUPS)},
            backward={name: plain[index, Phase.BACKWARD] for index, name in enumerate(GROUPS)},
            wgrad={name: wgrad[index] for index, name in enumerate(GROUPS)},
            recompute={
                level: {name: table[index, Phase.RECOMPUTE] for index, name in enumerate(GROUPS)}
                for level, (table, _, _) in sums.items()
            },
            products=sums["full"][1],
        )

    def _calls(self, level: str) -> StepCalls:
        return calls_for(
            self.model,
            sequence_tokens=self.plan.sequence_tokens,
            kernel="flash",
            formats=self.formats,
            policy=POLICY[level],
            fusion="fused",
            optimizer=self.plan.optimizer,
            lengths=self.plan.packed,
            plain=self.hardware.efficiency.plain is not None,
            own=True,
        )

    def _sums(self, calls: StepCalls, tokens: int) -> tuple[dict[tuple[int, int], float], float, dict[int, float]]:
        """Seconds by (group, phase) of one copy, those of the products of all copies, and by group those of wgrad."""
        sequences = np.array([self._sequences(tokens)])
        group_of = self._group_of
        found = {(index, int(phase)): 0.0 for index in range(len(GROUPS)) for phase in Phase}
        wgrad = dict.fromkeys(range(len(GROUPS)), 0.0)
        products = 0.0
        listed: tuple[tuple[Costs, Sequence[GemmCall | StreamingCall]], ...] = (
            (gemm_costs(calls.gemms, self.hardware, sequences), calls.gemms),
            (streaming_costs(calls.streams, self.hardware, sequences), calls.streams),
        )
        for costs, these in listed:
            for op, phase, seconds, call in zip(costs.op, costs.phase, costs.seconds[:, 0], these, strict=True):
                if phase == Phase.UPDATE or (self._activates and self.work.ops[op].name == "activation"):
                    continue
                group = group_of[op]
                each = float(seconds) / (call.count if self.work.ops[op].in_block else 1)
                if isinstance(call, GemmCall):
                    each *= slower_experts(call, self.hardware)
                elif isinstance(self.model, Transformer):
                    name, activates = self.work.ops[op].name, self._experts_activate
                    each *= slower_rows(name, Phase(phase), self.model, self.hardware, activates=activates)
                found[group, int(phase)] += each
                if isinstance(call, GemmCall):
                    wgrad[group] += each if call.accumulate else 0.0
                    products += float(seconds) if phase != Phase.RECOMPUTE else 0.0
        return found, products, wgrad

    @cached_property
    def _activates(self) -> bool:
        """Whether activations run within products."""
        swiglu = isinstance(self.model, Transformer) and swiglu_in_products(self.model, self.formats)
        return self.hardware.efficiency.gemm.activates and swiglu

    @cached_property
    def _experts_activate(self) -> bool:
        """The same of experts, by kernels of flopwise's own."""
        return isinstance(self.model, Transformer) and experts_activate(self.work.ops, self.model)

    @cached_property
    def _group_of(self) -> list[int]:
        """Operator → group."""
        embed, block, head = op_groups(self.work)
        before, attention, after = split_at_attention(block)
        groups = (embed, before, () if attention is None else (attention,), after, head)
        return [index for index, ops in enumerate(groups) for _ in ops]

    def attention_s(self, part: int | None, direction: Direction, layer: int | None = None) -> float:
        """Attention of one layer (None: the mean): of a chunk's queries, or (None) over all of a sequence at once."""
        if layer is not None:
            return self._attention_of(self._kind_of[layer], part, direction) if layer in self._kind_of else 0.0
        kinds = self._kinds
        if len(kinds) == 1 and kinds[0].layers == self.layers:
            return self._attention_of(kinds[0], part, direction)
        return sum(kind.layers * self._attention_of(kind, part, direction) for kind in kinds) / self.layers

    def _attention_of(self, kind: Attention, part: int | None, direction: Direction) -> float:
        found = self._attention.get((part, direction, kind))
        if found is None:
            found = self._attention[part, direction, kind] = self._attention_s(kind, part, direction)
        return found

    def _packed_attention_s(self, direction: Direction) -> float:
        """Of a chunk of sequences of uneven length; the mean where blocks differ."""
        phase = Phase.FORWARD if direction == "forward" else Phase.BACKWARD
        # The executor widens values to the keys, whatever kernels could (`engine/kernels/attention.widened`).
        calls = [replace(call, value_share=1.0) for call in self._calls("full").attentions if call.phase == phase]
        if self.owns_attention and self.hardware.device.kind == "gpu":
            calls = [in_own_tiles(*each) for each in zip(calls, self._kinds, strict=True)]
        copies, tokens = max(1, sum(call.count for call in calls)), self.plan.tokens_of(0)
        sequences, plain = self._sequences(tokens), self.hardware.efficiency.plain is not None
        costs = attention_costs(calls, self.hardware, np.array([1.0 if plain else sequences]))
        seconds = float(costs.seconds.sum()) / copies
        if not plain:
            return seconds
        # A CPU takes them one after another, and brings what it has found to its place.
        group = self.groups(tokens)
        return sequences * seconds + (group.forward if direction == "forward" else group.backward)["attention"]

    def _attention_s(self, op: Attention, part: int | None, direction: Direction) -> float:
        if self.plan.packed is not None:
            return self._packed_attention_s(direction)
        plan = self.plan
        whole = part is None or plan.chunks_per_sequence == 1
        first = 0 if whole or part is None else part * plan.chunk_tokens
        last = plan.sequence_tokens if whole else min(first + plan.chunk_tokens, plan.sequence_tokens)
        copies = plan.tokens_of(0) // plan.sequence_tokens if plan.chunks_per_sequence == 1 else 1
        twice = op.twice_pairs_of(first, last)
        keys = last if op.causal else plan.sequence_tokens
        # Kernels take values as wide as keys (`held.attention_sums_bytes`).
        flops = float(attention_flops(direction, twice, op.heads, op.head_dim))
        share = (last - first) / plan.sequence_tokens
        traffic = forward_traffic if direction == "forward" else backward_traffic
        assert self.attention is not None
        moved = share * traffic(self.work, self.attention, self.formats, fused=True).per_sequence
        seconds = float(
            attention_times(
                self.hardware.device,
                self.hardware.efficiency,
                direction,
                flops=flops * copies,
                moved_bytes=moved * copies,
                heads=float(op.heads * copies),
                tokens=float(keys),
                head_dim=float(op.head_dim),
                peak_flops=peak_flops(self.hardware, self.formats.sensitive),
                area_share=twice / 2 / ((last - first) * keys),
            ).seconds
        )
        if self.hardware.efficiency.plain is not None:
            group = self.groups((last - first) * copies)
            seconds += (group.forward if direction == "forward" else group.backward)["attention"]
        if direction == "backward" and not whole:
            seconds += self._streaming(key_sums_bytes(self.work) * last / plan.sequence_tokens)
        return seconds

    def ceiling_s(self) -> float:
        """A step's matrix products and attention alone, nothing recomputed, attention over whole sequences."""
        plan = self.plan
        rounds = [plan.tokens_of(chunk) for chunk in range(plan.chunks_per_round)]
        products = sum(self.groups(tokens).products for tokens in rounds)
        attention = self.layers * self.attention_s(None, "forward")
        attention += sum(kind.reached * self._attention_of(kind, None, "backward") for kind in self._kinds)
        copies = plan.chunks_per_round / plan.chunks_per_sequence
        return plan.rounds_per_step * (products + copies * attention)


def host_bytes_per_s(hardware: Hardware) -> float:
    """The rate at which the host's cores update, or an error that says it is not known."""
    host = hardware.host
    if host is None or host.update_bytes_per_s is None:
        raise FlopwiseError(
            f"how fast the host of {hardware.name} updates is not known",
            why="an update on the host is bound by it",
            hint="update on the device, or add [host] with update_bytes_per_s to a TOML of your own",
        )
    return host.update_bytes_per_s.value
