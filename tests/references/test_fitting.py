"""The fit of a stack's constants: known ones come back from steps that they made, whatever a few rows say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_stack
from flopwise.references.published import protocol_of, read_cases
from flopwise.references.validate.fitting import (
    fit_memory,
    fit_of,
    fit_stack,
    folds,
    held_out_predictions,
    lay_out,
    shipped_predictions,
)
from flopwise.references.validate.protocol import Case
from flopwise.setup.stack import Stack

PLAIN = Stack(name="plain", title="plain", source="made up")
KNOWN = {"products": 1.3, "attention": 1.7, "streaming": 2.2}
START = {"products": 1.0, "attention": 1.0, "streaming": 1.0}


def some_cases() -> list[Case]:
    """An eighth of the bf16 rows: every size, short and long sequences."""
    return [case for case in read_cases("mpt") if case.fitted][::8]


def test_known_constants_come_back() -> None:
    laid_out = lay_out(some_cases(), PLAIN)
    seconds = laid_out.seconds(PLAIN.with_values(KNOWN))
    found = fit_stack(laid_out, PLAIN, seconds, np.ones(laid_out.count, dtype=np.bool_), START)
    for name, value in KNOWN.items():
        assert found.value(name) == pytest.approx(value, rel=1e-3)


def test_a_few_odd_rows_change_little() -> None:
    laid_out = lay_out(some_cases(), PLAIN)
    seconds = laid_out.seconds(PLAIN.with_values(KNOWN))
    seconds[[3, 11, 20]] *= np.array([5.0, 0.3, 2.0])
    found = fit_stack(laid_out, PLAIN, seconds, np.ones(laid_out.count, dtype=np.bool_), START)
    for name, value in KNOWN.items():
        assert found.value(name) == pytest.approx(value, rel=3e-2)


def test_rows_that_are_left_out_have_no_say_and_fits_repeat() -> None:
    laid_out = lay_out(some_cases(), PLAIN)
    seconds = laid_out.seconds(PLAIN.with_values(KNOWN)) * np.linspace(0.9, 1.1, laid_out.count)
    rows = np.arange(laid_out.count) % 3 > 0
    first = fit_stack(laid_out, PLAIN, seconds, rows, START)
    seconds[~rows] = np.nan
    assert fit_stack(laid_out, PLAIN, seconds, rows, START) == first


def test_a_constant_that_no_row_tells_of_stays_where_it_started() -> None:
    cases = [case for case in some_cases() if case.setup.hardware.name == "a100-80gb"]
    laid_out = lay_out(cases, PLAIN)
    seconds = laid_out.seconds(PLAIN.with_values({"products": 1.4}))
    start = {"products": 1.0, "attention.Hopper": 3.0}
    found = fit_stack(laid_out, PLAIN, seconds, np.ones(len(cases), dtype=np.bool_), start)
    assert found.constants["products"].value == pytest.approx(1.4, rel=1e-3)
    assert found.constants["attention.Hopper"].value == pytest.approx(3.0)


def test_no_kernel_is_fitted_to_be_faster_than_memory() -> None:
    laid_out = lay_out(some_cases(), PLAIN)
    seconds = laid_out.seconds(PLAIN.with_values(KNOWN | {"streaming": 0.3}))
    found = fit_stack(laid_out, PLAIN, seconds, np.ones(laid_out.count, dtype=np.bool_), START)
    assert found.value("streaming") == pytest.approx(0.8)


def test_memorys_constant_comes_back() -> None:
    cases = [case for case in read_cases("nanotron") if case.reserved_bytes][::4]
    laid_out = lay_out(cases, PLAIN)
    reserved = laid_out.device_bytes(PLAIN.with_values({"activations": 1.9}))
    reserved[::10] *= 1.5
    found = fit_memory(laid_out, PLAIN, reserved, np.ones(len(cases), dtype=np.bool_), {"activations": 1.5})
    assert found.value("activations") == pytest.approx(1.9, rel=1e-3)


# -- held out ---------------------------------------------------------------------------------------------------------


def test_a_size_that_is_held_out_has_no_say_in_its_own_prediction() -> None:
    protocol, stack = protocol_of("megatron"), load_stack("megatron-lm")
    cases = read_cases("megatron")
    changed = [replace(case, step_s=2 * (case.step_s or 0)) if case.size == "18B" else case for case in cases]
    before, after = (fit_of(protocol, rows, stack) for rows in (cases, changed))
    assert before.without("18B") == after.without("18B")
    assert before.without("39B") != after.without("39B")


def test_each_size_is_predicted_by_the_fit_to_the_others_and_progress_is_told() -> None:
    protocol, cases = protocol_of("megatron"), read_cases("megatron")
    fit = fit_of(protocol, cases, load_stack("megatron-lm"))
    told: list[tuple[str, int, int]] = []
    found = held_out_predictions(fit, cases[3:5], lambda *done: told.append(done))
    assert told == [("18B", 1, 2), ("39B", 2, 2)]
    assert found.held_out.all()
    for index, size in enumerate(("18B", "39B")):
        alone = lay_out(cases[3 + index : 4 + index], fit.stack).seconds(fit.without(size))
        assert found.step_s[index] == pytest.approx(float(alone[0]))


def test_the_values_that_a_stack_ships_have_no_say_in_a_fit() -> None:
    protocol, cases = protocol_of("megatron"), read_cases("megatron")
    stack = load_stack("megatron-lm")
    other = stack.with_values({"products": 9.0, "attention": 0.1, "streaming": 7.0})
    fits = [fit_of(protocol, cases, one).without("1T") for one in (stack, other)]
    assert fits[0].constants == fits[1].constants


def test_rows_that_are_not_for_fitting_are_never_fitted_to() -> None:
    protocol, stack = protocol_of("mpt"), load_stack("llm-foundry")
    fit = fit_of(protocol, read_cases("mpt"), stack)
    assert len(fit.timed_cases) == 191
    nanotron = fit_of(protocol_of("nanotron"), read_cases("nanotron"), load_stack("nanotron"))
    assert (len(nanotron.timed_cases), len(nanotron.sized_cases)) == (125, 214)


def test_shipped_constants_know_which_sizes_they_were_fitted_to() -> None:
    first, second = read_cases("megatron"), read_cases("megatron-2")
    predicted = shipped_predictions(second, first, load_stack("megatron-lm"))
    assert [case.size for case, out in zip(second, predicted.held_out, strict=True) if out] == ["175B"] * 6


def test_folds_are_the_protocols_and_then_whatever_else_there_is() -> None:
    protocol, cases = protocol_of("megatron"), read_cases("megatron")
    assert folds(protocol, cases[::-1]) == list(protocol.sizes)
    assert folds(protocol, [replace(cases[0], size="2T"), cases[3]]) == ["18B", "2T"]


def test_one_size_alone_cannot_be_held_out() -> None:
    protocol, cases = protocol_of("megatron"), read_cases("megatron")[:1]
    fit = fit_of(protocol, cases, load_stack("megatron-lm"))
    with pytest.raises(FlopwiseError, match="no row is left to fit"):
        fit.without("1.7B")
