"""Many set-ups at once are predicted as each of them is alone, digit by digit, whatever else is costed beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from flopwise.catalog.load import load_hardware, load_model, load_stack
from flopwise.predict import Setup, step, steps
from flopwise.predict.choose import auto_policies, memory_lines
from flopwise.setup.parallel import Parallel, parse_parallel, shard_all
from flopwise.work.formats import parse_formats
from flopwise.work.work import RECOMPUTE_POLICIES

MODELS = [load_model(name) for name in ("gpt2", "mpt-125m", "mpt-1b", "llama-3-8b", "mixtral-8x7b", "lstm-lm")]
MACHINES = [load_hardware(name) for name in ("h200", "a100-40gb")]
STACK = load_stack("llm-foundry")
SPLITS = ("dp2 tp2", "pp2", "dp2 pp4 balanced", "dp2 tp2 pp2 zero1 sp", "cp2 zero3", "dp4 zero3 optimizer-on-host")
SEED = 19
Drawn = TypeVar("Drawn")


def some_setups(count: int) -> list[Setup]:
    """Any model, sizes, formats and cap; one device as often as several; micro-batch and recompute mostly open."""
    draw = np.random.default_rng(SEED)

    def one_of(*values: Drawn) -> Drawn:
        return values[int(draw.integers(len(values)))]

    setups = []
    for _ in range(count):
        model, machine = one_of(*MODELS), one_of(*MACHINES)
        split = one_of(*SPLITS) if model.name in ("mpt-1b", "llama-3-8b") else "dp4 zero3"
        parallel = one_of(Parallel(), Parallel(), shard_all(8), parse_parallel(split, None))
        each = int(one_of(1, 2, 3, 8, 11, 24, 48, 100))
        setups.append(
            Setup(
                model=model,
                hardware=machine,
                sequence_tokens=min(model.context, one_of(128, 510, 1024, 2048, 8192)),
                batch_sequences=each * parallel.data,
                micro_batch_sequences=one_of(None, None, 1, int(draw.integers(1, each + 1))),
                formats=parse_formats(one_of("bf16", "bf16-amp", "fp32")),
                recompute=one_of(None, None, None, *RECOMPUTE_POLICIES),
                attention=one_of("flash", "flash", "eager"),
                parallel=parallel,
                stack=one_of(None, None, None, STACK),
                device_cap_bytes=one_of(None, int(machine.device.dram.size_bytes.value / one_of(2, 7))),
            )
        )
    return setups


def test_many_are_as_one_by_one() -> None:
    setups = some_setups(200)
    for setup, found in zip(setups, steps(setups), strict=True):
        assert found == step(setup)


def test_without_operators_all_else_is_there() -> None:
    setups = some_setups(60)
    for whole, light in zip(steps(setups), steps(setups, operators=False), strict=True):
        assert light == replace(whole, ops=())


def test_none_at_all() -> None:
    assert steps([]) == []
    assert memory_lines([]) == []


@pytest.mark.parametrize("devices", [1, 8])
def test_lines_of_memory_are_those_of_predictions(devices: int) -> None:
    setups = [
        Setup(model=model, hardware=MACHINES[0], sequence_tokens=512, parallel=shard_all(devices))
        for model in MODELS[:3]
    ]
    for setup, lines in zip(setups, memory_lines(setups), strict=True):
        for policy, (one, each) in zip(auto_policies("flash"), lines, strict=True):
            for micro in (1, 2, 7):
                asked = replace(
                    setup, recompute=policy, micro_batch_sequences=micro, batch_sequences=2 * micro * devices
                )
                assert step(asked).device_bytes.total == pytest.approx(one + (micro - 1) * each, abs=16)
