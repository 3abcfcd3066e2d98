"""Cells of the benchmark: a model under caps, planned and trained as `flopwise train` does, and what was measured."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_kernels import profiled
from benchmarks.gpu_record import FORWARD_SHARE
from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import THIS_MACHINE, load_model
from flopwise.engine.batch import Batch
from flopwise.engine.formats import TYPES
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.plan.device.explain import make_plan
from flopwise.plan.program.compile import compile_plan
from flopwise.profile.measure.sampling import Counters, sampler_for
from flopwise.profile.measure.this_machine import find_hardware
from flopwise.records.plan import Plan, Planned
from flopwise.records.program import Program
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import CappedSetup
from flopwise.setup.trained import TrainedWords
from flopwise.setup.training import Training
from flopwise.work.formats import parse_formats
from flopwise.work.optimizers import Optimizer
from flopwise.work.transformer import Transformer

GIB = 2**30

TINY = Transformer(
    name="tiny", title="tiny", source="for trying the benchmark where there is no GPU", layers=3, hidden=64, heads=4,
    kv_heads=2, ffn=160, vocab=512, context=256, rotary_base=10_000.0,
)  # fmt: skip
TINY_MIXTURE = replace(TINY, name="tiny-mixture", title="tiny mixture", ffn=32, experts=8, experts_per_token=2)
TINIES = {model.name: model for model in (TINY, TINY_MIXTURE)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A model on a sequence length under caps."""

    name: str
    model: str
    sequence_tokens: int
    batch_tokens: int
    """Of a step."""
    device_gib: float
    host_gib: float = 0
    precision: str = "bf16"
    optimizer: Optimizer = "adamw"
    lora: int = 0
    """The rank of adapters beside all matrices, which alone are trained then."""
    least_steps: int = 2
    """Measured, however long they take."""
    step_s: float = 12.0
    """About how long a step takes, to foresee the time of the cell."""
    set_up_s: float = 40.0
    """About how long it takes to the first step: starting, planning, pinning, drawing weights, compiling kernels."""
    warms_by_evaluation: bool = False
    """Warm up with a forward pass over the batch instead of a step: for steps of minutes."""

    @property
    def batch_sequences(self) -> int:
        return self.batch_tokens // self.sequence_tokens

    @property
    def warm_up_share(self) -> float:
        """Of a step's time, what the shortest warm-up takes."""
        return FORWARD_SHARE if self.warms_by_evaluation else 1.0

    @property
    def shape(self) -> str:
        """What cells that share a process have in common."""
        return ceiling_name(self.model, self.sequence_tokens, self.precision)

    @property
    def ceiling(self) -> str:
        """The name of what it is divided by: all cells of one shape in one precision have the same.

        None for adapters, which leave out a third of the products: a share of the others' ceiling would say nothing.
        """
        return "" if self.lora else self.shape


def ceiling_name(model: str, sequence_tokens: int, precision: str) -> str:
    """`8b-8k`, `fp8-8b-8k`."""
    sequence = f"{sequence_tokens // 1024}k" if sequence_tokens % 1024 == 0 else str(sequence_tokens)
    prefix = "fp8-" if parse_formats(precision).matrix == "fp8" else ""
    return f"{prefix}{model.removeprefix('llama-3-')}-{sequence}"


