"""Opening safetensors files, wherever they lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open


def open_tensors(path: Path) -> Any:  # noqa: ANN401 - its methods have no types
    """What safetensors opens, under any name: it takes only names in UTF-8, and a folder of ours may have another.

    Raises OSError and SafetensorError.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # It is mapped at once, and needs the number no longer.
            return cast(Any, safe_open(f"/dev/fd/{handle}", framework="pt"))
        finally:
            os.close(handle)
    return cast(Any, safe_open(path, framework="pt"))
