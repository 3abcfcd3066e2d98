"""The strategy search: the best is the best of all, the same every time, and told with reasons."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model, load_stack
from flopwise.plan import fastest
from flopwise.plan.cluster.answer import answer
from flopwise.plan.cluster.candidates import batch_of, layouts, parallel_of, spreads
from flopwise.predict import step
from flopwise.predict.choose import settle_sizes
from flopwise.predict.cluster.costing import PLAIN, evaluate, least_seconds
from flopwise.predict.cluster.strategies import listed
from flopwise.predict.kernels.memory import usable_bytes
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel, parse_parallel, why_illegal
from flopwise.setup.setup import SettledSetup, Setup
from flopwise.work.formats import POLICIES
from flopwise.work.model import Model
from flopwise.work.work import RECOMPUTE_POLICIES, Recompute

POLICY: Recompute = "input"


def _small(**changes: object) -> Model:
    return load_model("llama-3-1b", {"layers": 6, **changes})


def _setup(model: Model, hardware: Hardware, batch: int, **changes: object) -> Setup:
    setup = Setup(
        model=model,
        hardware=hardware,
        sequence_tokens=1024,
        batch_sequences=batch,
        formats=POLICIES["bf16-mixed"],
    )
    return replace(setup, **changes)  # type: ignore[arg-type]


def _every_parallel(model: Model, devices: int, batch: int, tokens: int) -> list[Parallel]:
    """All legal set-ups by trying every combination of every field: slow and plain."""
    numbers = range(1, devices + 1)
    found = []
    for tensor, pipeline, context, expert in product(numbers, repeat=4):
        if devices % (tensor * pipeline * context):
            continue
        data = devices // (tensor * pipeline * context)
        flags = product((0, 1, 2, 3), (False, True), (False, True), range(1, 7), ("layers", "time"), (None, *numbers))
        for zero, sequence, reshard, chunks, balance, shard in flags:
            try:
                parallel = Parallel(
                    data=data,
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    expert=expert,
                    zero=zero,
                    sequence=sequence,
                    reshard=reshard,
                    chunks=chunks,
                    shard=shard,
                    schedule="interleaved" if chunks > 1 else "1f1b",
                    balance=balance,  # type: ignore[arg-type]
                )
            except FlopwiseError:
                continue
            if data <= batch and why_illegal(model, tokens, parallel) is None:
                found.append(parallel)
    return found


def _tried(model: Model, every: list[Parallel], hardware: Hardware, batch: int) -> list[tuple[float, bool]]:
    """Seconds and verdict of all set-ups with every micro-batch and every recompute policy."""
    shares = {parallel: -(-batch // parallel.data) for parallel in every}
    setups = [
        SettledSetup(
            model=model,
            hardware=hardware,
            parallel=parallel,
            sequence_tokens=1024,
            batch_sequences=batch,
            micro_batch_sequences=micro,
            formats=POLICIES["bf16-mixed"],
            recompute=policy,
        )
        for parallel, mine in shares.items()
        for micro in range(1, mine + 1)
        for policy in RECOMPUTE_POLICIES
        if parallel.chunks == 1 or -(-mine // micro) % parallel.pipeline == 0
    ]
    found = evaluate(listed(setups), hardware, PLAIN)
    return list(zip(found.step_s.tolist(), (found.device_bytes <= usable_bytes(hardware)).tolist(), strict=True))


@pytest.mark.parametrize(
    ("changes", "device", "devices", "batch"),
    [
        ({}, "a100-80gb", 4, 6),
        ({"layers": 9}, "rtx-4090", 3, 7),
        ({"experts": 4, "experts_per_token": 2}, "a100-80gb", 2, 4),
        ({"vocab": 500_000}, "h100-sxm", 6, 8),
    ],
)
def test_the_best_is_that_of_trying_all(changes: dict[str, object], device: str, devices: int, batch: int) -> None:
    """Also in what the search leaves out for being no better: other shard groups and micro-batches, `full`."""
    model, hardware = _small(**changes), load_hardware(device)
    found = fastest(_setup(model, hardware, batch), devices)
    every = _every_parallel(model, devices, batch, 1024)
    tried = _tried(model, every, hardware, batch)
    best = min(seconds for seconds, fits in tried if fits)
    assert len(tried) >= found.evaluated > 50
    assert found.options[0].step_s == pytest.approx(best, rel=1e-3)
    assert found.options[0].step_s >= best * (1 - 1e-9)


def test_an_option_is_what_a_prediction_of_it_says() -> None:
    model, hardware = _small(), load_hardware("h100-sxm")
    setup = _setup(model, hardware, 24)
    for option in fastest(setup, 16).options[:12]:
        asked = {name: getattr(option, name) for name in ("parallel", "recompute", "micro_batch_sequences")}
        prediction = step(replace(setup, **asked))
        assert prediction.step_s == pytest.approx(option.step_s, rel=1e-9)
        assert prediction.device_bytes.total == pytest.approx(option.device_bytes, rel=1e-6)
        assert prediction.fits


@pytest.mark.parametrize("stack", ["flopwise", "llm-foundry", "nanotron", "vtrain", "halved"])
def test_the_bound_is_never_above_the_time(stack: str) -> None:
    model, hardware = _small(), load_hardware("a100-80gb")
    halved = load_stack("nanotron").with_values({"products": 0.5, "streaming": 0.5})
    framework = halved if stack == "halved" else load_stack(stack)
    base, _ = settle_sizes(_setup(model, hardware, 20))
    for layout in layouts(model, 8, 1024):
        ways = spreads(model, hardware, 8, 20, layout, offload=True)
        batch = batch_of(base, layout, ways, policies=(POLICY, "none"), micro=None)
        bound = least_seconds(batch.listed, hardware, framework)
        assert (bound <= evaluate(batch.listed, hardware, framework).step_s * (1 + 1e-12)).all()


def test_the_same_question_has_the_same_answer() -> None:
    setup = _setup(_small(), load_hardware("h100-sxm"), 32)
    assert answer(setup, 16) == answer(setup, 16)


def test_options_fit_and_rise_and_differ() -> None:
    cap = 6 * 2**30
    found = fastest(_setup(_small(), load_hardware("a100-40gb"), 64, device_cap_bytes=cap), 8)
    assert 0 < found.timed <= found.fitting < found.evaluated
    times = [option.step_s for option in found.options]
    assert times == sorted(times)
    assert all(option.device_bytes <= cap for option in found.options)
    assert len({option.parallel for option in found.options}) == len(found.options)


def test_less_memory_is_never_faster_and_offload_never_slower() -> None:
    hardware = load_hardware("a100-40gb")
    roomy = fastest(_setup(_small(), hardware, 16), 4).options[0].step_s
    tight = _setup(_small(), hardware, 16, device_cap_bytes=5 * 2**30)
    assert fastest(tight, 4).options[0].step_s >= roomy
    assert fastest(tight, 4, offload=True).options[0].step_s <= fastest(tight, 4).options[0].step_s


def test_the_losers_say_where_they_lose() -> None:
    found = answer(_setup(_small(), load_hardware("h100-sxm"), 16), 8)
    assert found.losers
    for loser in found.losers:
        assert sum(loser.lost.values()) == pytest.approx(loser.slower, abs=1e-9)
        assert loser.slower >= 0
    more, half = found.what_if
    assert more.devices == 16
    assert half.capacity_bytes == more.capacity_bytes // 2
    assert more.option is not None
    assert more.option.parallel.devices == 16
    assert half.speed is not None
    assert half.speed <= 1


def test_nothing_fits_tells_what_would() -> None:
    setup = _setup(load_model("gpt-3-175b"), load_hardware("a100-80gb"), 64)
    with pytest.raises(FlopwiseError, match="no strategy fits gpt-3-175b on 8") as caught:
        answer(setup, 8)
    assert caught.value.exit_code == 1
    assert caught.value.why is not None
    assert "GiB" in caught.value.why
    assert "--offload" in str(caught.value.hint)


def test_too_many_devices_for_the_batch() -> None:
    with pytest.raises(FlopwiseError, match="cannot be spread over 7 devices"):
        fastest(_setup(load_model("lstm-lm"), load_hardware("a100-80gb"), 3), 7)


def test_labels_are_read_back() -> None:
    model, hardware = _small(experts=4, experts_per_token=2), load_hardware("h100-sxm")
    seen = 0
    for layout in layouts(model, 16, 1024):
        for spread in spreads(model, hardware, 16, 16, layout, offload=True):
            parallel = parallel_of(layout, spread)
            assert parse_parallel(parallel.label, 16) == parallel
            seen += 1
    assert seen > 500


def test_shards_of_one_rank_are_no_shards() -> None:
    assert parse_parallel("tp4 pp2 zero3 kept", 8) == Parallel(tensor=4, pipeline=2)


@pytest.mark.parametrize(
    ("words", "devices", "said"),
    [
        ("tp8 pp", 64, "cannot read 'pp'"),
        ("tp8 tp4", 64, "gives tensor twice"),
        ("tp7", 64, "is for 7 devices, not for 64"),
        ("dp2 tp2", 8, "is for 4 devices, not for 8"),
        ("zero4", 8, "ZeRO stage 4 does not exist"),
        ("tp99999999", 8, "cannot read"),
        ("sp", 8, "sequence parallelism"),
        ("tp0", 8, "tensor must be at least 1"),
        ("dp8 shard2", 8, "`shard` without zero"),
        ("dp8 balanced", 8, "without stages"),
        ("dp8 zero1 kept", 8, "without zero3"),
    ],
)
def test_words_that_cannot_be_read(words: str, devices: int, said: str) -> None:
    with pytest.raises(FlopwiseError, match=said):
        parse_parallel(words, devices)
