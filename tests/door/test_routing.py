"""How a mixture's experts are used, in words, shares, files and profiles; what follows for predictions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware
from flopwise.predict.kernels.gemm import gemm_times
from flopwise.records.prediction import Prediction


def predicted(**keywords: object) -> Prediction:
    asked: dict[str, object] = {"on": "h100-sxm", "devices": 8, "parallel": "dp8 ep8 zero1", "seq": 4096}
    return fw.predict("qwen3-30b-a3b", **{**asked, **keywords})  # type: ignore[arg-type]


def part(step: Prediction, name: str) -> float:
    return step.parts[name]


def test_the_slowest_rank_and_the_exchange_follow_the_most_loaded_experts() -> None:
    even, uneven, more = (predicted(routing=words) for words in ("balanced", "power-law=0.3", "power-law=0.8"))
    assert even.step_s == predicted().step_s
    assert even.step_s < uneven.step_s < more.step_s
    assert even.model_flops == more.model_flops
    assert even.device_total < uneven.device_total, "it keeps what more tokens made"
    (told,) = [note for note in uneven.notes if "experts are used" in note]
    assert "the most loaded of 8 expert ranks 1.16 times" in told
    assert not [note for note in even.notes if "experts are used" in note]


def test_groups_of_uneven_rows_fill_half_a_tile_more() -> None:
    """Against products one by one, whose rows are drawn."""
    hardware = load_hardware("h200")
    peak = hardware.device.peak_flops["bf16"].value
    rows = np.random.default_rng(0).integers(400, 1_200, 4_000)

    def seconds(m: float, groups: int, *, uneven: bool) -> float:
        times = gemm_times(
            hardware.device, hardware.efficiency, m, 2048, 1536, peak_flops=peak, groups=groups, uneven=uneven
        )
        return float(times.seconds)

    # All experts' tiles together, so that no launch or last wave is in it.
    each = {int(m): seconds(float(m), 1_000, uneven=False) for m in np.unique(rows)}
    expected = sum(each[int(m)] for m in rows) / 1_000
    assert seconds(float(rows.mean()), rows.size, uneven=True) == pytest.approx(expected, rel=0.03)


def test_words_files_and_profiles_say_it(tmp_path: Path) -> None:
    shares = [[float(place == 3) + 1 for place in range(128)] for _ in range(48)]
    (tmp_path / "shares.json").write_text(json.dumps(shares), encoding="utf-8")
    (tmp_path / "one.json").write_text(json.dumps(shares[0]), encoding="utf-8")
    lines = [",".join(f"expert {number}" for number in range(128)), *(",".join(map(str, row)) for row in shares)]
    (tmp_path / "shares.csv").write_text("\n".join(lines), encoding="utf-8")
    given = [shares, shares[0], *(str(tmp_path / name) for name in ("shares.json", "one.json", "shares.csv"))]
    steps = {predicted(routing=each).step_s for each in given}
    assert len(steps) == 1
    assert steps.pop() > predicted().step_s
    profile = {"profiles": [{"values": {"busiest_expert": {"value": 2.5, "source": "measured"}}}]}
    (tmp_path / "profile.json").write_text(json.dumps(profile), encoding="utf-8")
    found, words = predicted(routing=tmp_path / "profile.json"), predicted(routing="busiest=2.5")
    assert found.step_s == words.step_s


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("power-law=much", "a number follows ="),
        ("power-law=-1", "is not between 0 and 3"),
        ("busiest=0.5", "from 1 to 16 is possible"),
        ("busiest=17", "from 1 to 16 is possible"),
        ("busiest=nan", "from 1 to 16 is possible"),
        ("nowhere.csv", "there is no file"),
        ([[1.0, 2.0]], "are not those of 128 experts"),
        ([], "no row of numbers"),
        ([["a"]], "routing cannot be"),
        ([0.5, [0.5]], "routing cannot be"),
    ],
)
def test_what_says_nothing_is_refused(given: object, told: str) -> None:
    with pytest.raises(FlopwiseError) as caught:
        predicted(routing=given)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "does not tell"),
        ("1,x\n2,3", "are not those"),
        ("x", "line 1"),
        ("[[]]", "not those"),
        ("[[0.5, 0.", "as JSON"),
    ],
)
def test_files_that_say_nothing_are_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "given").write_text(text, encoding="utf-8")
    with pytest.raises(FlopwiseError) as caught:
        predicted(routing=tmp_path / "given")
    assert told in str(caught.value)


def test_a_model_without_experts_has_no_routing() -> None:
    with pytest.raises(FlopwiseError, match="has no routing"):
        fw.predict("llama-3-8b", on="h200", routing="balanced")


def test_plans_know_it() -> None:
    one = fw.plan("olmoe-1b-7b", on="h200", device_mem="16GiB", seq=4096, routing="power-law=0.5")
    assert any("power law of 0.5" in note for note in one.notes)
    assert any("flopwise's own kernels" in note for note in one.notes)
