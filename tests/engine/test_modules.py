"""The reference modules against the networks that `transformers` builds, and against plain sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model, model_names
from flopwise.engine.modules import ACTIVATION_FUNCTIONS, PlainBlock, ReferenceModel, attention_mask, build
from flopwise.engine.weights.initial import fill, initial_values
from flopwise.work.activations import ACTIVATIONS
from flopwise.work.parameters import parameters_of
from flopwise.work.transformer import Dropout, Transformer
from tests.support.strategies import transformers as random_transformers
from tests.support.tiny_models import (
    BERT,
    GPT2,
    LLAMA,
    TINY,
    TOKENS,
    names_and_shapes,
    random_ids,
    random_module,
    transformers_model,
)


def tiny(model: Transformer) -> Transformer:
    """A catalogue's model with small sizes and all its options."""
    heads = 4
    own_width = model.heads * model.head_dim != model.hidden
    states = model.recurrence
    return replace(
        model,
        layers=3 if model.feed_blocks else 2,
        recurrence=states and replace(states, heads=4, head_dim=6, key_heads=2, key_dim=5, chunk=7, norm_groups=2),
        recurrent_blocks=(0, 1) if len(model.recurrent_blocks) == model.layers else (0,) if states else (),
        feed_blocks=(1,) if model.feed_blocks else (),
        hidden=18 if own_width else 24,
        heads=heads,
        kv_heads=2 if model.kv_heads < model.heads else heads,
        head_dim=6,
        rotary_dim=2 if model.rotary_dim else None,
        other_blocks=(1,) if model.other_blocks else (),
        ffn=11,
        vocab=29,
        context=TOKENS,
        position_rows=None if model.position_rows is None else TOKENS + 2,
        window=None if model.window is None else 5,
    )


def trainable() -> list[Transformer]:
    models = [load_model(name) for name in model_names()]
    return [tiny(model) for model in models if isinstance(model, Transformer) and not model.experts]


def shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


@pytest.mark.parametrize("model", trainable(), ids=lambda model: model.name)
def test_names_and_shapes_are_those_of_the_list(model: Transformer) -> None:
    module = build(model, TOKENS, dtype=torch.float32, device="cpu")
    assert shapes_of(module) == names_and_shapes(model)
    assert not list(module.buffers())
    fill(module, model, TOKENS, seed=3)
    assert module.loss(random_ids(model), labels_of(model)).isfinite()


def labels_of(model: Transformer, sequences: int = 3) -> Tensor:
    if model.head == "classifier":
        return torch.arange(sequences) % (model.labels or 1)
    return random_ids(model, sequences, seed=5)


@settings(max_examples=60, deadline=None)
@given(random_transformers(), st.integers(1, 32))
def test_any_model_has_its_listed_parameters_or_is_refused(model: Transformer, tokens: int) -> None:
    if model.experts and (model.ffn_bias or model.head == "classifier"):
        with pytest.raises(FlopwiseError, match="cannot be trained yet"):
            ReferenceModel(model, tokens)
        return
    module = build(model, tokens, dtype=torch.float32, device="meta")
    assert shapes_of(module) == {parameter.name: parameter.shape for parameter in parameters_of(model, tokens)}
    if model.experts:
        # Which rows an expert has follows from numbers, of which this device has none.
        return
    logits = module(torch.zeros(2, tokens, dtype=torch.int32, device="meta"))
    assert logits.shape == ((2, model.labels) if model.head == "classifier" else (2, tokens, model.vocab))


def wide_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """The norm of `transformers` without its step down to fp32, which float64 would show."""
    mean = hidden_states.pow(2).mean(-1, keepdim=True)
    result: Tensor = self.weight * hidden_states / torch.sqrt(mean + self.variance_epsilon)
    return result


def wide_layer_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """The same of Cohere's norm."""
    return functional.layer_norm(hidden_states, self.weight.shape, self.weight, None, self.variance_epsilon)


