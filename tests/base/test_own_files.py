"""Files that only flopwise writes: never through links, told by name where they cannot be, tidied after kills."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import append_to, write_whole
from flopwise.records.measurement import RunRecord, StepRecord
from flopwise.store import runs as store_module
from flopwise.store.runs import LOG, RunLock, StepLog, find_run, read_steps, tidy_run, trim_steps
from flopwise.store.sweeps import cell_folder, claimed
from flopwise.train import running as running_module
from flopwise.train.events import LogFile
from flopwise.train.running import run
from tests.cli.test_cli_fuzz import answered
from tests.support.listing import list_runs
from tests.support.run_stores import a_record
from tests.train.test_train_run import Recorder, asked, hardware, losses, place

__all__ = ("hardware", "place")


def a_step(number: int) -> StepRecord:
    return StepRecord(
        step=number, loss=1.0, learning_rate=0.1, step_s=1.0, tokens=8, samples=1, tokens_per_s=8.0, mfu=None
    )


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Somebody's file, which a link leads to."""
    path = tmp_path / "precious"
    path.write_text("keep me, I have no newline at the end")
    return path


def test_a_file_is_added_to_and_never_emptied(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for words in (b"one ", b"two"):
        with append_to(path) as stream:
            stream.write(words)
    assert path.read_bytes() == b"one two" and not stat.S_IMODE(path.stat().st_mode) & 0o111


def test_nothing_is_added_to_what_is_not_ours(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "made by a link")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, why in (("link", "is a link"), ("dangling", "is a link"), ("pipe", "device"), ("folder", "directory")):
        with pytest.raises(OSError, match=why):
            append_to(tmp_path / name)
    # One that somebody reads could be written to.
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="a device or a pipe"):
        append_to(tmp_path / "pipe")
    os.close(reader)
    assert precious.read_text().startswith("keep me") and not (tmp_path / "made by a link").exists()


def test_a_file_of_ours_takes_the_place_of_a_link(tmp_path: Path, precious: Path) -> None:
    link, pipe, private = tmp_path / "link", tmp_path / "pipe", tmp_path / "private"
    link.symlink_to(precious)
    os.mkfifo(pipe)
    private.touch(0o600)
    for path in (link, pipe, private):
        write_whole(path, "ours", own=True)
        assert not path.is_symlink() and path.read_text() == "ours"
    assert precious.read_text().startswith("keep me") and stat.S_IMODE(private.stat().st_mode) == 0o600


WRITERS: dict[str, Callable[[Path], object]] = {
    ".lock": lambda folder: RunLock(folder).__enter__(),
    "steps.jsonl": StepLog,
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_a_run_are_not_written_through_links(name: str, tmp_path: Path, precious: Path) -> None:
    (tmp_path / name).symlink_to(precious)
    before = precious.read_bytes()
    with pytest.raises(FlopwiseError, match="writ") as caught:
        WRITERS[name](tmp_path)
    assert "it is a link" in str(caught.value.why) and caught.value.hint
    assert precious.read_bytes() == before


def test_lines_are_not_dropped_from_what_a_link_leads_to(tmp_path: Path, precious: Path) -> None:
    precious.write_text("a line of somebody else\n")
    (tmp_path / "steps.jsonl").symlink_to(precious)
    assert trim_steps(tmp_path, 5) == 1
    assert precious.read_text() == "a line of somebody else\n" and read_steps(tmp_path) == []


def test_a_log_that_is_a_link_is_left_alone(tmp_path: Path, precious: Path) -> None:
    (tmp_path / LOG).symlink_to(precious)
    LogFile(tmp_path).on_note("a note")
    assert "a note" not in precious.read_text()


def test_a_cell_is_not_claimed_through_a_link(tmp_path: Path, precious: Path) -> None:
    folder = cell_folder(tmp_path, "a" * 12)
    folder.mkdir(parents=True)
    (folder / store_module.LOCK).symlink_to(precious)
    with pytest.raises(FlopwiseError, match="cannot write"), claimed(tmp_path, "a" * 12):
        pass


# -- what kills leave ------------------------------------------------------------------------------------------------


def test_a_run_is_tidied(tmp_path: Path) -> None:
    left = (".record.json.abc_12xy", ".steps.jsonl.00000000", ".plan.toml.zzzzzzzz", ".profile.json.a1b2c3d4")
    kept = (
        ".record.json",
        ".record.json.mine",
        ".lock",
        "record.json",
        ".notes.json.abcdefgh",
        ".record.json.ABCDEFGH",
    )
    for name in (*left, *kept):
        (tmp_path / name).touch()
    (tmp_path / ".plan.toml.aaaaaaaa").mkdir()
    tidy_run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, ".plan.toml.aaaaaaaa"}
    tidy_run(tmp_path / "nothing")


