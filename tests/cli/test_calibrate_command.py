"""`flopwise calibrate` on this machine's CPU: what is timed, what is written, and what is told when it cannot be."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from flopwise.base.errors import FlopwiseError
from flopwise.calibrate import calibrating
from flopwise.calibrate.calibrating import calibrate_device, stream_call
from flopwise.calibrate.kernel_calls import attention_calls, product_calls
from flopwise.calibrate.kernel_clock import CpuClock
from flopwise.calibrate.shapes import KINDS, AttentionShape, Schedule, cpu_schedule
from flopwise.catalog.load import load_hardware
from flopwise.cli import app
from flopwise.engine import devices
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.products import Products
from flopwise.profile.measure import this_machine
from flopwise.records.calibration import AttentionCalls, ProductKind
from flopwise.train import run as train_run


def tiny_schedule(*, quick: bool) -> Schedule:
    """A second of it: three layers' products, two lengths."""
    whole = cpu_schedule(quick=True)
    return replace(
        whole,
        products=whole.products[:9],
        other_products=whole.other_products[:2],
        attentions=(
            AttentionShape(sequences=2, tokens=64, heads=4, kv_heads=2, head_dim=32),
            AttentionShape(sequences=1, tokens=128, heads=4, kv_heads=2, head_dim=32),
        ),
        stream_bytes=(2**18, 2**22),
        row_s=0.002,
        settle_s=(0.01, 0.01),
        most_s=20.0 if quick else 60.0,
    )


@pytest.fixture(autouse=True, scope="module")
def cpu() -> Iterator[None]:
    """Its peaks are measured once, not for every test."""
    found = this_machine.this_cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_machine, "this_cpu", lambda: found)
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with little to measure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrating, "cpu_schedule", tiny_schedule)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["calibrate", *words])


def refused(*words: str) -> FlopwiseError:
    """The mistake that a command line is answered with."""
    error = run(*words).exception
    assert isinstance(error, FlopwiseError)
    return error


# -- the command -----------------------------------------------------------------------------------------------------


def test_a_file_for_predict_plan_and_train(folder: Path) -> None:
    result = run("--device", "cpu", "--name", "mine", "--quick")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "written to mine.toml; use it with --on mine.toml"
    # The share is the median's.
    assert re.search(r"median GFLOP/s +of the peak +best GFLOP/s\n", result.stdout)
    assert "small: a side is shorter than 1,024" in result.stdout
    hardware = load_hardware("mine.toml")
    assert (hardware.name, hardware.device.kind) == ("mine", "cpu")
    assert hardware.sources[hardware.efficiency.gemm.source].kind == "measured"
    assert hardware.sources[hardware.efficiency.attention.source].kind == "measured"

    asked = ["gpt2", "--on", "mine.toml", "--seq", "128", "--batch", "2", "--precision", "fp32"]
    for words in (["predict", *asked], ["plan", *asked, "-w", "plan.toml"]):
        answer = CliRunner().invoke(app, words)
        assert answer.exit_code == 0, answer.output

    small: dict[str, Any] = {
        "sequence_tokens": 32,
        "batch_sequences": 2,
        "steps": 1,
        "checkpoint": False,
        "device": "cpu",
    }
    record = train_run(on="mine.toml", store="runs", **small)
    assert record.measurement is not None and record.measurement.hardware == "mine"
    # A run that goes on elsewhere must find the file again.
    assert record.request["on"] == str(folder / "mine.toml")
    plan = next(Path("runs").glob("*/plan.toml"))
    assert f'hardware = "{folder / "mine.toml"}"' in plan.read_text(encoding="utf-8")
    again = train_run(model=str(plan), steps=1, checkpoint=False, device="cpu", store="runs")
    assert again.measurement is not None and again.measurement.hardware == "mine"


