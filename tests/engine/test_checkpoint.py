"""Checkpoints: bit for bit, the newest kept, and no damage passes unseen."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.engine.weights import checkpoint as module
from flopwise.engine.weights import tensor_files
from flopwise.engine.weights.checkpoint import (
    CONFIG,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    CheckpointState,
    Loaded,
    check_matches,
    checkpoints,
    drop_later,
    latest,
    load,
    save,
)
from flopwise.engine.weights.tensor_files import DTYPES
from flopwise.setup.training import Training

FILES = (WEIGHTS, OPTIMIZER, CONFIG, STATE)


def a_state(step: int) -> CheckpointState:
    return CheckpointState(
        step=step,
        position=step * 8,
        model={"architecture": "transformer", "name": "tiny", "layers": 2, "shape": [3, 5]},
        training=Training(steps=100, clip_norm=0.5),
        data={"fingerprint": "ab12", "tokens": 1000},
        precision="bf16",
        batch_sequences=8,
        sequence_tokens=128,
        totals={"loss": float(step), "seconds": 0.1 * step},
        files={},
        not_finite=(),
    )


def tensors_of(step: int, elements: int = 300) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and optimizer state that only this step has, as views of one buffer each."""
    slab = torch.arange(elements, dtype=torch.float32) * 0.5 + step
    weights = {"a.weight": slab[:101].to(torch.bfloat16), "b.weight": slab[101:]}
    moments = torch.full((elements,), float(step))
    return weights, {"a.first": moments[: elements // 3], "b.first": moments[elements // 3 :]}


def save_step(folder: Path, step: int, keep: int = 2, elements: int = 300) -> Path:
    weights, optimizer = tensors_of(step, elements)
    return save(
        folder, weights=weights, optimizer=optimizer, state=a_state(step), config={"hidden_size": 64}, keep=keep
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN, signed zeros and all."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def check_step(found: Loaded, elements: int = 300) -> None:
    """What was loaded is what its step has saved."""
    for read, written in zip((found.weights, found.optimizer), tensors_of(found.state.step, elements), strict=True):
        assert set(read) == set(written) and len(read) == len(written)
        assert all(same_bits(read[name], written[name]) for name in written)
    assert replace(found.state, files={}) == a_state(found.state.step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name != ".lock")


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    assert latest(tmp_path) is None and checkpoints(tmp_path) == []
    path = save_step(tmp_path, 12)
    assert path == tmp_path / "checkpoints" / "step-00000012" == latest(tmp_path)
    assert sorted(entry.name for entry in path.iterdir()) == sorted(FILES)
    found = load(path)
    check_step(found)
    assert {name: entry.size_bytes for name, entry in found.state.files.items()} == {
        name: (path / name).stat().st_size for name in (WEIGHTS, OPTIMIZER, CONFIG)
    }
    assert json.loads((path / CONFIG).read_text()) == {"hidden_size": 64}
    assert json.loads((path / STATE).read_text())["step"] == 12
    with pytest.raises(KeyError):
        found.weights["c.weight"]


def test_without_a_configuration_there_is_no_file_of_it(tmp_path: Path) -> None:
    path = save(tmp_path, weights={}, optimizer={}, state=a_state(1), config=None, keep=1)
    found = load(path)
    assert not (path / CONFIG).exists() and set(found.state.files) == {WEIGHTS, OPTIMIZER}
    assert len(found.weights) == len(found.optimizer) == 0


def test_totals_that_json_has_no_number_for_survive(tmp_path: Path) -> None:
    state = replace(a_state(1), totals={"loss": math.nan, "best": math.inf, "steps": 3.0})
    totals = load(save(tmp_path, weights={}, optimizer={}, state=state, config=None, keep=1)).state.totals
    assert math.isnan(totals["loss"]) and totals["best"] == math.inf and totals["steps"] == 3.0


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 7), max_size=3), st.booleans()), max_size=9
    ),
    st.integers(0, 2**31),
)
def test_every_kind_of_tensor_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, described: list[tuple[torch.dtype, list[int], bool]], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, (dtype, shape, turned) in enumerate(described):
        size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        most = 2 if dtype == torch.bool else 256
        noise = torch.randint(0, most, (size,), dtype=torch.uint8, generator=generator)
        tensor = noise.view(dtype).reshape(shape)
        tensors[f'awkward "{index}" ä'] = tensor.t() if turned and len(shape) == 2 else tensor
    path = save(folder, weights=tensors, optimizer={}, state=a_state(1), config=None, keep=1)
    ours, theirs = load(path).weights, load_file(path / WEIGHTS)
    assert set(ours) == set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(ours[name], tensor) and same_bits(theirs[name], tensor)


