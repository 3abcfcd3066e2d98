"""What it takes to look at a checkpoint's numbers as they are written: `python -m benchmarks.checkpoint_saving`.

Tensors of so many GiB are saved with and without the look that tells whether they are finite, in turn, and the
shortest times are compared. On a GPU the look runs there while pieces are copied.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from flopwise.engine.weights import checkpoint, tensor_files
from flopwise.engine.weights.checkpoint import CheckpointState
from flopwise.setup.training import Training

TENSORS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", help="Where it is saved. Default: the system's folder for temporary files.")
    given = parser.parse_args()
    for dtype in (torch.float32, torch.bfloat16):
        each = int(given.gib * 2**30 / TENSORS) // dtype.itemsize
        tensors = {f"tensor {number}": torch.randn(each, device=given.device).to(dtype) for number in range(TENSORS)}
        looked, plain = _times(tensors, given.repeats, given.folder)
        print(
            f"{given.gib:g} GiB of {str(dtype).removeprefix('torch.')} on {given.device}: {plain:.3f} s, "
            f"looked at {looked:.3f} s, ratio {looked / plain:.3f}"
        )


def _times(tensors: dict[str, Tensor], repeats: int, folder: str | None) -> tuple[float, float]:
    """Least seconds of a save, with the look and without: whatever else a machine does only adds to them."""
    looked: list[float] = []
    plain: list[float] = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        _save(Path(place), tensors)
        for _ in range(repeats):
            looked.append(_save(Path(place), tensors))
            with patch.object(tensor_files, "extremes", return_value=torch.zeros(1)):
                plain.append(_save(Path(place), tensors))
    return min(looked), min(plain)


def _save(folder: Path, tensors: dict[str, Tensor]) -> float:
    state = CheckpointState(
        step=1, position=1, model={}, training=Training(steps=1), data={}, precision="bf16", batch_sequences=1,
        sequence_tokens=1, totals={}, files={}, not_finite=(),
    )  # fmt: skip
    begun = time.perf_counter()
    checkpoint.save(folder, weights=tensors, optimizer={}, state=state, config=None, keep=1)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
