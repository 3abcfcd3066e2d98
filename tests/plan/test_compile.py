"""Programs of random plans: proven right, and counted by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.memory import plan_bytes
from flopwise.plan.program.compile import compile_plan
from flopwise.plan.program.sizes import Sizes, level_bytes, sizes_of
from flopwise.predict.simulate.simulator import memory_points, simulate
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.records.plan import LETTERS, Plan, Residency
from flopwise.records.program import Program, Value, aligned, check
from flopwise.work.formats import parse_formats
from flopwise.work.parameters import ENDS, Part, Place
from flopwise.work.transformer import Transformer

FAMILIES = (
    "gpt2",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "llama-3-8b",
    "mistral-7b",
    "mixtral-8x7b",
    "bert-base",
    "gpt-neox-20b",
    "mpt-125m",
)
Pick = Callable[[Sequence[Any]], Any]
PLACES: tuple[Place, ...] = ("device", "host")


@cache
def small_model(name: str, layers: int) -> Transformer:
    """A model of the catalogue with fewer layers: nothing here runs, so that its width does not matter."""
    model = load_model(name)
    assert isinstance(model, Transformer)
    return replace(model, layers=layers)


def sizes_for(plan: Plan, model: Transformer) -> Sizes:
    return sizes_of(model, plan.sequence_tokens, parse_formats(plan.precision), plan.optimizer)


def plain_plan(model: Transformer, *, chunks: int = 1, parts: int = 1, letter: str = "F", **changes: Any) -> Plan:
    """A plan of `chunks` chunks in which everything stays on the device; each sequence is cut into `parts`."""
    everything = Residency(blocks=model.layers, ends=ENDS)
    settled: dict[str, Any] = {
        "hardware": "h200",
        "device_memory_bytes": 1 << 42,
        "host_memory_bytes": 1 << 42,
        "sequence_tokens": 64 * parts,
        "chunk_tokens": 64,
        "chunks_per_round": chunks,
        "rounds_per_step": 1,
        "head_chunk_tokens": 64,
        "attention": "chunk",
        "weights": everything,
        "gradients": everything,
        "optimizer_state": everything,
        "saves": (letter * chunks,) * model.layers,
        "precision": "bf16",
    }
    settled |= changes
    whole = "".join(settled["saves"]).count("F")
    return Plan(**{"activation_slots": whole + 2, **settled})


def any_plan(pick: Pick) -> tuple[Transformer, Plan]:
    """A plan of any kind for a small model; `pick` takes one of what it is given."""
    model = small_model(pick(FAMILIES), pick((2, 3, 4, 6)))
    layers, sequence = model.layers, pick((64, 100, 500))
    chunk = pick((sequence, 3 * sequence, sequence // 2, sequence // 3, 40, sequence // 8, sequence // 13))
    parts = -(-sequence // chunk)
    groups = pick((1, 2, 3)) if parts < 8 else 1
    chunks = parts * groups
    attention = pick(("sequence", "chunk")) if model.causal or parts == 1 else "sequence"
    letters = pick(("faciFACI", "fi", "ac", "i", "f", "F", "AC", "fI"))
    saves = tuple("".join(pick(letters) for _ in range(chunks)) for _ in range(layers))
    ends = ((), ("embedding",), ("head",), ENDS)

    def residency() -> Residency:
        return Residency(blocks=pick(range(layers + 1)), passing=pick((1, 2, 3)), ends=pick(ends))

    return model, plain_plan(
        model,
        sequence_tokens=sequence,
        chunk_tokens=chunk,
        chunks_per_round=chunks,
        rounds_per_step=pick((1, 2, 3, 4)),
        head_chunk_tokens=pick((37, 16, 1000)),
        attention=attention,
        weights=residency(),
        gradients=residency(),
        optimizer_state=residency(),
        activation_slots="".join(saves).count("F") + pick((1, 2, 4)),
        saves=saves,
        precision=pick(("bf16", "bf16-mixed", "fp8", "bf16-amp")),
        optimizer=pick(("adamw", "lion", "sgd")),
        update_place=pick(PLACES),
        update_when=pick(("backward", "end")),
        fetch=pick(("by need", "at once")),
        host_copies=pick((False, True)),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[Transformer, Plan]:
    return any_plan(lambda options: draw(st.sampled_from(options)))


# -- properties of every program -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(plans())
def test_programs_are_right_and_as_large_as_their_plans(case: tuple[Transformer, Plan]) -> None:
    model, plan = case
    program = compile_plan(plan, model)
    check(program)
    expected = plan_bytes(plan, sizes_for(plan, model))
    for place in PLACES:
        assert program.bytes_by_owner(place) == expected[place]


@settings(max_examples=40)
@given(plans())
def test_every_chunk_goes_through_every_layer_once_a_round(case: tuple[Transformer, Plan]) -> None:
    model, plan = case
    program = compile_plan(plan, model)
    whole = plan.chunks_per_sequence > 1 and plan.attention == "sequence"
    kinds = ("forward-before", "forward-after", "backward-after", "backward-before") if whole else ("forward",)
    kinds = kinds if whole else (*kinds, "backward")
    pairs = {
        (round_, layer, chunk)
        for round_ in range(plan.rounds_per_step)
        for layer in range(plan.layers)
        for chunk in range(plan.chunks_per_round)
    }
    for kind in kinds:
        found = Counter((task.round, task.layer, task.chunk) for task in program.tasks if task.kind == kind)
        assert found == Counter(pairs)
    tokens: Counter[str] = Counter()
    for task in program.tasks:
        tokens[task.kind] += task.tokens
    step = plan.tokens_per_step
    assert tokens["embed"] == tokens["embed-backward"] == tokens["head"] == step
    assert all(tokens[kind] == step * plan.layers for kind in kinds)
    if whole:
        sequences = plan.rounds_per_step * plan.sequences_per_round * plan.layers
        counted = Counter(task.kind for task in program.tasks)
        assert counted["attention"] == counted["attention-backward"] == sequences


@settings(max_examples=40)
@given(plans())
def test_everything_that_was_trained_is_stored(case: tuple[Transformer, Plan]) -> None:
    """Each part is updated once with all of its parameters, and what the host holds of it is the new value."""
    model, plan = case
    program, sizes = compile_plan(plan, model), sizes_for(plan, model)
    updated = sum(task.parameters for task in program.tasks if task.kind == "optimize")
    assert updated == model.layers * sizes.block.parameters + sizes.embedding.parameters + sizes.head.parameters
    parts: list[Part] = [*range(model.layers), *(end for end in ENDS if getattr(sizes, end).parameters)]
    assert {Value("weights", part, version=1) for part in parts} <= set(program.at_end.values())
    for buffer, value in program.at_start.items():
        if program.buffers[buffer].owner in ("weights", "optimizer"):
            assert program.at_end[buffer] == value._replace(version=1)
    stored = Counter((task.what, task.layer) for task in program.tasks if task.kind == "store")
    if plan.update_place == "device":
        passing = set(range(model.layers)) - plan.weights.staying(model.layers)
        assert all(stored["weights", layer] == 1 for layer in passing)


@settings(max_examples=25)
@given(plans())
def test_a_simulation_never_uses_more_than_the_plan_counts(case: tuple[Transformer, Plan]) -> None:
    model, plan = case
    program = compile_plan(plan, model)
    hardware = load_hardware("h200")
    simulation = simulate(program, TaskSeconds(plan, model, hardware).of(program), hardware.link)
    expected = plan_bytes(plan, sizes_for(plan, model))
    peaks: tuple[tuple[Place, dict[str, int]], ...] = (
        ("device", simulation.peak_device_bytes),
        ("host", simulation.peak_host_bytes),
    )
    lent = {buffer.owner for buffer in program.buffers if buffer.borrowed}
    for place, peak in peaks:
        for point in memory_points(simulation):
            used: dict[str, int] = getattr(point, place)
            assert sum(used.values()) <= sum(peak.values())
            assert all(size <= expected[place].get(owner, 0) for owner, size in used.items() if owner not in lent)


@settings(max_examples=40)
@given(plans())
def test_borrowed_memory_is_free_when_it_is_used(case: tuple[Transformer, Plan]) -> None:
    """Whatever lies in the memory of activations comes after the last of them, in every order of the streams."""
    model, plan = case
    program = compile_plan(replace(plan, update_when="end"), model)
    borrowed = {index for index, buffer in enumerate(program.buffers) if buffer.borrowed}
    lending = {
        index
        for index, buffer in enumerate(program.buffers)
        if buffer.owner == "activations" and buffer.place == "device"
    }
    before: list[int] = []
    last: dict[str, int] = {}
    users = 0
    for index, task in enumerate(program.tasks):
        found = 0
        for other in (*task.after, *(last.get(task.stream, index),)):
            found |= (before[other] | 1 << other) if other < index else 0
        before.append(found)
        last[task.stream] = index
        used = {use.buffer for use in (*task.reads, *task.writes)}
        assert not (used & borrowed and users & ~found)
        users |= 1 << index if used & lending else 0
        assert not (used & lending and used & borrowed)


def test_borrowed_memory_is_no_larger_than_what_lends_it() -> None:
    """A block's optimizer state passes through the activations' memory, of which short chunks have little."""
    model = small_model("llama-3-8b", 4)
    passing = Residency(blocks=0, passing=1)
    plan = plain_plan(model, letter="f", optimizer_state=passing, update_when="end", activation_slots=2)
    program = compile_plan(plan, model)
    borrowed = sum(buffer.bytes for buffer in program.buffers if buffer.borrowed)
    assert borrowed <= program.bytes_by_owner("device")["activations"]


def test_loads_are_never_put_off_beyond_their_need() -> None:
    """Inputs come before attention, the rest behind it: of a sequence's loads the first are not needed first."""
    model = small_model("llama-3-8b", 2)
    plan = plain_plan(
        model, chunks=8, parts=8, attention="sequence", activation_slots=1, saves=("iiiiffff",) * 2, fetch="by need"
    )
    check(compile_plan(plan, model))


