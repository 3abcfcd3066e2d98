"""The command line as a user meets it: exit codes, tables and files, nothing but words on an error."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from flopwise.catalog.load import hardware_names, model_names
from tests.cli.test_cli_fuzz import answered


def surroundings(columns: int) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "COLUMNS": str(columns), "HOME": "/nonexistent"}


def run(*arguments: str, columns: int = 120) -> subprocess.CompletedProcess[str]:
    """In this process, which saves the half second that another one takes to begin."""
    with patch.dict(os.environ, surroundings(columns), clear=True):
        code, out, err = answered(list(arguments))
    return subprocess.CompletedProcess(arguments, code, out, err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", "llama-3-8b,mpt-7b", "--on", "h200,h100-sxm"],
        ["predict", "gpt-3-175b", "--on", "rtx-4090", "--seq", "2k", "--batch", "1"],
        ["predict", "llama-3-8b", "--on", "nowhere"],
    ],
)
def test_a_process_of_its_own_answers_the_same(arguments: list[str]) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "flopwise", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=surroundings(100),
    )
    here = run(*arguments, columns=100)
    assert (process.returncode, process.stdout, process.stderr) == (here.returncode, here.stdout, here.stderr)


def predicted(*arguments: str) -> dict[str, object]:
    result = run("predict", *arguments, "-o", "json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def test_json_has_the_promised_keys_and_sums() -> None:
    answer = predicted("llama-3-8b", "--on", "h100-sxm", "--seq", "8k", "--batch", "8", "--micro", "3")
    assert answer["n_params"] == 8_030_261_248
    assert answer["convention"] == "causal"
    assert answer["peak_flops"] == 989.5e12
    memory = answer["device_bytes"]
    assert isinstance(memory, dict)
    assert memory["total"] == sum(size for owner, size in memory.items() if owner != "total")
    assert set(memory) == {"weights", "gradients", "optimizer", "activations", "logits", "workspace", "total"}
    ops = answer["ops"]
    assert isinstance(ops, list)
    assert {"name", "flops", "bytes", "time_s", "bound"} <= set(ops[0])
    assert sum(op["time_s"] for op in ops) == pytest.approx(answer["step_s"])
    assert sum(op["flops"] for op in ops) == answer["hardware_flops"]
    assert sum(op["share"] for op in ops) == pytest.approx(1)
    tokens, step_s, mfu = answer["tokens_per_s"], answer["step_s"], answer["mfu"]
    model_flops = answer["model_flops"]
    assert isinstance(tokens, float)
    assert isinstance(step_s, float)
    assert isinstance(model_flops, int)
    assert tokens == pytest.approx(8 * 8192 / step_s)
    assert mfu == pytest.approx(model_flops / (step_s * 989.5e12))
    assert answer["accumulation_steps"] == 3


def test_bert_on_a_neuron_core() -> None:
    answer = predicted("bert-base", "--on", "trn1-core", "--seq", "128", "--batch", "32")
    assert answer["n_params"] == 109_486_854
    flops = answer["model_flops"]
    assert isinstance(flops, int)
    assert f"{flops / 1e12:.3f}" == "2.145"


def test_palm_convention() -> None:
    answer = predicted(
        "mpt-7b", "--on", "a100-80gb", "--seq", "2048", "--batch", "4", "--convention", "palm", "--recompute", "full"
    )
    parameters = 6_658_859_008
    assert answer["model_flops"] == 4 * 3 * (2 * parameters * 2048 + 4 * 32 * 4096 * 2048**2)
    assert answer["recompute"] == "full"


def test_csv_and_markdown_carry_the_same_rows() -> None:
    arguments = ("predict", "gpt2,bert-base", "--on", "h200,v100", "--seq", "512", "--batch", "8")
    rows = list(csv.DictReader(io.StringIO(run(*arguments, "-o", "csv").stdout)))
    assert [(row["model"], row["hardware"]) for row in rows] == [
        ("gpt2", "h200"),
        ("gpt2", "v100"),
        ("bert-base", "h200"),
        ("bert-base", "v100"),
    ]
    assert int(rows[0]["device_bytes_total"]) > 0
    assert rows[1]["precision"] == "fp16-mixed"
    markdown = run(*arguments, "-o", "md").stdout.splitlines()
    assert len({len(line) for line in markdown}) == 1, "columns line up"
    assert sum("bert-base" in line for line in markdown) == 2
    assert sum("fp16-mixed" in line for line in markdown) == 2
    for form in ("md", "csv"):
        assert run(*arguments, "-o", form).stderr.startswith("note: efficiency of ")


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(columns: int) -> None:
    for arguments in (
        ("predict", "mixtral-8x7b", "--on", "h200"),
        ("predict", "llama-3-8b,mpt-7b", "--on", "h200,h100-sxm"),
        ("ls", "models"),
        ("ls", "hardware"),
    ):
        result = run(*arguments, columns=columns)
        assert result.returncode == 0, result.stderr
        assert max(map(len, result.stdout.splitlines())) <= columns, arguments
        assert "…" not in result.stdout, f"nothing is cut off in {arguments}"
    for line in run(
        "predict", "gpt-neox-20b,mpt-7b", "--on", "a100-pcie-80gb,v100-16gb", columns=columns
    ).stdout.splitlines()[3:]:
        assert line.startswith(("gpt-neox-20b  ", "mpt-7b  ")), "names are never folded"


def test_columns_leave_a_narrow_table_in_order() -> None:
    arguments = ("predict", "gpt-neox-20b,gpt2", "--on", "a100-pcie-80gb,v100-16gb")
    wide = run(*arguments, columns=160).stdout.splitlines()[2]
    assert all(name in wide for name in ("precision", "micro", "seq", "recompute", "bound by"))
    narrow = run(*arguments, columns=80).stdout.splitlines()[2]
    assert "bound by" not in narrow
    assert all(name in narrow for name in ("model", "hardware", "precision", "memory", "tok/s", "8 in 10 at"))
    assert all(len(line) <= 80 for line in run(*arguments, columns=80).stdout.splitlines() if "20b" in line)
    same = run("predict", "gpt2,bert-base", "--on", "h200", columns=160).stdout.splitlines()
    assert "bf16" in same[0]
    assert "precision" not in same[2]


def test_does_not_fit_is_an_answer() -> None:
    result = run("predict", "gpt-3-175b", "--on", "rtx-4090", "--seq", "2k", "--batch", "1")
    assert result.returncode == 0
    assert "does not fit" in result.stdout


BAD = [
    (["predict", "llama-3-8bb"], "did you mean llama-3-8b"),
    (["predict", "llama-3-8b", "--on", "h1000"], "no hardware"),
    (["predict", "llama-3-8b", "--on", "h200", "--seq", "8kb"], "--seq"),
    (["predict", "llama-3-8b", "--on", "h200", "--seq", "-5"], "--seq"),
    (["predict", "llama-3-8b", "--on", "h200", "--seq", "0"], "at least 1"),
    (["predict", "llama-3-8b", "--on", "h200", "--batch", "1.5"], "--batch"),
    (["predict", "llama-3-8b", "--on", "h200", "--batch", "4", "--micro", "5"], "--micro 4"),
    (["predict", "llama-3-8b", "--on", "h200", "--batch", "4", "--batch-tokens", "8k"], "keep --batch"),
    (["predict", "llama-3-8b", "--on", "h200", "--seq", "8k", "--batch-tokens", "9k"], "--batch 1"),
    (["predict", "llama-3-8b", "--on", "h200", "--precision", "bf17"], "bf16"),
    (["predict", "llama-3-8b", "--on", "h200", "--precision", "bf16,weights"], "--precision"),
    (["predict", "llama-3-8b", "--on", "h200", "--precision", "bf16,weights=fp7"], "fp7"),
    (["predict", "llama-3-8b", "--on", "v100", "--precision", "bf16"], "fp16"),
    (["predict", "llama-3-8b", "--on", "h200", "--recompute", "some"], "error: --recompute cannot be 'some'"),
    (["predict", "llama-3-8b", "--on", "h200", "--device-mem", "40"], "--device-mem 40GiB"),
    (["predict", "llama-3-8b", "--on", "h200", "--device-mem", "0"], "--device-mem"),
    (["predict", "llama-3-8b", "--on", "h200", "--device-mem", "40Gb"], "bits"),
    (["predict", "llama-3-8b", "--on", "h200", "--seq", "512,,1024"], "a value between commas is missing"),
    (["predict", "llama-3-8b", "--on", "h200", "--set", "layers=2", "--set", "layers =3"], "twice"),
    (["predict", "llama-3-8b", "--on", "h200", "--set", "layers=2\nhidden=3"], "on one line"),
    (["predict", "llama-3-8b", "--on", "h200", "--set", "layers=" + "9" * 5000], "too many digits"),
    (["predict", "llama-3-8b", "--on", "h200", "--set", "layers=" + "[" * 5000], "--set"),
    (["predict", "llama-3-8b", "--on", "h200", "--set", "name="], "cannot be called"),
    (["predict", "gpt-3", "--on", "h200"], "did you mean gpt-3-175b"),
    (["predict", "h100-sxm"], "--on h100-sxm"),
    (["predict", "gpt2", "--on", "cpu"], "this-cpu"),
    (["predict", "gpt2", "--on", "bert-base"], "is a model"),
    (["predict", "x" * 5000, "--on", "h200"], "no model"),
    (["predict", "/dev/zero", "--on", "h200"], "not a file"),
    (["predict", "llama-3-8b", "--on", "h200", "--device-mem", "40G"], "40GiB"),
    (["predict", "llama-3-8b", "--on", "h200", "-o", "xml"], "json"),
    (["predict", "llama-3-8b", "--on", "h200", "--set", "layers"], "--set"),
    (["predict", "llama-3-8b", "--on", "h200", "--set", "layer=3"], "layers"),
    (["predict", "llama-3-8b", "--on", "h200", "--set", "kv_heads=5"], "kv_heads"),
    (["predict", "gpt2", "--on", "h200", "--seq", "4k"], "--seq 1024"),
    (["predict", "", "--on", "h200"], "must be named"),
    (["predict", "./nowhere/config.json", "--on", "h200"], "no file"),
    (["predict", "llama-3-8b", "--on", "./nowhere.toml"], "no file"),
    (["ls", "dogs"], "models"),
    (["show", "h10"], "h100"),
    (["show", "llama-3-8b", "-o", "yaml"], "toml"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(arguments)[:80] for arguments, _ in BAD])
def test_mistakes_are_answered(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2, result.stdout
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert "hint: " in result.stderr
    assert words in result.stderr


def test_listings_name_everything() -> None:
    for kind, names in (("models", model_names()), ("hardware", hardware_names())):
        records = json.loads(run("ls", kind, "-o", "json").stdout)["rows"]
        key = "model" if kind == "models" else "hardware"
        assert tuple(record[key] for record in records) == names


def test_hardware_is_listed_with_its_own_format_and_with_full_values() -> None:
    lines = {line.split()[0]: line for line in run("ls", "hardware").stdout.splitlines()}
    assert "125 TFLOP/s fp16" in lines["v100"]
    assert "TFLOP/s bf16" in lines["h200"]
    assert "estimated" in lines["v100"]
    rows = {row["hardware"]: row for row in csv.DictReader(io.StringIO(run("ls", "hardware", "-o", "csv").stdout))}
    records = {record["hardware"]: record for record in json.loads(run("ls", "hardware", "-o", "json").stdout)["rows"]}
    assert float(rows["h200"]["peak_bf16_flops"]) == records["h200"]["peak_flops"]["bf16"]
    assert int(rows["h200"]["memory_bytes"]) == records["h200"]["memory_bytes"]
    assert rows["v100"]["peak_bf16_flops"] == ""
    models = {row["model"]: row for row in csv.DictReader(io.StringIO(run("ls", "models", "-o", "csv").stdout))}
    assert int(models["llama-3-8b"]["parameters"]) == 8_030_261_248


def test_show_prints_a_file_that_predict_takes(tmp_path: Path) -> None:
    for kind, name in (("model", "qwen3-8b"), ("hardware", "mi300x")):
        path = tmp_path / f"{kind}.toml"
        path.write_text(run("show", name).stdout)
    own = predicted(str(tmp_path / "model.toml"), "--on", str(tmp_path / "hardware.toml"), "--batch", "2")
    catalogue = predicted("qwen3-8b", "--on", "mi300x", "--batch", "2")
    assert own == catalogue
    assert "peak_flops" in run("show", str(tmp_path / "hardware.toml")).stdout


def test_show_writes_a_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    result = run("show", "h200", "-w", str(path))
    assert (result.returncode, result.stdout) == (0, "")
    assert path.read_text() == run("show", "h200").stdout
    refused = run("show", "h200", "-w", str(tmp_path / "nowhere" / "mine.toml"))
    assert refused.returncode == 2
    assert "cannot write" in refused.stderr


def test_env_tells_versions() -> None:
    facts = json.loads(run("env", "-o", "json").stdout)
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["cores"] >= 1


def test_show_config_says_where_each_value_came_from() -> None:
    result = run("predict", "llama-3-8b", "--on", "h200", "--seq", "4k", "--micro", "AUTO", "--show-config")
    assert result.returncode == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert lines["sequence_tokens"].endswith("flag")
    assert lines["optimizer"].endswith("default")
    assert "auto: " in lines["micro_batch_sequences"]
    assert "auto: " in lines["device_memory_bytes"]
    assert {"model", "hardware", "precision", "recompute", "convention", "set"} <= set(lines)


def test_show_config_tells_every_pair_in_every_form() -> None:
    arguments = [
        *("predict", "gpt2,llama-3-8b", "--on", "h200,v100", "--set", "layers=2", "--device-mem", "30GiB"),
        *("--batch-tokens", "64k", "--convention", "palm", "--show-config"),
    ]
    told = json.loads(run(*arguments, "-o", "json").stdout)["rows"]
    assert [(one["model"]["value"], one["hardware"]["value"]) for one in told] == [
        ("gpt2+layers=2", "h200"),
        ("gpt2+layers=2", "v100"),
        ("llama-3-8b+layers=2", "h200"),
        ("llama-3-8b+layers=2", "v100"),
    ]
    assert told[0]["device_memory_bytes"] == {"value": 30 * 2**30, "from": "flag"}
    assert told[0]["set"] == {"value": {"layers": 2}, "from": "flag"}
    assert told[0]["convention"] == {"value": "palm", "from": "flag"}
    assert told[0]["batch_sequences"] == {"value": 64, "from": "flag"}
    assert told[1]["precision"]["from"].startswith("auto: ")
    rows = list(csv.DictReader(io.StringIO(run(*arguments, "-o", "csv").stdout)))
    assert len(rows) == 4 * len(told[0])
    assert run(*arguments).stdout.count("gpt2+layers=2") == 2


def test_this_cpu_is_described_and_predicted_on() -> None:
    answer = predicted("gpt2", "--on", "this-cpu", "--seq", "128", "--batch", "2")
    assert answer["precision"] == "fp32"
    assert answer["peak_format"] == "fp32"
    step_s = answer["step_s"]
    assert isinstance(step_s, float)
    assert 0 < step_s < 3600
    # No step of a CPU is among the measured ones that intervals come from.
    assert answer["interval"] is None
    assert any("no interval" in str(note) for note in answer["notes"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["predict", "llama-3-8b", "--on", "h100-sxm"], ["ls", "models"]],
    ids=["help", "predict", "ls"],
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    code = (
        "import sys; from flopwise.cli import main; sys.argv = ['flopwise', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'pandas', 'scipy', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


def test_help_imports_no_numpy() -> None:
    code = (
        "import sys; from flopwise.cli import main; sys.argv = ['flopwise', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "sys.exit('imported' if {'numpy', 'msgspec', 'rich'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False).returncode == 0


@pytest.mark.parametrize("width", [80, 120])
def test_tables_of_several_models_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = answered(["predict", "llama-3-8b,mixtral-8x7b,gpt2", "--on", "h100,h200,a100-80gb"])
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= width
    # What tells the rows apart stays, also where a sequence follows from the model.
    assert len({tuple(line.split()[:2]) for line in lines[3:]}) == 9
