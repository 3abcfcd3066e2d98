"""Adapters of every kind of family beside PEFT's rules on `transformers`' own classes: gradients, files, merging."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from flopwise.base.errors import FlopwiseError  # noqa: E402
from flopwise.engine.weights.adapter_files import Merged, adapter_config, from_peft, to_peft  # noqa: E402
from flopwise.engine.weights.checkpoint import WEIGHTS  # noqa: E402
from flopwise.engine.weights.huggingface import NAMES, from_huggingface  # noqa: E402
from flopwise.engine.weights.hybrid_families import HYBRIDS  # noqa: E402
from flopwise.setup.trained import TrainedWords  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.adapters import RESULTS  # noqa: E402
from flopwise.work.layer_names import LAYERS, layer_names, shortest_names  # noqa: E402
from flopwise.work.parameters import parameters_of  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.engine.test_zoo import (  # noqa: E402
    TOKENS,
    ZOO,
    batch_for,
    described,
    given,
    saved,
    their_loss,
    theirs,
    worst,
)
from tests.support.peft_like import add_adapters  # noqa: E402
from tests.support.training_plans import everything_stays, executor_for, first_gradients  # noqa: E402

RANK = 3
ASKED = {
    # As all-linear, but where a part says more.
    "phi3": "all-linear",
    "glm4": "all-linear",
    "gpt2": "all-linear",
    "gpt_neox": "query_key_value,dense",
    "gemma2": "all-linear",
    "olmo3": "attention",
    "cohere": "all-linear",
    "granite": "q_proj,v_proj",
    "phi": "dense,fc2",
    "starcoder2": "c_proj",
    "stablelm-parallel": "all-linear",
    "falcon-40b": "all-linear",
    "mpt": "all-linear",
    "gptj": "q_proj,fc_in",
    "opt": "all-linear",
    "mixtral": "all-linear",
    "qwen3_moe": "v_proj,down_proj",
    "olmoe": "all-linear",
    "gpt_oss": "all-linear",
    "glm4_moe": "all-linear",
    "qwen2_moe": "k,up,down",
    "deepseek_v3": "all-linear",
    "deepseek_v2": "q_proj,kv_a_proj_with_mqa,up_proj",
    "deepseek_v2-groups": "k,v,o,q,down",
    "bert-MaskedLM": "down",
    "roberta-MaskedLM": "all-linear",
    "distilbert-MaskedLM": "all-linear",
    "modernbert-MaskedLM": "all-linear",
    "bert-SequenceClassification": "all-linear",
    "roberta-SequenceClassification": "q,v",
    "electra-SequenceClassification": "all-linear",
    "distilbert-SequenceClassification": "all-linear",
    "modernbert-SequenceClassification": "attention",
}


def begun(name: str, folder: Path, **words: Any) -> tuple[Any, Transformer, dict[str, Tensor]]:
    """A network of transformers, our description with adapters, and the network's numbers under our names."""
    network = deepcopy(theirs(name))
    tensors = saved(network, folder)
    asked = {"lora": RANK, "lora_alpha": 5.0, "lora_on": ASKED[name], **words}
    model = TrainedWords(**asked).of(described(name, folder))
    assert isinstance(model, Transformer)
    return network, model, from_huggingface(model, tensors, TOKENS).tensors


WITH_MAGNITUDES = (
    "phi3",
    "gpt2",
    "gpt_neox",
    "gemma2",
    "phi",
    "mpt",
    "opt",
    "qwen2_moe",
    "bert-MaskedLM",
    "modernbert-SequenceClassification",
    "deepseek_v3",
)
"""Families that have DoRA too: a mixture's beside its attention."""
MIXTURES = ("qwen2_moe", "deepseek_v3")
ROUNDED = ("modernbert-MaskedLM", "distilbert-SequenceClassification")
"""Whose gradients in fp32 are off by more in transformers: the second's agree to 1e-13 in fp64, the first's loss there
is nearer to ours in fp32 than to its own."""