def test_what_is_left_has_a_name_that_is_tidied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.extend(path.name for path in tmp_path.iterdir()))
    store_module.write_record(tmp_path, a_record())
    assert seen and all(store_module.UNFINISHED.fullmatch(name) for name in seen)


def test_a_run_that_goes_on_clears_away_what_kills_left(place: Path) -> None:
    record = run(callbacks=[Recorder(stop_after=2)], **asked(place, steps=5))
    assert record.checkpoint is not None
    folder = find_run(place / "runs", record.id)
    (folder / ".record.json.abcdefgh").write_text("half")
    shutil.copytree(folder / record.checkpoint, folder / "checkpoints" / ".removed-step-00000001-77")
    assert run(resume="last", store=str(place / "runs")).state == "done"
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"]
    assert not list((folder / "checkpoints").glob(".removed-*"))


# -- folders that cannot be written ----------------------------------------------------------------------------------


def test_a_run_whose_folder_cannot_be_written_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run(callbacks=[Recorder(stop_after=2)], **asked(place, steps=5))
    folder, store = find_run(place / "runs", record.id), str(place / "runs")
    before = losses(folder)

    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "append_to", read_only)
        code, out, err = answered(["train", "--resume", "last", "--store", store])
    assert (code, out) == (2, "") and "nothing can be written to the folder of run" in err
    assert "Read-only file system" in err and "the answer cannot be written" not in err
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()
    code, out, err = answered(["train", "--resume", "last", "--store", store])
    assert (code, out) == (2, "") and "nothing can be written to the folder of run" in err
    assert losses(folder) == before


def test_steps_that_cannot_be_cut_off_are_still_told(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.append(a_step(1))
    log._stream.close()
    log._stream = open("/dev/full", "ab", buffering=0)  # noqa: PTH123, SIM115 - closed below
    with log, pytest.raises(FlopwiseError, match=r"cannot write .*steps\.jsonl") as caught:
        log.append(a_step(2))
    assert caught.value.why == os.strerror(errno.ENOSPC)


def test_what_came_first_is_told_where_the_record_cannot_be_written_either(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = store_module.write_record

    def full(folder: Path, record: RunRecord) -> None:
        if record.state == "failed":
            raise FlopwiseError("cannot write record.json", why=os.strerror(errno.ENOSPC))
        really(folder, record)

    def no_space(*_: object) -> None:
        raise FlopwiseError("cannot write steps.jsonl", why=os.strerror(errno.ENOSPC))

    monkeypatch.setattr(running_module, "write_record", full)
    monkeypatch.setattr(StepLog, "append", no_space)
    with pytest.raises(FlopwiseError, match=r"cannot write steps\.jsonl"):
        run(**asked(place, steps=2))


# -- names that are no UTF-8 -----------------------------------------------------------------------------------------


def test_a_store_may_have_any_name(place: Path) -> None:
    store = str(place / os.fsdecode(b"runs \xff"))
    stopped = run(callbacks=[Recorder(stop_after=2)], **asked(place, steps=6, store=store))
    assert stopped.state == "interrupted"
    told = Recorder()
    assert run(callbacks=[told], resume="last", store=store).state == "done" and not told.notes
    assert told.started[0].first_step == 3
    weights = os.path.join(store, stopped.id, "checkpoints", "step-00000006")  # noqa: PTH118
    with pytest.raises(FlopwiseError, match="cannot be written down") as caught:
        run(**asked(place, steps=1, weights=weights))
    assert "no UTF-8" in str(caught.value.why) and not list_runs(place / "runs")


def test_data_whose_name_cannot_be_written_down_is_told(place: Path) -> None:
    data = place / os.fsdecode(b"text \xff.txt")
    shutil.copy(place / "text.txt", data)
    with pytest.raises(FlopwiseError, match="cannot be written down") as caught:
        run(**asked(place, steps=1, data=(str(data),)))
    assert "rename" in str(caught.value.hint) and not list_runs(place / "runs")
