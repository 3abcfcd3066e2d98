"""Pickles that would build hundreds of times their size are refused before they do; snapshots of torch are read."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read.plain_pickle import Limits, plain_data
from flopwise.profile.read.reading import read_profiles

START = b"\x80\x04"
SIZE = 2**19
MOST_BYTES = 1536 * 2**20
"""Of address space, the interpreter and its libraries with it."""
MOST_BUILT = 100 * 2**20

BOMBS = {
    "lists": b"(" + b"]" * SIZE + b"l.",
    "tuples": b"(" + b"N\x85" * (SIZE // 2) + b"l.",
    "dicts": b"(" + b"}" * SIZE + b"l.",
    "sets": b"(" + b"\x8f" * SIZE + b"l.",
    "frozen sets": b"(" + b"(\x91" * (SIZE // 2) + b"l.",
    "filled sets": b"(" + b"\x8f(N\x90" * (SIZE // 4) + b"l.",
    "filled dicts": b"(" + b"}NNs" * (SIZE // 4) + b"l.",
    "marks": b"(" * SIZE + b".",
    "memo": b"]" + b"\x94" * SIZE + b".",
    "numbered memo": b"]" + b"".join(b"r%b" % n.to_bytes(4, "little") for n in range(SIZE // 5)) + b".",
    "references": b"]\x94" + b"h\x00" * (SIZE // 2) + b".",
    "lists of references": b"N\x94(" + b"](" + b"h\x00" * (SIZE // 2) + b"el.",
    "lists of a list": b"](" + b"".join(b"(" + b"N" * 20 + b"t" for _ in range(SIZE // 22)) + b"e.",
    "floats": b"(" + b"G" + b"\0" * 8 + b"G\0\0\0\0\0\0\0\1" * (SIZE // 9) + b"l.",
    "wide text": b"X" + (SIZE + 4).to_bytes(4, "little") + b"a" * SIZE + "\U0001f600".encode() + b".",
    "numbers as text": b"(" + b"I9\n" * (SIZE // 3) + b"l.",
    "keys": b"}(" + b"".join(b"J%bN" % n.to_bytes(4, "little") for n in range(SIZE // 6)) + b"u.",
    "members": b"\x8f(" + b"".join(b"J%b" % n.to_bytes(4, "little") for n in range(SIZE // 5)) + b"\x90.",
}

CHILD = f"""
import resource, sys
from flopwise.base.errors import FlopwiseError
from flopwise.profile.read.plain_pickle import plain_data
resource.setrlimit(resource.RLIMIT_AS, ({MOST_BYTES}, {MOST_BYTES}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        with open(path, "rb") as stream:
            plain_data(stream)
        said = "read"
    except FlopwiseError as error:
        said = str(error.why)
    print(path.rpartition("/")[2], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, said, sep="\\t")
"""


def test_no_bomb_takes_more_than_its_size_warrants(tmp_path: Path) -> None:
    """In a process of its own, one after the other: what the worst of them took is known in the end."""
    paths = [tmp_path / name for name in BOMBS]
    for path in paths:
        path.write_bytes(START + BOMBS[path.name])
    child = [sys.executable, "-c", CHILD, *map(str, paths)]
    found = subprocess.run(child, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    lines = [line.split("\t") for line in found.stdout.splitlines()]
    assert [name for name, *_ in lines] == list(BOMBS)
    # Linux counts in KiB.
    assert max(int(size) for _, size, _ in lines) * 1024 < MOST_BUILT, found.stdout
    refused = {name for name, _, said in lines if "it would take more than" in said}
    # By what they really take: an empty list is 72 bytes, a set 232.
    assert "sets" in refused


def test_references_that_double_are_refused() -> None:
    """Thirty lines of which each holds the one before twice are a billion things to whoever walks them."""
    code = START + b"N\x94" + b"".join(b"h%bh%b\x86\x94" % (bytes([n]), bytes([n])) for n in range(200)) + b"."
    with pytest.raises(FlopwiseError):
        plain_data(io.BytesIO(code))


def a_snapshot(events: int) -> dict[str, Any]:
    """As torch writes it: stacks are shared between events."""
    stacks = [
        [{"filename": f"/torch/nn/modules/m{n}.py", "line": line, "name": "forward"} for line in range(30)]
        for n in range(50)
    ]
    trace = [
        {
            **{"action": "alloc", "addr": 140_000_000_000 + 512 * n, "size": 512, "stream": 0},
            **{"time_us": 1_700_000_000_000_000 + n, "compile_context": "N/A", "frames": stacks[n % 50]},
        }
        for n in range(events)
    ]
    block = {"address": 0, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": stacks[0]}
    segment = {"device": 0, "address": 0, "total_size": 2**21, "stream": 0, "blocks": [dict(block) for _ in range(100)]}
    return {"segments": [dict(segment) for _ in range(50)], "device_traces": [trace]}


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_snapshot_is_far_from_the_limit(protocol: int) -> None:
    data = a_snapshot(20_000)
    content = pickle.dumps(data, protocol)
    assert plain_data(io.BytesIO(content), Limits(small_bytes=2**20, built_per_byte=64)) == data


def test_a_trace_that_is_given_for_every_device_is_read_once(tmp_path: Path) -> None:
    data = a_snapshot(100)
    data["device_traces"] *= 64
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(data))
    (read,) = read_profiles([tmp_path / "x.pickle"])
    assert len(read.profiles) == 1