def test_a_file_that_is_there_stays_until_it_may_go(folder: Path) -> None:
    (folder / "a.toml").write_text("mine", encoding="utf-8")
    error = refused("--device", "cpu", "-o", "a.toml")
    assert "is there already" in error.what and "--force" in str(error.hint)
    assert (folder / "a.toml").read_text(encoding="utf-8") == "mine"

    table = json.loads(run("--device", "cpu", "-o", "a.toml", "--force", "--output", "json").stdout)
    assert load_hardware("a.toml").name == table["hardware"]["name"] == "this-cpu-measured"
    assert table["file"] == "a.toml"
    # Every row that was timed.
    counts = {name: len(table["calibration"][name]) for name in ("products", "attentions", "streams", "copies")}
    assert counts == {"products": 11, "attentions": 4, "streams": 4, "copies": 0}
    assert all(row["seconds"] > 0 for row in table["calibration"]["products"])
    assert [path.name for path in folder.iterdir()] == ["a.toml"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--device", "tpu"], "--device cannot be 'tpu'"),
        (["--output", "csv"], "--output cannot be 'csv'"),
        (["--name", "My Card"], "--name cannot be 'My Card'"),
        (["--name", "../card"], "--name cannot be '../card'"),
        (["-o", "json"], "-o names the file"),
        (["-o", "card.txt"], "is no TOML file"),
        (["-o", "nowhere/card.toml"], "cannot be written"),
        (["--device", "cpu", "--like", "h100-sxm"], "--like is for GPUs"),
        (["--name", "h200"], "--name h200 is a name of the catalogue"),
        (["--name", "nvidia-h200"], "--name nvidia-h200 is a name of the catalogue"),
        (["--name", "this-cpu"], "--name this-cpu is a name of the catalogue"),
    ],
    ids=[
        *("device", "output", "name", "path-as-name", "form-as-file", "suffix", "folder", "like-on-a-cpu"),
        *("catalogue", "alias", "this-cpu"),
    ],
)
def test_mistakes(folder: Path, words: list[str], what: str) -> None:
    assert what in refused(*words).what
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "place",
    ["/proc/x.toml", "link.toml", "loop.toml", "a.toml/x.toml", f"{'x' * 300}.toml", "a\0b.toml", "folder.toml"],
    ids=["proc", "dangling-link", "loop", "below-a-file", "long", "null", "folder"],
)
def test_a_place_that_cannot_be_written_is_refused_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(calibrating, "calibrate_device", lambda *_, **__: pytest.fail("it was measured"))
    (folder / "a.toml").write_text("mine", encoding="utf-8")
    (folder / "link.toml").symlink_to("nowhere/x.toml")
    (folder / "loop.toml").symlink_to("loop.toml")
    (folder / "folder.toml").mkdir()
    before = sorted(folder.iterdir())
    error = refused("--device", "cpu", "-o", place)
    assert "cannot be written" in error.what and error.why and error.hint and error.exit_code == 2
    assert sorted(folder.iterdir()) == before


def test_what_was_measured_is_printed_where_it_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _text: str) -> None:
        raise FlopwiseError(f"cannot write {path}", why="No space left on device")

    monkeypatch.setattr("flopwise.base.files.write_whole", full)
    result = run("--device", "cpu", "--quick", "--name", "mine")
    assert isinstance(result.exception, FlopwiseError) and "was printed" in str(result.exception.hint)
    monkeypatch.undo()
    (folder / "kept.toml").write_text(result.stdout, encoding="utf-8")
    assert load_hardware(folder / "kept.toml").name == "mine"


def test_no_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is no GPU" in refused("--device", "cuda").what
    assert not list(folder.iterdir())


@pytest.fixture
def unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "choose_device", lambda _wanted: "cuda")
    monkeypatch.setattr(devices, "device_facts", lambda _device: {"device_name": "NVIDIA Z9000 PCIe"})


@pytest.mark.usefixtures("unknown_gpu")
def test_an_unknown_gpu_is_told_what_is_missing(folder: Path) -> None:
    error = refused()
    assert "'NVIDIA Z9000 PCIe', is not in the catalogue" in error.what
    assert "datasheet's peak" in str(error.why) and "--like h100-sxm" in str(error.hint)
    assert "no GPU" in refused("--like", "tpu-v5e").what
    assert "did you mean" in str(refused("--like", "h1000").why)
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("unknown_gpu")
def test_an_interrupt_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def interrupted(device: str, formats: tuple[str, ...], *_: object, **settings: object) -> None:
        asked.update(settings, device=device, formats=formats)
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrating, "calibrate_device", interrupted)
    result = run("--like", "h100-sxm", "--quick")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1] == "nothing was written"
    assert (asked["device"], asked["quick"]) == ("cuda", True)
    assert {"bf16", "fp8"} < set(asked["formats"])
    assert not list(folder.iterdir())


