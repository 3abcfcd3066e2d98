"""`Plan`: everything that a step on one device needs to be told, and what it is expected to take.

The words. A *chunk* is the tokens that pass through a layer at once: several sequences, one, or a part of one. A
*round* is a forward and a backward over its chunks, all of them through one layer before the next; a *step* is its
rounds and the update. State *stays* on the device, and then has no copy on the host, or *passes* through slots on its
way from the host and back. What a layer keeps of a chunk for its backward stays on the device or leaves for the host,
at a save level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.shown import Shown
from flopwise.base.units import show_bytes, show_seconds, show_share, significant
from flopwise.records.outcome import WRITTEN_BY, Interval, Outcome, check_expected, check_finite
from flopwise.setup.written import WrittenSetup
from flopwise.work.formats import parse_formats
from flopwise.work.lengths import Lengths, parse_lengths
from flopwise.work.op import Convention, SaveLevel
from flopwise.work.optimizers import Optimizer
from flopwise.work.parameters import End, Place
from flopwise.work.work import Recompute

OWN_RULE = "flopwise"
"""The name of plans that flopwise's own search has found."""

MOST_PAIRS = 2**16
"""(layer, chunk) of a round, head chunks and rounds that a plan may have; searched plans have a tenth of it."""
MOST_LOOKS = 2**21
"""(layer, chunk) times chunks of a sequence: each chunk looks at all before it."""
MOST_PASSING = 2**14
SPARE_SLOTS = 64
"""Slots beyond one for each (layer, chunk) that a plan may have without being called a mistake."""

LEVELS: dict[str, SaveLevel] = {
    "full": SaveLevel.EVERYTHING,
    "attention": SaveLevel.ATTENTION,
    "context": SaveLevel.CONTEXT,
    "input": SaveLevel.INPUT,
}
"""Save levels by the names that plans give them, from the most bytes to the fewest."""

LETTERS: dict[str, str] = {name[0]: name for name in LEVELS}
"""`f`, `a`, `c`, `i`: one letter a (layer, chunk) in a plan's `saves`; small ones leave, capital ones stay."""

NO_BACKWARD = "-"
"""The letter of a (layer, chunk) that keeps nothing: nothing of the layer or before it is trained."""

