"""Three trainings of one model side by side: `python -m benchmarks.gpu_losses --output FOLDER [--steps 50]`.

From the same first weights and on the same text (the standard library's sources, as bytes) train the plain modules with
autograd in bf16, the streaming executor in bf16 and the streaming executor in fp8. All have the same AdamW with moments
in bf16 and the same random bits of its rounding, so that what differs is the arithmetic of forward and backward alone.
"""

from __future__ import annotations

import argparse
import csv
import gc
import io
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_record import make_folder, mistakes_told
from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.files import write_whole
from flopwise.catalog.load import load_hardware, load_model
from flopwise.engine.batch import Batch
from flopwise.engine.data import DataRequest, LanguageData, open_language_data
from flopwise.engine.data.tokenizer import ByteTokenizer
from flopwise.engine.devices import choose_device
from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.dispatch import Seed, UpdateSettings
from flopwise.engine.modules import ReferenceModel, build
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.engine.streaming.updates import numbers_by_part
from flopwise.engine.weights.initial import initial_values
from flopwise.plan.device.explain import make_plan
from flopwise.plan.program.compile import compile_plan
from flopwise.records.plan import Plan
from flopwise.setup.setup import CappedSetup
from flopwise.setup.training import Training
from flopwise.work.formats import POLICIES, parse_formats
from flopwise.work.parameters import Parameter, parameters_of
from flopwise.work.transformer import Transformer

GIB = 2**30
HALF = torch.bfloat16
WAYS = ("reference", "bf16", "fp8")
SHOWN_STEPS = (1, 2, 5, 10, 20, 30, 40, 50, 75, 100, 150, 200, 300, 400, 500, 1000)
LAST_STEPS = 10
"""Whose mean is compared: a single step's loss is its batch's as much as the model's."""
WARM_UP_SHARE = 5
"""One step in so many is of the warm-up: where the first steps are unsteady, curves of one quality drift apart."""

Train = Callable[["Case", Mapping[str, Tensor], list[Batch]], list[float]]


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


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=28),
    )
    output = "the folder of losses.csv and of the text's tokens"
    made.add_argument("--output", type=Path, required=True, default=argparse.SUPPRESS, help=output)
    made.add_argument("--model", default="llama-3-1b", help="a decoder of the catalogue, or a file")
    made.add_argument("--steps", type=int, default=50, help="of each training, a fifth of them with a rising rate")
    made.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    made.add_argument("--batch", type=int, default=8, help="sequences of a step")
    made.add_argument("--rate", type=float, default=1e-4, help="learning rate after the warm-up")
    made.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"), help="what trains")
    made.add_argument("--device-gib", type=float, default=100.0, help="device memory that plans may use, in GiB")
    made.add_argument("--ways", default=",".join(WAYS), help="what is trained; others are held against the first")
    return made


FILE = "losses.csv"


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    with mistakes_told():
        case, ways = case_of(given), ways_of(given.ways)
        make_folder(given.output)
        if (given.output / FILE).exists():
            raise FlopwiseError(
                f"{given.output / FILE} is there already", why="it holds the losses of an earlier run",
                hint="--output with another folder",
            )  # fmt: skip
        losses = compared(case, given.output, ways)
    print("\n".join(told(losses)))


def case_of(given: argparse.Namespace) -> Case:
    """What is asked for, or what about it cannot be."""
    for option, value, most, example in (
        ("--steps", given.steps, 1_000_000, 50), ("--seq", given.seq, 2**24, 2048), ("--batch", given.batch, 2**20, 8),
        ("--rate", given.rate, 1, 1e-4), ("--device-gib", given.device_gib, 1_000_000, 100),
    ):  # fmt: skip
        if not 0 < value <= most:
            why = f"it is a number above 0, at most {most:,}"
            raise FlopwiseError(f"{option} cannot be {shown(value)}", why=why, hint=f"{option} {example}")
    model = load_model(given.model)
    if not isinstance(model, Transformer) or not model.causal or model.head != "language":
        raise FlopwiseError(
            f"{model.name} does not foretell the next token as a transformer",
            why="plain modules and the streaming executor are compared as language models",
            hint="--model llama-3-1b, gpt2 or another decoder",
        )
    if model.vocab < ByteTokenizer.size:
        raise FlopwiseError(
            f"{model.name} knows {model.vocab:,} tokens, which are too few",
            why=f"the text is bytes, with {ByteTokenizer.size} different tokens",
            hint="a larger `vocab`, or --model llama-3-1b",
        )
    model.check_sequence(given.seq)
    return Case(
        model=model,
        sequence_tokens=given.seq,
        batch_sequences=given.batch,
        training=Training(
            steps=given.steps,
            learning_rate=given.rate,
            warmup_steps=given.steps // WARM_UP_SHARE,
            schedule="constant",
            stochastic_rounding=True,
            # The plain modules are called without.
            drops=False,
        ),
        device=torch.device(choose_device(given.device)),
        device_bytes=int(given.device_gib * GIB),
    )


