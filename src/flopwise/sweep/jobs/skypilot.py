"""A sweep as tasks for SkyPilot: YAML that `sky launch` reads; SkyPilot itself is neither imported nor called."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flopwise.base.errors import FlopwiseError, nearest, shown
from flopwise.base.processes import python_words
from flopwise.store.cells import Cell, SweepRecord
from flopwise.store.sweeps import CELL_NAME, CELLS, SWEEP_NAME, SWEEPS
from flopwise.sweep.jobs.slurm_scripts import wants_gpus

ACCELERATORS: Mapping[str, str] = {
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "a100-pcie-80gb": "A100-80GB",
    "b200": "B200",
    "h100-nvl": "H100-NVL",
    "h100-sxm": "H100",
    "h200": "H200",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090",
    "rtx-5090": "RTX5090",
    "v100": "V100-32GB",
    "v100-16gb": "V100",
}
"""Names of the catalogue → those that `sky show-gpus --all` lists. SkyPilot's A100-80GB is either form of the card, and
its H100 is the SXM one on the large clouds; what is not listed there has to be named by hand."""

REMOTE_STORE = "flopwise-store"
"""In the home folder of the machine that is rented."""
BUCKET_MOUNT = "/flopwise-results"
GPUS_PER_MACHINE = 8
ACCELERATOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]*", re.ASCII)
INFRA = re.compile(r"[A-Za-z0-9*][A-Za-z0-9_./*-]*", re.ASCII)
BUCKET = re.compile(r"[a-z0-9]+://[A-Za-z0-9][A-Za-z0-9._/-]*", re.ASCII)
INSTALL = "pip install 'flopwise[train]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyOptions:
    """What SkyPilot has to be told beside the cells."""

    store: Path
    """Here; its sweep and cells are copied to the machine."""
    accelerator: str | None = None
    """As SkyPilot calls it; None: from the name of the hardware."""
    infra: str | None = None
    """aws, gcp/us-central1, k8s; None: wherever it is cheapest."""
    use_spot: bool = False
    cpus: str | None = None
    """8, or 8+ for at least so many."""
    bucket: str | None = None
    """s3://name: where results are copied after each cell; None: they stay on the machine until they are fetched."""
    setup: str = INSTALL
    """Shell commands that install flopwise there. They run as they are."""
    python: str = "python"

    def __post_init__(self) -> None:
        checks = (
            (self.accelerator, ACCELERATOR, "an accelerator of SkyPilot", "H100"),
            (self.infra, INFRA, "a place for SkyPilot", "aws, gcp/us-central1 or k8s"),
            (self.cpus, re.compile(r"[0-9]+\+?", re.ASCII), "a number of CPUs", "8+"),
            (self.bucket, BUCKET, "a bucket", "s3://my-bucket"),
        )
        for value, pattern, what, hint in checks:
            if value is not None and not pattern.fullmatch(value):
                raise FlopwiseError(f"{shown(value)} is not {what}", hint=hint)


def render_all(record: SweepRecord, cells: Sequence[Cell], options: SkyOptions) -> dict[str, str]:
    """A task for each hardware and number of devices, by the names of their files."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.settings.hardware, cell.settings.devices), []).append(cell)
    return {f"{task_name(record, group)}.sky.yaml": render(record, group, options) for group in groups.values()}


def task_name(record: SweepRecord, cells: Sequence[Cell]) -> str:
    settings = cells[0].settings
    hardware = re.sub(r"[^A-Za-z0-9]+", "-", Path(settings.hardware).stem).strip("-") or "device"
    # A cluster of SkyPilot has to begin with a letter; a sweep may begin with a digit.
    return f"flopwise-{record.name}-{settings.devices}x-{hardware}"


def render(record: SweepRecord, cells: Sequence[Cell], options: SkyOptions) -> str:
    """One task for cells of the same hardware and number of devices, which it runs one after the other."""
    _check(record, cells)
    settings = cells[0].settings
    name = task_name(record, cells)
    lines = [
        f"# Sweep {record.name}: {len(cells)} cell{'' if len(cells) == 1 else 's'}, one after the other.",
        f"# Start it with: sky launch --cluster {name} --idle-minutes-to-autostop 10 THIS_FILE",
        *_comments(name, options),
        f"name: {quoted(name)}",
        "resources:",
    ]
    if wants_gpus(record, cells[0]):
        accelerator = options.accelerator or accelerator_for(settings.hardware)
        lines.append(f"  accelerators: {quoted(f'{accelerator}:{settings.devices}')}")
    cpus = options.cpus or (None if wants_gpus(record, cells[0]) else "4+")
    if cpus is not None:
        lines.append(f"  cpus: {quoted(cpus)}")
    if options.infra is not None:
        lines.append(f"  infra: {quoted(options.infra)}")
    if options.use_spot:
        lines.append("  use_spot: true")
    lines += ["file_mounts:", *_mounts(record, cells, options)]
    lines += ["setup: " + _block(options.setup), "run: " + _block(_run(record, cells, options))]
    return "\n".join(lines) + "\n"


def accelerator_for(hardware: str) -> str:
    """SkyPilot's name for hardware of the catalogue."""
    if hardware in ACCELERATORS:
        return ACCELERATORS[hardware]
    close = nearest(hardware, ACCELERATORS)
    raise FlopwiseError(
        f"it is not known what SkyPilot calls {shown(hardware)}",
        why=f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(ACCELERATORS)}",
        hint="name it as `sky show-gpus --all` does: --accelerator H100",
    )


