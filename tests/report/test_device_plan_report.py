"""A plan for one device on a page and in files: what it says, that it keeps to the width, that its figures add up."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.units import show_bytes
from flopwise.cli.output import schema_json
from flopwise.records.outcome import Interval
from flopwise.records.plan import Forecast, Help, Plan, Planned, Residency
from flopwise.report.device_plans import (
    device_plan_document,
    device_plan_record,
    help_words,
    interval_words,
    memory_rows,
    residency_words,
    value_words,
)
from flopwise.report.document import to_csv, to_markdown
from flopwise.report.tables import style_of
from flopwise.work.parameters import ENDS, End
from tests.support.printing import shown

GIB = 2**30
TITLE = "NVIDIA H200"


def some_plan() -> Plan:
    """32 layers of which 19 stay: of (layer, chunk) 8 stay and 24 leave."""
    letters = "f" * 6 + "a" * 15 + "c" * 3 + "F" * 8
    return Plan(
        hardware="h200",
        device_memory_bytes=40 * GIB,
        host_memory_bytes=110 * GIB,
        sequence_tokens=8192,
        chunk_tokens=16384,
        chunks_per_round=1,
        rounds_per_step=12,
        head_chunk_tokens=1024,
        attention="sequence",
        weights=Residency(blocks=19, passing=2, ends=ENDS),
        gradients=Residency(blocks=18, passing=2, ends=ENDS),
        optimizer_state=Residency(blocks=0, passing=2),
        activation_slots=9,
        saves=tuple(letters),
        precision="bf16",
    )


def some_forecast() -> Forecast:
    return Forecast(
        step_s=17.4,
        tokens_per_s=196608 / 17.4,
        mfu=0.588,
        hfu=0.609,
        peak_flops=989e12,
        ceiling_share=0.93,
        compute_s=17.1,
        recompute_s=0.5,
        update_s=0.2,
        exposed_copy_s=0.2,
        idle={"weights": 0.12, "room for activations": 0.08, "update on the host": 0.1},
        copy_in_bytes=412_000_000_000,
        copy_out_bytes=201_000_000_000,
        link_share=0.43,
        bound="compute",
        device_bytes={
            "weights": int(8.4 * GIB),
            "gradients": int(8.1 * GIB),
            "optimizer": int(1.2 * GIB),
            "activations": int(13.9 * GIB),
            "residual": int(0.5 * GIB),
            "head": int(1.1 * GIB),
            "workspace": int(1.6 * GIB),
        },
        host_bytes={
            "weights": int(6.1 * GIB),
            "gradients": int(6.3 * GIB),
            "optimizer": int(29.9 * GIB),
            "activations": int(21.4 * GIB),
        },
        model_flops=10**16,
        hardware_flops=11 * 10**15,
        convention="causal",
        peak_format="bf16",
    )


def some_planned() -> Planned:
    return Planned(
        model="llama-3-8b",
        plan=some_plan(),
        forecast=some_forecast(),
        reasons={
            "chunk_tokens": "the fewest at which a layer computes for longer than its weights take over the link",
            "rounds_per_step": "the update is hidden behind twelve rounds to 99 %",
            "saves": "what the link carries beside the weights, the rest is computed again",
            "weights": "more of them would leave too few slots for activations",
        },
        searched=43210,
        simulated=56,
        helps=(
            Help(device_memory_bytes=48 * GIB, host_memory_bytes=110 * GIB, speed=1.021),
            Help(device_memory_bytes=40 * GIB, host_memory_bytes=142 * GIB, speed=1.0),
        ),
        interval=Interval(low_s=16.9, high_s=17.93, basis="48 recorded runs, each predicted without the others"),
        notes=("the rate of the link is that of its description, not measured on this machine",),
    )


def folded(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_page_keeps_to_the_width_and_cuts_no_word(width: int) -> None:
    narrow = shown(device_plan_document(some_planned(), TITLE), width)
    assert all(len(line) <= width for line in narrow.splitlines())
    assert {word for word in narrow.split() if "─" not in word} <= set(
        shown(device_plan_document(some_planned(), TITLE), 1000).split()
    )


@pytest.mark.parametrize("width", [80, 120])
def test_a_page_says_it_all(width: int) -> None:
    text = folded(shown(device_plan_document(some_planned(), TITLE), width))
    for words in (
        "llama-3-8b · 1 × NVIDIA H200 · sequence 8,192 · AdamW · bf16",
        "caps: device 40.0 GiB, host 110 GiB",
        "16,384 tokens (2 sequences) · 1 chunk a round · 12 rounds a step = 196,608 tokens",
        "update on the device, right after a layer's last backward",
        "17.4 s = compute 17.1 s + exposed copies 200 ms + waiting for the host 100 ms",
        "recompute 500 ms (2.9 %) and update 200 ms (1.1 %)",
        "waits for weights 120 ms · update on the host 100 ms · room for activations 80.0 ms",
        "11,299 tok/s ± 3 % · 58.8 % MFU · 60.9 % HFU",
        "93.0 % of the kernels' own ceiling (matrix products and attention alone) · bound by compute",
        "8 of 10 recorded runs lie in that range (48 recorded runs",
        "412 GB in and 201 GB out a step · in use 43.0 % of the time",
        "+8.00 GiB device → about +2 %, by estimate, with this batch",
        "+32.0 GiB host → little, by estimate, with this batch",
        "43,210 plans, 56 of them simulated",
        "note the rate of the link",
        "the update is hidden behind twelve rounds to 99 %",
    ):
        assert words in text


def test_memory_in_words() -> None:
    rows = {row[0]: (row[2], row[4]) for row in memory_rows(some_planned())}
    assert rows["weights"] == ("19 of 32 blocks, embedding and head stay, 13 pass through 2 slots", "the other 13")
    assert rows["optimizer"] == ("32 blocks pass through 2 slots", "m and v, bf16; all 32, embedding and head")
    assert rows["activations"] == (
        "9 slots for (layer, chunk), 8 stay",
        "6 full · 15 input+context+attention · 3 input+context",
    )
    assert rows["head"] == ("1,024 tokens at a time", "")
    assert rows["residual"] == ("between layers", "")
    assert rows["total"] == ("✓ fits, 5.20 GiB spare", "✓ fits, 46.3 GiB spare")
    assert [row[0] for row in memory_rows(some_planned())][-1] == "total"


@pytest.mark.parametrize(
    ("cap", "words", "style"),
    [(36, "✓ fits, tight: 1.20 GiB spare", "yellow"), (30, "✗ does not fit, 4.80 GiB too much", "red")],
)
def test_the_total_is_held_against_the_cap(cap: int, words: str, style: str) -> None:
    planned = some_planned()
    found = replace(planned, plan=replace(planned.plan, device_memory_bytes=cap * GIB))
    verdict = memory_rows(found)[-1][2]
    assert (verdict, style_of(verdict)) == (words, style)


def test_everything_on_the_device() -> None:
    planned = some_planned()
    everything = Residency(blocks=32, ends=ENDS)
    plan = replace(
        planned.plan,
        weights=everything,
        gradients=everything,
        optimizer_state=everything,
        saves=("F",) * 32,
        device_memory_bytes=130 * GIB,
        host_memory_bytes=0,
    )
    forecast = replace(
        planned.forecast, host_bytes={}, copy_in_bytes=0, copy_out_bytes=0, idle={}, exposed_copy_s=0.0, recompute_s=0.0
    )
    found = replace(planned, plan=plan, forecast=forecast, reasons={}, interval=None, helps=(), searched=0)
    text = folded(shown(device_plan_document(found, TITLE), 80))
    rows = {row[0]: row[2] for row in memory_rows(found)}
    assert rows["weights"] == "all 32 blocks, embedding and head stay"
    assert rows["optimizer"] == "all 32 blocks, embedding and head stay; m and v, bf16"
    for words in (
        "nothing is kept there",
        "waits for nothing",
        "link nothing passes it",
        "17.4 s = compute 17.1 s update 200 ms (1.1 %) of it",
    ):
        assert words in text
    for words in ("why", "would help", "evidence", "searched", "exposed", "recompute"):
        assert words not in text


def test_the_update_at_the_end_borrows_and_a_rule_keeps_copies() -> None:
    planned = some_planned()
    plan = replace(planned.plan, update_when="end", host_copies=True, rule="dataflow 2025-07")
    found = replace(planned, plan=plan)
    rows = {row[0]: (row[2], row[4]) for row in memory_rows(found)}
    assert rows["optimizer"][0] == "32 blocks pass through 2 slots in the room of activations"
    assert rows["weights"][1] == "copies of all 32"
    text = folded(shown(device_plan_document(found, TITLE), 80))
    assert "by the rule dataflow 2025-07" in text
    assert "when all gradients are there" in text
    on_host = replace(found, plan=replace(plan, update_place="host", host_copies=False))
    assert memory_rows(on_host)[0][4] == "all 32, updated there"


@pytest.mark.parametrize(
    ("residency", "words"),
    [
        (Residency(blocks=1, passing=1), "1 of 32 blocks stays, 31 pass through 1 slot"),
        (Residency(blocks=31, passing=1, ends=("head",)), "31 of 32 blocks and head stay, 1 passes through 1 slot"),
        (Residency(blocks=0, passing=3, ends=("head",)), "head stays, 32 blocks pass through 3 slots"),
        (Residency(blocks=32), "all 32 blocks stay"),
        (Residency(blocks=0), ""),
    ],
)
def test_what_stays_in_words(residency: Residency, words: str) -> None:
    assert residency_words(residency, 32) == words


def test_optimizers_and_formats_in_words() -> None:
    planned = some_planned()
    for optimizer, precision, words in (
        ("lion", "bf16", "m, bf16"),
        ("adamw", "bf16-mixed", "m and v, fp32; master weights, fp32"),
        ("sgd", "bf16-mixed", "master weights, fp32"),
    ):
        plan = replace(planned.plan, optimizer=optimizer, precision=precision)  # type: ignore[arg-type]
        assert words in {row[0]: row[4] for row in memory_rows(replace(planned, plan=plan))}["optimizer"]


def test_a_sequence_in_chunks() -> None:
    planned = some_planned()
    for attention, words in (("sequence", "over a whole sequence at once"), ("chunk", "attention by chunk ·")):
        plan = replace(
            planned.plan,
            chunk_tokens=3000,
            chunks_per_round=3,
            saves=("FfI",) * 32,
            attention=attention,  # type: ignore[arg-type]
        )
        text = folded(shown(device_plan_document(replace(planned, plan=plan), TITLE), 120))
        assert "chunk 3,000 tokens (3 make a sequence) · 3 chunks a round · 12 rounds a step = 98,304 tokens" in text
        assert words in text
        rows = {row[0]: row[2] for row in memory_rows(replace(planned, plan=plan))}
        assert rows["activations"] == "9 slots for (layer, chunk), 64 stay, 32 of them not full"


def test_what_would_help() -> None:
    planned = some_planned()
    assert help_words(replace(planned, helps=())) == []
    useless = Help(device_memory_bytes=48 * GIB, host_memory_bytes=110 * GIB, speed=1.0001)
    assert help_words(replace(planned, helps=(useless, useless))) == ["with this batch more memory changes little"]
    both = Help(device_memory_bytes=48 * GIB, host_memory_bytes=142 * GIB, speed=1.1)
    assert help_words(replace(planned, helps=(both,))) == [
        "+8.00 GiB device and +32.0 GiB host → about +10 %, by estimate, with this batch"
    ]


def test_the_interval_in_words() -> None:
    assert interval_words(None, 1.0) == ("", "")
    assert interval_words(Interval(low_s=0.8, high_s=1.1, basis="b"), 1.0)[0] == " (−10 % to +25 %)"
    unknown = Interval(low_s=0.1, high_s=20.0, basis="b", outside=("larger model",))
    assert interval_words(unknown, 1.0)[1].endswith("(b), widened")
    text = folded(shown(device_plan_document(replace(some_planned(), interval=unknown), TITLE), 80))
    assert "outside no such data, so the interval is wider: larger model" in text


def test_reasons_name_their_values() -> None:
    plan = some_plan()
    for name, words in (
        ("chunk_tokens", "chunk of 16,384 tokens"),
        ("chunks_per_round", "1 chunk a round"),
        ("weights", "weights, 19 of 32 stay"),
        ("optimizer_state", "optimizer state, 0 of 32 stay"),
        ("saves", "saves, 24 leave, 8 stay"),
        ("update_when", "update during backward"),
        ("something_else", "something else"),
    ):
        assert value_words(plan, name) == words


def test_json_has_the_names_that_others_read() -> None:
    planned = some_planned()
    record = json.loads(schema_json(device_plan_record(planned), "device-plan"))
    assert record["model"] == "llama-3-8b"
    assert record["hardware"] == "h200"
    assert (record["param_blocks"], record["resident_param_blocks"]) == (21, 19)
    assert (record["grad_blocks"], record["resident_grad_blocks"]) == (20, 18)
    assert (record["optimizer_blocks"], record["resident_optimizer_blocks"]) == (2, 0)
    assert record["host_saved"] == {"full": 6, "attention": 15, "context": 3, "input": 0}
    assert record["device_saved"] == {"full": 8, "attention": 0, "context": 0, "input": 0}
    assert record["tokens_per_step"] == 196608
    for place in ("device", "host"):
        assert isinstance(record[f"{place}_bytes"], int)
        assert record[f"{place}_bytes"] == sum(record[f"{place}_bytes_by_owner"].values())
    for name in ("chunk_tokens", "chunks_per_round", "rounds_per_step", "head_chunk_tokens", "activation_slots"):
        assert record[name] == getattr(planned.plan, name) == record["plan"][name]
    for name in ("step_s", "tokens_per_s", "mfu", "hfu", "ceiling_share", "bound"):
        assert record[name] == getattr(planned.forecast, name) == record["forecast"][name]
    assert record["reasons"] == planned.reasons
    assert record["helps"][0]["speed"] == 1.021
    assert record["interval"]["low_s"] == 16.9
    assert record["notes"] == list(planned.notes)


def test_csv_parses_back() -> None:
    planned = some_planned()
    other = replace(planned, interval=None, forecast=replace(planned.forecast, host_bytes={"spill": 5}))
    texts = [to_csv(device_plan_document(one, TITLE)) for one in (planned, other)]
    rows = [row for text in texts for row in csv.DictReader(io.StringIO(text))]
    assert len(rows) == 2
    for row, found in zip(rows, (planned, other), strict=True):
        assert float(row["step_s"]) == found.forecast.step_s
        assert float(row["tokens_per_s"]) == found.forecast.tokens_per_s
        assert int(row.get("host_bytes_spill", 0)) == found.forecast.host_bytes.get("spill", 0)
        assert int(row["host_saved_attention"]) == 15
        for place in ("device", "host"):
            owned = [int(size) for name, size in row.items() if name.startswith(f"{place}_bytes_")]
            assert sum(owned) == int(row[f"{place}_bytes"])
    assert (rows[0]["low_s"], rows[1]["low_s"]) == ("16.9", "")
    assert not any("{" in value for row in rows for value in row.values())


def test_markdown_is_a_table_for_people() -> None:
    lines = to_markdown(device_plan_document(some_planned(), TITLE)).splitlines()
    assert lines[0].startswith("| model ")
    assert "✓ 34.8 GiB of 40.0 GiB" in lines[2]
    assert any(line.startswith("| weights") and "the other 13" in line for line in lines)


# -- any sizes ------------------------------------------------------------------------------------------------------


@st.composite
def any_planned(draw: st.DrawFn) -> Planned:
    """A record of any shape that the schemas allow; its figures need not belong together."""
    layers = draw(st.integers(1, 130))
    per_sequence, sequences = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    chunk = draw(st.integers(1, 70_000))

    def residency() -> Residency:
        ends: Sequence[End] = draw(st.sampled_from([(), ("head",), ("embedding",), ENDS]))
        return Residency(blocks=draw(st.integers(0, layers)), passing=draw(st.integers(0, 5)), ends=tuple(ends))

    row = st.text("faciFACI", min_size=per_sequence * sequences, max_size=per_sequence * sequences)
    plan = replace(
        some_plan(),
        sequence_tokens=per_sequence * chunk,
        chunk_tokens=chunk,
        chunks_per_round=per_sequence * sequences,
        rounds_per_step=draw(st.integers(1, 10**4)),
        attention=draw(st.sampled_from(["sequence", "chunk"])),
        weights=residency(),
        gradients=residency(),
        optimizer_state=residency(),
        saves=tuple(draw(st.lists(row, min_size=1, max_size=3)) * layers)[:layers],
        precision=draw(st.sampled_from(["bf16", "bf16-mixed", "fp32"])),
        optimizer=draw(st.sampled_from(["adamw", "lion", "sgd"])),
        update_place=draw(st.sampled_from(["device", "host"])),
        update_when=draw(st.sampled_from(["backward", "end"])),
        host_copies=draw(st.booleans()),
        host_memory_bytes=draw(st.integers(0, 2**41)),
    )
    sizes = st.dictionaries(
        st.sampled_from(
            ["weights", "gradients", "optimizer", "activations", "residual", "context", "head", "workspace"]
        ),
        st.integers(0, 2**43),
    )
    seconds = st.floats(1e-6, 1e5)
    forecast = replace(
        some_forecast(),
        step_s=draw(seconds),
        compute_s=draw(seconds),
        device_bytes=draw(sizes),
        host_bytes=draw(sizes),
        idle=draw(st.dictionaries(st.sampled_from(["weights", "room for gradients", "the last copies"]), seconds)),
        copy_in_bytes=draw(st.integers(0, 10**15)),
    )
    return replace(some_planned(), plan=plan, forecast=forecast)


@settings(max_examples=60, deadline=None)
@given(planned=any_planned(), width=st.sampled_from([80, 120]))
def test_any_page_keeps_to_the_width_and_cuts_no_word(planned: Planned, width: int) -> None:
    narrow = shown(device_plan_document(planned, TITLE), width)
    assert all(len(line) <= width for line in narrow.splitlines())
    assert {word for word in narrow.split() if "─" not in word} <= set(
        shown(device_plan_document(planned, TITLE), 2000).split()
    )


@settings(max_examples=60, deadline=None)
@given(planned=any_planned())
def test_any_memory_adds_up(planned: Planned) -> None:
    rows = memory_rows(planned)
    owners = {row[0] for row in rows[:-1]}
    assert owners == {*planned.forecast.device_bytes, *planned.forecast.host_bytes}
    for column, sizes in ((1, planned.forecast.device_bytes), (3, planned.forecast.host_bytes)):
        for row in rows[:-1]:
            size = sizes.get(row[0], 0)
            assert row[column] == (show_bytes(size) if size else "-")
        total = sum(sizes.values())
        assert rows[-1][column] == (show_bytes(total) if total else "-")
    record = json.loads(schema_json(device_plan_record(planned), "device-plan"))
    assert record["device_bytes"] == sum(planned.forecast.device_bytes.values())
    saved = (*record["host_saved"].values(), *record["device_saved"].values())
    assert sum(saved) == planned.plan.layers * planned.plan.chunks_per_round
    (flat,) = csv.DictReader(io.StringIO(to_csv(device_plan_document(planned, TITLE))))
    assert int(flat["host_bytes"]) == record["host_bytes"]
