"""Any table of measured steps whose columns go by the names below; the newer published tables are kept so too.

What a row leaves out is what `predict` takes where nobody says, or what the table's protocol says of all its rows.
`docs/validation.md` lists the columns for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from flopwise.base.errors import FlopwiseError, one_of
from flopwise.base.units import show_seconds
from flopwise.catalog.load import load_stack, model_from_table
from flopwise.predict.choose import choose
from flopwise.predict.kernels.costs import peak_flops
from flopwise.references.published.rows import TableRow, load_device, shipped_model
from flopwise.references.validate.protocol import Case
from flopwise.setup.parallel import Parallel, parse_parallel, shard_all
from flopwise.setup.setup import SettledSetup, Setup
from flopwise.setup.stack import NO_STACK, Stack
from flopwise.setup.words import FUSIONS
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.model import Model
from flopwise.work.op import ATTENTION_KERNELS, Attention
from flopwise.work.optimizers import OPTIMIZERS
from flopwise.work.work import RECOMPUTE_POLICIES

NEEDED = ("model", "gpu", "seq_len")
OUTCOMES = ("step_s", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct")
"""What was measured; of several the first that a row has counts."""
SAME = 0.05
"""Times and rates of one row differ so far at most: a rate may be a mean where the time is a median."""
DEGREES = {"dp": "dp", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "chunks": "chunks"}
"""Column → its word in the label of a strategy."""
MODEL_COUNTS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "window"),
    *("experts", "experts_per_token", "shared_ffn", "dense_ffn"),
)
MODEL_TRUTHS = ("tied", "gated")
OTHERS = (
    *("shape", "n_gpus", "parallel", "micro_batch", "global_batch", "recompute", "precision", "optimizer", "attention"),
    *("fusion", "stack", "flops", "peak_tflops", "memory_gib", "fits", "fold", "fitted"),
)
COLUMNS = (*NEEDED, *OUTCOMES, *DEGREES, *MODEL_COUNTS, *MODEL_TRUTHS, *OTHERS)
"""All that are read; a file may have others."""

GPT = {
    **{"positions": "learned", "norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu"},
    **{"qkv_bias": True, "output_bias": True, "ffn_bias": True, "tied": True},
}
SHAPES: dict[str, dict[str, Any]] = {"llama": {}, "gpt": GPT}
"""What a model is like that a row describes by its sizes: as Llama (rotary positions, RMSNorm, gated), or as GPT-2."""
COUNTED = ("causal", "palm", "square")
"""How TFLOP/s and MFU count: as flopwise does, 6 for each parameter with the whole square of attention, or products
with the whole square, which is what Megatron-LM prints."""
TRUTHS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def named_case(row: TableRow, defaults: Mapping[str, str]) -> Case:
    """A row as a set-up, with what it leaves open chosen as `predict` does."""
    row = replace(row, cells=dict.fromkeys(COLUMNS, "") | dict(defaults) | {k: v for k, v in row.cells.items() if v})
    stack = _stack(row.cells["stack"] or NO_STACK)
    setup = _setup(row, stack)
    step_s, fits = _step_s(row, setup), _fits(row)
    if step_s is None and fits is None:
        raise FlopwiseError(
            "nothing was measured",
            why="it has no step time or rate, nor a word in `fits`",
            hint=f"{' or '.join(OUTCOMES)}",
        )
    words = [f"{setup.parallel.devices} {setup.hardware.name}", setup.parallel.label, f"s{setup.sequence_tokens}"]
    words += [f"mb{setup.micro_batch_sequences}", setup.recompute, setup.formats.name]
    return Case(
        row=row.number,
        size=row.cells["fold"] or row.text("model").lower(),
        label=" · ".join(dict.fromkeys(words)),
        stack=stack.name if stack else NO_STACK,
        setup=replace(setup, stack=None),
        step_s=step_s,
        fits=True if fits is None else fits,
        fitted=not row.has("fitted") or row.meaning("fitted", TRUTHS, kind="truth value"),
        reserved_bytes=round(row.number_of("memory_gib") * 2**30) if row.has("memory_gib") else None,
    )


@cache
def _stack(name: str) -> Stack | None:
    return None if name.lower() == NO_STACK else load_stack(name)


def _setup(row: TableRow, stack: Stack | None) -> SettledSetup:
    parallel = _parallel(row)
    micro = row.tokens("micro_batch") if row.has("micro_batch") else None
    asked = Setup(
        model=_model(row),
        hardware=load_device(row.hardware("gpu")),
        parallel=parallel,
        stack=stack,
        sequence_tokens=row.tokens("seq_len"),
        batch_sequences=row.tokens("global_batch") if row.has("global_batch") else parallel.data * (micro or 1),
        micro_batch_sequences=micro,
        formats=parse_formats(row.text("precision")) if row.has("precision") else None,
        recompute=one_of(row.cells["recompute"] or "none", RECOMPUTE_POLICIES, "recompute"),
        optimizer=one_of(row.cells["optimizer"] or "adamw", OPTIMIZERS, "optimizer"),
        attention=one_of(
            row.cells["attention"] or (stack.attention_kernel if stack else "flash"), ATTENTION_KERNELS, "attention"
        ),
        fusion=one_of(row.cells["fusion"] or (stack.fusion if stack else "fused"), FUSIONS, "fusion"),
    )
    return choose([asked])[0].setup


def _parallel(row: TableRow) -> Parallel:
    """The strategy of the columns and of the words in `parallel`; of several devices, by default, FSDP's."""
    degrees = [f"{word}{row.count(name)}" for name, word in DEGREES.items() if row.has(name)]
    words = [word for word in degrees if not word.endswith("1") or word[-2:-1].isdigit()]
    words += row.cells["parallel"].lower().replace(",", " ").split()
    devices = row.count("n_gpus") if row.has("n_gpus") else None
    if devices is None or devices == 1 or degrees or words:
        return parse_parallel(" ".join(words), devices)
    return shard_all(devices)


