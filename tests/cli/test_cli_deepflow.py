"""`--method deepflow` on the command line: the reference's print-out to the letter, and its figures in every form."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import read_table
from flopwise.catalog.load import ROOT, technology_file, technology_names
from flopwise.references.deepflow import PUBLISHED, from_table, run
from flopwise.references.deepflow.table import FIELDS
from tests.cli.test_cli_fuzz import answered

SEED = (Path(__file__).parents[1] / "data" / "deepflow_seed.txt").read_text()
DEEPFLOW = ["predict", "lstm-lm", "--method", "deepflow"]
GIBI = 2**30


def figures(*words: str) -> dict[str, Any]:
    code, out, err = answered([*DEEPFLOW, *words, "-o", "json"])
    assert code == 0, err
    answer = json.loads(out)
    assert isinstance(answer, dict)
    return answer


def told(words: list[str]) -> str:
    """The error of a command line that is a mistake."""
    code, out, err = answered(words)
    assert (code, out) == (2, ""), (code, out)
    assert err.startswith("error: ")
    assert "hint: " in err
    return err


def test_the_print_out_is_the_reference_s() -> None:
    code, out, err = answered([*DEEPFLOW, "--print-out"])
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 250
    assert out == "".join(line for line in SEED.splitlines(keepends=True) if not line.startswith("time_per_step"))


def test_the_shipped_technology_is_the_published_one() -> None:
    assert technology_names() == ("deepflow-2019",)
    assert from_table(read_table(technology_file("DeepFlow-2019"))) == PUBLISHED


def test_json_holds_what_the_print_out_says() -> None:
    answer = figures()
    assert f"{answer['step_s']:.8f}" == "302.88817584"
    assert answer["tokens_per_s"] == pytest.approx(512 * 20 / answer["step_s"])
    assert f"{answer['n_params'] / 1e9:.2f}" == "38.37"
    assert f"{answer['peak_flops'] / 1e12:.1f}" == "6.5"
    assert answer["usable_flops"] == pytest.approx(0.7 * answer["peak_flops"])
    assert f"{answer['device_bytes']['total'] / GIBI:.1f}" == "198.8"
    parts = [size for part, size in answer["device_bytes"].items() if part != "total"]
    assert sum(parts) == answer["device_bytes"]["total"]
    assert f"{answer['device_overflow']:.1f}" == "7.4"
    assert answer["fits"] is False
    assert answer["power_share"]["network"] == 0.2
    assert any("neither gradients nor optimizer state" in note for note in answer["notes"])


def test_csv_is_one_tidy_row() -> None:
    code, out, err = answered([*DEEPFLOW, "-o", "csv"])
    assert code == 0
    (row,) = csv.DictReader(io.StringIO(out))
    assert float(row["step_s"]) == run(PUBLISHED).time_s
    assert {"device_bytes_softmax", "power_share_core", "cell_forward_s", "parallel_data", "dram_bytes_per_s"} <= set(
        row
    )
    assert "note: " in err, "what the reference leaves out is said beside rows"


def test_markdown_brings_times_and_memory() -> None:
    code, out, _ = answered([*DEEPFLOW, "-o", "md"])
    assert code == 0
    for words in ("| recurrent layers", "| softmax backward", "| embedding ", "not counted"):
        assert words in out


@pytest.mark.parametrize("columns", [80, 120])
def test_the_page_fits_and_tells_all(columns: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    several = tmp_path / "several.toml"
    several.write_text("dp = 4\nkp_hidden_type = 1\nkp_hidden_dim1 = 4\n")
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--on", "several.toml"], ["--on", "several.toml,deepflow-2019"]):
        code, out, err = answered([*DEEPFLOW, *words])
        assert code == 0
        assert max(map(len, out.splitlines())) <= columns
        assert "neither gradients" in " ".join((out + err).split())
    code, out, _ = answered(DEEPFLOW)
    assert "✗ does not fit 26.8 GiB: overflow rate 7.41" in out
    assert "Time: 302.88817584" in out
    assert "303 s" in out


def test_the_parts_of_the_page_add_up_to_the_step() -> None:
    from flopwise.references.deepflow.report import deepflow_record, recurrent_s

    for change in ({}, {"dp": 4}, {"lp": 2, "hlp": 2}):
        record = deepflow_record(run(from_table(change, base=PUBLISHED)), model="m", hardware="h")
        cells = 2 * 20 * (record.times.cell_forward_s + record.times.cell_backward_s)
        if not change:
            assert recurrent_s(record) == pytest.approx(cells + record.times.hidden_update_s)
        assert 0 < recurrent_s(record) < record.step_s


def test_batch_sequence_and_model_apply() -> None:
    answer = figures("--batch", "32", "--seq", "10", "--set", "layers=3", "--set", "hidden=1024")
    assert answer["model"] == "lstm-lm+layers=3+hidden=1024"
    assert (answer["batch_sequences"], answer["sequence_tokens"], answer["batch_tokens"]) == (32, 10, 320)
    expected = from_table({"batch_size": 32, "seq_len": 10, "num_layers": 3, "layer_size": 1024}, base=PUBLISHED)
    assert answer["step_s"] == run(expected).time_s


def test_a_file_gives_technology_power_and_degrees(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('dp = 8\nTDP = 600\n[tech_param]\nHBM_stack_capacity = "8 GB"\n')
    answer = figures("--on", str(path))
    expected = run(from_table({"dp": 8, "TDP": 600, "HBM_stack_capacity": "8 GB"}, base=PUBLISHED))
    assert answer["step_s"] == expected.time_s
    assert answer["parallel"]["data"] == 8
    assert answer["network_bytes_per_s"] > 0
    assert any("several devices" in note for note in answer["notes"])
    assert answer["hardware"] == str(path)


def test_a_device_without_an_l2(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    path.write_text("L2 = -0.08\n")
    code, out, _ = answered([*DEEPFLOW, "--on", str(path)])
    assert code == 0
    assert "L2                        -              -      none" in out


MISTAKES = [
    (["predict", "gpt2", "--method", "deepflow"], "cannot predict gpt2"),
    (["predict", "lstm-lm", "--method", "deepflw"], "--method deepflow"),
    ([*DEEPFLOW, "--on", "h100-sxm"], "finished device"),
    ([*DEEPFLOW, "--on", "H100"], "finished device"),
    ([*DEEPFLOW, "--on", "this-machine"], "finished device"),
    ([*DEEPFLOW, "--on", str(ROOT / "hardware" / "h200.toml")], "finished device"),
    ([*DEEPFLOW, "--on", "nothing-of-the-kind"], "no technology"),
    ([*DEEPFLOW, "--on", "./nowhere.toml"], "no file"),
    ([*DEEPFLOW, "--on", ","], "must be named"),
    ([*DEEPFLOW, "--precision", "bf16"], "--precision means nothing"),
    ([*DEEPFLOW, "--gpus", "8"], "--gpus means nothing"),
    ([*DEEPFLOW, "--show-config"], "--show-config means nothing"),
    ([*DEEPFLOW, "--optimizer", "adamw"], "--optimizer means nothing"),
    ([*DEEPFLOW, "--batch", "0"], "--batch"),
    ([*DEEPFLOW, "--set", "projection=0"], "no projection"),
    ([*DEEPFLOW, "--print-out", "-o", "json"], "keep one"),
    (["predict", "lstm-lm,lstm-lm", "--method", "deepflow", "--print-out"], "once for each"),
    (["predict", "lstm-lm", "--on", "h200", "--print-out"], "--method deepflow"),
    (["predict", "lstm-lm", "--on", "deepflow-2019"], "is a technology"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[" ".join(words)[8:70] for words, _ in MISTAKES])
def test_mistakes_are_answered(words: list[str], expected: str) -> None:
    assert expected in told(words)


FILES = {
    "cores = 0.3": "core",
    "[tech]\na = 1": "no section 'tech'",
    "x = [": "not valid TOML",
    "TDP = 1e308": "out of range",
    "core_energy_per_flop = 1e-320": "out of range",
    "TDP = 0": "positive",
    "core = 2.0": "is not a share",
    "dp = 1000": "cannot share",
    "auto = true": "auto",
    "HBM_stack_bw = '3 GB'": "B/s",
    "[technology]\nname = 'x'": "technology of ours",
    "kp_hidden_type = 3": "kp_hidden",
    "dp = true": "dp",
    "precision = nan": "precision",
}


@pytest.mark.parametrize("text", FILES)
def test_mistakes_of_files_are_answered(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert FILES[text] in told([*DEEPFLOW, "--on", str(path)])


values = st.one_of(
    st.integers(-5, 10**6), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["1 GB", "x"])
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(list(FIELDS)), values, max_size=4))
def test_every_file_is_answered(tmp_path: Path, table: dict[str, Any]) -> None:
    path = tmp_path / "any.toml"
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items()))
    code, out, err = answered([*DEEPFLOW, "--on", str(path), "-o", "json"])
    assert code in (0, 2), err
    if code == 0:
        assert json.loads(out)["step_s"] > 0
    else:
        assert out == ""
        assert "hint: " in err


def test_a_technology_is_shown_with_its_comments(tmp_path: Path) -> None:
    code, out, _ = answered(["show", "deepflow-2019"])
    assert (code, out) == (0, technology_file("deepflow-2019").read_text())
    code, out, _ = answered(["show", "deepflow-2019", "-o", "json"])
    printed = tmp_path / "printed.json"
    printed.write_text(out)
    assert from_table(read_table(printed)) == PUBLISHED
    path = tmp_path / "mine.toml"
    assert answered(["show", "deepflow-2019", "-w", str(path)])[0] == 0
    assert figures("--on", str(path))["step_s"] == run(PUBLISHED).time_s
    with pytest.raises(FlopwiseError, match="is a technology"):
        from flopwise.catalog.load import load_hardware

        load_hardware(path)


def test_the_physical_method_predicts_the_same_model() -> None:
    code, out, _ = answered(["predict", "lstm-lm", "--on", "h100-sxm", "-o", "json"])
    assert code == 0
    answer = json.loads(out)
    assert answer["n_params"] == pytest.approx(figures()["n_params"], rel=1e-4)
    code, out, _ = answered(["predict", "lstm-lm", "--on", "h100-sxm", "--method", "PHYSICAL", "-o", "json"])
    assert json.loads(out) == answer
