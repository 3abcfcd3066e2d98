"""Files that would train something else than is meant: each is told with what, why and hint, without torch."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from gzip import compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.train.data_checks import check_data
from flopwise.train.origin import choose_tokenizer
from flopwise.train.request import TrainRequest
from tests.support.data_files import byte_pair_tokenizer, json_lines, text_file

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}
TEXT = "text that is worth reading\n" * 20


def weights(folder: Path, *, tokenizer: bool = True, **config: Any) -> Path:
    """A folder that looks like one of weights; nothing that is refused here reads them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    if tokenizer:
        byte_pair_tokenizer(folder / "tokenizer.json")
    return folder


def model(folder: Path, **config: Any) -> TrainRequest:
    return TrainRequest(model=str(weights(folder / "model", **config)), data=(str(text_file(folder / "a.txt", TEXT)),))


def data(path: Path, content: bytes, **request: Any) -> TrainRequest:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return TrainRequest(data=(str(path),), **request)


def folder_of(folder: Path, files: dict[str, bytes]) -> TrainRequest:
    for name, content in files.items():
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return TrainRequest(data=(str(folder / "data"),))


def numpy_file(folder: Path) -> TrainRequest:
    np.save(folder / "a.npy", np.arange(99))
    return TrainRequest(data=(str(folder / "a.npy"),))


def zip_file(folder: Path) -> TrainRequest:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("a.txt", TEXT)
    return TrainRequest(data=(str(folder / "a.zip"),))


def only_bin(folder: Path) -> TrainRequest:
    asked = model(folder)
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")
    return asked


def other_tokenizer(name: str) -> Callable[[Path], TrainRequest]:
    def make(folder: Path) -> TrainRequest:
        asked = model(folder, tokenizer=False)
        (folder / "model" / name).write_bytes(b"anything")
        return asked

    return make


def cut_index(folder: Path) -> TrainRequest:
    asked = model(folder)
    places = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "../outside.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(places))
    return asked


def lost_shard(folder: Path) -> TrainRequest:
    asked = model(folder)
    places = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(places))
    return asked


def rows(folder: Path, *records: object, **request: Any) -> TrainRequest:
    return TrainRequest(data=(str(json_lines(folder / "rows.jsonl", records)),), **request)


def pairs(folder: Path, row: object) -> TrainRequest:
    return rows(folder, row, task="dpo")


PAIR = {"chosen": "yes", "rejected": "no"}
TOKENS = np.random.default_rng(0).integers(0, 50_000, 4000).astype("<u2").tobytes()
LETTERS = np.random.default_rng(0).integers(32, 127, 4000).astype("<u2").tobytes()
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "architectures": ["GPT2LMHeadModel"]}