def _check(record: SweepRecord, cells: Sequence[Cell]) -> None:
    assert cells
    assert all(CELL_NAME.fullmatch(cell.id) for cell in cells)
    if not SWEEP_NAME.fullmatch(record.name):
        raise FlopwiseError(f"a sweep cannot be called {shown(record.name)}", hint="--name mpt-on-h200")
    kinds = {(cell.settings.hardware, cell.settings.devices) for cell in cells}
    if len(kinds) > 1:
        listed = ", ".join(f"{devices} × {hardware}" for hardware, devices in sorted(kinds))
        raise FlopwiseError(f"one task cannot be for {listed}", hint="a task for each of them")
    devices = cells[0].settings.devices
    if devices > GPUS_PER_MACHINE:
        raise FlopwiseError(
            f"{devices} devices are more than one machine",
            why=f"a task for SkyPilot has one, with up to {GPUS_PER_MACHINE}",
            hint="--launcher slurm starts cells on several nodes; or fewer devices",
        )


def _comments(name: str, options: SkyOptions) -> list[str]:
    """What is left to the person who starts it; nothing of it is quoted for YAML, so that it is checked for lines."""
    results = f"{name}-results"
    if options.bucket is None:
        fetch = f"rsync -a {name}:{REMOTE_STORE}/ {results}/"
        told = ["# Results stay on that machine. Before `sky down`, fetch them into a store of their own:"]
    else:
        fetch = f"copy {options.bucket}/{name} to {results}"
        told = ["# Results are copied to the bucket after each cell. Fetch them into a store of their own:"]
    return [
        *told,
        f"#   {fetch}",
        "# (not into the store here: both number their runs from 0001)",
        "# To fill in: data that is not below, another image (image_id), the version of flopwise in `setup`.",
    ]


def _mounts(record: SweepRecord, cells: Sequence[Cell], options: SkyOptions) -> list[str]:
    store = options.store.absolute()
    sweep = f"{record.name}.json"
    pairs = {f"~/{REMOTE_STORE}/{SWEEPS}/{sweep}": str(store / SWEEPS / sweep)}
    for cell in cells:
        pairs[f"~/{REMOTE_STORE}/{CELLS}/{cell.id}"] = str(store / CELLS / cell.id)
    for path in _local_files(record, cells):
        pairs[str(path) if path.is_absolute() else f"~/{path}"] = str(path.absolute())
    lines = [f"  {quoted(there)}: {quoted(here)}" for there, here in pairs.items()]
    if options.bucket is not None:
        lines += [f"  {quoted(BUCKET_MOUNT)}:", f"    source: {quoted(options.bucket)}", "    mode: MOUNT"]
    return lines


def _local_files(record: SweepRecord, cells: Sequence[Cell]) -> list[Path]:
    """Files and folders that the cells name: they have to lie at the same place there, relative to home."""
    named = [*record.data, *([record.tokenizer] if record.tokenizer else []), cells[0].settings.hardware]
    paths = [Path(name) for name in dict.fromkeys(named) if Path(name).exists()]
    for path in paths:
        if ".." in path.parts:
            raise FlopwiseError(
                f"{path} cannot be copied to another machine",
                why="it lies outside the folder that the sweep was started in",
                hint="name it by its whole path, or from a folder above both",
            )
    return paths


def _run(record: SweepRecord, cells: Sequence[Cell], options: SkyOptions) -> str:
    name = task_name(record, cells)
    command = shlex.join(python_words("flopwise", "sweep", "--resume", record.name, python=options.python))
    lines = ["cd ~", f"store=$HOME/{REMOTE_STORE}", "failed=0"]
    lines += [f"for cell in {' '.join(cell.id for cell in cells)}; do"]
    lines += [f'  {command} --only "$cell" --store "$store" || failed=1']
    if options.bucket is not None:
        place = shlex.quote(f"{BUCKET_MOUNT}/{name}")
        lines.append(f'  mkdir -p {place} && cp -r "$store"/. {place}/ || failed=1')
    lines += ["done", "exit $failed"]
    return "\n".join(lines)


# -- YAML ------------------------------------------------------------------------------------------------------------


def quoted(text: str) -> str:
    """A YAML scalar in double quotes, which stands for exactly this text."""
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    number = ord(character)
    if 0xD800 <= number < 0xE000:
        raise FlopwiseError(
            "a path is not text", why="it holds bytes that are no UTF-8, which YAML cannot", hint="rename it"
        )
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _block(text: str) -> str:
    """Lines as they are, below a key of the top level; in quotes where a line has signs that YAML would not keep."""
    lines = text.rstrip("\n").split("\n")
    if not all(line.isprintable() for line in lines) or lines[0].startswith(" ") or not lines[0]:
        return quoted(text)
    return "|\n" + "\n".join(f"  {line}" if line else "" for line in lines)
