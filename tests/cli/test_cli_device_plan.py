"""`flopwise plan` for one device, as a user types it: caps, grids, rules, files, and every mistake in them."""

from __future__ import annotations

import csv
import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import parse_bytes
from flopwise.catalog.load import is_plan, load_plan
from flopwise.records.plan import Plan
from tests.cli.test_cli_fuzz import answered
from tests.cli.test_cli_streams import shell

GIB = 2**30
KEYS = {
    *("chunk_tokens", "chunks_per_round", "rounds_per_step", "param_blocks", "grad_blocks", "activation_slots"),
    *("host_saved", "step_s", "tokens_per_s", "mfu", "hfu", "device_bytes", "host_bytes"),
}
SMALL = "llama-3-1b --on h100-sxm --seq 16k --device-mem 8GiB --host-mem 40GiB"
"""A plan in which everything passes over the link: quick, and with recompute."""
DOCUMENTED = "llama-3-8b --on h100-sxm --seq {} --device-mem {}GiB --host-mem {}GiB --rule dataflow-{}"


@cache
def ran(line: str) -> tuple[int, str, str]:
    """Exit code and streams of `flopwise LINE`."""
    return answered(line.split())


def record(line: str) -> dict[str, Any]:
    """A plan as JSON, and what must hold of any."""
    code, out, err = ran(f"plan {line} -o json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    forecast = found["forecast"]
    assert set(found) >= KEYS
    assert list(found["host_saved"]) == ["full", "attention", "context", "input"]
    assert 0 < found["mfu"] <= found["hfu"] <= 1
    assert 0 < found["ceiling_share"] <= 1
    assert forecast["compute_s"] + sum(forecast["idle"].values()) == pytest.approx(found["step_s"], rel=1e-9)
    assert found["tokens_per_step"] / found["step_s"] == pytest.approx(found["tokens_per_s"])
    for place in ("device", "host"):
        assert sum(found[f"{place}_bytes_by_owner"].values()) == found[f"{place}_bytes"]
        if found["rule"] == "flopwise":
            assert 0 <= found[f"{place}_bytes"] <= found[f"{place}_memory_bytes"]
    return found


def refused(line: str, code: int = 2) -> str:
    """The words of an error, told with a hint and without an answer."""
    found, out, err = answered(line.split())
    assert found == code, (found, err)
    assert out == ""
    assert err.startswith("error: ")
    assert "\nhint: " in err
    return err


# -- the answer, in every form ---------------------------------------------------------------------------------------


def test_json_is_whole_and_the_same_twice() -> None:
    found = record(SMALL)
    assert found["device_memory_bytes"] == 8 * GIB
    assert found["host_memory_bytes"] == 40 * GIB
    assert found["sequence_tokens"] == 16384
    saved = sum((*found["host_saved"].values(), *found["device_saved"].values()))
    assert saved == 16 * found["chunks_per_round"]
    assert found["tokens_per_step"] == found["rounds_per_step"] * found["chunks_per_round"] * found["chunk_tokens"]
    assert found["simulated"] <= found["searched"]
    assert answered([*f"plan {SMALL} -o json".split()])[1] == ran(f"plan {SMALL} -o json")[1]


def test_csv_has_the_figures_of_the_json() -> None:
    found, (code, out, _) = record(SMALL), ran(f"plan {SMALL} -o csv")
    assert code == 0
    (row,) = csv.DictReader(io.StringIO(out))
    for key in KEYS - {"host_saved"}:
        assert float(row[key]) == found[key]
    assert {key: int(row[f"host_saved_{key}"]) for key in found["host_saved"]} == found["host_saved"]
    assert sum(float(row[key]) for key in ("compute_s", "idle_s")) == pytest.approx(found["step_s"])


def test_markdown_is_two_tables() -> None:
    code, out, _ = ran(f"plan {SMALL} -o md")
    assert code == 0
    first, second = out.rstrip("\n").split("\n\n")
    assert first.startswith("| model")
    assert second.startswith("| memory")
    for table in (first, second):
        assert len({line.count("|") for line in table.splitlines()}) == 1


@pytest.mark.parametrize("columns", [80, 120])
def test_pages_keep_to_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    grid = "llama-3-1b --on h100-sxm --seq 16k --device-mem 6,8GiB --host-mem 2,40GiB"
    for line in (SMALL, DOCUMENTED.format("64k", 78, 178, "jul11"), grid):
        code, out, err = answered(["plan", *line.split()])
        assert code == 0
        assert max(map(cell_len, out.splitlines())) <= columns
        assert "\x1b" not in out + err
        assert all(row == row.rstrip() for row in out.splitlines())


def test_a_page_has_memory_schedule_speed_reasons_and_notes() -> None:
    page = ran(f"plan {SMALL}")[1]
    for words in ("caps: device 8.00 GiB, host 40.0 GiB", "fits", "rounds a step", "tok/s", "MFU", "HFU", "bound by"):
        assert words in page
    for words in ("would help", "searched", "why", "of the kernels' own ceiling", "in use"):
        assert words in page
    assert "the rate of the link between h100-sxm and its host is estimated, not measured" in " ".join(page.split())


@pytest.mark.parametrize("form", ["csv", "md"])
def test_notes_are_talk_beside_rows(form: str) -> None:
    """As `predict` has it (cli/output.py: beside rows notes are talk)."""
    assert "note: the rate of the link" in ran(f"plan {SMALL} -o {form}")[2]


# -- the rule of the reference ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "sequence", "device", "host", "expected"),
    [
        ("jul11", "64k", 78, 178, (9, 8, 35, 73, 20, 0, 5)),
        ("jul20", "64k", 78, 144, (9, 8, 35, 53, 40, 0, 5)),
        ("jul20", "8k", 30, 70, (5, 4, 5, 6, 21, 0, 34)),
        ("jul17", "8k", 40, 75, (10, 9, 9, 9, 14, 0, 34)),
        ("jul23", "64k", 78, 178, (9, 8, 35, 83, 10, 0, 3)),
        ("jul23", "64k", 78, 144, (9, 8, 35, 53, 40, 0, 3)),
        ("jul23", "8k", 30, 70, (5, 4, 5, 6, 21, 0, 19)),
        ("head", "64k", 78, 178, (10, 10, 80, 169, 7, 0, 7)),
    ],
)
def test_documented_choices_of_the_rule(
    variant: str, sequence: str, device: int, host: int, expected: tuple[int, ...]
) -> None:
    found = record(DOCUMENTED.format(sequence, device, host, variant))
    blocks = (found["param_blocks"], found["grad_blocks"], found["activation_slots"])
    saved = tuple(found["host_saved"][level] for level in ("full", "attention", "context"))
    assert (*blocks, *saved, found["rounds_per_step"]) == expected
    assert found["host_saved"]["input"] == 0
    assert found["rule"] == f"dataflow {variant}"
    assert found["helps"] == []
    assert any("the rule itself counts" in note for note in found["notes"])


