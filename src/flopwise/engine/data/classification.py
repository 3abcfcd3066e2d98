"""`ClassificationData`: labelled texts, filled up to one length."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError, shown
from flopwise.engine.batch import Batch
from flopwise.engine.data.cache import TokenCache
from flopwise.engine.data.corpus import Opened, describe_data, fingerprint, no_text, open_samples
from flopwise.engine.data.order import Order
from flopwise.engine.data.request import DataRequest, Tell
from flopwise.engine.data.tokenizer import Tokenizer, load_tokenizer
from flopwise.work.lengths import Lengths, count_lengths


def open_classification_data(request: DataRequest, *, tell: Tell | None = None) -> ClassificationData:
    """Labelled samples, from their cache where there is one.

    `tell` hears of the progress: what is done, bytes so far, and of how many.
    """
    tokenizer = load_tokenizer(request.tokenizer, request.vocab)
    training = open_samples(request, request.sources, tokenizer, tell)
    evaluation = open_samples(request, request.evaluation, tokenizer, tell) if request.evaluation else None
    return ClassificationData(request, tokenizer, training, evaluation)


class ClassificationData:
    """Samples of labelled texts.

    Where no evaluation files are named, a share of every label's samples is held out, chosen by their tokens and the
    seed. Samples of equal tokens are never on both sides.
    """

    def __init__(self, request: DataRequest, tokenizer: Tokenizer, training: Opened, evaluation: Opened | None) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._training = training
        self._evaluation = evaluation
        notes = [*training.notes, *_blank_notes(training)]
        _check_labels(training)
        self.labels, labels_note = _order_labels(tuple(training.cache.facts["labels"]), request.labels)
        """A sample's class is its label's place here."""
        notes += labels_note
        self._classes = _classes(self.labels, training)
        samples = training.cache.arrays["labels"].size
        if evaluation is not None:
            _check_alike(training, evaluation)
            notes += [*evaluation.notes, *_blank_notes(evaluation)]
            self._evaluation_classes = _classes(self.labels, evaluation)
            self._held_out = np.arange(evaluation.cache.arrays["labels"].size)
            self._trained = np.arange(samples)
            notes += _repeated_note(training.cache, evaluation.cache)
        else:
            self._evaluation_classes = self._classes
            self._held_out = _hold_out(training.cache, request.evaluation_share, request.seed)
            self._trained = np.setdiff1d(np.arange(samples), self._held_out)
            if request.evaluation_share:
                notes += self._absent_note()
        self._order = Order(self._trained.size, request.seed)
        self.notes: tuple[str, ...] = tuple(notes)

    def _absent_note(self) -> list[str]:
        held = set(self._training.cache.arrays["labels"][self._held_out].tolist())
        absent = [label for number, label in enumerate(self._training.cache.facts["labels"]) if number not in held]
        if not absent:
            return []
        listed = ", ".join(shown(label) for label in absent[:5]) + (", …" if len(absent) > 5 else "")
        return [f"labels with too few different samples to hold any out: {listed}"]

    @property
    def count(self) -> int:
        """Training samples of an epoch."""
        return self._order.count

    @property
    def end_token(self) -> int | None:
        """What the tokenizer ends a text with."""
        return self._tokenizer.end

    @property
    def evaluation_count(self) -> int:
        """Samples that are held out."""
        return int(self._held_out.size)

    @property
    def lengths(self) -> Lengths | None:
        """Of training samples, padding left out; None: all are as long as may be."""
        lengths = np.diff(self._training.cache.arrays["bounds"])[self._trained]
        if int(lengths.min()) == self._request.sequence_tokens:
            return None
        return count_lengths(lengths.tolist())

    def describe(self) -> dict[str, Any]:
        """Plain values for the record of a run."""
        facts = self._training.cache.facts
        counts = dict(zip(facts["labels"], facts["samples_per_label"], strict=True))
        return {
            "task": "classification",
            **describe_data(self._request, self._training, self._tokenizer),
            "samples": int(self._training.cache.arrays["labels"].size),
            "sequences": self.count,
            "text_columns": list(facts["text_columns"]),
            "labels": list(self.labels),
            "samples_per_label": [counts.get(label, 0) for label in self.labels],
            "padding": self._request.padding,
            "evaluation_sources": list(self._evaluation.named) if self._evaluation is not None else None,
            "evaluation_sequences": self.evaluation_count,
            "fingerprint": fingerprint(
                self._request, self._training, self._evaluation, self.labels, self._request.padding
            ),
        }

    def batch(self, position: int, sequences: int) -> Batch:
        """The samples at so many places of the endless order from `position` on; the same whenever it is asked."""
        chosen = self._trained[self._order.at(position, sequences)]
        return self._pad(self._training.cache, chosen, self._classes[self._training.cache.arrays["labels"][chosen]])

    def evaluation(self, sequences: int) -> Iterator[Batch]:
        """What is held out, once, so many samples at a time."""
        cache = (self._evaluation if self._evaluation is not None else self._training).cache
        for first in range(0, self._held_out.size, sequences):
            chosen = self._held_out[first : first + sequences]
            yield self._pad(cache, chosen, self._evaluation_classes[cache.arrays["labels"][chosen]])

    def _pad(self, cache: TokenCache, chosen: NDArray[np.int64], classes: NDArray[np.int32]) -> Batch:
        bounds = cache.arrays["bounds"]
        firsts, ends = bounds[chosen], bounds[chosen + 1]
        lengths = (ends - firsts).astype(np.int32)
        width = self._request.sequence_tokens if self._request.padding == "length" else int(lengths.max())
        ids = np.full((chosen.size, width), self._tokenizer.pad, dtype=np.int32)
        for row, first, end in zip(ids, firsts.tolist(), ends.tolist(), strict=True):
            row[: end - first] = cache.arrays["tokens"][first:end]
        return Batch(ids, np.array(classes, dtype=np.int32), lengths, types=self._types(cache, chosen, width))

    def _types(self, cache: TokenCache, chosen: NDArray[np.int64], width: int) -> NDArray[np.int32] | None:
        """Which text of a pair each token is of, for a model that is told."""
        if "types" not in cache.arrays or self._request.token_types < 2:
            return None
        bounds, types = cache.arrays["bounds"], np.zeros((chosen.size, width), dtype=np.int32)
        for row, first, end in zip(types, bounds[chosen].tolist(), bounds[chosen + 1].tolist(), strict=True):
            row[: end - first] = cache.arrays["types"][first:end]
        return types


def _blank_notes(opened: Opened) -> list[str]:
    blank = opened.cache.facts["blank"]
    if not blank:
        return []
    return [f"samples without text were left out ({blank:,}, the first at {opened.cache.facts['first_blank']})"]


def _check_alike(training: Opened, evaluation: Opened) -> None:
    """Refuse an evaluation of pairs where the training has single texts, and the other way."""
    ours, theirs = (opened.cache.facts["text_columns"] for opened in (training, evaluation))
    if len(ours) != len(theirs):
        raise FlopwiseError(
            f"the evaluation's texts are in {' and '.join(theirs)}, and the training's in {' and '.join(ours)}",
            why="a classifier reads pairs in both or in none",
            hint="--text-column with the columns that both have",
        )


def _check_labels(training: Opened) -> None:
    facts = training.cache.facts
    if not facts["labels"]:
        raise no_text(training.named)
    if len(facts["labels"]) == 1:
        raise only_label(facts["labels"][0])


def only_label(label: str) -> FlopwiseError:
    """Of data that teaches nothing."""
    return FlopwiseError(
        f"there is only one label, {shown(label)}",
        why="a classifier needs at least two to tell apart",
        hint="check the column of the labels",
    )


def _order_labels(found: tuple[str, ...], known: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """The classes in order: as the weights have them, where there are any that know these labels; and a note."""
    if not known or set(found) <= set(known):
        return known or found, []
    if known == tuple(f"LABEL_{number}" for number in range(len(known))):
        # What a file says where nobody named them.
        numbers = tuple(map(str, range(len(known))))
        if set(found) <= set(numbers):
            return numbers, []
        pairs = ", ".join(f"{shown(label)} is {name}" for label, name in zip(found, known, strict=False))
        return found, [f"the weights name their labels by number: {pairs}"]
    unknown = [label for label in found if label not in known]
    listed = ", ".join(shown(label) for label in known[:8]) + (", …" if len(known) > 8 else "")
    raise FlopwiseError(
        f"the weights do not know the label {shown(unknown[0])}"
        + (f" and {len(unknown) - 1:,} more" * (len(unknown) > 1)),
        why=f"their config.json names {listed}; which class another label is cannot be told",
        hint="give the data those labels, or correct id2label in the config.json",
    )


def _classes(labels: tuple[str, ...], evaluation: Opened) -> NDArray[np.int32]:
    """The class of each label of a set, by its place among `labels`."""
    facts = evaluation.cache.facts
    if not facts["labels"]:
        raise no_text(evaluation.named)
    number = {label: place for place, label in enumerate(labels)}
    unknown = [
        (label, place)
        for label, place in zip(facts["labels"], facts["first_places"], strict=True)
        if label not in number
    ]
    if unknown:
        label, place = unknown[0]
        more = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
        listed = ", ".join(shown(known) for known in labels[:8]) + (", …" if len(labels) > 8 else "")
        raise FlopwiseError(
            f"the evaluation has the label {shown(label)}{more}, which the training never saw",
            why=f"{place}; labels of the training: {listed}",
            hint="correct the label, or add samples of it to the training",
        )
    return np.array([number[label] for label in facts["labels"]], dtype=np.int32)


def _digests(cache: TokenCache, seed: int) -> list[bytes]:
    """One for each sample, equal for equal tokens."""
    salt = seed.to_bytes(8, "little")
    tokens = cache.arrays["tokens"].astype(np.uint32)
    bounds = cache.arrays["bounds"].tolist()
    return [hashlib.sha256(salt + tokens[first:end].tobytes()).digest() for first, end in pairwise(bounds)]


def _hold_out(cache: TokenCache, share: float, seed: int) -> NDArray[np.int64]:
    """A share of every label's samples, at least one, never all; those of equal tokens only together."""
    if not share:
        return np.zeros(0, dtype=np.int64)
    labels = cache.arrays["labels"].tolist()
    groups: dict[bytes, list[int]] = {}
    for sample, digest in enumerate(_digests(cache, seed)):
        groups.setdefault(digest, []).append(sample)
    left = Counter(labels)
    wanted = {label: max(1, round(count * share)) for label, count in left.items()}
    chosen: list[int] = []
    for digest in sorted(groups):
        inside = Counter(labels[sample] for sample in groups[digest])
        if all(wanted[label] > 0 and left[label] > count for label, count in inside.items()):
            chosen += groups[digest]
            left.subtract(inside)
            for label, count in inside.items():
                wanted[label] -= count
    return np.array(sorted(chosen), dtype=np.int64)


def _repeated_note(training: TokenCache, evaluation: TokenCache) -> list[str]:
    known = set(_digests(training, 0))
    repeated = sum(digest in known for digest in _digests(evaluation, 0))
    return [f"{repeated:,} samples of the evaluation are in the training too"] if repeated else []
