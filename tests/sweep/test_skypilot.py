"""Tasks for SkyPilot, read back by a parser of YAML."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware
from flopwise.store.cells import Cell
from flopwise.sweep.jobs.skypilot import ACCELERATORS, SkyOptions, quoted, render, render_all
from tests.support.slurm_cells import cell, record_of

yaml = pytest.importorskip("yaml")


def read(cells: list[Cell], options: SkyOptions, **changes: Any) -> dict[str, Any]:
    task = yaml.safe_load(render(record_of(*cells, **changes), cells, options))
    assert isinstance(task, dict)
    return task


def test_a_task_has_what_its_cells_need(tmp_path: Path) -> None:
    cells = [cell(8, 512), cell(8, 1024)]
    task = read(cells, SkyOptions(store=tmp_path, infra="aws/us-east-1", use_spot=True))
    assert list(task) == ["name", "resources", "file_mounts", "setup", "run"]
    assert task["name"] == "flopwise-night-8x-h200"
    assert task["resources"] == {"accelerators": "H200:8", "infra": "aws/us-east-1", "use_spot": True}
    assert task["setup"] == "pip install 'flopwise[train]'\n"
    assert task["file_mounts"] == {
        "~/flopwise-store/sweeps/night.json": f"{tmp_path}/sweeps/night.json",
        **{f"~/flopwise-store/cells/{one.id}": f"{tmp_path}/cells/{one.id}" for one in cells},
    }


def test_the_run_goes_through_every_cell(tmp_path: Path) -> None:
    """It is run by bash, with a stand-in for Python that fails on the first cell."""
    cells = [cell(1, 512), cell(1, 1024)]
    python, told = tmp_path / "a python", tmp_path / "told"
    lines = ["#!/bin/sh", f'echo "$@" >> {shlex.quote(str(told))}', f'test "$8" != {cells[0].id}']
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)
    task = read(cells, SkyOptions(store=tmp_path, python=str(python)))
    ended = subprocess.run(["/bin/bash", "-c", task["run"]], env={"HOME": str(tmp_path)}, timeout=120, check=False)
    assert ended.returncode == 1
    expected = [
        f"-P -m flopwise sweep --resume night --only {one.id} --store {tmp_path}/flopwise-store" for one in cells
    ]
    assert told.read_text().splitlines() == expected


def test_with_a_bucket_results_are_copied_after_each_cell(tmp_path: Path) -> None:
    task = read([cell()], SkyOptions(store=tmp_path, bucket="s3://lab/sweeps"))
    assert task["file_mounts"]["/flopwise-results"] == {"source": "s3://lab/sweeps", "mode": "MOUNT"}
    assert 'cp -r "$store"/. /flopwise-results/flopwise-night-1x-h200/' in task["run"]


def test_files_that_the_cells_name_lie_where_they_look_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my data").mkdir()
    (tmp_path / "tokens.json").touch()
    named = {"data": ("my data", "wikitext"), "tokenizer": str(tmp_path / "tokens.json")}
    task = read([cell()], SkyOptions(store=Path("runs")), **named)
    assert task["file_mounts"]["~/my data"] == f"{tmp_path}/my data"
    assert task["file_mounts"][f"{tmp_path}/tokens.json"] == f"{tmp_path}/tokens.json"
    assert not any("wikitext" in place for place in task["file_mounts"])
    with pytest.raises(FlopwiseError, match="cannot be copied"):
        read([cell()], SkyOptions(store=Path("runs")), data=("../" + tmp_path.name,))


def test_cells_of_several_kinds_are_several_tasks(tmp_path: Path) -> None:
    cells = [cell(1), cell(8), cell(8, 1024), cell(1, hardware="l40s")]
    tasks = render_all(record_of(*cells), cells, SkyOptions(store=tmp_path))
    assert sorted(tasks) == [
        "flopwise-night-1x-h200.sky.yaml",
        "flopwise-night-1x-l40s.sky.yaml",
        "flopwise-night-8x-h200.sky.yaml",
    ]
    with pytest.raises(FlopwiseError, match="one task cannot be for"):
        render(record_of(*cells), cells, SkyOptions(store=tmp_path))


def test_cells_for_the_cpu_rent_no_gpu(tmp_path: Path) -> None:
    assert read([cell()], SkyOptions(store=tmp_path), device="cpu")["resources"] == {"cpus": "4+"}
    assert read([cell(hardware="this-cpu")], SkyOptions(store=tmp_path))["resources"] == {"cpus": "4+"}


def test_hardware_that_skypilot_may_not_know_is_named_by_hand(tmp_path: Path) -> None:
    other = [cell(hardware="h200x")]
    with pytest.raises(FlopwiseError, match="not known what SkyPilot calls") as caught:
        read(other, SkyOptions(store=tmp_path))
    assert (caught.value.why or "").startswith("did you mean h200 ")
    assert read(other, SkyOptions(store=tmp_path, accelerator="H200"))["resources"] == {"accelerators": "H200:1"}


def test_more_devices_than_a_machine_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError, match="more than one machine"):
        read([cell(16)], SkyOptions(store=tmp_path))


@pytest.mark.parametrize(
    "options",
    [{"accelerator": "H100\nrun: x"}, {"infra": "a b"}, {"cpus": "many"}, {"bucket": "lab"}, {"bucket": "s3://a b"}],
    ids=str,
)
def test_options_that_skypilot_would_misread_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(FlopwiseError) as caught:
        SkyOptions(store=tmp_path, **options)  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize("name", sorted(ACCELERATORS))
def test_names_are_those_of_the_catalogue(name: str) -> None:
    assert load_hardware(name).name == name


@pytest.mark.parametrize("folder", ["a: b", "- x", "#no", "it's", 'a "b"', "{x}", "back\\slash", "ünï", "tab\there"])
def test_odd_paths_arrive_whole(tmp_path: Path, folder: str) -> None:
    task = read([cell()], SkyOptions(store=tmp_path / folder))
    assert task["file_mounts"]["~/flopwise-store/sweeps/night.json"] == f"{tmp_path / folder}/sweeps/night.json"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_read_back(text: str) -> None:
    assert yaml.safe_load(f"key: {quoted(text)}") == {"key": text}


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_set_up_is_read_back(setup: str) -> None:
    task = read([cell()], SkyOptions(store=Path("/store"), setup=setup))
    assert task["setup"].rstrip("\n") == setup.rstrip("\n")
