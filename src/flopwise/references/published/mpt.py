"""The training benchmarks of MosaicML's llm-foundry: MPT 125M to 70B on H100 and A100 under FSDP, 2023.

What its set-ups are, as far as it does not print them, and where that was found: `catalog/tables/SOURCES.md`.
"""

from __future__ import annotations

from flopwise.base.errors import unknown_name
from flopwise.catalog.load import model_names
from flopwise.references.published.rows import TableRow, check_batch, load_device, shipped_model
from flopwise.references.validate.protocol import Case
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

PRECISIONS = {"bf16": "bf16-amp", "amp_bf16": "bf16-amp", "amp_fp8": "bf16-amp,matrix=fp8,scaling=delayed"}
GRADIENTS = {"default": "fp32", "pure": "bf16"}
SHARDING: dict[str, tuple[int, bool]] = {"full_shard": (3, True), "shard_grad_op": (3, False), "no_shard": (0, True)}
"""FSDP's name → ZeRO stage, and whether weights are dropped between forward and backward."""


def mpt_case(row: TableRow) -> Case:
    """A row of an llm-foundry table as a set-up; constants are for the bf16 ones alone."""
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
            hardware=load_device(hardware),
            parallel=Parallel(data=devices, zero=zero, reshard=reshard, offload_activations=row.truth("act_offload")),
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
    return shipped_model(f"mpt-{size}")


def _formats(row: TableRow) -> Formats:
    policy = row.meaning("precision", PRECISIONS, kind="precision")
    gradients = row.meaning("mp_mode", GRADIENTS, kind="mixed-precision mode")
    return parse_formats(policy if gradients == "fp32" else f"{policy},gradients={gradients}")


def _recompute(row: TableRow) -> Recompute:
    if not row.truth("act_ckpt"):
        return "none"
    return "input" if row.text("precision").lower().startswith("amp_") else "full"
