"""The keys of a Hugging Face `config.json`, each read as the type it must have."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from flopwise.base.errors import FlopwiseError, shown
from flopwise.work.checks import LARGEST_SIDE

LARGEST_NUMBER = 1e300
"""Of the real numbers in a file; what is beyond is infinite or a typing mistake."""


class ConfigKeys:
    """The keys of a `config.json`; reads each as the type it must have, or says what is wrong with it."""

    def __init__(self, table: Mapping[str, object], owner: str) -> None:
        self.table = table
        self.owner = owner

    def size(self, *keys: str, absent: int | None = None, null: int | None = None, least: int = 1) -> int:
        """The whole number under the first of `keys` that is there.

        `absent` and `null` are what a missing key and a JSON null stand for; without them both are mistakes.
        """
        key = next((key for key in keys if key in self.table), None)
        if key is None:
            if absent is None:
                raise self._missing(keys[-1])
            return absent
        value = self.table[key]
        if value is None and null is not None:
            return null
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number", value)
        if not least <= value <= LARGEST_SIDE:
            raise FlopwiseError(
                f"{self.owner}: {key} must be between {least} and {LARGEST_SIDE:,}, got {shown(value)}",
                why="it counts layers, heads, tokens or channels",
                hint=f"correct {key} in the config.json",
            )
        return value

    def number(self, *keys: str, absent: float | None = None) -> float:
        """The number above zero under the first of `keys` that is there, whole or not; null counts as absent."""
        key = next((key for key in keys if self.table.get(key) is not None), None)
        if key is None:
            if absent is None:
                raise self._missing(keys[-1])
            return absent
        value = self.table[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        if not 0 < value <= LARGEST_NUMBER:
            raise FlopwiseError(
                f"{self.owner}: {key} must be above 0 and finite, got {shown(value)}",
                hint=f"correct {key} in the config.json",
            )
        return float(value)

    def numbers(self, key: str) -> list[float]:
        """The list of numbers under `key`."""
        value = self.table.get(key)
        if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int | float) for n in value):
            raise self._missing(key) if value is None else self._wrong(key, "a list of numbers", value)
        return [float(number) for number in value]

    def share(self, key: str, absent: float) -> float:
        """The number from 0 to less than 1 under `key`; a JSON null counts as absent."""
        value = self.table.get(key)
        if value is None:
            return absent
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        if not 0 <= value < 1:
            raise FlopwiseError(
                f"{self.owner}: {key} must be from 0 to less than 1, got {shown(value)}",
                why="it is the share that training sets to zero",
                hint=f"correct {key} in the config.json",
            )
        return float(value)

    def flag(self, key: str, absent: bool) -> bool:
        """The truth value under `key`; a JSON null counts as false, as it does in `transformers`."""
        value = self.table.get(key, absent)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return bool(value)

    def text(self, key: str, absent: str) -> str:
        """The string under `key`."""
        value = self.table.get(key, absent)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def texts(self, key: str) -> list[str]:
        """The list of strings under `key`; empty when absent or null."""
        value = self.table.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return value

    def group(self, key: str) -> ConfigKeys:
        """The object under `key`; an empty one when absent or null."""
        value = self.table.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return ConfigKeys(value or {}, f"{self.owner}: {key}")

    def _missing(self, key: str) -> FlopwiseError:
        close = difflib.get_close_matches(key, self.table, n=1, cutoff=0.8)
        return FlopwiseError(
            f"{self.owner}: {key} is missing",
            why=f"there is {shown(close[0])}; is that a misspelling?" if close else "the shape depends on it",
            hint="the config.json that `save_pretrained` writes holds every size of the model",
        )

    def _wrong(self, key: str, expected: str, value: object) -> FlopwiseError:
        numeric = isinstance(value, str) and value.isascii() and value.isdigit()
        return FlopwiseError(
            f"{self.owner}: {key} must be {expected}, got {shown(value)}",
            hint=f"write {value} without quotation marks"
            if numeric and expected == "a whole number"
            else f"correct {key}",
        )
