"""Tables 1 and 2 of the Megatron-LM paper (Narayanan et al., arXiv 2104.04473): GPT of 1.7B to 1T on 32 to 3,072 A100.

The tables print tensor × pipeline; the split, micro-batch and chunks of table 1 are those of `examples/sc21/
run_table_1.sh` in NVIDIA/Megatron-LM, the options common to all of `CONFIG.sh` beside it: fp16 with fp32 masters,
clipping, sequence 2,048, every layer recomputed whole. Rows that it gives layers per virtual stage are interleaved:
76B, 145B, 310B and 530B. The others are plain 1F1B, 39B and 1T too.

Attention of 2021 keeps its scores: batched products, one fused kernel for scale, mask and softmax, dropout. Bias with
GELU and bias with dropout and residual sum are one kernel each; Adam is Apex's fused one. Tensor ranks all-reduce and
wait. A stage sends 1/8 of its output to each rank of the next, which gather it over NVLink (the paper's
scatter/gather). Gradients are reduced in fp16: behind the last backward up to 18B (torch's DDP), after it beyond (the
local one). Nodes are DGX A100 80 GB with eight HDR InfiniBand adapters.

The printed TFLOP/s are those of F = 96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)), recomputation included: a step took
F ÷ (GPUs × that). Printed whole, so the time is known to 0.4 %.

A file of one's own may hold other models; what the table does not print of them is assumed (`_assumed`).

Table 2 is a table of its own here (`megatron-2`), only ever predicted. Its models are GPT-3 (96 layers, 12,288 wide, 96
heads) and 530B of table 1, its pipelines have 8 tensor ranks. How stages were scheduled is not said; speed falls with
the data ranks as 1F1B's bubble does (GPT-3: 153, 149, 141 printed; 153, 149, 141 by (p − 1)/m). Its ZeRO-3 rows run
DeepSpeed's sharding under the same kernels, each GPU one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flopwise.base.errors import FlopwiseError
from flopwise.references.published.gpt import gpt
from flopwise.references.published.rows import TableRow, check_batch, described, placed
from flopwise.references.validate.case import Case
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import SettledSetup
from flopwise.work.formats import POLICIES
from flopwise.work.transformer import Transformer

FILES = ("megatron_table1_a100.csv", "megatron_table2_ptd_vs_zero3.csv")
STACK = "megatron-lm"
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


SET_UPS = {
    "1.7b": SetUp(heads=24, tensor=1, pipeline=1, micro_batch=16),
    "3.6b": SetUp(heads=32, tensor=2, pipeline=1, micro_batch=16),
    "7.5b": SetUp(heads=32, tensor=4, pipeline=1, micro_batch=16),
    "18b": SetUp(heads=48, tensor=8, pipeline=1, micro_batch=8),
    "39b": SetUp(heads=64, tensor=8, pipeline=2, micro_batch=4),
    "76b": SetUp(heads=80, tensor=8, pipeline=4, micro_batch=2, chunks=3),
    "145b": SetUp(heads=96, tensor=8, pipeline=8, micro_batch=2, chunks=2),
    "310b": SetUp(heads=128, tensor=8, pipeline=16, micro_batch=1, chunks=2),
    "530b": SetUp(heads=128, tensor=8, pipeline=35, micro_batch=1, chunks=3),
    "1t": SetUp(heads=160, tensor=8, pipeline=64, micro_batch=1),
}

SECOND_TENSOR = 8
HEAD_CHANNELS = 128
SECOND_MODELS = {
    "174.6": ("175B", 12_288, 96, 96),
    "529.6": ("530B", 20_480, 105, 128),
}
"""Printed billions of parameters → size, width, layers, heads."""
SCHEMES = {"ptd": 0, "zero-3": 3}
"""The scheme's name → ZeRO stage."""


def first_cases(rows: Sequence[TableRow]) -> tuple[Case, ...]:
    """The rows of table 1 as set-ups."""
    return tuple(_first_case(row) for row in rows)


def second_cases(rows: Sequence[TableRow]) -> tuple[Case, ...]:
    """The rows of table 2 as set-ups, none of them for fitting."""
    return tuple(_second_case(row) for row in rows)


def _first_case(row: TableRow) -> Case:
    with placed(row):
        size = row.text("model")
        set_up = SET_UPS.get(size.lower()) or _assumed(row)
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


def _assumed(row: TableRow) -> SetUp:
    """The set-up of another model: heads of 128 channels, tensor ranks before stages, one sequence at a time."""
    hidden, ranks = row.count("hidden"), row.count("model_parallel_size")
    tensor = min(ranks, SECOND_TENSOR)
    if hidden % HEAD_CHANNELS or ranks % tensor:
        wrong = "hidden" if hidden % HEAD_CHANNELS else "model_parallel_size"
        multiple = HEAD_CHANNELS if hidden % HEAD_CHANNELS else tensor
        raise row.wrong(wrong, f"is not a multiple of {multiple}", hint=f"a multiple of {multiple}")
    return SetUp(heads=hidden // HEAD_CHANNELS, tensor=tensor, pipeline=ranks // tensor, micro_batch=1)


def _second_case(row: TableRow) -> Case:
    with placed(row):
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
        stack=STACK,
        setup=SettledSetup(
            model=model,
            hardware=described(HARDWARE),
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
