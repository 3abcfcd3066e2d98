"""The rule `dataflow`: its documented cases, every recorded run, its sizes, where activations go, what it refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.catalog.load import load_hardware, load_model
from flopwise.records.plan import Plan, Residency
from flopwise.references.dataflow.recorded import plan_as_recorded
from flopwise.references.dataflow.rule import RuleChoice, configure, placement, to_plan
from flopwise.references.dataflow.sizes import (
    attention_workspace_bytes,
    block_bytes,
    estimate_bytes,
    host_base,
    is_large,
    least_divisor,
    level_bytes,
    link_bytes_per_s,
    parameters,
)
from flopwise.references.dataflow.variants import RECORDED, VARIANTS, variant_of
from flopwise.references.published.offload import OffloadRun, read_offload
from flopwise.setup.hardware import Hardware
from flopwise.work.parameters import ENDS
from flopwise.work.transformer import Transformer

GIB, MIB = 2**30, 2**20


@cache
def shape(name: str = "llama-3-8b") -> Transformer:
    model = load_model(name)
    assert isinstance(model, Transformer)
    return model


@cache
def machine(name: str = "h100-sxm") -> Hardware:
    return load_hardware(name)


def configured(
    variant: str, host_gib: int, device_gib: int, tokens: int, *, model: str = "llama-3-8b", hardware: str = "h100-sxm"
) -> RuleChoice:
    return configure(
        shape(model),
        machine(hardware),
        sequence_tokens=tokens,
        device_bytes=device_gib * GIB,
        host_bytes=host_gib * GIB,
        variant=VARIANTS[variant],
    )


def of_run(run: OffloadRun, variant: str = RECORDED) -> RuleChoice:
    return configure(
        shape(run.model),
        machine(run.hardware),
        sequence_tokens=run.sequence_tokens,
        device_bytes=run.device_bytes,
        host_bytes=run.host_bytes,
        variant=VARIANTS[variant],
    )


# -- documents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "caps_and_tokens", "blocks", "slots_and_rounds", "levels"),
    [
        ("jul11", (178, 78, 65536), (9, 8), (35, 5), (73, 20, 0)),
        ("jul20", (144, 78, 65536), (9, 8), (35, 5), (53, 40, 0)),
        ("jul20", (70, 30, 8192), (5, 4), (5, 34), (6, 21, 0)),
        ("jul17", (75, 40, 8192), (10, 9), (9, 34), (9, 14, 0)),
        # That document still printed the numbers of 178 GiB beside 176; these are the rule's.
        ("jul17", (176, 78, 65536), (9, 8), (35, 5), (71, 22, 0)),
        ("jul23", (178, 78, 65536), (9, 8), (35, 3), (83, 10, 0)),
        ("jul23", (144, 78, 65536), (9, 8), (35, 3), (53, 40, 0)),
        ("jul23", (70, 30, 8192), (5, 4), (5, 19), (6, 21, 0)),
        ("head", (178, 78, 65536), (10, 10), (80, 7), (169, 7, 0)),
    ],
)
def test_documented_cases(
    variant: str,
    caps_and_tokens: tuple[int, int, int],
    blocks: tuple[int, int],
    slots_and_rounds: tuple[int, int],
    levels: tuple[int, int, int],
) -> None:
    found = configured(variant, *caps_and_tokens)
    assert (found.param_blocks, found.grad_blocks) == blocks
    assert (found.activation_slots, found.rounds_per_step) == slots_and_rounds
    assert (found.full, found.attention, found.context) == levels
    assert found.variant.name == variant


def test_the_first_document_in_full() -> None:
    found = configured("jul11", 178, 78, 65536)
    assert (found.chunk_tokens, found.chunks_per_sequence, found.chunks_per_round) == (16384, 4, 4)
    assert found.seqs_per_step * found.sequence_tokens == 320 * 1024
    assert found.head_chunk_tokens == 16384
    assert found.home_activations == 93
    assert found.placed_full == 73  # Alternating loses none.


def test_the_newest_variant_chunks_and_rounds() -> None:
    assert configured("head", 178, 78, 65536).chunks_per_round == 8
    found = configured("head", 70, 30, 8192)
    assert (found.chunk_tokens, found.head_chunk_tokens, found.rounds_per_step) == (8192, 1024, 111)
    assert configured("sep19", 70, 30, 8192).head_chunk_tokens == 8192
    assert configured("jul31", 70, 30, 8192).head_chunk_tokens == 2048


def test_variants_by_name() -> None:
    assert list(VARIANTS) == ["jul11", "jul17", "jul20", "jul23", "jul31", "sep19", "head"]
    assert variant_of("jul20") is VARIANTS[RECORDED]
    assert [variant.date for variant in VARIANTS.values()] == sorted(variant.date for variant in VARIANTS.values())
    for variant in VARIANTS.values():
        assert (variant.target_s is None) != (variant.overhead is None)
    with pytest.raises(FlopwiseError, match="did you mean jul20"):
        variant_of("jul2")


# -- recorded runs ----------------------------------------------------------------------------------------------------


def test_every_recorded_run_is_what_the_rule_decides() -> None:
    """All 591 that ran, of all source files, by the variant of July 20 alone."""
    runs = [run for run in read_offload() if run.succeeded]
    for run in runs:
        found = of_run(run)
        assert (found.chunk_tokens, found.activation_slots, found.home_activations) == (
            run.chunk_tokens,
            run.slots,
            run.home_activations,
        )
        assert (found.full, found.attention, found.context) == (run.n_full, run.n_attention, run.n_context)
        assert (found.rounds_per_step, found.seqs_per_step) == (run.rounds, run.sequences_per_step)
    assert len(runs) == 591


def test_recorded_bytes() -> None:
    """Host memory as printed: six digits of a 32-bit number of GiB. Device memory but for 80 kB of alignment."""
    lost = 0
    for run in read_offload():
        if not run.succeeded:
            continue
        found = of_run(run)
        precision = 1e-6 * GIB + run.used_host_bytes * 2**-23
        assert abs(found.used_host_bytes - run.used_host_bytes) < precision
        assert 0 < run.used_device_bytes - found.used_device_bytes < 80_000
        lost += found.placed_full < found.full
    assert lost == 55


def test_failed_runs_are_refused_but_three() -> None:
    outcomes: Counter[str] = Counter()
    accepted = []
    for run in read_offload():
        if run.succeeded:
            continue
        try:
            of_run(run)
        except FlopwiseError as error:
            assert error.exit_code == 1
            outcomes["device" if "device memory" in error.what else "host"] += 1
        else:
            accepted.append((run.model, run.sequence_tokens, run.host_bytes // GIB, run.device_bytes // GIB))
    assert outcomes == {"device": 94, "host": 81}
    # Why these failed is not told; two are the same set-up in two files.
    assert sorted(accepted) == [
        ("llama-3-8b", 524288, 256, 40),
        ("llama-3-8b", 524288, 256, 40),
        ("llama-3-8b", 524288, 356, 78),
    ]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != RECORDED])
def test_no_other_variant_gives_all_recorded_runs(variant: str) -> None:
    different = 0
    for run in read_offload():
        if not run.succeeded or (run.model, run.sequence_tokens) != ("llama-3-8b", 65536):
            continue
        try:
            found = of_run(run, variant)
        except FlopwiseError:
            different += 1
        else:
            different += (found.full, found.rounds_per_step) != (run.n_full, run.rounds)
    assert different > 0


def plan_of(run: OffloadRun, *, as_run: bool = True) -> Plan:
    return plan_as_recorded(run, shape(run.model), machine(run.hardware), as_run=as_run)


def test_recorded_plans() -> None:
    for run in read_offload()[::7]:
        if not run.succeeded:
            continue
        found = of_run(run)
        assert plan_of(run).saved("host")["full"] == found.placed_full
        meant = plan_of(run, as_run=False)
        assert meant == to_plan(found, shape(run.model), run.hardware, run.device_bytes, run.host_bytes)
        assert meant.tokens_per_step == run.sequences_per_step * run.sequence_tokens


def test_a_recorded_plan_of_other_numbers() -> None:
    """A run of a version that nobody knows: what it recorded counts."""
    run = next(run for run in read_offload() if run.succeeded and run.sequence_tokens == 65536 and run.slots == 35)
    other = replace(run, rounds=2, slots=30, n_full=50, n_attention=48, n_context=0)
    plan = plan_of(other, as_run=False)
    assert (plan.rounds_per_step, plan.activation_slots) == (2, 30)
    assert plan.saved("host") == {"full": 50, "attention": 48, "context": 0, "input": 0}
    with pytest.raises(FlopwiseError, match="127 recorded activations"):
        plan_of(replace(other, slots=29))


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_blocks() -> None:
    assert block_bytes(shape()) == 436_224_000
    assert block_bytes(shape("dataflow-15b")) == 436_224_000
    assert block_bytes(shape("dataflow-1b")) / MIB == pytest.approx(116.008, abs=1e-3)
    assert block_bytes(shape("dataflow-32b")) / MIB == pytest.approx(930.02, abs=5e-3)
    assert parameters(shape()) == 8_030_261_248


@pytest.mark.parametrize(
    ("model", "estimate", "levels"),
    [
        ("llama-3-8b", 94_208, (12_296, 20_616, 94_344)),
        ("dataflow-15b", 94_208, (12_296, 20_616, 94_344)),
        ("dataflow-1b", 51_200, (6_152, 10_376, 51_336)),
        ("dataflow-32b", 155_648, (14_344, 24_744, 155_816)),
    ],
)
def test_levels(model: str, estimate: int, levels: tuple[int, int, int]) -> None:
    found = level_bytes(shape(model), 16384)
    assert (found.context, found.attention, found.full) == tuple(16384 * level for level in levels)
    assert estimate_bytes(shape(model), 16384) == 16384 * estimate
    assert level_bytes(shape(model), 16384, 4).full == found.full + 65_536


def test_levels_are_aligned() -> None:
    odd = level_bytes(shape(), 123)
    assert odd.context % 256 == odd.attention % 256 == odd.full % 256 == 0
    assert odd.context > 123 * 12_296


def test_attention_workspace() -> None:
    assert workspace("h100-sxm", 65536) == 811_646_976
    assert workspace("h100-sxm", 8192) == 344_031_232
    # Sequences of 8k, two to a chunk: keys of one of them, padded by a tile for each.
    assert workspace("a100-80gb", 8192) == 344_031_232
    # Tiles of 96 keys on the 3090: 32,928 instead of 32,896 with one tile to spare.
    assert workspace("rtx-3090", 32768) - workspace("a100-80gb", 32768) == 2 * 8 * 32 * 128 * 4
    # Flash attention 2: statistics, keys and values for all heads, and a copy of dQ for each share of the SMs.
    padded = 16384 + 2 * 128
    expected = 32 * padded * 4 + 2 * 8192 * 32 * 128 * 2 + 3 * padded * 32 * 128 * 2 * 4
    assert workspace("rtx-5090", 8192) == expected


def workspace(hardware: str, tokens: int) -> int:
    return attention_workspace_bytes(shape(), machine(hardware), chunk_tokens=16384, sequence_tokens=tokens)


@pytest.mark.parametrize(
    ("variant", "tokens", "base_gib"),
    [("jul20", 8192, 19.12), ("jul20", 65536, 20.68), ("jul31", 8192, 12.16), ("head", 8192, 10.22)],
)
def test_base(variant: str, tokens: int, base_gib: float) -> None:
    found = configured(variant, 200, 60, tokens)
    assert sum(found.base_bytes.values()) / GIB == pytest.approx(base_gib, abs=5e-3)
    assert found.base_bytes["embedding and head"] / GIB == pytest.approx(7.83, abs=5e-3)


def test_host_base() -> None:
    for tokens, expected in ((16384, 54.21), (65536, 54.96)):
        assert sum(host_base(shape(), tokens_per_round=tokens).values()) / GIB == pytest.approx(expected, abs=5e-3)


def test_links_and_classes_of_devices() -> None:
    assert link_bytes_per_s(machine()) == 64 * GIB
    assert link_bytes_per_s(machine("a100-80gb")) == 32 * GIB
    large = {name: is_large(machine(name)) for name in ("h100-sxm", "h200", "a100-40gb", "rtx-3090", "rtx-5090")}
    assert large == {"h100-sxm": True, "h200": True, "a100-40gb": True, "rtx-3090": False, "rtx-5090": False}
    assert configured("jul20", 100, 24, 8192, model="dataflow-1b", hardware="rtx-5090").chunk_tokens == 8192


@given(number=st.integers(1, 10**6), least=st.integers(1, 10**6))
def test_divisors(number: int, least: int) -> None:
    found = least_divisor(number, least)
    assert number % found == 0
    assert found >= min(least, number)
    assert not any(number % other == 0 for other in range(least, min(found, least + 200)))


# -- placement and plans ----------------------------------------------------------------------------------------------


def test_placement_in_windows() -> None:
    """27 that leave before 5 slots: five windows of one full save each, the sixth in what follows them."""
    found = configured("jul20", 70, 30, 8192)
    assert (found.full, found.full_per_window, found.placed_full) == (6, 1, 6)
    assert "".join(placement(found, 32)) == "aaaaf" + "faaaa" + "aaaaf" + "faaaa" + "aaaaf" + "fa" + "FFFFF"


def test_full_saves_that_the_trainer_loses() -> None:
    """1B of 32k tokens with 16/16 GiB: 15 windows of two, four full saves, and nothing that follows the windows."""
    found = configured("jul20", 16, 16, 32768, model="dataflow-1b")
    assert (found.full, found.attention, found.activation_slots, found.placed_full) == (4, 26, 2, 0)
    assert Counter("".join(placement(found, 16, as_run=True))) == {"a": 30, "F": 2}
    assert placement(found, 16) == ("aa",) * 13 + ("ff", "ff", "FF")


def test_placement_of_the_first_variant_alternates() -> None:
    found = configured("jul11", 178, 78, 65536)
    assert "".join(placement(found, 32)) == "fa" * 20 + "f" * 53 + "F" * 35


def test_context_goes_to_the_earliest_chunks() -> None:
    found = configured("jul20", 464, 77, 2**20)
    assert (found.full, found.attention, found.context) == (0, 102, 1929)
    rows = placement(found, 32)
    for row in rows[:31]:
        leaving = row.rstrip("F")
        assert leaving == "c" * leaving.count("c") + "a" * leaving.count("a")
    assert Counter("".join(rows)) == {"c": 1929, "a": 102, "F": 17}
    counts = {row.count("c") for row in rows[:31]}
    assert max(counts) - min(counts) <= 1


@given(data=st.data())
def test_placement_has_the_configured_numbers(data: st.DataObject) -> None:
    layers, per_sequence = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
    chunks = per_sequence * data.draw(st.integers(1, 3))
    total = layers * chunks
    slots = data.draw(st.integers(1, total))
    home = total - slots
    first = data.draw(st.integers(0, home))
    context = data.draw(st.sampled_from([0, home - first]))
    full, attention = (0, first) if context else (first, home - first)
    windows = home // slots
    configuration = replace(
        configured("jul20", 70, 30, 8192),
        variant=VARIANTS[data.draw(st.sampled_from(list(VARIANTS)))],
        layers=layers,
        chunks_per_sequence=per_sequence,
        chunks_per_round=chunks,
        activation_slots=slots,
        home_activations=home,
        full=full,
        attention=attention,
        context=context,
        full_per_window=min(full // windows, slots) if windows else 0,
    )
    rows = placement(configuration, layers)
    letters = Counter("".join(rows))
    assert (letters["f"], letters["a"], letters["c"], letters["F"]) == (full, attention, context, slots)
    assert [len(row) for row in rows] == [chunks] * layers
    assert "".join(rows).endswith("F" * slots)
    as_run = Counter("".join(placement(configuration, layers, as_run=True)))
    assert as_run["f"] <= full
    assert as_run["f"] + as_run["a"] == full + attention
    assert (as_run["c"], as_run["F"]) == (context, slots)


def test_a_placement_for_another_number_of_layers() -> None:
    with pytest.raises(FlopwiseError, match="5 activations that stay and 27 that leave are not 31"):
        placement(configured("jul20", 70, 30, 8192), 31)


def test_a_plan() -> None:
    found = configured("jul20", 144, 78, 65536)
    plan = to_plan(found, shape(), "h100-sxm", 78 * GIB, 144 * GIB)
    assert plan.weights == Residency(blocks=0, passing=9, ends=ENDS)
    assert plan.gradients == Residency(blocks=0, passing=8, ends=ENDS)
    assert plan.optimizer_state == Residency(blocks=0, passing=found.optimizer_blocks, ends=ENDS)
    assert 1 <= found.optimizer_blocks <= 32
    assert (plan.rule, plan.precision, plan.attention) == ("dataflow jul20", "bf16", "chunk")
    assert (plan.update_place, plan.update_when, plan.host_copies) == ("device", "end", True)
    assert plan.tokens_per_step == 5 * 65536
    assert plan.saved("host") == {"full": 53, "attention": 40, "context": 0, "input": 0}
    assert plan.saved("device")["full"] == plan.activation_slots == 35


def test_what_fits_whole_stays() -> None:
    found = configured("jul20", 40, 78, 8192, model="dataflow-1b")
    assert (found.param_blocks, found.grad_blocks, found.home_activations) == (16, 16, 0)
    plan = to_plan(found, shape("dataflow-1b"), "h100-sxm", 78 * GIB, 40 * GIB)
    assert plan.weights == plan.gradients == Residency(blocks=16, passing=0, ends=ENDS)


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "device", "expected"),
    [
        (144, 20, "refuses 20.0 GiB of device memory"),
        (64, 78, "refuses 64.0 GiB of host memory"),
        (1, 78, "refuses 1.00 GiB of host memory"),
    ],
)
def test_caps_that_are_too_small(host: int, device: int, expected: str) -> None:
    with pytest.raises(DoesNotFit) as caught:
        configured("jul20", host, device, 65536)
    assert expected in caught.value.what
    assert caught.value.exit_code == 1
    assert caught.value.place == ("device" if device == 20 else "host")
    assert caught.value.needed_bytes is not None
    # The hint's cap is enough.
    assert caught.value.hint is not None
    option, size = caught.value.hint.split()
    given_gib = int(size.removesuffix("GiB"))
    assert 0 <= given_gib * 2**30 - caught.value.needed_bytes < 2**30
    configured("jul20", *((given_gib, device) if option == "--host-mem" else (host, given_gib)), 65536)


def test_more_activations_than_the_pad_has_room_for() -> None:
    """Each is 136 bytes a token larger than reckoned: some 90 of them use up the pad."""
    with pytest.raises(FlopwiseError, match="refuses") as caught:
        for device in range(100, 140):
            configured("jul20", 1000, device, 2**20, model="dataflow-1b", hardware="h200")
    assert "reckons smaller" in str(caught.value)


@pytest.mark.parametrize(
    "model", ["mixtral-8x7b", "gpt2", "bert-base", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "llama-3-1b", "mpt-7b"]
)
def test_models_that_it_has_no_kernels_for(model: str) -> None:
    with pytest.raises(FlopwiseError, match="the rule `dataflow` cannot configure"):
        configured("jul20", 200, 78, 8192, model=model)


def test_devices_that_it_is_not_known_for() -> None:
    with pytest.raises(FlopwiseError, match="is not known for l40s"):
        configured("jul20", 200, 40, 8192, hardware="l40s")
    unlinked = replace(machine(), link=None)
    with pytest.raises(FlopwiseError, match="does not know the link of h100-sxm"):
        link_bytes_per_s(unlinked)


def test_sequences_of_no_tokens() -> None:
    with pytest.raises(FlopwiseError, match="sequence_tokens must be at least 1"):
        configured("jul20", 200, 40, 0)
