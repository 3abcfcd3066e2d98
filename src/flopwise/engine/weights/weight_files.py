"""Files of weights in a folder, found without reading them. No torch here."""

from __future__ import annotations

import hashlib
from pathlib import Path

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.files import entry_kind, read_table

INDEX = "model.safetensors.index.json"
BESIDE = ("optimizer.safetensors", "adapter_model.safetensors")
"""What lies beside weights under the same ending and is none of the model's."""
UNREAD = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.npz")
"""Endings of weights that are not read: most of them run code when they are."""
LOOKS, LOOK_BYTES = 256, 1 << 14
"""Places of a file that are read to know it again, and how much at each."""
UNREAD_HINT = "`AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)` writes *.safetensors beside them"


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights that can be read."""
    return any(path.name not in BESIDE for path in folder.glob("*.safetensors"))


def unread_weights(folder: Path) -> list[Path]:
    """Files that are probably weights and are not read."""
    found = sorted(path for pattern in UNREAD for path in folder.glob(pattern))
    return [path for path in found if not path.name.startswith(("training_args", "optimizer", "scheduler", "rng_"))]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, or the one that is named: those of its index, or those of the model.

    A repository may hold the same weights a second time in the form of whoever made them (`consolidated.safetensors`).
    """
    if not folder.exists():
        raise FlopwiseError(f"there is no folder {folder}", hint="--weights with a folder of *.safetensors files")
    if not folder.is_dir():
        return [folder]
    if entry_kind(folder / INDEX) == "file":
        return _indexed(folder)
    files = sorted(path for path in folder.glob("*.safetensors") if path.name not in BESIDE)
    files = [path for path in files if path.name.startswith("model")] or files
    if not files:
        unread = unread_weights(folder)
        raise FlopwiseError(
            f"{folder} holds no weights" + (f" that are read: {unread[0].name}" if unread else ""),
            why="weights are read from *.safetensors files, and from nothing that runs code when it is read",
            hint=UNREAD_HINT
            if unread
            else "a folder that `save_pretrained` wrote; without --weights the first values are drawn",
        )
    return files


def weights_digest(folder: Path) -> str:
    """What tells weights from others: of each file its size and what lies at places all over it."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as stream:
            for place in range(LOOKS):
                stream.seek(place * max(0, size - LOOK_BYTES) // (LOOKS - 1))
                digest.update(stream.read(LOOK_BYTES))
    return digest.hexdigest()


def _indexed(folder: Path) -> list[Path]:
    """The files that an index names; nothing outside the folder."""
    places = read_table(folder / INDEX).get("weight_map")
    names = sorted({str(name) for name in places.values()}) if isinstance(places, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise FlopwiseError(
            f"{folder / INDEX} names no files of weights",
            why="its weight_map says for each tensor which file of the folder holds it",
            hint="fetch the file again",
        )
    missing = [name for name in names if entry_kind(folder / name) != "file"]
    if missing:
        raise FlopwiseError(
            f"{folder} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            why=f"{INDEX} says that tensors lie in it",
            hint=f"fetch {shown(missing[0])} too",
        )
    return [folder / name for name in names]
