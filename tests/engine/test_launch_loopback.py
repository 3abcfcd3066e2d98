"""Ranks of one machine can be reached from that machine alone, and run nothing that lies in the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flopwise.base import processes
from flopwise.base.processes import python_words, search_path
from tests.support.launched import launch, wait_for

LISTENING = "0A"
MEETING = """
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from torch import distributed
    from flopwise.engine.launch import Group, rank_of
    with Group(rank_of(os.environ), "cpu"):
        total = torch.ones(1)
        distributed.all_reduce(total)
        assert total.item() == 2
        note(f"ready {rank}", os.getpid())
        while not (folder / "seen").exists():
            time.sleep(0.02)
"""


def listened_on(process: int) -> set[str]:
    """Addresses on which a process listens, as the system writes them: 0100007F is 127.0.0.1."""
    own = {link.readlink().name for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.parametrize("libuv", ["1", "0"])
def test_ranks_listen_on_the_loopback_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libuv: str) -> None:
    monkeypatch.setenv("USE_LIBUV", libuv)
    with launch(tmp_path, MEETING, 2, stderr=subprocess.PIPE) as launcher:
        names = [tmp_path / f"ready {rank}" for rank in range(2)]
        wait_for(lambda: all(name.exists() for name in names) or launcher.poll() is not None, "ranks did not meet")
        assert all(name.exists() for name in names), launcher.communicate()[1]
        first, second = (listened_on(int(name.read_text())) for name in names)
        (tmp_path / "seen").touch()
        assert launcher.wait(timeout=120) == 0
    assert first == second == {"0100007F"}


def test_an_interface_that_is_named_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    body = """
        note(f"ready {rank}", os.environ["NCCL_SOCKET_IFNAME"] + " " + os.environ["GLOO_SOCKET_IFNAME"])
    """
    with launch(tmp_path, body, 1) as launcher:
        assert launcher.wait(timeout=120) == 0
    assert (tmp_path / "ready 0").read_text() == "eth7 lo"


# -- modules of the working directory --------------------------------------------------------------------------------


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules that leave a mark when they are imported."""
    for name in ("torch", "msgspec", "typer", "flopwise/__init__"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'sprung')!r}).touch()\nraise SystemExit(99)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_process_of_ours_imports_nothing_of_the_working_directory(trapped: Path) -> None:
    ran = subprocess.run(python_words("flopwise", "--version"), capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout[:9]) == (0, "flopwise ")
    assert not (trapped / "sprung").exists()


def test_ranks_import_nothing_of_the_working_directory(trapped: Path) -> None:
    flopwise = Path(sys.executable).parent / "flopwise"
    (trapped / "text.txt").write_text("some text " * 200)
    words = ["tiny-none", "--gpus", "2", "--device", "cpu", "--data", "text.txt"]
    ran = subprocess.run([flopwise, "train", *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stderr.count("error: ") == 1
    code = "from flopwise.engine.spawning import spawn; raise SystemExit(spawn(['--version'], 2))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not (trapped / "sprung").exists()


def test_flopwise_that_is_found_beside_what_runs_is_found_by_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = str(Path(processes.__file__).parents[2])
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != Path(ours).resolve()]
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [ours, *elsewhere])
    assert search_path() == {"PYTHONPATH": ours}
    monkeypatch.setenv("PYTHONPATH", "/others")
    assert search_path() == {"PYTHONPATH": f"{ours}{os.pathsep}/others"}
    monkeypatch.setattr(sys, "path", [str(tmp_path), ours, *elsewhere])
    assert search_path() == {}
    monkeypatch.setattr(sys, "path", [ours, ours, *elsewhere])
    assert search_path() == {}
