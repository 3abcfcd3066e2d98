"""The one constant of the stack torchtitan, and what it predicts: `python -m benchmarks.torchtitan`.

The rows are figures that the project published (the file's last column says where in pytorch/torchtitan). Six are of
FSDP2 on 64 A100 80 GB, without torch.compile: the constant is fitted to them. The others are never fitted to: H100 with
96 GB of slower memory and a limit of 500 W, and H200, which run Llama 3.1 8B compiled and in float8.

`selective op` keeps every second product's result and attention's and makes the rest again: our `attention` is the
nearest. Rows of `selective layer` (every second layer checkpointed) have no such counterpart and are left out, and so
are those of tensor, pipeline and context parallelism, which are too few to tell their constants apart.
"""

from __future__ import annotations

import csv
from pathlib import Path

from flopwise.catalog.load import load_model, load_stack
from flopwise.references.published.rows import load_device
from flopwise.references.validate.fitting import StackFit, fit_of, held_out_predictions
from flopwise.references.validate.protocol import Case, Protocol
from flopwise.setup.parallel import shard_all
from flopwise.setup.setup import SettledSetup
from flopwise.work.formats import parse_formats
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES

ROWS = Path(__file__).parent / "data" / "torchtitan.csv"
PROTOCOL = Protocol(
    table="torchtitan",
    stack="torchtitan",
    metric="throughput",
    fitted_table="torchtitan",
    rows="the constant is fitted to six rows of FSDP2 on 64 A100; the others are only predicted",
    start={"products": 1.1},
    sizes=("llama-3-8b", "llama-3-70b", "llama-2-13b", "llama-2-70b"),
)
LLAMA_2 = {"llama-2-13b": (40, 5120, 40, 40, 13_824), "llama-2-70b": (80, 8192, 64, 8, 28_672)}
"""Layers, width, heads, key-value heads, feed-forward width (arXiv 2307.09288)."""
PRECISIONS = {"bf16": "bf16-amp", "fp8": "bf16-amp,matrix=fp8"}


def torchtitan_cases() -> tuple[Case, ...]:
    """The published rows as set-ups."""
    with ROWS.open(encoding="utf-8") as stream:
        return tuple(_case(number, row) for number, row in enumerate(csv.DictReader(stream), start=1))


def _case(number: int, row: dict[str, str]) -> Case:
    gpus, micro_batch, tokens = int(row["gpus"]), int(row["micro_batch"]), int(row["sequence_tokens"])
    return Case(
        row=number,
        size=row["model"],
        label=f"{gpus} {row['hardware']} · mb{micro_batch} · {row['recompute']} · {row['fusion']} · {row['precision']}",
        stack="torchtitan",
        setup=SettledSetup(
            model=_model(row["model"]),
            hardware=load_device(row["hardware"]),
            parallel=shard_all(gpus),
            sequence_tokens=tokens,
            batch_sequences=gpus * micro_batch,
            micro_batch_sequences=micro_batch,
            formats=parse_formats(PRECISIONS[row["precision"]]),
            recompute=next(policy for policy in RECOMPUTE_POLICIES if policy == row["recompute"]),
            fusion="eager" if row["fusion"] == "eager" else "fused",
        ),
        step_s=tokens * micro_batch / float(row["tokens_per_s_per_gpu"]),
        fits=True,
        fitted=row["fitted"] == "true",
    )


def _model(name: str) -> Model:
    if name not in LLAMA_2:
        return load_model(name)
    layers, hidden, heads, kv_heads, ffn = LLAMA_2[name]
    return Transformer(
        name=name,
        title=name,
        source="https://arxiv.org/abs/2307.09288",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=32_000,
        context=4096,
    )


def torchtitan_fit() -> StackFit:
    """The fitted rows, laid out."""
    return fit_of(PROTOCOL, torchtitan_cases(), load_stack("torchtitan"))


def main() -> None:
    cases, fit = torchtitan_cases(), torchtitan_fit()
    predicted = held_out_predictions(fit, cases).step_s
    print("each model predicted by a constant that was fitted to the A100 rows of the others")
    print(f"{'model':<13}{'set-up':<52}{'measured':>10}{'predicted':>11}{'error':>8}")
    for case, seconds in zip(cases, predicted.tolist(), strict=True):
        assert case.step_s is not None
        error = 100 * (case.step_s / seconds - 1)
        print(f"{case.size:<13}{case.label:<52}{case.step_s:>8.2f} s{seconds:>9.2f} s{error:>+7.1f}%")
    print(f"fitted to all six: products {fit.without(None).value('products'):.3g}")


if __name__ == "__main__":
    main()
