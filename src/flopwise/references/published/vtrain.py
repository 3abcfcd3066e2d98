"""Iteration times that vTrain published for one node of A100 (VIA-Research/vTrain, `data/ground_truth_single.csv`).

**They are not measurements.** The file calls them ground truth and the paper (arXiv 2312.12391) validates against
measured times, but the column is what vTrain's own simulator adds up: for given widths, tensor ranks and micro-batch
every time is n·(a + b·L/p) + c + d·L to the last printed digit (n micro-batches, L layers, p stages); data parallelism
adds the same milliseconds to every batch; and a hop between stages takes exactly 2·bytes ÷ 25 GiB/s, the constant of
`src/predictor.py`. What was measured are the pieces: kernel traces of one layer on one A100, and all-reduces in a node.
So an error against this table compares two predictors.

What the pieces are, from the same repository (`src/model`, `src/trainer.py`) and from the numbers:

GPT blocks in fp16 (LayerNorm with bias, GELU, biases everywhere, learned positions), heads 16, vocabulary 50,257, which
tensor ranks divide without padding: with one rank the head's products have an odd side and run at about half the speed.
Attention keeps its scores (batched products, one fused kernel for scale, mask and softmax, dropout 0.1); bias with GELU
and bias with dropout and residual sum are one kernel each. Norms and the loss are not fused with anything; of our two
ways to count such kernels, `eager` is the nearer: with `fused` their constant falls to 0.4 of what memory allows.

Nothing is recomputed: b is 3 forwards at 153 TFLOP/s for the widest layer; with a fourth it would be 203. (The
configuration files say `use_checkpoint`; the time that a pipeline takes to drain has no room for it.)

The update is Apex's fused Adam over fp16 weights and gradients with fp32 moments and no master copy, and leaves the
head's matrix out, as a tied one would be. Stages follow 1F1B with L/p layers each; the embedding is on the first, the
head on the last. All-reduces of tensor parallelism stand in line with the kernels, those of gradients follow the last
backward: nothing overlaps.

Assumed: the 80 GB SXM card; the repository says no more than A100.
"""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.base.errors import FlopwiseError
from flopwise.references.published.gpt import gpt
from flopwise.references.published.rows import TableRow, check_batch, described, placed
from flopwise.references.validate.case import Case
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


def vtrain_cases(rows: Sequence[TableRow]) -> tuple[Case, ...]:
    """The rows of a vTrain table as set-ups."""
    return tuple(_case(row) for row in rows)


def _case(row: TableRow) -> Case:
    with placed(row):
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
                hardware=described(HARDWARE),
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
