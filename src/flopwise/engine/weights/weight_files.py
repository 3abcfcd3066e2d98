"""Files of weights in a folder, found without reading them."""

from __future__ import annotations

from pathlib import Path

from flopwise.base.errors import FlopwiseError


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, or the one that is named, less those of an optimizer."""
    if not folder.exists():
        raise FlopwiseError(f"there is no folder {folder}", hint="--weights with a folder of *.safetensors files")
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
    files = [path for path in files if path.name != "optimizer.safetensors"]
    if not files:
        raise FlopwiseError(
            f"{folder} holds no weights",
            why="weights are read from *.safetensors files, and from nothing that runs code when it is read",
            hint="a folder that `save_pretrained` wrote; without --weights the first values are drawn",
        )
    return files
