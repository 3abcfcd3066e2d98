"""Memory of the streaming executor: taken once, as planned, and every allocation of a step within the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import dtype  # noqa: E402

from flopwise.base.errors import FlopwiseError  # noqa: E402
from flopwise.catalog.load import load_hardware, load_model  # noqa: E402
from flopwise.engine.streaming.executor import StreamingExecutor  # noqa: E402
from flopwise.engine.streaming.layout import SavedTensors, fields_in_order, state_layout  # noqa: E402
from flopwise.engine.streaming.player import spare_under_cap  # noqa: E402
from flopwise.engine.streaming.updates import numbers_by_part  # noqa: E402
from flopwise.plan import CappedSetup, compile_plan, make_plan  # noqa: E402
from flopwise.plan.device.memory import plan_bytes  # noqa: E402
from flopwise.plan.program.sizes import level_bytes, sizes_of  # noqa: E402
from flopwise.predict.kernels.memory import LIBRARY_WORKSPACE_BYTES  # noqa: E402
from flopwise.records.plan import LEVELS, Plan, Residency  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.adapters import Adapters  # noqa: E402
from flopwise.work.describe import describe  # noqa: E402
from flopwise.work.formats import parse_formats  # noqa: E402
from flopwise.work.latent import LatentAttention  # noqa: E402
from flopwise.work.optimizers import OPTIMIZERS, Optimizer, piece_bytes, piece_counts  # noqa: E402
from flopwise.work.parameters import ENDS, parameters_of  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.tiny_models import TINY, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    CPU,
    any_levels,
    any_residency,
    cut_plan,
    everything_stays,
    executor_for,
    random_batch,
)

MIB = 2**20
KERNELS_BYTES = 13 * MIB
"""What kernels take for a block, a tile or a piece of theirs, whatever the sizes: far below what libraries are left."""


# -- where things lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16-amp"])
@pytest.mark.parametrize("family", TINY)
def test_what_is_saved_fits_its_room_and_begins_where_loads_may(family: str, precision: str) -> None:
    formats = parse_formats(precision)
    models = (TINY[family], wide(TINY[family]))
    for whole, kind in [(model, kind) for model in models for kind in model.kinds]:
        saved = SavedTensors(describe(kind, TOKENS), formats)
        sizes = sizes_of(whole, TOKENS, formats, "adamw")
        for level in LEVELS:
            for tokens in (1, 2, 7, 19, 3 * 19, 64):
                fields = list(saved.fields(level, tokens).values())
                end = 0
                for field in fields:
                    assert field.start == end
                    assert field.start % field.dtype.itemsize == 0
                    end += field.bytes
                    # Kernels load sixteen bytes at once of rows that are a multiple of it.
                    if saved.each[field.name] * field.dtype.itemsize % 16 == 0:
                        assert field.start % 16 == 0
                assert end <= level_bytes(sizes, level, tokens)
                assert [field.name for field in fields if field.name == "input"]


@given(
    st.lists(st.tuples(st.integers(1, 99), st.sampled_from([torch.bfloat16, torch.float32, torch.float64])), max_size=9)
)
def test_fields_begin_at_multiples_of_their_numbers(wanted: list[tuple[int, dtype]]) -> None:
    fields = fields_in_order((str(index), *entry) for index, entry in enumerate(wanted))
    assert sum(field.bytes for field in fields.values()) == sum(count * kind.itemsize for count, kind in wanted)
    for field in fields.values():
        assert field.of(torch.zeros(10_000, dtype=torch.uint8)).numel() == field.elements


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp32"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_fill_a_piece_exactly(optimizer: Optimizer, precision: str) -> None:
    formats, model = parse_formats(precision), wide(TINY["gpt2"], qkv_bias=True, hidden=320, head_dim=40)
    for part, numbers in numbers_by_part(parameters_of(model, 8), formats).items():
        pieces = piece_counts(numbers.parameters, optimizer, 70_001) if isinstance(part, str) else [numbers.count]
        assert sum(pieces) == numbers.count
        first = 0
        for count in pieces:
            found = state_layout(numbers.parameters, optimizer, formats, first, count)
            taken = sorted((each.start, each.start + each.bytes) for one in found for each in one.fields.values())
            assert not taken or taken[0][0] == 0
            assert all(one[1] == two[0] for one, two in pairwise(taken))
            bytes_ = piece_bytes(numbers.parameters, optimizer, formats, first, count)
            assert bytes_ == max((end for _, end in taken), default=0)
            assert [one.what.first for one in found] == [first, *(one.what.last for one in found[:-1])]
            first += count


# -- as planned ------------------------------------------------------------------------------------------------------


def left_of(executor: StreamingExecutor) -> int:
    """Of the plan's device memory, what the slab leaves free for libraries."""
    left = executor.slabs.left_to_libraries
    return sum(left.get(buffer.role, 0) for buffer in executor.program.buffers if buffer.place == "device")


