"""`flopwise calibrate`: time this machine's device, and write the hardware file that `--on` takes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.base.errors import FlopwiseError, one_of, shown
from flopwise.cli.options import tell_warnings
from flopwise.cli.output import say, show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flopwise.calibrate.report import CalibrationRecord
    from flopwise.setup.hardware import Hardware

FORMS = ("table", "text", "json")
DeviceOption = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
NameOption = Annotated[str, typer.Option(help="Of the hardware. Default: the catalogue's with -measured behind it.")]
WriteOption = Annotated[
    str, typer.Option("--write", "-w", "-o", help="File to write. Default: the name with .toml, in this folder.")
]
LikeOption = Annotated[
    str, typer.Option(help="Hardware whose peaks and networks it starts from, for a GPU that the catalogue lacks.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer shapes: about 20 s instead of under two minutes.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
OutputOption = Annotated[str, typer.Option("--output", help="table or json, with every row that was timed.")]


def calibrate(
    device: DeviceOption = "auto",
    name: NameOption = "",
    write: WriteOption = "",
    like: LikeOption = "",
    quick: QuickOption = False,
    force: ForceOption = False,
    output: OutputOption = "table",
) -> None:
    """Measure this machine's GPU or CPU, for --on.

    In under two minutes; nothing else should run on it. What was not measured is as in the catalogue.
    """
    from flopwise.calibrate.report import calibration_document

    form = one_of(output, FORMS, "--output")
    wanted = one_of(device, ("auto", "cuda", "cpu"), "--device")
    if write in FORMS:
        raise FlopwiseError(f"-o names the file, and {write} is a form", hint=f"--output {write}")
    _check_name(name)
    _check_torch()
    if write:
        _check_file(write, force=force)
    with _interrupts_told():
        record = _measure(wanted, name, write, like, quick=quick, force=force)
    show(calibration_document(record), record, form, schema="calibration")


def _measure(wanted: str, name: str, write: str, like: str, *, quick: bool, force: bool) -> CalibrationRecord:
    """Time the device, and write what was found."""
    from datetime import datetime

    from flopwise.calibrate.kernel_calls import attention_calls, product_calls
    from flopwise.engine.devices import choose_device

    chosen = choose_device(wanted)
    base, own = _base(chosen, like)
    name = name or f"{(base.name if not like else own).removesuffix('-measured')}-measured"
    write = write or f"{name}.toml"
    target = _check_file(write, force=force)

    from flopwise.calibrate.calibrated import calibrate_hardware
    from flopwise.calibrate.calibrating import calibrate_device
    from flopwise.calibrate.report import CalibrationRecord
    from flopwise.cli.output import progress_bar

    with progress_bar("measuring") as tell:
        measured = calibrate_device(
            "cuda" if chosen == "cuda" else "cpu",
            tuple(base.device.peak_flops),
            product_calls,
            attention_calls,
            quick=quick,
            tell=tell,
        )
    today = datetime.now().astimezone().date().isoformat()
    hardware, fitted = calibrate_hardware(base, measured, name=name, date=today, like=bool(like))
    _write(target, hardware)
    return CalibrationRecord(file=write, hardware=hardware, held_out=fitted, calibration=measured)


@contextmanager
def _interrupts_told() -> Iterator[None]:
    """Until a file is there, an interrupt leaves nothing, and says so."""
    try:
        yield
    except KeyboardInterrupt:
        say("nothing was written")
        raise


def _write(target: Path, hardware: Hardware) -> None:
    """Write the file; where that fails after all, what was measured goes to the terminal instead of being lost."""
    from flopwise.base.files import to_toml, write_whole

    text = to_toml(hardware)
    try:
        write_whole(target, text)
    except FlopwiseError as error:
        typer.echo(text, nl=False)
        raise FlopwiseError(error.what, why=error.why, hint="what would be in it was printed: keep that") from None


def _check_name(name: str) -> None:
    import re

    from flopwise.catalog.load import THIS_CPU, THIS_MACHINE, hardware_aliases, hardware_names

    if name and not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
        raise FlopwiseError(
            f"--name cannot be {shown(name)}",
            why="small letters, digits, dots and dashes are expected, 64 at the most",
            hint="--name h200-measured",
        )
    if name in (*hardware_names(), *hardware_aliases(), THIS_CPU, THIS_MACHINE):
        raise FlopwiseError(
            f"--name {name} is a name of the catalogue",
            why="what was measured here would pass for what the catalogue says",
            hint=f"--name {name}-measured",
        )


def _check_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise FlopwiseError(
            "measuring needs torch, which is not installed",
            why="the kernels that are timed are those that train",
            hint="pip install 'flopwise[train]'",
        )


def _check_file(write: str, *, force: bool) -> Path:
    """Before anything is measured: where the file goes, and that nothing is lost there."""
    from pathlib import Path

    if not write.endswith(".toml"):
        raise FlopwiseError(
            f"--write {write} is no TOML file", why="its name tells what is in it", hint=f"--write {write}.toml"
        )
    target = Path(write)
    _check_writable(target)
    if target.exists() and not force:
        raise FlopwiseError(
            f"{write} is there already",
            why="what was measured before would be lost",
            hint="--force to replace it, or -w with another name",
        )
    return target


def _check_writable(path: Path) -> None:
    """Refuse a place where nothing can be written, as it will be written: by a file beside it."""
    import os
    import tempfile
    from pathlib import Path

    try:
        target = path.resolve()
        if target.is_dir():
            why = "it is a folder"
        elif target.exists() and not target.is_file():
            # A pipe or a device is written to.
            return
        else:
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            os.close(handle)
            Path(name).unlink()
            return
    except (OSError, ValueError, RuntimeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    raise FlopwiseError(f"--write {shown(str(path))} cannot be written", why=why, hint="--write h200-measured.toml")


def _base(device: str, like: str) -> tuple[Hardware, str]:
    """The description that it starts from, and what the device itself is called."""
    from flopwise.catalog.load import load_hardware
    from flopwise.engine.devices import device_facts
    from flopwise.profile.measure.this_machine import catalogue_name, name_key, this_cpu

    if device == "cpu":
        if like:
            raise FlopwiseError("--like is for GPUs", why="a CPU's peaks are measured", hint="leave --like out")
        return tell_warnings(this_cpu), "this-cpu"
    title = device_facts("cuda")["device_name"]
    if like:
        base = load_hardware(like)
        if base.device.kind != "gpu":
            raise FlopwiseError(f"--like {like} is no GPU", why=f"this machine has {title!r}", hint="--like h100-sxm")
        return base, name_key(title)
    known = catalogue_name(title)
    if known is None:
        raise FlopwiseError(
            f"this machine's GPU, {title!r}, is not in the catalogue",
            why="its datasheet's peak FLOP/s, by number format, and its memory's bandwidth cannot be measured",
            hint="--like h100-sxm starts from another card's, or from a TOML with its own (`flopwise show h100-sxm`)",
        )
    return load_hardware(known), known
