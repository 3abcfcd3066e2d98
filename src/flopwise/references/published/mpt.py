"""The training benchmarks of MosaicML's llm-foundry: MPT 125M to 70B on H100 and A100 under FSDP, 2023.

What the tables do not print, and where it was found:

Two runs of the sweep are in them. Rows with precision `bf16` and mode `PURE` are the older one (torch 1.13.1). Rows
with `amp_…` and `DEFAULT` come from the rewritten script of pull request 543 (llm-foundry 0.4, torch 2.1.0, autumn
2023): it writes `amp_` before the precision and no longer passes a mode on.

Number formats: Composer's `get_mixed_precision`. FSDP keeps fp32 shards and gathers them in bf16 in both modes;
gradients are reduced in fp32 under DEFAULT and in bf16 under PURE. `bf16` is Composer's old name of `amp_bf16`. fp8
rows run the blocks' linear layers in Transformer Engine (`fc_type: te`), all else as in bf16.

Recompute: each block is checkpointed, non-reentrant (`submit_benchmarks.py`, `yamls/pretrain`). torch 2.1 stops such a
recomputation at the last tensor that backward reads (pytorch pull request 96866), 1.13 runs the whole block. Were it
otherwise, the 13b row at 1,024 tokens on A100 80 GB would have run at 79 % of the peak.

Attention: Triton's flash attention of 2022 (`attn_impl: triton`) with learned positions, no dropout. Kernels between
the products are torch's own, one by one; LayerNorm in bf16; the cross entropy is one kernel. The optimizer is
Composer's DecoupledAdamW, which walks over the tensors in Python.

FSDP: one unit for each block, `limit_all_gathers`, no forward prefetch, backward prefetch `BACKWARD_POST`. Composer
skips the synchronisation of early micro-batches for DDP only (`ddp_sync_context`): under FSDP every micro-batch
reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from flopwise.base.errors import unknown_name
from flopwise.catalog.load import load_model, model_names
from flopwise.references.published.rows import TableRow, check_batch, described, placed
from flopwise.references.validate.case import Case
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import SettledSetup
from flopwise.work.formats import Formats, parse_formats
from flopwise.work.model import Model
from flopwise.work.work import Recompute

FILE = "mpt.csv"
STACK = "llm-foundry"
COLUMNS = (
    *("model", "seq_len", "n_gpus", "gpu", "micro_batch", "global_batch", "tokens_per_s"),
    *("precision", "mp_mode", "sharding", "act_ckpt", "act_offload"),
)

PRECISIONS = {"bf16": "bf16-amp", "amp_bf16": "bf16-amp", "amp_fp8": "bf16-amp,matrix=fp8"}
GRADIENTS = {"default": "fp32", "pure": "bf16"}
SHARDING: dict[str, tuple[int, bool]] = {"full_shard": (3, True), "shard_grad_op": (3, False), "no_shard": (0, True)}
"""FSDP's name → ZeRO stage, and whether weights are dropped between forward and backward."""


def mpt_cases(rows: Sequence[TableRow]) -> tuple[Case, ...]:
    """The rows of an llm-foundry table as set-ups; constants are for the bf16 ones alone."""
    return tuple(_case(row) for row in rows)


def _case(row: TableRow) -> Case:
    with placed(row):
        devices, micro_batch = row.count("n_gpus"), row.count("micro_batch")
        batch, sequence_tokens = row.count("global_batch"), row.count("seq_len")
        check_batch(row, batch, devices, "global_batch")
        hardware, formats, recompute = row.hardware("gpu"), _formats(row), _recompute(row)
        zero, reshard = row.meaning("sharding", SHARDING, kind="sharding strategy")
        return Case(
            row=row.number,
            size=row.text("model").lower(),
            label=_label(row, hardware),
            stack=STACK,
            setup=SettledSetup(
                model=_model(row),
                hardware=described(hardware),
                parallel=Parallel(
                    data=devices, zero=zero, reshard=reshard, offload_activations=row.truth("act_offload")
                ),
                sequence_tokens=sequence_tokens,
                batch_sequences=batch,
                micro_batch_sequences=micro_batch,
                formats=formats,
                recompute=recompute,
                fusion="eager",
            ),
            step_s=batch * sequence_tokens / row.number_of("tokens_per_s"),
            fits=True,
            # The products of fp8 are another library's (Transformer Engine), and seven rows are too few for its own.
            fitted=formats.matrix != "fp8",
        )


def _label(row: TableRow, hardware: str) -> str:
    words = [f"s{row.count('seq_len')}", f"{row.count('n_gpus')} {hardware}", f"mb{row.count('micro_batch')}"]
    words += ["fp8"] if row.text("precision").lower().endswith("fp8") else []
    words += ["ckpt"] if row.truth("act_ckpt") else []
    return " · ".join(words)


def _model(row: TableRow) -> Model:
    sizes = [name.removeprefix("mpt-") for name in model_names() if name.startswith("mpt-")]
    size = row.text("model").lower()
    if size not in sizes:
        raise unknown_name("MPT model", row.text("model"), sizes, hint=f"model is one of {', '.join(sizes)}")
    return _shipped(size)


@cache
def _shipped(size: str) -> Model:
    return load_model(f"mpt-{size}")


def _formats(row: TableRow) -> Formats:
    policy = row.meaning("precision", PRECISIONS, kind="precision")
    gradients = row.meaning("mp_mode", GRADIENTS, kind="mixed-precision mode")
    return parse_formats(policy if gradients == "fp32" else f"{policy},gradients={gradients}")


def _recompute(row: TableRow) -> Recompute:
    if not row.truth("act_ckpt"):
        return "none"
    return "input" if row.text("precision").lower().startswith("amp_") else "full"
