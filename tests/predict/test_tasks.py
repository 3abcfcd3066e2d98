"""Tasks: what each of them means in a program that is replayed, and the seconds that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.program.compile import compile_plan
from flopwise.predict.kernels.calls import Phase
from flopwise.predict.simulate import tasks
from flopwise.predict.simulate.own_kernels import (
    OWN_ATTENTION,
    calls_own_attention,
    experts_activate,
    slower_rows,
)
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.predict.step import step
from flopwise.records.plan import LETTERS, Plan
from flopwise.records.program import Program, Task
from flopwise.setup.setup import Setup
from flopwise.setup.trained import TrainedWords
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES
from flopwise.work.op import Attention
from flopwise.work.parameters import ENDS, End, Part
from flopwise.work.routing import Routing
from flopwise.work.traffic import backward_traffic, forward_traffic
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work
from tests.plan.test_compile import FAMILIES, Pick, plain_plan, plans, small_model

# -- the meaning of every task, in random orders of the streams ------------------------------------------------------


Content = tuple[Any, ...]
"""What really is in a buffer: its kind, whose it is, and which version."""


class Replay:
    """Plays a program task by task; a task sees what the buffers hold at its start and writes at its end."""

    def __init__(self, program: Program, plan: Plan, *, tied: bool, causal: bool) -> None:
        self.program, self.plan, self.causal = program, plan, causal
        self.embedding: End = "head" if tied else "embedding"
        self.whole = plan.chunks_per_sequence > 1 and plan.attention == "sequence"
        self.pieces: Counter[Part | None] = Counter()
        self.held: dict[int, Content] = {}
        for buffer, value in program.at_start.items():
            assert value.version == 0
            whose = value.part if value.kind == "weights" else (value.part, value.number)
            self.held[buffer] = (value.kind, whose, frozenset() if value.kind == "weights" else 0)
        pieces = {content[1] for content in self.held.values() if content[0] == "optimizer"}
        self.pieces.update(part for part, _ in pieces)

    def play(self, pick: Pick) -> None:
        tasks = self.program.tasks
        queues = {
            task.stream: [index for index, one in enumerate(tasks) if one.stream == task.stream] for task in tasks
        }
        running: dict[str, tuple[int, dict[int, Content]]] = {}
        done: set[int] = set()
        while len(done) < len(tasks):
            ready = [
                name for name, queue in queues.items() if name in running or done.issuperset(tasks[queue[0]].after)
            ]
            assert ready, "the streams wait for each other"
            name = pick(ready)
            if name in running:
                index, results = running.pop(name)
                self.held.update(results)
                done.add(index)
            else:
                index = queues[name].pop(0)
                self._alone(tasks[index], [tasks[other] for other, _ in running.values()])
                running[name] = index, self.results(tasks[index])
            queues = {name: queue for name, queue in queues.items() if queue or name in running}

    def _alone(self, task: Task, others: list[Task]) -> None:
        reads, writes = ({use.buffer for use in uses} for uses in (task.reads, task.writes))
        for other in others:
            written = {use.buffer for use in other.writes}
            assert not written & (reads | writes)
            assert not writes & {use.buffer for use in other.reads}

    def results(self, task: Task) -> dict[int, Content]:
        """Check what a task finds, and tell what it leaves behind."""
        seen = [self.held.get(use.buffer, ()) for use in task.reads]
        if task.kind in ("load", "store"):
            return {task.writes[0].buffer: self._copied(task, seen[0])}
        if task.kind == "optimize":
            return self._updated(task, seen)
        for wanted in self._wanted(task):
            assert wanted in seen, f"{task.kind} {task.layer}.{task.chunk} r{task.round} misses {wanted}"
        return {use.buffer: self._made(task, use.buffer, seen) for use in task.writes}

    def _copied(self, task: Task, content: Content) -> Content:
        if task.chunk is not None:
            assert content == ("kept", task.layer, task.chunk, task.round)
            return ("context", *content[1:]) if task.what == "context" else content
        assert content[0] == task.what
        if task.layer is not None:
            assert (content[1][0] if task.what == "optimizer" else content[1]) == task.layer
        return content

    def _updated(self, task: Task, seen: list[Content]) -> dict[int, Content]:
        by_kind = {content[0]: content for content in seen}
        part = by_kind["weights"][1]
        piece = by_kind["optimizer"][1]
        assert piece[0] == part and by_kind["gradients"][1] == part
        assert piece not in by_kind["weights"][2] and by_kind["optimizer"][2] == 0
        assert by_kind["gradients"][2] == self._whole_gradient(part)
        new = {"weights": ("weights", part, by_kind["weights"][2] | {piece}), "optimizer": ("optimizer", piece, 1)}
        return {use.buffer: new[self.program.buffers[use.buffer].owner] for use in task.writes}

    def _whole_gradient(self, part: Part) -> Counter[tuple[int, int, str]]:
        plan, kinds = self.plan, ["backward-after", "backward-before"] if self.whole else ["backward"]
        if part in ENDS:
            kinds = ["head"] if part == "head" else []
            kinds += ["embed-backward"] if part == self.embedding else []
        found: Counter[tuple[int, int, str]] = Counter()
        for round_ in range(plan.rounds_per_step):
            for chunk in range(plan.chunks_per_round):
                found.update({(round_, chunk, kind): plan.tokens_of(chunk) for kind in kinds})
        return found

    def _wanted(self, task: Task) -> list[Content]:
        """What has to be among what a task reads."""
        plan, kind, layer, chunk, round_ = self.plan, task.kind, task.layer, task.chunk, task.round
        assert chunk is not None
        part = chunk % plan.chunks_per_sequence
        chunks = range(chunk - part, chunk - part + plan.chunks_per_sequence)
        ends: dict[str, End] = {"embed": self.embedding, "head": "head"}
        needs_weights = kind not in ("attention", "attention-backward", "embed-backward")
        found: list[Content] = [("weights", ends.get(kind, layer), frozenset())] if needs_weights else []
        below = {"forward": "hidden", "forward-before": "hidden", "forward-after": "hidden"}
        if kind in below:
            found.append(("hidden", layer, chunk, round_))
        if kind in ("backward", "backward-after", "embed-backward"):
            found.append(("gradient", -1 if layer is None else layer, chunk, round_))
        if kind in ("backward", "backward-after", "backward-before", "context"):
            found.append(("kept", layer, chunk, round_))
        first_to_last = chunks if not self.causal or self.whole else range(chunks[0], chunk)
        again = kind == "backward-after" and task.level in ("context", "input")
        if plan.chunks_per_sequence > 1 and (
            kind in ("forward", "backward", "attention", "attention-backward") or again
        ):
            some = range(chunks[0], chunk + (kind != "forward")) if kind in ("forward", "backward") or again else chunks
            found += [("context", layer, other, round_) for other in (some if self.causal else first_to_last)]
        spans = {"attention": "queries", "forward-after": "attended", "attention-backward": "late"}
        spans["backward-before"] = "early"
        if kind in spans:
            found.append((spans[kind], layer, round_, frozenset(chunks)))
        if kind == "backward-before":
            found.append(("half", layer, chunk, round_))
        return found

    def _made(self, task: Task, buffer: int, seen: list[Content]) -> Content:
        """What a task leaves in one of its buffers."""
        kind, layer, chunk, round_ = task.kind, task.layer, task.chunk, task.round
        owner, role = self.program.buffers[buffer].owner, self.program.buffers[buffer].role
        held = self.held.get(buffer, ())
        assert chunk is not None
        if role == "residual":
            return self._passed_on(task, held)
        if owner == "gradients":
            part: Part = layer if layer is not None else "head" if kind == "head" else self.embedding
            so_far = held[2] if held[:2] == ("gradients", part) and held in seen else Counter()
            assert not so_far[round_, chunk, kind] or kind == "head"
            return ("gradients", part, so_far + Counter({(round_, chunk, kind): task.tokens}))
        if role == "attention":
            word = {"forward-before": "queries", "attention": "attended", "backward-after": "late"}.get(kind, "early")
            group = chunk - chunk % self.plan.chunks_per_sequence
            everyone = frozenset(range(group, group + self.plan.chunks_per_sequence))
            if kind.startswith("attention"):
                return (word, layer, round_, everyone)
            return (
                word,
                layer,
                round_,
                (held[3] if held[:3] == (word, layer, round_) else frozenset()) | {chunk} & everyone,
            )
        if role == "key gradients":
            return ("context gradients", layer, chunk, round_)
        word = "context" if owner == "context" else "kept"
        return (word, layer, chunk, round_) if not kind.startswith("backward") or role == "inputs" else ("scratch",)

    def _passed_on(self, task: Task, held: Content) -> Content:
        kind, chunk, round_ = task.kind, task.chunk, task.round
        assert chunk is not None
        above = self.plan.layers - 1
        if kind == "embed":
            return ("hidden", 0, chunk, round_)
        if kind == "head":
            before = 0 if held == ("hidden", above + 1, chunk, round_) else held[3]
            assert held[0] == "hidden" or held[:3] == ("head", chunk, round_)
            tokens = before + task.tokens
            return (
                ("gradient", above, chunk, round_)
                if tokens == self.plan.tokens_of(chunk)
                else ("head", chunk, round_, tokens)
            )
        assert task.layer is not None
        if kind in ("forward", "forward-after"):
            return ("hidden", task.layer + 1, chunk, round_)
        return (
            ("half", task.layer, chunk, round_)
            if kind == "backward-after"
            else ("gradient", task.layer - 1, chunk, round_)
        )

    def finished(self) -> None:
        """Everything that must be there at the end is, with all pieces of it updated."""
        for buffer, value in self.program.at_end.items():
            kind, part = value.kind, value.part
            assert value.version == 1
            if kind == "optimizer":
                assert self.held[buffer] == (kind, (part, value.number), 1)
            else:
                updated = frozenset((part, index) for index in range(self.pieces[part]))
                assert self.held[buffer] == (kind, part, updated)


@settings(max_examples=25)
@given(plans(), st.integers(0, 2**32))
def test_every_task_finds_what_it_means_to_use(case: tuple[Transformer, Plan], seed: int) -> None:
    model, plan = case
    random = Random(seed)  # noqa: S311 - the order of tasks
    program = compile_plan(plan, model)
    for favourite in (None, "compute", "copy-in", "copy-out", "host"):
        replay = Replay(program, plan, tied=model.tied, causal=model.causal)

        def pick(ready: Sequence[Any], favourite: str | None = favourite) -> Any:
            return favourite if favourite in ready and random.random() < 0.9 else random.choice(ready)

        replay.play(pick)
        replay.finished()


# -- seconds ---------------------------------------------------------------------------------------------------------


def seconds_of(plan: Plan, model: Transformer, hardware: str = "h200") -> TaskSeconds:
    return TaskSeconds(plan, model, load_hardware(hardware))


def attention_of(work: Work) -> Attention:
    return next(op for op in work.ops if isinstance(op, Attention))


@given(
    st.sampled_from(["llama-3-8b", "mistral-7b", "bert-base", "gpt2"]),
    st.integers(1, 512),
    st.sampled_from([None, 1, 7, 100, 512, 4096]),
    st.integers(1, 512),
)
def test_chunks_see_the_pairs_of_their_sequence(name: str, tokens: int, window: int | None, chunk: int) -> None:
    op = attention_of(describe(replace(small_model(name, 2), window=window), tokens))
    starts = range(0, tokens, chunk)
    parts = [op.twice_pairs_of(first, min(first + chunk, tokens)) for first in starts]
    assert sum(parts) == op.twice_pairs("mask")
    assert min(parts) > 0


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", [512, 8192])
def test_one_chunk_that_stays_takes_what_a_prediction_of_it_does(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels as a step whose gradients are summed over micro-batches and that keeps what products made.

    What differs: a plan's gradients are always added to (`accumulate`), which a step of two micro-batches does too, and
    the update is launched once for each part instead of once. Tasks are what the device does; what it waits for the
    host is added to a whole plan's step (`handing.host_waits`), so the prediction is of a step that is replayed. What
    the executor's own kernels of experts take over those of libraries is left out here.
    """
    for name_of in ("slower_experts", "slower_rows"):
        monkeypatch.setattr(tasks, name_of, lambda *_, **__: 1.0)
    monkeypatch.setattr(tasks, "ROUTING_S", 0.0)
    model = small_model(name, 3)
    if model.position_rows is not None:
        tokens = min(tokens, model.position_rows)
    plan = plain_plan(model, sequence_tokens=tokens, chunk_tokens=tokens, head_chunk_tokens=tokens, rounds_per_step=2)
    hardware = load_hardware("h200")
    setup = Setup(
        model=model,
        hardware=hardware,
        sequence_tokens=tokens,
        batch_sequences=2,
        micro_batch_sequences=1,
        formats=POLICIES["bf16"],
        recompute="pointwise",
        cuda_graphs=True,
        # Where weights are dropped the executor calls its own kernels.
        flash_kernel=OWN_ATTENTION if calls_own_attention(model, None) else None,
    )
    predicted = step(setup).step_s
    program = compile_plan(plan, model)
    costs = seconds_of(plan, model)
    found = sum(costs.of(program))
    memory, dram = hardware.efficiency.memory, hardware.device.dram.bandwidth_bytes_per_s
    assert dram is not None
    start_s = hardware.efficiency.launch_s + memory.half_bytes / (memory.dram * dram.value)
    updates = sum(task.kind == "optimize" for task in program.tasks)
    assert predicted * (1 - 1e-9) <= found <= predicted * (1 + 1e-9) + (updates - 1) * start_s


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("parts", [1, 4])
def test_fewer_bytes_kept_are_more_seconds_made_again(name: str, parts: int) -> None:
    model = small_model(name, 2)
    plan = plain_plan(model, chunks=parts, parts=parts, sequence_tokens=512, chunk_tokens=512 // parts)
    costs = seconds_of(plan, model)
    again = [costs.recompute_s(level, 512 // parts, parts - 1) for level in LETTERS.values()]
    assert again[0] == 0.0
    assert again == sorted(again)
    assert again[-1] < costs.groups(512 // parts).forward["before"] + sum(
        (costs.groups(512 // parts).forward["after"], costs.attention_s(parts - 1, "forward"))
    )


@pytest.mark.parametrize("attention", ["sequence", "chunk"])
@pytest.mark.parametrize("letter", ["f", "a", "c", "i"])
def test_recompute_is_what_a_program_takes_longer(attention: str, letter: str) -> None:
    """Of all compute tasks together, and what keys and values take to be brought."""
    model = small_model("llama-3-8b", 3)

    def computed(chosen: str) -> tuple[float, float]:
        plan = plain_plan(model, chunks=4, sequence_tokens=32768, chunk_tokens=8192, letter=chosen, attention=attention)
        program, costs = compile_plan(plan, model), seconds_of(plan, model)
        seconds = costs.of(program)
        brought = sum(
            second
            for second, task in zip(seconds, program.tasks, strict=True)
            if task.kind == "context" and task.level != "input"
        )
        again = plan.layers * sum(costs.recompute_s(LETTERS[chosen.lower()], 8192, part) for part in range(4))
        return sum(seconds) - brought, again

    (longer, again), (shorter, _) = computed(letter), computed("F")
    difference = longer - shorter
    # Keys and values of the last layer are still there when its backward begins.
    assert again * (0.9 if letter == "i" else 0.9999) <= difference + 1e-12
    assert difference <= again * 1.0001 + 1e-12


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "qwen3-0.6b", "gpt-neox-20b"])
def test_large_chunks_take_what_the_whole_takes(name: str) -> None:
    """Products over 8k rows fill the device as those over 64k do; a chunk's gradients are read once more."""
    model = small_model(name, 2)
    whole = plain_plan(model, sequence_tokens=65536, chunk_tokens=65536)
    cut = plain_plan(model, chunks=8, sequence_tokens=65536, chunk_tokens=8192)
    large, small = seconds_of(whole, model).groups(65536), seconds_of(cut, model).groups(8192)
    for direction in ("forward", "backward"):
        one, other = getattr(large, direction), getattr(small, direction)
        for group in ("before", "after", "head"):
            assert 8 * other[group] == pytest.approx(one[group], rel=0.12)
            assert 8 * other[group] >= one[group] * 0.98


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "bert-base", "mixtral-8x7b"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_by_chunks_is_no_faster_than_whole(name: str, direction: Any) -> None:
    model = replace(small_model(name, 2), position_rows=None)
    plan = plain_plan(model, chunks=8, sequence_tokens=65536, chunk_tokens=8192, attention="sequence")
    costs = seconds_of(plan, model)
    whole = costs.attention_s(None, direction)
    chunks = [costs.attention_s(part, direction) for part in range(8)]
    assert whole * 0.99 <= sum(chunks) <= whole * 1.35
    if not model.causal:
        assert chunks == pytest.approx([chunks[0]] * 8, rel=0.05) or direction == "backward"
    elif model.window is None:
        assert chunks == sorted(chunks)
    else:
        # Behind the first chunk a window sees equally many keys wherever it lies.
        assert chunks[0] < chunks[1]
        assert chunks[2:] == pytest.approx([chunks[1]] * 6, rel=0.25)


@pytest.mark.parametrize("name", ["mistral-7b", "llama-3-8b"])
def test_a_window_costs_by_its_reach(name: str) -> None:
    """A sequence that fits the window costs what it would without one, a longer one less."""
    model = small_model(name, 2)
    windowed, free = replace(model, window=4096), replace(model, window=None)
    for tokens, cheaper in ((4096, False), (65536, True)):
        plan = plain_plan(model, sequence_tokens=tokens, chunk_tokens=tokens)
        with_window, without = (seconds_of(plan, one).attention_s(0, "forward") for one in (windowed, free))
        assert (with_window < 0.5 * without) if cheaper else with_window == without


def test_several_sequences_in_a_chunk_take_as_often_as_long() -> None:
    model = small_model("llama-3-8b", 2)
    one = plain_plan(model, sequence_tokens=4096, chunk_tokens=4096)
    four = replace(one, chunk_tokens=16384)
    for direction in ("forward", "backward"):
        single, several = (seconds_of(plan, model).attention_s(0, direction) for plan in (one, four))
        assert several == pytest.approx(4 * single, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "precision", "within"),
    [
        ({}, "bf16", True),
        ({}, "fp8", False),
        ({}, "fp32", False),
        ({"ffn_bias": True}, "bf16", False),
        ({"activation": "gelu"}, "bf16", False),
    ],
)
def test_activations_within_products_take_no_time_of_their_own(
    changes: dict[str, Any], precision: str, within: bool
) -> None:
    model = replace(small_model("llama-3-8b", 2), **changes)
    plan = plain_plan(model, sequence_tokens=2048, chunk_tokens=2048, precision=precision)
    h200 = load_hardware("h200")
    activates = replace(h200, efficiency=replace(h200.efficiency, gemm=replace(h200.efficiency.gemm, activates=True)))
    apart, together = (TaskSeconds(plan, model, hardware).groups(2048) for hardware in (h200, activates))
    costs = TaskSeconds(plan, model, h200)
    work = describe(model, 2048)
    activation = next(op for op in work.ops if op.name == "activation")
    formats = costs.formats
    for way, traffic in (("forward", forward_traffic), ("backward", backward_traffic)):
        alone = costs._streaming(float(traffic(work, activation, formats, fused=True).per_sequence))
        saved = getattr(apart, way)["after"] - getattr(together, way)["after"]
        assert saved == pytest.approx(alone if within else 0.0)
        assert getattr(apart, way)["before"] == getattr(together, way)["before"]
    assert apart.products == together.products


def test_the_ceiling_is_below_what_tasks_take() -> None:
    for name in FAMILIES:
        model = small_model(name, 2)
        for chunks, parts, attention in ((2, 1, "chunk"), (8, 4, "sequence"), (8, 4, "chunk")):
            if not model.causal and parts > 1 and attention == "chunk":
                continue
            plan = plain_plan(model, chunks=chunks, parts=parts, attention=attention, rounds_per_step=2)
            costs = seconds_of(plan, model)
            assert 0 < costs.ceiling_s() < sum(costs.of(compile_plan(plan, model)))


def test_a_mean_of_the_weights_is_updated_on_the_host_too() -> None:
    """It is read and written in fp32, beside 28 bytes of AdamW's own."""
    model = small_model("qwen2.5-0.5b", 3)
    plain, averaged = (
        seconds_of(plain_plan(model, precision=precision), model).update_s(1_000_000, on_host=True)
        for precision in ("bf16", "bf16,average=fp32")
    )
    assert averaged == pytest.approx(plain * (28 + 8) / 28)


@pytest.mark.parametrize(
    ("changes", "words", "within"),
    [
        ({}, {}, True),
        ({}, {"lora": 4, "lora_on": "q,v"}, True),
        ({}, {"lora": 4, "lora_on": "down"}, True),
        ({}, {"lora": 4}, False),
        ({"activation": "relu2", "gated": False}, {}, False),
        ({"experts_per_token": 1, "routing": Routing(scores="sigmoid", normalised=False, on_inputs=True)}, {}, False),
    ],
    ids=["plain", "adapters of attention", "adapters of down", "adapters", "not gated", "weighed before"],
)
def test_experts_activations_take_no_time_only_where_products_make_them(
    changes: dict[str, Any], words: dict[str, Any], within: bool
) -> None:
    """As the executor runs them: not behind an adapter's product, without a gate, or on rows that are laid out."""
    model = TrainedWords(**words).of(replace(load_model("qwen3-30b-a3b"), **changes))
    assert isinstance(model, Transformer)
    hardware, work = load_hardware("h200"), describe(model, 4096)
    activates = experts_activate(work.ops, model)
    assert activates == within
    for phase in (Phase.FORWARD, Phase.RECOMPUTE):
        assert slower_rows("activation", phase, model, hardware, activates=activates) == (0.0 if within else 1.0)
    assert slower_rows("activation", Phase.BACKWARD, model, hardware, activates=activates) > 1.0


def test_routing_takes_time_in_blocks_with_experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Nemotron 3 Nano's blocks fewer than half have experts; the others carry a state or look back."""
    model = load_model("nemotron-3-nano-30b-a3b", {"layers": 8})
    assert isinstance(model, Transformer)
    plan = plain_plan(model, sequence_tokens=512, chunk_tokens=512, head_chunk_tokens=512)
    program = compile_plan(plan, model)
    found = []
    for seconds in (0.0, 1.0):
        monkeypatch.setattr(tasks, "ROUTING_S", seconds)
        found.append(TaskSeconds(plan, model, load_hardware("h200")).of(program))
    slower = {task.layer for task, *each in zip(program.tasks, *found, strict=True) if each[1] > each[0]}
    assert 0 < len(model.mixed_blocks) < model.layers
    assert slower == set(model.mixed_blocks)
