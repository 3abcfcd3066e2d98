"""How long the sequences of a batch are, and how they lie in memory.

    packed    behind each other, no row without a token          ■■■■■■■■■■■■■■■■■■■■
    longest   filled up to the longest of a micro-batch          ■■■■■■·· ■■■■■■■■ ■■■■····
    padded    filled up to the length that sequences may have    ■■■■■■······ ■■■■■■■■···· …

Lengths are a distribution: each of a batch's sequences is one of those counted, so that a batch has so many times their
mean of everything that adds up over sequences. Without lengths all sequences are as long as they may be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, get_args

from flopwise.base.errors import FlopwiseError, shown, unknown_name

SequenceLayout = Literal["packed", "longest", "padded"]
SEQUENCE_LAYOUTS: tuple[SequenceLayout, ...] = get_args(SequenceLayout)

MOST_LENGTHS = 128
"""Lengths that are told apart; of more, neighbours are taken for their mean."""
MOST_COUNTED = 2**40
LONGEST_TOKENS = 2**30

SHAPES = 16
"""Sizes that packed chunks of a GPU come in."""
LEAST_GRANULE = 256
"""A step of fewer rows takes no less time, and each further size is a step played task by task and a graph made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Which lengths sequences have, in what proportion, and their layout."""

    counted: tuple[tuple[int, int], ...]
    """(tokens, sequences that have so many), the shortest first, in lowest terms."""
    layout: SequenceLayout = "packed"
    note: str = field(default="", compare=False)
    """What a reader should know of where they come from."""

    def __post_init__(self) -> None:
        lengths = [tokens for tokens, _ in self.counted]
        if not lengths:
            raise FlopwiseError("there are no lengths", why="a distribution has at least one", hint="--lengths mean=24")
        if self.layout not in SEQUENCE_LAYOUTS:
            raise unknown_name("layout", str(self.layout), SEQUENCE_LAYOUTS, hint=" | ".join(SEQUENCE_LAYOUTS))
        odd = [tokens for tokens in lengths if not 1 <= tokens <= LONGEST_TOKENS]
        if odd:
            raise FlopwiseError(
                f"a sequence cannot have {shown(odd[0])} tokens",
                why=f"it has 1 to {LONGEST_TOKENS:,}",
                hint="leave such rows out",
            )
        if lengths != sorted(set(lengths)) or not all(1 <= count <= MOST_COUNTED for _, count in self.counted):
            raise FlopwiseError(
                "lengths are counted once each, the shortest first",
                why=f"got {shown(self.words)}",
                hint="packed:5x2,17",
            )

    @property
    def sequences(self) -> int:
        return sum(count for _, count in self.counted)

    @property
    def tokens(self) -> int:
        """Of all that are counted."""
        return sum(tokens * count for tokens, count in self.counted)

    @property
    def mean(self) -> float:
        return self.tokens / self.sequences

    @property
    def longest(self) -> int:
        return self.counted[-1][0]

    @property
    def words(self) -> str:
        """As files, rows and JSON hold them: `packed:5x2,17,128`."""
        each = (f"{tokens}x{count}" if count > 1 else str(tokens) for tokens, count in self.counted)
        return f"{self.layout}:{','.join(each)}"

    @property
    def brief(self) -> str:
        """For people."""
        span = "" if len(self.counted) == 1 else f" in the mean, {self.longest:,} at most"
        return f"{self.layout}, {self.mean:.4g} tokens{span}"

    def batch_tokens(self, sequences: int) -> int:
        """That a batch of so many sequences has in the mean."""
        return round(sequences * self.tokens / self.sequences)

    def width(self, sequence_tokens: int, together: int) -> int:
        """To how many tokens each of `together` sequences is filled up, in the mean; packed ones have room for it."""
        if self.layout == "longest":
            return math.ceil(self.expected_longest(together))
        return sequence_tokens if self.layout == "padded" else self.longest

    def expected_longest(self, sequences: int) -> float:
        """The mean of the longest of so many sequences, which are drawn one by one."""
        found = below = 0.0
        seen = 0
        for tokens, count in self.counted:
            seen += count
            up_to = (seen / self.sequences) ** sequences
            found += tokens * (up_to - below)
            below = up_to
        return found

    def cut(self, most: int) -> Lengths:
        """The same where longer sequences lose what is beyond `most` tokens."""
        if self.longest <= most:
            return self
        beyond = sum(count for tokens, count in self.counted if tokens > most)
        told = f"{100 * beyond / self.sequences:.2g} % of the sequences are longer than {most:,} tokens and are cut"
        shorter = Counter[int]()
        for tokens, count in self.counted:
            shorter[min(tokens, most)] += count
        note = "; ".join(words for words in (self.note, told) if words)
        return replace(count_lengths(shorter, self.layout), note=note)

    def rows(self, sequences: int, *, chunks: int, room: int, granule: int) -> float:
        """Rows of a packed chunk of so many sequences, in the mean, when it has as many as the fullest of `chunks`.

        Rows are a multiple of `granule`, and `room` at most. The sum of many lengths is taken as normal.
        """
        mean = sequences * self.mean
        if granule == 1:
            return min(mean, room)
        squares = sum(count * tokens**2 for tokens, count in self.counted) / self.sequences
        spread = math.sqrt(max(0.0, sequences * (squares - self.mean**2)))
        # The mean of a number rounded up is the sum over its steps of how likely it is to be beyond each.
        beyond = (1.0 - _normal(step * granule - mean, spread) ** chunks for step in range(-(-room // granule)))
        return min(granule * sum(beyond), room)


def _normal(above: float, spread: float) -> float:
    """How likely a normal number is no more than so much above its mean."""
    if spread == 0.0:
        return float(above >= 0.0)
    return 0.5 * (1.0 + math.erf(above / (spread * math.sqrt(2.0))))


def granule_of(rows: int) -> int:
    """What the rows of a packed chunk on a GPU are a multiple of: a few sizes serve all batches."""
    return -(-rows // (SHAPES * LEAST_GRANULE)) * LEAST_GRANULE


def count_lengths(lengths: Iterable[int] | Counter[int], layout: SequenceLayout = "packed") -> Lengths:
    """The distribution of some lengths."""
    counted = lengths if isinstance(lengths, Counter) else Counter(lengths)
    pairs = _told_apart(sorted(counted.items()))
    common = math.gcd(*(count for _, count in pairs)) or 1
    return Lengths(counted=tuple((tokens, count // common) for tokens, count in pairs), layout=layout)


def _told_apart(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """No more lengths than are told apart: neighbours with about as many sequences each are one, the longest stays."""
    if len(pairs) <= MOST_LENGTHS:
        return pairs
    total = sum(count for _, count in pairs[:-1])
    groups: dict[int, list[tuple[int, int]]] = {}
    seen = 0
    for tokens, count in pairs[:-1]:
        groups.setdefault(seen * (MOST_LENGTHS - 1) // total, []).append((tokens, count))
        seen += count
    found = Counter[int]()
    for group in groups.values():
        sequences = sum(count for _, count in group)
        found[round(sum(tokens * count for tokens, count in group) / sequences)] += sequences
    found[pairs[-1][0]] += pairs[-1][1]
    return sorted(found.items())


@lru_cache(maxsize=256)
def parse_lengths(words: str) -> Lengths:
    """What `Lengths.words` says: a layout, and lengths with how many have them."""
    layout, colon, rest = words.partition(":")
    try:
        pairs = [(int(tokens), int(count or 1)) for tokens, _, count in (one.partition("x") for one in rest.split(","))]
    except ValueError:
        pairs = []
    if not colon or not pairs:
        raise FlopwiseError(
            f"{shown(words)} are no lengths", why="a layout and lengths are expected", hint="packed:5x2,17,128"
        )
    return Lengths(counted=tuple(pairs), layout=layout)  # type: ignore[arg-type] # Lengths itself refuses others
