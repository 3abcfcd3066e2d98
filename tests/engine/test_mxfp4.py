"""MXFP4 against what transformers makes of it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flopwise.base.errors import FlopwiseError  # noqa: E402
from flopwise.engine.weights.mxfp4 import Dequantised, dequantise  # noqa: E402


def test_matrices_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 5, 2), dtype=torch.uint8)
    found = Dequantised({"a.down_proj_blocks": blocks, "a.down_proj_scales": scales, "b": torch.ones(1)})
    assert [*found] == ["b", "a.down_proj"] and len(found) == 2
    expected = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(found["a.down_proj"], expected)
    assert torch.equal(found["b"], torch.ones(1))


def test_other_packings_are_refused() -> None:
    with pytest.raises(FlopwiseError, match="not those of MXFP4") as caught:
        dequantise(torch.zeros(3, 5, 2, 8), torch.zeros(3, 5, 2), "a.down_proj")
    assert caught.value.hint and "bf16" in caught.value.hint
