"""MXFP4 against what transformers makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from flopwise.base.errors import FlopwiseError  # noqa: E402
from flopwise.engine.weights.mxfp4 import Dequantised, dequantise  # noqa: E402
from flopwise.train.building import FolderTensors  # noqa: E402


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


def test_files_of_weights_are_read_by_their_kind(tmp_path: Path) -> None:
    torch.manual_seed(2)
    kept = {
        "a.down_proj_blocks": torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8),
        "a.down_proj_scales": torch.randint(100, 140, (3, 5, 2), dtype=torch.uint8),
    }
    others = {"fp8": torch.ones(4).to(torch.float8_e4m3fn), "int8": torch.ones(4, dtype=torch.int8)}
    save_file({**kept, **others, "bf16": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    folder = FolderTensors(tmp_path)
    assert torch.equal(Dequantised(folder)["a.down_proj"], Dequantised(kept)["a.down_proj"])
    assert folder["bf16"].dtype == torch.bfloat16
    for name in others:
        with pytest.raises(FlopwiseError, match="quantised weights") as caught:
            folder[name]
        assert caught.value.hint
