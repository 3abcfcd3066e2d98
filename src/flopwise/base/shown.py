"""What a person sees of a record: a line where it stands in a list, a few lines when printed, a table in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from html import escape


class Shown:
    """A record that names its main figures; how they are laid out is the same for all."""

    __slots__ = ()

    @property
    @abstractmethod
    def figures(self) -> dict[str, str]:
        """What it is about → its figure, in words, the most important first."""

    def __str__(self) -> str:
        figures = self.figures
        width = max(map(len, figures), default=0)
        return "\n".join(f"{name:<{width}}  {_plain(words)}" for name, words in figures.items())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {_plain(', '.join(list(self.figures.values())[:3]))}>"

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(words)}</td></tr>" for name, words in self.figures.items())
        return f"<table>{''.join(rows)}</table>"


def _plain(words: str) -> str:
    """Without signs that a terminal acts on: names of others are in it."""
    return "".join(sign if sign.isprintable() else "?" for sign in words)
