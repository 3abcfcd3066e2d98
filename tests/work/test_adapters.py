"""Adapters and frozen parts in the description: what PEFT publishes, torch's counter, what autograd keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model
from flopwise.setup.trained import TrainedWords, check_base
from flopwise.work.adapters import MAGNITUDE, TARGETS, Adapters, Target
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES, parse_formats, quantised_bytes, with_base
from flopwise.work.parameters import parameters_of
from flopwise.work.traffic import saved_bytes, weights_bytes
from flopwise.work.transformer import Transformer
from tests.support.tiny_models import GPT2, LLAMA
from tests.support.torch_reference import Reference, eager_attention
from tests.work.test_saved_tensors import kept_by_autograd
from tests.work.test_torch_agreement import counted, described

PUBLISHED = {
    # What `print_trainable_parameters` says of Llama-3-8B and Llama-2-7B (its shape is mistral's without shared heads).
    ("llama-3-8b", 16, "all-linear"): 41_943_040,
    ("llama-3-8b", 8, "q,v"): 3_407_872,
    ("llama-3-70b", 16, "all-linear"): 207_093_760,
    ("mistral-7b", 64, "all-linear"): 167_772_160,
}


@pytest.mark.parametrize(("name", "rank", "on"), PUBLISHED)
def test_trained_parameters_are_those_that_peft_prints(name: str, rank: int, on: str) -> None:
    plain = load_model(name)
    model = TrainedWords(lora=rank, lora_on=on).of(plain)
    work = describe(model, 64)
    assert work.trained_parameters == PUBLISHED[name, rank, on]
    assert work.parameters - work.trained_parameters == describe(plain, 64).parameters
    assert isinstance(model, Transformer)
    listed = parameters_of(model, 64)
    assert sum(each.elements for each in listed if each.trained) == work.trained_parameters
    assert sum(each.elements for each in listed) == work.parameters


def test_adapters_beside_experts_in_one_tensor_are_as_many_as_peft_prints() -> None:
    """OpenAI's recipe for gpt-oss-20b: rank 8 beside attention, and beside the experts of blocks 7, 15 and 23."""
    plain = load_model("gpt-oss-20b")
    attention = TrainedWords(lora=8, lora_on="attention").of(plain)
    experts = TrainedWords(lora=8, lora_on="mlp", freeze="blocks.0-6,blocks.8-14,blocks.16-22").of(plain)
    trained = [describe(model, 64).trained_parameters for model in (attention, experts)]
    assert sum(trained) == 15_040_512


SHARES = {
    # Table 1 of DoRA's paper, in percent of all parameters: LoRA and DoRA on q, k, v, up and down.
    ("llama-2-7b", 32): (0.83, 0.84),
    ("llama-3-8b", 32): (0.70, 0.71),
}


@pytest.mark.parametrize(("name", "rank"), SHARES)
def test_dora_trains_as_many_parameters_as_its_paper_says(name: str, rank: int) -> None:
    plain, found = load_model(name), []
    for dora in (False, True):
        model = TrainedWords(lora=rank, lora_on="q,k,v,up,down", dora=dora).of(plain)
        work = describe(model, 64)
        found.append(round(100 * work.trained_parameters / work.parameters, 2))
        assert isinstance(model, Transformer)
        assert sum(one.elements for one in parameters_of(model, 64) if one.trained) == work.trained_parameters
    assert tuple(found) == SHARES[name, rank]


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int, *, magnitudes: bool) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.magnitudes = nn.Parameter(torch.ones(base.out_features)) if magnitudes else None

    def forward(self, value: Tensor) -> Tensor:
        low = self.up(self.down(value)) * 2.0
        if self.magnitudes is None:
            result: Tensor = self.base(value) + low
            return result
        # The sum itself is not made: no product of matrices is counted for it.
        matrix = self.base.weight + 2.0 * (self.up.weight[..., None] * self.down.weight).sum(1)
        made = nn.functional.linear(value, self.base.weight) + low
        result = made * (self.magnitudes / matrix.detach().norm(dim=1))
        return result if getattr(self.base, "bias", None) is None else result + self.base.bias


PLACES = {
    "q": ("attention", "query"),
    "k": ("attention", "key"),
    "v": ("attention", "value"),
    "o": ("attention", "output"),
    "gate": ("feed", "gate"),
    "up": ("feed", "up"),
    "down": ("feed", "down"),
}


def adapted_reference(model: Transformer, tokens: int) -> Reference:
    """The network of `torch_reference` with adapters; its embedding has gradients, so that backward runs to the end."""
    adapters = model.adapters
    assert adapters is not None
    module = Reference(replace(model, adapters=None), tokens, eager_attention).requires_grad_(False)
    for block in module.blocks:
        for target in (each for each in adapters.targets if each in PLACES):
            part, name = PLACES[target]
            holder = getattr(block, part)
            base = getattr(holder, name)
            if base is not None:
                setattr(holder, name, Lora(base, adapters.rank, magnitudes=adapters.magnitudes))
    return module


