"""Any table with named columns: what a row says, what it leaves open, and what every outcome means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flopwise.base.errors import FlopwiseError
from flopwise.cli import app
from flopwise.references.published import read_cases, read_own
from flopwise.references.published.named import counted_flops
from flopwise.setup.parallel import Parallel
from flopwise.work.transformer import Transformer


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.csv"
    path.write_text(text, encoding="utf-8")
    return path


BASE = "model,gpu,n_gpus,seq_len,micro_batch,global_batch"
ROW = "llama-3-8b,h100-sxm,8,8192,1,16"


def test_every_outcome_is_the_same_step(tmp_path: Path) -> None:
    tokens, step_s = 16 * 8192, 4.0
    flops = 16 * counted_flops(read_cases("torchtitan")[0].setup.model, 8192, "causal")
    outcomes = {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "tokens_per_s_per_gpu": tokens / step_s / 8,
        "tflops_per_gpu": flops / step_s / 8 / 1e12,
        "mfu_pct": 100 * flops / step_s / 8 / 989.4e12,
    }
    for name, value in outcomes.items():
        (case,) = read_own(own(tmp_path, f"{BASE},{name}\n{ROW},{value!r}\n")).cases
        assert case.step_s == pytest.approx(step_s, rel=2e-3 if name == "mfu_pct" else 1e-9), name
        assert case.setup.parallel == Parallel(data=8, zero=3)
        assert (case.setup.batch_sequences, case.setup.micro_batch_sequences) == (16, 1)


def test_flops_as_megatron_counts_them() -> None:
    """Equation 3 of arXiv 2104.04473 without recomputation: 72·s·l·h²·(1 + s/(6·h) + V/(12·l·h)) for a sequence."""
    case = read_cases("megatron-core")[4]
    model, s = case.setup.model, case.setup.sequence_tokens
    assert isinstance(model, Transformer)
    layers, h, vocab = model.layers, model.hidden, model.vocab
    expected = 72 * s * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert counted_flops(model, s, "square") == pytest.approx(expected, rel=1e-9)
    # The printed 42 % of 989 TFLOP/s.
    assert case.step_s is not None
    rate = case.setup.batch_sequences * expected / case.step_s / case.setup.parallel.devices
    assert rate == pytest.approx(419.7e12)


def test_a_model_by_its_sizes_and_a_strategy_by_its_columns(tmp_path: Path) -> None:
    header = "model,layers,hidden,heads,ffn,kv_heads,vocab,gpu,n_gpus,tp,pp,parallel,seq_len,global_batch,step_s,stack"
    text = f"{header}\nmine,24,2048,16,5632,4,32000,a100,16,4,2,zero1 sp,4096,64,3.5,megatron-core\n"
    (case,) = read_own(own(tmp_path, text)).cases
    model = case.setup.model
    assert isinstance(model, Transformer)
    assert (model.name, model.layers, model.kv_heads, model.ffn, model.gated) == ("mine", 24, 4, 5632, True)
    assert case.setup.parallel == Parallel(data=2, tensor=4, pipeline=2, zero=1, sequence=True)
    assert (case.stack, case.setup.stack) == ("megatron-core", None)


def test_odd_rows_are_listed_and_the_others_predicted(tmp_path: Path) -> None:
    rows = [
        f"{ROW},4.0",
        "no-such-model,h100-sxm,8,8192,1,16,4.0",
        "llama-3-8b,h1000,8,8192,1,16,4.0",
        "llama-3-8b,h100-sxm,8,8192,1,16,",
        "llama-3-8b,h100-sxm,8,8192,1",
        "llama-3-8b,h100-sxm,8,8192,3,4,4.0",
        "llama-3-8b,h100-sxm,8,8192,1,16,0.004",
    ]
    path = own(tmp_path, "\n".join([f"{BASE},step_s", *rows]) + "\n")
    found = CliRunner().invoke(app, ["validate", str(path), "-o", "json"])
    assert found.exit_code == 0, found.output
    record: dict[str, Any] = json.loads(found.stdout)
    assert (record["n"], [skipped["row"] for skipped in record["skipped"]]) == (1, [2, 3, 4, 5, 6, 7])
    printed = CliRunner().invoke(app, ["validate", str(path)]).stdout
    assert "6 skipped" in printed
    assert "no model is called 'no-such-model'" in printed
    assert "means a step of 4.00 ms (at its peak h100-sxm takes" in " ".join(printed.split())
    alone = CliRunner().invoke(app, ["validate", str(path), "--anchor"])
    assert "with one measured row" in str(alone.exception)


def test_a_stack_for_rows_that_name_none(tmp_path: Path) -> None:
    path = own(tmp_path, f"{BASE},step_s,stack\n{ROW},4.0,\n{ROW},4.0,nanotron\n")
    assert [case.stack for case in read_own(path).cases] == ["kernels", "nanotron"]
    assert [case.stack for case in read_own(path, stack="torchtitan").cases] == ["torchtitan", "nanotron"]


def test_what_is_no_such_table(tmp_path: Path) -> None:
    for text, lacking in (
        (f"{BASE},step_s,step_s\n{ROW},4.0,5.0\n", "has the column step_s 2 times"),
        ("model,gpu,step_s\n", "seq_len"),
        ("model,gpu,seq_len\nx,y,1\n", "step_s or tokens_per_s"),
    ):
        found = CliRunner().invoke(app, ["validate", str(own(tmp_path, text))])
        assert lacking in str(found.exception)


def test_counts_and_rates_are_read_as_people_write_them(tmp_path: Path) -> None:
    plain = read_own(own(tmp_path, f"{BASE},tokens_per_s\n{ROW},66670\n")).cases
    for row in ("llama-3-8b,h100-sxm,8,8k,1,16,66.67k", 'llama-3-8b,h100-sxm,8,8k,1,16,"66,670"'):
        assert read_own(own(tmp_path, f"{BASE},tokens_per_s\n{row}\n")).cases == plain
    (skipped,) = read_own(own(tmp_path, f"{BASE},tokens_per_s\n{ROW},66670\n{ROW.replace('8192', '8kk')},1\n")).skipped
    assert "seq_len = '8kk'" in skipped.why


def test_a_time_and_a_rate_that_differ_are_refused(tmp_path: Path) -> None:
    rows = f"{BASE},step_s,tokens_per_s\n{ROW},2.0,65536\n{ROW},2.0,64000\n{ROW},2.0,50000\n"
    read = read_own(own(tmp_path, rows))
    assert [case.step_s for case in read.cases] == [2.0, 2.0]
    assert "step_s and tokens_per_s do not agree" in read.skipped[0].why and "131,072 tokens" in read.skipped[0].why


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model;gpu;seq_len;step_s\nllama-3-8b;h100-sxm;8192;1,5\n", "semicolons"),
        ("Model,GPU,seq_len,Step_s\nllama-3-8b,h100-sxm,8192,9\n", "write model for 'Model', write gpu for 'GPU'"),
    ],
)
def test_other_separators_and_letters_are_told(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FlopwiseError) as caught:
        read_own(own(tmp_path, text))
    assert words in f"{caught.value.what} {caught.value.hint}"
