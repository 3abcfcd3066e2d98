"""What the fuzzer has found stays mended; a few of its cases run with every test; it finds a fault that is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import mutate
from tests.fuzz.__main__ import FOUND
from tests.fuzz.case import Case, problem_of, read_case, write_case
from tests.fuzz.corpus import Seed, measured_once, seeds

KEPT = sorted(FOUND.iterdir()) if FOUND.is_dir() else []
CASES_OF_A_KIND = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Seed]]]:
    with measured_once():
        found: dict[str, list[Seed]] = {}
        for seed in seeds(tmp_path_factory.mktemp("corpus") / "made"):
            found.setdefault(seed.name, []).append(seed)
        yield found


@pytest.mark.slow
def test_what_is_whole_is_answered_well(corpus: dict[str, list[Seed]], tmp_path: Path) -> None:
    """A corpus that is refused would find nothing."""
    for name, several in corpus.items():
        seed = several[-1]
        whole = Case(seed.name, seed.files, seed.commands[:1], seed.ends_as)
        assert problem_of(whole, tmp_path / "scratch") == "", name


@pytest.mark.slow
def test_damage_of_every_kind_is_told_or_mended(corpus: dict[str, list[Seed]], tmp_path: Path) -> None:
    for name, several in corpus.items():
        chance = Random(name)  # noqa: S311 - the same cases every time
        for _ in range(CASES_OF_A_KIND):
            case = chance.choice(several).case(chance)
            case = Case(case.seed, case.files, case.commands[:1], case.ends_as)
            assert problem_of(case, tmp_path / "scratch") == "", name


@pytest.mark.skipif(not KEPT, reason="nothing was found so far")
@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_what_was_found_is_mended(folder: Path, tmp_path: Path) -> None:
    assert problem_of(read_case(folder), tmp_path / "scratch") == ""


def test_a_case_is_read_back_as_it_was(tmp_path: Path) -> None:
    case = Case("words", {"a/b.toml": b"\x00\xff", "c": b""}, [["show", "\u202e"]], "12")
    write_case(case, tmp_path)
    assert read_case(tmp_path) == case


@pytest.mark.parametrize("raised", [KeyError("name"), RecursionError(), MemoryError(), SystemExit(7)])
def test_faults_are_seen(raised: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    case = Case("words", {}, [["predict", "gpt2", "--on", "h200"]])
    assert problem_of(case, tmp_path / "scratch") == ""
    monkeypatch.setattr("flopwise.catalog.load.load_model", fail)
    assert problem_of(case, tmp_path / "scratch") != ""


def test_damage_is_damage_and_can_be_repeated() -> None:
    content = b'{"a": [1, 2, {"b": "text"}], "c": 3.5}\n' * 3
    for number in range(300):
        once, again = (mutate.damaged(content, Random(number)) for _ in range(2))  # noqa: S311 - see above
        assert once == again
        words = mutate.odd_words(["predict", "gpt2", "--on", "h200"], Random(number))  # noqa: S311 - see above
        assert all("\x00" not in word for word in words)
    assert len({mutate.damaged(content, Random(number)) for number in range(300)}) > 200  # noqa: S311 - see above
