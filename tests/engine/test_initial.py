"""First numbers drawn by many threads are those that one would draw, in order, and few of them wait in memory."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from flopwise.engine.modules import build
from flopwise.engine.weights import initial
from flopwise.engine.weights.initial import all_initial_values, fill, initial_values
from flopwise.work.parameters import Parameter, parameters_of
from flopwise.work.transformer import Transformer

MODEL = Transformer(
    name="small",
    title="small",
    source="test",
    layers=3,
    hidden=48,
    heads=4,
    kv_heads=2,
    ffn=80,
    vocab=131,
    context=32,
    qkv_bias=True,
)
PARAMETERS = parameters_of(MODEL, 32)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_numbers_are_those_of_a_plain_loop(threads: int) -> None:
    plain = [(parameter, initial_values(parameter, 11, MODEL.layers)) for parameter in PARAMETERS]
    found = list(all_initial_values(PARAMETERS, 11, MODEL.layers, threads=threads))
    assert [parameter.name for parameter, _ in found] == [parameter.name for parameter, _ in plain]
    for (_, values), (parameter, expected) in zip(found, plain, strict=True):
        assert values.dtype == expected.dtype and torch.equal(values, expected), parameter.name


def test_as_many_threads_as_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is told a number; a single one needs no pool."""
    seen: set[str] = set()

    def note(parameter: Parameter, seed: int, layers: int) -> Tensor:
        seen.add(threading.current_thread().name)
        return initial_values(parameter, seed, layers)

    monkeypatch.setattr(initial, "initial_values", note)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    list(all_initial_values(PARAMETERS, 0, MODEL.layers))
    assert seen == {threading.current_thread().name}
    seen.clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    list(all_initial_values(PARAMETERS, 0, MODEL.layers))
    assert seen and all(name.startswith("flopwise-initial") for name in seen)


def test_few_wait_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly they are taken over, what was begun and not taken over stays within the bound."""
    most = max(4 * parameter.elements for parameter in PARAMETERS)
    bound = 2 * most
    monkeypatch.setattr(initial, "LOOK_AHEAD_BYTES", bound)
    begun: dict[str, int] = {}
    taken: set[str] = set()
    peak = 0

    def note(parameter: Parameter, seed: int, layers: int) -> Tensor:
        nonlocal peak
        begun[parameter.name] = 4 * parameter.elements
        peak = max(peak, sum(size for name, size in begun.items() if name not in taken))
        return initial_values(parameter, seed, layers)

    monkeypatch.setattr(initial, "initial_values", note)
    for parameter, _ in all_initial_values(PARAMETERS, 0, MODEL.layers, threads=4):
        time.sleep(0.002)
        taken.add(parameter.name)
    assert most < peak <= bound
    assert taken == {parameter.name for parameter in PARAMETERS}


def test_one_larger_than_the_bound_is_drawn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "LOOK_AHEAD_BYTES", 1)
    found = list(all_initial_values(PARAMETERS, 3, MODEL.layers, threads=4))
    assert all(torch.equal(values, initial_values(parameter, 3, MODEL.layers)) for parameter, values in found)
    assert len(found) == len(PARAMETERS)


def test_whoever_stops_early_leaves_no_threads() -> None:
    before = threading.active_count()
    values = all_initial_values(PARAMETERS, 0, MODEL.layers, threads=4)
    next(values)
    values.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_what_fails_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Tensor:
        raise MemoryError

    monkeypatch.setattr(initial, "initial_values", fails)
    with pytest.raises(MemoryError):
        next(iter(all_initial_values(PARAMETERS, 0, MODEL.layers, threads=2)))


def test_modules_are_filled_in_their_own_type() -> None:
    module = build(MODEL, 32, dtype=torch.bfloat16, device="cpu")
    fill(module, MODEL, 32, seed=5)
    places = dict(module.named_parameters())
    for parameter in PARAMETERS:
        expected = initial_values(parameter, 5, MODEL.layers).bfloat16()
        assert torch.equal(places[parameter.name].detach(), expected), parameter.name