def test_an_update_on_the_host_at_the_end_keeps_every_gradient() -> None:
    """When the last round is over, a slot holds one layer's gradient; those of the others are on the host already."""
    model = small_model("llama-3-8b", 3)
    passing = Residency(blocks=0, passing=1, ends=ENDS)
    program = compile_plan(plain_plan(model, gradients=passing, update_place="host", update_when="end"), model)
    for task in program.tasks:
        if task.kind == "store" and task.what == "gradients" and task.layer is not None:
            assert (task.writes[0].value.kind, task.writes[0].value.part) == ("gradients", task.layer)


def test_attention_without_a_mask_is_made_again_from_all_keys() -> None:
    """A chunk of an encoder looks at the keys and values of its whole sequence, also when it does so again."""
    model = small_model("bert-base", 2)
    plan = plain_plan(model, chunks=3, parts=3, letter="c", attention="sequence")
    program = compile_plan(plan, model)
    context = {index for index, buffer in enumerate(program.buffers) if buffer.owner == "context"}
    for task in program.tasks:
        if task.kind == "backward-after":
            # There are two rooms for them, which layers take in turns.
            assert len(context & {use.buffer for use in task.reads}) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": Residency(blocks=1, ends=ENDS)},
        {"gradients": Residency(blocks=1, ends=ENDS)},
        {"activation_slots": 3},
    ],
)
def test_a_plan_without_room_for_what_passes_is_refused_in_words(changes: dict[str, Any]) -> None:
    """Blocks that do not stay need a slot; so do all that are kept whole."""
    model = small_model("llama-3-8b", 2)
    with pytest.raises(FlopwiseError):
        compile_plan(plain_plan(model, chunks=2, **changes), model)


