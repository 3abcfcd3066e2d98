"""One exception for whatever a user can put right: what is wrong, why, and what to try next.

Anything else that is raised is a bug of ours and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_SHOWN = 60
"""Characters of a value that an error repeats."""


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

    def within(self, where: str, *, hint: str | None = None) -> FlopwiseError:
        """The same mistake, told with the place (a file, a field) that it was found in; `hint` if it has none."""
        # A description checks itself under its own name, which may be the place already.
        what = self.what if self.what.startswith(f"{where}: ") else f"{where}: {self.what}"
        return FlopwiseError(what, why=self.why, hint=self.hint or hint)


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
    close = difflib.get_close_matches(typed, names, n=limit, cutoff=0.5)
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
    return FlopwiseError(what, why=f"known: {listed}", hint=hint)


class OutOfMemory(FlopwiseError):  # noqa: N818 - as torch and the system call it
    """Memory that a plan counts on could not be had when it was asked for."""
