"""Names to descriptions: the catalogue that ships with flopwise, a file of your own, a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flopwise.core.errors import FlopwiseError, unknown_name
from flopwise.core.files import decode, read_table
from flopwise.core.hardware import Hardware
from flopwise.core.model import ARCHITECTURES, Model

ROOT = Path(__file__).parent.parent / "catalog"


@cache
def model_names() -> tuple[str, ...]:
    """Every model of the catalogue, sorted."""
    return tuple(sorted(path.stem for path in (ROOT / "models").glob("*.toml")))


@cache
def hardware_names() -> tuple[str, ...]:
    """Every device of the catalogue, sorted."""
    return tuple(sorted(path.stem for path in (ROOT / "hardware").glob("*.toml")))


def load_model(name: str, changes: Mapping[str, Any] | None = None) -> Model:
    """A model by catalogue name, by the path of a TOML or JSON file, or by a Hugging Face config.json or its folder.

    `changes` replace fields of the description before it is checked.
    """
    if name.lower() in model_names():
        path = ROOT / "models" / f"{name.lower()}.toml"
        return _decode_model(read_table(path), name.lower(), changes)
    if not _is_path(name):
        raise unknown_name(
            "model", name, model_names(), hint="`flopwise ls models`, or the path of a config.json or TOML"
        )
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise FlopwiseError(
                f"the folder {name} holds no config.json", hint="name the file itself, or another folder"
            )
    return _decode_model(read_table(path), str(path), changes)


def load_hardware(name: str) -> Hardware:
    """A device by catalogue name or alias, or by the path of a TOML or JSON file."""
    if name.lower() in hardware_names():
        path = ROOT / "hardware" / f"{name.lower()}.toml"
        return decode(read_table(path), Hardware, name.lower())
    if _is_path(name):
        return decode(read_table(Path(name)), Hardware, name)
    aliases = hardware_aliases()
    if name.lower() in aliases:
        return load_hardware(aliases[name.lower()])
    raise unknown_name(
        "hardware",
        name,
        {*hardware_names(), *aliases},
        hint="`flopwise ls hardware`, or the path of a TOML that describes it (`flopwise show h100-sxm` prints one)",
    )


@cache
def hardware_aliases() -> dict[str, str]:
    """Alias → catalogue name. Read only when a name is not the catalogue's own, since it opens every file."""
    return {
        alias.lower(): name
        for name in hardware_names()
        for alias in read_table(ROOT / "hardware" / f"{name}.toml").get("aliases", ())
    }


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".toml", ".json")) or name in (".", "..") or Path(name).exists()


def _decode_model(table: dict[str, Any], where: str, changes: Mapping[str, Any] | None) -> Model:
    if "model_type" in table and "architecture" not in table:
        from flopwise.core.files import plain
        from flopwise.core.huggingface import from_config

        try:
            found = from_config(table, _configuration_name(where))
        except FlopwiseError as error:
            raise error.within(where) from None
        if not changes:
            return found
        table = {"architecture": "transformer", **plain(found)}
    architecture = table.get("architecture")
    if architecture not in ARCHITECTURES:
        raise FlopwiseError(
            f"{where}: this is not the description of a model",
            why="it has neither `architecture` (ours) nor `model_type` (Hugging Face)"
            if architecture is None
            else f"architecture is {architecture!r}",
            hint=f"architecture = {' or '.join(ARCHITECTURES)}; `flopwise show llama-3-8b` prints one",
        )
    fields = {key: value for key, value in table.items() if key != "architecture"}
    return decode({**fields, **(changes or {})}, ARCHITECTURES[architecture], where)


def _configuration_name(where: str) -> str:
    """`…/mistral-7b/config.json` is called mistral-7b; a bare config.json goes by its own name."""
    path = Path(where).absolute()
    return path.parent.name if path.name == "config.json" and path.parent.name else path.stem
