"""`flopwise env`: what this machine is."""

from __future__ import annotations

from typing import Annotated

import typer

from flopwise.cli.options import one_of, told


def env(
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Print what this machine is and which versions are installed: what an issue report should carry."""
    from flopwise.base.files import to_json, with_schema
    from flopwise.profile.measure.environment import environment

    form = one_of(output, ("table", "json"), "--output")
    facts = told(environment)
    if form == "json":
        typer.echo(to_json(with_schema(facts, "environment")))
    else:
        width = max(map(len, facts))
        for key, value in facts.items():
            typer.echo(f"{key.ljust(width)}  {'-' if value is None else value}")
