"""Descriptions from and to files: checks, messages, atomic writes."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError, nearest
from flopwise.base.files import decode, plain, read_table, to_json, to_toml, write_whole
from flopwise.catalog.load import (
    ROOT,
    hardware_names,
    load_description,
    load_hardware,
    load_model,
    model_names,
    model_table,
)
from flopwise.setup.hardware import Hardware
from flopwise.work.model import ARCHITECTURES
from flopwise.work.transformer import Transformer
from tests.support.strategies import transformers


@pytest.mark.parametrize("name", model_names())
def test_models_are_written_and_read_back_equal(name: str, tmp_path: Path) -> None:
    model = load_model(name)
    for text, ending in ((to_toml, "toml"), (to_json, "json")):
        path = tmp_path / f"mine.{ending}"
        write_whole(path, text(model_table(model)))
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
        ({"experts": -1}, ["experts", "at least 1"]),
        ({"head": "classifier"}, ["labels"]),
        ({"window": 0}, ["window"]),
        ({"layers": 3.5}, ["layers"]),
        ({"architecture": "rnn"}, ["architecture"]),
        ({"architecture": ["transformer"]}, ["architecture is a list of 1"]),
        ({"experts": 2**31, "experts_per_token": 1}, ["experts", "too large"]),
        ({"experts_per_token": 2}, ["without experts"]),
        ({"token_types": -1}, ["token_types"]),
        ({"token_types": 2**31}, ["token_types", "too large"]),
        ({"labels": 0}, ["labels", "at least 1"]),
        ({"position_rows": 8}, ["learned"]),
        ({"activation": "sillu"}, ["activation", "did you mean silu"]),
        ({"name": ""}, ["cannot be called ''"]),
        ({"name": "  "}, ["cannot be called"]),
        ({"name": "two\nlines"}, [r"two\nlines"]),
        ({"name": "\x1b[31m"}, ["control characters"]),
    ],
)
def test_impossible_models_are_answered(change: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**llama_table(), **change}))
    error = message(load_model, str(path))
    assert error.hint
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
        ("digits.toml", b"layers = " + b"9" * 5000, ["not valid TOML"]),
        ("digits.json", b'{"layers": ' + b"9" * 5000 + b"}", ["not valid JSON"]),
        ("deep.toml", b"a = " + b"[" * 100_000, ["not valid TOML"]),
        ("json.txt", b'{"layers": }', ["not valid JSON"]),
        ("hardware.toml", b"[device]", ["describes hardware, not a model", "--on "]),
    ],
)
def test_unreadable_files_are_answered(name: str, content: bytes, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = message(load_model, str(path))
    assert error.hint
    assert all(word in str(error) for word in words)


def test_missing_file_folder_and_oversized_file(tmp_path: Path) -> None:
    assert "no file" in str(message(load_model, str(tmp_path / "gone.toml")))
    assert "config.json" in str(message(load_model, str(tmp_path)))
    large = tmp_path / "weights.json"
    with large.open("wb") as stream:
        stream.truncate(2**30)
    assert "too large" in str(message(load_model, str(large)))
    assert str(message(load_model, "a\0b.toml"))


def test_what_is_no_regular_file_is_answered_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), Path("/dev/urandom")):
        for load in (load_model, load_hardware):
            error = message(load, str(path))
            assert "not a file" in error.what
            assert error.hint
    # /proc/kmsg is called a regular file, and yet its reader waits for the kernel's next word. (Reading the real one
    # would take those words from the system's log.)
    monkeypatch.setattr(stat, "S_ISREG", lambda _: True)
    writer = os.open(pipe, os.O_RDWR)
    assert message(load_model, str(pipe)).why == "it has nothing to read yet"
    os.close(writer)


def test_names_that_no_file_system_takes_and_closed_folders_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no model" in message(load_model, "x" * 5000).what
    assert len(str(message(load_model, "x" * 5000))) < 500
    assert "cannot be read" in message(load_model, "./" + "x" * 5000).what

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    for load in (load_model, load_hardware):
        assert message(load, str(tmp_path / "closed.toml")).why == "Permission denied"


def test_byte_order_mark_and_suffix_do_not_matter(tmp_path: Path) -> None:
    model = load_model("llama-3-8b")
    text = to_json(model_table(model))
    for name, content in (("a.toml", text), ("b", text), ("c.json", f"\ufeff\n{text}")):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert load_model(tmp_path / name) == model


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
    assert load_model(folder) == model
    assert load_description(str(folder)) == model
    assert "describes a model, not hardware" in message(load_hardware, str(folder)).what
    printed = tmp_path / "printed.toml"
    printed.write_text(to_toml(model_table(model)))
    for change in ({"heads": 2}, {"hidden": 32, "heads": 8}, {"kv_heads": 4}, {"heads": 2, "kv_heads": 1}):
        assert load_model(printed, change) == load_model(folder, change)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "qwen3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("change", [{"heads": 8}, {"hidden": 512, "heads": 8}, {"layers": 2}])
def test_a_change_means_the_same_in_the_catalogue_and_in_the_printed_file(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "printed.toml"
    path.write_text(to_toml(model_table(load_model(name))))
    changed = load_model(name, change)
    assert load_model(path, change) == changed
    assert changed.name == "+".join([name, *(f"{key}={value}" for key, value in change.items())])


def test_a_changed_model_says_so_in_its_name() -> None:
    assert load_model("gpt2", {"tied": False}).name == "gpt2+tied=false"
    assert load_model("gpt2", {"layers": 2, "name": "mine"}).name == "mine"
    assert load_model("gpt2", {"title": "Another title"}).name == "gpt2"
    assert message(load_model, "llama-3-8b", {"layers": 0}).what.count("llama-3-8b") == 1


def test_a_model_is_told_from_hardware() -> None:
    assert "--on h100-sxm" in str(message(load_model, "H100-SXM").hint)
    assert "--on h100-sxm" in str(message(load_model, "h100").hint)
    assert "is a model" in message(load_hardware, "llama-3-8b").what
    assert "this-cpu" in str(message(load_hardware, "cpu").why)
    assert str(message(load_model, "gpt-3").why).startswith("did you mean gpt-3-175b")


def test_a_folder_called_like_a_device_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h100").mkdir()
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_hardware("h100").name == "h100-sxm"
    assert load_model("gpt2").name == "gpt2"
    assert "config.json" in message(load_model, "./gpt2").what
    assert "config.json" in message(load_model, Path("gpt2")).what


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
    error = message(load_hardware, str(path))
    assert "peak_flops" in error.what, "the place is told"
    assert error.hint


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
        assert error.hint


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
        assert error.hint


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


def test_a_link_stays_one_and_keeps_its_targets_permissions(tmp_path: Path) -> None:
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "told")
        assert os.read(reader, 100) == b"told" and stat.S_ISFIFO(pipe.stat().st_mode)
    finally:
        os.close(reader)


def test_a_folder_is_no_file_to_write(tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError, match="cannot write"):
        write_whole(tmp_path, "text")


def test_a_word_that_is_none_of_a_few_is_told_which_they_are() -> None:
    with pytest.raises(FlopwiseError, match="fetch") as caught:
        decode({"fetch": "never"}, Fetching, "plan.toml")
    assert caught.value.why == "it is one of 'by need', 'at once'"
    with pytest.raises(FlopwiseError) as caught:
        decode({"count": "three"}, Fetching, "plan.toml")
    assert caught.value.why is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetching:
    fetch: Literal["by need", "at once"] = "by need"
    count: int = 1
