"""From words to cells: every combination once, before anything runs, and mistakes told in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.base.units import AUTO
from flopwise.catalog.load import load_hardware, load_model, model_names, model_table
from flopwise.setup.hardware import Hardware
from flopwise.setup.written import CellSetup, cell_id
from flopwise.sweep.grid import AXES, MOST_CELLS, Grid, expand, join_grids, label, read_axes, values_of
from flopwise.sweep.sweep_file import SweepFile, all_axes, parse_duration, read_sweep_file

H100 = load_hardware("h100-sxm")
GIB = 2**30
HERE: dict[str, Hardware] = {"h100-sxm": H100, "h100": H100, "a100-40gb": load_hardware("a100-40gb")}


def cells(**words: Any) -> tuple[CellSetup, ...]:
    return expand(read_axes({"model": "mpt-125m", "on": "h100-sxm", **words}), HERE).settings


def told(**words: Any) -> FlopwiseError:
    with pytest.raises(FlopwiseError) as caught:
        cells(**words)
    assert caught.value.hint
    return caught.value


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "text", "values"),
    [
        ("seq", "512-8k*2", [512, 1024, 2048, 4096, 8192]),
        ("seq", "512-8000*2", [512, 1024, 2048, 4096]),
        ("seq", "8k,512,8192", [8192, 512]),
        ("batch", "1,2,4-16*2", [1, 2, 4, 8, 16]),
        ("batch", "auto,48", [AUTO, 48]),
        ("micro", "1-16+5", [1, 6, 11, 16]),
        ("micro", "1-15+5", [1, 6, 11]),
        ("micro", "7-7*3", [7]),
        ("gpus", "1-8*2", [1, 2, 4, 8]),
        ("batch_tokens", "512k-2M*2", [2**19, 2**20, 2**21]),
        ("device_mem", "10-40+10GiB", [10 * GIB, 20 * GIB, 30 * GIB, 40 * GIB]),
        ("device_mem", "auto,40GiB", [None, 40 * GIB]),
        ("host_mem", "none,50,100GiB", [0, 50 * GIB, 100 * GIB]),
        ("host_mem", "50,100GiB,none,auto", [50 * GIB, 100 * GIB, 0, None]),
        ("precision", "bf16,gradients=fp32,fp32", ["bf16,gradients=fp32", "fp32"]),
        ("precision", "BF16,bf16,auto", ["bf16", AUTO]),
        ("model", "mpt-125m, mpt-350m", ["mpt-125m", "mpt-350m"]),
        ("set", ["layers=2-8*2", "tied=false"], [("layers", (2, 4, 8)), ("tied", (False,))]),
        ("set", {"layers": [2, 4], "positions": "alibi"}, [("layers", (2, 4)), ("positions", ("alibi",))]),
    ],
)
def test_values(axis: str, text: Any, values: list[Any]) -> None:
    assert list(values_of(axis, text)) == values


def test_items_of_a_list_are_read_one_by_one() -> None:
    assert values_of("host_mem", ["1073741824", "40GiB"]) == (GIB, 40 * GIB)
    assert values_of("precision", ["bf16,gradients=fp32", "fp32"]) == ("bf16,gradients=fp32", "fp32")


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 600))
def test_arithmetic_ranges_are_those_of_a_loop(first: int, more: int, step: int) -> None:
    expected, value = [], first
    while value <= first + more:
        expected.append(value)
        value += step
    assert list(values_of("seq", f"{first}-{first + more}+{step}")) == expected


@given(st.integers(1, 5000), st.integers(0, 500_000), st.integers(2, 9))
def test_geometric_ranges_are_those_of_a_loop(first: int, more: int, factor: int) -> None:
    expected, value = [], first
    while value <= first + more:
        expected.append(value)
        value *= factor
    assert list(values_of("seq", f"{first}-{first + more}*{factor}")) == expected


@given(st.sampled_from([axis for axis in AXES if axis not in ("model", "on")]), st.text("0123456789kMGiB,-+*=auto. ²"))
def test_whatever_is_typed_is_read_or_told_in_words(axis: str, text: str) -> None:
    try:
        values = values_of(axis, text)
    except FlopwiseError as error:
        assert error.what
        return
    assert 0 < len(values) <= MOST_CELLS


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"seq": "8k-512*2"}, "empty range"),
        ({"seq": "1-8*1"}, "never reaches its end"),
        ({"seq": "1-8*0"}, "never reaches its end"),
        ({"seq": "1-8+0"}, "never reaches its end"),
        ({"seq": "1-8*"}, "never reaches its end"),
        ({"seq": "1-8"}, "as a range"),
        ({"seq": ""}, "cannot read"),
        ({"seq": "1,,2"}, "cannot read"),
        ({"seq": "1-2G+1"}, "more than"),
        ({"gpus": "0"}, "no number of devices"),
        ({"device_mem": "40"}, "40 bytes are no device's memory"),
        ({"precision": "bf61"}, "no precision is called"),
        ({"model": "mpt-125"}, "no model is called"),
        ({"set": ["layer=2"]}, "there is no field 'layer'"),
        ({"set": ["layers=2", "layers=4"]}, "given twice"),
        ({"sec": "1"}, "no axis of a sweep is called 'sec'"),
        ({"batch": "8", "batch_tokens": "2M"}, "--batch beside --batch-tokens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_are_told_in_words(words: dict[str, Any], what: str) -> None:
    assert what in told(**words).what


def test_a_sweep_needs_a_model() -> None:
    with pytest.raises(FlopwiseError, match="needs a model"):
        read_axes({})


# -- cells -----------------------------------------------------------------------------------------------------------


def test_batches_in_tokens_are_divided_by_each_length_alone() -> None:
    """Of llm-foundry's README: two models, four lengths and one batch in tokens are eight cells. There they are 20."""
    found = cells(model="mpt-13b,mpt-30b", seq="2k-16k*2", batch_tokens="2M", gpus="8")
    assert len(found) == 8
    pairs = [(cell.model_name, cell.sequence_tokens, cell.batch_sequences) for cell in found]
    each = [(2048, 1024), (4096, 512), (8192, 256), (16384, 128)]
    assert pairs == [(model, *pair) for model in ("mpt-13b", "mpt-30b") for pair in each]