def test_chunks_of_an_encoder_cannot_attend_in_turn() -> None:
    """The keys of the later chunks are not there yet when the first one looks for them."""
    model = small_model("bert-base", 2)
    with pytest.raises(FlopwiseError):
        compile_plan(plain_plan(model, chunks=3, parts=3, attention="chunk"), model)


# -- bytes over the link, counted by hand ----------------------------------------------------------------------------


def moved(program: Program) -> Counter[tuple[str, str | None]]:
    """(load or store, of what) → bytes."""
    found: Counter[tuple[str, str | None]] = Counter()
    for task in program.tasks:
        if task.bytes:
            found[task.kind, task.what] += task.bytes
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rounds", [1, 3])
def test_what_stays_moves_nothing(name: str, rounds: int) -> None:
    model = small_model(name, 3)
    for chunks, parts, attention in ((2, 1, "chunk"), (6, 3, "sequence"), (6, 3, "chunk")):
        if not model.causal and parts > 1 and attention == "chunk":
            continue
        plan = plain_plan(model, chunks=chunks, parts=parts, rounds_per_step=rounds, attention=attention)
        program = compile_plan(plan, model)
        assert not moved(program)
        assert not program.bytes_by_owner("host")


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_weights_that_pass_come_twice_a_round(slots: int, rounds: int) -> None:
    model = small_model("llama-3-8b", 5)
    plan = plain_plan(model, chunks=2, rounds_per_step=rounds, weights=Residency(blocks=0, passing=slots, ends=ENDS))
    block = sizes_for(plan, model).block.weights
    found = moved(compile_plan(plan, model))
    assert found == {("load", "weights"): 2 * rounds * (5 - slots) * block, ("store", "weights"): 5 * block}


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_gradients_that_pass_make_a_round_trip_between_rounds(slots: int, rounds: int) -> None:
    model = small_model("qwen2.5-0.5b", 5)
    plan = plain_plan(model, chunks=2, rounds_per_step=rounds, gradients=Residency(blocks=0, passing=slots, ends=ENDS))
    trip = (rounds - 1) * sizes_for(plan, model).block.gradients
    # With four slots for five layers, only the first and the last share one; the others' sums are still there.
    sharing = 2 if slots == 4 else 5
    expected = {("load", "gradients"): sharing * trip, ("store", "gradients"): 5 * trip} if trip else {}
    assert moved(compile_plan(plan, model)) == expected


