"""Saving under adversity: full disks, kills at any moment, several savers. A checkpoint is whole or not there."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.engine.weights import checkpoint as module
from flopwise.engine.weights.checkpoint import checkpoints, latest, load
from tests.engine.test_checkpoint import check_step, names, save_step

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("code", "hint"),
    [(errno.ENOSPC, "keep fewer"), (errno.EDQUOT, "keep fewer"), (errno.EFBIG, "ulimit"), (errno.EACCES, "permission")],
)
@pytest.mark.parametrize("call", range(1, 7))
def test_a_write_that_fails_changes_nothing(
    code: int, hint: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    calls = 0
    really = os.fsync

    def failing(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(code, os.strerror(code))
        really(handle)

    monkeypatch.setattr(os, "fsync", failing)
    # The sixth is that of the folder after the renaming: what was there is then beside what is new.
    for step in (3, 2) if call < 6 else (3,):
        calls = 0
        with pytest.raises(FlopwiseError, match="cannot save") as caught:
            save_step(tmp_path, step)
        assert os.strerror(code) in (caught.value.why or "") and hint in (caught.value.hint or "")
        after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert {path: after[path] for path in before} == before
        assert call == 6 or after == before
    found = latest(tmp_path)
    assert found is not None
    check_step(load(found))


def test_folders_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError, match="cannot save"):
        save_step(tmp_path / "nothing", 1)
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(FlopwiseError, match="cannot save"):
        save_step(tmp_path, 1)


def in_child(body: str, folder: Path) -> str:
    """Run where limits, forks and kills hurt nobody."""
    start = f"""
        import os, random, resource, signal, sys, time
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from flopwise.base.errors import FlopwiseError
        from flopwise.engine.weights.checkpoint import *
        from tests.engine.test_checkpoint import check_step, names, save_step
        folder = Path({str(folder)!r})
    """
    script = textwrap.dedent(start) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_limit_on_files_stops_a_save_and_no_more(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    in_child(
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for limit in (10, 700, 100_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                save_step(folder, 2, elements=50_000)
            except FlopwiseError as error:
                assert "File too large" in error.why and "ulimit" in error.hint, error
            else:
                raise AssertionError(limit)
            assert names(folder) == ["step-00000001"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        save_step(folder, 2, elements=50_000)
        check_step(load(latest(folder)), 50_000)
        """,
        tmp_path,
    )
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    # A child saves in a loop and tells every step it has saved; each goes on from what the one before has left.
    in_child(
        """
        elements, chance = 1_000_003, random.Random()
        started = time.monotonic()
        save_step(folder, 1, elements=elements)
        save_s = time.monotonic() - started
        done = 1
        for kill in range(20):
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                while True:
                    save_step(folder, done, elements=elements)
                    os.write(writer, b"%d\\n" % done)
                    done += 1
            os.close(writer)
            time.sleep(chance.uniform(0, 6 * save_s))
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
            told = [int(step) for step in os.fdopen(reader).read().split()]
            found = load(latest(folder))
            check_step(found, elements)
            last = told[-1] if told else done
            assert last <= found.state.step <= last + 1, (last, found.state.step)
            done = found.state.step
        assert done > 3, done
        save_step(folder, done + 1, elements=elements)
        assert names(folder) == [f"step-{step:08d}" for step in (done, done + 1)], names(folder)
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_a_kill_before_any_single_change_of_the_folder(tmp_path: Path) -> None:
    # Python tells a hook before it opens, renames or removes anything: the process ends itself at the first such call,
    # then at the second, and so on until a save gets through.
    output = in_child(
        """
        changes = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
        moments = 0
        for first, then, keep in ((1, 2, 1), (1, 1, 1), (1, 2, 2)):
            survived, at = False, 0
            while not survived:
                at += 1
                root = folder / f"{first}-{then}-{keep}-{at}"
                root.mkdir()
                save_step(root, first)
                child = os.fork()
                if not child:
                    calls = 0
                    def hook(event, arguments):
                        global calls
                        calls += event in changes
                        if calls == at:
                            os._exit(9)
                    sys.addaudithook(hook)
                    save_step(root, then, keep=keep)
                    os._exit(0)
                survived = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                found = load(latest(root))
                check_step(found)
                assert found.state.step == then if survived else found.state.step in (first, then)
                save_step(root, then, keep=1)
                assert names(root) == [f"step-{then:08d}"], names(root)
                check_step(load(latest(root)))
            moments += at
        print(moments)
        """,
        tmp_path,
    )
    assert int(output) > 40


def test_savers_that_overlap_take_turns(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(steps: range) -> None:
        try:
            for step in steps:
                save_step(tmp_path, step, keep=3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(range(first, 13, 2),)) for first in (1, 2, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found = checkpoints(tmp_path)
    assert [entry.problem for entry in found] == [""] * len(found) and found[0].step == 12
    for entry in found:
        check_step(load(entry.path))
    assert all(name.startswith("step-") for name in names(tmp_path))


def test_a_saver_that_never_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.05)
    save_step(tmp_path, 1)
    with module._lock(tmp_path / "checkpoints"), pytest.raises(FlopwiseError, match="another process has been"):
        save_step(tmp_path, 2)
    save_step(tmp_path, 2)
