"""The search for one device against plain plans: it fits, it is not slower than any of them, more memory helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.forecast import times_of
from flopwise.plan.device.memory import plan_bytes
from flopwise.plan.device.search import fastest_plan
from flopwise.plan.program.compile import compile_plan
from flopwise.plan.program.sizes import sizes_of
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.records.plan import Plan, Residency
from flopwise.records.program import check
from flopwise.setup.setup import CappedSetup
from flopwise.work.formats import parse_formats
from flopwise.work.parameters import ENDS
from tests.plan.test_compile import FAMILIES, plain_plan, small_model

GIB = 2**30
OVERHEAD = 1.02
"""Of two plans that are so near each other, the one with the smaller batch is taken."""
SAME = 1.001
"""Of one batch, a step that is longer by less is as fast."""


def question(name: str = "llama-3-8b", layers: int = 2, **changes: Any) -> CappedSetup:
    settled: dict[str, Any] = {
        "model": small_model(name, layers),
        "hardware": load_hardware(changes.get("hardware_name", "h200")),
        "hardware_name": "h200",
        "sequence_tokens": 2048,
        "device_cap_bytes": 64 * GIB,
        "host_cap_bytes": 64 * GIB,
        "formats": parse_formats("bf16"),
    }
    return CappedSetup(**(settled | changes))


@st.composite
def questions(draw: st.DrawFn) -> CappedSetup:
    name = draw(st.sampled_from(FAMILIES))
    model = small_model(name, draw(st.integers(2, 4)))
    lengths = [tokens for tokens in (64, 500, 2048, 8192, 50_000) if tokens <= (model.position_rows or 1 << 30)]
    return question(
        name,
        model.layers,
        sequence_tokens=draw(st.sampled_from(lengths)),
        device_cap_bytes=int(draw(st.floats(0.3, 30.0)) * GIB),
        host_cap_bytes=int(draw(st.sampled_from([0.0, 1.0, 8.0, 100.0])) * GIB),
        formats=parse_formats(draw(st.sampled_from(["bf16", "bf16-mixed", *([] if model.experts else ["fp8"])]))),
        optimizer=draw(st.sampled_from(["adamw", "lion", "sgd"])),
        batch_sequences=draw(st.sampled_from([None, None, 1, 2, 6, 7, 32])),
        clip=draw(st.booleans()),
        hardware_name=draw(st.sampled_from(["h200", "h100-sxm"])),
    )


def fits(plan: Plan, asked: CappedSetup) -> bool:
    sizes = sizes_of(asked.model, asked.sequence_tokens, asked.formats, asked.optimizer)
    taken = plan_bytes(plan, sizes)
    return (
        sum(taken["device"].values()) <= asked.device_cap_bytes and sum(taken["host"].values()) <= asked.host_cap_bytes
    )


def token_s(plan: Plan, asked: CappedSetup) -> float:
    return times_of(plan, asked.model, asked.hardware).step_s / plan.tokens_per_step


def variant(asked: CappedSetup, chunk: int, groups: int, letter: str, **changes: Any) -> Plan:
    """A plan for the question in chunks of one length, all at one level; everything that is not named stays."""
    model, sequence = asked.model, asked.sequence_tokens
    parts = -(-sequence // chunk)
    sequences = groups * max(1, chunk // sequence)
    plan = plain_plan(
        small_model(model.name, model.layers),
        chunks=parts * groups,
        sequence_tokens=sequence,
        chunk_tokens=chunk,
        letter=letter,
        head_chunk_tokens=min(1024, chunk),
        attention="sequence",
        rounds_per_step=(asked.batch_sequences or sequences) // sequences,
        precision=asked.formats.name,
        optimizer=asked.optimizer,
        update_when="end" if asked.clip else "backward",
    )
    # Where everything is in a slot, no further one is needed.
    slots = model.layers * plan.chunks_per_round if letter == "F" else 2
    return replace(plan, **{"activation_slots": slots, **changes})


def simple_plans(asked: CappedSetup) -> Iterator[tuple[str, Plan]]:
    """All streamed and all resident, a sequence or about 4k tokens of one at a time."""
    sequence = asked.sequence_tokens
    chunk = sequence if sequence <= 8192 else -(-sequence // round(sequence / 4096))
    some = Residency(blocks=0, passing=1)
    streamed = {"weights": some, "gradients": some, "optimizer_state": some}
    for letter in "fi":
        yield f"streamed {letter}", variant(asked, chunk, 1, letter, **streamed)
        yield f"state resident, {letter}", variant(asked, chunk, 1, letter)
    for letter in "FI":
        yield f"resident {letter}", variant(asked, chunk, 1, letter)


@settings(max_examples=25)
@given(questions())
def test_plans_fit_and_are_right(asked: CappedSetup) -> None:
    found = fastest_plan(asked)
    if found is None:
        return
    assert fits(found.plan, asked)
    if asked.batch_sequences is not None:
        assert found.plan.tokens_per_step == asked.batch_sequences * asked.sequence_tokens
    program = compile_plan(found.plan, asked.model, rounds=min(2, found.plan.rounds_per_step))
    check(program)
    borrowed = sum(buffer.bytes for buffer in program.buffers if buffer.borrowed)
    on_device = program.bytes_by_owner("device")
    lent = on_device.pop("activations")
    assert sum(on_device.values()) + max(borrowed, lent) <= asked.device_cap_bytes
    assert found.times.step_s == pytest.approx(times_of(found.plan, asked.model, asked.hardware).step_s)


@settings(max_examples=20)
@given(questions())
def test_no_simple_plan_is_faster(asked: CappedSetup) -> None:
    found = fastest_plan(asked)
    for name, plan in simple_plans(asked):
        if found is not None and fits(plan, asked):
            speed = token_s(plan, asked) / (found.times.step_s / found.plan.tokens_per_step)
            assert speed >= 1 / (OVERHEAD + 0.01), f"{name} is {1 / speed:.3f} times as fast"


BRUTE_FORCE_CAPS = ((64.0, 64.0), (6.0, 64.0), (4.5, 64.0), (12.0, 2.0))


def small_grid(asked: CappedSetup) -> Iterator[Plan]:
    """Every residency of two layers, every level for all, every place of the update."""
    blocks = range(3)
    cuts = ((2048, 1), (2048, 4), (8192, 1))
    for cut, weights, gradients, state, ends, letter in product(cuts, blocks, blocks, blocks, ((), ENDS), "fiFI"):
        for place in ("device", "host") if state == 0 else ("device",):
            plan = variant(
                asked,
                *cut,
                letter,
                weights=Residency(blocks=weights, passing=1, ends=ends),
                gradients=Residency(blocks=gradients, passing=1, ends=ends),
                optimizer_state=Residency(blocks=state, passing=1, ends=ends),
                update_place=place,
            )
            if fits(plan, asked):
                yield plan


@pytest.mark.parametrize(("device", "host"), BRUTE_FORCE_CAPS)
@pytest.mark.parametrize("name", ["llama-3-8b", "mpt-3b"])
def test_no_plan_of_a_small_grid_is_faster(device: float, host: float, name: str) -> None:
    asked = question(name, 2, device_cap_bytes=int(device * GIB), host_cap_bytes=int(host * GIB), batch_sequences=4)
    found = fastest_plan(asked)
    assert found is not None
    costs: dict[int, TaskSeconds] = {}
    fastest = float("inf")
    for plan in small_grid(asked):
        # What tasks take depends on the chunks alone.
        known = costs.setdefault(plan.chunk_tokens, TaskSeconds(plan, asked.model, asked.hardware))
        fastest = min(fastest, times_of(plan, asked.model, asked.hardware, known).step_s)
    assert found.times.step_s <= OVERHEAD * fastest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens", "place"),
    [
        *(("llama-3-8b", 2048, "device"), ("llama-3-8b", 16384, "host")),
        *(("gpt-neox-20b", 2048, "host"), ("gpt-neox-20b", 16384, "device")),
        *(("mixtral-8x7b", 2048, "device"), ("mixtral-8x7b", 16384, "host")),
        *(("mpt-125m", 2048, "host"), ("mpt-125m", 16384, "device")),
    ],
)
def test_more_memory_is_never_slower(name: str, tokens: int, place: str) -> None:
    """Every pair of a model, a length and a place is here."""
    fastest = float("inf")
    for cap in (1, 2, 5, 8, 20, 100):
        caps = {"device_cap_bytes": cap * GIB}
        if place == "host":
            caps = {"device_cap_bytes": 8 * GIB, "host_cap_bytes": cap * GIB}
        found = fastest_plan(question(name, 4, sequence_tokens=tokens, batch_sequences=8, **caps))
        if found is None:
            assert fastest == float("inf"), f"nothing fits {cap} GiB, but less was enough"
            continue
        assert found.times.step_s <= fastest * SAME, f"slower with {cap} GiB"
        fastest = min(fastest, found.times.step_s)


# The same cases every time: of 414 pairs drawn at random one was slower, by 9 %, and is mended.
@settings(max_examples=8, derandomize=True)
@given(questions(), st.sampled_from(["device_cap_bytes", "host_cap_bytes"]), st.sampled_from([1, 2, 6]))
def test_more_of_either_memory_is_never_slower(asked: CappedSetup, place: str, batch: int) -> None:
    fastest = float("inf")
    for more in (1.0, 1.1, 1.3, 2.0):
        caps: dict[str, Any] = {place: int(getattr(asked, place) * more)}
        found = fastest_plan(replace(asked, batch_sequences=batch, **caps))
        assert found is not None or fastest == float("inf"), f"nothing fits {more} times as much"
        step_s = found.times.step_s if found else float("inf")
        assert step_s <= fastest * SAME, f"slower with {more} times as much"
        fastest = min(fastest, step_s)


def test_slots_are_enough_for_the_state_that_passes() -> None:
    """While a block of experts' state is on its way, activations wait: two slots cost 13 % of such a step."""
    asked = CappedSetup(
        model=load_model("qwen3-30b-a3b", {"layers": 12}),
        hardware=load_hardware("h200"),
        hardware_name="h200",
        sequence_tokens=4096,
        device_cap_bytes=34 * GIB,
        host_cap_bytes=28 * GIB,
        formats=parse_formats("bf16"),
        batch_sequences=24,
    )
    found = fastest_plan(asked)
    assert found is not None
    assert found.times.idle.get("activations", 0.0) < 0.01 * found.times.step_s


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 8, 13, 30, 64, 97])
@pytest.mark.parametrize("tokens", [300, 2048, 10_000])
def test_a_batch_is_planned_exactly(batch: int, tokens: int) -> None:
    found = fastest_plan(question(sequence_tokens=tokens, batch_sequences=batch))
    assert found is not None
    assert found.plan.tokens_per_step == batch * tokens


