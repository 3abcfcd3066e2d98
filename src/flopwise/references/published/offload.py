"""Recorded runs of the reference offload trainer on one GPU (als244/ml_dataflow, July 2025).

What its set-ups are, as far as it does not print them, and where that was found: `catalog/tables/SOURCES.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import ROOT
from flopwise.references.published.rows import TableRow, read_rows, tell_row

FILE = "offload_h100.csv"
FILES = {"offload": FILE, "offload-ampere": "offload_ampere.csv"}
"""Table → its file: one H100; one A100 and one RTX 3090."""
CARDS = {"a100": "a100-pcie-80gb"}
"""What the trainer calls by another name than the catalogue: its A100 is the PCIe card."""
COLUMNS = (
    *("gpu", "model_b", "seqlen", "host_gb", "device_gb", "tok_s", "mfu", "hfu", "step_s", "chunk_size"),
    *("rounds_per_step", "seqs_per_step", "dev_act_slots", "host_acts", "n_full", "n_inp_ctx_attn", "n_inp_ctx"),
    *("recompute_frac", "attn_flop_frac", "used_host_gib", "used_dev_gib"),
)
MODELS = {"1": "dataflow-1b", "8": "llama-3-8b", "15": "dataflow-15b", "32": "dataflow-32b"}
"""Models by the size that the trainer calls them by."""
TOLERANCE = 1e-3
"""How far tokens ÷ (tokens per second) may be from the seconds of a step: the rates are averages over several steps."""

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadRun:
    """A recorded run. All numbers after `succeeded` are 0 where it is False."""

    row: int
    """Rows of the table up to this one, from 1."""
    hardware: str
    """Catalogue names."""
    model: str
    sequence_tokens: int
    host_bytes: int
    """The caps."""
    device_bytes: int
    succeeded: bool
    tokens_per_s: float = 0
    step_s: float = 0
    mfu: float = 0
    hfu: float = 0
    chunk_tokens: int = 0
    rounds: int = 0
    """Of a step."""
    sequences_per_step: int = 0
    slots: int = 0
    """(Layer, chunk) pairs whose activations stay on the device."""
    home_activations: int = 0
    """Those that leave: the sum of the next three."""
    n_full: int = 0
    n_attention: int = 0
    n_context: int = 0
    recompute_share: float = 0
    """Of the step's FLOPs, by the three numbers above."""
    attention_share: float = 0
    used_host_bytes: int = 0
    """To within 1e-6 GiB below 64 GiB, the precision of a 32-bit number above."""
    used_device_bytes: int = 0


def read_offload(path: Path | None = None, table: str = "offload") -> tuple[OffloadRun, ...]:
    """The recorded runs of a table that ships with flopwise, or those of a file with the same columns."""
    return tuple(_run(row) for row in read_rows(ROOT / "tables" / FILES[table] if path is None else path, COLUMNS))


def _run(row: TableRow) -> OffloadRun:
    with tell_row(row):
        failed = OffloadRun(
            row=row.number,
            hardware=CARDS.get(row.text("gpu").lower()) or row.hardware("gpu"),
            model=row.meaning("model_b", MODELS, kind="model size (10⁹ parameters)"),
            sequence_tokens=row.count("seqlen"),
            host_bytes=_gib(row, "host_gb"),
            device_bytes=_gib(row, "device_gb"),
            succeeded=False,
        )
        if not row.has("tok_s") or _zero(row, "tok_s"):
            return failed
        run = replace(
            failed,
            succeeded=True,
            tokens_per_s=row.number_of("tok_s"),
            step_s=row.number_of("step_s"),
            mfu=row.number_of("mfu"),
            hfu=row.number_of("hfu"),
            chunk_tokens=row.count("chunk_size"),
            rounds=row.count("rounds_per_step"),
            sequences_per_step=row.count("seqs_per_step"),
            slots=row.count("dev_act_slots"),
            home_activations=_count(row, "host_acts"),
            n_full=_count(row, "n_full"),
            n_attention=_count(row, "n_inp_ctx_attn"),
            n_context=_count(row, "n_inp_ctx"),
            recompute_share=_share(row, "recompute_frac"),
            attention_share=_share(row, "attn_flop_frac"),
            used_host_bytes=_gib(row, "used_host_gib"),
            used_device_bytes=_gib(row, "used_dev_gib"),
        )
        _check(row, run)
        return run


def _check(row: TableRow, run: OffloadRun) -> None:
    """Refuse numbers that contradict each other."""
    if run.n_full + run.n_attention + run.n_context != run.home_activations:
        raise row.wrong("host_acts", "is not the sum of its three levels", hint="n_full + n_inp_ctx_attn + n_inp_ctx")
    tokens = run.sequences_per_step * run.sequence_tokens
    if abs(run.tokens_per_s * run.step_s / tokens - 1) > TOLERANCE:
        raise FlopwiseError(
            f"{run.tokens_per_s:g} tokens/s for {run.step_s:g} s are not a step of {tokens:,} tokens",
            why=f"{run.sequences_per_step} sequences of {run.sequence_tokens:,} tokens",
            hint="correct tok_s, step_s, seqs_per_step or seqlen",
        )


def _zero(row: TableRow, column: str) -> bool:
    text = row.text(column)
    try:
        return float(text) == 0
    except ValueError:
        # What it is instead is for the reader of numbers to say.
        return False


def _count(row: TableRow, column: str) -> int:
    """A whole number that may be 0."""
    return 0 if _zero(row, column) else row.count(column)


def _share(row: TableRow, column: str) -> float:
    """A number from 0 to 1."""
    value = 0.0 if _zero(row, column) else row.number_of(column)
    if value > 1:
        raise row.wrong(column, "is not a share", hint="a number from 0 to 1")
    return value


def _gib(row: TableRow, column: str) -> int:
    return round(row.number_of(column) * GIB)