def test_the_first_documented_step_has_327680_tokens() -> None:
    found = record(DOCUMENTED.format("64k", 78, 178, "jul11"))
    assert (found["tokens_per_step"], found["chunk_tokens"], found["chunks_per_round"]) == (327_680, 16_384, 4)


@pytest.mark.parametrize("spelling", ["dataflow:jul11", "dataflow@2025-07-11", "Dataflow_JUL11", "dataflow-2025-07-11"])
def test_other_spellings_of_the_rule(spelling: str) -> None:
    line = DOCUMENTED.format("64k", 78, 178, "jul11")
    assert ran(f"plan {line} -o json")[1] == ran(f"plan {line.replace('dataflow-jul11', spelling)} -o json")[1]


def test_the_rule_alone_is_that_of_its_recorded_runs() -> None:
    line = DOCUMENTED.format("64k", 78, 144, "jul20")
    assert record(line.replace("-jul20", "")) == record(line)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rule dataflow-jul12", "jul11, jul17, jul20"),
        ("--rule dataflo", "--rule cannot be"),
        ("--rule flopwise-jul11", "--rule cannot be"),
        ("--rule dataflow --batch 4", "a batch beside --rule"),
        ("--rule dataflow --batch-tokens 256k", "a batch beside --rule"),
        ("--rule dataflow --clip", "clipping beside --rule"),
        ("--rule dataflow --precision fp8", "--precision bf16"),
        ("--rule dataflow --precision bf16-mixed", "--precision bf16"),
        ("--rule dataflow --optimizer lion", "--optimizer adamw"),
    ],
)
def test_what_the_rule_refuses(words: str, said: str) -> None:
    assert said in refused(f"plan llama-3-8b --on h100-sxm --seq 64k --device-mem 78GiB --host-mem 178GiB {words}")


