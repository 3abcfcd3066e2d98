"""Ranks that end by an error which all of them have seen: none hangs up while another one still listens."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.launched import launch

BODY = """
    from flopwise.base.errors import FlopwiseError
    from flopwise.engine import launch
    try:
        with launch.Group(launch.rank_of(os.environ), "cpu"):
            from torch import distributed
            distributed.barrier()
            if rank == 0:
                time.sleep(1.0)
                note("first" if not (folder / "gone").exists() else "last")
            raise FlopwiseError("all have seen it")
    except FlopwiseError as error:
        note("gone" if rank else "said", error.what)
        launch.note_refusal(error)
        launch.leave(2)
"""


@pytest.mark.slow
def test_no_rank_is_gone_before_all_have_heard(tmp_path: Path) -> None:
    with launch(tmp_path, BODY, 2, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.wait() == 2
    assert (tmp_path / "first").exists() and (tmp_path / "gone").exists()
    assert (tmp_path / "said").read_text() == "all have seen it"


@pytest.mark.slow
def test_a_rank_that_fails_alone_does_not_wait_for_ever(tmp_path: Path) -> None:
    alone = BODY.replace("if rank == 0:", "if rank == 0: distributed.barrier()\n            if False:")
    with launch(tmp_path, alone, 2, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.wait() == 2
    assert (tmp_path / "gone").read_text() == "all have seen it"
    assert "lost the others" in (tmp_path / "said").read_text()
