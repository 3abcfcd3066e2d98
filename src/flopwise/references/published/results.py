"""Results of any file: `results.csv` and JSON of ours, and the tables that others have published."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model, model_names
from flopwise.references.published.benchmark_tables import BenchmarkRow, markdown_tables, read_benchmark_tables
from flopwise.report.results_files import OFFLOADED, TITLE, file_text, read_results_csv, read_results_json
from flopwise.store.results import Result
from flopwise.work.describe import describe

PUBLISHED_PEAKS = {("h100", "bf16"): 989.5e12, ("h100", "fp8"): 1979e12, ("a100", "bf16"): 312e12}
"""Of one device, FLOP/s: what llm-foundry's tables divide by (Composer's `GPU_AVAILABLE_FLOPS`)."""


def results_of_benchmarks(rows: Sequence[BenchmarkRow]) -> list[Result]:
    """Published rows as results.

    Their MFU counts 6·N FLOPs a token for all N parameters and the full square of attention: the convention `palm`.
    Their HFU is not counted but MFU × 4/3 under checkpointing, else MFU. Sequences/s, which is printed without its
    decimals, comes from tokens/s. A model gets the catalogue's name only where its number of parameters is the same.
    """
    return [_benchmark_result(row) for row in rows]


def _benchmark_result(row: BenchmarkRow) -> Result:
    number_format = row.precision.lower().removeprefix("amp_")
    peak = PUBLISHED_PEAKS.get((row.device.lower().partition("_")[0], number_format))
    if peak and abs(row.model_flops_per_s_per_device - row.mfu * peak) > 0.01 * row.mfu * peak:
        peak = None
    rate = row.tokens_per_s or None
    step_s = row.global_batch_tokens / row.tokens_per_s if rate else None
    return Result(
        cell=None,
        state="ok",
        source="imported",
        model=_model_name(row.model, row.sequence_tokens, row.parameters),
        hardware=row.device,
        devices=row.devices,
        sequence_tokens=row.sequence_tokens,
        batch_sequences=row.global_batch,
        micro_batch_sequences=row.micro_batch,
        accumulation_steps=row.accumulation_steps,
        batch_tokens=row.global_batch_tokens,
        precision=f"{row.precision} {row.mixed_precision_mode}",
        recompute=("full" if row.activation_checkpointing else "none") + OFFLOADED * row.activation_offload,
        sharding=row.sharding,
        n_params=row.parameters,
        step_s=step_s,
        tokens_per_s=None if rate is None else float(rate),
        tokens_per_s_per_device=None if rate is None else rate / row.devices,
        samples_per_s=None if rate is None else rate / row.sequence_tokens,
        model_flops_per_s_per_device=row.model_flops_per_s_per_device,
        mfu=row.mfu,
        hfu=row.hfu,
        convention="palm",
        peak_flops=None if peak is None else peak * row.devices,
        peak_format=None if peak is None else number_format,
    )


@cache
def _model_name(published: str, sequence_tokens: int, parameters: int) -> str:
    name = f"mpt-{published.lower()}"
    if name not in model_names():
        return published
    return name if describe(load_model(name), sequence_tokens).parameters == parameters else published


def read_results(path: Path) -> list[Result]:
    """Results of a file: `results.csv`, `results.json`, or a markdown document with published benchmark tables."""
    text = file_text(path)
    try:
        return _reader(path, text)(text)
    except FlopwiseError as error:
        what = re.sub(r"^results\.(csv|json)(: )?", "", error.what).strip()
        raise FlopwiseError(f"{path}: {what}", why=error.why, hint=error.hint) from None


def _reader(path: Path, text: str) -> Callable[[str], list[Result]]:
    suffix = path.suffix.lower()
    if suffix == ".json" or (suffix != ".csv" and text.lstrip().startswith(("[", "{"))):
        return read_results_json
    if suffix in (".md", ".markdown") or (suffix != ".csv" and markdown_tables(text)):
        return _read_markdown
    return read_results_csv


def _read_markdown(text: str) -> list[Result]:
    if text.startswith(f"# {TITLE}\n"):
        raise FlopwiseError(
            "this is a `results.md` of flopwise itself",
            why="its figures are rounded for people",
            hint="name results.csv, which `flopwise collect` writes beside it",
        )
    return results_of_benchmarks(read_benchmark_tables(text))
