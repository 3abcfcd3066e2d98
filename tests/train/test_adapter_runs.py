"""Runs that train adapters or some parts: what they save, how they go on, what merged models compute."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flopwise.base.errors import FlopwiseError
from flopwise.records.measurement import RunRecord
from flopwise.store.runs import read_steps
from flopwise.train.running import MERGED, run
from tests.support.tiny_folders import chat_folder

TEXT = "the wind blows where it lists, and nobody hears whence it comes. " * 40
LAYER = "base_model.model.model.layers.1."
SIDES = {
    # transformers' layers of the tiny Llama: inputs and outputs.
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (32, 16),
    "self_attn.v_proj": (32, 16),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (32, 48),
    "mlp.up_proj": (32, 48),
    "mlp.down_proj": (48, 32),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        (place / "a.txt").write_text(TEXT)
        chat_folder(place / "base")
        yield place


def trained(folder: Path, **asked: Any) -> tuple[RunRecord, Path]:
    request = {
        "model": str(folder / "base"),
        "device": "cpu",
        "steps": 4,
        "sequence_tokens": 32,
        "batch_sequences": 2,
        "learning_rate": 1e-2,
        "precision": "fp32",
        "data": (str(folder / "a.txt"),),
    }
    record = run(**{**request, "store": str(folder / "runs"), **asked})
    assert record.checkpoint is not None
    return record, folder / "runs" / record.id


def logits(network: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = network(torch.arange(20)[None] * 7 % 250).logits
    return result


def network_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder)


def test_a_checkpoint_is_peft_s(folder: Path) -> None:
    record, place = trained(folder, lora=4, lora_alpha=6.0, lora_on="q,v,down", rslora=True)
    saved = place / str(record.checkpoint)
    table = json.loads((saved / "adapter_config.json").read_text())
    assert (table["peft_type"], table["task_type"], table["r"], table["lora_alpha"]) == ("LORA", "CAUSAL_LM", 4, 6)
    assert table["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    assert table["use_rslora"] is True
    assert table["base_model_name_or_path"] == str(folder / "base")
    tensors = load_file(saved / "adapter_model.safetensors")
    chosen = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    assert {name for name in tensors if name.startswith(LAYER)} == {
        f"{LAYER}{module}.lora_{side}.weight" for module in chosen for side in "AB"
    }
    assert len(tensors) == 2 * 2 * len(chosen)
    for module in chosen:
        inputs, outputs = SIDES[module]
        assert tensors[f"{LAYER}{module}.lora_A.weight"].shape == (4, inputs)
        assert tensors[f"{LAYER}{module}.lora_B.weight"].shape == (outputs, 4)
        assert tensors[f"{LAYER}{module}.lora_B.weight"].any()
    assert not (saved / "config.json").exists()
    assert not (saved / "model.safetensors").exists()
    assert (saved / "tokenizer.json").is_file()


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_begin_as_nothing(folder: Path, dora: bool) -> None:
    plain, place = trained(folder, steps=1)
    tuned, beside = trained(folder, steps=1, lora=4, dora=dora)
    assert read_steps(beside)[0].loss == pytest.approx(read_steps(place)[0].loss, rel=1e-6)
    assert plain.measurement is not None
    assert tuned.measurement is not None


def test_dora_is_saved_and_merged_as_peft_has_it(folder: Path) -> None:
    """Over a folder's own weights: beginning with their rows' lengths, which are those of the merged model's rows."""
    record, place = trained(folder, lora=4, lora_alpha=6.0, lora_on="q,v,down", dora=True, merge=True, steps=6)
    losses = [step.loss for step in read_steps(place)]
    assert losses[-1] < losses[0]
    saved = place / str(record.checkpoint)
    table = json.loads((saved / "adapter_config.json").read_text())
    assert (table["use_dora"], table["use_rslora"]) == (True, False)
    tensors, base = load_file(saved / "adapter_model.safetensors"), load_file(folder / "base" / "model.safetensors")
    merged = load_file(place / MERGED / "model.safetensors")
    vectors = {name for name in tensors if name.endswith(".lora_magnitude_vector")}
    assert len(vectors) == 2 * 3
    for name in vectors:
        own = name.removesuffix(".lora_magnitude_vector")
        matrix = f"{own.removeprefix('base_model.model.')}.weight"
        began = torch.linalg.norm(base[matrix].float(), dim=1)
        assert tensors[name].shape == began.shape
        assert 0 < float((tensors[name] / began - 1).abs().max()) < 0.6
        whole = base[matrix].float() + 6.0 / 4 * tensors[f"{own}.lora_B.weight"] @ tensors[f"{own}.lora_A.weight"]
        expected = (tensors[name] / torch.linalg.norm(whole, dim=1))[:, None] * whole
        assert torch.allclose(merged[matrix].float(), expected, rtol=1e-5, atol=1e-6)
    _, begun = trained(folder, adapters=str(saved), steps=1, schedule="constant", warmup_steps=0)
    assert read_steps(begun)[0].loss < losses[0]
    again = load_file(begun / "checkpoints" / "step-00000001" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    (saved / "adapter_config.json").write_text(json.dumps(table | {"use_dora": False}))
    with pytest.raises(FlopwiseError, match="lora_magnitude_vector belongs to no adapter"):
        trained(folder, adapters=str(saved), steps=1)


def test_blocks_that_are_frozen_have_no_adapters(folder: Path) -> None:
    """As PEFT says it: by `layers_to_transform`, which is read again."""
    asked = {"lora": 4, "freeze": "embedding,blocks.0", "schedule": "constant", "warmup_steps": 0}
    record, place = trained(folder, merge=True, **asked)
    saved = place / str(record.checkpoint)
    table = json.loads((saved / "adapter_config.json").read_text())
    assert (table["layers_to_transform"], table["layers_pattern"]) == ([1], "layers")
    tensors = load_file(saved / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(SIDES)
    assert all(name.startswith(LAYER) for name in tensors)
    before, merged = (load_file(each / "model.safetensors") for each in (folder / "base", place / MERGED))
    assert all(torch.equal(merged[name], before[name]) for name in before if ".layers.1." not in name)
    assert not torch.equal(merged["model.layers.1.mlp.up_proj.weight"], before["model.layers.1.mlp.up_proj.weight"])
    again = run(resume=record.id, steps=5, store=str(folder / "runs"))
    assert again.state == "done"
    _, begun = trained(folder, adapters=str(saved), steps=1, schedule="constant", warmup_steps=0)
    assert read_steps(begun)[0].loss < read_steps(place)[0].loss
    next_one = begun / "checkpoints" / "step-00000001"
    assert json.loads((next_one / "adapter_config.json").read_text()) == table
    for changed, told in (([2], "no block 2 has adapters"), ("1", "are no blocks")):
        (saved / "adapter_config.json").write_text(json.dumps(table | {"layers_to_transform": changed}))
        with pytest.raises(FlopwiseError, match=told):
            trained(folder, adapters=str(saved), steps=1)


def test_adapters_of_another_model_are_refused_as_such(folder: Path, tmp_path: Path) -> None:
    table = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["query", "value"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(table))
    with pytest.raises(FlopwiseError, match="are not for base") as refused:
        trained(folder, adapters=str(tmp_path))
    assert "adapter_config.json" in (refused.value.hint or "") and "query" in (refused.value.why or "")


@pytest.mark.parametrize("dora", [False, True])
def test_a_run_goes_on_as_if_it_had_not_ended(folder: Path, dora: bool) -> None:
    whole, place = trained(folder, lora=4, dora=dora, steps=6, schedule="constant", warmup_steps=0)
    first, other = trained(folder, lora=4, dora=dora, steps=3, schedule="constant", warmup_steps=0)
    again = run(resume=first.id, steps=6, store=str(folder / "runs"))
    assert [step.loss for step in read_steps(other)] == [step.loss for step in read_steps(place)]
    one, two = (
        load_file(folder / "runs" / each.id / str(each.checkpoint) / "adapter_model.safetensors")
        for each in (whole, again)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_adapters_that_were_saved_are_gone_on_with(folder: Path) -> None:
    """By a new run, which begins where the other one's weights ended."""
    asked = {"lora": 4, "lora_alpha": 6.0, "lora_on": "attention", "schedule": "constant", "warmup_steps": 0}
    record, place = trained(folder, steps=3, **asked)
    saved = place / str(record.checkpoint)
    _, begun = trained(folder, adapters=str(saved), steps=1, schedule="constant", warmup_steps=0)
    tensors, again = (
        load_file(where / "adapter_model.safetensors") for where in (saved, begun / "checkpoints" / "step-00000001")
    )
    assert tensors.keys() == again.keys()
    table = json.loads((begun / "checkpoints" / "step-00000001" / "adapter_config.json").read_text())
    assert table == json.loads((saved / "adapter_config.json").read_text())
    first = read_steps(place)[0].loss
    # The first batch once more, after three steps that have learned of it.
    assert read_steps(begun)[0].loss < first
    for name in tensors:
        assert (again[name] - tensors[name]).abs().max() < 0.02
    for changed, told in (
        ({"lora_dropout": 0.1}, "not computed here"),
        ({"modules_to_save": ["lm_head"]}, "not computed here"),
        ({"modules_to_save": [["score"]]}, "not computed here"),
        ({"modules_to_save": "score"}, "not computed here"),
        ({"use_dora": True}, "there is no .*lora_magnitude_vector"),
        ({"target_modules": ["lm_head"]}, "no matrix of a block is called"),
    ):
        (saved / "adapter_config.json").write_text(json.dumps(table | changed))
        with pytest.raises(FlopwiseError, match=told):
            trained(folder, adapters=str(saved), steps=1)
    with pytest.raises(FlopwiseError, match="beside --lora"):
        trained(folder, adapters=str(saved), lora=4)
    with pytest.raises(FlopwiseError, match=r"holds no adapter_config\.json"):
        trained(folder, adapters=str(folder))


def test_a_merged_model_computes_what_its_parts_do(folder: Path) -> None:
    record, place = trained(folder, lora=4, lora_alpha=6.0, merge=True)
    tensors = load_file(place / str(record.checkpoint) / "adapter_model.safetensors")
    network = network_of(folder / "base")
    before = logits(network)
    by_name = dict(network.named_parameters())
    with torch.no_grad():
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            own = name.removeprefix("base_model.model.").removesuffix("lora_A.weight")
            change = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            by_name[f"{own}weight"].add_(change, alpha=6.0 / 4)
    found = logits(network_of(place / MERGED))
    assert torch.allclose(found, logits(network), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, before, rtol=1e-3, atol=1e-4)
    base = json.loads((folder / "base" / "config.json").read_text())
    assert json.loads((place / MERGED / "config.json").read_text()) == base
    assert (place / MERGED / "chat_template.jinja").is_file()


def test_peft_reads_it(folder: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    record, place = trained(folder, lora=4, lora_alpha=6.0, lora_on="attention", merge=True)
    network = peft.PeftModel.from_pretrained(network_of(folder / "base"), place / str(record.checkpoint))
    assert torch.allclose(logits(network), logits(network_of(place / MERGED)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_quantised_base_is_trained_over_and_kept(folder: Path, base: str) -> None:
    record, place = trained(folder, lora=4, base=base, steps=8)
    losses = [step.loss for step in read_steps(place)]
    assert losses[-1] < losses[0]
    assert str(record.plan["precision"]) == f"fp32,base={base}"
    again = run(resume=record.id, steps=9, store=str(folder / "runs"))
    assert again.state == "done"


def test_frozen_parts_are_saved_as_they_came(folder: Path) -> None:
    record, place = trained(folder, freeze="embedding,blocks.0", steps=3)
    before = load_file(folder / "base" / "model.safetensors")
    after = load_file(place / str(record.checkpoint) / "model.safetensors")
    assert before.keys() == after.keys()
    frozen = [name for name in before if "embed_tokens" in name or ".layers.0." in name]
    assert len(frozen) == 10
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert not any(torch.equal(before[name], after[name]) for name in before if name not in frozen)
    assert logits(network_of(place / str(record.checkpoint))).isfinite().all()
    resumed = run(resume=record.id, steps=4, store=str(folder / "runs"))
    assert resumed.state == "done"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"merge": True}, "without --lora"),
        ({"base": "nf4"}, "everything is trained"),
        ({"lora": 4, "freeze": "embedding"}, "--freeze embedding beside --lora"),
        ({"lora": 4, "freeze": "blocks"}, "none has adapters"),
        ({"lora": 4, "base": "nf3"}, "format of frozen weights"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(FlopwiseError, match=told) as error:
        trained(folder, **asked)
    assert error.value.hint
