"""`flopwise env`: what this machine is."""

from __future__ import annotations

from typing import Annotated

import typer

from flopwise.base.errors import one_of
from flopwise.cli.options import tell_warnings
from flopwise.cli.output import show


def env(
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Print what this machine is and which versions are installed: what an issue report should carry."""
    from flopwise.profile.measure.this_machine import environment
    from flopwise.report.document import Document, Table

    form = one_of(output, ("table", "json"), "--output")
    facts = tell_warnings(environment)
    rows = [(key, "-" if value is None else str(value)) for key, value in facts.items()]
    show(
        Document(blocks=[Table(columns=("", " "), rows=rows, left=("", " "), headed=False)]),
        facts,
        form,
        schema="environment",
    )