def assert_as_planned(plan: Plan, model: Transformer, executor: StreamingExecutor) -> None:
    program = executor.program
    room = executor.slabs
    planned_bytes = plan_bytes(
        plan, sizes_of(model, plan.sequence_tokens, parse_formats(plan.precision), plan.optimizer)
    )
    totals = {place: sum(owners.values()) for place, owners in planned_bytes.items()}
    assert room.device_slab.numel() == totals["device"] - left_of(executor)
    assert room.host_slab.numel() == totals["host"]
    rows = executor.memory()
    for place, owners in planned_bytes.items():
        found = {row.owner: row for row in rows if row.place == place}
        assert {owner: row.planned_bytes for owner, row in found.items() if owner != "unaccounted"} == owners
        assert sum(row.planned_bytes for row in found.values()) == totals[place]
        if owners:
            assert found["unaccounted"].measured_bytes == 0
        assert all(0 <= row.measured_bytes <= row.planned_bytes for row in found.values())
        assert program.bytes_by_owner(place) == owners


@settings(max_examples=40)
@given(st.data())
def test_rows_add_up_for_any_plan(data: st.DataObject) -> None:
    def pick(options: Any) -> Any:
        return data.draw(st.sampled_from(list(options)))

    model = replace(TINY[pick(("llama", "qwen3", "gpt2", "bert", "bert-masked"))], layers=pick((1, 3)))
    attention = pick(("chunk", "sequence")) if model.causal else "sequence"
    plan = cut_plan(model, sequence=TOKENS, chunk=pick((19, 9)), letters="F", attention=attention)
    plan = replace(
        plan, precision=pick(("bf16", "fp32", "bf16-amp", "bf16-mixed")), update_when=pick(("backward", "end"))
    )
    plan = any_residency(any_levels(plan, pick), pick)
    executor = executor_for(plan, model, parameters(random_module(model)), Training(steps=1))
    assert_as_planned(plan, model, executor)
    executor.step(random_batch(model, plan.sequences_per_round, TOKENS, 0), 0)
    executor.evaluate([random_batch(model, 1, TOKENS, 0)])
    assert_as_planned(plan, model, executor)


def test_attention_takes_more_heads_at_once_where_the_cap_leaves_room() -> None:
    model = TINY["llama"]
    plan = everything_stays(model, sequence=TOKENS)
    program = compile_plan(plan, model)
    planned = sum(program.bytes_by_owner("device").values())
    for cap, spare in (
        (planned - 1, 0),
        (planned, 0),
        (planned + 1000, 500),
        (planned + (1 << 40), 1 << 29),
    ):
        assert spare_under_cap(replace(plan, device_memory_bytes=cap), program) == spare