@pytest.mark.parametrize(
    ("name", "dora"), [*((name, False) for name in ASKED), *((name, True) for name in WITH_MAGNITUDES)]
)
def test_gradients_and_merged_weights_are_those_of_peft(name: str, dora: bool, tmp_path: Path) -> None:
    words: dict[str, Any] = {"dora": dora} | ({"lora_on": "attention"} if dora and name in MIXTURES else {})
    network, model, base = begun(name, tmp_path, **words)
    trained = add_adapters(network, adapter_config(model, None))
    assert sum(value.numel() for value in trained.values()) == sum(
        each.elements for each in parameters_of(model, TOKENS) if each.trained
    )
    batch = batch_for(model)
    loss = their_loss(network, batch)
    torch.autograd.backward(loss)
    ours = from_peft(model, {key: value.detach() for key, value in trained.items()})
    plan = everything_stays(model, sequence=TOKENS, sequences=2, precision="fp32", saves=("F",) * model.layers)
    executor = executor_for(plan, model, {**base, **ours})
    assert executor.step(batch, 0).loss == pytest.approx(float(loss.detach()), rel=3e-6)
    expected = {key: value.grad for key, value in trained.items() if value.grad is not None}
    # Of experts with few tokens, and of magnitudes, whose sums cancel, more is lost to rounding.
    limit = 1e-4 if name in ROUNDED else 4e-5 if dora or name == "deepseek_v3" else 2e-5
    assert worst(to_peft(model, first_gradients(executor)), expected)[0] < limit
    # Both directions of the files, and what is left of adapters when they are merged.
    again = to_peft(model, ours)
    assert again.keys() == trained.keys()
    assert all(torch.equal(again[key], trained[key]) for key in again)
    save_file({key: value.contiguous() for key, value in Merged(model, ours, base).items()}, tmp_path / WEIGHTS)
    merged = ZOO[name].kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        difference = merged(**given(batch)).logits - network(**given(batch)).logits
    if batch.lengths is not None:
        difference = difference[0]
    assert difference.abs().max() < 2e-4


@pytest.mark.parametrize(("name", "dora"), [("phi3", False), ("gpt_neox", False), ("phi3", True), ("gpt2", True)])
def test_fifty_steps_are_those_of_peft_and_torch(name: str, dora: bool, tmp_path: Path) -> None:
    network, model, base = begun(name, tmp_path, dora=dora)
    trained = add_adapters(network, adapter_config(model, None), deviation=0.05)
    ours = from_peft(model, {key: value.detach().clone() for key, value in trained.items()})
    training = Training(steps=50, learning_rate=2e-3, weight_decay=0.1, warmup_steps=5)
    plan = everything_stays(model, sequence=TOKENS, sequences=2, precision="fp32", saves=("F",) * model.layers)
    executor = executor_for(plan, model, {**base, **ours}, training)
    # What scales a channel does not decay.
    matrices, lengths = ([value for value in trained.values() if value.ndim == each] for each in (2, 1))
    groups = [{"params": matrices}, *([{"params": lengths, "weight_decay": 0.0}] if dora else [])]
    optimizer = torch.optim.AdamW(groups, betas=(training.beta1, training.beta2), weight_decay=0.1)
    batch = batch_for(model)
    for step in range(50):
        for group in optimizer.param_groups:
            group["lr"] = training.rate_at(step)
        optimizer.zero_grad()
        loss = their_loss(network, batch)
        torch.autograd.backward(loss)
        optimizer.step()
        assert executor.step(batch, step).loss == pytest.approx(float(loss.detach()), rel=2e-5)
    found = to_peft(model, dict(executor.weights()))
    assert worst(found, {key: value.detach() for key, value in trained.items()})[0] < 2e-3


