"""`Measurement`: what a training took, under the names that predictions have; `RunRecord`: the whole of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.shown import Shown
from flopwise.base.units import show_seconds, show_share, significant
from flopwise.records.outcome import Outcome
from flopwise.setup.training import Task, Training
from flopwise.work.op import Convention
from flopwise.work.optimizers import Optimizer
from flopwise.work.parameters import Place

LONGEST_STEP_S = 1e12
COUNTED = {
    "plan": ("devices", "sequence_tokens", "batch_sequences", "device_memory_bytes", "host_memory_bytes"),
    "request": ("batch_sequences", "micro_batch_sequences", "device_memory_bytes", "host_memory_bytes"),
}
"""Of a record's free tables: fields that are whole numbers where they are known."""
EXPECTED = ("step_s", "tokens_per_s", "device_bytes", "host_bytes")
"""Of a plan's `expected`: those that rows of results repeat."""

RunState = Literal["running", "done", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One line of `steps.jsonl`."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the tokens, or samples, that have a loss."""
    learning_rate: float
    step_s: float
    tokens: int
    """That were trained on, padding left out."""
    samples: int
    """Sequences, those of every rank counted once."""
    tokens_per_s: float
    mfu: float | None
    """None where the device's peak is not known."""
    gradient_norm: float | None = None
    predicted_s: float | None = None
    exposed_copy_s: float | None = None
    device_bytes: int | None = None
    """The most that was taken so far, as far as it can be told."""
    host_bytes: int | None = None
    rewards: dict[str, float] | None = None
    """Of preferences, in the mean over a step's pairs: what `chosen` and `rejected` answers gained on the reference,
    times β, their `margin`, and the `accuracy` with which the better one gained more."""
    routing: dict[str, float] | None = None
    """Of a mixture whose routing has losses: `balance_loss` and `z_loss` as they are part of `loss`, the tokens of a
    layer's `busiest` expert over those of the mean one, and the share of experts that were `unused`."""
    evaluation: dict[str, float] | None = None
    """`eval_loss`, `eval_accuracy`, …, where it was evaluated after this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """One owner's memory: as planned, and as it was."""

    place: Place
    owner: str
    """As plans call them, or `unaccounted`: what nobody has planned."""
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement(Outcome):
    """A training that ran."""

    model: str
    hardware: str
    devices: int
    sequence_tokens: int
    batch_sequences: int
    micro_batch_sequences: int
    batch_tokens: int
    precision: str
    optimizer: Optimizer
    n_params: int
    steps: int
    """That were measured: the first ones, which warm up, are left out."""
    step_s: float
    """Median."""
    step_s_p20: float
    step_s_p80: float
    tokens_per_s: float
    tokens_per_s_p20: float
    tokens_per_s_p80: float
    model_flops: int
    hardware_flops: int
    convention: Convention
    first_loss: float
    last_loss: float
    memory: tuple[MemoryRow, ...]
    predicted_step_s: float | None = None
    predicted_tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        counts = ("devices", "batch_sequences", "micro_batch_sequences")
        odd = [name for name in counts if getattr(self, name) < 1]
        odd += [] if 0 < self.step_s < LONGEST_STEP_S else ["step_s"]
        if odd:
            raise FlopwiseError(f"{odd[0]} of a measurement cannot be {shown(getattr(self, odd[0]))}")

    def total_bytes(self, place: Place, *, planned: bool = False) -> int:
        """Of all owners together."""
        return sum(row.planned_bytes if planned else row.measured_bytes for row in self.memory if row.place == place)

    @property
    def device_total(self) -> int | None:
        return measured_bytes(self.memory, "device")

    @property
    def host_total(self) -> int | None:
        return measured_bytes(self.memory, "host")


def measured_bytes(memory: tuple[MemoryRow, ...], place: Place) -> int | None:
    """None where nobody has looked at the place: that is not 0 bytes."""
    found = [row.measured_bytes for row in memory if row.place == place]
    return sum(found) if found else None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunRecord(Shown):
    """`record.json` of a run's folder: written whole at the start, and again whenever its state changes."""

    id: str
    """The folder's name: `0142`."""
    cell: str | None = None
    """The id of its set-up, as `store.cells.cell_id` has it; of a sweep's attempt that of the cell which it tries."""
    attempt: int | None = None
    """Which of the cell's attempts it is, where a sweep has begun it."""
    state: RunState
    started: str
    """Local time with its offset, ISO 8601."""
    ended: str | None = None
    model: dict[str, Any]
    """The description's table, as a model file holds it."""
    hardware: str | None = None
    """What it is planned for, as the catalogue or its description calls it."""
    task: Task
    training: Training
    plan: dict[str, Any]
    """As `plan.toml` holds it."""
    data: dict[str, Any]
    """What it was trained on: sources, tokenizer, fingerprint, counts."""
    environment: dict[str, str]
    """Versions, commit, device, driver, clocks where they can be told."""
    steps_done: int = 0
    checkpoint: str | None = None
    """The last complete one, relative to the folder."""
    best: str | None = None
    """That of the best evaluation, where it was to be kept."""
    resumed_from: str | None = None
    """The checkpoint that it goes on from, relative to the folder."""
    resumed_after: int = 0
    """The last step of the process before, perhaps on another machine; 0 where the run was never resumed."""
    measurement: Measurement | None = None
    metrics: dict[str, float | str] = field(default_factory=dict)
    """The block of train metrics: `epoch`, `train_loss`, `train_runtime`, …"""
    profile: str | None = None
    """Where it was profiled: the profile, relative to the folder."""
    bound: str | None = None
    """What limits it: the first verdict of its profile, in a word."""
    request: dict[str, Any] = field(default_factory=dict)
    """What was asked for, to go on with it later."""
    reason: str | None = None
    """Why it failed or was interrupted."""

    def __post_init__(self) -> None:
        """Check what listings and pages take from the free tables: the rest of those may be anything."""
        name = self.model.get("name")
        if not isinstance(name, str) or not name:
            raise FlopwiseError("its model has no name", why=f"model.name is {shown(name)}")
        for table, fields in COUNTED.items():
            for field_name in fields:
                value = getattr(self, table).get(field_name)
                if value is not None and (type(value) is not int or not 0 <= value < 2**63):
                    raise FlopwiseError(f"{table}.{field_name} is {shown(value)}, not a count")
        expected = self.plan.get("expected")
        known = expected if isinstance(expected, dict) else {}
        for field_name in EXPECTED:
            value = known.get(field_name)
            if value is not None and type(value) not in (int, float):
                raise FlopwiseError(f"plan.expected.{field_name} is {shown(value)}, not a number")

    @property
    def figures(self) -> dict[str, str]:
        found = self.measurement
        told = {
            "model": str(self.model["name"]),
            "run": f"{self.id}, {self.state}" + (f": {self.reason}" if self.reason else ""),
            "steps": f"{self.steps_done:,} of {self.training.steps:,}",
        }
        if found is None:
            return told
        predicted = f" (predicted {show_seconds(found.predicted_step_s)})" if found.predicted_step_s else ""
        return {
            **told,
            "step": f"{show_seconds(found.step_s)}{predicted}",
            "tokens/s": significant(found.tokens_per_s),
            "MFU": "-" if found.mfu is None else show_share(found.mfu),
            "loss": f"{found.first_loss:.4g} to {found.last_loss:.4g}",
        }
