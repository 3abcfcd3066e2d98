"""Hugging Face's sweep of nanotron for the Ultra-Scale Playbook: Llama-like models on 8 and 16 H100, winter 2024–25.

What its set-ups are, as far as it does not print them, and where that was found: `catalog/tables/SOURCES.md`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from flopwise.base.errors import FlopwiseError
from flopwise.references.published.rows import TableRow, load_device
from flopwise.references.validate.protocol import Case
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import SettledSetup
from flopwise.work.formats import parse_formats
from flopwise.work.transformer import Transformer

FILE = "nanotron_h100_small.csv"
STACK = "nanotron"
HARDWARE = "h100-efa"
LINK = "AR Intra-node (GB/s)"
COLUMNS = (
    *("num_params", "seq_len", "mbs", "batch_accum", "dp", "pp", "tp", "tp_mode", "zero_stage"),
    *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "interm_dim", "vocab_size", "tie_word_embeddings"),
    *("status", "oom_error", "tok/s/gpu", "after_pp_fix", LINK, "Mem Res (GB)"),
)

OUTCOMES: dict[str, bool | None] = {"success": True, "oom": False, "other": None}
SEQUENCE_PARALLEL = {"reduce_scatter": True, "all_reduce": False}
ZERO_STAGES = {"0": 0, "1": 1}
TIED_BELOW_FFN = 10_000
FAULTY_SHARE = 0.5
"""A node whose links reach less than this share of the usual is out of order; the six reach a tenth."""

Shape = tuple[int, int, int]
"""Width, layers, heads: what tells the models apart in rows that never ran."""


def nanotron_reader(rows: Sequence[TableRow]) -> Callable[[TableRow], Case]:
    """What reads a row of a nanotron sweep, one that ran out of memory too, knowing all others."""
    rates = [rate for row in rows if (rate := _link_rate(row))]
    slowest = FAULTY_SHARE * statistics.median(rates) if rates else 0.0
    details = _details(rows)
    return lambda row: _case(row, details, slowest)


def _link_rate(row: TableRow) -> float | None:
    """None too where the cell holds no number: the row is told of when it is read."""
    try:
        return row.number_of(LINK) if row.has(LINK) else None
    except FlopwiseError:
        return None


def _shape(row: TableRow) -> Shape:
    return row.count("hidden_size"), row.count("num_layers"), row.count("num_heads")


def _details(rows: Sequence[TableRow]) -> dict[Shape, tuple[int, bool]]:
    """Key-value heads and tying by shape, from the rows that print them: those that ran."""
    found = {}
    for row in rows:
        # A row with a mistake is told of when it is read.
        with suppress(FlopwiseError):
            if row.has("num_kv_heads") and row.has("tie_word_embeddings"):
                found[_shape(row)] = (row.count("num_kv_heads"), row.truth("tie_word_embeddings"))
    return found


def _case(row: TableRow, details: Mapping[Shape, tuple[int, bool]], slowest: float) -> Case:
    model, fits = _model(row, details), _fits(row)
    parallel = _parallel(row)
    micro_batch, steps = row.count("mbs"), row.count("batch_accum")
    setup = SettledSetup(
        model=model,
        hardware=load_device(HARDWARE),
        parallel=parallel,
        sequence_tokens=model.context,
        batch_sequences=parallel.data * micro_batch * steps,
        micro_batch_sequences=micro_batch,
        formats=parse_formats("bf16-mixed,gradients=fp32"),
        fusion="eager",
    )
    faulty = row.has(LINK) and row.number_of(LINK) < slowest
    timed = row.has("tok/s/gpu") and fits is not False and row.truth("after_pp_fix")
    tokens_per_s = row.number_of("tok/s/gpu") * parallel.devices if timed else None
    return Case(
        row=row.number,
        size=_size(row),
        label=f"dp{parallel.data} tp{parallel.tensor} pp{parallel.pipeline} zero{parallel.zero}"
        f" · mb{micro_batch} × {steps}",
        stack=STACK,
        setup=setup,
        step_s=setup.batch_tokens / tokens_per_s if tokens_per_s else None,
        fits=fits,
        fitted=not faulty,
        reserved_bytes=round(row.number_of("Mem Res (GB)") * 2**30) if row.has("Mem Res (GB)") else None,
    )


def _size(row: TableRow) -> str:
    return f"{row.number_of('num_params'):g}B"


def _fits(row: TableRow) -> bool | None:
    outcome = row.meaning("status", OUTCOMES, kind="status")
    if outcome and row.truth("oom_error"):
        return None
    if outcome and not row.has("tok/s/gpu"):
        raise FlopwiseError("a success without `tok/s/gpu`", hint="fill it in, or status = Other")
    return outcome


def _parallel(row: TableRow) -> Parallel:
    tensor = row.count("tp")
    by_token = row.meaning("tp_mode", SEQUENCE_PARALLEL, kind="tensor-parallel mode")
    return Parallel(
        data=row.count("dp"),
        tensor=tensor,
        pipeline=row.count("pp"),
        balance="time",
        sequence=by_token and tensor > 1,
        zero=row.meaning("zero_stage", ZERO_STAGES, kind="ZeRO stage of nanotron"),
    )


def _model(row: TableRow, details: Mapping[Shape, tuple[int, bool]]) -> Transformer:
    hidden, layers, heads = _shape(row)
    ffn = row.count("interm_dim")
    kv_heads, tied = details.get((hidden, layers, heads), (heads, ffn < TIED_BELOW_FFN))
    return Transformer(
        name=f"llama-{_size(row)}".lower(),
        title=f"Llama-like model of {_size(row)} parameters",
        source="https://huggingface.co/spaces/nanotron/ultrascale-playbook",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=row.count("vocab_size"),
        context=row.count("seq_len"),
        tied=tied,
    )