def test_views_of_one_buffer_are_written_apart_and_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 1000)
    slab = torch.randn(10_007)
    views = {"head": slab[:7], "matrix": slab[7:9007].view(90, 100), "tail": slab[9007:], "again": slab[7:107]}
    begins, ends = slab.data_ptr(), slab.data_ptr() + slab.numel() * 4
    for view in views.values():
        pieces = [piece for piece, _ in tensor_files._pieces(view)]
        assert b"".join(pieces) == view.numpy().tobytes() and max(map(len, pieces)) <= 1000
        for piece in pieces:
            address = torch.frombuffer(piece, dtype=torch.uint8).data_ptr()
            assert begins <= address < ends
    parameters = {name: torch.nn.Parameter(view) for name, view in views.items()}
    found = load(save(tmp_path, weights=parameters, optimizer=views, state=a_state(1), config=None, keep=1))
    assert (found.weights.path.stat().st_size - 10_107 * 4) < 1000
    for name, view in views.items():
        assert same_bits(found.weights[name], view) and same_bits(found.optimizer[name], view)


def test_changing_what_was_loaded_changes_no_file(tmp_path: Path) -> None:
    path = save_step(tmp_path, 3)
    load(path).weights["b.weight"].zero_()
    check_step(load(path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_device_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 1000)
    slab = torch.randn(5003, device="cuda").to(torch.bfloat16)
    views = {"first": slab[:1001], "second": slab[1001:]}
    found = load(save(tmp_path, weights=views, optimizer={}, state=a_state(1), config=None, keep=1))
    assert all(same_bits(found.weights[name], view.cpu()) for name, view in views.items())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(keep: int, tmp_path: Path) -> None:
    for step in (1, 2, 5, 10, 100_000_000):
        save_step(tmp_path, step, keep)
    kept = [1, 2, 5, 10, 100_000_000][-keep:]
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]
    assert [found.step for found in checkpoints(tmp_path)] == kept[::-1]
    with pytest.raises(FlopwiseError, match="cannot be kept"):
        save_step(tmp_path, 6, keep=0)


