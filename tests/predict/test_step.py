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
from flopwise.predict import Request, step
from flopwise.predict.choose import choose
from flopwise.predict.grid import step_grid
from flopwise.predict.kernels.memory import RESERVED_BYTES, device_bytes, usable_bytes
from flopwise.records.prediction import Prediction
from flopwise.setup.hardware import Hardware
from flopwise.setup.workload import Workload
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES, Recompute
from tests.support.strategies import recurrent, transformers

SMALL = Request(sequence_tokens=128, batch_sequences=4)


def check_sums(prediction: Prediction) -> None:
    assert sum(op.time_s for op in prediction.ops) == pytest.approx(prediction.step_s)
    assert sum(op.share for op in prediction.ops) == pytest.approx(1)
    assert sum(op.flops for op in prediction.ops) == prediction.hardware_flops
    assert sum(op.model_flops for op in prediction.ops) == prediction.model_flops
    for op in prediction.ops:
        assert op.forward_s + op.backward_s + op.recompute_s + op.update_s == pytest.approx(op.time_s)
        assert op.time_s > 0
        assert op.bytes >= 0
        if op.kind == "gemm" and prediction.n_active_params == prediction.n_params:
            # (Of a mixture with few tokens only the chosen experts are read, fewer than perfect caching of all.)
            assert op.bytes >= 0.999 * op.least_bytes
        assert op.bound in ("compute", "memory", "cache", "launch")
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
        check_sums(step(load_model(name), load_hardware(device), SMALL))


@pytest.mark.parametrize("name", model_names())
def test_every_model_predicts_and_sums(name: str) -> None:
    model = load_model(name)
    request = Request(sequence_tokens=min(model.context, 512), batch_sequences=3)
    check_sums(step(model, load_hardware("h200"), request))
    check_sums(step(model, load_hardware("v100"), request, convention="palm"))


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
    request = Request(
        sequence_tokens=8,
        batch_sequences=batch,
        micro_batch_sequences=min(micro, batch),
        recompute=recompute,
        **choices,
    )
    check_sums(step(model, load_hardware(device), request))


def test_uneven_micro_batches_add_up() -> None:
    """48 in elevens: four steps of 11 and one of 4, and one update."""
    model, hardware = load_model("llama-3-1b"), load_hardware("h200")

    def timed(batch: int, micro: int) -> tuple[float, float]:
        request = Request(sequence_tokens=512, batch_sequences=batch, micro_batch_sequences=micro, recompute="none")
        ops = step(model, hardware, request).ops
        update = next(op.time_s for op in ops if op.name == "optimizer")
        return sum(op.time_s for op in ops) - update, update

    whole, update = timed(48, 11)
    # Two of each, so that their gradients are summed as in the whole.
    eleven, four = timed(22, 11), timed(8, 4)
    assert whole == pytest.approx(4 * eleven[0] / 2 + four[0] / 2)
    assert update == eleven[1] == four[1]
    # A single micro-batch has no earlier gradients to read.
    assert timed(11, 11)[0] < eleven[0] / 2


def test_the_grid_equals_single_predictions() -> None:
    models = [load_model(name) for name in ("llama-3-8b", "mixtral-8x7b", "bert-base", "mpt-125m")]
    devices = [load_hardware(name) for name in ("h200", "rtx-4090", "trn1")]
    batches = (1, 3, 7, 64)
    for policy in ("none", "context", "full"):
        workload = Workload(
            sequence_tokens=257,
            batch_sequences=1,
            micro_batch_sequences=1,
            formats=POLICIES["bf16"],
            recompute=policy,
        )
        grid = step_grid(models, devices, batches, workload)
        for row, model in enumerate(models):
            for column, hardware in enumerate(devices):
                for place, batch in enumerate(batches):
                    request = Request(
                        sequence_tokens=257,
                        batch_sequences=batch,
                        micro_batch_sequences=batch,
                        formats=POLICIES["bf16"],
                        recompute=policy,
                    )
                    single = step(model, hardware, request)
                    assert grid.step_s[row, column, place] == pytest.approx(single.step_s, rel=1e-12)
                    assert grid.tokens_per_s[row, column, place] == pytest.approx(single.tokens_per_s)
                    assert grid.mfu[row, column, place] == pytest.approx(single.mfu)
                    assert grid.device_bytes[row, column, place] == single.device_bytes.total
                    assert grid.fits[row, column, place] == single.fits


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
    request = Request(sequence_tokens=tokens, batch_sequences=batch, micro_batch_sequences=batch, recompute="full")
    before = step(model, hardware, request).step_s
    last = len(hardware.device.memory) - 1
    better = [
        faster(hardware, "device", "peak_flops", "bf16"),
        faster(hardware, "device", "memory", last, "bandwidth_bytes_per_s"),
    ]
    for machine in better:
        assert step(model, machine, request).step_s <= before * (1 + 1e-9)


def test_time_is_never_below_the_peak() -> None:
    for name in hardware_names():
        prediction = step(load_model("llama-3-8b"), load_hardware(name), SMALL)
        for op in prediction.ops:
            if op.kind in ("gemm", "attention"):
                assert op.time_s >= op.flops / prediction.peak_flops