EIGHT = "llama-3-8b"
# The reference's rows of 8k have steps of about 48 s, and so have the capped cells here. The others take less, so that
# two of them at least fit into the measured time.
GPU_CELLS = (
    Cell(name="8k", model=EIGHT, sequence_tokens=8192, batch_tokens=262144, device_gib=132, step_s=22.5),
    Cell(
        name="8k-24", model=EIGHT, sequence_tokens=8192, batch_tokens=524288, device_gib=24, host_gib=110,
        step_s=49, set_up_s=45, least_steps=1,
    ),
    Cell(
        name="8k-40", model=EIGHT, sequence_tokens=8192, batch_tokens=524288, device_gib=40, host_gib=110,
        step_s=45, set_up_s=45, least_steps=1,
    ),
    Cell(
        name="64k-78", model=EIGHT, sequence_tokens=65536, batch_tokens=65536, device_gib=78, host_gib=110,
        step_s=12, set_up_s=55,
    ),
    Cell(
        name="64k-30", model=EIGHT, sequence_tokens=65536, batch_tokens=65536, device_gib=30, host_gib=110,
        step_s=12, set_up_s=55,
    ),
    Cell(
        name="256k", model=EIGHT, sequence_tokens=262144, batch_tokens=262144, device_gib=132, host_gib=110,
        step_s=124, set_up_s=55, least_steps=1, warms_by_evaluation=True,
    ),
    Cell(name="1b-8k", model="llama-3-1b", sequence_tokens=8192, batch_tokens=262144, device_gib=132, step_s=5),
    # Host memory is pinned at 0.46 s a GiB: where a tenth less of speed spares twenty seconds, the host's cap is lower
    # than what the machine has.
    Cell(
        name="olmoe-16", model="olmoe-1b-7b", sequence_tokens=4096, batch_tokens=131072, device_gib=16, host_gib=80,
        step_s=2.8, set_up_s=60,
    ),
    Cell(
        name="30b-a3b", model="qwen3-30b-a3b", sequence_tokens=4096, batch_tokens=65536, device_gib=132, host_gib=110,
        step_s=4, set_up_s=95,
    ),
    Cell(
        name="30b-a3b-lora", model="qwen3-30b-a3b", sequence_tokens=4096, batch_tokens=65536, device_gib=24,
        host_gib=70, precision="bf16-amp,base=bf16", lora=16, step_s=4.5, set_up_s=70,
    ),
    Cell(
        name="30b-a3b-8bit", model="qwen3-30b-a3b", sequence_tokens=4096, batch_tokens=65536, device_gib=60,
        host_gib=80, optimizer="adamw-8bit", step_s=5, set_up_s=75,
    ),
    Cell(
        name="gpt-oss-20b", model="gpt-oss-20b", sequence_tokens=4096, batch_tokens=524288, device_gib=132,
        host_gib=100, step_s=25, set_up_s=85, least_steps=1,
    ),
    Cell(
        name="fp8-8k", model=EIGHT, sequence_tokens=8192, batch_tokens=131072, device_gib=132, precision="fp8",
        step_s=9,
    ),
)  # fmt: skip
CPU_CELLS = (
    Cell(name="tiny", model="tiny", sequence_tokens=64, batch_tokens=256, device_gib=1, precision="fp32", step_s=0.1,
         set_up_s=8),
    Cell(name="tiny-capped", model="tiny", sequence_tokens=64, batch_tokens=256, device_gib=35 / 1024, host_gib=0.1,
         precision="fp32", step_s=0.1, set_up_s=8),
    Cell(name="tiny-evaluated", model="tiny", sequence_tokens=64, batch_tokens=256, device_gib=1, precision="fp32",
         step_s=0.1, set_up_s=8, least_steps=1, warms_by_evaluation=True),
    Cell(name="tiny-mixture", model="tiny-mixture", sequence_tokens=64, batch_tokens=256, device_gib=36 / 1024,
         host_gib=0.1, precision="fp32", optimizer="adamw-8bit", step_s=0.1, set_up_s=8),
    Cell(name="tiny-mixture-lora", model="tiny-mixture", sequence_tokens=64, batch_tokens=256, device_gib=1,
         precision="fp32", lora=4, step_s=0.1, set_up_s=8),
    Cell(name="tiny-impossible", model="tiny", sequence_tokens=64, batch_tokens=256, device_gib=0.001, host_gib=0.1,
         precision="fp32", step_s=0.1, set_up_s=8),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How all cells, ceilings and peers of a run are measured."""

    device: str
    output: Path
    warm_up_s: float = 20.0
    measure_s: float = 30.0
    ceiling_warm_up_s: float = 4.0
    ceiling_measure_s: float = 6.0
    hardware: str = ""
    """A file of `flopwise calibrate` or a catalogue entry; nothing: the card that is there, and `h200` for a CPU."""
    profile: bool = False

    @property
    def compares(self) -> bool:
        """Whether what is planned for is what it runs on: a CPU is not held against the H200."""
        return self.device == "cuda" or self.hardware != ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRow:
    """A cell as it ran. Rates are medians over the measured steps, `low` and `high` their 5 % and 95 %."""

    cell: str
    model: str
    sequence_tokens: int
    batch_tokens: int
    precision: str
    device_cap_bytes: int
    host_cap_bytes: int
    tokens_per_s: float
    tokens_per_s_low: float
    tokens_per_s_high: float
    step_s: float
    steps: int
    warm_up_steps: int
    warm_up_passes: int
    """Forward passes in the place of warm-up steps."""
    mfu: float | None
    """None, as what was predicted: it ran on something else than it was planned for."""
    hfu: float | None
    peak_flops: float | None
    predicted_tokens_per_s: float | None
    predicted_per_measured: float | None
    planned_bytes: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    used_bytes: int | None
    """Of the whole card, the driver's own included, when the steps were over."""
    peak_per_cap: float | None
    waited_s: float | None
    submit_s: float
    clock_mhz: float | None
    power_w: float | None
    throttle_share: float | None
    throttle_reasons: str
    temperature_c: float | None
    first_loss: float
    last_loss: float
    loss_finite: bool
    chunk_tokens: int
    chunks_per_round: int
    rounds_per_step: int
    saves: str
    tasks: int
    plan_s: float
    set_up_s: float
    """From the beginning of the cell to its first step, planning included."""


def model_of(name: str) -> Transformer:
    """A model of the catalogue or of a file, or the tiny one; `qwen3-30b-a3b:8`: its first eight layers."""
    name, _, layers = name.partition(":")
    model = TINIES.get(name) or load_model(name)
    assert isinstance(model, Transformer), f"{name} is no transformer"
    return replace(model, layers=int(layers)) if layers else model


def hardware_of(settings: Settings) -> Hardware:
    """What is planned for: what was asked for, or the card that is there; a CPU is planned as an H200."""
    if settings.hardware or settings.device != "cuda":
        return find_hardware(settings.hardware or "h200")
    hint = "--hardware with a catalogue entry, or with a file of `flopwise calibrate` (--like h100-sxm where it is new)"
    try:
        found = find_hardware(THIS_MACHINE)
    except FlopwiseError as error:
        raise FlopwiseError(error.what, why=error.why, hint=hint) from None
    if found.device.kind == "cpu":
        raise FlopwiseError("nothing says which card this is", why="nvidia-smi does not name a GPU", hint=hint)
    return found


def run_cell(cell: Cell, settings: Settings) -> CellRow:
    """Plan the cell, warm up with steps or forward passes, and then train it for the measured steps."""
    # The driver is asked for the card's name: no part of planning.
    hardware = hardware_of(settings)
    begun = time.perf_counter()
    model = TrainedWords(lora=cell.lora or None).of(model_of(cell.model))
    assert isinstance(model, Transformer)
    found = plan_cell(cell, model, hardware)
    program = compile_plan(found.plan, model)
    plan_s = time.perf_counter() - begun
    executor = _executor(found.plan, program, model, settings.device)
    set_up_s = time.perf_counter() - begun
    steps = Steps(executor, model, cell)
    passes = steps.evaluate_for(settings.warm_up_s) if cell.warms_by_evaluation else 0
    warm = [] if cell.warms_by_evaluation else steps.run_for(settings.warm_up_s, least=1)
    sampler = sampler_for(settings.device)
    sampler.start()
    measured = steps.run_for(settings.measure_s, least=cell.least_steps)
    ran = Ran(
        warm=len(warm),
        passes=passes,
        measured=len(measured),
        counters=sampler.stop(),
        memory=_memory(settings.device),
        tasks=len(program.tasks),
        plan_s=plan_s,
        set_up_s=set_up_s,
    )
    row = _row(cell, found, steps, ran)
    if not settings.compares:
        row = replace(
            row, mfu=None, hfu=None, peak_flops=None, predicted_tokens_per_s=None, predicted_per_measured=None
        )
    if settings.profile:
        try:
            profiled(cell.name, steps.one, settings.device, settings.output)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            # Minutes of measuring are not thrown away for a trace that cannot be taken.
            print(f"{cell.name}: no profile: {error}", flush=True)
    executor.close()
    return row


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """What a row needs beside the plan and the steps."""

    warm: int
    """Steps."""
    passes: int
    """Forward passes instead of them."""
    measured: int
    counters: Counters
    memory: tuple[int, int, int] | None
    tasks: int
    plan_s: float
    set_up_s: float


def plan_cell(cell: Cell, model: Transformer, hardware: Hardware) -> Planned:
    question = CappedSetup(
        model=model,
        hardware=hardware,
        sequence_tokens=cell.sequence_tokens,
        device_cap_bytes=int(cell.device_gib * GIB),
        host_cap_bytes=int(cell.host_gib * GIB),
        formats=parse_formats(cell.precision),
        optimizer=cell.optimizer,
        batch_sequences=cell.batch_sequences,
    )
    return make_plan(question, helps=False)


def _executor(plan: Plan, program: Program, model: Transformer, device: str) -> StreamingExecutor:
    """With weights drawn where it computes, which takes a second there and a minute on a host."""
    training = Training(steps=10_000, learning_rate=1e-5)
    executor = StreamingExecutor(plan, program, model, training, device=torch.device(device))
    draw_weights(executor, device)
    return executor


def draw_weights(executor: StreamingExecutor, device: str) -> None:
    """Normal numbers, norms that are 1, and nothing learned yet; peaks of memory count from here on."""
    dtype = TYPES[executor.formats.weights]
    generator = torch.Generator(device=device).manual_seed(0)
    executor.clear_moments()
    for parameter in executor.parameters:
        drawn = torch.randn(parameter.shape, generator=generator, device=device, dtype=dtype)
        executor.set_weights({parameter.name: torch.ones_like(drawn) if parameter.role == "norm" else drawn.mul_(0.02)})
        del drawn
    if device == "cuda":
        # The peak is that of all steps, the first one too; what drew the weights is not training's.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Steps:
    """Steps of an executor on random tokens, new ones for each."""

    def __init__(self, executor: StreamingExecutor, model: Transformer, cell: Cell) -> None:
        self.executor, self.cell, self.vocab = executor, cell, model.vocab
        self.draw = np.random.default_rng(0)
        self.seconds: list[float] = []
        self.waited_s: list[float | None] = []
        self.submit_s: list[float] = []
        self.losses: list[float] = []

    def one(self) -> None:
        """Train on a batch; the step is over when its loss is known."""
        batch = self._batch()
        begun = time.perf_counter()
        result = self.executor.step(batch, len(self.seconds))
        self.seconds.append(time.perf_counter() - begun)
        self.waited_s.append(result.waited_s)
        self.submit_s.append(self.executor.submit_s)
        self.losses.append(result.loss)

    def run_for(self, seconds: float, *, least: int) -> list[float]:
        """Steps until so much time has passed, and at least so many; returns how long each took."""
        first, begun = len(self.seconds), time.perf_counter()
        while len(self.seconds) - first < least or time.perf_counter() - begun < seconds:
            self.one()
        return self.seconds[first:]

    def evaluate_for(self, seconds: float) -> int:
        """Forward passes over batches until so much time has passed, and at least one; returns how many."""
        count, begun = 0, time.perf_counter()
        while not count or time.perf_counter() - begun < seconds:
            self.executor.evaluate([self._batch()])
            count += 1
        return count

    def _batch(self) -> Batch:
        shape = (self.cell.batch_sequences, self.cell.sequence_tokens + 1)
        ids = self.draw.integers(0, self.vocab, shape, dtype=np.int32)
        return Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]))


