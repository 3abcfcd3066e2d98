"""Small, short and padded work on one GPU beside compiled transformers: `python -m benchmarks.gpu_small`.

Cells are trained as `flopwise train` does, task by task and replayed; peers are transformers' own classes under
torch.compile with torch's fused AdamW, in bf16 as the cells are. Cells that end in -dropout drop what the model's
configuration says, on both sides; the others drop nothing.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu_cells import GIB, draw_weights, quantile
from benchmarks.gpu_kernels import profiled
from flopwise.catalog.load import load_model
from flopwise.engine.batch import NO_LABEL, Batch
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.engine.weights.huggingface import config_of
from flopwise.plan.device.explain import make_plan
from flopwise.plan.program.compile import compile_plan
from flopwise.profile.measure.this_machine import find_hardware
from flopwise.records.plan import Plan
from flopwise.setup.setup import CappedSetup
from flopwise.setup.training import Training
from flopwise.work.formats import parse_formats
from flopwise.work.lengths import Lengths, count_lengths
from flopwise.work.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Lengths whose logarithms are normal, in pieces of so many tokens with some beside."""

    median: float
    sigma: float
    most: int
    each: float = 1.0
    beside: int = 0

    def draw(self, draw: np.random.Generator, count: int) -> NDArray[np.int32]:
        pieces = np.clip(np.round(draw.lognormal(np.log(self.median), self.sigma, count)), 2, self.most)
        return (np.ceil(self.each * pieces) + self.beside).astype(np.int32)


EMOTION = Drawn(median=16.5, sigma=0.55, most=66, each=1.1, beside=2)
"""Rows of dair-ai/emotion: words are 19 in the mean and 66 at most; a word is 1.1 tokens, and there are two more."""
CHATS = Drawn(median=700, sigma=0.7, most=4096)
"""Conversations of uneven length: 890 tokens in the mean. Drawn; no data set's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallCell:
    """A batch of a small model."""

    name: str
    model: str
    sequence_tokens: int
    sequences: int
    lengths: Drawn | None = None
    """How long sequences are; None: as long as they may be."""
    pads_to: Literal["most", "longest"] = "most"
    """What a peer pads to: `sequence_tokens`, or the longest sequence of a batch."""
    drops: bool = False
    """Whether both sides train with the model's dropout."""

    @property
    def described(self) -> Transformer:
        """Its model, with dropout or without."""
        found = load_model(self.model)
        assert isinstance(found, Transformer)
        return found if self.drops else replace(found, dropout=None)

    @property
    def with_dropout(self) -> SmallCell:
        """The same cell with it."""
        return replace(self, name=f"{self.name}-dropout", drops=True)


BERT_CELLS = (
    *(
        SmallCell(name=f"bert-{count}", model="bert-base", sequence_tokens=128, sequences=count)
        for count in (8, 32, 64, 256)
    ),
    *(
        SmallCell(name=f"emotion-{count}", model="bert-base", sequence_tokens=128, sequences=count, lengths=EMOTION)
        for count in (8, 32, 64, 256)
    ),
)
GPT2 = SmallCell(name="gpt2", model="gpt2", sequence_tokens=1024, sequences=32)
CELLS = (
    *BERT_CELLS,
    *(cell.with_dropout for cell in BERT_CELLS),
    GPT2,
    GPT2.with_dropout,
    SmallCell(name="mpt-125m", model="mpt-125m", sequence_tokens=2048, sequences=32),
    SmallCell(name="qwen3-0.6b", model="qwen3-0.6b", sequence_tokens=4096, sequences=8),
    SmallCell(name="chats", model="qwen3-0.6b", sequence_tokens=4096, sequences=8, lengths=CHATS, pads_to="longest"),
)


DRAWN = 16384
"""Rows of data that a plan knows the lengths of."""