def _model(row: TableRow) -> Model:
    counts = {name: row.count(name) for name in MODEL_COUNTS if row.has(name)}
    truths = {name: row.meaning(name, TRUTHS, kind="truth value") for name in MODEL_TRUTHS if row.has(name)}
    fields, shape = counts | truths, one_of(row.cells["shape"] or "llama", SHAPES, "shape")
    if "layers" not in fields or "hidden" not in fields:
        return _changed(row.text("model"), tuple(fields.items()))
    return _described(row.text("model"), shape, row.tokens("seq_len"), tuple(fields.items()))


@cache
def _changed(name: str, fields: tuple[tuple[str, Any], ...]) -> Model:
    return shipped_model(name) if not fields else _loaded(name, dict(fields))


def _loaded(name: str, fields: dict[str, Any]) -> Model:
    from flopwise.catalog.load import load_model

    return load_model(name, fields)


@cache
def _described(label: str, shape: str, context: int, fields: tuple[tuple[str, Any], ...]) -> Model:
    """A model of its sizes; GPT's feed-forward part is four times as wide as the model."""
    sizes = dict(fields)
    usual = {"ffn": 4 * sizes["hidden"]} if shape == "gpt" else {}
    named = {"architecture": "transformer", "name": label.lower(), "title": label, "source": "a table's row"}
    return model_from_table({**named, "context": context, **SHAPES[shape], **usual, **sizes}, label)


# -- what was measured -----------------------------------------------------------------------------------------------


def _fits(row: TableRow) -> bool | None:
    return row.meaning("fits", TRUTHS, kind="truth value") if row.has("fits") else None


def _step_s(row: TableRow, setup: SettledSetup) -> float | None:
    """Seconds of a step, from whichever outcome the row has."""
    told = [name for name in OUTCOMES if row.has(name)]
    if not told:
        return None
    found = {name: _seconds(row, name, setup) for name in told}
    timed = [name for name in told if name == "step_s" or name.startswith("tokens_per_s")]
    # TFLOP/s and MFU follow from how FLOPs are counted, too.
    for other in timed[1:]:
        if abs(found[other] / found[timed[0]] - 1) > SAME:
            raise FlopwiseError(
                f"{timed[0]} and {other} do not agree",
                why=f"steps of {show_seconds(found[timed[0]])} and {show_seconds(found[other])} follow from them with"
                f" {setup.batch_tokens:,} tokens a step",
                hint="keep the right one, or correct global_batch",
            )
    return found[told[0]]


def _seconds(row: TableRow, told: str, setup: SettledSetup) -> float:
    """Seconds of a step by one outcome."""
    value, devices = row.figure(told), setup.parallel.devices
    if told == "step_s":
        return value
    if told.startswith("tokens_per_s"):
        return setup.batch_tokens / (value * (devices if told.endswith("gpu") else 1))
    if told == "mfu_pct":
        peak = row.number_of("peak_tflops") * 1e12 if row.has("peak_tflops") else _peak(setup)
        rate = value / 100 * peak
    else:
        rate = value * 1e12
    counted = one_of(row.cells["flops"] or "causal", COUNTED, "flops")
    return setup.batch_sequences * counted_flops(setup.model, setup.sequence_tokens, counted) / (rate * devices)


def _peak(setup: SettledSetup) -> float:
    return peak_flops(setup.hardware, setup.formats.matrix)


def counted_flops(model: Model, sequence_tokens: int, counted: str) -> int:
    """Model FLOPs of a sequence, forward and backward, by one of the ways to count them."""
    work = describe(model, sequence_tokens)
    if counted != "square":
        return work.model_flops("palm" if counted == "palm" else "causal")
    return sum(work.model_flops_of(op, "palm" if isinstance(op, Attention) else "causal") for op in work.ops)


def missing_columns(names: Sequence[str], defaults: Mapping[str, str]) -> list[str]:
    """What a header, with the defaults, lacks to be such a table."""
    missing = [name for name in NEEDED if name not in names and name not in defaults]
    return missing + ([] if {*OUTCOMES, "fits"} & {*names} else [" or ".join(OUTCOMES)])