def test_damaged_ones_do_not_count_among_the_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step, keep=3)
    (tmp_path / "checkpoints" / "step-00000003" / OPTIMIZER).unlink()
    found = checkpoints(tmp_path)
    assert [entry.step for entry in found] == [3, 2, 1] and "is missing" in found[0].problem
    assert latest(tmp_path) == found[1].path
    save_step(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_run_that_went_back_gives_up_what_came_later(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path, step, keep=5)
    # That just saved stays even where later ones are about.
    save_step(tmp_path, 15, keep=1)
    assert names(tmp_path) == ["step-00000015", "step-00000020", "step-00000030"]
    drop_later(tmp_path, 15)
    assert names(tmp_path) == ["step-00000015"]


def test_a_step_that_exists_is_replaced(tmp_path: Path) -> None:
    path = save_step(tmp_path, 4)
    (path / "extra").write_text("of the one before")
    assert save_step(tmp_path, 4) == path
    check_step(load(path))
    assert sorted(entry.name for entry in path.iterdir()) == sorted(FILES) and names(tmp_path) == ["step-00000004"]


def test_what_dead_processes_left_is_cleared_away(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    parent = tmp_path / "checkpoints"
    for name in (".step-00000002-77", f".step-00000003-{os.getpid()}", ".removed-step-00000001-5"):
        shutil.copytree(parent / "step-00000001", parent / name)
    shutil.copytree(parent / "step-00000001", parent / ".replaced-step-00000001")
    (parent / "step-00000001").rename(parent / ".replaced-step-00000000")
    (parent / "notes").mkdir()
    assert [found.path.name for found in checkpoints(tmp_path)] == [
        ".replaced-step-00000001",
        ".replaced-step-00000000",
    ]
    save_step(tmp_path, 3, keep=9)
    assert names(tmp_path) == ["notes", "step-00000000", "step-00000001", "step-00000003"]


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    path = save_step(tmp_path, 2)
    content = (path / name).read_bytes()
    chance = random.Random(name)  # noqa: S311
    bits = {0, 1, len(content) * 8 - 1, *(chance.randrange(len(content) * 8) for _ in range(300))}
    for bit in bits:
        (path / name).write_bytes(flipped(content, bit))
        with pytest.raises(FlopwiseError, match="damaged") as caught:
            load(path)
        assert str(path / name) in caught.value.what
        assert "step-00000001" in (caught.value.hint or "")
    (path / name).write_bytes(content)
    check_step(load(path))


@pytest.mark.parametrize("name", FILES)
def test_any_cut_file_is_found_without_reading_tensors(name: str, tmp_path: Path) -> None:
    path = save_step(tmp_path, 2)
    content = (path / name).read_bytes()
    for size in {0, 1, 7, 8, 12, 76, 77, len(content) // 2, len(content) - 1} & set(range(len(content))):
        (path / name).write_bytes(content[:size])
        assert latest(tmp_path) is None
        with pytest.raises(FlopwiseError, match=f"{name} is damaged") as caught:
            load(path)
        assert "begin a new run" in (caught.value.hint or "")
    (path / name).write_bytes(content + b" ")
    with pytest.raises(FlopwiseError, match=f"{name} is damaged"):
        load(path)
    (path / name).unlink()
    with pytest.raises(FlopwiseError, match=r"(?s)is damaged.*missing"):
        load(path)
    (path / name).mkdir()
    with pytest.raises(FlopwiseError, match="is damaged"):
        load(path)


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """As another program would write it, with a seal that holds."""
    state = json.loads((path / STATE).read_text())
    change(state)
    rest = json.dumps({**state, "seal": "0" * 64}, indent=2).encode()[len(module.SEAL_START) + 64 :]
    (path / STATE).write_bytes(module.SEAL_START + hashlib.sha256(rest).hexdigest().encode() + rest)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.update(format=3), "has format 3"),
        (lambda state: state.pop("format"), "has format null"),
        (lambda state: state.pop("position"), "position"),
        (lambda state: state.update(step="many"), "step"),
        (lambda state: state["training"].update(steps=0), "cannot have 0 steps"),
        (lambda state: state["files"].pop(WEIGHTS), "lists the files"),
        (lambda state: state["files"].update({"../../secret": state["files"][WEIGHTS]}), "lists the files"),
    ],
)
def test_states_that_cannot_be_are_told(change: Callable[[dict[str, Any]], object], told: str, tmp_path: Path) -> None:
    path = save_step(tmp_path, 2)
    reseal(path, lambda state: state)
    check_step(load(path))
    reseal(path, change)
    with pytest.raises(FlopwiseError) as caught:
        load(path)
    assert told in str(caught.value) and caught.value.hint
    assert latest(tmp_path) is None


def test_a_checksum_does_not_make_a_file_one_of_tensors(tmp_path: Path) -> None:
    path = save_step(tmp_path, 2)
    (path / WEIGHTS).write_bytes(b"\x80\x04nothing of the kind")
    digest = hashlib.sha256((path / WEIGHTS).read_bytes()).hexdigest()
    size_bytes = (path / WEIGHTS).stat().st_size
    reseal(path, lambda state: state["files"].update({WEIGHTS: {"size_bytes": size_bytes, "sha256": digest}}))
    with pytest.raises(FlopwiseError, match=f"{WEIGHTS} is damaged"):
        load(path)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError, match="there is no checkpoint"):
        load(tmp_path / "step-00000001")


def test_what_a_checkpoint_is_of_must_match() -> None:
    state = a_state(3)
    same: dict[str, Any] = {
        "model": {**state.model, "name": "renamed", "shape": (3, 5)},
        "data": {"fingerprint": "ab12", "tokens": 1000, "source": "moved"},
        "precision": "bf16",
        "batch_sequences": 8,
        "sequence_tokens": 128,
        "training": replace(state.training, steps=500),
    }
    check_matches(state, **same)
    check_matches(state, **{**same, "training": None})
    for changed, told, then, now in (
        ({"precision": "fp32"}, "precision", "'bf16'", "'fp32'"),
        ({"training": replace(state.training, optimizer="lion")}, "training: optimizer", "'adamw'", "'lion'"),
        ({"batch_sequences": 16}, "batch_sequences", "8", "16"),
        ({"sequence_tokens": 64}, "sequence_tokens", "128", "64"),
        ({"model": {**state.model, "layers": 3}}, "model: layers", "2", "3"),
        ({"model": {**state.model, "experts": 8}}, "model: experts", "null", "8"),
        ({"data": {"fingerprint": "cd"}}, "data: fingerprint", "'ab12'", "'cd'"),
        ({"training": replace(state.training, seed=1)}, "training: seed", "0", "1"),
    ):
        with pytest.raises(FlopwiseError, match=told) as caught:
            check_matches(state, **{**same, **changed})
        assert caught.value.why == f"{then} in the checkpoint, {now} now" and caught.value.hint
    bare = replace(state, data={"files": 2})
    with pytest.raises(FlopwiseError, match="data: files"):
        check_matches(bare, **{**same, "data": {"files": 3}})


