"""Predictions and plans of sequences of uneven length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model, model_table
from flopwise.plan.device.explain import make_plan
from flopwise.plan.device.forecast import forecast
from flopwise.predict.step import step, steps
from flopwise.setup.parallel import shard_all
from flopwise.setup.setup import CappedSetup, Setup
from flopwise.setup.written import CellSetup, cell_id, read_setup, write_setup
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.lengths import Lengths, count_lengths

BERT, H200 = load_model("bert-base"), load_hardware("h200")
SOME = [3, 128, 17, 17, 40, 60, 2, 9]


def asked(lengths: Lengths | None, **changes: object) -> Setup:
    given: dict[str, object] = {
        "sequence_tokens": 128,
        "batch_sequences": 8,
        "micro_batch_sequences": 8,
        "recompute": "none",
    }
    return Setup(model=BERT, hardware=H200, lengths=lengths, **given | changes)  # type: ignore[arg-type]


def test_a_batch_of_just_these_sequences_has_their_flops() -> None:
    packed, padded = steps([asked(count_lengths(SOME, "packed")), asked(count_lengths(SOME, "padded"))])
    needed = sum(describe(BERT, tokens).model_flops("causal") for tokens in SOME)
    executed = sum(describe(BERT, tokens).total_hardware_flops("causal", "none") for tokens in SOME)
    assert packed.model_flops == padded.model_flops == needed
    assert packed.hardware_flops == executed
    assert padded.hardware_flops == 8 * describe(BERT, 128).total_hardware_flops("causal", "none")
    for found in (packed, padded):
        assert found.batch_tokens == sum(SOME)
        assert found.tokens_per_s == pytest.approx(sum(SOME) / found.step_s)
        assert found.padded_tokens_per_s == pytest.approx(8 * 128 / found.step_s)
        assert sum(op.flops for op in found.ops) == found.hardware_flops
        assert sum(op.model_flops for op in found.ops) == found.model_flops


def test_padding_takes_as_long_as_tokens() -> None:
    even, padded = steps([asked(None), asked(count_lengths(SOME, "padded"))])
    assert padded.step_s == even.step_s
    assert padded.device_bytes == even.device_bytes
    assert even.padded_tokens_per_s is None
    assert even.lengths is None


def test_sequences_of_full_length_take_as_long_however_they_lie() -> None:
    even, packed = steps([asked(None), asked(count_lengths([128]))])
    assert packed.step_s == pytest.approx(even.step_s, rel=1e-12)
    assert packed.model_flops == even.model_flops
    assert packed.padded_tokens_per_s is None


def test_less_padding_is_less_time() -> None:
    # Of a batch that keeps the host ahead.
    large = {"batch_sequences": 512, "micro_batch_sequences": 64}
    found = steps([asked(count_lengths(SOME[2:], layout), **large) for layout in ("packed", "longest", "padded")])
    assert found[0].step_s < found[1].step_s < found[2].step_s
    # The batch that takes the most has the longest of them everywhere.
    assert found[0].device_bytes == found[1].device_bytes
    assert found[1].device_bytes.total < found[2].device_bytes.total
    shorter = step(asked(count_lengths([3, 40])))
    assert shorter.device_bytes.total < step(asked(count_lengths(SOME))).device_bytes.total
    assert any("40 tokens" in note for note in shorter.notes)


def test_a_tile_of_queries_is_the_least_that_attention_computes() -> None:
    def attention_s(lengths: list[int]) -> float:
        return next(op.time_s for op in step(asked(count_lengths(lengths))).ops if op.name == "attention")

    assert attention_s([5]) == pytest.approx(attention_s([100]), rel=0.02)
    assert attention_s([5]) == pytest.approx(attention_s([128]), rel=0.1)


def test_several_devices_fill_sequences_up() -> None:
    spread = shard_all(4)
    found = steps(
        [
            # Replayed: of a batch so small the host's starts, which padding does not change, would decide.
            asked(lengths, parallel=spread, micro_batch_sequences=2, cuda_graphs=True)
            for lengths in (None, count_lengths(SOME, "padded"), count_lengths(SOME, "longest"))
        ]
    )
    assert found[1].step_s == found[0].step_s
    assert found[2].step_s < found[1].step_s
    assert found[2].tokens_per_s > found[1].tokens_per_s
    with pytest.raises(FlopwiseError, match="one device"):
        asked(count_lengths(SOME), parallel=spread, micro_batch_sequences=2)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(FlopwiseError, match="longer than --seq"):
        asked(count_lengths([129]))
    with pytest.raises(FlopwiseError, match="one length"):
        Setup(model=load_model("lstm-lm"), hardware=H200, lengths=count_lengths([3], "padded"))
    with pytest.raises(FlopwiseError, match="cannot be packed"):
        asked(count_lengths(SOME), attention="eager")
    with pytest.raises(FlopwiseError, match="no padding"):
        capped(count_lengths(SOME, "padded"))


def test_lengths_are_part_of_what_is_asked() -> None:
    setup = asked(count_lengths(SOME), formats=parse_formats("bf16"))
    words = write_setup(setup)
    assert words["lengths"] == "packed:2,3,9,17x2,40,60,128"
    plain = CellSetup(
        model=model_table(BERT),
        hardware="h200",
        devices=1,
        sequence_tokens=128,
        batch_sequences=8,
        micro_batch_sequences=8,
        precision="bf16",
    )
    other = replace(plain, lengths=words["lengths"])
    assert cell_id(plain) != cell_id(other)
    assert read_setup(other, Setup, BERT, H200).lengths == setup.lengths


# -- plans -----------------------------------------------------------------------------------------------------------


def capped(lengths: Lengths | None, **changes: object) -> CappedSetup:
    given: dict[str, object] = {"sequence_tokens": 128, "batch_sequences": 64, "device_cap_bytes": 100 << 30}
    return CappedSetup(model=BERT, hardware=H200, lengths=lengths, **given | changes)  # type: ignore[arg-type]


def test_a_plan_holds_any_batch_and_is_timed_for_the_mean_one() -> None:
    lengths = count_lengths(SOME)
    even, packed = (make_plan(capped(each), helps=False) for each in (None, lengths))
    assert packed.plan.lengths == lengths.words
    assert packed.forecast.step_s < even.forecast.step_s
    same = replace(packed.plan, lengths=None)
    on_full = forecast(same, BERT, H200)
    assert packed.forecast.device_bytes == on_full.device_bytes
    assert packed.forecast.model_flops == round(
        64 / 8 * sum(describe(BERT, tokens).model_flops("causal") for tokens in SOME)
    )
    assert packed.forecast.tokens_per_s * packed.forecast.step_s == pytest.approx(64 / 8 * sum(SOME))
    assert packed.forecast.padded_tokens_per_s == pytest.approx(64 * 128 / packed.forecast.step_s)


def test_a_plan_that_cuts_sequences_computes_their_padding() -> None:
    model = load_model("llama-3-1b")
    setup = capped(None, sequence_tokens=131072, batch_sequences=1, device_cap_bytes=30 << 30, host_cap_bytes=100 << 30)
    plan = make_plan(replace(setup, model=model), helps=False).plan
    assert plan.chunks_per_sequence > 1
    uneven = replace(plan, lengths=count_lengths([50_000]).words)
    even, found = (forecast(each, model, H200) for each in (plan, uneven))
    assert found.step_s == even.step_s
    assert found.hardware_flops == even.hardware_flops
    assert found.model_flops == describe(model, 50_000).model_flops("causal")
    assert found.tokens_per_s * found.step_s == pytest.approx(50_000)


@pytest.mark.parametrize("words", ["padded:5", "packed:129", "packed:x"])
def test_a_plan_with_other_lengths_is_refused(words: str) -> None:
    plan = make_plan(capped(None, batch_sequences=8), helps=False).plan
    with pytest.raises(FlopwiseError):
        replace(plan, lengths=words)