def test_train_runs_where_it_is(folder: Path) -> None:
    with pytest.raises(FlopwiseError, match="--on h100-sxm describes NVIDIA H100"):
        train_run(on="h100-sxm", device="cpu", steps=1, store=str(folder / "runs"))
    with pytest.raises(FlopwiseError, match="there is no file"):
        train_run(on="gone.toml", device="cpu", steps=1, store=str(folder / "runs"))


# -- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_attention_that_fails_is_left_out_and_told() -> None:
    def broken(**_: object) -> AttentionCalls:
        raise RuntimeError("no kernel for this card\nand much more")

    told: list[tuple[str, int, int]] = []
    found = calibrate_device("cpu", ("fp32",), product_calls, broken, tell=lambda *step: told.append(step))
    assert found.attentions == () and len(found.products) == 11
    assert "some attention were left out: no kernel for this card" in found.notes
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert len(told) == told[0][2]


def test_rows_are_left_out_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "cpu_schedule", lambda quick: replace(tiny_schedule(quick=quick), most_s=0.0))
    with pytest.raises(FlopwiseError, match="too few matrix products"):
        calibrate_device("cpu", ("fp32",), product_calls, attention_calls)


class SlowProducts(Products):
    """The engine's, so slow that a row can only be of them; they keep which they were."""

    SECONDS = 0.004
    seen: ClassVar[set[tuple[str, torch.dtype, int, int, int]]] = set()

    def forward(self, source: Tensor, matrix: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
        assert bias is None
        super().forward(source, matrix, bias, out=out)
        self._wait("forward", out, source.shape[1])

    def dgrad(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
        assert not add
        super().dgrad(gradient, matrix, out=out, add=add)
        self._wait("to_source", out, gradient.shape[1])

    def wgrad(self, gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
        super().wgrad(gradient, source, total=total)
        self._wait("to_matrix", total, gradient.shape[0])

    def _wait(self, kind: str, out: Tensor, depth: int) -> None:
        self.seen.add((kind, out.dtype, out.shape[0], depth, out.shape[1]))
        time.sleep(self.SECONDS)


@pytest.mark.usefixtures("folder")
def test_the_products_that_are_timed_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[torch.device, torch.dtype]] = set()

    def slow(device: torch.device, dtype: torch.dtype, sums: torch.dtype, arena: Arena) -> Products:
        assert sums == dtype
        asked.add((device, dtype))
        return SlowProducts(arena)

    monkeypatch.setattr("flopwise.calibrate.kernel_calls.products_for", slow)
    monkeypatch.setattr(SlowProducts, "seen", set())
    table = json.loads(run("--device", "cpu", "--quick", "--output", "json").stdout)["calibration"]
    assert all(row["seconds"] >= SlowProducts.SECONDS for row in table["products"])
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    assert asked == {(torch.device("cpu"), dtype) for dtype in types.values()}
    assert SlowProducts.seen == {
        (row["kind"], types[row["number_format"]], row["rows"], row["depth"], row["columns"])
        for row in table["products"]
    }
    assert table["versions"]["products"] == "torch"


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_a_layer(kind: ProductKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of the call, multiplied in numbers of twice the width."""
    made: dict[str, list[Tensor]] = {"randn": [], "zeros": []}

    def kept(name: str, make: Callable[..., Tensor], *sides: int, **settings: Any) -> Tensor:
        made[name].append(make(*sides, **settings))
        return made[name][-1]

    for name in made:
        monkeypatch.setattr(torch, name, partial(kept, name, getattr(torch, name)))
    call = product_calls(kind=kind, rows=5, depth=7, columns=3, number_format="fp32", device="cpu")
    assert call.kernel == "torch"
    first, second = (numbers.double() for numbers in made["randn"])
    [result] = made["zeros"]
    expected = {
        "forward": lambda: first @ second.t(),
        "to_source": lambda: first @ second,
        "to_matrix": lambda: first.t() @ second,
    }[kind]()
    # Only the gradient of the matrix is a sum.
    for factor in (1, 2 if kind == "to_matrix" else 1):
        call.run()
        torch.testing.assert_close(result.double(), factor * expected, rtol=1e-5, atol=1e-5)


def test_streams_move_what_they_say() -> None:
    for kernel in ("copy", "add"):
        result = stream_call(kernel, 4096, "cpu")()
        assert isinstance(result, Tensor) and result.nbytes == 4096


def test_a_call_takes_what_it_takes() -> None:
    seconds = CpuClock().seconds([lambda: time.sleep(0.004)], 0.03)
    assert 0.004 <= seconds < 0.1