def poisoned_step(folder: Path, step: int, keep: int) -> Path:
    weights, optimizer = tensors_of(step)
    weights["b.weight"] = weights["b.weight"].clone().index_fill_(0, torch.tensor([11]), math.nan)
    return save(folder, weights=weights, optimizer=optimizer, state=a_state(step), config=None, keep=keep)


@pytest.mark.parametrize("keep", [1, 2])
def test_one_that_is_not_finite_takes_no_place(keep: int, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step, keep)
    for step in (4, 5):
        bad = poisoned_step(tmp_path, step, keep)
        assert latest(tmp_path) == tmp_path / "checkpoints" / "step-00000003"
        assert [found.step for found in checkpoints(tmp_path) if not found.problem] == [3, 2][:keep]
    assert load(bad).state.not_finite == ("b.weight",)
    assert "is not finite: NaN or infinity in b.weight" in checkpoints(tmp_path)[0].problem
    # Good ones that follow push out the good ones from before, and what lies between with them.
    for step in range(6, 6 + keep):
        save_step(tmp_path, step, keep)
    assert [found.step for found in checkpoints(tmp_path)] == [7, 6][-keep:]


def test_where_none_is_good_all_are_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        poisoned_step(tmp_path, step, 1)
    assert names(tmp_path) == ["step-00000001", "step-00000002"] and latest(tmp_path) is None


def test_bad_numbers_are_found_in_every_piece_and_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 1000)
    fine = {f"fine {dtype}": torch.ones(900).to(dtype) for dtype in DTYPES}
    assert (
        load(save(tmp_path, weights=fine, optimizer=fine, state=a_state(1), config=None, keep=1)).state.not_finite == ()
    )
    for dtype in (found for found in DTYPES if found.is_floating_point):
        for where in (0, 499, 899):
            numbers = torch.ones(900)
            numbers[where] = math.nan
            state = replace(a_state(1), not_finite=("eval_loss",))
            path = save(
                tmp_path,
                weights={**fine, "a": numbers.to(dtype).view(30, 30).t()},
                optimizer={},
                state=state,
                config=None,
                keep=1,
            )
            assert load(path).state.not_finite == ("a", "eval_loss")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bad_numbers_of_a_device_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 1000)
    for dtype in (found for found in DTYPES if found.is_floating_point):
        tensors = {f"{where}": torch.ones(900) for where in (-1, 0, 499, 899)}
        for name, numbers in tensors.items():
            numbers[int(name)] = 1.0 if name == "-1" else math.nan
        weights = {name: numbers.cuda().to(dtype) for name, numbers in tensors.items()}
        path = save(tmp_path, weights=weights, optimizer={}, state=a_state(1), config=None, keep=1)
        assert load(path).state.not_finite == ("0", "499", "899")


def test_going_back_clears_away_what_dead_processes_left(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step, keep=5)
    parent = tmp_path / "checkpoints"
    for name in (".removed-step-00000001-5", ".step-00000002-77"):
        shutil.copytree(parent / "step-00000001", parent / name)
    drop_later(tmp_path, 1)
    assert sorted(path.name for path in parent.iterdir()) == [".lock", "step-00000001"]
    drop_later(tmp_path / "no run", 1)
    (parent / ".lock").unlink()
    (parent / ".lock").mkdir()
    with pytest.raises(FlopwiseError, match="nothing can be written to"):
        drop_later(tmp_path, 1)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    precious, lock = tmp_path / "precious", tmp_path / "checkpoints" / ".lock"
    precious.write_text("keep me")
    lock.unlink()
    lock.symlink_to(precious)
    for attempt in (lambda: save_step(tmp_path, 2), lambda: drop_later(tmp_path, 1)):
        with pytest.raises(FlopwiseError) as caught:
            attempt()
        assert "it is a link" in str(caught.value.why)
    assert precious.read_text() == "keep me" and names(tmp_path) == ["step-00000001"]


def test_checkpoints_lie_under_any_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run \xff")
    folder.mkdir()
    path = save_step(folder, 3)
    assert latest(folder) == path
    check_step(load(path))
