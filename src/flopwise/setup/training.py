"""`Training`: how a model is trained, beside the plan that says how fast. Everything here changes the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import cos, pi, sqrt
from numbers import Real
from typing import Any, Literal, get_args

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.units import one_expected
from flopwise.work.optimizers import Optimizer

Task = Literal["language", "masked", "classification", "dpo"]
"""masked: some tokens of a text are hidden, and foretold from all around them."""
TASKS: tuple[Task, ...] = get_args(Task)

MASK_SHARE = 0.15
"""Of a text's tokens, what is hidden where nobody says: BERT's."""
MASK_SHARES = {"modernbert": 0.3}
"""Of families that were trained with another: https://arxiv.org/abs/2412.13663."""

Schedule = Literal["cosine", "linear", "constant", "wsd", "inverse-sqrt"]
"""wsd: warm-up, stable, decay."""
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

DecayShape = Literal["linear", "sqrt"]
DECAY_SHAPES: tuple[DecayShape, ...] = get_args(DecayShape)

COSINE_FLOOR = 0.1
"""Of the highest rate, what a cosine ends at where nobody says."""
MOST_DIGITS = 16
"""Of a count that is read."""
TIMESCALE_STEPS = 10_000
"""Of an inverse square root that has no warm-up."""


OPTIMIZER_SETTINGS: dict[Optimizer, dict[str, float]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
    "adamw-8bit": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
    "muon": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "momentum": 0.95},
    "lion": {"beta1": 0.9, "beta2": 0.99},
    "sgd": {},
    "sgd-momentum": {"momentum": 0.9},
    "adafactor": {},
}
"""What each optimizer has beside a learning rate and weight decay, and what that is where nobody says.

Muon's betas are those of AdamW around the blocks. Lion's are its paper's."""
NESTEROV: tuple[Optimizer, ...] = ("sgd-momentum",)
"""Whose momentum may look ahead; Muon's always does."""


def settle_momentum(optimizer: Optimizer | None, momentum: float | None) -> Optimizer | None:
    """SGD is another optimizer with momentum: it remembers a number for each parameter."""
    return "sgd-momentum" if optimizer == "sgd" and momentum else optimizer


def check_settings(optimizer: Optimizer, given: Mapping[str, object]) -> None:
    """Refuse settings that an optimizer has not; None: not given."""
    known = {*OPTIMIZER_SETTINGS[optimizer], *(["nesterov"] if optimizer in NESTEROV else [])}
    every = {name for settings in OPTIMIZER_SETTINGS.values() for name in settings} | {"nesterov"}
    for name, value in given.items():
        if name in every and name not in known and value is not None:
            has = ", ".join(f"--{each}" for each in sorted(known)) or "a learning rate and weight decay alone"
            others = [each for each, settings in OPTIMIZER_SETTINGS.items() if name in settings]
            raise FlopwiseError(
                f"{optimizer} has no {name}",
                why=f"it has {has}",
                hint=f"leave --{name} out, or --optimizer {' or '.join(others or NESTEROV)}",
            )


def parse_share(text: float | str) -> float:
    """A share of something: 0.03 or 3%."""
    words = str(text).strip()
    try:
        share = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise FlopwiseError(
            f"cannot be {shown(text)}", why="a share is expected, from 0 to 1", hint="a number such as 0.15, or 15%"
        )
    return share


def parse_warmup(text: float | str) -> dict[str, Any]:
    """A warm-up as a request has it: a whole number of steps, or their share of all."""
    words = str(text).strip()
    if "," in words:
        raise one_expected(words, "a warm-up")
    if words.isascii() and words.isdecimal() and len(words) < MOST_DIGITS:
        return {"warmup_steps": int(words)}
    try:
        return {"warmup_share": parse_share(words)}
    except FlopwiseError as error:
        raise FlopwiseError(error.what, why="steps are expected, or their share of all", hint="100, 3%, 0.03") from None


