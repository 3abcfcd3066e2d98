"""Documents as the forms print them."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.cli.output import schema_json
from flopwise.records.profile import Profile, Verdict
from flopwise.report.document import Block, Document, to_csv, to_markdown, to_page
from flopwise.report.profiles import profiles_document, profiles_record
from flopwise.report.results import results_document
from flopwise.store.results import Result

Judged = Sequence[tuple[Profile, Sequence[Verdict]]]


def printed(document: Document | Block, width: int) -> list[str]:
    """Lines as a terminal gets them."""
    whole = document if isinstance(document, Document) else Document(blocks=[document])
    return [line.rstrip() for text in to_page(whole, width) for line in text.plain.split("\n")]


def shown(document: Document, width: int) -> str:
    return "".join(f"{line}\n" for line in printed(document, width))


def results_markdown(rows: Sequence[Result], columns: Sequence[str] | None = None) -> str:
    return to_markdown(results_document(rows, columns))


def results_json(rows: Sequence[Result]) -> str:
    return schema_json(rows, "result")


def profiles_markdown(judged: Judged) -> str:
    return to_markdown(profiles_document(judged))


def profiles_csv(judged: Judged) -> str:
    return to_csv(profiles_document(judged))


def profiles_json(judged: Judged) -> str:
    return schema_json(profiles_record(judged), "profile")