def _memory(device: str) -> tuple[int, int, int] | None:
    """Peak of allocated and of reserved bytes, and what the card has in use now."""
    if device != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return int(torch.cuda.max_memory_allocated()), int(torch.cuda.max_memory_reserved()), total - free


def _row(cell: Cell, found: Planned, steps: Steps, ran: Ran) -> CellRow:
    plan, forecast = found.plan, found.forecast
    counters, timed = ran.counters, slice(ran.warm, ran.warm + ran.measured)
    seconds = steps.seconds[timed]
    waited = [value for value in steps.waited_s[timed] if value is not None]
    step_s, low_s, high_s = (quantile(seconds, share) for share in (0.5, 0.05, 0.95))
    tokens = cell.batch_sequences * cell.sequence_tokens
    cap = int(cell.device_gib * GIB)
    allocated, reserved, used = ran.memory or (None, None, None)
    return CellRow(
        cell=cell.name,
        model=cell.model,
        sequence_tokens=cell.sequence_tokens,
        batch_tokens=tokens,
        precision=cell.precision,
        device_cap_bytes=cap,
        host_cap_bytes=int(cell.host_gib * GIB),
        tokens_per_s=tokens / step_s,
        tokens_per_s_low=tokens / high_s,
        tokens_per_s_high=tokens / low_s,
        step_s=step_s,
        steps=ran.measured,
        warm_up_steps=ran.warm,
        warm_up_passes=ran.passes,
        mfu=forecast.model_flops / (step_s * forecast.peak_flops),
        hfu=forecast.hardware_flops / (step_s * forecast.peak_flops),
        peak_flops=forecast.peak_flops,
        predicted_tokens_per_s=forecast.tokens_per_s,
        predicted_per_measured=forecast.tokens_per_s * step_s / tokens,
        planned_bytes=forecast.device_total,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        used_bytes=used,
        peak_per_cap=None if allocated is None else allocated / cap,
        waited_s=quantile(waited, 0.5) if waited else None,
        submit_s=quantile(steps.submit_s[timed], 0.5),
        clock_mhz=None if counters.clock_mean_hz is None else counters.clock_mean_hz / 1e6,
        power_w=counters.power_w,
        throttle_share=counters.throttle_share,
        throttle_reasons=reasons_text(counters),
        temperature_c=counters.temperature_c,
        first_loss=steps.losses[0],
        last_loss=steps.losses[-1],
        loss_finite=all(map(math.isfinite, steps.losses)),
        chunk_tokens=plan.chunk_tokens,
        chunks_per_round=plan.chunks_per_round,
        rounds_per_step=plan.rounds_per_step,
        saves=saves_text(plan.saves),
        tasks=ran.tasks,
        plan_s=ran.plan_s,
        set_up_s=ran.set_up_s,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """By straight lines between the sorted values."""
    return float(np.quantile(values, share))


def reasons_text(counters: Counters) -> str:
    """Why the clock was not the highest, each with its share of the samples."""
    return " + ".join(f"{name} {share:.0%}" for name, share in counters.reasons.items())


def saves_text(saves: Sequence[str]) -> str:
    """Neighbours that are alike told once: `everything×30 input×2`."""
    runs: list[tuple[str, int]] = []
    for save in saves:
        if runs and runs[-1][0] == save:
            runs[-1] = (save, runs[-1][1] + 1)
        else:
            runs.append((save, 1))
    return " ".join(f"{save}×{count}" for save, count in runs)


def cell_values(row: CellRow) -> dict[str, object]:
    """The row's columns, in their order."""
    return asdict(row)
