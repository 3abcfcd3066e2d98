"""An option that takes one value is given once: of two, the last would win without a word."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class OnceCommand(TyperCommand):
    """A command that refuses an option which is there twice; flags, and options that collect values, may be."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's own context type moves about
        seen = set()
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


def _refuse(option: str) -> None:
    from flopwise.base.errors import FlopwiseError

    raise FlopwiseError(f"{option} is given twice", why="one of its values would be lost", hint=f"keep one {option}")