def test_layers_are_called_as_the_files_have_them() -> None:
    """Every family that is saved, by the names of its weights."""
    for family in NAMES.keys() & LAYERS.keys():
        for target, layer in LAYERS[family].items():
            products = [product for product in RESULTS if target in RESULTS[product]]
            names = NAMES[family]
            inside = {**names.layer, "latents": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")}
            known = {name for product in products for name in inside.get(product, ())}
            known |= {names.stacked[product] for product in products if product in names.stacked}
            if "{}" in layer:
                known = {f"{names.expert}.{name}" for product in products for name in names.experts.get(product, ())}
            assert layer in known, (family, target)
    # Blocks that carry a state have no adapters yet, which the description tells.
    assert NAMES.keys() - LAYERS.keys() == {*HYBRIDS}


@pytest.mark.parametrize(
    ("words", "parameters", "keys"),
    [
        ({"lora_on": "mlp"}, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ["experts.base_layer", "experts"]),
        ({"lora_on": "experts.down_proj"}, ["mlp.experts.down_proj"], ["experts"]),
        (
            {"lora_on": "gate,up", "freeze": "blocks.0"},
            [f"model.layers.{block}.mlp.experts.gate_up_proj" for block in (1, 2)],
            ["experts"],
        ),
    ],
)
def test_experts_in_one_parameter_are_named_as_peft_wraps_them(
    words: dict[str, str], parameters: list[str], keys: list[str], tmp_path: Path
) -> None:
    """Also of one matrix alone, and in some blocks."""
    network, model, base = begun("gpt_oss", tmp_path, **words)
    table = adapter_config(model, None)
    assert model.layers == 3
    assert (table["target_modules"], table["target_parameters"]) == ([], parameters)
    trained = add_adapters(network, table)
    ends = {f"mlp.{key}.lora_{side}.weight" for key in keys for side in "AB"}
    assert {key.partition(".mlp.")[2] for key in trained} == {end.partition(".")[2] for end in ends}
    batch = batch_for(model)
    loss = their_loss(network, batch)
    torch.autograd.backward(loss)
    ours = from_peft(model, {key: value.detach() for key, value in trained.items()})
    again = to_peft(model, ours)
    assert again.keys() == trained.keys()
    assert all(torch.equal(again[key], trained[key]) for key in again)
    plan = everything_stays(model, sequence=TOKENS, sequences=2, precision="fp32", saves=_saves(model))
    executor = executor_for(plan, model, {**base, **ours})
    assert executor.step(batch, 0).loss == pytest.approx(float(loss.detach()), rel=3e-6)
    expected = {key: value.grad for key, value in trained.items() if value.grad is not None}
    assert worst(to_peft(model, first_gradients(executor)), expected)[0] < 2e-5
    cut = {key: value[:, :-1] if key.endswith("lora_B.weight") else value for key, value in again.items()}
    with pytest.raises(FlopwiseError, match="and not"):
        from_peft(model, cut)


def _saves(model: Transformer) -> tuple[str, ...]:
    """Everything of what backward comes to."""
    return tuple("-" if block < model.first_reached else "F" for block in range(model.layers))


@pytest.mark.parametrize(
    ("chosen", "others", "expected"),
    [
        (["attn.c_proj", "mlp.c_proj"], ["attn.c_attn"], ["c_proj"]),
        (["attn.c_proj"], ["mlp.c_proj"], ["attn.c_proj"]),
        (["attention.output.dense", "output.dense"], ["pooler.dense"], ["output.dense"]),
        (["output.dense"], ["attention.output.dense"], None),
    ],
)
def test_words_name_the_chosen_layers_alone(chosen: list[str], others: list[str], expected: list[str] | None) -> None:
    assert shortest_names(chosen, others) == expected


@pytest.mark.parametrize(("name", "words"), [("phi3", "q,v"), ("glm4", "gate"), ("gpt2", "k"), ("phi", "c_attn")])
def test_a_part_of_a_layer_has_no_adapter(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError, match=r"in one matrix|matrix of a block") as told:
        begun(name, tmp_path, lora_on=words)
    assert "--lora-on" in str(told.value.hint)


def test_a_family_whose_layers_are_not_known_is_refused() -> None:
    from flopwise.engine.executable import check_adapters
    from tests.support.tiny_models import LLAMA

    model = TrainedWords(lora=2).of(replace(LLAMA, family="next_year"))
    assert isinstance(model, Transformer)
    with pytest.raises(FlopwiseError, match="next_year"):
        check_adapters(model, None)
    assert layer_names(model)["q"] == "self_attn.q_proj"


@pytest.mark.parametrize("name", ["lora_B.weight", "lora_magnitude_vector"])
def test_a_single_number_is_no_adapter(name: str) -> None:
    """Of rows there are none: refused as any other shape."""
    from tests.support.tiny_models import LLAMA

    model = TrainedWords(lora=2, dora=True).of(LLAMA)
    assert isinstance(model, Transformer)
    shapes = {parameter.name: parameter.shape for parameter in parameters_of(model, 1)}
    tensors = to_peft(model, {key: torch.ones(shape) for key, shape in shapes.items()})
    assert from_peft(model, tensors)
    cut = next(key for key in tensors if key.endswith(name))
    with pytest.raises(FlopwiseError, match=r"is \(\) and not of"):
        from_peft(model, tensors | {cut: torch.ones(())})