CHOSEN: dict[str, tuple[Target, ...]] = {
    "all": TARGETS,
    "queries and values": ("q", "v"),
    "down": ("down",),
    "attention": ("q", "k", "v", "o"),
}
APART = replace(GPT2, tied=False, family="starcoder2")
"""GPT-2's shape, of a family with a layer for each of queries, keys and values."""


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", CHOSEN)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_flops_equal_torchs_count(family: str, targets: str, dora: bool) -> None:
    plain = LLAMA if family == "llama" else APART
    model = replace(plain, adapters=Adapters(rank=3, alpha=6.0, targets=CHOSEN[targets], magnitudes=dora))
    with torch.device("meta"):
        module = adapted_reference(model, 12)
    module.embedding.weight.requires_grad_()
    assert described(describe(model, 12, "eager"), 2) == counted(module, 2, 12)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", CHOSEN)
def test_kept_is_what_autograd_keeps(targets: str, dora: bool) -> None:
    model = replace(APART, adapters=Adapters(rank=3, alpha=6.0, targets=CHOSEN[targets], magnitudes=dora))
    module = adapted_reference(model, 12)
    module.embedding.weight.requires_grad_()
    kept = kept_by_autograd(module, torch.zeros(2, 12, dtype=torch.long))
    # Of magnitudes autograd keeps two vectors beside: the norms, and what they make of the magnitudes.
    vectors = sum(each.elements for each in parameters_of(model, 12) if each.weight.module.endswith(f"_{MAGNITUDE}"))
    assert (vectors > 0) == dora
    expected = saved_bytes(describe(model, 12, "eager"), "none", POLICIES["fp32"])
    assert kept == 2 * (expected - 4 * 12) + 2 * 4 * vectors


@pytest.mark.parametrize("frozen", [("embedding", "blocks.0-1"), ("blocks.1",), ("head", "embedding", "blocks.0")])
def test_frozen_parts_cost_no_gradients(frozen: tuple[str, ...]) -> None:
    plain = replace(LLAMA, layers=3)
    model = replace(plain, frozen=frozen)
    with torch.device("meta"):
        module = Reference(plain, 12, eager_attention)
    if "embedding" in frozen:
        module.embedding.requires_grad_(False)
    if "head" in frozen:
        module.head.requires_grad_(False)
        module.final_norm.requires_grad_(False)
    for layer in model.frozen_layers:
        module.blocks[layer].requires_grad_(False)
    work = describe(model, 12, "eager")
    forward, total = described(work, 2)
    lowest: Any = module.blocks[model.first_reached]
    # The input of the lowest trained block needs no gradient: torch leaves out that product, which we make.
    if model.first_reached:
        lowest.attention.query.weight.requires_grad_()
        hook = lowest.register_forward_pre_hook(lambda _, given: (given[0].detach().requires_grad_(),))
        assert counted(module, 2, 12) == (forward, total)
        hook.remove()
    else:
        assert counted(module, 2, 12) == (forward, total)
    trained = sum(value.numel() for value in module.parameters() if value.requires_grad)
    assert work.trained_parameters == trained


@pytest.mark.parametrize("dora", [False, True])
def test_blocks_without_adapters_cost_what_torch_counts(dora: bool) -> None:
    """One below all adapters, one between them."""
    plain = replace(LLAMA, layers=4)
    adapters = Adapters(rank=3, alpha=6.0, magnitudes=dora)
    model = replace(plain, adapters=adapters, frozen=("blocks.0", "blocks.2"))
    with torch.device("meta"):
        module = adapted_reference(replace(model, frozen=None), 12)
        plainer = Reference(plain, 12, eager_attention).requires_grad_(False)
    for layer in model.frozen_layers:
        module.blocks[layer] = plainer.blocks[layer]
    forward, total = described(describe(model, 12, "eager"), 2)
    lowest: Any = module.blocks[model.first_reached]
    # Backward runs to the end of the lowest block with adapters, and no further.
    hook = lowest.register_forward_pre_hook(lambda _, given: (given[0].detach().requires_grad_(),))
    assert counted(module, 2, 12) == (forward, total)
    hook.remove()
    trained = sum(value.numel() for value in module.parameters() if value.requires_grad)
    assert describe(model, 12).trained_parameters == trained
    assert sum(each.elements for each in parameters_of(model, 12) if each.trained) == trained
    # What blocks below keep is nothing; what the lowest ones above them keep is as with adapters everywhere.
    lower = replace(model, frozen=("blocks.0-1",))
    everywhere = replace(plain, adapters=adapters, layers=2)
    kept = [saved_bytes(describe(each, 12), "none", POLICIES["fp32"]) for each in (lower, everywhere)]
    assert kept[0] == kept[1]


