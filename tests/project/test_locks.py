"""What `make` installs: each package that pyproject.toml names is pinned in a lock, within its bounds, with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?: ; (?P<marker>.+?))? \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?")
LOCKS = ("base", "train", "dev", "torch-cuda")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
NAMED = {
    "base": [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["build"]],
    "train": EXTRAS["train"],
    "dev": EXTRAS["dev"],
}


def pins(lock: str) -> dict[str, Version]:
    """Package → its version, of a lock in which every line is a pin or one of its hashes."""
    found: dict[str, Version] = {}
    hashes = 1
    for line in (ROOT / "locks" / f"{lock}.txt").read_text("utf-8").splitlines():
        pin = PIN.fullmatch(line)
        if pin:
            assert hashes, f"what stands before {line} has no hash"
            assert pin["name"] not in found
            found[pin["name"]], hashes = Version(pin["version"]), 0
        else:
            assert HASH.fullmatch(line), line
            hashes += 1
    assert hashes
    return found


@pytest.mark.parametrize("lock", NAMED)
def test_what_the_project_names_is_pinned_within_its_bounds(lock: str) -> None:
    pinned = pins(lock) | pins("torch-cuda")
    for line in NAMED[lock]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), line


def test_locks_agree_with_each_other() -> None:
    everything: dict[str, Version] = {}
    for lock in LOCKS:
        for name, version in pins(lock).items():
            assert everything.setdefault(name, version) == version, f"{name} of {lock}"
    assert pins("base").keys() < pins("train").keys() < pins("dev").keys()


def test_both_builds_of_torch_are_one_version_apart_from_the_rest() -> None:
    """`make` takes that for GPUs, with all of CUDA, only where there is no other."""
    builds = pins("torch-cpu")["torch"], pins("torch-cuda")["torch"]
    assert [str(build) for build in builds] == [f"{builds[1]}+cpu", str(builds[1])]
    assert not [name for name in pins("dev") if name.startswith(("nvidia-", "cuda-", "torch", "triton"))]
    assert [name for name in pins("torch-cuda") if name.startswith("nvidia-")]


def test_pip_is_told_to_check_hashes() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    installs = re.findall(r"^INSTALL := (.+)$|(pip install.+)$|\$\(PIP\) install (.+)$", text, re.MULTILINE)
    plain = [" ".join(words) for words in installs if "--require-hashes" not in " ".join(words)]
    # flopwise itself, from its folder, and the resolver of `make lock`.
    assert [words.strip() for words in plain] == ["--no-deps --no-build-isolation -e .", "uv"]
