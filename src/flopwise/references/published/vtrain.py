"""Iteration times that vTrain published for one node of A100 (VIA-Research/vTrain, `data/ground_truth_single.csv`).

What its set-ups are, as far as it does not print them, and where that was found: `catalog/tables/SOURCES.md`.
"""

from __future__ import annotations

from flopwise.base.errors import FlopwiseError
from flopwise.references.published.megatron import gpt
from flopwise.references.published.rows import TableRow, check_batch, load_device
from flopwise.references.validate.protocol import Case
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import SettledSetup
from flopwise.work.formats import parse_formats
from flopwise.work.transformer import Transformer

FILE = "vtrain_a100_single_node.csv"
STACK = "vtrain"
HARDWARE = "a100-80gb"
VOCABULARY = 50_257
COLUMNS = (
    *("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length"),
    *("tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)"),
)


def vtrain_case(row: TableRow) -> Case:
    """A row of a vTrain table as a set-up."""
    parallel = Parallel(
        data=row.count("data parallelism"),
        tensor=row.count("tensor parallelism"),
        pipeline=row.count("pipeline parallelism"),
    )
    if parallel.devices != row.count("# GPUs"):
        raise FlopwiseError(
            f"{parallel.tensor} tensor × {parallel.data} data × {parallel.pipeline} pipeline ranks on"
            f" {row.count('# GPUs')} GPUs",
            why="each rank is a GPU",
            hint="correct `# GPUs` or one of the degrees",
        )
    batch, micro_batch = row.count("global batch"), row.count("micro batch")
    check_batch(row, batch, parallel.data, "global batch")
    model = _model(row)
    return Case(
        row=row.number,
        size=f"h{model.hidden}-l{model.layers}",
        label=f"dp{parallel.data} tp{parallel.tensor} pp{parallel.pipeline} · batch {batch} · mb{micro_batch}",
        stack=STACK,
        setup=SettledSetup(
            model=model,
            hardware=load_device(HARDWARE),
            parallel=parallel,
            sequence_tokens=model.context,
            batch_sequences=batch,
            micro_batch_sequences=micro_batch,
            formats=parse_formats("fp16-mixed,master=none"),
            attention="eager",
            fusion="eager",
        ),
        step_s=row.number_of("iteration time (ms)") / 1e3,
        fits=None,
    )


def _model(row: TableRow) -> Transformer:
    hidden, layers = row.count("hidden size"), row.count("# layers")
    return gpt(
        name=f"gpt-h{hidden}-l{layers}",
        title=f"GPT of {layers} layers, {hidden} wide",
        source="https://github.com/VIA-Research/vTrain",
        layers=layers,
        hidden=hidden,
        heads=row.count("attention heads"),
        vocab=VOCABULARY,
        context=row.count("sequence length"),
    )