@pytest.mark.parametrize("words", ["mixtral-8x7b --on h100-sxm", "bert-base --on h100-sxm", "llama-3-8b --on mi300x"])
def test_models_and_devices_that_the_rule_does_not_know(words: str) -> None:
    assert "the rule `dataflow`" in refused(f"plan {words} --host-mem 400GiB --rule dataflow")


@pytest.mark.parametrize(("device", "host", "hint"), [(10, 178, "--device-mem 25GiB"), (78, 20, "--host-mem 73GiB")])
def test_caps_that_the_rule_refuses(device: int, host: int, hint: str) -> None:
    line = DOCUMENTED.format("64k", device, host, "jul20")
    assert hint in refused(f"plan {line}", code=1)
    option, cap = hint.split()
    assert ran(f"plan {re.sub(rf'{option} [^ ]+', f'{option} {cap}', line)} -o json")[0] == 0


def test_the_rule_does_not_hint_at_memory_that_the_device_lacks() -> None:
    told = refused("plan llama-3-8b --on h100-sxm --seq 1G --host-mem 178GiB --rule dataflow", code=1)
    for cap in re.findall(r"--device-mem (\w+)", told.split("hint:")[1]):
        assert parse_bytes(cap) <= 80 * GIB


# -- files: the plan, its trace --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan in a file, with its trace beside it."""
    folder = tmp_path_factory.mktemp("plans")
    file = folder / "plan.toml"
    code, out, err = answered([*f"plan {SMALL} -o json".split(), "-w", str(file), "--trace", str(folder / "t.json")])
    assert code == 0, err
    assert "wrote" in err
    assert out == ran(f"plan {SMALL} -o json")[1]
    return file


def test_a_plan_is_read_back_as_it_was_written(written: Path) -> None:
    found = record(SMALL)
    plan, model = load_plan(written)
    assert is_plan(str(written))
    assert isinstance(plan, Plan)
    assert model.name == "llama-3-1b"
    assert plan.expected is not None
    assert plan.expected.step_s == found["step_s"]
    assert plan.expected.device_bytes == found["device_bytes"]
    for key in ("chunk_tokens", "chunks_per_round", "rounds_per_step", "activation_slots", "precision", "hardware"):
        assert getattr(plan, key) == found["plan"][key]
    assert list(plan.saves) == found["plan"]["saves"]
    assert (plan.weights.on_device, plan.gradients.on_device) == (found["param_blocks"], found["grad_blocks"])


def test_a_plan_predicts_what_it_promised(written: Path) -> None:
    code, out, _ = answered(["predict", str(written), "-o", "json"])
    assert code == 0
    again, found = json.loads(out), record(SMALL)
    for key in KEYS | {"forecast", "interval"}:
        assert again[key] == found[key]
    for form in ("table", "csv", "md"):
        assert answered(["predict", str(written), "-o", form])[0] == 0
    assert "a plan says all of it" in refused(f"predict {written} --seq 8k")
    assert "is a plan, not a model" in refused(f"plan {written} --on h100-sxm")


