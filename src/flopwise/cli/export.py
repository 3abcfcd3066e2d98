"""`flopwise export`: a plan for another trainer."""

from __future__ import annotations

from typing import Annotated

import typer

from flopwise.cli.output import say

PlanArgument = Annotated[str, typer.Argument(help="A plan's file, as `flopwise plan … -w plan.toml` writes it.")]
ToOption = Annotated[str, typer.Option("--to", help="torchtitan, accelerate, deepspeed or megatron.")]
WriteOption = Annotated[str, typer.Option("--write", "-w", help="File to write. Default: print it.")]

WITHOUT_COMMENTS = ("deepspeed",)
NOTES = ".notes.txt"
"""Follows the name of a file that cannot hold comments: what was not carried over stands there."""


def export(plan: PlanArgument, to: ToOption, write: WriteOption = "") -> None:
    """A plan for another trainer: its configuration, and what of the plan has no place in it."""
    from pathlib import Path

    from flopwise.base.files import write_whole
    from flopwise.catalog.load import load_plan
    from flopwise.cli.options import check_target
    from flopwise.report.export.by_name import TARGETS, export_plan
    from flopwise.report.export.ledger import BEYOND

    target = to.strip().lower()
    if write:
        example = TARGETS[target].file if target in TARGETS else "train.toml"
        check_target(write, example=example, inputs=(plan,))
    made = export_plan(*load_plan(Path(plan)), target)
    notes = "".join(f"  {name}: {why}\n" for name, why in made.left.items())
    if write:
        write_whole(Path(write), made.text)
        say(f"wrote {write}")
    else:
        typer.echo(made.text, nl=False)
    counts = f"{len(made.carried)} fields carried over, {len(made.left)} not, or not wholly"
    if target not in WITHOUT_COMMENTS:
        say(f"{counts}: the comments say why")
        return
    say(f"{counts}:\n{notes}".rstrip("\n"))
    if write:
        beside = Path(f"{write}{NOTES}")
        write_whole(beside, f"field names of {TARGETS[target].version}\n{BEYOND}\n{counts}:\n{notes}")
        say(f"wrote {beside}")
