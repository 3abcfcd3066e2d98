"""A prediction over several devices as a record: what adds up, what is said, what is refused."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model
from flopwise.cli.output import schema_json
from flopwise.predict import Setup, step
from flopwise.records.prediction import Prediction
from flopwise.report.document import to_csv, to_markdown
from flopwise.report.predictions import predictions_document
from flopwise.setup.parallel import Parallel, parse_parallel
from flopwise.setup.stack import Constant, Stack
from flopwise.work.formats import POLICIES

SLOW = Stack(
    name="slow",
    title="a slow framework",
    source="made up",
    reduce_always=True,
    constants={
        "products": Constant(value=1.2, how="made up"),
        "interference": Constant(value=0.5, how="made up"),
        "step_s": Constant(value=0.25, how="made up"),
    },
)

SET_UPS = (
    "dp16",
    "dp16 zero3",
    "dp16 zero3 shard8 kept",
    "dp2 tp4 pp2 zero1 sp",
    "tp2 pp4 cp2",
    "tp4 pp4 balanced",
    "tp4 pp4 chunks2",
    "dp2 pp8 gpipe",
    "tp2 zero2 optimizer-on-host activations-on-host",
)


def _prediction(words: str, **changes: object) -> Prediction:
    setup = Setup(
        model=load_model("llama-3-8b"),
        hardware=load_hardware("h100-sxm"),
        sequence_tokens=4096,
        batch_sequences=37,
        formats=POLICIES["bf16-mixed"],
        parallel=parse_parallel(words, 16),
        **changes,  # type: ignore[arg-type]
    )
    return step(setup)


@pytest.mark.parametrize("stack", [None, SLOW])
@pytest.mark.parametrize("words", SET_UPS)
def test_everything_adds_up(words: str, stack: Stack | None) -> None:
    prediction = _prediction(words, stack=stack)
    assert sum(op.time_s for op in prediction.ops) == pytest.approx(prediction.step_s, rel=1e-9)
    assert sum(prediction.parts.values()) == pytest.approx(prediction.step_s, rel=1e-9)
    assert sum(op.share for op in prediction.ops) == pytest.approx(1.0)
    assert min(prediction.parts.values()) >= -1e-12
    assert sum(op.flops for op in prediction.ops) == prediction.hardware_flops
    assert sum(op.model_flops for op in prediction.ops) == prediction.model_flops
    assert prediction.devices == 16
    assert len(prediction.stages) == prediction.parallel.pipeline
    assert sum(stage.layers for stage in prediction.stages) == 32
    fullest = max(stage.device_bytes.total for stage in prediction.stages)
    assert prediction.device_bytes.total == fullest
    for stage in prediction.stages:
        owners = stage.device_bytes
        parts = (owners.weights, owners.gradients, owners.optimizer, owners.activations, owners.logits)
        assert sum(parts) + owners.workspace == owners.total
    assert prediction.mfu == pytest.approx(
        prediction.model_flops / (prediction.step_s * 16 * prediction.peak_flops), rel=1e-12
    )
    assert prediction.stack == ("slow" if stack else "kernels")


def test_a_framework_costs_time_and_nothing_else() -> None:
    plain, slow = (
        _prediction("dp16 zero3", stack=stack, recompute="input", micro_batch_sequences=1) for stack in (None, SLOW)
    )
    assert slow.step_s > plain.step_s
    assert slow.parts["step"] == 0.25
    assert slow.parts["products"] == pytest.approx(1.2 * plain.parts["products"])
    assert slow.device_bytes == plain.device_bytes


@given(
    st.sampled_from([words for words in SET_UPS if "chunks" not in words]),
    st.integers(16, 200),
    st.sampled_from([1, 3, 8]),
)
def test_awkward_batches_add_up_too(words: str, batch: int, micro: int) -> None:
    parallel = parse_parallel(words, 16)
    setup = Setup(
        model=load_model("llama-3-1b"),
        hardware=load_hardware("a100-80gb"),
        sequence_tokens=2048,
        batch_sequences=batch,
        micro_batch_sequences=min(micro, -(-batch // parallel.data)),
        recompute="none",
        parallel=parallel,
    )
    prediction = step(setup)
    assert sum(op.time_s for op in prediction.ops) == pytest.approx(prediction.step_s, rel=1e-9)
    assert sum(op.flops for op in prediction.ops) == prediction.hardware_flops
    assert min(prediction.parts.values()) >= -1e-9 * prediction.step_s


def test_what_is_left_open_is_chosen_to_fit() -> None:
    prediction = _prediction("tp2 pp2 zero1 sp", device_cap_bytes=24 * 2**30)
    assert prediction.fits
    assert {"recompute", "micro_batch_sequences"} <= set(prediction.chosen)
    roomy = _prediction("tp2 pp2 zero1 sp")
    assert roomy.step_s <= prediction.step_s


def test_outputs_hold_the_cluster() -> None:
    prediction = _prediction("dp2 tp4 pp2 zero1 sp")
    record = json.loads(schema_json(prediction, "prediction"))
    assert record["devices"] == 16
    assert record["parallel"]["tensor"] == 4
    assert [stage["layers"] for stage in record["stages"]] == [16, 16]
    assert sum(record["parts"].values()) == pytest.approx(record["step_s"])
    (row,) = csv.DictReader(io.StringIO(to_csv(predictions_document([prediction], {prediction.hardware: ""}))))
    assert row["parallel"] == "dp2 tp4 pp2 zero1 sp"
    assert float(row["part_bubble_s"]) == prediction.parts["bubble"]
    assert float(row["step_s"]) == prediction.step_s
    assert "bubble" in to_markdown(predictions_document([prediction], {prediction.hardware: ""}))


@pytest.mark.parametrize(
    ("parallel", "hardware", "batch", "said"),
    [
        (Parallel(tensor=3), "h100-sxm", 8, "3 tensor ranks"),
        (Parallel(pipeline=64), "h100-sxm", 64, "64 stages"),
        (Parallel(data=16), "h100-sxm", 8, "less than one for each of 16 data ranks"),
        (Parallel(context=3), "h100-sxm", 8, "in 3 parts"),
        (Parallel(data=4, expert=2), "h100-sxm", 8, "no experts"),
        (Parallel(pipeline=4, chunks=3, schedule="interleaved"), "h100-sxm", 8, "4 × 3 interleaved stages"),
        (Parallel(pipeline=4, chunks=2, schedule="interleaved"), "h100-sxm", 3, "no whole rounds of 4"),
    ],
)
def test_what_cannot_be_is_refused(parallel: Parallel, hardware: str, batch: int, said: str) -> None:
    model, machine = load_model("llama-3-8b"), load_hardware(hardware)
    with pytest.raises(FlopwiseError) as caught:
        step(Setup(model=model, hardware=machine, sequence_tokens=4096, batch_sequences=batch, parallel=parallel))
    assert said in str(caught.value)
    assert caught.value.hint
