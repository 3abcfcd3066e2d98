"""`flopwise export` as a user types it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import plan_table
from flopwise.cli import app
from flopwise.setup.parallel import Parallel
from tests.support.export_plans import MODEL, cluster, one_device

RUN = CliRunner()


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps(plan_table(cluster(), MODEL)))
    return str(path)


def test_the_data_are_on_stdout_and_the_talk_is_not(plan: str) -> None:
    result = RUN.invoke(app, ["export", plan, "--to", "torchtitan"])
    assert result.exit_code == 0
    assert tomllib.loads(result.stdout)["training"]["seq_len"] == 512
    assert "carried over" in result.stderr


def test_what_json_cannot_hold_stands_beside_it(plan: str, tmp_path: Path) -> None:
    target = tmp_path / "ds_config.json"
    result = RUN.invoke(app, ["export", plan, "--to", "DeepSpeed", "-w", str(target)])
    assert result.exit_code == 0
    assert result.stdout == ""
    assert json.loads(target.read_text())["zero_optimization"]["stage"] == 3
    notes = (tmp_path / "ds_config.json.notes.txt").read_text()
    assert "optimizer: the training script" in notes
    assert "parallel.prefetch" in notes
    assert f"wrote {target}" in result.stderr


def test_what_plan_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    words = ["plan", "llama-3-1b", "--on", "h100-sxm", "--gpus", "2", "--seq", "2k", "--batch", "8", "-w", str(path)]
    assert RUN.invoke(app, words).exit_code == 0
    for target in ("torchtitan", "megatron", "accelerate", "deepspeed"):
        result = RUN.invoke(app, ["export", str(path), "--to", target])
        assert result.exit_code == 0 or "cannot take this plan" in str(result.exception)


def test_one_device(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps(plan_table(one_device(), MODEL)))
    result = RUN.invoke(app, ["export", str(path), "--to", "megatron"])
    assert result.exit_code == 0
    assert "--global-batch-size 8\n" in result.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--to", "torchtitn"), "did you mean torchtitan"),
        (("--to", "megatron", "-w", "/nowhere/at/all"), "cannot be written"),
    ],
    ids=["name", "file"],
)
def test_mistakes_are_told(plan: str, words: tuple[str, ...], told: str) -> None:
    result = RUN.invoke(app, ["export", plan, *words])
    assert isinstance(result.exception, FlopwiseError)
    assert told in str(result.exception)
    assert result.stdout == ""


def test_the_plan_itself_is_not_written_over(plan: str) -> None:
    before = Path(plan).read_text()
    result = RUN.invoke(app, ["export", plan, "--to", "torchtitan", "-w", plan])
    assert isinstance(result.exception, FlopwiseError)
    assert Path(plan).read_text() == before


def test_files_that_are_no_plans(tmp_path: Path, plan: str) -> None:
    other = tmp_path / "other.toml"
    other.write_text('name = "x"\n')
    for name in (str(other), str(tmp_path / "missing.toml"), str(tmp_path)):
        result = RUN.invoke(app, ["export", name, "--to", "megatron"])
        assert isinstance(result.exception, FlopwiseError)
    # A file that was changed by hand so that the model cannot be split that way.
    table = plan_table(cluster(Parallel(tensor=3)), MODEL)
    Path(plan).write_text(tomli_w.dumps(table))
    result = RUN.invoke(app, ["export", plan, "--to", "megatron"])
    assert isinstance(result.exception, FlopwiseError)
