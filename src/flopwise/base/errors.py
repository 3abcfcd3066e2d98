"""One exception for whatever a user can put right: what is wrong, why, and what to try next.

Anything else that is raised is a bug of ours and shows its traceback.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable
from typing import Literal, Self, TypeVar

Word = TypeVar("Word", bound=str)

LONGEST_SHOWN = 60
"""Characters of a value that an error repeats."""
ALIKE = 0.65
"""Share of two words' letters that agree where one was meant for the other: at a half, `muon` would be `lion`."""


class FlopwiseError(ValueError):
    """A mistake in what was asked for. The command line prints it and exits with 2; no traceback."""

    exit_code = 2

    def __init__(self, what: str, *, why: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.what]
        if self.why:
            parts.append(self.why)
        if self.hint:
            parts.append(f"hint: {self.hint}")
        return "\n".join(parts)

    def within(self, where: str, *, hint: str | None = None) -> Self:
        """The same mistake, told with the place (a file, a field) that it was found in; `hint` if it has none."""
        # A description checks itself under its own name, which may be the place already.
        what = self.what if self.what.startswith(f"{where}: ") else f"{where}: {self.what}"
        return self.reword(what, why=self.why, hint=self.hint or hint)

    def reword(self, what: str, *, why: str | None, hint: str | None) -> Self:
        """The same mistake, of the same kind, in other words."""
        told = copy.copy(self)
        told.args = (what,)
        told.what, told.why, told.hint = what, why, hint
        return told


class DoesNotFit(FlopwiseError):  # noqa: N818 - it is an answer, not a mistake
    """Nothing that was asked for fits the memory there is. The command line exits with 1."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        why: str | None = None,
        hint: str | None = None,
        needed_bytes: int | None = None,
        place: Literal["device", "host"] = "device",
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.needed_bytes = needed_bytes
        """Of the place: the least with which something would fit, where that is known."""
        self.place = place


def shown(value: object) -> str:
    """A value of a file or a command line as an error repeats it: short, whatever its size."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**18:
        # Python refuses to print integers of several thousand digits.
        return "a number of more than 18 digits"
    if isinstance(value, str):
        return repr(value) if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]!r}…"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else str(value)[:LONGEST_SHOWN]


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names that `name` was probably meant to be, best first: it may be their beginning."""
    names = list(known)
    typed = name.lower()[:LONGEST_SHOWN]
    longer = sorted((known_name for known_name in names if typed and known_name.startswith(typed)), key=len)
    close = difflib.get_close_matches(typed, names, n=limit, cutoff=ALIKE)
    inside = [known_name for known_name in names if typed and typed in known_name]
    return list(dict.fromkeys([*longer, *close, *inside]))[:limit]


def unknown_name(kind: str, name: str, known: Iterable[str], *, hint: str) -> FlopwiseError:
    """An error for a name that no catalogue holds, with the nearest ones that it does."""
    names = sorted(known)
    close = nearest(name, names)
    what = f"no {kind} is called {shown(name)}"
    if close:
        return FlopwiseError(what, why=f"did you mean {' or '.join(close)}?", hint=hint)
    listed = ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
    return FlopwiseError(what, why=f"known: {listed}" if names else "there is none yet", hint=hint)


def one_of(value: str, choices: Iterable[Word], what: str) -> Word:
    """The word, in small letters, if it is among the choices."""
    known = {str(choice): choice for choice in choices}
    word = str(value).lower()
    if word not in known:
        raise FlopwiseError(
            f"{what} cannot be {shown(value)}",
            why=f"it is one of {', '.join(known)}",
            hint=f"{what} {next(iter([*nearest(word, known), *known]))}",
        )
    return known[word]


class OutOfMemory(FlopwiseError):  # noqa: N818 - as torch and the system call it
    """Memory that a plan counts on could not be had when it was asked for."""
