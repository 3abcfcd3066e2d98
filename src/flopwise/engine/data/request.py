"""`DataRequest`: which data, cut into tokens how."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.setup.training import is_number

Padding = Literal["length", "longest"]
PADDINGS: tuple[Padding, ...] = get_args(Padding)

TrainOn = Literal["answers", "all"]
TokenNumbers = Literal["uint16", "uint32", "int32"]
"""How files of token identifiers hold them."""

Tell = Callable[[str, int, int], None]
"""Is told what is being done (`read`, `tokenize`), how many bytes of it are, and of how many."""


USUAL_TEXT = "text"
"""The column that is looked for where nobody names one."""
USUAL_COLUMNS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence_A", "sentence_B"),
    ("sentence",),
)
"""What well-known labelled sets (GLUE, SNLI, PAWS, SICK) call their texts instead, the first that are there."""


def columns_named(text_column: str) -> tuple[str, ...]:
    """The columns that the words name: one, or the two of a pair."""
    return tuple(part.strip() for part in text_column.split(","))


def text_columns(text_column: str, there: Collection[str]) -> tuple[str, ...]:
    """The columns that labelled rows with these have their texts in."""
    if text_column != USUAL_TEXT or USUAL_TEXT in there:
        return (text_column,) if text_column in there else columns_named(text_column)
    return next((names for names in USUAL_COLUMNS if set(names) <= set(there)), (USUAL_TEXT,))


def check_columns_asked(text_column: str, label_column: str) -> None:
    """Refuse words that cannot name the columns of a text, or of a pair, and of its label."""
    names = columns_named(text_column)
    if len(names) > 2 or len({*names}) < len(names) or not all(names):
        raise FlopwiseError(
            f"{shown(text_column)} names no columns of texts",
            why="a sample is one text, or a pair of two different columns",
            hint="--text-column premise,hypothesis",
        )
    if label_column in names:
        raise FlopwiseError(f"text and label cannot both be the column {shown(label_column)}", hint="name two columns")


def check_mask_share(share: float) -> None:
    """Refuse to hide nothing, or everything."""
    if not is_number(share) or not 0 < share < 1:
        raise FlopwiseError(
            f"a share of {shown(str(share))} of all tokens cannot be hidden",
            why="a number above 0 and below 1 is expected: something is foretold, and something is seen",
            hint="--mask-share 0.15",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRequest:
    """What data a training asks for."""

    sources: tuple[str, ...] = ()
    """Files or folders; none: the embedded default of the task."""
    tokenizer: str | None = None
    """A tokenizer.json or the folder that holds it; None: bytes."""
    sequence_tokens: int
    vocab: int
    """Of the model: identifiers are below it."""
    token_types: int = 0
    """Of the model: with two or more it knows which text of a pair a token is of."""
    seed: int = 0
    cache: Path | None = None
    """Folder of token caches; None: one in the user's own cache folder."""
    text_column: str = "text"
    """Of pairs the columns of both, with a comma between; `text` stands for what data sets usually call them too."""
    label_column: str = "label"
    padding: Padding = "length"
    """Of a classifier's samples: to `sequence_tokens`, or to the longest of a batch."""
    train_on: TrainOn = "answers"
    """Of conversations and other rows with answers: what is learned."""
    pairs: bool = False
    """Rows are pairs of answers, of which one is better."""
    tokens: TokenNumbers | None = None
    """The sources hold token identifiers; None: text, or rows."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's classes in the order that its weights have them; none: those of the data, sorted."""
    mask_share: float = 0.15
    """Of a text's tokens, those that are hidden where hidden ones are foretold."""
    whole_words: bool = False
    """The tokens of a word are hidden together."""
    evaluation: tuple[str, ...] = ()
    """Files or folders that are not trained on; none: a share of the sources is held out."""
    evaluation_share: float = 0.05

    def __post_init__(self) -> None:
        if self.sequence_tokens < 1:
            raise FlopwiseError(f"a sequence cannot have {self.sequence_tokens:,} tokens", hint="--seq 512")
        if self.vocab < 1:
            raise FlopwiseError(f"a model cannot know {self.vocab:,} tokens", hint="correct the model's `vocab`")
        if not 0 <= self.seed < 2**63:
            raise FlopwiseError(f"a seed is a whole number from 0 to 2^63, got {shown(self.seed)}", hint="--seed 0")
        if self.padding not in PADDINGS:
            raise unknown_name("padding", str(self.padding), PADDINGS, hint=" | ".join(PADDINGS))
        check_mask_share(self.mask_share)
        if not 0 <= self.evaluation_share < 1:
            raise FlopwiseError(
                f"a share of {self.evaluation_share} cannot be held out",
                why="it is at least 0 and below 1",
                hint="0.05, or name files for the evaluation",
            )
        check_columns_asked(self.text_column, self.label_column)

    def of_any_length(self) -> DataRequest:
        """The same for the key of a cache that serves sequences of every length."""
        return replace(self, sequence_tokens=1, padding="length")

    def cache_folder(self) -> Path:
        """Where token caches lie."""
        if self.cache is not None:
            return self.cache
        # A relative one is to be ignored, says the convention that this variable comes from.
        chosen = os.environ.get("XDG_CACHE_HOME", "")
        if Path(chosen).is_absolute():
            return Path(chosen) / "flopwise" / "tokens"
        try:
            return Path.home() / ".cache" / "flopwise" / "tokens"
        except RuntimeError:
            raise FlopwiseError(
                "there is no folder for the token cache",
                why="this user has no home folder",
                hint="name a folder for the cache, or set XDG_CACHE_HOME",
            ) from None
