"""Tables 1 and 2 of the Megatron-LM paper (Narayanan et al., arXiv 2104.04473): GPT of 1.7B to 1T on 32 to 3,072 A100.

What its set-ups are, as far as it does not print them, and where that was found: `catalog/tables/SOURCES.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import read_table
from flopwise.references.published.rows import TableRow, check_batch, load_device
from flopwise.references.validate.protocol import Case
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import SettledSetup
from flopwise.work.formats import POLICIES
from flopwise.work.transformer import Transformer

FILES = ("megatron_table1_a100.csv", "megatron_table2_ptd_vs_zero3.csv")
STACK = "megatron-lm"
SHARDED_STACK = "deepspeed"
"""Whose ZeRO-3 the other rows of table 2 ran; they are the table `deepspeed`, too."""
HARDWARE = "a100-80gb"
COLUMNS = (
    *("model", "hidden", "layers", "model_parallel_size", "n_gpus", "global_batch", "seq_len", "vocab"),
    "achieved_tflops_per_gpu",
)
SECOND_COLUMNS = (
    *("scheme", "params_b", "model_parallel_size", "global_batch", "n_gpus", "micro_batch"),
    "achieved_tflops_per_gpu",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """What table 1 does not print of a model's run."""

    heads: int
    tensor: int
    pipeline: int
    micro_batch: int
    chunks: int = 1


SET_UPS = {size: SetUp(**row) for size, row in read_table(Path(__file__).with_name("megatron.toml")).items()}
"""Of table 1, by the model's size in small letters."""
SECOND_TENSOR = 8
HEAD_CHANNELS = 128
SECOND_MODELS = {
    "174.6": ("175B", 12_288, 96, 96),
    "529.6": ("530B", 20_480, 105, 128),
}
"""Printed billions of parameters → size, width, layers, heads."""
SCHEMES = {"ptd": 0, "zero-3": 3}
"""The scheme's name → ZeRO stage."""


def first_case(row: TableRow) -> Case:
    """A row of table 1 as a set-up."""
    size = row.text("model")
    set_up = SET_UPS.get(size.lower()) or _assume(row)
    model = _model(size, row.count("hidden"), row.count("layers"), set_up.heads, row.count("vocab"))
    parallel = Parallel(
        data=_data(row, set_up.tensor * set_up.pipeline),
        tensor=set_up.tensor,
        pipeline=set_up.pipeline,
        schedule="interleaved" if set_up.chunks > 1 else "1f1b",
        chunks=set_up.chunks,
    )
    tokens = row.count("seq_len")
    return _case(row, size, model, parallel, micro_batch=set_up.micro_batch, tokens=tokens, fitted=True)


def _assume(row: TableRow) -> SetUp:
    """The set-up of another model: heads of 128 channels, tensor ranks before stages, one sequence at a time."""
    hidden, ranks = row.count("hidden"), row.count("model_parallel_size")
    tensor = min(ranks, SECOND_TENSOR)
    if hidden % HEAD_CHANNELS or ranks % tensor:
        wrong = "hidden" if hidden % HEAD_CHANNELS else "model_parallel_size"
        multiple = HEAD_CHANNELS if hidden % HEAD_CHANNELS else tensor
        raise row.wrong(wrong, f"is not a multiple of {multiple}", hint=f"a multiple of {multiple}")
    return SetUp(heads=hidden // HEAD_CHANNELS, tensor=tensor, pipeline=ranks // tensor, micro_batch=1)


def second_case(row: TableRow) -> Case:
    """A row of table 2 as a set-up, not for fitting."""
    size, hidden, layers, heads = row.meaning("params_b", SECOND_MODELS, kind="size in table 2")
    zero, ranks = row.meaning("scheme", SCHEMES, kind="scheme"), row.count("model_parallel_size")
    data, tensor = _data(row, ranks), 1 if zero else SECOND_TENSOR
    if ranks % tensor:
        raise row.wrong("model_parallel_size", f"is not a multiple of {tensor}", hint="8 tensor ranks × stages")
    parallel = Parallel(data=data, tensor=tensor, pipeline=ranks // tensor, zero=zero)
    model = _model(size, hidden, layers, heads, 51_200)
    micro_batch = row.count("micro_batch")
    return _case(row, size, model, parallel, micro_batch=micro_batch, tokens=model.context, fitted=False)


def _data(row: TableRow, ranks: int) -> int:
    """Data ranks: what the GPUs leave when a model takes `ranks` of them."""
    devices, printed = row.count("n_gpus"), row.count("model_parallel_size")
    if printed != ranks or devices % ranks:
        raise FlopwiseError(
            f"{devices} GPUs with {printed} of them to a model",
            why=f"this model ran on {ranks}" if printed != ranks else "each model takes as many",
            hint="correct n_gpus or model_parallel_size",
        )
    return devices // ranks


def _case(
    row: TableRow, size: str, model: Transformer, parallel: Parallel, *, micro_batch: int, tokens: int, fitted: bool
) -> Case:
    batch = row.count("global_batch")
    check_batch(row, batch, parallel.data, "global_batch")
    rate = row.number_of("achieved_tflops_per_gpu") * 1e12 * parallel.devices
    split = "zero3" if parallel.zero else f"tp{parallel.tensor} pp{parallel.pipeline}"
    return Case(
        row=row.number,
        size=size,
        label=f"{parallel.devices} GPUs · dp{parallel.data} {split} · mb{micro_batch}",
        stack=SHARDED_STACK if parallel.zero else STACK,
        setup=SettledSetup(
            model=model,
            hardware=load_device(HARDWARE),
            parallel=parallel,
            sequence_tokens=tokens,
            batch_sequences=batch,
            micro_batch_sequences=micro_batch,
            formats=POLICIES["fp16-mixed"],
            recompute="full",
            attention="eager",
        ),
        step_s=printed_flops(model, batch, tokens) / rate,
        fits=True,
        fitted=fitted,
    )


def printed_flops(model: Transformer, batch: int, tokens: int) -> float:
    """FLOPs of a step as the paper counts them: equation 3, with one recomputation of every layer."""
    layers, hidden = model.layers, model.hidden
    beyond = tokens / (6 * hidden) + model.vocab / (16 * layers * hidden)
    return 96 * batch * tokens * layers * hidden**2 * (1 + beyond)


def _model(size: str, hidden: int, layers: int, heads: int, vocab: int) -> Transformer:
    return gpt(
        name=f"gpt-{size.lower()}",
        title=f"GPT {size} of the Megatron-LM paper",
        source="https://arxiv.org/abs/2104.04473",
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        context=2048,
    )


def gpt(
    name: str, title: str, source: str, *, layers: int, hidden: int, heads: int, vocab: int, context: int
) -> Transformer:
    """A GPT-2 of any size: learned positions, LayerNorm before each half, GELU, biases everywhere, a tied head."""
    return Transformer(
        name=name,
        title=title,
        source=source,
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=4 * hidden,
        vocab=vocab,
        context=context,
        positions="learned",
        norm="layer",
        norm_bias=True,
        gated=False,
        activation="gelu",
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        tied=True,
    )