@pytest.mark.parametrize("when", ["backward", "end"])
def test_optimizer_state_that_passes_moves_once_a_step(when: Literal["backward", "end"]) -> None:
    model = small_model("gpt2", 4)
    plan = plain_plan(
        model, chunks=2, rounds_per_step=3, optimizer_state=Residency(blocks=1, passing=2), update_when=when
    )
    sizes = sizes_for(plan, model)
    size = 3 * sizes.block.optimizer + sizes.head.optimizer
    assert moved(compile_plan(plan, model)) == {("load", "optimizer"): size, ("store", "optimizer"): size}


def test_an_update_on_the_host_takes_gradients_out_and_brings_weights_that_stay() -> None:
    model = small_model("llama-3-8b", 4)
    plan = plain_plan(model, update_place="host")
    sizes = sizes_for(plan, model)
    parts = (sizes.head, sizes.embedding, *[sizes.block] * 4)
    assert moved(compile_plan(plan, model)) == {
        ("store", "gradients"): sum(part.gradients for part in parts),
        ("load", "weights"): sum(part.weights for part in parts),
    }


@pytest.mark.parametrize("letter", LETTERS)
@pytest.mark.parametrize("attention", ["sequence", "chunk"])
@pytest.mark.parametrize("parts", [1, 3])
def test_activations_leave_and_come_back_once(letter: str, attention: str, parts: int) -> None:
    model = small_model("llama-3-8b", 4)
    plan = plain_plan(model, chunks=6, parts=parts, letter=letter, attention=attention)
    sizes = sizes_for(plan, model)
    each = level_bytes(sizes, LETTERS[letter], 64)
    found = moved(compile_plan(plan, model))
    assert found["store", "activations"] == 24 * each
    inward = found["load", "activations"] + found["load", "context"]
    if parts == 1 or (letter == "i" and attention == "sequence"):
        assert inward == 24 * each
    elif letter == "i":
        # Once for keys and values, once for backward; those of the last two sequences are still in their two rooms.
        assert inward == (24 + 18) * each
    else:
        assert inward == 24 * each - 2 * 3 * aligned(sizes.context * 64)


@pytest.mark.parametrize(
    ("level", "size"), [("context", 201_457_664), ("attention", 337_772_544), ("full", 1_545_732_096)]
)
def test_save_levels_are_as_large_as_the_reference_records(level: str, size: int) -> None:
    model = small_model("llama-3-8b", 32)
    sizes = sizes_of(model, 65536, parse_formats("bf16"), "adamw")
    assert level_bytes(sizes, level, 16384) == size
    assert sizes.block.weights == 436_224_000
    plan = plain_plan(model, chunks=4, sequence_tokens=65536, chunk_tokens=16384, letter=level[0], attention="sequence")
    found = moved(compile_plan(plan, model))
    assert found["store", "activations"] == 32 * 4 * size
    # Keys and values of the last two layers are still there.
    assert found["load", "activations"] + found["load", "context"] == 32 * 4 * size - 2 * 4 * 16384 * 4096