# -- every allocation ------------------------------------------------------------------------------------------------


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that was allocated at one time within a call, by every allocation and free of torch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def wide(model: Transformer, **changes: Any) -> Transformer:
    """The same family with usual proportions."""
    settled: dict[str, Any] = {
        **{"layers": 2, "hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 32, "ffn": 704, "vocab": 5003},
        "context": 8192,
    }
    if model.positions == "learned":
        settled |= {"position_rows": 8192, "kv_heads": 8}
    if model.latent is not None:
        settled |= {"rotary_dim": 8, "latent": LatentAttention(rank=64, value_dim=24, query_rank=96), "kv_heads": 8}
    return replace(model, **(settled | changes))


def assert_within_plan(plan: Plan, model: Transformer, *, training: Training | None = None) -> None:
    """A step and an evaluation take nothing beyond what the plan leaves to libraries, nor most of that."""
    executor = StreamingExecutor(plan, compile_plan(plan, model), model, training or Training(steps=1), device=CPU)
    executor.clear_moments()
    draw = torch.Generator().manual_seed(0)
    executor.set_weights({each.name: 0.02 * torch.randn(each.shape, generator=draw) for each in executor.parameters})
    batch = random_batch(model, plan.sequences_per_round * plan.rounds_per_step, plan.sequence_tokens, 0)
    sizes = sizes_of(model, plan.sequence_tokens, parse_formats(plan.precision), plan.optimizer)
    total = sum(plan_bytes(plan, sizes)["device"].values())
    room = min(total - executor.slabs.device_slab.numel(), left_of(executor) - LIBRARY_WORKSPACE_BYTES + KERNELS_BYTES)
    for call in (lambda: executor.step(batch, 0), lambda: executor.evaluate([batch])):
        # Tables of the kernels and of the model are made once: only what no longer makes them may have to do without.
        assert peak_bytes(call) <= room or peak_bytes(call) <= room
    assert total <= plan.device_memory_bytes


def shapes(model: Transformer, tokens: int, **changes: Any) -> Iterator[Plan]:
    yield everything_stays(model, sequence=tokens, saves=("i", "F"), **changes)
    for attention in () if model.uncut else ("chunk", "sequence") if model.causal else ("sequence",):
        yield cut_plan(model, sequence=tokens, chunk=tokens // 4, letters="iFa", attention=attention, **changes)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_allocation_of_a_step_is_beyond_the_plan(family: str, precision: str) -> None:
    model = wide(TINY[family])
    plan = next(shapes(model, 1024, precision=precision, head_chunk_tokens=512))
    assert_within_plan(plan, model)


@pytest.mark.parametrize("precision", ["bf16-amp,base=bf16", "bf16-amp,base=nf4", "fp32"])
@pytest.mark.parametrize("magnitudes", [False, True])
def test_adapters_allocate_nothing_beyond_the_plan(magnitudes: bool, precision: str) -> None:
    model = replace(wide(TINY["llama-biased"]), adapters=Adapters(rank=16, alpha=32.0, magnitudes=magnitudes))
    plan = next(shapes(model, 1024, precision=precision, head_chunk_tokens=512))
    assert_within_plan(plan, model)


def test_an_activation_has_room_for_the_matrices_of_both_its_sums() -> None:
    """Gate's and up's at once, where no other matrix is as large."""
    model = replace(wide(TINY["llama"]), adapters=Adapters(rank=64, alpha=8.0))
    plan = everything_stays(model, sequence=32, precision="bf16-amp,base=bf16", head_chunk_tokens=16)
    executor = executor_for(plan, model, {}, Training(steps=1))
    executor.set_weights({each.name: 0.02 * torch.randn(each.shape) for each in executor.parameters})
    executor.step(random_batch(model, 1, 32, 0), 0)
    assert executor.player.arena.peak_beside_bytes == 0


LONG_FAMILIES = ("llama-biased", "gpt2", "bert-masked")
"""They hold what the others have."""
SHORT_CASES = (
    *((family, "bf16") for family in LONG_FAMILIES),
    *(("llama-biased", "bf16-mixed"), ("bert-masked", "bf16-mixed")),
    *(("llama", "fp32"), ("mistral", "bf16"), ("qwen3", "fp32"), ("bert", "bf16")),
    *(("qwen2_moe", "bf16"), ("glm4_moe", "fp32")),
    *(("qwen3_5", "bf16"), ("qwen3_next", "fp32"), ("mamba2", "bf16"), ("nemotron_h", "fp32")),
)
"""Every family and every format; what a format adds is found with any family, so not all of them are crossed.

At 1024 tokens the scores of attention and the logits are still more than kernels may take beside the plan; how it grows
with the sequence is found with the long ones below.
"""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), SHORT_CASES)
def test_no_allocation_of_any_family_is_beyond_the_plan(family: str, precision: str) -> None:
    model = wide(TINY[family])
    for plan in shapes(model, 1024, precision=precision, head_chunk_tokens=256):
        assert_within_plan(plan, model)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-20b"])
