"""What a training told when it began."""

from __future__ import annotations

from flopwise.train import Callback, Started


class Notes(Callback):
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_start(self, started: Started) -> None:
        self.told += started.notes
