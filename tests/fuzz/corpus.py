"""What is damaged: files of every kind that flopwise reads, and the command lines that read them."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from flopwise.catalog.load import THIS_CPU
from flopwise.profile.measure.this_machine import find_hardware, this_cpu
from tests.cli.test_cli_fuzz import answered
from tests.fuzz.case import HERE, Case, final_weights
from tests.fuzz.mutate import damaged, odd_words
from tests.profile.test_memory_snapshot import snapshot
from tests.profile.test_ncu import LAUNCHES, long_form, wide_form
from tests.profile.test_nsys import export
from tests.support.data_files import LINES, byte_pair_tokenizer, word_tokenizer
from tests.support.run_stores import make_store

DATA = Path(__file__).parent.parent / "data"
CATALOG = Path(__file__).parent.parent.parent / "src" / "flopwise" / "catalog"

TINY = """architecture = "transformer"
name = "tiny"
title = "tiny"
source = "test"
layers = 1
hidden = 16
heads = 2
kv_heads = 1
ffn = 24
vocab = 320
context = 64
tied = true
"""
CONFIGS: tuple[dict[str, Any], ...] = (
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320, "n_positions": 128},
    {
        "model_type": "bert",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
    },
)
SWEEP = """[axes]
model = "gpt2,bert-base"
on = ["h200"]
seq = "512-2k*2"
batch = [8, 16]
precision = "bf16"
"""
WORDS = (
    "predict llama-3-8b --on h200 --seq 8k --batch 64 --precision bf16-mixed --recompute full -o json",
    "predict llama-3-8b,gpt2 --on h200,h100-sxm --gpus 1-8*2 --seq 1k,2k --micro 1 -o md",
    "predict mixtral-8x7b --on h100-sxm --gpus 16 --parallel dp2,tp8 --stack torchtitan --set layers=4",
    "plan gpt2 --on rtx-4090 --seq 1k --batch 16 --device-mem 8GiB --host-mem 16GiB --clip -o json",
    "plan llama-3-8b --on h100-sxm --gpus 8 --seq 4k --batch-tokens 1M --offload -o csv",
    "sweep --model gpt2 --on h200 --seq 512,1k --batch 8,16 --gpus 1,2 --dry-run",
    "sweep --model mpt-125m --on h200,a100 --seq 512-2k*2 --predict -o csv",
    "ls models",
    "ls hardware -o json",
    "ls stacks",
    "ls runs",
    "ls sweeps",
    "show llama-3-8b",
    "show h200 -o json",
    "profile show nothing.json --against 3",
    "why nothing",
    "report --price 3 --sort mfu",
    "compare a b",
    "export plan.toml --to torchtitan",
    "design gpt2 --power 300W",
    "validate nanotron",
    "env -o json",
    "train tiny.toml --steps 1 --batch 2 --device gpu",
    "train --resume 7 --steps 3",
    "serve --port 99999999",
)
TRAIN_LINE = "train tiny.toml --device cpu --seq 16 --batch 2 --precision fp32 --store runs"
TRAIN = TRAIN_LINE.split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Seed:
    """A folder that is whole, and what is run in it."""

    name: str
    files: dict[str, bytes]
    commands: list[list[str]]
    targets: tuple[str, ...]
    """Files of which one is damaged; none: the words are."""
    ends_as: str | None = None

    def case(self, chance: Random) -> Case:
        """With something damaged."""
        if not self.targets:
            return Case(self.name, self.files, [odd_words(words, chance) for words in self.commands])
        target = chance.choice(self.targets)
        content = damaged(self.files[target], chance)
        return Case(self.name, {**self.files, target: content}, self.commands, self.ends_as)


def measured_once() -> AbstractContextManager[object]:
    """While it is entered, trainings need not measure the machine each for itself."""
    found = this_cpu()
    return patch(
        "flopwise.train.hardware.find_hardware", lambda name: found if name == THIS_CPU else find_hardware(name)
    )


def seeds(scratch: Path) -> list[Seed]:
    """The corpus. `scratch` is a folder of its own, in which some of it is made, with commands too."""
    makers: tuple[Callable[[Path], Iterator[Seed]], ...] = (
        *(_words, _descriptions, _plans, _profiles, _results, _stores, _training_inputs, _trainings),
    )
    found: list[Seed] = []
    for maker in makers:
        folder = scratch / maker.__name__
        folder.mkdir(parents=True)
        found += maker(folder)
        shutil.rmtree(folder)
    return found


def _seed(name: str, files: dict[str, bytes], *lines: str, targets: tuple[str, ...] = ()) -> Seed:
    return Seed(name=name, files=files, commands=[line.split() for line in lines], targets=targets or tuple(files))


def _words(_: Path) -> Iterator[Seed]:
    for line in WORDS:
        yield Seed(name="words", files={"tiny.toml": TINY.encode()}, commands=[line.split()], targets=())


def _descriptions(_: Path) -> Iterator[Seed]:
    for name in ("llama-3-8b", "mixtral-8x7b", "bert-base", "lstm-lm"):
        content = (CATALOG / "models" / f"{name}.toml").read_bytes()
        yield _seed("model", {"m.toml": content}, "show m.toml", "predict m.toml --on h200 --seq 64 -o json")
    yield _seed("model", {"m.toml": TINY.encode()}, "plan m.toml --on h200 --seq 64 --batch 4", "show m.toml -o json")
    for name in ("h200", "rtx-4090", "trn1"):
        content = (CATALOG / "hardware" / f"{name}.toml").read_bytes()
        yield _seed(
            "hardware", {"h.toml": content}, "show h.toml", "predict gpt2 --on h.toml", "plan gpt2 --on h.toml --seq 64"
        )
    for path in sorted((CATALOG / "stacks").glob("*.toml"))[:2]:
        yield _seed("stack", {"s.toml": path.read_bytes()}, "predict gpt2 --on h100-sxm --gpus 8 --stack s.toml")
    for config in CONFIGS:
        content = json.dumps(config).encode()
        yield _seed(
            "config", {"config.json": content}, "show config.json", "predict . --on h200", "plan . --on h200 --seq 64"
        )
    yield _seed("sweep", {"s.toml": SWEEP.encode()}, "sweep s.toml --dry-run", "sweep s.toml --predict -o csv")


def _plans(folder: Path) -> Iterator[Seed]:
    one = "plan gpt2 --on h200 --seq 512 --batch 8 --device-mem 4GiB --host-mem 8GiB -w"
    several = "plan gpt2 --on h100-sxm --gpus 8 --seq 512 --batch 64 -w"
    for name, line in (("one", one), ("several", several)):
        content = _made(folder / f"{name}.toml", [*line.split(), str(folder / f"{name}.toml")])
        lines = ["predict p.toml", "show p.toml", "export p.toml --to torchtitan", "export p.toml --to deepspeed"]
        yield _seed("plan", {"p.toml": content}, *lines, "train p.toml --steps 1 --device cpu --store runs")


def _made(path: Path, words: list[str]) -> bytes:
    code, _, err = answered(words)
    assert code == 0, err
    return path.read_bytes()


def _profiles(folder: Path) -> Iterator[Seed]:
    for path in sorted((DATA / "traces").glob("*.json.gz")):
        yield _seed("trace", {path.name: path.read_bytes()}, f"profile show {path.name} -o json", f"why {path.name}")
        trace = json.loads(gzip.decompress(path.read_bytes()))
        trace["traceEvents"] = trace["traceEvents"][:800]
        files = {"t.json": json.dumps(trace).encode()}
        yield _seed("trace", files, "profile show t.json", "profile show t.json -o md", "profile compare t.json t.json")
    for path in sorted((DATA / "neuron").iterdir()):
        files = {path.name: path.read_bytes()}
        yield _seed(
            "neuron", files, f"profile show {path.name}", f"profile show {path.name} -o native", f"why {path.name}"
        )
    for form in (long_form, wide_form):
        yield _seed("ncu", {"k.csv": form(LAUNCHES).encode()}, "profile show k.csv", "why k.csv")
    yield _seed("nsys", {"r.sqlite": export(folder / "r.sqlite").read_bytes()}, "profile show r.sqlite", "why r.sqlite")
    for protocol in (2, 5):
        files = {"s.pickle": pickle.dumps(snapshot(), protocol)}
        yield _seed("snapshot", files, "profile show s.pickle", "why s.pickle")


def _results(folder: Path) -> Iterator[Seed]:
    yield _seed("table", {"t.md": (DATA / "mpt_tables.md").read_bytes()[:20_000]}, "report t.md", "report t.md -o md")
    yield _seed(
        "table", {"t.csv": (DATA / "mpt_rows.csv").read_bytes()[:20_000]}, "report t.csv", "report t.csv -o json"
    )
    store = make_store(folder / "runs")
    for form in ("csv", "json"):
        code, out, err = answered(["report", "--store", str(store), "-o", form])
        assert code == 0, err
        lines = (
            f"report r.{form}",
            f"report r.{form} -o md",
            f"compare r.{form} r.{form}",
            f"report r.{form} -o html -w x.html",
        )
        yield _seed("results", {f"r.{form}": out.encode()}, *lines)


def _stores(folder: Path) -> Iterator[Seed]:
    make_store(folder / "runs", sweep="grid", profiled=True, steps=8)
    files = _contents(folder)
    lines = ("ls runs", "ls sweeps", "show 1", "why 1", "report", "report -o md", "report grid", "compare 1 2")
    own = tuple(name for name in files if "runs/000" in name or "sweep" in name or "cell" in name)
    yield _seed("store", files, *lines, "report -o html -w page.html", targets=own)


def _contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    # Where it was made is nobody's business: cases that are kept are read elsewhere.
    own = {bytes(folder): HERE, os.fsencode(sys.executable): b"python"}
    found = {}
    for path in files:
        content = path.read_bytes()
        for place, word in own.items():
            content = content.replace(place, word)
        found[str(path.relative_to(folder))] = content
    return found


def _training_inputs(folder: Path) -> Iterator[Seed]:
    rows = "".join(json.dumps({"text": line, "label": str(len(line) % 2)}) + "\n" for line in LINES * 4)
    table = "text,label\n" + "".join(f'"{line}",{len(line) % 2}\n' for line in LINES * 4)
    once = " ".join([*TRAIN, "--steps 1 --no-checkpoint"])
    for name, text in (("d.txt", "\n".join(LINES * 8)), ("d.jsonl", rows), ("d.csv", table)):
        files = {"tiny.toml": TINY.encode(), name: text.encode()}
        yield _seed("data", files, f"{once} --data {name}", targets=(name,))
    for maker in (byte_pair_tokenizer, word_tokenizer):
        files = {"tiny.toml": TINY.encode(), "d.txt": "\n".join(LINES * 8).encode()}
        files["tokenizer.json"] = maker(folder / "tokenizer.json").read_bytes()
        yield _seed("tokenizer", files, f"{once} --data d.txt --tokenizer tokenizer.json", targets=("tokenizer.json",))


def _trainings(folder: Path) -> Iterator[Seed]:
    """A run with two checkpoints, to be gone on with; its weights, as first ones; its cache."""
    (folder / "tiny.toml").write_text(TINY, "utf-8")
    (folder / "d.txt").write_text("\n".join(LINES * 8), "utf-8")
    before = Path.cwd()
    os.chdir(folder)
    places = patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")})
    places.start()
    try:
        settings = "--data d.txt --steps 4 --checkpoint-every 2 --schedule constant"
        _made(folder / "d.txt", [*TRAIN, *settings.split(" ")])
        whole = _contents(folder)
        resume = "train --resume last --steps 6 --store runs"
        _made(folder / "d.txt", resume.split())
        ends_as = final_weights(folder)
        inputs = {name: whole[name] for name in ("tiny.toml", "d.txt")}
        last = next(name for name in whole if name.endswith("step-00000004/model.safetensors")).rpartition("/")[0]
        weights = {f"w/{name}": whole[f"{last}/{name}"] for name in ("model.safetensors", "config.json")}
        first = [*TRAIN, *["--data", "d.txt", "--steps", "1", "--no-checkpoint", "--weights", "w"]]
        yield Seed(name="weights", files=inputs | weights, commands=[first], targets=tuple(weights))
        checkpoints = tuple(name for name in whole if "/checkpoints/" in name)
        yield Seed(
            name="checkpoint",
            files=whole,
            commands=[resume.split(), ["show", "last"]],
            targets=checkpoints,
            ends_as=ends_as,
        )
        kept = tuple(name for name in whole if name.startswith("runs/") and "/checkpoints/" not in name)
        yield Seed(name="run", files=whole, commands=[resume.split(), ["show", "last"], ["ls", "runs"]], targets=kept)
        caches = {name: content for name, content in whole.items() if name.endswith(".tokens")}
        yield Seed(name="cache", files=whole, commands=[resume.split()], targets=tuple(caches), ends_as=ends_as)
    finally:
        places.stop()
        os.chdir(before)
