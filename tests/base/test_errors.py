"""Errors keep their kind, and what they carry, when they are told in other words."""

from __future__ import annotations

import pickle

from flopwise.base.errors import DoesNotFit, FlopwiseError


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
