"""What is wrong with a request's data, tokenizer and store, told before torch is imported and a device asked for."""

from __future__ import annotations

import os
from pathlib import Path

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.files import WRITABLE_HINT, entry_kind
from flopwise.catalog.load import is_plan, load_model, load_plan
from flopwise.engine.data.classification import only_label
from flopwise.engine.data.corpus import no_text
from flopwise.engine.data.examples import check_template, kind_of_source, no_example
from flopwise.engine.data.masked import check_mask
from flopwise.engine.data.records import (
    check_columns,
    check_row,
    columns_of_texts,
    first_columns,
    samples,
    table_rows,
)
from flopwise.engine.data.request import check_columns_asked
from flopwise.engine.data.rows import check_pairs, read_pair
from flopwise.engine.data.sources import TOKEN_FORMS, DataSource, check_beginnings, evaluation_of, find_sources, survey
from flopwise.engine.data.tokenizer import load_tokenizer
from flopwise.setup.trained import task_of
from flopwise.setup.training import Task
from flopwise.store.runs import find_run, store_folder
from flopwise.train.origin import check_weights, choose_tokenizer, find_weights
from flopwise.train.request import TrainRequest, check_hiding

ANY_VOCABULARY = 2**31


def check_data(request: TrainRequest) -> None:
    """Refuse files that are not there, that are no text, or that lack a column; and a tokenizer that cannot be read."""
    if request.resume is not None:
        return
    task = request.task or _task_of(request)
    labelled, masked = task == "classification", task == "masked"
    check_hiding(request, task)
    check_columns_asked(request.text_column, request.label_column)
    kinds: dict[str, str] = {}
    if task == "dpo" and not request.data:
        raise FlopwiseError(
            "there are no pairs to compare", why="DPO learns from pairs of answers", hint="--data FOLDER"
        )
    for named in (
        request.data,
        evaluation_of(request.evaluation_data, request.data, tokens=request.data_format is not None),
    ):
        sources, _ = find_sources(named, labelled=labelled, tokens=request.data_format is not None)
        check_beginnings(sources)
        if task == "dpo":
            _check_pairs(sources, request)
            continue
        texts = columns_of_texts(sources, request.text_column) if labelled else (request.text_column,)
        columns = (*texts, request.label_column) if labelled else texts
        for source in sources:
            kind = "text" if labelled or masked else kind_of_source(source, request.text_column)
            if masked and request.task is None:
                _check_unlabelled(source, request)
            if kind == "text":
                check_columns(source, columns)
            kinds.setdefault(kind, str(source.path))
        if labelled and sources and named == request.data:
            _check_labels(sources, request)
    weights = find_weights(request)
    check_weights(weights)
    tokenizer = load_tokenizer(choose_tokenizer(request, weights), ANY_VOCABULARY, masked=masked)
    if masked:
        check_mask(tokenizer, whole_words=request.whole_words)
    for kind, path in kinds.items():
        check_template(kind, tokenizer, path)


def check_store(request: TrainRequest) -> None:
    """Refuse a store that nothing can be written to."""
    store = store_folder(request.store)
    folder = find_run(store, request.resume) if request.resume else store
    there = next(path for path in (folder, *folder.absolute().parents) if entry_kind(path) != "nothing")
    kind = entry_kind(there)
    if kind != "folder" or not os.access(there, os.W_OK | os.X_OK):
        why = "it may not be written to" if kind != "file" else f"{there} is no folder"
        raise FlopwiseError(f"there can be no run in {folder}", why=why, hint=WRITABLE_HINT)


def _check_unlabelled(source: DataSource, request: TrainRequest) -> None:
    """Refuse rows with labels for a model with a masked head, where nobody says which of the two is meant."""
    if source.form not in ("text", *TOKEN_FORMS) and request.label_column in first_columns(source):
        raise FlopwiseError(
            f"{source.path} has labels, and the model foretells hidden tokens",
            why=f"either its column {shown(request.label_column)} is learned, with a new head, or its texts are",
            hint="--task classification, or --task masked",
        )


def _check_labels(sources: tuple[DataSource, ...], request: TrainRequest) -> None:
    """Refuse data without a text, or with one label; mostly the beginning of a file says that there are others."""
    found: set[str] = set()
    texts = columns_of_texts(sources, request.text_column)
    for source in sources:
        for _, row in table_rows(source, None):
            check_row(source.path, 1, row, (*texts, request.label_column))
            if any(str(row[column]).strip() for column in texts):
                found.add(str(row[request.label_column]))
            if len(found) > 1:
                return
    found.clear()
    for entry in survey(sources, None):
        for sample in samples(entry, texts, request.label_column, None):
            if not sample.is_blank:
                found.add(sample.label)
            if len(found) > 1:
                return
    raise only_label(found.pop()) if found else no_text(request.data)


def _task_of(request: TrainRequest) -> Task:
    """What a model is for, as far as that can be told before anything else is."""
    if request.model is None:
        return "language"
    try:
        model = (
            load_plan(Path(request.model))[1] if is_plan(request.model) else load_model(request.model, request.changes)
        )
    except FlopwiseError:
        # What is wrong with it is for those to say who need it.
        return "language"
    return task_of(model)


def _check_pairs(sources: tuple[DataSource, ...], request: TrainRequest) -> None:
    """Refuse data whose rows are no pairs of answers, as far as their first ones tell."""
    for source in sources:
        if source.form in ("text", *TOKEN_FORMS):
            raise FlopwiseError(
                f"{source.path} holds no rows",
                why="DPO compares two answers, and reads them from columns",
                hint="rows of chosen and rejected, as .jsonl, .json, .csv or .parquet",
            )
        try:
            check_pairs(first_columns(source))
        except FlopwiseError as error:
            raise error.within(str(source.path)) from None
        line, row = next(iter(table_rows(source, None)), (0, {"chosen": "", "rejected": ""}))
        check_row(source.path, line, row, ("chosen", "rejected"))
        try:
            read_pair(row)
        except ValueError as error:
            raise no_example(source.path, line, error) from None
        if not isinstance(row["chosen"], str):
            weights = find_weights(request)
            tokenizer = load_tokenizer(choose_tokenizer(request, weights), ANY_VOCABULARY)
            check_template("messages", tokenizer, str(source.path))