@pytest.mark.parametrize(("device", "host"), [(0.01, 1000.0), (0.3, 0.0), (2.0, 0.5)])
def test_nothing_is_found_where_nothing_fits(device: float, host: float) -> None:
    asked = question("llama-3-8b", 4, device_cap_bytes=int(device * GIB), host_cap_bytes=int(host * GIB))
    assert fastest_plan(asked) is None


def test_everything_stays_where_there_is_room_for_it() -> None:
    """With room for all, nothing is gained by an update on the host, by recompute or by copies."""
    for name in ("mpt-125m", "llama-3-8b", "gpt2"):
        asked = question(name, 4, sequence_tokens=1024, batch_sequences=8, device_cap_bytes=130 * GIB)
        found = fastest_plan(asked)
        assert found is not None
        best = min(token_s(variant(asked, chunk, 1, "F"), asked) for chunk in (1024, 4096, 8192))
        assert found.times.step_s / found.plan.tokens_per_step <= best * OVERHEAD


def test_a_device_without_a_link_keeps_everything() -> None:
    asked = question("gpt2", 2, hardware_name="trn1", sequence_tokens=512, batch_sequences=4, device_cap_bytes=8 * GIB)
    found = fastest_plan(asked)
    assert found is not None
    assert found.times.copy_in_bytes == found.times.copy_out_bytes == 0
    assert fastest_plan(replace(asked, device_cap_bytes=GIB // 8)) is None


@pytest.mark.parametrize(("name", "tokens", "batch"), [("bert-base", 64, None), ("gpt2", 64, 64), ("gpt2", 1000, 2)])
def test_something_is_found_where_a_simple_plan_fits(name: str, tokens: int, batch: int | None) -> None:
    """Short sequences one at a time take less memory than a chunk of 2,048 tokens."""
    asked = question(name, 3, sequence_tokens=tokens, batch_sequences=batch)
    sizes = sizes_of(asked.model, tokens, asked.formats, asked.optimizer)
    least = min(sum(plan_bytes(plan, sizes)["device"].values()) for _, plan in simple_plans(asked))
    assert fastest_plan(replace(asked, device_cap_bytes=least)) is not None


def test_without_host_memory_everything_is_kept_on_the_device() -> None:
    """There is room for the state and the inputs of all layers, though not for all that backward reads."""
    for cap in (40, 60, 120):
        asked = question("llama-3-8b", 8, sequence_tokens=65536, batch_sequences=2, host_cap_bytes=0)
        asked = replace(asked, device_cap_bytes=cap * GIB)
        assert fits(variant(asked, 4096, 1, "I"), asked)
        assert fastest_plan(asked) is not None, f"nothing fits {cap} GiB"


def test_optimizer_state_comes_while_other_leaves() -> None:
    """Through one slot a block's state can come only when that of the block before has left."""
    asked = question("gpt2", 12, sequence_tokens=64, batch_sequences=8, device_cap_bytes=int(0.6 * GIB))
    found = fastest_plan(asked)
    assert found is not None
    state = found.plan.optimizer_state
    fewer = replace(state, blocks=max(0, state.blocks - 1), passing=state.passing + 1)
    plan = replace(found.plan, optimizer_state=fewer)
    if fits(plan, asked):
        assert found.times.step_s <= OVERHEAD * times_of(plan, asked.model, asked.hardware).step_s


def test_clipping_does_not_exceed_the_cap() -> None:
    """With an update at the end, optimizer state passes through memory that only large activations can lend."""
    asked = question("llama-3-8b", 4, sequence_tokens=64, batch_sequences=1, clip=True, device_cap_bytes=6 * GIB)
    found = fastest_plan(asked)
    assert found is not None
    program = compile_plan(found.plan, asked.model)
    on_device = program.bytes_by_owner("device")
    borrowed = sum(buffer.bytes for buffer in program.buffers if buffer.borrowed)
    lent = on_device.pop("activations")
    assert sum(on_device.values()) + max(borrowed, lent) <= asked.device_cap_bytes
