"""From a request to open token caches, for both kinds of data."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data import embedded
from flopwise.engine.data.cache import Facts, Ingredients, TokenCache, Writer, open_cache
from flopwise.engine.data.order import Order
from flopwise.engine.data.records import Passage, TextRecord, columns_of_texts, passages, samples
from flopwise.engine.data.request import USUAL_TEXT, DataRequest, Tell
from flopwise.engine.data.sources import ReadingProgress, find_sources, survey
from flopwise.engine.data.token_files import check_indexed, write_megatron, write_tokens
from flopwise.engine.data.tokenizer import Tokenizer, Tokens, token_type
from flopwise.engine.data.used import Used

GROUP_CHARACTERS = 4 * 2**20
GROUP_TEXTS = 4096
CacheKind = Literal["language", "documents", "pieces", "classification", "examples", "pairs"]
"""A tokenizer gets so much at once: enough for all cores, little enough for memory."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A token cache with where it came from."""

    cache: TokenCache
    named: tuple[str, ...]
    files: int
    size_bytes: int
    notes: tuple[str, ...]
    times: tuple[float, ...] = ()
    """Of each file, how often an epoch goes through it; empty: once."""

    def repeat(self, chosen: NDArray[np.int64], begins: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Of what begins at so many tokens or examples, each as often as its file is seen; a part by chance."""
        if all(times == 1 for times in self.times):
            return chosen
        files = np.searchsorted(np.cumsum(self.cache.facts["of_files"]), begins[chosen], side="right")
        found = []
        for file, times in enumerate(self.times):
            here = chosen[files == file]
            whole, part = int(times), round((times - int(times)) * here.size)
            mixed = here[Order(here.size, seed).at(0, here.size)] if here.size else here
            found += [np.repeat(here, whole), mixed[:part]]
        return np.concatenate(found)


def open_text(
    request: DataRequest, named: tuple[str, ...], tokenizer: Tokenizer, tell: Tell | None, *, documents: bool = False
) -> Opened:
    """Documents one after the other, each with the end of a text behind it.

    `documents`: without any mark instead, and `bounds` says where each begins and the last one ends.
    """
    if named:
        sources, notes = find_sources(named, labelled=False, tokens=request.tokens is not None)
    else:
        sources, notes = embedded.text_sources(), ()
    indexed = check_indexed(sources)
    if indexed and documents:
        raise FlopwiseError(
            f"nothing can be hidden of {', '.join(named[:3])}",
            why="it holds token identifiers, and which of them are no text is not known",
            hint="the text itself, or rows with a text",
        )
    entries = survey(sources, tell, request.cache_folder())
    size = sum(entry.size_bytes for entry in entries)

    def build(writer: Writer) -> Facts:
        progress = ReadingProgress(tell, "tokenize", size)
        if indexed:
            return write_megatron(writer, tokenizer, entries, progress)
        if request.tokens is not None:
            return write_tokens(writer, tokenizer, entries, request.tokens, progress)
        found = (
            (number, passage)
            for number, entry in enumerate(entries)
            for passage in passages(entry, request.text_column, progress)
        )
        return (_write_documents if documents else write_text)(writer, tokenizer, found, len(entries))

    # Documents follow each other whole: one cache serves sequences of every length.
    key = request.of_any_length()
    kind: CacheKind = "documents" if documents else "language"
    ingredients = ingredients_of(kind, key, tokenizer, [entry.ingredient() for entry in entries])
    if request.tokens is not None:
        ingredients["tokens"] = request.tokens
    cache, damage = open_cache(request.cache_folder(), ingredients, build)
    return Opened(
        cache,
        named or (embedded.NAME,),
        len(entries),
        size,
        (*notes, *damage),
        tuple(entry.source.times for entry in entries),
    )


def open_samples(request: DataRequest, named: tuple[str, ...], tokenizer: Tokenizer, tell: Tell | None) -> Opened:
    """Samples one after the other: `bounds` says where each begins and the last one ends, `labels` which label of the
    facts each has.
    """
    if not named:
        return _open_embedded_samples(request, tokenizer, tell)
    sources, notes = find_sources(named, labelled=True)
    entries = survey(sources, tell, request.cache_folder())
    size = sum(entry.size_bytes for entry in entries)
    columns = columns_of_texts(sources, request.text_column)

    def build(writer: Writer) -> Facts:
        progress = ReadingProgress(tell, "tokenize", size)
        found = (sample for entry in entries for sample in samples(entry, columns, request.label_column, progress))
        return _write_samples(writer, tokenizer, found, request.sequence_tokens, columns)

    ingredients = ingredients_of("classification", request, tokenizer, [entry.ingredient() for entry in entries])
    ingredients["text_columns"] = list(columns)
    cache, damage = open_cache(request.cache_folder(), ingredients, build)
    return Opened(cache, named, len(entries), size, (*notes, *damage))


def _open_embedded_samples(request: DataRequest, tokenizer: Tokenizer, tell: Tell | None) -> Opened:
    found = embedded.snippets()
    digest = hashlib.sha256()
    for sample in found:
        digest.update(f"{sample.label}\0{sample.text}\0".encode())
    size = sum(len(sample.text.encode()) for sample in found)

    def build(writer: Writer) -> Facts:
        facts = _write_samples(writer, tokenizer, found, request.sequence_tokens, (USUAL_TEXT,))
        ReadingProgress(tell, "tokenize", size).add(size)
        return facts

    content = [{"name": "embedded", "bytes": size, "sha256": digest.hexdigest()}]
    ingredients = ingredients_of("classification", request, tokenizer, content)
    ingredients["text_columns"] = [USUAL_TEXT]
    cache, notes = open_cache(request.cache_folder(), ingredients, build)
    files = len({sample.place.rpartition(":")[0] for sample in found})
    return Opened(cache, (embedded.NAME,), files, size, notes)


def ingredients_of(
    kind: CacheKind,
    request: DataRequest,
    tokenizer: Tokenizer,
    content: list[dict[str, object]],
) -> Ingredients:
    """Everything that makes the cache. Not the seed, which orders what is in it, nor where the files lie."""
    return {
        "kind": kind,
        "sources": content,
        "tokenizer": tokenizer.ingredients(),
        "sequence_tokens": request.sequence_tokens,
        "padding": request.padding,
        "text_column": request.text_column,
        "label_column": request.label_column,
    }


def _text_groups(found: Iterable[tuple[int, Passage]]) -> Iterator[list[tuple[int, Passage]]]:
    group: list[tuple[int, Passage]] = []
    characters = 0
    for number, passage in found:
        group.append((number, passage))
        characters += len(passage.text)
        if characters >= GROUP_CHARACTERS or len(group) >= GROUP_TEXTS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def write_text(writer: Writer, tokenizer: Tokenizer, found: Iterable[tuple[int, Passage]], files: int) -> Facts:
    """Documents of so many files as one array of tokens."""
    kind = token_type(tokenizer.size)
    begin = np.array(tokenizer.begin, dtype=kind)
    end = np.array([] if tokenizer.end is None else [tokenizer.end], dtype=kind)
    used = Used(tokenizer.size)
    documents = 0
    of_files = [0] * files
    starts = True
    writer.begin("tokens", kind)
    for group in _text_groups(found):
        texts = tokenizer.documents([passage.text for _, passage in group])
        for (number, passage), tokens in zip(group, texts, strict=True):
            for piece in (*([begin] if starts else []), tokens, *([end] if passage.last else [])):
                writer.append(piece)
                used.add(piece)
                of_files[number] += piece.size
            starts = passage.last
            documents += passage.last
    return {"documents": documents, "vocabulary_used": used.count, "of_files": of_files}


def _write_documents(writer: Writer, tokenizer: Tokenizer, found: Iterable[tuple[int, Passage]], files: int) -> Facts:
    used = Used(tokenizer.size)
    bounds = [0]
    size = 0
    of_files = [0] * files
    writer.begin("tokens", token_type(tokenizer.size))
    for group in _text_groups(found):
        texts = tokenizer.documents([passage.text for _, passage in group])
        for (number, passage), tokens in zip(group, texts, strict=True):
            writer.append(tokens)
            used.add(tokens)
            of_files[number] += tokens.size
            size += tokens.size
            if passage.last:
                bounds.append(size)
    writer.begin("bounds", np.int64)
    writer.append(np.array(bounds, dtype=np.int64))
    return {"documents": len(bounds) - 1, "vocabulary_used": used.count, "of_files": of_files}


def _sample_groups(found: Iterable[TextRecord]) -> Iterator[list[TextRecord]]:
    group: list[TextRecord] = []
    for sample in found:
        group.append(sample)
        if len(group) >= GROUP_TEXTS:
            yield group
            group = []
    if group:
        yield group


def _encode_samples(
    tokenizer: Tokenizer, group: list[TextRecord], most: int
) -> Iterator[tuple[Tokens, NDArray[np.uint8]]]:
    """Each sample's tokens and their types: the second text of a pair has its own."""
    pairs = [(sample.text, sample.second) for sample in group if sample.second is not None]
    if len(pairs) == len(group):
        yield from tokenizer.pairs(pairs, most)
        return
    for tokens in tokenizer.samples([sample.text for sample in group], most):
        yield tokens, np.zeros(tokens.size, dtype=np.uint8)


def _write_samples(
    writer: Writer, tokenizer: Tokenizer, found: Iterable[TextRecord], most: int, columns: tuple[str, ...]
) -> Facts:
    kind = token_type(tokenizer.size)
    used = Used(tokenizer.size)
    bounds = [0]
    labels: list[str] = []
    first_places: dict[str, str] = {}
    blank: list[str] = []
    all_types: list[NDArray[np.uint8]] = []
    writer.begin("tokens", kind)
    for group in _sample_groups(found):
        encoded = _encode_samples(tokenizer, group, most)
        for sample, (tokens, types) in zip(group, encoded, strict=True):
            if sample.is_blank or not tokens.size:
                blank.append(sample.place)
                continue
            writer.append(tokens)
            all_types.append(types)
            used.add(tokens)
            bounds.append(bounds[-1] + tokens.size)
            labels.append(sample.label)
            first_places.setdefault(sample.label, sample.place)
    if len(columns) > 1:
        writer.begin("types", np.uint8)
        for types in all_types:
            writer.append(types)
    names = sorted(first_places)
    number = {label: place for place, label in enumerate(names)}
    writer.begin("bounds", np.int64)
    writer.append(np.array(bounds, dtype=np.int64))
    writer.begin("labels", np.int32)
    writer.append(np.array([number[label] for label in labels], dtype=np.int32))
    counts = Counter(labels)
    return {
        "labels": names,
        "samples_per_label": [counts[label] for label in names],
        "first_places": [first_places[label] for label in names],
        "blank": len(blank),
        "first_blank": blank[0] if blank else None,
        "text_columns": list(columns),
        "vocabulary_used": used.count,
    }


def describe_data(request: DataRequest, opened: Opened, tokenizer: Tokenizer) -> dict[str, Any]:
    """What both kinds of data say of themselves."""
    return {
        "sources": list(opened.named),
        "files": opened.files,
        "bytes": opened.size_bytes,
        "tokenizer": tokenizer.name,
        "tokenizer_tokens": tokenizer.size,
        "vocabulary_used": opened.cache.facts["vocabulary_used"],
        "tokens": int(opened.cache.arrays["tokens"].size),
        "sequence_tokens": request.sequence_tokens,
        "seed": request.seed,
        "cache": opened.cache.path.name,
    }


def fingerprint(request: DataRequest, training: Opened, evaluation: Opened | None, *more: object) -> str:
    """A digest of what a training sees but for the order: equal tokens, wherever they lie, whoever tokenized them."""
    held_out = evaluation.cache.checksum if evaluation is not None else request.evaluation_share
    parts: tuple[object, ...] = (training.cache.checksum, held_out, request.sequence_tokens, *more)
    if any(times != 1 for times in training.times):
        parts = (*parts, training.times)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def no_text(named: tuple[str, ...]) -> FlopwiseError:
    """For data that is there but blank."""
    return FlopwiseError(
        f"there is no text in {', '.join(named[:3])}{', …' if len(named) > 3 else ''}",
        why="every text of it is blank",
        hint="name files with text in them",
    )
