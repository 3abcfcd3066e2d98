"""Questions as the page asks them: the same answers as `fw.predict`, `fw.plan` and the command line, and no files."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.base.units import exact_bytes, parse_bytes
from flopwise.catalog.load import hardware_names, load_hardware, load_model
from flopwise.cli import app, planning
from flopwise.cli.planning import Searches, around, planned, predicted, read_query
from flopwise.door.questions import CONFIG_NAME, LONGEST_CONFIG, Question, command, read_question
from flopwise.plan.device.forecast import trace_step
from flopwise.predict.simulate.simulator import waits_of

CHOICES: dict[str, tuple[str, ...]] = {
    "model": ("llama-3-8b", "gpt2", "mpt-1b", "qwen3-0.6b", "mixtral-8x7b", "bert-base", "gemma-2-2b"),
    "on": ("h200", "h100-sxm", "a100-80gb", "rtx-4090", "mi300x", "trn2", "H100"),
    "gpus": ("1", "1", "1", "8", "64"),
    "seq": ("auto", "512", "1k", "2k"),
    "batch_tokens": ("auto", "64k", "256k"),
    "device_mem": ("auto", "12GiB", "20GiB"),
    "precision": ("auto", "bf16", "fp32", "bf16-mixed"),
    "recompute": ("auto", "none", "full"),
    "optimizer": ("adamw", "lion", "sgd"),
    "stack": ("kernels", "torchtitan"),
    "lora": ("auto", "auto", "8"),
}


def a_question(number: int) -> Question:
    random = Random(number)  # noqa: S311 - a reproducible draw
    return Question(**{name: random.choice(values) for name, values in CHOICES.items()})


def keywords(question: Question) -> dict[str, Any]:
    """The same for `fw.predict`."""
    given = {name: getattr(question, name) for name in CHOICES if name not in ("model", "gpus", "lora")}
    return {**given, "devices": question.gpus, "lora": None if question.lora == "auto" else int(question.lora)}


@pytest.mark.parametrize("number", range(50))
def test_a_question_is_answered_as_by_predict(number: int) -> None:
    question = a_question(number)
    view = predicted(question)
    try:
        same = fw.predict(question.model, **keywords(question))
    except FlopwiseError:
        assert view["kind"] == "refused" and view["what"]
        return
    figures = ("step_s", "tokens_per_s", "mfu", "hfu", "model_flops", "batch_tokens", "bound", "devices")
    assert {name: view[name] for name in figures} == {name: getattr(same, name) for name in figures}
    assert sum(view["bars"][0]["bytes"]) == same.device_bytes.total
    assert (view["fit"]["tone"] != "bad") == same.fits
    if same.interval:
        assert (view["low_s"], view["high_s"]) == (same.interval.low_s, same.interval.high_s)
        assert view["low_tokens_per_s"] == pytest.approx(same.batch_tokens / same.interval.high_s)
    else:
        assert view["low_s"] is None and view["words"]["speed_range"] == ""


@pytest.mark.parametrize("number", [0, 3, 7, 11])
def test_the_line_that_is_shown_prints_the_figures_that_are_shown(number: int) -> None:
    question = a_question(number)
    view = predicted(question)
    done = CliRunner().invoke(app, [*shlex.split(view["command"])[1:], "-o", "json"])
    if view["kind"] == "refused":
        assert done.exit_code != 0
        return
    row = json.loads(done.stdout)
    assert (row["step_s"], row["mfu"]) == (view["step_s"], view["mfu"])
    table = CliRunner().invoke(app, shlex.split(view["command"])[1:]).stdout
    for name in ("speed", "mfu", "step", "hfu"):
        assert view["words"][name] in table


def test_a_plan_is_that_of_plan_and_its_step_is_drawn() -> None:
    question = Question(model="gpt2", on="rtx-4090", seq="1k", batch="8", device_mem="3GiB", host_mem="16GiB")
    view = planned(question)
    same = fw.plan("gpt2", on="rtx-4090", seq="1k", batch=8, device_mem="3GiB", host_mem="16GiB")
    assert isinstance(same, fw.Planned)
    assert (view["step_s"], view["tokens_per_s"]) == (same.forecast.step_s, same.forecast.tokens_per_s)
    held = {bar["place"]: dict(zip(bar["owners"], bar["bytes"], strict=True)) for bar in view["bars"]}
    assert held["device"] == {owner: size for owner, size in same.forecast.device_bytes.items() if size}
    assert sum(seconds for _, seconds, *_ in view["parts"]) == pytest.approx(same.forecast.step_s, rel=1e-4)
    line = shlex.split(view["command"])
    assert line[:3] == ["flopwise", "plan", "gpt2"] and line[-2:] == ["-w", "plan.toml"]

    step = view["step"]
    played = trace_step(same.plan, load_model("gpt2"), load_hardware("rtx-4090"))
    assert len(step["start_ns"]) == len(played.program.tasks) and step["end_ns"] == round(played.step_s * 1e9)
    assert sum(end - start for start, end, _ in step["waits"]) == pytest.approx(sum(played.idle.values()) * 1e9, abs=99)
    summed: dict[str, float] = {}
    for start, end, what in waits_of(played):
        summed[what] = summed.get(what, 0.0) + (end - start)
    assert summed == pytest.approx(played.idle)
    tops = [sum(sizes) for sizes in zip(*step["memory"]["bytes"], strict=True)]
    assert max(tops) == sum(played.peak_device_bytes.values()) <= 3 * 2**30


def test_several_devices_are_planned_as_a_strategy() -> None:
    question = Question(model="gpt2", on="h100-sxm", gpus="2", seq="1k", batch="16")
    view = planned(question)
    same = fw.plan("gpt2", on="h100-sxm", devices=2, seq="1k", batch=16)
    assert view["step_s"] == same.prediction.step_s and view["kind"] == "planned"
    assert view["strategies"]["rows"][0][0] == same.plan.parallel.label
    assert "--gpus 2" in view["command"]


def test_around_it_are_every_device_and_what_would_help() -> None:
    found = around(Question(model="llama-3-8b", on="a100-80gb", seq="8k"))
    names = [row["name"] for row in found["devices"]]
    assert sorted(names) == sorted(hardware_names())
    fitting = [row["tokens_per_s"] for row in found["devices"] if row["fits"]]
    assert fitting == sorted(fitting, reverse=True) and not all(row["fits"] for row in found["devices"])
    own = next(row for row in found["devices"] if row["name"] == "a100-80gb")
    seen = fw.predict("llama-3-8b", on="a100-80gb", seq="8k")
    assert own["tokens_per_s"] == seen.tokens_per_s
    for chip in found["helps"]:
        changed = replace(Question(model="llama-3-8b", on="a100-80gb", seq="8k"), **chip["change"])
        assert predicted(changed)["tokens_per_s"] / seen.tokens_per_s - 1 == chip["gain"]
        assert chip["words"]


# -- what is read ----------------------------------------------------------------------------------------------------


def test_a_dropped_configuration_is_described() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "_name_or_path": "/home/somebody/tiny-one",
    }
    view = predicted(Question(config=json.dumps(config), on="h200"))
    assert view["model"] == "tiny-one" and view["kind"] == "predicted"
    assert command(Question(config=json.dumps(config)), "plan").startswith(f"flopwise plan {CONFIG_NAME} --on h200")
    for bad in ("[1]", "{", "{}", '{"model_type": "nothing"}', "[" * 9000):
        assert predicted(Question(config=bad))["kind"] == "refused"


@pytest.mark.parametrize(
    "words",
    [
        [("model", "../../etc/passwd")],
        [("model", "model.toml")],
        [("model", "Qwen/Qwen3-8B")],
        [("on", "./mine.toml")],
        [("on", "this-machine")],
        [("stack", "/etc/stack.toml")],
        [("lengths", "data.csv")],
        [("seq", "8k"), ("seq", "4k")],
        [("seq", "8" * 101)],
        [("config", " " * (LONGEST_CONFIG + 1))],
    ],
)
def test_what_is_no_word_of_the_catalogue_is_refused(words: list[tuple[str, str]]) -> None:
    with pytest.raises(FlopwiseError):
        read_question(words)


@pytest.mark.parametrize("query", ["%ff=1", "model", "a=1&" * 40, "model=llama-3-8b;on=h200"])
def test_a_query_that_is_none_is_refused(query: str) -> None:
    with pytest.raises(FlopwiseError):
        read_query(query)


def test_sizes_are_written_so_that_they_are_read_back() -> None:
    for size in (2**30 * 48, 2**20 * 1500, 12_345, 0, 80_000_000_000):
        assert parse_bytes(exact_bytes(size)) == size


# -- searches --------------------------------------------------------------------------------------------------------


class StandIn:
    """Answers at once, or never."""

    def __init__(self, answer: str | None) -> None:
        self.answer, self.asked, self.closed = answer, 0, 0

    def ask(self, query: str, _: Any) -> str | None:
        self.asked += 1
        return None if self.answer is None else f"{self.answer} to {query}"

    def close(self) -> None:
        self.closed += 1


def test_a_search_is_kept_and_one_that_nobody_waits_for_ends() -> None:
    stand_in = StandIn("an answer")
    searches = Searches(start=lambda: stand_in)  # type: ignore[arg-type,return-value]
    assert searches.ask("a", lambda: True) == searches.ask("a", lambda: True) == "an answer to a"
    assert (stand_in.asked, stand_in.closed) == (1, 0)
    stand_in.answer = None
    assert searches.ask("b", lambda: False) is None and stand_in.closed == 1
    assert searches.ask("a", lambda: True) == "an answer to a"


def test_the_searching_process_answers_line_by_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "model=gpt2&on=rtx-4090&seq=1k&batch=8"
    monkeypatch.setattr(planning, "planned", predicted)
    monkeypatch.setattr("sys.stdin", [f"{json.dumps(asked)}\n"])
    monkeypatch.setattr("os.nice", lambda _: 0)
    planning.answer_searches()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == json.loads(planning.view_text(predicted(read_query(asked))))
