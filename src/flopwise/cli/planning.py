"""What the planner's page is answered with: questions in words to views, and searches in a process of their own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from flopwise.base.errors import FlopwiseError

if TYPE_CHECKING:
    from flopwise.door.questions import Question

View = dict[str, Any]
MOST_WORDS = 32
PRECISIONS = ("bf16", "bf16-mixed", "bf16-amp", "fp16-mixed", "fp16-amp", "fp32", "tf32", "fp8")
OPTIMIZERS = ("adamw", "lion", "sgd")


def options() -> View:
    """What the page's controls offer, and what goes without saying."""
    from flopwise.catalog.load import hardware_names, model_names, stack_names
    from flopwise.door.questions import DEFAULTS
    from flopwise.setup.stack import NO_STACK
    from flopwise.work.work import RECOMPUTE_POLICIES

    usual = {name: value for name, value in DEFAULTS.items() if name != "config"}
    return {
        # What is asked first is said, so that a command line and an address hold it.
        "question": usual,
        "usual": {name: value for name, value in usual.items() if name not in ("model", "on")},
        "prices": {},
        "options": {
            "models": model_names(),
            "hardware": hardware_names(),
            "precisions": PRECISIONS,
            "recomputes": tuple(RECOMPUTE_POLICIES),
            "optimizers": OPTIMIZERS,
            "stacks": (NO_STACK, *stack_names()),
        },
    }


def read_query(query: str) -> Question:
    """The question of a request's query."""
    from flopwise.door.questions import read_question

    try:
        words = parse_qsl(
            query, keep_blank_values=True, strict_parsing=bool(query), errors="strict", max_num_fields=MOST_WORDS
        )
    except ValueError:
        raise FlopwiseError("the question cannot be read", hint="?model=llama-3-8b&on=h200") from None
    return read_question(words)


# -- answers ---------------------------------------------------------------------------------------------------------


def predicted(question: Question) -> View:
    """At once: a prediction, or why there is none."""
    from flopwise.door.questions import command, predict_question, whole_device
    from flopwise.report.page.planner import prediction_view, refusal_view

    line = command(question, "predict")
    try:
        return {**prediction_view(predict_question(question), line), "whole": whole_device(question)}
    except FlopwiseError as error:
        return refusal_view(error, line)


def planned(question: Question) -> View:
    """After a search: the fastest plan, or why there is none."""
    from flopwise.door.questions import command, hardware_asked, model_asked, plan_question
    from flopwise.records.plan import Planned
    from flopwise.report.page.planner import cluster_view, plan_view, refusal_view

    line = command(question, "plan", write="plan.toml")
    try:
        found = plan_question(question)
    except FlopwiseError as error:
        return refusal_view(error, line)
    hardware = hardware_asked(question)
    if isinstance(found, Planned):
        return plan_view(found, line, simulated_step(found, model_asked(question), hardware))
    return cluster_view(found, hardware.title, line)


def simulated_step(found: Any, model: Any, hardware: Any, rounds: int | None = None) -> View:  # noqa: ANN401 - a plan, its model and its hardware
    """The plan's step as the page draws it."""
    from flopwise.plan.device.forecast import TRACED_ROUNDS, trace_step
    from flopwise.predict.simulate.simulator import memory_points, waits_of
    from flopwise.report.page.planner import step_view

    simulation = trace_step(found.plan, model, hardware, rounds=rounds or TRACED_ROUNDS)
    return step_view(
        simulation,
        memory_points(simulation),
        waits_of(simulation),
        rounds=found.plan.rounds_per_step,
        cap=found.plan.device_memory_bytes,
    )


def around(question: Question) -> View:
    """The same on every device, and what would help."""
    from flopwise.door.questions import elsewhere, nearby, predict_question
    from flopwise.report.page.planner import device_rows, help_chips

    rows = device_rows(elsewhere(question))
    try:
        seen = predict_question(question)
    except FlopwiseError:
        return {"devices": rows, "helps": []}
    return {"devices": rows, "helps": help_chips(nearby(question, seen), seen)}


def view_text(view: Mapping[str, Any]) -> str:
    from flopwise.store.runs import to_text

    return to_text(view, indent=0)


# -- searches --------------------------------------------------------------------------------------------------------

MOST_KEPT = 256
"""Answers of searches that are kept: a map of caps has some 20."""
LOOK_S = 0.1
"""How often is looked whether an answer is still waited for."""
NICE = 5
"""A search lets predictions go first."""


class Searcher:
    """A process that searches, a question a line; it ends with the pipe that it reads, and when nobody waits."""

    def __init__(self) -> None:
        from flopwise.base.processes import python_words, search_path

        self._process = subprocess.Popen(  # noqa: S603 - our own words
            python_words("flopwise.cli.planning"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | search_path(),
            # Ctrl-C is for the server, which then closes the pipe.
            start_new_session=True,
        )

    def ask(self, query: str, is_wanted: Callable[[], bool]) -> str | None:
        """The answer; None where nobody waits for it any more, which ends the process."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{json.dumps(query)}\n".encode())
        stdin.flush()
        found = b""
        while not found.endswith(b"\n"):
            if select.select([stdout], [], [], LOOK_S)[0]:
                part = os.read(stdout.fileno(), 2**20)
                if not part:
                    raise FlopwiseError("the search ended without an answer", hint="ask again")
                found += part
            elif not is_wanted():
                return None
        return found.decode()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Searches:
    """Searches one after another, in a process beside the server, so that predictions are answered meanwhile."""

    def __init__(self, start: Callable[[], Searcher] = Searcher) -> None:
        self._start = start
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._turn = threading.Lock()
        self._searcher: Searcher | None = None

    def ask(self, query: str, is_wanted: Callable[[], bool]) -> str | None:
        """The answer as JSON, kept for the next time; None where nobody waits for it any more."""
        if query in self._kept:
            return self._kept[query]
        with self._my_turn(is_wanted) as mine:
            if not mine or query in self._kept:
                return self._kept.get(query)
            return self._search(query, is_wanted)

    @contextmanager
    def _my_turn(self, is_wanted: Callable[[], bool]) -> Iterator[bool]:
        mine = self._turn.acquire(timeout=LOOK_S)
        while not mine and is_wanted():
            mine = self._turn.acquire(timeout=LOOK_S)
        try:
            yield mine
        finally:
            if mine:
                self._turn.release()

    def _search(self, query: str, is_wanted: Callable[[], bool]) -> str | None:
        self._searcher = self._searcher or self._start()
        found = None
        try:
            found = self._searcher.ask(query, is_wanted)
        finally:
            if found is None:
                self.close()
        if found is not None:
            self._kept[query] = found
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return found

    def close(self) -> None:
        if self._searcher is not None:
            self._searcher.close()
            self._searcher = None


def answer_searches() -> None:
    """The process of a `Searcher`: questions on stdin, answers on stdout, a line each."""
    os.nice(NICE)
    for line in sys.stdin:
        sys.stdout.write(f"{view_text(planned(read_query(json.loads(line)))).strip()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    answer_searches()
