"""Options of a command are the fields of a dataclass: typer's parameters come from them, and they come back typed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from flopwise.cli import deepflow, plan, sweep, train
from flopwise.cli.options import Options, takes_options
from flopwise.cli.plan import PlanOptions
from flopwise.cli.predict import PredictOptions
from flopwise.cli.sweep_options import SweepOptions
from flopwise.cli.train_options import TrainOptions


@dataclass(frozen=True, kw_only=True)
class BakeOptions(Options):
    cake: Annotated[str, typer.Argument(help="Which one.")]
    oven_heat: Annotated[int, typer.Option(help="Degrees.")] = 180
    note: Annotated[list[str] | None, typer.Option("--note", "-n")] = None
    dry: Annotated[bool, typer.Option("--dry")] = False


def bake(*words: str) -> BakeOptions:
    taken: list[BakeOptions] = []

    @takes_options
    def command(options: BakeOptions) -> None:
        """Bake."""
        taken.append(options)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(words), standalone_mode=False)
    assert result.exception is None, result.exception
    return taken[0]


def test_a_command_gets_its_options_as_one_object() -> None:
    assert bake("plum") == BakeOptions(given=("cake",), cake="plum")
    given = ("cake", "oven_heat", "note", "dry")
    typed = bake("plum", "--oven-heat", "180", "-n", "a", "-n", "b", "--dry")
    assert typed == BakeOptions(given=given, cake="plum", oven_heat=180, note=["a", "b"], dry=True)
    assert typed.is_given("oven_heat")
    assert not bake("plum").is_given("oven_heat")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (PlanOptions, (*plan.OF_FRAMEWORKS, *plan.OF_ONE_DEVICE)),
        (PredictOptions, (*plan.PLAN_LEAVES_OPEN, *deepflow.APPLYING)),
        (SweepOptions, sweep.RESUME_LEAVES_OPEN),
        (TrainOptions, (*train.RESUME_LEAVES_OPEN, *train.PLAN_SAYS)),
    ],
)
def test_options_that_are_known_by_name_are_there(options: type[Options], names: tuple[str, ...]) -> None:
    assert set(names) <= {field.name for field in fields(options)}