POLICY: dict[str, Recompute] = {"full": "pointwise", "attention": "attention", "context": "context", "input": "input"}
"""What is made again in backward at each level, as `Work.recomputed` calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Residency:
    """Where one kind of state (weights, gradients, optimizer state) is."""

    blocks: int
    """Blocks that stay on the device, spread evenly over the layers."""
    passing: int = 0
    """Slots, each for one block, through which the other blocks pass."""
    ends: tuple[End, ...] = ()
    """Embedding and head, those of them that stay; the others pass through a slot of their size."""

    def __post_init__(self) -> None:
        if self.blocks < 0 or not 0 <= self.passing <= MOST_PASSING:
            raise FlopwiseError(
                f"a plan cannot keep {self.blocks:,} blocks and pass others through {self.passing:,} slots",
                hint=WRITTEN_BY,
            )
        if len(set(self.ends)) != len(self.ends):
            raise FlopwiseError(f"a plan names {shown(list(self.ends))} as ends that stay", hint=WRITTEN_BY)

    def staying(self, layers: int) -> frozenset[int]:
        """The layers whose block stays: as evenly spread as can be, so that the link is used evenly too.

        The lowest of them before all others: its update is a step's last work, which hides no copy.
        """
        return frozenset(layers - 1 - layer for layer in spread(self.blocks, layers))

    @property
    def on_device(self) -> int:
        """Blocks that the device has room for."""
        return self.blocks + self.passing


def spread(count: int, places: int) -> list[int]:
    """`count` of `places` places, evenly spread: 2 of 4 are 0 and 2."""
    return [index for index in range(places) if (index + 1) * count // places > index * count // places]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(WrittenSetup):
    """One device, two memory caps, and the set-up that keeps it busy. `plan.toml` holds it beside the model."""

    hardware: str
    sequence_tokens: int
    precision: str
    optimizer: Optimizer = "adamw"
    device_memory_bytes: int
    """The cap on device memory that it was made for."""
    host_memory_bytes: int
    chunk_tokens: int
    """A multiple of the sequence, or at most as long; the last chunk of a sequence may be shorter."""
    chunks_per_round: int
    rounds_per_step: int
    head_chunk_tokens: int
    """Tokens whose logits exist at once."""
    attention: Literal["sequence", "chunk"]
    """Whether attention runs over a whole sequence at once or over each chunk's queries in turn."""
    weights: Residency
    gradients: Residency
    optimizer_state: Residency
    activation_slots: int
    """Room on the device for so many (layer, chunk) at level `full`: those at work, on the way, and those that stay."""
    saves: tuple[str, ...]
    """For each layer a letter a chunk: f(ull), a(ttention), c(ontext), i(nput); capital: stays on the device."""
    update_place: Place = "device"
    update_when: Literal["backward", "end"] = "backward"
    """Right after a layer's last backward, or when all gradients are there, as clipping by their norm needs it."""
    fetch: Literal["by need", "at once"] = "by need"
    """Which of the loads that could begin goes first: the one that is needed first, or the one that could first."""
    host_copies: bool = False
    """Whether the host keeps a copy of what stays on the device too, as the rule `dataflow` does."""
    replay: bool = False
    """Whether a step is captured once and replayed, so that the host hands over one graph instead of every kernel."""
    rule: str = OWN_RULE
    expected: Outcome | None = None

    def __post_init__(self) -> None:
        check_expected(self.expected)
        if self.replay and self.update_place == "host":
            raise FlopwiseError(
                "a plan cannot replay steps that update on the host",
                why="what is replayed is the device's work alone",
                hint=WRITTEN_BY,
            )
        for name in ("sequence_tokens", "chunk_tokens", "chunks_per_round", "rounds_per_step", "head_chunk_tokens"):
            if getattr(self, name) < 1:
                raise FlopwiseError(f"{name} of a plan must be at least 1, got {getattr(self, name)}", hint=WRITTEN_BY)
        if self.chunk_tokens > self.sequence_tokens and self.chunk_tokens % self.sequence_tokens:
            raise FlopwiseError(
                f"a chunk of {self.chunk_tokens:,} tokens holds no whole sequences of {self.sequence_tokens:,}",
                why="a chunk is whole sequences, or a part of one",
                hint=WRITTEN_BY,
            )
        if self.chunks_per_round % self.chunks_per_sequence:
            raise FlopwiseError(
                f"a round of {self.chunks_per_round} chunks ends within a sequence",
                why=f"a sequence is {self.chunks_per_sequence} chunks of {self.chunk_tokens:,} tokens",
                hint=WRITTEN_BY,
            )
        if self.lengths is not None:
            self._check_lengths(parse_lengths(self.lengths))
        self._check_sizes()
        known = "".join((*LETTERS, NO_BACKWARD))
        wrong = [row for row in self.saves if len(row) != self.chunks_per_round or row.lower().strip(known)]
        if not self.saves or wrong:
            raise FlopwiseError(
                f"`saves` of a plan cannot hold {shown(wrong[0] if wrong else [])}",
                why=f"it has for each layer one of {', '.join(LETTERS)} a chunk, of which there are"
                f" {self.chunks_per_round}",
                hint=WRITTEN_BY,
            )
        for kind in ("weights", "gradients", "optimizer_state"):
            if getattr(self, kind).blocks > len(self.saves):
                raise FlopwiseError(f"more blocks of {kind} stay than the plan has layers", hint=WRITTEN_BY)
        parse_formats(self.precision)

    def _check_lengths(self, lengths: Lengths) -> None:
        """Refuse lengths that sequences cannot have, and padding, which nothing here computes."""
        if lengths.layout != "packed" or lengths.longest > self.sequence_tokens:
            raise FlopwiseError(
                f"a plan for sequences of {self.sequence_tokens:,} tokens cannot have the lengths {lengths.brief}",
                why="one device runs sequences packed, none longer than the plan's",
                hint=WRITTEN_BY,
            )

    def _check_sizes(self) -> None:
        """Refuse caps that no machine has, and more tasks than a plan can mean."""
        if self.device_memory_bytes < 1 or self.host_memory_bytes < 0:
            raise FlopwiseError(
                f"a plan for {self.device_memory_bytes:,} B of device and {self.host_memory_bytes:,} B of host memory",
                why="no machine has so little",
                hint=WRITTEN_BY,
            )
        pairs = self.layers * self.chunks_per_round
        looks = pairs * self.chunks_per_sequence
        if not 1 <= self.activation_slots <= pairs + SPARE_SLOTS or pairs > MOST_PAIRS or looks > MOST_LOOKS:
            raise FlopwiseError(
                f"a plan cannot have {self.activation_slots:,} slots for {pairs:,} (layer, chunk)",
                why=f"one slot for each is the most that is of use, and {MOST_PAIRS:,} the most that is planned",
                hint=WRITTEN_BY,
            )
        heads = self.tokens_per_round // self.head_chunk_tokens
        if heads > MOST_PAIRS or self.rounds_per_step > MOST_PAIRS:
            raise FlopwiseError(
                f"a plan cannot have {heads:,} head chunks in each of {self.rounds_per_step:,} rounds",
                why=f"{MOST_PAIRS:,} of either are the most that is planned",
                hint=WRITTEN_BY,
            )

    @property
    def devices(self) -> int:
        return 1

    @property
    def batch_sequences(self) -> int:
        return self.rounds_per_step * self.sequences_per_round

    @property
    def micro_batch_sequences(self) -> int:
        return self.sequences_per_round

    @property
    def recompute(self) -> str:
        """`none`, or how many (layer, chunk) are kept at which level: `saves 24 full, 8 input`."""
        return save_words(self.saves)

    @property
    def layers(self) -> int:
        return len(self.saves)

    @property
    def chunks_per_sequence(self) -> int:
        """1 where a chunk holds whole sequences."""
        return -(-self.sequence_tokens // self.chunk_tokens)

    @property
    def sequences_per_round(self) -> int:
        whole = max(1, self.chunk_tokens // self.sequence_tokens)
        return self.chunks_per_round // self.chunks_per_sequence * whole

    @property
    def tokens_per_round(self) -> int:
        return self.sequences_per_round * self.sequence_tokens

    @property
    def tokens_per_step(self) -> int:
        """For which there is room."""
        return self.rounds_per_step * self.tokens_per_round

    @property
    def packed(self) -> Lengths | None:
        """The lengths of sequences that chunks hold without padding: of whole ones, not of parts."""
        return None if self.lengths is None or self.chunks_per_sequence > 1 else parse_lengths(self.lengths)

    @property
    def batch_tokens(self) -> int:
        """Of a step, padding left out."""
        whole = self.tokens_per_step
        return whole if self.lengths is None else parse_lengths(self.lengths).batch_tokens(self.batch_sequences)

    def tokens_of(self, chunk: int) -> int:
        """Tokens of a chunk; the last one of a sequence may be shorter than the others."""
        if self.chunks_per_sequence == 1:
            return max(self.chunk_tokens, self.sequence_tokens)
        before = chunk % self.chunks_per_sequence * self.chunk_tokens
        return min(self.chunk_tokens, self.sequence_tokens - before)

    def saved(self, place: Place) -> dict[str, int]:
        """How many (layer, chunk) are kept at each level in that place."""
        letters = Counter("".join(self.saves))
        return {name: letters[letter.upper() if place == "device" else letter] for letter, name in LETTERS.items()}


def save_words(saves: Iterable[str]) -> str:
    """What backward makes again, by what a plan saves."""
    letters = Counter("".join(saves).lower().replace(NO_BACKWARD, ""))
    if set(letters) <= {"f"}:
        return "none"
    return f"saves {', '.join(f'{letters[letter]} {level}' for letter, level in LETTERS.items() if letters[letter])}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast(Outcome):
    """A plan played against a hardware description."""

    step_s: float
    tokens_per_s: float
    mfu: float
    hfu: float
    model_flops: int
    hardware_flops: int
    convention: Convention
    peak_flops: float
    peak_format: str
    bound: str
    device_bytes: dict[str, int]
    """Room by owner: it is taken at the start and kept."""
    host_bytes: dict[str, int]
    ceiling_share: float
    """Time of the model's own matrix products and attention at the kernels' rates, by the step's time."""
    compute_s: float
    """Busy time of the compute stream, recompute and update included."""
    recompute_s: float
    update_s: float
    """The update's kernels on the device, and what the step waits for its state and for the host's."""
    exposed_copy_s: float
    idle: dict[str, float]
    """Seconds that the device waits within a step, by what it waits for; they add up with `compute_s` to the step."""
    copy_in_bytes: int
    copy_out_bytes: int
    """Over the link in a step."""
    link_share: float
    """Of the step, the time in which the busier direction of the link is in use."""

    def __post_init__(self) -> None:
        check_finite(self)

    @property
    def device_total(self) -> int:
        return sum(self.device_bytes.values())

    @property
    def host_total(self) -> int:
        return sum(self.host_bytes.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Help:
    """What more memory would buy."""

    device_memory_bytes: int
    """The new cap."""
    host_memory_bytes: int
    speed: float
    """Tokens per second over those of the plan."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Planned(Shown):
    """A plan with its forecast, and why it is as it is."""

    model: str
    plan: Plan
    forecast: Forecast
    reasons: dict[str, str]
    """Derived value → why."""
    searched: int = 0
    simulated: int = 0
    helps: tuple[Help, ...] = ()
    interval: Interval | None = None
    notes: tuple[str, ...] = ()

    @property
    def figures(self) -> dict[str, str]:
        plan, found = self.plan, self.forecast
        interval = self.interval.figures() if self.interval else {}
        return {
            "model": f"{self.model} on {plan.hardware}",
            "step": show_seconds(found.step_s),
            **interval,
            "tokens/s": significant(found.tokens_per_s),
            "MFU": f"{show_share(found.mfu)}, HFU {show_share(found.hfu)}",
            "device memory": f"{show_bytes(found.device_total)} of {show_bytes(plan.device_memory_bytes)}",
            "host memory": f"{show_bytes(found.host_total)} of {show_bytes(plan.host_memory_bytes)}",
            "bound by": found.bound,
            "set-up": f"sequence {plan.sequence_tokens:,}, {plan.rounds_per_step:,} rounds of"
            f" {plan.chunks_per_round:,} × {plan.chunk_tokens:,} tokens, {plan.precision}",
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CapCell:
    """One pair of caps of a grid; without a plan where nothing fits."""

    device_memory_bytes: int
    host_memory_bytes: int
    planned: Planned | None = None
    why_not: str = ""
    smallest_device_bytes: int | None = None
    """The least cap with which something fits; None: more device memory alone does not help."""
    hints: tuple[str, ...] = field(default=())
