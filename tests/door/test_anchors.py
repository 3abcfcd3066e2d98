"""A measured step as people name it: figures with a set-up, logs of trainers, tables, runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model
from flopwise.cli import app
from flopwise.door.anchors import read_anchor
from flopwise.setup.parallel import Parallel, shard_all
from flopwise.setup.setup import Setup

ASKED = Setup(
    model=load_model("llama-3.1-8b"),
    hardware=load_hardware("h100-sxm"),
    parallel=shard_all(8),
    sequence_tokens=8192,
    batch_sequences=16,
    micro_batch_sequences=2,
    recompute="attention",
)
STEP_S = 16 * 8192 / (8 * 6667)
"""Of torchtitan's published 6,667 tokens/s on each of eight."""


@pytest.mark.parametrize(
    "text",
    [
        f"step_s={STEP_S!r}",
        f"step_ms={1e3 * STEP_S!r}",
        "tokens_per_s=53,336",
        "tokens_per_s_per_gpu=6667",
        f"samples_per_s={16 / STEP_S!r}",
        "[titan] step: 10  loss: 8.01  memory: 77.04GiB(81%)  tps: 6,667  tflops: 386.11  mfu: 39.04%",
        f" iteration 100/ 500 | elapsed time per iteration (ms): {1e3 * STEP_S:.1f} | global batch size: 16 |",
        f"tok/sec: {16 * 8192 / STEP_S:.0f}",
    ],
)
def test_every_form_says_the_same_step(text: str) -> None:
    assert read_anchor(text, ASKED).step_s == pytest.approx(STEP_S, rel=1e-4)


def test_what_is_not_said_is_as_asked() -> None:
    setup = read_anchor("tokens_per_s=25000@gpus=4 tp2 sp seq=4k batch=8 micro=1 precision=bf16-amp", ASKED).setup
    assert setup.parallel == Parallel(data=2, tensor=2, sequence=True)
    assert (setup.sequence_tokens, setup.batch_sequences, setup.micro_batch_sequences) == (4096, 8, 1)
    assert (setup.formats.name, setup.recompute, setup.model) == ("bf16-amp", "attention", ASKED.model)
    other = read_anchor("tokens_per_s=150000@model=llama-3-1b on=a100 batch_tokens=64k micro=1", ASKED).setup
    assert (other.model.name, other.hardware.name, other.batch_sequences) == ("llama-3-1b", "a100-80gb", 8)


def test_logs_and_tables(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("\n".join(f"step: {n}  tps: {rate}" for n, rate in enumerate((100, 3000, 6667, 6667))), "utf-8")
    assert read_anchor(str(log), ASKED).step_s == pytest.approx(STEP_S)
    table = tmp_path / "steps.csv"
    table.write_text("model,tokens_per_s_per_gpu\nx,6667\n", encoding="utf-8")
    found = read_anchor(f"{table}@gpus=8", ASKED)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.name == "steps.csv"


def test_lines_without_a_number_are_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("tps: ...\ntps: 0\ntps: 6,667\n", encoding="utf-8")
    assert read_anchor(str(log), ASKED).step_s == pytest.approx(STEP_S)
    table = tmp_path / "steps.csv"
    table.write_text("tokens_per_s_per_gpu\n0\n6667\n", encoding="utf-8")
    assert read_anchor(str(table), ASKED).step_s == pytest.approx(STEP_S)
    for path, text in ((log, "tok/s: 0\ntok/s: ...\n"), (table, "tokens_per_s\n0\n")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(FlopwiseError, match=r"nothing that a profiler writes|says of no step"):
            read_anchor(str(path), ASKED)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tokens_per_s=0", "no number above 0"),
        ("tokens_per_s=many", "no number above 0"),
        ("tokens_per_hour=5", "no measured figure is called"),
        ("tokens_per_s=50000@sequence=8k", "no setting of an anchor is called 'sequence'"),
        ("tokens_per_s=50000@gpus='8", "cannot read the anchor's set-up"),
        ("tokens_per_s=5", "are predicted of it"),
        ("tokens_per_s_per_gpu=30000", "the least that its FLOPs take"),
        ("no-such-run", "no runs in"),
        ("", "names nothing"),
        ("mfu=40", "beyond the peak"),
        ("tokens_per_s=160000@gpus=8", "the least that its FLOPs take"),
        ("tokens_per_s=53336@gpus=8 gpus=16", "says gpus twice"),
    ],
)
def test_mistakes(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError, match=told) as caught:
        read_anchor(text, ASKED, str(tmp_path))
    assert caught.value.hint