@pytest.mark.parametrize("level", ["f", "I"])
def test_rows_of_experts_have_room_in_one_piece(name: str, level: str) -> None:
    """With the shares of the released models a gradient of all experts' rows is most of the room."""
    big = load_model(name)
    assert isinstance(big, Transformer)
    model = replace(
        big, layers=2, hidden=big.hidden // 16, ffn=big.ffn // 16, vocab=512, experts=16, head_dim=big.head_dim // 4,
        heads=big.heads // 4, kv_heads=big.kv_heads // 4, window=None, other_blocks=(), other_attention=None,
    )  # fmt: skip
    plan = everything_stays(model, sequence=64, sequences=4, saves=(level,) * 2, precision="bf16")
    executor = executor_for(plan, model, parameters(random_module(model)), packs=True)
    executor.step(random_batch(model, 4, 64, 0), 0)
    assert executor.player.arena.peak_bytes > 0 == executor.player.arena.peak_beside_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "cut"),
    [("llama-biased", False), ("llama-biased", True), ("gpt2", False), ("bert-masked", True)],
    ids=["llama-biased-whole", "llama-biased-cut", "gpt2-whole", "bert-masked-cut"],
)
def test_no_allocation_of_a_long_sequence_is_beyond_the_plan(family: str, cut: bool) -> None:
    """Where attention reads all of it; formats change what is allocated, not how it grows with the sequence."""
    model = wide(TINY[family])
    plans = list(shapes(model, 4096, precision="fp32", head_chunk_tokens=1024))
    assert_within_plan(plans[-1 if cut else 0], model)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_no_allocation_of_a_long_wide_step_is_beyond_the_plan(precision: str) -> None:
    # What kernels take no longer grows here: with more tokens no smaller excess for each of them would be found.
    model = wide(TINY["llama"], layers=1, hidden=512, heads=16, kv_heads=8)
    stays = everything_stays(model, sequence=4096, saves=("i",), precision=precision, head_chunk_tokens=1024)
    assert_within_plan(stays, model)


def test_updates_of_what_passes_are_within_the_plan_too() -> None:
    model = wide(TINY["llama"], vocab=20011)
    passing: dict[str, Any] = dict.fromkeys(("weights", "gradients", "optimizer_state"), Residency(blocks=0, passing=1))
    training = Training(steps=1, clip_norm=1.0, stochastic_rounding=True)
    plan = everything_stays(
        model, sequence=512, saves=("i", "i"), precision="bf16", head_chunk_tokens=256, update_when="end", **passing
    )
    assert_within_plan(plan, model, training=training)


@pytest.mark.slow
@pytest.mark.parametrize("cap_mib", [70, 110, 400])
def test_a_plan_found_under_a_cap_never_takes_more(cap_mib: int) -> None:
    model = wide(TINY["llama"], layers=4)
    question = CappedSetup(
        model=model,
        hardware=load_hardware("h200"),
        sequence_tokens=2048,
        device_cap_bytes=cap_mib * MIB,
        host_cap_bytes=1024 * MIB,
        batch_sequences=2,
    )
    try:
        found = make_plan(question, helps=False)
    except FlopwiseError as error:
        pytest.fail(f"{error.what}: {error.why}")
    assert found.plan.device_memory_bytes == cap_mib * MIB
    assert_within_plan(found.plan, model)
    if cap_mib >= 400:
        assert found.plan.weights.ends == ENDS
