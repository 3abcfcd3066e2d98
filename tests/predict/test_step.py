"""A whole predicted step: sums, orders, and the plain loop that the vectorised path must equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import decode, plain
from flopwise.catalog.load import hardware_names, load_hardware, load_model, model_names
from flopwise.predict import step
from flopwise.predict.choose import choose
from flopwise.predict.kernels.memory import RESERVED_BYTES, device_bytes, usable_bytes
from flopwise.records.prediction import Prediction
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import Setup, batch_in_sequences
from flopwise.setup.trained import TrainedWords
from flopwise.work.formats import POLICIES, parse_formats
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES, Recompute
from tests.support.strategies import recurrent, transformers

SMALL = Setup(model=load_model("llama-3-1b"), hardware=load_hardware("h200"), sequence_tokens=128, batch_sequences=4)


def check_sums(prediction: Prediction) -> None:
    assert sum(op.time_s for op in prediction.ops) == pytest.approx(prediction.step_s)
    assert sum(op.share for op in prediction.ops) == pytest.approx(1)
    assert sum(op.flops for op in prediction.ops) == prediction.hardware_flops
    assert sum(op.model_flops for op in prediction.ops) == prediction.model_flops
    for op in prediction.ops:
        # Waiting for the host belongs to no phase.
        in_phases = op.forward_s + op.backward_s + op.recompute_s + op.update_s
        assert in_phases == pytest.approx(op.time_s if op.kind != "other" else 0.0)
        assert op.time_s > 0
        assert op.bytes >= 0
        if op.kind == "gemm" and prediction.n_active_params == prediction.n_params:
            # (Of a mixture with few tokens only the chosen experts are read, fewer than perfect caching of all.)
            assert op.bytes >= 0.999 * op.least_bytes
        assert op.bound in (("host",) if op.kind == "other" else ("compute", "memory", "cache", "launch"))
    others = [op.name for op in prediction.ops if op.kind == "other"]
    assert others == (["host"] if prediction.bound == "host" else [])
    memory = prediction.device_bytes
    owners = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.logits, memory.workspace)
    assert memory.total == sum(owners)
    assert all(size > 0 for size in owners if size != memory.optimizer)
    assert prediction.fits == (memory.total <= prediction.device_capacity_bytes)
    assert 0 < prediction.mfu <= prediction.hfu * (1 + 1e-12)
    assert prediction.hfu < 1


@pytest.mark.parametrize("device", hardware_names())
def test_every_device_predicts_and_sums(device: str) -> None:
    for name in ("llama-3-8b", "bert-base", "mixtral-8x7b"):
        check_sums(step(replace(SMALL, model=load_model(name), hardware=load_hardware(device))))


@pytest.mark.parametrize("name", model_names())
def test_every_model_predicts_and_sums(name: str) -> None:
    model = load_model(name)
    setup = replace(SMALL, model=model, sequence_tokens=min(model.context, 512), batch_sequences=3)
    check_sums(step(setup))
    check_sums(step(replace(setup, hardware=load_hardware("v100")), convention="palm"))


@settings(max_examples=60, deadline=None)
@given(
    model=transformers() | recurrent(),
    device=st.sampled_from(["h200", "mi300x", "v100", "tpu-v5e"]),
    batch=st.integers(1, 9),
    micro=st.integers(1, 9),
    recompute=st.sampled_from([None, *RECOMPUTE_POLICIES]),
    attention=st.sampled_from(["flash", "eager"]),
    fusion=st.sampled_from(["fused", "eager"]),
    optimizer=st.sampled_from(["adamw", "lion", "sgd"]),
)
def test_any_small_request_predicts_and_sums(
    model: Model, device: str, batch: int, micro: int, recompute: Recompute | None, **choices: Any
) -> None:
    setup = Setup(
        model=model,
        hardware=load_hardware(device),
        sequence_tokens=8,
        batch_sequences=batch,
        micro_batch_sequences=min(micro, batch),
        recompute=recompute,
        **choices,
    )
    check_sums(step(setup))


def test_uneven_micro_batches_add_up() -> None:
    """48 in elevens: four steps of 11 and one of 4, and one update."""
    model, hardware = load_model("llama-3-1b"), load_hardware("h200")

    def timed(batch: int, micro: int) -> tuple[float, float]:
        setup = Setup(
            model=model,
            hardware=hardware,
            sequence_tokens=512,
            batch_sequences=batch,
            micro_batch_sequences=micro,
            recompute="none",
        )
        ops = step(setup).ops
        update = next(op.time_s for op in ops if op.name == "optimizer")
        return sum(op.time_s for op in ops) - update, update

    whole, update = timed(48, 11)
    # Two of each, so that their gradients are summed as in the whole.
    eleven, four = timed(22, 11), timed(8, 4)
    assert whole == pytest.approx(4 * eleven[0] / 2 + four[0] / 2)
    assert update == eleven[1] == four[1]
    # A single micro-batch has no earlier gradients to read.
    assert timed(11, 11)[0] < eleven[0] / 2


def faster(hardware: Hardware, *path: str | int, factor: float = 1.7) -> Hardware:
    """The same machine with one number larger."""
    table: Any = plain(hardware)
    place = table
    for key in path[:-1]:
        place = place[key]
    place[path[-1]]["value"] *= factor
    return decode(table, Hardware, "test")


@pytest.mark.parametrize("name", ["h200", "a100-80gb", "mi210", "b200"])
@settings(max_examples=15, deadline=None)
@given(model=transformers(), batch=st.integers(1, 40), tokens=st.sampled_from([1, 7, 32]))
def test_a_better_device_is_never_slower(name: str, model: Transformer, batch: int, tokens: int) -> None:
    hardware = load_hardware(name)
    setup = Setup(
        model=model,
        hardware=hardware,
        sequence_tokens=tokens,
        batch_sequences=batch,
        micro_batch_sequences=batch,
        recompute="full",
    )
    before = step(setup).step_s
    last = len(hardware.device.memory) - 1
    better = [
        faster(hardware, "device", "peak_flops", "bf16"),
        faster(hardware, "device", "memory", last, "bandwidth_bytes_per_s"),
    ]
    for machine in better:
        assert step(replace(setup, hardware=machine)).step_s <= before * (1 + 1e-9)


def test_time_is_never_below_the_peak() -> None:
    for name in hardware_names():
        prediction = step(replace(SMALL, model=load_model("llama-3-8b"), hardware=load_hardware(name)))
        for op in prediction.ops:
            if op.kind in ("gemm", "attention"):
                assert op.time_s >= op.flops / prediction.peak_flops


@pytest.mark.parametrize("devices", [1, 8])
def test_logits_have_room_for_a_batch_that_is_learned_whole(devices: int) -> None:
    """A share of tokens with a loss is a mean; but that of hidden ones is what each batch has."""

    def logits(model: Model) -> int:
        hardware, parallel = load_hardware("h100-sxm"), Parallel(data=devices)
        found = step(Setup(model=model, hardware=hardware, parallel=parallel, sequence_tokens=512, batch_sequences=8))
        return found.device_bytes.logits

    whole, few = (logits(load_model("gpt2", {"loss_share": share})) for share in (1.0, 0.1))
    assert few == whole
    whole, few = (
        logits(TrainedWords(task="masked", loss_share=share).of(load_model("bert-base"))) for share in (1.0, 0.15)
    )
    assert few < 0.2 * whole


def test_recompute_costs_time_and_saves_memory() -> None:
    setup = Setup(
        model=load_model("llama-3-8b"), hardware=load_hardware("h200"), batch_sequences=2, micro_batch_sequences=2
    )
    found = [step(replace(setup, recompute=policy)) for policy in RECOMPUTE_POLICIES]
    times = [prediction.step_s for prediction in found]
    assert times == sorted(times)
    totals = [prediction.device_bytes.activations for prediction in found]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("name", "device", "tokens"),
    [("llama-3-8b", "h100-sxm", 8192), ("mpt-3b", "rtx-4090", 512), ("llama-3-3b", "rtx-5090", 1024)],
)
def test_auto_takes_the_fastest_that_fits(name: str, device: str, tokens: int) -> None:
    """Against every policy and every micro-batch, one by one."""
    setup = Setup(model=load_model(name), hardware=load_hardware(device), sequence_tokens=tokens, batch_sequences=24)
    found = step(setup)
    assert found.fits
    for policy in RECOMPUTE_POLICIES:
        for micro in range(1, 25):
            other = step(replace(setup, micro_batch_sequences=micro, recompute=policy))
            # A smaller last micro-batch can win by a hair; the largest that fits is the rule.
            assert not other.fits or found.step_s <= 1.02 * other.step_s


def test_auto_takes_the_largest_micro_batch_that_fits() -> None:
    model, hardware = load_model("llama-3-8b"), load_hardware("h100-sxm")
    chosen, _ = choose([Setup(model=model, hardware=hardware, batch_sequences=64)])[0]
    capacity = usable_bytes(hardware)
    assert device_bytes(chosen).total <= capacity
    larger = replace(chosen, micro_batch_sequences=chosen.micro_batch_sequences + 1)
    assert device_bytes(larger).total > capacity


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_tokens": 0}, "at least 1"),
        ({"sequence_tokens": 8192.5}, "whole number"),
        ({"batch_sequences": True}, "whole number"),
        ({"sequence_tokens": "8k"}, "whole number"),
        ({"device_cap_bytes": -5}, "at least 1"),
        ({"recompute": "half"}, "half"),
        ({"recompute": ""}, "recompute"),
        ({"optimizer": "adam"}, "adamw"),
        ({"attention": "sdpa"}, "flash"),
        ({"fusion": "x"}, "fused"),
    ],
)
def test_set_ups_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopwiseError, match=words):
        replace(SMALL, **changes)


@pytest.mark.parametrize(("text", "words"), [("bf17", "bf16"), ("matrix=fp32", "cannot read")])
def test_number_formats_are_checked(text: str, words: str) -> None:
    with pytest.raises(FlopwiseError, match=words):
        parse_formats(text)


def test_a_batch_in_tokens_is_one_in_sequences() -> None:
    model = load_model("llama-3-1b")
    assert batch_in_sequences(model, sequences=None, tokens=None, sequence=None) is None
    assert batch_in_sequences(model, sequences=3, tokens=None, sequence=None) == 3
    assert batch_in_sequences(model, sequences=None, tokens=4096, sequence=512) == 8
    # Where nobody says how long a sequence is, it is as long as a step would take it.
    chosen, _ = choose([replace(SMALL, sequence_tokens=None)])[0]
    tokens = 4 * chosen.sequence_tokens
    assert batch_in_sequences(model, sequences=None, tokens=tokens, sequence=None) == 4
    with pytest.raises(FlopwiseError, match="both a batch"):
        batch_in_sequences(model, sequences=3, tokens=4096, sequence=512)
    with pytest.raises(FlopwiseError, match="not a whole number"):
        batch_in_sequences(model, sequences=None, tokens=4097, sequence=512)


def test_conventions_and_caps_are_checked() -> None:
    convention: Any = "hf"
    with pytest.raises(FlopwiseError, match="convention"):
        step(SMALL, convention=convention)
    with pytest.raises(FlopwiseError, match="more than h200 has"):
        replace(SMALL, device_cap_bytes=10**12)


def test_tf32_runs_every_product_in_tf32_and_fp8_spares_the_head() -> None:
    setup = Setup(
        model=load_model("llama-3-8b"),
        hardware=load_hardware("h200"),
        sequence_tokens=4096,
        batch_sequences=2,
        micro_batch_sequences=1,
        recompute="none",
    )
    tf32, fp32 = (step(replace(setup, formats=POLICIES[name])) for name in ("tf32", "fp32"))
    for op in tf32.ops:
        if op.kind in ("gemm", "attention"):
            slow = next(other for other in fp32.ops if other.name == op.name)
            assert op.time_s < slow.time_s / 3
    fp8, bf16 = (step(replace(setup, formats=POLICIES[name])) for name in ("fp8", "bf16"))
    for name in ("head", "attention"):
        times = [next(op.time_s for op in one.ops if op.name == name) for one in (fp8, bf16)]
        assert times[0] == pytest.approx(times[1])


def test_notes_say_what_a_reader_should_know() -> None:
    setup = replace(SMALL, model=load_model("llama-3-8b"))
    long = step(replace(setup, sequence_tokens=65_536, batch_sequences=1))
    assert any("8,192" in note for note in long.notes)
    for tokens, is_noted in ((2304, False), (4096, True)):
        streamed = Setup(
            model=load_model("dataflow-1b"),
            hardware=load_hardware("a100-80gb"),
            sequence_tokens=tokens,
            batch_sequences=1,
        )
        palm = step(streamed, convention="palm")
        # One on each side of three quarters, and neither far from it.
        assert (0.70 < palm.mfu < 0.75, 0.75 < palm.mfu < 0.85) == (not is_noted, is_noted)
        assert any("palm" in note for note in palm.notes) == is_noted
    assert any("estimated" in note for note in step(replace(setup, hardware=load_hardware("rtx-4090"))).notes)
    assert all("estimated" not in note for note in step(setup).notes)


def test_a_cap_is_taken_as_it_is_and_a_device_keeps_a_reserve() -> None:
    whole = step(SMALL)
    assert whole.device_capacity_bytes == SMALL.hardware.device.dram.size_bytes.value - RESERVED_BYTES
    exact = replace(SMALL, device_cap_bytes=whole.device_bytes.total, micro_batch_sequences=4, recompute="none")
    assert step(exact).fits
    assert not step(replace(exact, device_cap_bytes=whole.device_bytes.total - 1)).fits


def test_number_formats_change_memory_and_peak() -> None:
    setup = replace(SMALL, model=load_model("llama-3-8b"))
    parameters = 8_030_261_248
    for name, per_parameter in (("bf16", 8), ("bf16-mixed", 16), ("fp32", 16)):
        memory = step(replace(setup, formats=POLICIES[name])).device_bytes
        assert memory.weights + memory.gradients + memory.optimizer == per_parameter * parameters
    larger = replace(setup, sequence_tokens=4096, batch_sequences=8)
    fast, slow = (step(replace(larger, formats=POLICIES[name])) for name in ("fp8", "bf16"))
    assert fast.peak_flops == 2 * slow.peak_flops
    assert fast.step_s < slow.step_s
    with pytest.raises(FlopwiseError, match="no peak for fp8"):
        step(replace(setup, hardware=load_hardware("a100-80gb"), formats=POLICIES["fp8"]))
