"""Three trainings of one model side by side: `python -m benchmarks.gpu_losses --output FOLDER [--steps 50]`.

From the same first weights and on the same text (the standard library's sources, as bytes) train the plain modules with
autograd in bf16, the streaming executor in bf16 and the streaming executor in fp8. All have the same AdamW with moments
in bf16 and the same random bits of its rounding, so that what differs is the arithmetic of forward and backward alone.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flopwise.core.catalog import load_hardware, load_model
from flopwise.core.formats import parse_formats
from flopwise.core.parameters import Parameter, parameters_of
from flopwise.core.training import Training
from flopwise.core.transformer import Transformer
from flopwise.engine.batch import Batch
from flopwise.engine.data import DataRequest, LanguageData, open_language_data
from flopwise.engine.initial import initial_values
from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.dispatch import AdamW, Seed
from flopwise.engine.modules import ReferenceModel, build
from flopwise.engine.streaming import StreamingExecutor
from flopwise.engine.updates import numbers_by_part
from flopwise.plan.compile import compile_plan
from flopwise.plan.cuts import DeviceQuestion
from flopwise.plan.explain import planned

GIB = 2**30
HALF = torch.bfloat16
WAYS = ("reference", "bf16", "fp8")
SHOWN_STEPS = (1, 2, 5, 10, 20, 30, 40, 50, 75, 100, 150, 200, 300, 400, 500, 1000)
LAST_STEPS = 10
"""Whose mean is compared: a single step's loss is its batch's as much as the model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is trained, and on what."""

    model: Transformer
    sequence_tokens: int
    batch_sequences: int
    training: Training
    device: torch.device
    hardware: str = "h200"
    device_bytes: int = 100 * GIB
    micro_batch_sequences: int = 4
    """Of the reference, whose logits are not made in pieces."""

    def batches(self, data: LanguageData) -> list[Batch]:
        """One for each step."""
        count = self.batch_sequences
        return [data.batch(step * count, count) for step in range(self.training.steps)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", default="llama-3-1b", help="a name of the catalogue, or a file")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--device-gib", type=float, default=100.0)
    parser.add_argument("--ways", default=",".join(WAYS))
    given = parser.parse_args(arguments)
    model = load_model(given.model)
    assert isinstance(model, Transformer)
    case = Case(
        model=model,
        sequence_tokens=given.seq,
        batch_sequences=given.batch,
        training=Training(
            steps=given.steps,
            learning_rate=given.rate,
            warmup_steps=given.steps // 10,
            schedule="constant",
            stochastic_rounding=True,
        ),
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        device_bytes=int(given.device_gib * GIB),
    )
    given.output.mkdir(parents=True, exist_ok=True)
    losses = compared(case, given.output, tuple(given.ways.split(",")))
    print("\n".join(told(losses)))


def compared(case: Case, output: Path, ways: Sequence[str] = WAYS) -> dict[str, list[float]]:
    """The losses of each way, step by step; written to `losses.csv` after each of them."""
    request = DataRequest(sequence_tokens=case.sequence_tokens, vocab=case.model.vocab, cache=output / "tokens")
    batches = case.batches(open_language_data(request))
    first = _first_weights(case)
    losses: dict[str, list[float]] = {}
    for way in ways:
        begun = time.perf_counter()
        train: Callable[[Case, Mapping[str, Tensor], list[Batch]], list[float]]
        train = _by_autograd if way == "reference" else _streaming(way)
        losses[way] = train(case, first, batches)
        # Nothing of one is left when the next takes its memory.
        gc.collect()
        if case.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{way}: {len(batches)} steps, {time.perf_counter() - begun:.1f} s with its start", flush=True)
        _write(losses, output / "losses.csv")
    return losses


def _first_weights(case: Case) -> dict[str, Tensor]:
    """Drawn once, by all cores."""

    def drawn(parameter: Parameter) -> tuple[str, Tensor]:
        return parameter.name, initial_values(parameter, case.training.seed, case.model.layers).to(HALF)

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(drawn, parameters_of(case.model, case.sequence_tokens)))


# -- the three -------------------------------------------------------------------------------------------------------


def _streaming(precision: str) -> Callable[[Case, Mapping[str, Tensor], list[Batch]], list[float]]:
    def train(case: Case, first: Mapping[str, Tensor], batches: list[Batch]) -> list[float]:
        question = DeviceQuestion(
            model=case.model,
            hardware=load_hardware(case.hardware),
            sequence_tokens=case.sequence_tokens,
            device_bytes=case.device_bytes,
            host_bytes=0,
            formats=parse_formats(precision),
            batch_sequences=case.batch_sequences,
        )
        plan = planned(question, helps=False).plan
        program = compile_plan(plan, case.model)
        executor = StreamingExecutor(plan, program, case.model, case.training, device=case.device)
        executor.clear_moments()
        executor.set_weights(first)
        losses = [executor.step(batch, step).loss for step, batch in enumerate(batches)]
        executor.close()
        return losses

    return train


def _by_autograd(case: Case, first: Mapping[str, Tensor], batches: list[Batch]) -> list[float]:
    module = build(case.model, case.sequence_tokens, dtype=HALF, device=case.device)
    with torch.no_grad():
        for name, value in module.named_parameters():
            value.copy_(first[name])
    moments = {name: torch.zeros((2, value.numel()), dtype=HALF, device=case.device)
               for name, value in module.named_parameters()}  # fmt: skip
    losses = []
    for step, batch in enumerate(batches):
        module.zero_grad()
        total = 0.0
        for part in batch.micro_batches(case.micro_batch_sequences):
            ids, labels = (torch.from_numpy(each).to(case.device).long() for each in (part.ids, part.labels))
            loss = module.loss(ids, labels) / batch.with_loss
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        losses.append(total)
        _update(case, module, moments, step)
    return losses


@torch.no_grad()
def _update(case: Case, module: ReferenceModel, moments: Mapping[str, Tensor], step: int) -> None:
    """AdamW as the executor has it: over numbers that have the same places among all."""
    training = case.training
    settings = AdamW(
        rate=training.rate_at(step),
        beta1=training.beta1,
        beta2=training.beta2,
        epsilon=training.epsilon,
        weight_decay=training.weight_decay,
        step=step + 1,
        rounding=Seed(training.seed) if training.stochastic_rounding else None,
    )
    values = dict(module.named_parameters())
    for numbers in numbers_by_part(parameters_of(case.model, case.sequence_tokens)).values():
        for parameter in numbers.parameters:
            value = values[parameter.name]
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            dispatch.adamw(
                *(value.view(-1), gradient.reshape(-1), *moments[parameter.name], None),
                settings=settings if parameter.decays else replace(settings, weight_decay=0.0),
                offset=numbers.offset + parameter.first,
            )


# -- what came of it -------------------------------------------------------------------------------------------------


def told(losses: Mapping[str, Sequence[float]]) -> list[str]:
    """A table: losses at some steps, the mean of the last, and each against the first column."""
    ways = list(losses)
    steps = len(losses[ways[0]])
    lines = [" ".join((f"{'step':>8}", *(f"{way:>10}" for way in ways), *(f"{way + ' %':>10}" for way in ways[1:])))]
    shown = sorted({step for step in SHOWN_STEPS if step <= steps} | {steps})
    rows = [(f"{step}", [losses[way][step - 1] for way in ways]) for step in shown]
    last = min(LAST_STEPS, steps)
    rows.append((f"last {last}", [sum(losses[way][-last:]) / last for way in ways]))
    for name, row in rows:
        off = (f"{100 * (value / row[0] - 1):>+10.3f}" for value in row[1:])
        lines.append(" ".join((f"{name:>8}", *(f"{value:>10.4f}" for value in row), *off)))
    return lines


def _write(losses: Mapping[str, Sequence[float]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("step", *losses))
        writer.writerows((step + 1, *row) for step, row in enumerate(zip(*losses.values(), strict=True)))


if __name__ == "__main__":
    main()