def test_recompute_costs_time_and_saves_memory() -> None:
    model, hardware = load_model("llama-3-8b"), load_hardware("h200")
    found = [
        step(model, hardware, Request(batch_sequences=2, micro_batch_sequences=2, recompute=policy))
        for policy in RECOMPUTE_POLICIES
    ]
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
    model, hardware = load_model(name), load_hardware(device)
    found = step(model, hardware, Request(sequence_tokens=tokens, batch_sequences=24))
    assert found.fits
    for policy in RECOMPUTE_POLICIES:
        for micro in range(1, 25):
            request = Request(sequence_tokens=tokens, batch_sequences=24, micro_batch_sequences=micro, recompute=policy)
            other = step(model, hardware, request)
            # A smaller last micro-batch can win by a hair; the largest that fits is the rule.
            assert not other.fits or found.step_s <= 1.02 * other.step_s


def test_auto_takes_the_largest_micro_batch_that_fits() -> None:
    model, hardware = load_model("llama-3-8b"), load_hardware("h100-sxm")
    chosen = choose(model, hardware, Request(batch_sequences=64)).workload
    work = describe(model, chosen.sequence_tokens)
    capacity = usable_bytes(hardware)
    assert device_bytes(work, chosen).total <= capacity
    larger = replace(chosen, micro_batch_sequences=chosen.micro_batch_sequences + 1)
    assert device_bytes(work, larger).total > capacity


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_tokens": 0}, "at least 1"),
        ({"sequence_tokens": 8192.5}, "whole number"),
        ({"batch_sequences": True}, "whole number"),
        ({"sequence_tokens": "8k"}, "whole number"),
        ({"device_memory_bytes": -5}, "at least 1"),
        ({"recompute": "half"}, "half"),
        ({"recompute": ""}, "recompute"),
        ({"optimizer": "adam"}, "adamw"),
        ({"attention": "sdpa"}, "flash"),
        ({"fusion": "x"}, "fused"),
        ({"formats": "bf17"}, "bf16"),
        ({"formats": "matrix=fp32"}, "cannot read"),
    ],
)
def test_requests_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopwiseError, match=words):
        Request(**changes)


def test_conventions_and_caps_are_checked() -> None:
    model, hardware = load_model("gpt2"), load_hardware("h200")
    convention: Any = "hf"
    with pytest.raises(FlopwiseError, match="convention"):
        step(model, hardware, SMALL, convention=convention)
    with pytest.raises(FlopwiseError, match="more than h200 has"):
        step(model, hardware, replace(SMALL, device_memory_bytes=10**12))


def test_tf32_runs_every_product_in_tf32_and_fp8_spares_the_head() -> None:
    model, hardware = load_model("llama-3-8b"), load_hardware("h200")
    request = Request(sequence_tokens=4096, batch_sequences=2, micro_batch_sequences=1, recompute="none")
    tf32, fp32 = (step(model, hardware, replace(request, formats=name)) for name in ("tf32", "fp32"))
    for op in tf32.ops:
        if op.kind in ("gemm", "attention"):
            slow = next(other for other in fp32.ops if other.name == op.name)
            assert op.time_s < slow.time_s / 3
    fp8, bf16 = (step(model, hardware, replace(request, formats=name)) for name in ("fp8", "bf16"))
    for name in ("head", "attention"):
        times = [next(op.time_s for op in one.ops if op.name == name) for one in (fp8, bf16)]
        assert times[0] == pytest.approx(times[1])


def test_notes_say_what_a_reader_should_know() -> None:
    model = load_model("llama-3-8b")
    long = step(model, load_hardware("h200"), Request(sequence_tokens=65_536, batch_sequences=1))
    assert any("8,192" in note for note in long.notes)
    palm = step(load_model("dataflow-1b"), load_hardware("a100-80gb"), convention="palm")
    assert any("palm" in note for note in palm.notes) == (palm.mfu > 0.75)
    assert any("estimated" in note for note in step(model, load_hardware("rtx-4090"), SMALL).notes)
    assert all("estimated" not in note for note in step(model, load_hardware("h200"), SMALL).notes)


def test_a_cap_is_taken_as_it_is_and_a_device_keeps_a_reserve() -> None:
    model, hardware = load_model("llama-3-1b"), load_hardware("h200")
    whole = step(model, hardware, SMALL)
    assert whole.device_capacity_bytes == hardware.device.dram.size_bytes.value - RESERVED_BYTES
    exact = replace(SMALL, device_memory_bytes=whole.device_bytes.total, micro_batch_sequences=4, recompute="none")
    assert step(model, hardware, exact).fits
    assert not step(model, hardware, replace(exact, device_memory_bytes=whole.device_bytes.total - 1)).fits


def test_number_formats_change_memory_and_peak() -> None:
    model, hardware = load_model("llama-3-8b"), load_hardware("h200")
    parameters = 8_030_261_248
    for name, per_parameter in (("bf16", 8), ("bf16-mixed", 16), ("fp32", 16)):
        memory = step(model, hardware, replace(SMALL, formats=POLICIES[name])).device_bytes
        assert memory.weights + memory.gradients + memory.optimizer == per_parameter * parameters
    fast = step(model, hardware, Request(sequence_tokens=4096, batch_sequences=8, formats=POLICIES["fp8"]))
    slow = step(model, hardware, Request(sequence_tokens=4096, batch_sequences=8, formats=POLICIES["bf16"]))
    assert fast.peak_flops == 2 * slow.peak_flops
    assert fast.step_s < slow.step_s
    with pytest.raises(FlopwiseError, match="no peak for fp8"):
        step(model, load_hardware("a100-80gb"), replace(SMALL, formats=POLICIES["fp8"]))