def is_number(value: object) -> bool:
    """Whether it is one, numpy's among them; a truth value is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


OPEN_NUMBERS = {"steps": 100, "min_learning_rate": 3e-5, "clip_norm": 1.0}
"""Numbers of a training that have no default, or none of theirs: what they may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The optimizer's settings, and how long it goes on."""

    steps: int
    task: Task = "language"
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    min_learning_rate: float | None = None
    """What the schedule ends at, or never falls below; None: a tenth of the highest for a cosine, else nothing."""
    decay_share: float = 0.1
    """Of the steps, those at the end of a WSD schedule in which the rate falls."""
    decay_shape: DecayShape = "linear"
    optimizer: Optimizer = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.95
    """Of Muon, and of SGD where it has one."""
    nesterov: bool = False
    """Whether SGD's momentum looks ahead."""
    weight_decay: float = 0.1
    """For matrices and tables; biases and norms have none."""
    clip_norm: float | None = None
    """Largest norm of all gradients together; None: no clipping."""
    stochastic_rounding: bool = False
    """Weights kept in bf16 are rounded up or down by chance, in proportion to what lies between."""
    drops: bool = True
    """Whether what the model's description says is dropped; an evaluation drops nothing."""
    ema: float = 0.0
    """What a mean of the weights keeps of itself in a step, where there is one."""
    label_smoothing: float = 0.0
    """The share of what is wanted that all answers have alike."""
    z_loss: float = 0.0
    """What the square of the logarithm of the softmax's denominator is multiplied by."""
    dpo_beta: float = 0.1
    """How far a preference may lead away from the reference: the less, the further."""
    dpo_label_smoothing: float = 0.0
    """The share of preferences that are taken to be the wrong way round."""
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.steps < 1:
            raise FlopwiseError(f"a training cannot have {self.steps:,} steps", hint="--steps 100")
        if self.task not in TASKS:
            raise unknown_name("task", str(self.task), TASKS, hint=f"--task {' | '.join(TASKS)}")
        if self.schedule not in SCHEDULES:
            raise unknown_name("schedule", str(self.schedule), SCHEDULES, hint=f"--schedule {' | '.join(SCHEDULES)}")
        if self.decay_shape not in DECAY_SHAPES:
            raise unknown_name("decay", str(self.decay_shape), DECAY_SHAPES, hint="--decay-shape sqrt")
        self._check_rates()

    def _check_numbers(self) -> None:
        for field in fields(self):
            value, usual = getattr(self, field.name), OPEN_NUMBERS.get(field.name, field.default)
            if not is_number(usual) or (value is None and field.default is None):
                continue
            if not is_number(value):
                raise FlopwiseError(
                    f"{field.name} of a training cannot be {shown(str(value))}",
                    why="a number is expected",
                    hint=f"--{field.name.replace('_', '-')} {usual:g}",
                )

    def _check_rates(self) -> None:
        for name, least, most, usual in (
            ("learning_rate", 0.0, 1e3, 3e-4),
            ("decay_share", 0.0, 1.0, 0.1),
            ("beta1", 0.0, 0.9999999, 0.9),
            ("beta2", 0.0, 0.9999999, 0.95),
            ("epsilon", 0.0, 1.0, 1e-8),
            ("momentum", 0.0, 0.9999999, 0.95),
            ("ema", 0.0, 0.9999999, 0.999),
            ("label_smoothing", 0.0, 0.9999999, 0.1),
            ("z_loss", 0.0, 1.0, 1e-4),
            ("weight_decay", 0.0, 1e3, 0.1),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise FlopwiseError(
                    f"{name} of a training cannot be {value}",
                    why=f"it lies between {least:g} and {most:g}",
                    hint=f"--{name.replace('_', '-')} {usual:g}",
                )
        floor = self.min_learning_rate
        if floor is not None and not 0 <= floor <= self.learning_rate:
            raise FlopwiseError(
                f"the lowest learning rate cannot be {floor:g}",
                why=f"the highest is {self.learning_rate:g}",
                hint=f"--min-learning-rate {self.learning_rate / 10:g}",
            )
        if floor is not None and self.schedule == "constant":
            raise FlopwiseError(
                "a constant learning rate has no lowest one",
                why=f"it stays at {self.learning_rate:g}",
                hint="--schedule cosine, or without --min-learning-rate",
            )
        if self.clip_norm is not None and not 0 < self.clip_norm < float("inf"):
            raise FlopwiseError(f"gradients cannot be clipped to a norm of {self.clip_norm}", hint="--clip 1.0")
        if not 0 < self.dpo_beta < float("inf"):
            raise FlopwiseError(f"beta of DPO cannot be {self.dpo_beta:g}", why="it is above 0", hint="--beta 0.1")
        if not 0 <= self.dpo_label_smoothing < 0.5:
            raise FlopwiseError(
                f"a share of {self.dpo_label_smoothing:g} of the preferences cannot be the wrong way round",
                why="it is from 0 to less than a half",
                hint="--dpo-label-smoothing 0.1",
            )
        if self.task == "dpo" and (self.label_smoothing or self.z_loss):
            raise FlopwiseError(
                "a preference's loss has no smoothing over answers, and no z-loss",
                why="it compares two answers as they are",
                hint="--dpo-label-smoothing, or without --label-smoothing and --z-loss",
            )
        if self.warmup_steps < 0:
            raise FlopwiseError(f"a warm-up cannot have {self.warmup_steps:,} steps", hint="--warmup 10")
        if not 0 <= self.seed < 2**63:
            raise FlopwiseError(f"a seed is a whole number from 0 to 2^63, got {self.seed}", hint="--seed 0")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: up in a line over the warm-up, then along the schedule."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        if self.schedule == "inverse-sqrt":
            scale = self.warmup_steps or TIMESCALE_STEPS
            share = sqrt(scale / (step + scale - self.warmup_steps))
            return self.learning_rate * max(self.floor_share, share)
        return self.learning_rate * (self.floor_share + (1 - self.floor_share) * self._share_at(step))

    @property
    def floor_share(self) -> float:
        """Of the highest rate, what the schedule ends at, or never falls below."""
        if self.min_learning_rate:
            return self.min_learning_rate / self.learning_rate
        return COSINE_FLOOR if self.schedule == "cosine" and self.min_learning_rate is None else 0.0

    def _share_at(self, step: int) -> float:
        """What is left of the way down to the floor, in a schedule that ends with the training."""
        begins = self.warmup_steps
        if self.schedule == "wsd":
            begins = max(begins, self.steps - round(self.decay_share * self.steps))
        done = min(1.0, max(0.0, (step - begins) / max(1, self.steps - begins)))
        if self.schedule == "cosine":
            return 0.5 * (1 + cos(pi * done))
        return 1.0 - (sqrt(done) if self.schedule == "wsd" and self.decay_shape == "sqrt" else done)