def ways_of(text: str) -> tuple[str, ...]:
    """Ways by name, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    hint = f"--ways {','.join(WAYS)}"
    for name in names:
        if name not in WAYS:
            raise unknown_name("way", name, WAYS, hint=hint)
    if not names:
        raise FlopwiseError("nothing to train", why="--ways names none", hint=hint)
    return names


def compared(case: Case, output: Path, ways: Sequence[str] = WAYS) -> dict[str, list[float]]:
    """The losses of each way, step by step; written to `losses.csv` after each of them."""
    # What cannot be planned is told before anything has trained.
    trains: dict[str, Train] = {way: _by_autograd if way == "reference" else _streaming(case, way) for way in ways}
    request = DataRequest(sequence_tokens=case.sequence_tokens, vocab=case.model.vocab, cache=output / "tokens")
    batches = case.batches(open_language_data(request))
    first = _first_weights(case)
    losses: dict[str, list[float]] = {}
    for way, train in trains.items():
        begun = time.perf_counter()
        losses[way] = train(case, first, batches)
        # Nothing of one is left when the next takes its memory.
        gc.collect()
        if case.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{way}: {len(batches)} steps, {time.perf_counter() - begun:.1f} s with its start", flush=True)
        _write(losses, output / FILE)
    return losses


def _first_weights(case: Case) -> dict[str, Tensor]:
    """Drawn once, by all cores."""

    def drawn(parameter: Parameter) -> tuple[str, Tensor]:
        return parameter.name, initial_values(parameter, case.training.seed, case.model.layers).to(HALF)

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(drawn, parameters_of(case.model, case.sequence_tokens)))


# -- the three -------------------------------------------------------------------------------------------------------


def _streaming(case: Case, precision: str) -> Train:
    plan = _plan(case, precision)

    def train(case: Case, first: Mapping[str, Tensor], batches: list[Batch]) -> list[float]:
        program = compile_plan(plan, case.model)
        executor = StreamingExecutor(plan, program, case.model, case.training, device=case.device)
        executor.clear_moments()
        executor.set_weights(first)
        losses = [executor.step(batch, step).loss for step, batch in enumerate(batches)]
        executor.close()
        return losses

    return train


def _plan(case: Case, precision: str) -> Plan:
    question = CappedSetup(
        model=case.model,
        hardware=load_hardware(case.hardware),
        sequence_tokens=case.sequence_tokens,
        device_cap_bytes=case.device_bytes,
        host_cap_bytes=0,
        formats=parse_formats(precision),
        batch_sequences=case.batch_sequences,
    )
    try:
        return make_plan(question, helps=False).plan
    except FlopwiseError as error:
        hint = "a larger --device-gib" if (error.hint or "").startswith("--device-mem") else error.hint
        raise FlopwiseError(error.what, why=error.why, hint=hint) from None


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
    settings = UpdateSettings(
        rate=training.rate_at(step),
        beta1=training.beta1,
        beta2=training.beta2,
        epsilon=training.epsilon,
        weight_decay=training.weight_decay,
        step=step + 1,
        rounding=Seed(training.seed) if training.stochastic_rounding else None,
    )
    values = dict(module.named_parameters())
    for numbers in numbers_by_part(parameters_of(case.model, case.sequence_tokens), POLICIES["bf16"]).values():
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
    some = sorted({step for step in SHOWN_STEPS if step <= steps} | {steps})
    rows = [(f"{step}", [losses[way][step - 1] for way in ways]) for step in some]
    last = min(LAST_STEPS, steps)
    mean = f"mean of the last {last} steps" if last > 1 else "mean of the last step"
    rows.append((mean, [sum(losses[way][-last:]) / last for way in ways]))
    heads = (*(f"{way:>10}" for way in ways), *(f"{way + ' %':>10}" for way in ways[1:]))
    lines = [" ".join((f"{'step':>{len(mean)}}", *heads))]
    for name, row in rows:
        off = (f"{100 * (value / row[0] - 1):>+10.3f}" for value in row[1:])
        lines.append(" ".join((f"{name:>{len(mean)}}", *(f"{value:>10.4f}" for value in row), *off)))
    return lines


def _write(losses: Mapping[str, Sequence[float]], path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("step", *losses))
    writer.writerows((step + 1, *row) for step, row in enumerate(zip(*losses.values(), strict=True)))
    write_whole(path, text.getvalue())


if __name__ == "__main__":
    main()
