"""Descriptions from and to files: checks, messages, atomic writes."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.core.catalog import ROOT, hardware_names, load_hardware, load_model, model_names
from flopwise.core.errors import FlopwiseError, nearest
from flopwise.core.files import decode, plain, read_table, to_json, to_toml, write_whole
from flopwise.core.hardware import Hardware
from flopwise.core.lstm import Lstm
from flopwise.core.model import ARCHITECTURES
from flopwise.core.transformer import Transformer

from .strategies import transformers


@pytest.mark.parametrize("name", model_names())
def test_models_are_written_and_read_back_equal(name: str, tmp_path: Path) -> None:
    model = load_model(name)
    architecture = "lstm" if isinstance(model, Lstm) else "transformer"
    for text, ending in ((to_toml, "toml"), (to_json, "json")):
        path = tmp_path / f"mine.{ending}"
        write_whole(path, text({"architecture": architecture, **plain(model)}))
        assert load_model(str(path)) == model


@pytest.mark.parametrize("name", hardware_names())
def test_hardware_is_written_and_read_back_equal(name: str, tmp_path: Path) -> None:
    hardware = load_hardware(name)
    path = tmp_path / "mine.toml"
    write_whole(path, to_toml(hardware))
    assert load_hardware(str(path)) == hardware


@given(transformers())
def test_any_model_survives_toml(model: Transformer) -> None:
    assert decode(tomllib.loads(to_toml(model)), Transformer, "text") == model


def test_names_are_found_whatever_their_case() -> None:
    assert load_model("Llama-3-8B").name == "llama-3-8b"
    assert load_hardware("H100-SXM").name == load_hardware("h100").name == "h100-sxm"


def message(call: Any, *arguments: Any) -> FlopwiseError:
    with pytest.raises(FlopwiseError) as caught:
        call(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("name", "meant"), [("lama-3-8b", "llama-3-8b"), ("llama3-8b", "llama-3-8b"), ("mpt7b", "mpt-7b")]
)
def test_unknown_model_is_answered_with_the_nearest(name: str, meant: str) -> None:
    error = message(load_model, name)
    assert meant in str(error.why)
    assert "flopwise ls models" in str(error.hint)


def test_unknown_hardware_is_an_error_and_never_another_card() -> None:
    error = message(load_hardware, "h10-sxm")
    assert "h100-sxm" in str(error.why)
    assert "flopwise ls hardware" in str(error.hint)


def llama_table() -> dict[str, Any]:
    return read_table(ROOT / "models" / "llama-3-8b.toml")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": "32"}, ["layers"]),
        ({"layers": 0}, ["layers", "at least 1"]),
        ({"layers": -3}, ["layers", "-3"]),
        ({"hidden": 2**40}, ["hidden", "too large"]),
        ({"hidden": 10**30}, ["hidden"]),
        ({"heads": 33}, ["33"]),
        ({"kv_heads": 5}, ["key-value heads", "kv_heads = 4"]),
        ({"head_dim": 3}, ["even"]),
        ({"hiden": 4}, ["hiden", "hidden"]),
        ({"positions": "sideways"}, ["positions"]),
        ({"tied": 1}, ["tied"]),
        ({"experts": 8, "experts_per_token": 9}, ["9 of 8"]),
        ({"experts": -1}, ["negative"]),
        ({"head": "classifier"}, ["labels"]),
        ({"window": 0}, ["window"]),
        ({"layers": 3.5}, ["layers"]),
        ({"architecture": "rnn"}, ["architecture"]),
    ],
)
def test_impossible_models_are_answered(change: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**llama_table(), **change}))
    error = message(load_model, str(path))
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize("missing", ["layers", "hidden", "vocab", "name", "architecture"])
def test_missing_fields_are_named(missing: str, tmp_path: Path) -> None:
    table = llama_table()
    del table[missing]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(table))
    assert missing in str(message(load_model, str(path)))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("broken.toml", b"layers = = 3", ["not valid TOML"]),
        ("broken.json", b"{", ["not valid JSON"]),
        ("list.json", b"[1, 2]", ["does not hold a table"]),
        ("binary.toml", b"\xff\xfe\x00", ["not text"]),
        ("empty.toml", b"", ["not the description of a model"]),
        ("deep.json", b"[" * 100_000, ["not valid JSON"]),
        ("other.json", b'{"model_type": "mamba"}', ["mamba"]),
    ],
)
def test_unreadable_files_are_answered(name: str, content: bytes, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = message(load_model, str(path))
    assert all(word in str(error) for word in words)


def test_missing_file_folder_and_oversized_file(tmp_path: Path) -> None:
    assert "no file" in str(message(load_model, str(tmp_path / "gone.toml")))
    assert "config.json" in str(message(load_model, str(tmp_path)))
    large = tmp_path / "weights.json"
    with large.open("wb") as stream:
        stream.truncate(2**30)
    assert "too large" in str(message(load_model, str(large)))
    assert str(message(load_model, "a\0b.toml"))


def test_folder_with_a_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(str(folder))
    assert (model.name, model.layers, model.hidden) == ("my-llama", 2, 64)
    assert load_model(str(folder / "config.json")) == model
    assert load_model(str(folder), {"layers": 5}).layers == 5


def test_hardware_facts_need_their_source(tmp_path: Path) -> None:
    table = plain(load_hardware("h200"))
    del table["sources"]["datasheet"]
    path = tmp_path / "bad.toml"
    path.write_text(to_toml(table))
    assert "datasheet" in str(message(load_hardware, str(path)))


@pytest.mark.parametrize(
    ("key", "value"),
    [("value", -1.0), ("value", float("nan")), ("value", float("inf")), ("value", "fast"), ("speed", 3.0)],
)
def test_impossible_facts_are_answered(key: str, value: object, tmp_path: Path) -> None:
    table = plain(load_hardware("h200"))
    table["device"]["peak_flops"]["bf16"][key] = value
    path = tmp_path / "bad.toml"
    path.write_text(to_toml(table))
    message(load_hardware, str(path))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(field=st.sampled_from([field.name for field in dataclasses.fields(Transformer)]), value=json_values)
def test_any_value_in_any_field_of_a_model_decodes_or_is_answered(field: str, value: object) -> None:
    table = {key: item for key, item in llama_table().items() if key != "architecture"}
    try:
        decode({**table, field: value}, ARCHITECTURES["transformer"], "text")
    except FlopwiseError as error:
        assert error.what


@settings(max_examples=200)
@given(data=st.data())
def test_any_value_anywhere_in_hardware_decodes_or_is_answered(data: st.DataObject) -> None:
    table = plain(load_hardware("a100-80gb"))
    place: Any = table
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
        else:
            place[key] = data.draw(json_values)
            break
    try:
        decode(table, Hardware, "text")
    except FlopwiseError as error:
        assert error.what


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.toml"
    write_whole(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FlopwiseError, match="cannot write"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.toml"]


def test_nearest_prefers_the_closest() -> None:
    assert nearest("llama-3-8", ["llama-3-8b", "gpt2", "llama-3-70b"])[0] == "llama-3-8b"
    assert nearest("xyzzy", ["llama-3-8b"]) == []
