"""The recorded runs of the reference offload trainer: read whole, and refused with their place where they are wrong."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import ROOT, hardware_names, load_model
from flopwise.references.published.offload import COLUMNS, FILE, MODELS, OffloadRun, read_offload
from flopwise.work.transformer import Transformer

GIB = 2**30
SHIPPED = ROOT / "tables" / FILE


def printed() -> list[dict[str, str]]:
    with SHIPPED.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_shipped_table_is_read_whole() -> None:
    runs = read_offload()
    assert [run.row for run in runs] == list(range(1, 770))
    assert Counter((run.model, run.succeeded) for run in runs) == {
        ("dataflow-1b", True): 285,
        ("dataflow-1b", False): 57,
        ("llama-3-8b", True): 306,
        ("llama-3-8b", False): 121,
    }
    assert {run.hardware for run in runs} == {"h100-sxm"} <= set(hardware_names())
    told = (SHIPPED.parent / "SOURCES.md").read_text(encoding="utf-8")
    assert FILE in told


def test_numbers_belong_together() -> None:
    for run in read_offload():
        if not run.succeeded:
            assert (run.tokens_per_s, run.chunk_tokens, run.used_host_bytes) == (0, 0, 0)
            continue
        model = load_model(run.model)
        assert isinstance(model, Transformer)
        chunks = -(-run.sequence_tokens // run.chunk_tokens)
        assert run.slots + run.home_activations == model.layers * chunks
        assert run.used_host_bytes <= run.host_bytes
        assert run.used_device_bytes <= run.device_bytes
        assert 0 < run.mfu <= run.hfu < 1
        assert run.n_full == 0 or run.n_context == 0


def test_two_rows_by_hand() -> None:
    runs = read_offload()
    found = [
        run
        for run in runs
        if (run.model, run.sequence_tokens, run.host_bytes, run.device_bytes)
        == ("llama-3-8b", 65536, 144 * GIB, 78 * GIB)
    ]
    assert len(found) == 1
    (run,) = found
    assert (round(run.tokens_per_s), run.rounds, run.slots, run.chunk_tokens) == (5487, 5, 35, 16384)
    assert (run.n_full, run.n_attention, run.n_context) == (53, 40, 0)
    assert (round(run.mfu, 3), round(run.hfu, 3)) == (0.536, 0.600)
    assert runs[0] == OffloadRun(
        row=1,
        hardware="h100-sxm",
        model="dataflow-1b",
        sequence_tokens=512,
        host_bytes=16 * GIB,
        device_bytes=16 * GIB,
        succeeded=True,
        tokens_per_s=61406.695312,
        step_s=7.737549,
        mfu=0.466613,
        hfu=0.540573,
        chunk_tokens=16384,
        rounds=29,
        sequences_per_step=928,
        slots=2,
        home_activations=14,
        n_full=0,
        n_attention=14,
        n_context=0,
        recompute_share=0.136818,
        attention_share=0.013489,
        used_host_bytes=round(10.570744 * GIB),
        used_device_bytes=round(15.72113 * GIB),
    )


def test_another_file_with_the_same_columns(tmp_path: Path) -> None:
    """Columns in another order, no others; a failed run may leave its cells empty; larger models have names too."""
    rows = [{column: row[column] for column in reversed(COLUMNS)} for row in printed()]
    assert read_offload(write(tmp_path / "own.csv", rows)) == read_offload()
    given = ("gpu", "model_b", "seqlen", "host_gb", "device_gb")
    failed = {column: rows[0][column] if column in given else "" for column in COLUMNS}
    sizes = [failed | {"model_b": size} for size in MODELS]
    runs = read_offload(write(tmp_path / "failed.csv", sizes))
    assert [run.model for run in runs] == ["dataflow-1b", "llama-3-8b", "dataflow-15b", "dataflow-32b"]
    assert not any(run.succeeded for run in runs)


@pytest.mark.parametrize(
    ("column", "cell", "expected"),
    [
        ("gpu", "h1000", "no GPU is called 'h1000'"),
        ("model_b", "7", "no model size (10⁹ parameters) is called '7'"),
        ("seqlen", "8k", "seqlen = '8k' is not a number"),
        ("seqlen", "0", "seqlen = '0' is out of range"),
        ("host_gb", "", "host_gb = '' is empty"),
        ("device_gb", "-1", "device_gb = '-1' is out of range"),
        ("tok_s", "fast", "tok_s = 'fast' is not a number"),
        ("tok_s", "nan", "tok_s = 'nan' is out of range"),
        ("tok_s", "1000", "1000 tokens/s for 7.43189 s are not a step of 475,136 tokens"),
        ("step_s", "0", "step_s = '0' is out of range"),
        ("chunk_size", "1.5", "chunk_size = '1.5' is not a whole number"),
        ("n_full", "-2", "n_full = '-2' is out of range"),
        ("n_full", "3", "host_acts = '10' is not the sum of its three levels"),
        ("n_inp_ctx", "", "n_inp_ctx = '' is empty"),
        ("recompute_frac", "10.2", "recompute_frac = '10.2' is not a share"),
        ("used_dev_gib", "x", "used_dev_gib = 'x' is not a number"),
    ],
)
def test_bad_cells_are_told_with_their_place(column: str, cell: str, expected: str, tmp_path: Path) -> None:
    rows = printed()[:2]
    rows[1][column] = cell
    with pytest.raises(FlopwiseError) as caught:
        read_offload(write(tmp_path / "bad.csv", rows))
    assert expected in str(caught.value)
    assert "bad.csv, line 3" in str(caught.value)


def test_a_missing_column_and_a_missing_file(tmp_path: Path) -> None:
    rows = [{column: row[column] for column in COLUMNS if column != "hfu"} for row in printed()[:1]]
    with pytest.raises(FlopwiseError, match="lacks the column hfu"):
        read_offload(write(tmp_path / "short.csv", rows))
    with pytest.raises(FlopwiseError, match=r"none\.csv"):
        read_offload(tmp_path / "none.csv")