WRONG: dict[str, tuple[Callable[[Path], TrainRequest], str]] = {
    "rope that is not computed": (
        lambda f: model(f, rope_scaling={"rope_type": "spiral", "factor": 4.0}),
        "another network",
    ),
    "nearly a gelu": (lambda f: model(f, hidden_act="gelu_10"), "another network"),
    "scores by layer": (lambda f: model(f, **GPT2, scale_attn_by_inverse_layer_idx=True), "another network"),
    "weights in .bin": (only_bin, "has weights that are not read: pytorch_model.bin"),
    "sentencepiece": (other_tokenizer("tokenizer.model"), "tokenizer.model is a tokenizer of a kind that is not read"),
    "tekken": (other_tokenizer("tekken.json"), "tekken.json is a tokenizer of a kind that is not read"),
    "vocabulary": (other_tokenizer("vocab.txt"), "vocab.txt is a tokenizer of a kind that is not read"),
    "no tokenizer": (lambda f: model(f, tokenizer=False), "has weights and no tokenizer.json"),
    "index that leads out": (cut_index, "names no files of weights"),
    "shard that is missing": (lost_shard, "lacks model-2.safetensors"),
    "hub name": (lambda _: TrainRequest(model="nobody/never-fetched"), "hf download nobody/never-fetched"),
    "hub tokenizer": (lambda _: TrainRequest(tokenizer="nobody/never-fetched"), "hf download nobody/never-fetched"),
    "gzip": (lambda f: data(f / "a.txt", compress(TEXT.encode())), "it begins as a gzip file does"),
    "zlib": (lambda f: data(f / "a.txt", zlib.compress(TOKENS)), "is no text"),
    "zip": (zip_file, "it begins as a zip archive does"),
    "numpy": (numpy_file, "it begins as an array of NumPy's does"),
    "tokens of nanoGPT": (lambda f: data(f / "train.bin", TOKENS), "is no text"),
    "letters of nanoGPT": (lambda f: data(f / "train.bin", LETTERS), "of its bytes are 0"),
    "tokens of Megatron": (lambda f: data(f / "a.idx", b"MMIDIDX\0\0" + TOKENS), "it begins as an index of Megatron's"),
    "UTF-16": (lambda f: data(f / "a.txt", TEXT.encode("utf-16")), "iconv -f utf-16"),
    "Latin-1": (lambda f: data(f / "a.txt", "fünf Körbe\n".encode("latin1") * 9), "iconv -f latin1"),
    "pickle": (lambda f: data(f / "a.pkl", b"\x80\x04\x95\0\0\0\0\0\0\0" + TOKENS), "is no text"),
    "folder of images": (lambda f: folder_of(f, {"a.txt": b"hi", "b.png": TOKENS}), "most of"),
    "folder of binaries": (lambda f: folder_of(f, {"README.md": b"hi", "data/a.mds": TOKENS}), "most of"),
    "folder of nothing": (lambda f: folder_of(f, {"a.mds": TOKENS}), "it holds files of other kinds: .mds"),
    "no object": (lambda f: rows(f, ["a"]), "is not an object"),
    "conversations for bytes": (lambda f: rows(f, {"messages": []}), "bytes has no chat template"),
    "Parquet by name alone": (lambda f: data(f / "a.parquet", TOKENS), "is no Parquet file"),
    "Parquet as text": (lambda f: data(f / "a.txt", b"PAR1" + TOKENS), "it begins as a Parquet file does"),
    "gzip that is cut": (lambda f: data(f / "a.jsonl.gz", compress(TEXT.encode())[:12]), "cannot be read"),
    "gzip by name alone": (lambda f: data(f / "a.jsonl.gz", TEXT.encode()), "cannot be read"),
    "JSON of one number": (lambda f: data(f / "a.json", b"3"), "holds no rows"),
    "seen never": (lambda f: TrainRequest(data=(f"{text_file(f / 'a.txt', TEXT)}:0",)), "is seen 0 times"),
    "other columns": (lambda f: rows(f, {"question": "a"}), "there is no column 'text'"),
    "pairs as text": (lambda f: rows(f, PAIR), "the task is no comparison"),
    "pairs of one": (lambda f: pairs(f, {"prompt": "a", "chosen": "b"}), "rows have no rejected"),
    "a question that is not read": (lambda f: pairs(f, PAIR | {"question": "a"}), "call question prompt"),
    "answers to nothing": (lambda f: pairs(f, PAIR), "the answers do not begin alike"),
    "an answer and a conversation": (
        lambda f: pairs(f, {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}),
        "two texts, or two lists of messages",
    ),
    "asked in messages, answered in texts": (
        lambda f: pairs(f, PAIR | {"prompt": [{"role": "user", "content": "a"}]}),
        "what was asked is none",
    ),
    "answers that are numbers": (lambda f: pairs(f, {"chosen": 1, "rejected": 2}), "two texts, or two lists"),
    "answers by nobody": (
        lambda f: pairs(f, {side: [{"role": "robot", "content": side}] for side in ("chosen", "rejected")}),
        "nobody is called 'robot'",
    ),
    "conversations without a template": (
        lambda f: pairs(f, {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}),
        "has no chat template",
    ),
    "a text to compare": (
        lambda f: TrainRequest(data=(str(text_file(f / "a.txt", TEXT)),), task="dpo"),
        "holds no rows",
    ),
    "two columns of a name": (
        lambda f: TrainRequest(data=(str(text_file(f / "a.csv", "text,text\na,b\n")),)),
        "two columns called 'text'",
    ),
    "no pairs at all": (lambda _: TrainRequest(task="dpo"), "no pairs to compare"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_why_and_what_to_do_are_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    make, words = WRONG[name]
    with pytest.raises(FlopwiseError) as told:
        check_data(make(tmp_path))
    error = told.value
    assert error.what and error.why and error.hint and words in str(error)
    # Whoever follows the hint of a binary must not train on it as text.
    assert "iconv" not in str(error) or name in ("UTF-16", "Latin-1")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a process says that has gone through all of them."""
    folder = tmp_path_factory.mktemp("wrong")
    requests = []
    for number, (make, _) in enumerate(WRONG.values()):
        (folder / str(number)).mkdir()
        asked = make(folder / str(number))
        requests.append({name: getattr(asked, name) for name in ("model", "data", "tokenizer", "task")})
    lines = (
        "import json, sys",
        "from flopwise.base.errors import FlopwiseError",
        "from flopwise.train.data_checks import check_data",
        "from flopwise.train.request import TrainRequest",
        "told = 0",
        "for asked in json.loads(sys.stdin.read()):",
        "    try: check_data(TrainRequest(**asked | {'data': tuple(asked['data'])}))",
        "    except FlopwiseError: told += 1",
        "print(told, 'torch' in sys.modules)",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    yield subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, check=True).stdout


def test_torch_is_not_needed_to_tell(imported: str) -> None:
    assert imported.split() == [str(len(WRONG)), "False"]


def test_what_is_right_passes(tmp_path: Path) -> None:
    check_data(model(tmp_path))
    begun = tmp_path / "model"
    # The same weights in their makers' form, and an adapter: neither is read.
    (begun / "consolidated.safetensors").write_bytes(b"")
    (begun / "adapter_model.safetensors").write_bytes(b"")
    asked = TrainRequest(model=str(begun))
    check_data(asked)
    assert choose_tokenizer(asked, begun) == str(begun / "tokenizer.json")
    # Bytes, if they are meant.
    (begun / "tokenizer.json").unlink()
    meant = TrainRequest(model=str(begun), tokenizer="bytes")
    check_data(meant)
    assert choose_tokenizer(meant, begun) == "bytes"
    check_data(TrainRequest(model=str(begun), from_scratch=True))


def test_a_models_own_tokenizer_is_taken_where_its_weights_are_drawn(tmp_path: Path) -> None:
    model(tmp_path)
    begun = tmp_path / "model"
    anew = TrainRequest(model=str(begun), from_scratch=True)
    assert choose_tokenizer(anew, None) == str(begun / "tokenizer.json")
    assert choose_tokenizer(replace(anew, tokenizer="bytes"), None) == "bytes"
    assert choose_tokenizer(replace(anew, resume="last"), None) is None
    (begun / "tokenizer.json").unlink()
    assert choose_tokenizer(anew, None) is None