def test_frozen_weights_take_their_own_bytes() -> None:
    model = replace(LLAMA, adapters=Adapters(rank=2, alpha=4.0))
    work = describe(model, 8)
    trained = 4 * work.trained_parameters
    frozen = work.parameters - work.trained_parameters
    assert weights_bytes(work, parse_formats("bf16-amp,base=bf16")) == trained + 2 * frozen
    assert weights_bytes(work, parse_formats("fp32")) == trained + 4 * frozen
    matrices = [(2 * (24 + 16) // 2, 24), (24, 24), (2 * 37, 24), (24, 37)]
    in_matrices = 2 * sum(rows * depth for rows, depth in matrices)
    for base, halves, beside in (("int8", 2, 4), ("nf4", 1, 4)):
        quantised = 2 * sum(rows * (depth * halves // 2 + depth * halves % 2 + beside) for rows, depth in matrices)
        found = weights_bytes(work, with_base(POLICIES["bf16-amp"], base))
        assert found == trained + quantised + 2 * (frozen - in_matrices)
    assert quantised_bytes(3, 130, "nf4") == 3 * (65 + 4 * 3)


WRONG = {
    "rank": {"lora": 0},
    "alpha": {"lora": 4, "lora_alpha": 0.0},
    "alpha alone": {"lora_alpha": 2.0},
    "dora alone": {"dora": True},
    "targets": {"lora": 4, "lora_on": "keys"},
    "no block frozen": {"lora": 4, "freeze": "embedding,head"},
    "no block left": {"lora": 4, "freeze": "blocks"},
    "a block too many beside adapters": {"lora": 4, "freeze": "blocks.1-2"},
    "other blocks": {"lora": 4, "lora_blocks": (0, 2)},
    "a block too many": {"freeze": "blocks.0-2"},
    "backwards": {"freeze": "blocks.1-0"},
    "no part": {"freeze": "norms"},
    "everything": {"freeze": "embedding,head,blocks"},
    "nothing": {"freeze": ","},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_trained_is_refused(what: str) -> None:
    with pytest.raises(FlopwiseError) as told:
        TrainedWords(**WRONG[what]).of(LLAMA)  # type: ignore[arg-type]
    assert told.value.hint


def test_experts_that_read_weighed_rows_have_no_adapters() -> None:
    llama4 = load_model("llama-4-scout")
    assert isinstance(llama4, Transformer)
    for targets in ("all-linear", "mlp"):
        with pytest.raises(FlopwiseError, match="adapters beside its experts") as told:
            TrainedWords(lora=4, lora_on=targets).of(llama4)
        assert told.value.why and told.value.hint == "--lora-on attention"
    assert TrainedWords(lora=4, lora_on="attention").of(llama4).name == "llama-4-scout+lora4(attention)"


def test_a_tied_table_is_not_half_frozen() -> None:
    with pytest.raises(FlopwiseError, match="one matrix"):
        replace(LLAMA, tied=True, frozen=("embedding",))


def test_a_base_needs_frozen_weights() -> None:
    with pytest.raises(FlopwiseError, match="everything is trained"):
        check_base(LLAMA, "nf4")
    with pytest.raises(FlopwiseError, match="format of frozen weights"):
        with_base(POLICIES["bf16"], "nf3")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (TrainedWords(lora=16), "llama+lora16"),
        (TrainedWords(lora=8, lora_on="v,q", rslora=True), "llama+rslora8(q,v)"),
        (TrainedWords(lora=8, lora_on="attention"), "llama+lora8(attention)"),
        (TrainedWords(lora=8, dora=True), "llama+dora8"),
        (TrainedWords(lora=8, freeze="embedding,blocks.0"), "llama+lora8+freeze=embedding,blocks.0"),
        (TrainedWords(lora=8, lora_blocks=(1,)), "llama+lora8+freeze=blocks.0"),
        (TrainedWords(lora=8, lora_blocks=(1, 0)), "llama+lora8"),
        (TrainedWords(lora=8, lora_on="mlp", dora=True, rslora=True), "llama+rsdora8(mlp)"),
        (TrainedWords(freeze="embedding,blocks.0"), "llama+freeze=embedding,blocks.0"),
    ],
)
def test_the_name_tells(words: TrainedWords, name: str) -> None:
    assert words.of(LLAMA).name == name


def test_hints_name_blocks_that_are_there() -> None:
    for freeze, hint in (("blocks.0-1", "blocks.0-0"), ("blocks.7", "embedding,blocks.0-0")):
        with pytest.raises(FlopwiseError) as refused:
            TrainedWords(lora=4, freeze=freeze).of(replace(LLAMA, layers=2))
        assert hint in (refused.value.hint or "")
    with pytest.raises(FlopwiseError, match="no format of frozen weights is called 'nf5'"):
        check_base(LLAMA, "nf5")