@pytest.mark.parametrize("line", ["tps: .", "tps: ,", "tps: 0", "elapsed time per iteration (ms): 0.0"])
def test_a_log_whose_figures_are_none(line: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(f"step: 1  {line}\n", "utf-8")
    with pytest.raises(FlopwiseError):
        read_anchor(str(path), ASKED)


def test_a_log_with_odd_figures_among_others() -> None:
    assert read_anchor("tps: 0\ntps: 6667.5", ASKED).step_s == pytest.approx(16 * 8192 / (8 * 6667.5))


@pytest.mark.parametrize("figures", [(9800, 5), (62136, 57683, 49809, 40533), (66670, 33340)])
def test_a_table_of_several_set_ups_is_no_one_step(figures: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("\n".join(("tokens_per_s", *map(str, figures))), "utf-8")
    with pytest.raises(FlopwiseError, match=r"from 5 to|from 40,533 to|from 33,340 to"):
        read_anchor(str(path), ASKED)


def test_a_share_may_be_written_as_one() -> None:
    assert read_anchor("mfu=35%", ASKED).step_s == read_anchor("mfu=0.35", ASKED).step_s


def test_a_file_without_a_step(tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(FlopwiseError):
        read_anchor(str(path), ASKED)


def test_in_python_and_on_the_command_line() -> None:
    words = "tokens_per_s_per_gpu=6667@gpus=8 batch=16 micro=2 recompute=attention"
    far = fw.predict("llama-3.1-8b", on="h100", devices=64, seq="8k", batch=128, micro=2, anchor=words)
    bare = fw.predict("llama-3.1-8b", on="h100", devices=64, seq="8k", batch=128, micro=2)
    assert far.interval is not None and bare.interval is not None
    assert far.ceiling_s is None
    width, bare_width = far.interval.high_s / far.interval.low_s, bare.interval.high_s / bare.interval.low_s
    assert width < bare_width
    line = "predict llama-3.1-8b --on h100 --gpus 64 --seq 8k --batch 128 --micro 2 --anchor"
    printed = CliRunner().invoke(app, [*line.split(), words])
    assert printed.exit_code == 0, printed.output
    assert "the measured step tokens_per_s_per_gpu=6667" in printed.stdout
    found = fw.plan("llama-3.1-8b", on="h100", devices=8, seq="8k", batch=16, anchor=words)
    assert found.prediction.interval is not None
    assert "measured step" in found.prediction.interval.basis
    assert found.prediction.step_s == pytest.approx(found.answer.best.step_s)


def test_beside_a_plan_for_one_device_it_is_refused() -> None:
    with pytest.raises(FlopwiseError, match="without"):
        fw.plan("llama-3-1b", on="h100", anchor="tokens_per_s=5000")  # type: ignore[call-overload]


def test_tables_and_figures_as_people_write_them(tmp_path: Path) -> None:
    table = tmp_path / "steps.csv"
    for cell in ("53336", "53.336k", '"53,336"'):
        table.write_text(f"step,tokens_per_s\n1,{cell}\n", "utf-8")
        assert read_anchor(str(table), ASKED).step_s == pytest.approx(STEP_S)
    assert read_anchor("tokens_per_s=53.336k", ASKED).step_s == pytest.approx(STEP_S)
    for text, words in (
        ("step;tokens_per_s\n1;53336\n", "semicolons"),
        ("Step,Tokens/s,Tokens_per_s\n1,2,53336\n", "'Tokens_per_s' is read if it is called tokens_per_s"),
    ):
        table.write_text(text, "utf-8")
        with pytest.raises(FlopwiseError) as caught:
            read_anchor(str(table), ASKED)
        assert words in str(caught.value.why)
    with pytest.raises(FlopwiseError, match="no number above 0"):
        read_anchor("tokens_per_s=53,33", ASKED)
