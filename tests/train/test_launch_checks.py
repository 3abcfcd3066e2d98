"""What is refused of a training on several devices: once, with its own exit code, before any process is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.catalog.load import load_model, model_table, plan_table
from flopwise.engine import spawning
from flopwise.profile.measure import nvml, this_machine
from flopwise.profile.measure.this_machine import Here, gpus_here
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.measurement import RunRecord
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel
from flopwise.store.runs import new_run, write_record
from flopwise.train import launching
from flopwise.train.launching import check_ranks
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer
from tests.cli.test_cli_fuzz import answered
from tests.cli.test_cli_train import RANKS, cluster_plan
from tests.report.test_training_report import a_record
from tests.support.fake_nvml import FakeLibrary

TINY = Transformer(
    name="tiny", title="tiny", source="test", layers=2, hidden=32, heads=4, ffn=64, vocab=264, context=64
)
H200 = Here(device="cuda", count=8, title="NVIDIA H200", memory_bytes=150_000_000_000)
CPU = Here(device="cpu", count=4, title="a CPU, 4 cores", memory_bytes=24 * 2**30)

Spawned = list[int]


@pytest.fixture(scope="module")
def measured() -> Hardware:
    return this_machine.this_cpu()


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: Hardware) -> Spawned:
    """How many ranks were started, each time; in an empty folder, on a CPU of four cores."""
    started: Spawned = []

    def spawn(_words: list[str], ranks: int) -> int:
        started.append(ranks)
        return 0

    monkeypatch.setattr(spawning, "spawn", spawn)
    monkeypatch.chdir(tmp_path)
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "text.txt").write_text("some text to be learned " * 40)
    (tmp_path / "tiny.toml").write_text(to_toml(model_table(TINY)))
    on_device(monkeypatch, CPU)
    monkeypatch.setattr(this_machine, "this_cpu", lambda: measured)
    return started


def on_device(monkeypatch: pytest.MonkeyPatch, here: Here | None) -> None:
    monkeypatch.setattr(launching, "_here", lambda _wanted: here)
    if here is not None and here.device == "cuda":
        monkeypatch.setattr(this_machine, "gpu_name", lambda: here.title)


def write_plan(plan: ClusterPlan, model: Model) -> None:
    Path("plan.toml").write_text(to_toml(plan_table(plan, model)))


def refused(spawned: Spawned, line: str, code: int = 2) -> str:
    found, out, err = answered(["train", *line.split()])
    assert (found, out, spawned) == (code, "", []), err
    assert err.count("error: ") == 1 and "\nhint: " in err
    return err


# -- devices ---------------------------------------------------------------------------------------------------------


def test_a_plan_for_other_devices_is_refused(spawned: Spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(cluster_plan(256), load_model("gpt2"))
    monkeypatch.setattr(this_machine, "this_cpu", lambda: pytest.fail("the machine was measured"))
    err = refused(spawned, "plan.toml --steps 1")
    assert "the plan is for NVIDIA H200" in err and "this machine has a CPU, 4 cores" in err
    assert "256 ranks are wanted" in refused(spawned, "plan.toml --steps 1 --anywhere")
    on_device(monkeypatch, replace(H200, title="NVIDIA L40S", memory_bytes=48 * 2**30))
    write_plan(cluster_plan(8), load_model("gpt2"))
    assert "the plan is for NVIDIA H200" in refused(spawned, "plan.toml --data text.txt")


def test_no_more_ranks_than_devices(spawned: Spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "5 ranks are wanted, and this machine has no GPU and 4 cores" in refused(spawned, "tiny.toml --gpus 5")
    assert "at most 32" in refused(spawned, "tiny.toml --gpus 33 --anywhere")
    words = ["tiny.toml", "--data", "text.txt", "--precision", "fp32", "--gpus"]
    assert answered(["train", *words, "4"])[0] == 0
    assert answered(["train", *words, "5", "--anywhere"])[0] == 0
    assert spawned == [4, 5]
    spawned.clear()
    on_device(monkeypatch, H200)
    for more in ("", " --anywhere"):
        err = refused(spawned, f"tiny.toml --gpus 9{more}")
        assert "9 GPUs are wanted, and this machine has 8" in err and "hint: --gpus 8" in err


def test_the_limits_of_ranks() -> None:
    for here, ranks, anywhere in ((CPU, 4, False), (CPU, 32, True), (H200, 8, False)):
        check_ranks(here, ranks, anywhere=anywhere)
        with pytest.raises(FlopwiseError, match="are wanted, and this machine has"):
            check_ranks(here, ranks + 1, anywhere=anywhere)


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(this_machine, "open_nvml", lambda: nvml.open_nvml(library))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = gpus_here()
    assert found is not None and (found.device, found.count, found.title) == ("cuda", 2, "Card 0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,7")
    found = gpus_here()
    assert found is not None and (found.count, found.title) == (1, "Card 1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_here() is None
    monkeypatch.setattr(this_machine, "open_nvml", lambda: None)
    assert gpus_here() is None


def test_what_torch_was_built_for_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "gpus_here", lambda: H200)
    for builds, expected in (({"cuda"}, "cuda"), (set[str](), "cpu")):
        monkeypatch.setattr(launching, "_torch_builds", lambda builds=builds: builds)
        found = launching._here("auto")
        assert found is not None and found.device == expected
        assert (launching._here("cpu") or H200).device == "cpu"
    with pytest.raises(FlopwiseError, match="no GPU that torch can use"):
        launching._here("cuda")
    monkeypatch.setattr(launching, "_torch_builds", lambda: {"hip"})
    assert launching._here("auto") is None, "the driver of another vendor was not asked"


def test_torch_says_what_it_was_built_for() -> None:
    import torch

    assert ("cuda" in launching._torch_builds()) == (torch.version.cuda is not None)


# -- what is not executed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": Parallel(tensor=2)}, "tensor parallelism is not executed yet"),
        ({"parallel": Parallel(pipeline=2)}, "pipeline parallelism is not executed yet"),
        ({"parallel": Parallel(context=2)}, "context parallelism is not executed yet"),
        ({"optimizer": "adamw-8bit"}, "adamw-8bit cannot be trained with on several devices yet"),
        ({"precision": "fp8"}, "fp8 cannot be trained in on several devices yet"),
    ],
)
def test_plans_that_are_not_executed(spawned: Spawned, changes: dict[str, object], words: str) -> None:
    plan = replace(cluster_plan(2), hardware="this-cpu", precision="fp32", sequence_tokens=16)
    write_plan(replace(plan, **changes), TINY)  # type: ignore[arg-type]
    assert words in refused(spawned, "plan.toml --data text.txt")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lstm-lm", "its layers run time step by time step"),
        ("tiny.toml --data nothing.txt", "there is no file or folder nothing.txt"),
        ("tiny.toml --data empty.txt", "the data is empty"),
        ("tiny.toml --data binary.bin", "binary.bin is no text"),
        ("tiny.toml --data text.txt --eval-data nothing.txt", "there is no file or folder nothing.txt"),
        ("bert-base --data text.txt --task classification", "text.txt has no labels"),
        ("tiny.toml --data text.txt --tokenizer none.json", "none.json"),
        ("tiny.toml --data text.txt --tokenizer text.txt", "is not a tokenizer"),
        ("tiny.toml --data text.txt --weights empty", "empty holds no weights"),
        ("tiny.toml --data text.txt --weights none", "there is no folder none"),
        ("tiny.toml --data text.txt --store text.txt", "there can be no run in text.txt"),
        ("tiny.toml --data text.txt --store text.txt/runs", "text.txt is no folder"),
        ("gpt2 --data text.txt --seq 2k", "learned positions for 1,024 tokens"),
        ("tiny.toml --data text.txt --precision fp16-mixed", "cannot be trained in"),
    ],
)
def test_what_ranks_would_refuse(spawned: Spawned, words: str, expected: str) -> None:
    Path("empty.txt").touch()
    Path("empty").mkdir()
    Path("binary.bin").write_bytes(b"\x00\xff" * 5000)
    assert expected in refused(spawned, f"{words} --gpus 2")


def test_text_whose_beginning_ends_within_a_character_is_read(spawned: Spawned) -> None:
    Path("text.txt").write_text("x" + "é" * 5000, encoding="utf-8")
    assert answered(["train", "tiny.toml", "--data", "text.txt", "--gpus", "2", "--precision", "fp32"])[0] == 0
    assert spawned == [2]


def test_a_store_that_may_not_be_written_to(spawned: Spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    # To root nothing is forbidden.
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path).name != "runs")
    Path("runs").mkdir()
    assert "it may not be written to" in refused(spawned, "tiny.toml --data text.txt --gpus 2")


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_cap_on_each_device_is_heeded(spawned: Spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "tiny.toml --data text.txt --precision fp32 --gpus 2 --device-mem"
    err = refused(spawned, f"{words} 1MiB", code=1)
    assert "no plan fits" in err and "1.00 MiB of device memory each" in err and "are needed" in err
    hinted = err.partition("hint: --device-mem ")[2].partition(",")[0]
    assert answered(["train", *words.split(), hinted])[0] == 0, "what the hint says does"
    assert spawned == [2]
    spawned.clear()
    on_device(monkeypatch, H200)
    err = refused(spawned, "llama-3-8b --data text.txt --gpus 2 --device-mem 4GiB", code=1)
    assert "no plan fits llama-3-8b on 2 × h200 in 4.00 GiB" in err


def test_a_plan_that_does_not_fit_is_refused_unless_it_is_run_anywhere(
    spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch, H200)
    write_plan(replace(cluster_plan(2), device_memory_bytes=2**30), load_model("llama-3-8b"))
    err = refused(spawned, "plan.toml --data text.txt", code=1)
    assert "no plan fits llama-3-8b on 2 × h200 in 1.00 GiB of device memory each" in err
    write_plan(replace(cluster_plan(2), device_memory_bytes=2**30), load_model("llama-3-1b"))
    assert answered(["train", "plan.toml", "--data", "text.txt", "--anywhere"])[0] == 0
    assert spawned == [2]


# -- runs that go on -------------------------------------------------------------------------------------------------


def interrupted(asked: dict[str, Any]) -> RunRecord:
    return a_record(id="0001", plan={"devices": 2, "precision": "fp32"}, request=asked, state="interrupted")


def test_a_run_that_goes_on_is_looked_at_as_well(spawned: Spawned) -> None:
    folder = new_run(Path("runs"))
    plan = replace(cluster_plan(2), hardware="this-cpu", precision="fp32", sequence_tokens=16)
    (folder / "plan.toml").write_text(to_toml(plan_table(plan, TINY)))
    asked = {"model": "tiny.toml", "data": ["gone.txt"]}
    write_record(folder, interrupted(asked))
    assert "there is no file or folder gone.txt" in refused(spawned, "--resume 1")
    assert "5 ranks are wanted" in refused(spawned, "--resume 1 --gpus 5")
    asked["data"] = ["text.txt"]
    write_record(folder, interrupted(asked))
    assert answered(["train", "--resume", "1"])[0] == 0
    assert answered(["train", "--resume", "1", "--gpus", "3"])[0] == 0
    assert spawned == [2, 3]


def test_where_devices_cannot_be_told_the_ranks_look(spawned: Spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, None)
    assert answered(["train", "tiny.toml", "--gpus", "64"])[0] == 0
    assert spawned == [64]


# -- as it is --------------------------------------------------------------------------------------------------------


def test_checks_take_no_torch_and_start_nothing(tmp_path: Path) -> None:
    text = to_toml(plan_table(cluster_plan(256), load_model("llama-3-70b")))
    (tmp_path / "plan.toml").write_text(text)
    code = """
        import json, subprocess, sys
        started = []
        sys.addaudithook(lambda name, _: started.append(name) if name in ("subprocess.Popen", "os.fork") else None)
        from flopwise.cli import main
        sys.argv = ["flopwise", "train", "plan.toml", "--device", "cpu"]
        try:
            main()
        except SystemExit as end:
            print(json.dumps([end.code, "torch" in sys.modules, started]))
    """
    script = "\n".join(line.removeprefix("        ") for line in code.splitlines())
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [2, False, []]
    assert ran.stderr.startswith("error: the plan is for NVIDIA H200")