def test_a_plan_by_the_rule_is_read_back_too(tmp_path: Path) -> None:
    line, file = DOCUMENTED.format("64k", 78, 178, "jul11"), tmp_path / "plan.toml"
    assert answered(["plan", *line.split(), "-w", str(file)])[0] == 0
    assert json.loads(answered(["predict", str(file), "-o", "json"])[1])["step_s"] == record(line)["step_s"]


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        *((rf"^{name} = .*\n", "") for name in ("hardware", "chunk_tokens", "activation_slots", "precision")),
        *((rf"^\[{name}\]\n(?:[^\[].*\n|    .*\n|\])*", "") for name in ("weights", "optimizer_state")),
        (r"^saves = \[[^\]]*\]\n", ""),
        (r'"[faciFACI]{1,9}",', '"x",'),
        (r'"[faciFACI]{1,9}",', '"",'),
        (r'"[faciFACI]{1,9}",', '"ffffffffff",'),
        (r'"[faciFACI]{1,9}",', "1,"),
        (r'    "[faciFACI]{1,9}",\n', ""),
        (r"^layers = 16", "layers = 17"),
        (r"^layers = 16", "layers = 0"),
        (r"^chunk_tokens = .*", "chunk_tokens = nan"),
        (r"^chunk_tokens = .*", "chunk_tokens = 20000"),
        (r"^chunk_tokens = .*", "chunk_tokens = 99999999999999999999"),
        (r"^chunk_tokens = .*", "chunk_tokens = 0"),
        (r"^chunks_per_round = .*", "chunks_per_round = 1000000"),
        (r"^sequence_tokens = .*", "sequence_tokens = 9223372036854775807"),
        (r"^rounds_per_step = .*", "rounds_per_step = -1"),
        (r"^activation_slots = .*", "activation_slots = 0"),
        (r"^activation_slots = .*", "activation_slots = 1"),
        (r"^device_memory_bytes = .*", "device_memory_bytes = -5"),
        (r"^step_s = .*", "step_s = nan"),
        (r"^rule = .*", "surprise = 1"),
        (r"^passing = .*", "pasing = 1"),
        (r"^passing = .*", "passing = -1"),
        (r"^blocks = .*", "blocks = 99"),
        (r"^blocks = .*\npassing = .*", "blocks = 0\npassing = 0"),
        (r"^precision = .*", 'precision = "fp3"'),
        (r"^optimizer = .*", 'optimizer = "adam"'),
        (r"^update_place = .*", 'update_place = "host"'),
        (r'^ends = \[\n    "embedding"', 'ends = [\n    "tail"'),
        (r"^hardware = .*", 'hardware = "gone.toml"'),
        (r"^hardware = .*", 'hardware = "trn1"'),
        (r"^hardware = ", "hardware "),
    ],
)
def test_damaged_plans_are_told(written: Path, tmp_path: Path, pattern: str, replacement: str) -> None:
    text = written.read_text()
    damaged = re.sub(pattern, replacement, text, count=1, flags=re.MULTILINE)
    assert damaged != text
    file = tmp_path / "plan.toml"
    file.write_text(damaged)
    refused(f"predict {file}")


def test_a_plan_with_absurdly_many_slots_is_told_at_once(written: Path, tmp_path: Path) -> None:
    """In a process of its own with a limit on its memory: every slot once became an object."""
    file = tmp_path / "plan.toml"
    many = f"activation_slots = {10**15}"
    file.write_text(re.sub(r"^activation_slots = .*", many, written.read_text(), flags=re.MULTILINE))
    result = shell(f"ulimit -v 4000000; timeout 120 $FLOPWISE predict {file}", OPENBLAS_NUM_THREADS="1")
    assert result.returncode == 2
    assert result.stderr.startswith(b"error: ")


def test_a_plan_whose_hardware_file_is_gone(tmp_path: Path) -> None:
    hardware, file = tmp_path / "mine.toml", tmp_path / "plan.toml"
    assert answered(["show", "h100-sxm", "-w", str(hardware)])[0] == 0
    words = ["plan", "gpt2", "--on", str(hardware), "--device-mem", "4GiB", "--host-mem", "4GiB", "-w", str(file)]
    assert answered(words)[0] == 0
    assert answered(["predict", str(file)])[0] == 0
    hardware.unlink()
    assert "mine.toml" in refused(f"predict {file}")