def widen_norms(theirs: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in {type(part) for part in theirs.modules()}:
        if kind.__name__.endswith("RMSNorm"):
            monkeypatch.setattr(kind, "forward", wide_norm)
        if kind.__name__ == "CohereLayerNorm":
            monkeypatch.setattr(kind, "forward", wide_layer_norm)


def their_logits(theirs: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        result: Tensor = theirs(input_ids=ids, attention_mask=mask).logits
    return result


# Cohere's rotation, routers and states are in fp32 whatever the type of the numbers: the test of single precision has
# them.
IN_FP32 = ("cohere", "modernbert")


@pytest.mark.parametrize(
    "name",
    [name for name, model in TINY.items() if name not in IN_FP32 and not model.experts and not model.has_kinds],
)
def test_logits_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY[name]
    module = random_module(model)
    theirs = transformers_model(model, module)
    widen_norms(theirs, monkeypatch)
    ids = random_ids(model)
    with torch.no_grad():
        ours = module(ids)
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, their_logits(theirs, ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_transformers_in_single_precision(name: str) -> None:
    model = TINY[name]
    module = random_module(model, dtype=torch.float32)
    ids = random_ids(model)
    with torch.no_grad():
        ours = module(ids)
    torch.testing.assert_close(ours, their_logits(transformers_model(model, module), ids), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert"])
def test_logits_in_bfloat16_are_near_those_of_transformers(name: str) -> None:
    """Whole matrices of the same roundings: what differs is the order of sums."""
    model = TINY[name]
    module = random_module(model, dtype=torch.bfloat16)
    ids = random_ids(model)
    with torch.no_grad():
        ours = module(ids)
    assert ours.dtype == torch.bfloat16
    theirs = their_logits(transformers_model(model, module), ids)
    assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()


@pytest.mark.parametrize("name", ["bert", "bert-masked"])
def test_padding_is_masked_as_in_transformers(name: str) -> None:
    model = TINY[name]
    module = random_module(model)
    ids, lengths = random_ids(model, 4), torch.tensor([TOKENS, 1, 7, 12], dtype=torch.int32)
    mask = torch.arange(TOKENS)[None] < lengths[:, None]
    with torch.no_grad():
        ours = module(ids, lengths)
    theirs = their_logits(transformers_model(model, module), ids, mask.long())
    if model.head == "masked":
        ours, theirs = ours[mask], theirs[mask]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_padded_sequence_is_the_short_one() -> None:
    module = random_module(BERT)
    ids = random_ids(BERT, 1)
    with torch.no_grad():
        torch.testing.assert_close(module(ids, torch.tensor([8])), module(ids[:, :8]))


@pytest.mark.parametrize("model", [LLAMA, GPT2, replace(LLAMA, window=3)], ids=["llama", "gpt2", "window"])
def test_later_tokens_change_nothing_and_lengths_are_ignored_by_causal_models(model: Transformer) -> None:
    module = random_module(model)
    ids = random_ids(model)
    changed = torch.cat((ids[:, :9], random_ids(model, seed=9)[:, 9:]), 1)
    with torch.no_grad():
        torch.testing.assert_close(module(ids)[:, :9], module(changed)[:, :9])
        assert torch.equal(module(ids, torch.tensor([9, 9, 9])), module(ids))


def test_window_reaches_back_so_many_tokens() -> None:
    mask = attention_mask(replace(LLAMA, window=3), 6, None, torch.device("cpu"))
    assert mask is not None
    expected = [[query - 2 <= key <= query for key in range(6)] for query in range(6)]
    assert mask.tolist() == expected
    assert attention_mask(replace(LLAMA, window=6), 6, None, torch.device("cpu")) is None


def test_parallel_residual_reads_the_blocks_input_twice() -> None:
    """The one block that no class above has, from the parts of another."""
    model = replace(GPT2, parallel_residual=True)
    block = random_module(model).layers[0]
    plain = random_module(GPT2).layers[0]
    assert isinstance(plain, PlainBlock)
    stream = torch.randn(2, 7, model.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        attended = plain.attention(plain.norm1(stream), None)
        assert plain.norm2 is not None
        fed = plain.feed_forward(plain.norm2(stream))
        torch.testing.assert_close(block(stream, None), stream + attended + fed)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bert-masked"])
def test_loss_is_the_sum_over_labels(name: str) -> None:
    model = TINY[name]
    module = random_module(model)
    ids, labels = random_ids(model), labels_of(model).clone()
    labels.view(-1)[::3] = -1
    with torch.no_grad():
        logarithms = functional.log_softmax(module(ids), -1).reshape(-1, module(ids).shape[-1])
        loss = module.loss(ids.int(), labels.int())
    chosen = [-logarithms[row, label].item() for row, label in enumerate(labels.reshape(-1).tolist()) if label >= 0]
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(math.fsum(chosen), rel=1e-12)


def test_loss_of_narrow_numbers_is_wide() -> None:
    module = random_module(LLAMA, dtype=torch.bfloat16)
    assert module.loss(random_ids(LLAMA), labels_of(LLAMA)).dtype == torch.float32


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_has_a_gradient(name: str) -> None:
    model = TINY[name]
    module = random_module(model)
    torch.autograd.backward(module.loss(random_ids(model), labels_of(model)))
    untouched = {
        name
        for name, value in module.named_parameters()
        if value.requires_grad and (value.grad is None or not value.grad.any())
    }
    assert not untouched


def test_gradients_come_after_an_evaluation() -> None:
    """Tables that an evaluation made first serve training too."""
    model = replace(LLAMA, rotary_base=77.0)
    module = random_module(model)
    with torch.inference_mode():
        module(random_ids(model))
    torch.autograd.backward(module.loss(random_ids(model), labels_of(model)))


def test_every_activation_can_be_run() -> None:
    assert set(ACTIVATION_FUNCTIONS) == set(ACTIVATIONS)
    value = torch.tensor([-1.5, 0.0, 0.7], dtype=torch.float64)
    tanh = [0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) for x in value.tolist()]
    exact = [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in value.tolist()]
    torch.testing.assert_close(ACTIVATION_FUNCTIONS["gelu_tanh"](value), torch.tensor(tanh, dtype=torch.float64))
    torch.testing.assert_close(ACTIVATION_FUNCTIONS["gelu"](value), torch.tensor(exact, dtype=torch.float64))
    squared = torch.tensor([0.0, 0.0, 0.49], dtype=torch.float64)
    torch.testing.assert_close(ACTIVATION_FUNCTIONS["relu2"](value), squared)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            replace(LLAMA, experts=4, experts_per_token=2, dropout=Dropout(hidden=0.1)),
            "this mixture of experts cannot be trained",
        ),
        (replace(BERT, positions="alibi", position_rows=None), "ALiBi positions that look ahead"),
        (replace(BERT, tied=True), "a classifier has no matrix that could be the embedding's"),
        (replace(GPT2, position_rows=TOKENS - 1), "learned positions for 18 tokens, not for 19"),
    ],
)
def test_what_cannot_be_run_is_refused(model: Transformer, words: str) -> None:
    with pytest.raises(FlopwiseError, match=words) as caught:
        build(model, TOKENS, dtype=torch.float32, device="cpu")
    assert caught.value.hint


def test_first_values_depend_on_the_seed_and_the_name() -> None:
    model = replace(LLAMA, hidden=48, ffn=200, vocab=300, norm="layer", norm_bias=True)
    values = {item.name: initial_values(item, 7, model.layers) for item in parameters_of(model, TOKENS)}
    again = {item.name: initial_values(item, 7, model.layers) for item in reversed(parameters_of(model, TOKENS))}
    assert all(torch.equal(value, again[name]) for name, value in values.items())
    assert all(value.dtype == torch.float32 for value in values.values())
    first, second = values["layers.0.gate_up.weight"], values["layers.1.gate_up.weight"]
    assert not torch.equal(first, second)
    other = next(item for item in parameters_of(model, TOKENS) if item.name == "layers.0.gate_up.weight")
    assert not torch.equal(first, initial_values(other, 8, model.layers))


def test_first_values_have_their_spread() -> None:
    model = replace(LLAMA, layers=8, hidden=96, ffn=200, vocab=400, norm="layer", norm_bias=True, qkv_bias=True)
    for item in parameters_of(model, TOKENS):
        value = initial_values(item, 0, model.layers)
        if item.role in ("norm", "bias"):
            assert torch.equal(value, torch.full(item.shape, 1.0 if item.role == "norm" else 0.0))
            continue
        expected = math.sqrt(2 / 5 / item.shape[-1])
        if item.local in ("output.weight", "down.weight"):
            expected /= 4
        assert value.std().item() == pytest.approx(expected, rel=0.1)
        assert abs(value.mean().item()) < 5 * expected / math.sqrt(item.elements)


def test_wide_models_begin_with_two_hundredths() -> None:
    model = replace(LLAMA, hidden=4096, head_dim=128, heads=32, kv_heads=8, vocab=200)
    head = next(item for item in parameters_of(model, TOKENS) if item.name == "head.weight")
    assert initial_values(head, 0, model.layers).std().item() == pytest.approx(0.02, rel=0.01)


def test_filling_sets_every_number() -> None:
    module = build(GPT2, TOKENS, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for value in module.parameters():
            value.fill_(math.nan)
    fill(module, GPT2, TOKENS, seed=1)
    assert all(value.isfinite().all() for value in module.parameters())
