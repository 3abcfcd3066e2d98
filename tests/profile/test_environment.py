"""What a record carries of the machine: the driver's version, as nvidia-smi tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwise.profile.measure.this_machine import driver_version, environment


def a_program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An nvidia-smi that says what the script does; nothing else is on the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 580.95.05", "580.95.05"),
        ("echo 580.95.05; echo 580.95.05", "580.95.05"),
        ("echo '[N/A]'", None),
        ("echo", None),
        ("exit 9", None),
    ],
    ids=["one", "two", "not-told", "nothing", "fails"],
)
def test_the_drivers_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, version: str | None) -> None:
    a_program(tmp_path, monkeypatch, script)
    assert driver_version() == version


def test_a_machine_with_a_gpu_tells_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'case "$1" in *driver*) echo 580.95.05;; *) echo NVIDIA H200;; esac'
    a_program(tmp_path, monkeypatch, script)
    facts = environment()
    assert (facts["gpu"], facts["driver"]) == ("NVIDIA H200", "580.95.05")


def test_a_machine_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = environment()
    assert (facts["gpu"], facts["driver"]) == (None, None)