def test_a_trace_has_four_rows(written: Path) -> None:
    events = json.loads((written.parent / "t.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(rows.values()) == ["compute", "copy in", "copy out", "host"]
    tasks = [event for event in events if event["ph"] == "X"]
    assert {rows[event["tid"]] for event in tasks} >= {"compute", "copy in", "copy out"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in tasks)


@pytest.mark.parametrize("option", ["--write", "--trace", "--heatmap"])
def test_a_target_that_cannot_be_written_is_told_by_its_option(option: str, tmp_path: Path) -> None:
    assert f"{option} {tmp_path}/nowhere/x" in refused(f"plan {SMALL} {option} {tmp_path}/nowhere/x")
    assert not (tmp_path / "nowhere").exists()


# -- grids of caps ---------------------------------------------------------------------------------------------------

GRID = "llama-3-8b --on h100-sxm --seq 8k --device-mem 16,24GiB --host-mem 64-128+64GiB"
GRID_CAPS = {(device * GIB, host * GIB) for device in (16, 24) for host in (64, 128)}


@pytest.mark.slow
def test_a_grid_in_every_form() -> None:
    code, out, _ = ran(f"plan {GRID} -o json")
    assert code == 0
    cells = json.loads(out)["rows"]
    assert {(cell["device_memory_bytes"], cell["host_memory_bytes"]) for cell in cells} == GRID_CAPS
    assert all(cell["fits"] and set(cell["plan"]) >= KEYS for cell in cells)
    assert [cell["best"] for cell in cells].count(True) == 1
    for place in ("device", "host"):
        assert all(cell["plan"][f"{place}_bytes"] <= cell[f"{place}_memory_bytes"] for cell in cells)
    page = ran(f"plan {GRID}")[1]
    for words in ("16.0 GiB", "24.0 GiB", "64.0 GiB", "128 GiB", "tok/s over MFU", "★ best"):
        assert words in page


def test_a_grid_by_the_rule_in_every_form() -> None:
    line = GRID.replace("16,24GiB", "16,40GiB") + " --rule dataflow-jul20"
    cells = json.loads(ran(f"plan {line} -o json")[1])["rows"]
    assert [cell["fits"] for cell in cells] == [False, True, False, True]
    assert "the rule" in cells[0]["why_not"] or "it wants" in cells[0]["why_not"]
    rows = list(csv.DictReader(io.StringIO(ran(f"plan {line} -o csv")[1])))
    speeds = [float(row["tokens_per_s"]) if row["tokens_per_s"] else None for row in rows]
    assert speeds == [cell["plan"] and cell["plan"]["tokens_per_s"] for cell in cells]
    markdown = ran(f"plan {line} -o md")[1]
    assert markdown.split()[:2] == ["|", "host"]
    assert markdown.count("✗ does not fit") == 2
    assert ran(f"plan {line}")[1].count("no fit") >= 2


def test_a_cell_of_a_grid_is_the_plan_of_its_caps() -> None:
    cells = json.loads(ran(f"plan {GRID} -o json")[1])["rows"]
    alone = record("llama-3-8b --on h100-sxm --seq 8k --device-mem 16GiB --host-mem 64GiB")
    (cell,) = (c for c in cells if (c["device_memory_bytes"], c["host_memory_bytes"]) == (16 * GIB, 64 * GIB))
    assert cell["plan"] == {key: alone[key] for key in cell["plan"]}


def test_a_cell_without_a_plan_names_the_least_device_memory() -> None:
    """As `Cell` says it: None there means that no device memory helps."""
    code, out, _ = ran("plan llama-3-1b --on h100-sxm --seq 8k --device-mem 1,24GiB --host-mem 64GiB -o json")
    assert code == 0
    tight, roomy = json.loads(out)["rows"]
    assert (tight["fits"], roomy["fits"]) == (False, True)
    assert tight["hints"]
    assert GIB < tight["smallest_device_bytes"] < 24 * GIB


def test_a_heatmap_is_a_picture_with_a_cell_a_pair(tmp_path: Path) -> None:
    file = tmp_path / "x.svg"
    line = "llama-3-1b --on h100-sxm --seq 16k --device-mem 1,8GiB --host-mem 1,40GiB"
    code, _, err = answered([*f"plan {line} --heatmap".split(), str(file)])
    assert code == 0
    assert f"wrote {file}" in err
    root = ElementTree.fromstring(file.read_text())  # noqa: S314 - our own
    assert root.tag.endswith("}svg")
    told = [part.text or "" for part in root.iter() if part.tag.endswith("}title")]
    assert sum(words.startswith("device ") for words in told) == 4
    assert "does not fit" in file.read_text()


def test_a_grid_in_which_nothing_fits_is_an_answer() -> None:
    code, out, _ = ran("plan gpt-3-175b --on rtx-4090 --seq 2k --device-mem 8,16GiB --host-mem 64GiB")
    assert code == 1
    assert "✗" in out


@pytest.mark.parametrize("words", [f"{GRID} --write x.toml", f"{GRID} --trace x.json", f"{SMALL} --heatmap x.svg"])
def test_files_of_one_plan_and_pictures_of_many(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "pair" in refused(f"plan {words}")
    assert not list(tmp_path.iterdir())


def test_load_plan_of_no_plan(tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    assert answered(["show", "gpt2", "-w", str(file)])[0] == 0
    assert not is_plan(str(file))
    with pytest.raises(FlopwiseError, match="is not a plan"):
        load_plan(file)


@pytest.mark.parametrize(
    "words", ["mixtral-8x7b", "qwen3.5-0.8b", "llama-3-1b --lora 8"], ids=["experts", "states", "adapters"]
)
def test_what_is_not_trained_in_fp8_is_not_planned(words: str) -> None:
    assert "--precision bf16" in refused(f"plan {words} --on h200 --seq 4k --host-mem 400GiB --precision fp8")
