"""Errors keep their kind, and what they carry, when they are told in other words."""

from __future__ import annotations

import pickle

import pytest

from flopwise.base.errors import DoesNotFit, FlopwiseError, nearest


def test_an_error_told_with_its_place_keeps_its_kind_and_its_bytes() -> None:
    error = DoesNotFit("no plan fits", why="too large", needed_bytes=2**30, place="host")
    told = error.within("a.toml", hint="less")
    assert isinstance(told, DoesNotFit)
    assert (told.exit_code, told.needed_bytes, told.place) == (1, 2**30, "host")
    assert str(told) == "a.toml: no plan fits\ntoo large\nhint: less"
    assert (error.what, error.hint, error.args) == ("no plan fits", None, ("no plan fits",))
    assert told.args == ("a.toml: no plan fits",)


def test_errors_go_through_pickle() -> None:
    for error in (FlopwiseError("what", why="why", hint="hint"), DoesNotFit("what", hint="hint", needed_bytes=7)):
        back = pickle.loads(pickle.dumps(error))  # noqa: S301 - ours
        assert type(back) is type(error)
        assert vars(back) == vars(error)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("llama3-8b", "llama-3-8b"), ("lama-3-8b", "llama-3-8b"), ("LLAMA-3-8", "llama-3-8b"), ("mtp", "mpt")),
        *(("gpt-2", "gpt2"), ("adam", "adamw"), ("jsn", "json"), ("torchtitn", "torchtitan"), ("ful", "full")),
        *(("fp16", "fp16-amp"), ("bf17", "bf16"), ("bert", "bert-base")),
    ],
)
def test_a_name_that_is_nearly_right_is_recognized(typed: str, meant: str) -> None:
    assert nearest(typed, KNOWN)[0] == meant


@pytest.mark.parametrize(
    "typed", ["muon", "phi-3", "gemma-2b", "composer", "checkpoint", "float32", "fp64", "all", "toaster", "xyz", ""]
)
def test_nothing_is_suggested_for_a_name_that_is_far_from_all(typed: str) -> None:
    assert nearest(typed, KNOWN) == []


KNOWN = (
    *("llama-3-8b", "gpt2", "gpt-neox-20b", "bert-base", "pythia-1b", "mpt", "mpt-3b", "torchtitan", "flopwise"),
    *("adamw", "lion", "sgd", "bf16", "fp16-mixed", "fp16-amp", "fp32", "tf32", "fp8", "pointwise", "full", "json"),
)