class Batches:
    """Random batches of a cell."""

    def __init__(self, cell: SmallCell, model: Transformer, *, seed: int = 0) -> None:
        self.cell, self.model, self.draw = cell, model, np.random.default_rng(seed)

    def lengths(self) -> NDArray[np.int32] | None:
        if self.cell.lengths is None:
            return None
        return np.minimum(self.cell.lengths.draw(self.draw, self.cell.sequences), self.cell.sequence_tokens)

    def expected(self) -> Lengths | None:
        """The lengths of many batches: those of data, of which each batch is a part."""
        if self.cell.lengths is None:
            return None
        drawn = [
            Batches(self.cell, self.model, seed=seed).lengths() for seed in range(1, 1 + DRAWN // self.cell.sequences)
        ]
        return count_lengths(int(tokens) for some in drawn if some is not None for tokens in some)

    def batch(self) -> Batch:
        shape = (self.cell.sequences, self.cell.sequence_tokens)
        ids = self.draw.integers(0, self.model.vocab, shape, dtype=np.int32)
        lengths = self.lengths()
        if self.model.head == "classifier":
            labels = self.draw.integers(0, self.model.labels or 2, shape[0], dtype=np.int32)
        else:
            labels = np.concatenate([ids[:, 1:], np.full((shape[0], 1), NO_LABEL, dtype=np.int32)], axis=1)
            if lengths is not None:
                labels[np.arange(shape[1]) >= lengths[:, None] - 1] = NO_LABEL
        if lengths is not None:
            ids[np.arange(shape[1]) >= lengths[:, None]] = 0
        return Batch(ids, labels, lengths)


def run_for(step: Callable[[], float], seconds: float, *, least: int) -> list[float]:
    """Steps until so much time has passed; how long each took."""
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < least or time.perf_counter() - begun < seconds:
        found.append(step())
    return found


def plan_cell(cell: SmallCell, model: Transformer, gib: float) -> tuple[Plan, float, float]:
    """The plan, its predicted step and the model FLOPs of a step by the card's peak."""
    setup = CappedSetup(
        model=model,
        hardware=find_hardware("h200"),
        sequence_tokens=cell.sequence_tokens,
        device_cap_bytes=int(gib * GIB),
        host_cap_bytes=0,
        formats=parse_formats("bf16"),
        batch_sequences=cell.sequences,
        lengths=Batches(cell, model).expected(),
    )
    found = make_plan(setup, helps=False)
    return found.plan, found.forecast.step_s, found.forecast.model_flops / found.forecast.peak_flops


def run_flopwise(cell: SmallCell, *, replay: bool | None, seconds: float, output: Path | None) -> dict[str, object]:
    """Its row; `replay` None: as planned."""
    model = cell.described
    plan, predicted_s, ideal_s = plan_cell(cell, model, 120)
    plan = plan if replay is None else replace(plan, replay=replay)
    executor = StreamingExecutor(
        plan, compile_plan(plan, model), model, Training(steps=100_000, learning_rate=1e-5), device=torch.device("cuda")
    )
    draw_weights(executor, "cuda")
    batches = Batches(cell, model)
    losses: list[float] = []
    waited: list[float] = []
    rows = []

    def step() -> float:
        batch = batches.batch()
        begun = time.perf_counter()
        losses.append(executor.step(batch, len(losses)).loss)
        rows.append(batch.tokens)
        waited.append(executor.submit_s)
        return time.perf_counter() - begun

    begun = time.perf_counter()
    warm = run_for(step, seconds, least=40 if cell.lengths else 6)
    warm_s = time.perf_counter() - begun
    measured = run_for(step, seconds, least=10)
    if output is not None:
        profiled(f"{cell.name}-{'replay' if plan.replay else 'eager'}", step, "cuda", output)
    step_s = quantile(measured, 0.5)
    row: dict[str, object] = {
        "cell": cell.name,
        "way": "flopwise replayed" if plan.replay else "flopwise eager",
        "step_ms": 1e3 * step_s,
        "sequences_per_s": cell.sequences / step_s,
        "tokens_per_s": float(np.mean(rows)) / step_s,
        "padded_tokens_per_s": cell.sequences * cell.sequence_tokens / step_s,
        "mfu": ideal_s / step_s,
        "predicted_per_measured": step_s / predicted_s,
        "submit_ms": 1e3 * quantile(waited[len(warm) :], 0.5),
        "warm_s": warm_s,
        "gib": torch.cuda.max_memory_allocated() / GIB,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "chunks": f"{plan.rounds_per_step}×{plan.chunks_per_round}×{plan.chunk_tokens}",
        "saves": plan.saves[0],
    }
    executor.close()
    return row


def run_peer(cell: SmallCell, *, compiled: bool, seconds: float) -> dict[str, object]:
    """transformers' own model on the same batches."""
    import transformers

    model = cell.described
    settings = {
        name: value for name, value in config_of(model, cell.sequence_tokens).items() if name != "architectures"
    }
    config = transformers.AutoConfig.for_model(**settings)
    classifies = model.head == "classifier"
    made: Any = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModelForCausalLM
    with torch.device("cuda"):
        module: Any = made.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    module.train()
    module.config.use_cache = False
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    called: Any = torch.compile(module) if compiled else module
    batches = Batches(cell, model)
    losses: list[float] = []
    rows: list[int] = []

    def step() -> float:
        batch = batches.batch()
        rows.append(batch.tokens)
        width = cell.sequence_tokens
        if batch.lengths is not None and cell.pads_to == "longest":
            width = min(width, -(-int(batch.lengths.max()) // 64) * 64)
        begun = time.perf_counter()
        ids = torch.from_numpy(batch.ids[:, :width].copy()).pin_memory().to("cuda", non_blocking=True).long()
        given: dict[str, Tensor] = {"input_ids": ids}
        if batch.lengths is not None:
            lengths = torch.from_numpy(batch.lengths).pin_memory().to("cuda", non_blocking=True)
            given["attention_mask"] = (torch.arange(ids.shape[1], device="cuda") < lengths[:, None]).long()
        given["labels"] = (
            torch.from_numpy(batch.labels).pin_memory().to("cuda", non_blocking=True).long() if classifies else ids
        )
        if batch.lengths is not None and not classifies:
            given["labels"] = ids.masked_fill(given["attention_mask"] == 0, -100)
        loss = called(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
        return time.perf_counter() - begun

    begun = time.perf_counter()
    run_for(step, seconds, least=6)
    warm_s = time.perf_counter() - begun
    step_s = quantile(run_for(step, seconds, least=10), 0.5)
    return {
        "cell": cell.name,
        "way": "transformers compiled" if compiled else "transformers",
        "step_ms": 1e3 * step_s,
        "sequences_per_s": cell.sequences / step_s,
        "tokens_per_s": float(np.mean(rows)) / step_s,
        "padded_tokens_per_s": cell.sequences * cell.sequence_tokens / step_s,
        "warm_s": warm_s,
        "gib": torch.cuda.max_memory_allocated() / GIB,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main() -> None:
    """Every cell asked for, its peer beside it; a table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default=",".join(cell.name for cell in CELLS))
    parser.add_argument("--ways", default="eager,replayed,compiled")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--profile", default="")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for cell in CELLS:
        if cell.name not in given.cells.split(","):
            continue
        for way in given.ways.split(","):
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            output = given.output if cell.name in given.profile.split(",") else None
            try:
                if way in ("compiled", "transformers"):
                    torch._dynamo.reset()
                    row = run_peer(cell, compiled=way == "compiled", seconds=given.seconds)
                else:
                    replay = {"eager": False, "replayed": True}.get(way)
                    row = run_flopwise(cell, replay=replay, seconds=given.seconds, output=output)
            except Exception as error:
                # One way that fails must not lose the others' minutes.
                row = {"cell": cell.name, "way": way, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            rows.append(row)
            print(
                " ".join(
                    f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
                ),
                flush=True,
            )
            with (given.output / "gpu_small.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for each in rows for key in each)))
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
