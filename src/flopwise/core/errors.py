"""One exception for whatever a user can put right: what is wrong, why, and what to try next.

Anything else that is raised is a bug of ours and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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

    def within(self, where: str) -> FlopwiseError:
        """The same mistake, told with the place (a file, a field) that it was found in."""
        return FlopwiseError(f"{where}: {self.what}", why=self.why, hint=self.hint)


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names that `name` was probably meant to be, best first."""
    names = list(known)
    close = difflib.get_close_matches(name.lower(), names, n=limit, cutoff=0.5)
    inside = [known_name for known_name in names if name and name.lower() in known_name]
    return list(dict.fromkeys([*close, *inside]))[:limit]


def unknown_name(kind: str, name: str, known: Iterable[str], *, hint: str) -> FlopwiseError:
    """An error for a name that no catalogue holds, with the nearest ones that it does."""
    names = sorted(known)
    close = nearest(name, names)
    if close:
        return FlopwiseError(f"no {kind} is called {name!r}", why=f"did you mean {' or '.join(close)}?", hint=hint)
    shown = ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
    return FlopwiseError(f"no {kind} is called {name!r}", why=f"known: {shown}", hint=hint)
