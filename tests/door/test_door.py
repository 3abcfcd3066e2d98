"""`import flopwise as fw`: names or objects alike, answers with their interval, short in a terminal and a notebook."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flopwise as fw
from flopwise.cli import app
from flopwise.door.planning import plan_cluster
from flopwise.plan.cluster.answer import answer as search
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import Setup
from flopwise.work.formats import parse_formats

TINY = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 96, "vocab": 264, "context": 64}


def answer(*words: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(CliRunner().invoke(app, [*words, "-o", "json"]).stdout)
    return found


def test_a_prediction_is_the_command_lines_and_has_its_interval() -> None:
    found = fw.predict("llama-3-8b", on="h100-sxm", seq="8k", batch=16)
    told = answer("predict", "llama-3-8b", "--on", "h100-sxm", "--seq", "8k", "--batch", "16")
    assert found.interval is not None
    assert (found.step_s, found.interval.low_s) == (told["step_s"], told["interval"]["low_s"])  # type: ignore[index]


def test_names_paths_and_objects_are_taken_alike(tmp_path: Path) -> None:
    from flopwise.base.files import to_toml

    path = tmp_path / "mine.toml"
    path.write_text(to_toml(fw.load_hardware("h200")))
    by_name = fw.predict("gpt2", on="h200", seq="1k", batch="8", precision="bf16-mixed", device_mem="40GiB")
    by_object = fw.predict(
        fw.load_model("gpt2"),
        on=fw.load_hardware("h200"),
        seq=1024,
        batch=8,
        precision=parse_formats("bf16-mixed"),
        device_mem=40 * 2**30,
    )
    assert (
        by_name
        == by_object
        == fw.predict("gpt2", on=path, seq=1024, batch=8, precision="bf16-mixed", device_mem=40 * 2**30)
    )
    spread = fw.predict("gpt2", on="h200", devices=8, parallel="dp8 zero3", batch=64)
    assert spread == fw.predict("gpt2", on="h200", parallel=Parallel(data=8, zero=3), batch=64)
    assert fw.predict("gpt2", on="h200", changes={"layers": 2}).model == "gpt2+layers=2"


def test_a_plan_for_one_device_is_the_command_lines(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    caps = {"device_mem": "10GiB", "host_mem": "20GiB"}
    found = fw.plan("gpt2", on="h100", seq="1k", batch=16, write=path, device_mem="10GiB", host_mem="20GiB")
    told = answer(
        *("plan", "gpt2", "--on", "h100-sxm", "--seq", "1k", "--batch", "16"),
        *(word for name, cap in caps.items() for word in (f"--{name.replace('_', '-')}", cap)),
    )
    assert found.forecast.step_s == told["step_s"]
    assert found.interval is not None
    assert found.plan.hardware == told["hardware"] == "h100-sxm"
    assert answer("predict", str(path))["step_s"] == found.forecast.step_s


def test_a_plan_for_many_devices_is_the_command_lines(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    found = fw.plan("gpt2", on="h100-sxm", devices=8, seq="1k", batch=64, write=path)
    told = answer("plan", "gpt2", "--on", "h100-sxm", "--gpus", "8", "--seq", "1k", "--batch", "64")
    assert found.prediction.step_s == told["prediction"]["step_s"]  # type: ignore[index]
    assert found.prediction.interval is not None
    assert found.answer.best.parallel == found.plan.parallel
    assert answer("predict", str(path))["step_s"] == found.prediction.step_s


def test_a_plan_for_many_devices_is_predicted_for_the_batch_it_was_searched_with() -> None:
    """Where nobody says, a search takes a sequence for each device; data ranks of the best strategy may be fewer."""
    asked = Setup(model=fw.load_model("gpt2", changes=TINY), hardware=fw.load_hardware("h200"), hardware_name="h200")
    found = search(asked, 2)
    best = replace(found.best, batch_sequences=48, micro_batch_sequences=4, parallel=Parallel(tensor=2))
    other = replace(found, best=best)
    planned = plan_cluster(asked, other, convention="causal")
    assert (planned.plan.batch_sequences, planned.prediction.batch_sequences) == (48, 48)
    assert "tokens" in planned.prediction.chosen["batch_sequences"]


def test_what_does_not_fit_is_raised_with_its_bytes() -> None:
    with pytest.raises(fw.DoesNotFit) as caught:
        fw.plan("gpt-3-175b", on="a100-80gb", devices=8)
    assert caught.value.needed_bytes is not None
    assert caught.value.needed_bytes > 80 * 2**30
    assert caught.value.hint == "more devices, `offload=True`, or a shorter seq"


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        ({"seq": "8q"}, "seq: cannot read '8q'", "8k"),
        ({"batch": 4, "micro": 8}, "micro-batch of 8", "micro=4 or less"),
        ({"device_mem": 80}, "device_mem: 80 bytes are no device's memory", 'device_mem="80GiB"'),
        ({"device_mem": "1KiB"}, "device_mem: 1,024 bytes are no device's memory", 'device_mem="40GiB"'),
        ({"batch": 4, "batch_tokens": "8k"}, "both a batch", "keep batch or batch_tokens"),
        ({"devices": 0}, "devices: 0 is no number of devices", "devices=8"),
        ({"batch": -1}, "batch: a number of sequences cannot be negative, got -1\n", "for instance 48"),
        ({"recompute": "ful"}, "recompute cannot be 'ful'", 'recompute="full"'),
        ({"precision": "bf17"}, "precision: ", "bf16"),
    ],
)
def test_errors_speak_of_keywords(words: dict[str, object], what: str, hint: str) -> None:
    with pytest.raises(fw.FlopwiseError) as caught:
        fw.predict("gpt2", on="h100-sxm", **words)  # type: ignore[arg-type]
    assert what in str(caught.value)
    assert hint in str(caught.value.hint)
    assert "--" not in str(caught.value)


def test_keywords_of_the_other_kind_of_plan_are_refused() -> None:
    with pytest.raises(fw.FlopwiseError, match=r"^micro without devices\n"):
        fw.plan("gpt2", on="h100-sxm", micro=2)  # type: ignore[call-overload]
    with pytest.raises(fw.FlopwiseError, match=r"^host_mem beside devices\n"):
        fw.plan("gpt2", on="h100-sxm", devices=2, host_mem="1GiB")  # type: ignore[call-overload]


def test_answers_are_short() -> None:
    found = fw.predict("llama-3-8b", on="h100-sxm", seq="8k", batch=16)
    plan = fw.plan("gpt2", on="h100-sxm", seq="1k", batch=16)
    spread = fw.plan("gpt2", on="h100-sxm", devices=2, seq="1k", batch=16)
    for one in (found, plan, spread):
        assert len(repr(one)) < 120
        assert 5 <= len(str(one).splitlines()) <= 12
        assert one._repr_html_().startswith("<table><tr><th>model</th><td>")
    assert repr(found).startswith("<Prediction llama-3-8b on h100-sxm, ")
    assert "interval" in str(found)


def test_profiles_and_results_are_read(tmp_path: Path) -> None:
    record = fw.train(
        fw.load_model("llama-3-8b", changes=TINY),
        steps=3,
        batch=2,
        device="cpu",
        checkpoint=False,
        profile_steps=1,
        store=tmp_path,
        seq=32,
    )
    assert record.state == "done"
    assert "loss" in str(record)
    rows = fw.results(tmp_path)
    assert [row.run for row in rows] == [record.id]
    assert rows.to_csv().count("\r\n") == 2
    assert ">ok</td>" in rows._repr_html_()
    assert str(rows).count("\n") == 3
    with pytest.raises(fw.FlopwiseError, match="there is no store"):
        fw.results(tmp_path / "nowhere")
    with pytest.raises(fw.FlopwiseError, match=r"is no store\n.*no run and no sweep\nhint: .* as `fw\.train\(\)` made"):
        fw.results(tmp_path / record.id)
    (tmp_path / "new").mkdir()
    assert fw.results(tmp_path / "new") == []
    assert fw.results(tmp_path, what=["last"], best=True, price=2.0)[0].tokens_per_dollar is not None
    profile = fw.read_profile(tmp_path / record.id)
    assert profile.format == "flopwise"
    assert all(verdict.kind in str(verdict) for verdict in fw.verdicts(profile))
    with pytest.raises(fw.FlopwiseError, match="no profile is called 'nobody'"):
        fw.read_profile(tmp_path / record.id, section="nobody")


@pytest.mark.parametrize("first", ["flopwise.predict.step", "flopwise.door", "flopwise.train.request", "flopwise"])
def test_packages_are_functions_too_whatever_was_imported_first(first: str) -> None:
    code = (
        f"import {first}\nimport flopwise as fw\nfrom flopwise import predict, plan, train\n"
        "from flopwise.predict.step import step\nfrom flopwise.plan.cluster.search import fastest\n"
        "assert fw.predict is predict and callable(plan) and callable(train)\n"
        "print(fw.predict('gpt2', on='h200').model)\nimport sys\nassert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (result.stdout, result.stderr) == ("gpt2\n", "")


def test_importing_is_lazy() -> None:
    code = "import flopwise, sys\nassert not {'numpy', 'msgspec', 'torch', 'flopwise.door'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.stderr == ""


def test_signatures_are_those_of_the_functions() -> None:
    from flopwise import door

    for name in ("predict", "plan", "train"):
        assert inspect.signature(getattr(fw, name)) == inspect.signature(getattr(door, name))


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: fw.predict(5), "5 is no model"),  # type: ignore[arg-type]
        (lambda: fw.predict("gpt2", on=None), "null is no hardware"),  # type: ignore[arg-type]
        (lambda: fw.predict("gpt2", on="h200", changes=["layers=3"]), "changes cannot be a list of 1\na mapping"),  # type: ignore[arg-type]
        (lambda: fw.verdicts("x"), "'x' is no profile"),  # type: ignore[arg-type]
    ],
)
def test_objects_of_another_kind_are_refused_in_words(call: Callable[[], object], what: str) -> None:
    with pytest.raises(fw.FlopwiseError, match=what) as raised:
        call()
    assert raised.value.hint


def test_several_devices_have_their_interval_and_the_ceiling_beside() -> None:
    found = fw.predict("gpt2", on="h200", devices=8, parallel="tp4")
    printed = str(found)
    assert "dp2 tp4" in printed
    assert "the kernels' ceiling" in printed
    assert found.interval is not None and found.ceiling_s is not None
    assert found.ceiling_s <= found.interval.low_s < found.step_s < found.interval.high_s <= 4 * found.interval.low_s


def test_help_is_that_of_the_function() -> None:
    assert (fw.predict.__doc__ or "").startswith("Predict a training step")
