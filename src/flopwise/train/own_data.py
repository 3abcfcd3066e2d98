"""Data that a caller brings from Python: any object that counts its sequences and makes batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from flopwise.base.errors import FlopwiseError, shown
from flopwise.engine.batch import Batch


@runtime_checkable
class Data(Protocol):
    """What a training asks of data."""

    @property
    def count(self) -> int:
        """Sequences of an epoch."""

    def batch(self, position: int, sequences: int) -> Batch:
        """So many sequences of an endless order from `position` on; the same whenever it is asked."""

    def evaluation(self, sequences: int) -> Iterator[Batch]:
        """What is held out, once, so many sequences at a time; nothing where nothing is."""


class OwnData:
    """A caller's object, checked, with what a run tells of its data."""

    notes: tuple[str, ...] = ()
    end_token: int | None = None
    lengths: None = None
    """Nobody knows before they are there: all as long as may be."""

    def __init__(self, data: Data, sequence_tokens: int) -> None:
        count: object = data.count
        if not isinstance(count, int) or count < 1:
            raise FlopwiseError(
                f"the data has {shown(count)} sequences", why="`count` is how many an epoch has", hint="at least 1"
            )
        self._data, self._tokens = data, sequence_tokens

    @property
    def count(self) -> int:
        return self._data.count

    def describe(self) -> dict[str, Any]:
        """Plain values for the record of a run: the object's own, where it has any."""
        describe = getattr(self._data, "describe", None)
        told = describe() if callable(describe) else {"sources": [type(self._data).__name__]}
        return {**told, "sequences": self.count, "sequence_tokens": self._tokens}

    def batch(self, position: int, sequences: int) -> Batch:
        found = self._check(self._data.batch(position, sequences))
        if found.sequences != sequences:
            raise FlopwiseError(
                f"the data gave {found.sequences:,} sequences", why=f"{sequences:,} were asked for", hint="that many"
            )
        return found

    def evaluation(self, sequences: int) -> Iterator[Batch]:
        return map(self._check, self._data.evaluation(sequences))

    def _check(self, batch: object) -> Batch:
        if not isinstance(batch, Batch) or batch.ids.ndim != 2 or batch.ids.shape[1] > self._tokens:
            what = f"an array of {batch.ids.shape}" if isinstance(batch, Batch) else f"a {type(batch).__name__}"
            raise FlopwiseError(
                "the data gave no batch that can be trained on",
                why=f"it is {what}; a batch is (sequences, at most {self._tokens:,} tokens)",
                hint="flopwise.engine.batch.Batch(ids, labels), two arrays of int32",
            )
        return batch
