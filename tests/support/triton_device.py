"""Where tests of Triton's kernels run: a GPU, or the processor with TRITON_INTERPRET=1 and Triton at hand.

To be imported behind `pytest.importorskip("triton")`: where neither is there, it skips the module that imports it.
"""

from __future__ import annotations

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not IS_INTERPRETED:
    pytest.skip("no CUDA device", allow_module_level=True)

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter is numpy, which warns where a power overflows to the infinity that is meant.
MARKS = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]