def test_cells_come_in_a_fixed_order_and_once() -> None:
    words = {"model": "mpt-350m,mpt-125m", "seq": "2k,512", "batch": "8,8,16", "precision": "fp32,bf16"}
    found = cells(**words)
    assert len(found) == 16
    assert [cell_id(cell) for cell in found] == [cell_id(cell) for cell in cells(**words)]
    assert len({cell_id(cell) for cell in found}) == 16
    first = found[0]
    assert (first.model_name, first.sequence_tokens, first.batch_sequences, first.precision) == (
        "mpt-350m",
        2048,
        8,
        "fp32",
    )
    assert [cell.precision for cell in found[:2]] == ["fp32", "bf16"]


def test_a_field_that_descriptions_get_later_changes_no_id() -> None:
    """A table that was written before the field was there is the same cell."""
    (cell,) = cells(model="mixtral-8x7b", seq="2k", batch="8")
    earlier = {key: value for key, value in cell.model.items() if key != "rotary_pairs"}
    assert cell_id(replace(cell, model=earlier)) == cell_id(cell)
    other = cell.model | {"rotary_pairs": "neighbours"}
    assert cell_id(replace(cell, model=other)) != cell_id(cell)


def test_two_names_of_one_device_are_one_cell() -> None:
    found = cells(on="h100-sxm,h100")
    assert [cell.hardware for cell in found] == ["h100-sxm"]


def test_what_is_left_open() -> None:
    (cell,) = cells(model="llama-3-8b")
    assert cell == CellSetup(
        model=model_table(load_model("llama-3-8b")),
        hardware="h100-sxm",
        devices=1,
        sequence_tokens=8192,
        batch_sequences=AUTO,
        micro_batch_sequences=AUTO,
        precision="bf16",
    )


def test_on_a_cpu_what_is_left_open_is_as_training_has_it() -> None:
    cpu = replace(H100, name="this-cpu", device=replace(H100.device, kind="cpu"))
    grid = expand(read_axes({"model": "mpt-125m", "on": "this-cpu", "gpus": "1,2"}), {"this-cpu": cpu})
    assert [cell.sequence_tokens for cell in grid.settings] == [256, 256]
    assert [cell.batch_sequences for cell in grid.settings] == [8, 16]


