"""What all commands have in common: an option that takes one value is given once, and no answer is an answer too."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

from flopwise.base.errors import DoesNotFit, FlopwiseError

if TYPE_CHECKING:
    from collections.abc import Sequence


class AsGivenGroup(TyperGroup):
    """Commands, none of whose values typer has pydantic check."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's own context type moves about
        _take_as_given(self.get_params(ctx))
        return super().parse_args(ctx, args)


class _AsGiven:
    """Stands where typer would have pydantic check a value: all our options are words, and words are what is given.

    Importing pydantic and building its validators would be a fifth of the CPU time that `predict` takes.
    """

    @staticmethod
    def coerce(value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401 - whatever typer hands on
        del ctx
        if not (param.multiple or param.nargs == -1):
            return value
        return () if value is None else list(value)


def _take_as_given(parameters: Sequence[object]) -> None:
    for parameter in parameters:
        vars(parameter)["_runtime_param"] = _AsGiven


class OnceCommand(TyperCommand):
    """A command that refuses an option which is there twice; flags, and options that collect values, may be."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - as above
        seen = set()
        _take_as_given(self.get_params(ctx))
        try:
            given = self.make_parser(ctx).parse_args(args=list(args))[2]
        except Exception as error:
            # The parser does not say of which command an option lacks its value, and so there would be no usage.
            if getattr(error, "ctx", ctx) is None:
                vars(error).update(ctx=ctx, cmd=self)
            raise
        for parameter in given:
            collects = getattr(parameter, "multiple", False) or getattr(parameter, "is_flag", False)
            if parameter.param_type_name == "option" and not collects and parameter in seen:
                _refuse(parameter.opts[0])
            seen.add(parameter)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - as above
        try:
            return super().invoke(ctx)
        except DoesNotFit as error:
            # Programs read an object, whatever it says; people read the error stream.
            if str(ctx.params.get("output")).lower() == "json" and os.environ.get("RANK", "0") == "0":
                _print_no_fit(error)
            raise


def _print_no_fit(error: DoesNotFit) -> None:
    from flopwise.cli.output import put, schema_json

    words = {"what": error.what, "why": error.why, "hint": error.hint}
    answer = {"fits": False, "place": error.place, "needed_bytes": error.needed_bytes, "error": words}
    put(schema_json(answer, "does-not-fit"))


def _refuse(option: str) -> None:
    raise FlopwiseError(f"{option} is given twice", why="one of its values would be lost", hint=f"keep one {option}")