def test_changes_of_the_model_are_an_axis() -> None:
    found = cells(set=["layers=2,4", "tied=false"], seq="512,1k")
    assert [(cell.model["layers"], cell.sequence_tokens) for cell in found] == [
        (2, 512),
        (2, 1024),
        (4, 512),
        (4, 1024),
    ]
    assert found[0].model_name == "mpt-125m+layers=2+tied=false"


@pytest.mark.parametrize("name", model_names())
def test_a_models_table_is_read_back_as_it_is(name: str, tmp_path: Path) -> None:
    """`flopwise train` is given the table in a file, and writes it into its record: it has to stay the same."""
    table = model_table(load_model(name))
    (tmp_path / "model.toml").write_text(to_toml(table))
    assert model_table(load_model(tmp_path / "model.toml")) == table


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"batch": "64", "micro": "8,128"}, "micro 128"),
        ({"batch": "64", "micro": "16", "gpus": "8"}, "larger than a device's 8 sequences"),
        ({"micro": "4"}, "--micro 4 beside --batch auto"),
        ({"batch": "4,64", "gpus": "8"}, "batch 4 "),
        ({"batch_tokens": "1k", "seq": "512,2k"}, "sequence 2,048"),
        ({"batch_tokens": "10k", "seq": "1000"}, "no whole number of sequences"),
        ({"host_mem": "100GiB", "gpus": "8"}, "--host-mem beside 8 devices"),
        ({"model": "gpt2", "seq": "2k"}, "learned positions for 1,024 tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_cell_that_contradicts_itself_is_named(words: dict[str, Any], what: str) -> None:
    assert what in told(**words).what


def test_positions_that_grow_with_the_sequence_do() -> None:
    (cell,) = cells(model="mpt-125m", seq="64k")
    assert cell.sequence_tokens == 65536


def test_a_million_cells_are_refused_before_they_are_made() -> None:
    # Were they made, this would take minutes and all memory.
    error = told(seq="1-1000+1", batch="1-1000+1")
    assert "1,000,000 cells" in error.what
    assert "1,000 seq × 1,000 batch" in (error.why or "")
    assert "10,000,000 cells" in told(set=["layers=1-1000+1"], seq="1-10000+1").what


def test_a_label_says_all_that_tells_cells_apart() -> None:
    (cell,) = cells(seq="2k", batch="2k", micro="4", device_mem="40GiB", host_mem="none")
    assert (
        label(cell)
        == "mpt-125m · sequence 2,048 · batch 2,048 · micro 4 · 1 × h100-sxm · bf16 · device 40.0 GiB · host 0 B"
    )


# -- files -----------------------------------------------------------------------------------------------------------

FILE = """
[grid]
model = ["mpt-125m", "mpt-350m"]
on = "h100-sxm"
seq = "512-2k*2"
batch-tokens = "64k"

[run]
steps = 5
time-limit = "10m"
profile = false
data = "corpus"

[[cells]]
model = "mpt-1b"
seq = 4096

[[skip]]
model = "mpt-350m"
seq = "1k,2k"
reason = "measured last week"
"""


def from_file(tmp_path: Path, text: str, flags: dict[str, Any] | None = None) -> Grid:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    file = read_sweep_file(path)
    return join_grids([expand(axes, HERE, file.skip) for axes in all_axes(file, flags or {})])


def test_a_file_is_a_grid_with_further_cells_and_some_left_out(tmp_path: Path) -> None:
    grid = from_file(tmp_path, FILE)
    assert [(cell.model_name, cell.sequence_tokens, cell.batch_sequences) for cell in grid.settings] == [
        *(("mpt-125m", 512 * 2**power, 128 // 2**power) for power in range(3)),
        *(("mpt-350m", 512 * 2**power, 128 // 2**power) for power in range(3)),
        ("mpt-1b", 4096, 16),
    ]
    assert grid.skipped == {cell_id(grid.settings[place]): "measured last week" for place in (4, 5)}
    assert read_sweep_file(tmp_path / "sweep.toml").run == {
        "steps": "5",
        "time_limit": "10m",
        "profile": False,
        "data": ["corpus"],
    }


def test_flags_override_a_file(tmp_path: Path) -> None:
    grid = from_file(tmp_path, FILE, {"batch": "8", "seq": "2k"})
    assert {(cell.sequence_tokens, cell.batch_sequences) for cell in grid.settings} == {(2048, 8), (4096, 8)}


def test_what_is_left_out_may_contradict_itself(tmp_path: Path) -> None:
    text = '[grid]\nmodel="mpt-125m"\non="h100-sxm"\nbatch=[8, 64]\nmicro=[4, 16]\n[[skip]]\nbatch=8\nmicro=16\n'
    grid = from_file(tmp_path, text)
    assert len(grid.settings) == 4
    assert len(grid.skipped) == 1
    with pytest.raises(FlopwiseError, match="micro 16"):
        from_file(tmp_path, text.partition("[[skip]]")[0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gird]\nmodel='mpt-125m'", "did you mean grid"),
        ("[grid]\nmodle='mpt-125m'", "did you mean model"),
        ("[grid]\nmodel='mpt-125m'\n[run]\nstep=3", "did you mean steps"),
        ("[grid]\nmodel='mpt-125m'\n[[skip]]\nsequence=3", "no key of"),
        ("[grid]\nmodel='mpt-125m'\n[[skip]]\nreason='no'", "what it leaves out is not said"),
        ("[grid]\nmodel='mpt-125m'\n[skip]\nseq=3", "two brackets"),
        ("[grid]\nmodel='mpt-125m'\nseq=[1.5]", "seq cannot be"),
        ("[grid]\nmodel='mpt-125m'\nseq=true", "seq cannot be"),
        ("[grid]\nmodel='mpt-125m'\nseq='8k-2k*2'", "empty range"),
        ("[run]\nsteps=3", "neither [grid] nor [[cells]]"),
        ("grid=3", "not a table"),
        ("[grid]\nmodel='mpt-125m'\nseq='1k,2k'\n[[cells]]\nmodel='gpt2'", "does not say which seq"),
        ("architecture='transformer'\nname='x'", "not a sweep"),
        ("[grid", "not valid TOML"),
    ],
)
def test_mistakes_of_a_file_are_told_in_words(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError) as caught:
        from_file(tmp_path, text)
    assert words in str(caught.value)
    assert caught.value.hint


def test_cells_alone_are_a_sweep(tmp_path: Path) -> None:
    text = "[[cells]]\nmodel='mpt-125m'\non='h100-sxm'\nseq=512\nbatch=8\n[[cells]]\nmodel='gpt2'\non='h100-sxm'\n"
    assert [cell.model_name for cell in from_file(tmp_path, text).settings] == ["mpt-125m", "gpt2"]
    assert all_axes(SweepFile(), {"model": "gpt2"})[0].model == ("gpt2",)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("10 min", 600), ("1.5h", 5400), ("45", 45)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "-3s", "10d", "m", "1e3s", "nan", "inf"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(FlopwiseError) as caught:
        parse_duration(text)
    assert caught.value.hint


def test_a_task_gives_models_its_head() -> None:
    found = expand(read_axes({"model": "bert-base,roberta-base", "task": "masked,classification", "on": "h100"}), HERE)
    heads = [(cell.model_name, cell.task, cell.model["head"]) for cell in found.settings]
    assert heads == [
        ("bert-base+masked", "masked", "masked"),
        ("bert-base", "classification", "classifier"),
        ("roberta-base", "masked", "masked"),
        ("roberta-base+classifier", "classification", "classifier"),
    ]
    plain = expand(read_axes({"model": "bert-base", "task": "auto,classification", "on": "h100"}), HERE)
    assert [cell.task for cell in plain.settings] == ["classification"], "what is the same is one cell"
    with pytest.raises(FlopwiseError, match="reads from left to right"):
        expand(read_axes({"model": "gpt2", "task": "masked", "on": "h100"}), HERE)
    with pytest.raises(FlopwiseError, match="no task of a sweep is called 'dpo'"):
        read_axes({"model": "gpt2", "task": "dpo"})
