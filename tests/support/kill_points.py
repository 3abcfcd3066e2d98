"""Kills at file-system calls: a training that is killed there and resumed ends as one that nobody has disturbed.

`python -m tests.support.kill_points --kills 100 --seed 0` kills the launcher or a rank of two, at random calls, and
prints what came of it; with `--ranks 1` the only process, at evenly spaced calls. The calls are those of the process
that writes, counted by an audit hook in a `sitecustomize` that only these processes find.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NoReturn

from flopwise.base.files import to_toml
from flopwise.base.processes import python_words
from flopwise.catalog.load import model_table
from flopwise.cli import main as main_of_flopwise
from flopwise.store.rows import row_of, run_rows
from flopwise.store.runs import read_record
from flopwise.work.transformer import Transformer
from tests.support.launched import described_cpu, is_running

TINY = Transformer(
    name="tiny", title="tiny", source="test", layers=2, hidden=16, heads=2, ffn=32, vocab=264, context=32
)
STEPS = 4
HOOK = """
import os, signal, sys
from pathlib import Path

EVENTS = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.listdir",
    "os.scandir", "os.chmod", "os.utime", "shutil.rmtree",
}
folder, store, victim, call = (os.environ["KILL_POINTS_" + name] for name in ("FOLDER", "STORE", "VICTIM", "CALL"))
own = "rank " + os.environ["RANK"] if "RANK" in os.environ else "launcher"
Path(folder, own).write_text(str(os.getpid()))
calls = 0


def look(event, arguments):
    global calls
    if event in EVENTS and any(isinstance(one, (str, bytes)) and store in os.fsdecode(one) for one in arguments):
        calls += 1
        if not victim:
            Path(folder, "calls").write_text(str(calls))
        elif calls == int(call):
            os.kill(int(Path(folder, victim).read_text()), signal.SIGKILL)


# The one that writes: rank 0 of several, or the only process.
if os.environ.get("RANK", "0") == "0" and ("RANK" in os.environ or os.environ["KILL_POINTS_RANKS"] == "1"):
    sys.addaudithook(look)
"""
GONE_S = 60.0
"""In which nothing of a killed training is left; a moment is usual, but not on a busy machine."""
LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a kill came to."""

    victim: str
    call: int
    hit: bool
    """False: the training was done before that call."""
    problems: tuple[str, ...]
    gone_s: float


class Trial:
    """A folder with a model, data and the store of an undisturbed training."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        (folder / "hook").mkdir(parents=True)
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        (folder / "tiny.toml").write_text(to_toml(model_table(TINY)))
        (folder / "mine.toml").write_text(described_cpu())
        words = random.Random(0).choices(["alpha", "beta", "gamma", "delta"], k=2000)  # noqa: S311 - text
        (folder / "text.txt").write_text(" ".join(words))
        code, said = self.train("whole")
        assert code == 0, said
        self.calls = int((folder / "calls").read_text())
        self.victims = ["launcher", *(f"rank {rank}" for rank in range(ranks))] if ranks > 1 else ["launcher"]
        self.expected = digests(folder / "whole" / "0001")

    def train(self, store: str, *, victim: str = "", call: int = 0) -> tuple[int, str]:
        """Train in a store, from the beginning; the exit code and what was said."""
        words = ["tiny.toml", "--data", "text.txt", "--seq", "16", "--batch", "2", "--precision", "fp32"]
        words += ["--on", "mine.toml", "--device", "cpu", "--steps", str(STEPS), "--checkpoint-every", "1"]
        words += ["--gpus", str(self.ranks)]
        return self.flopwise(store, words, victim=victim, call=call)

    def resume(self, store: str, *, victim: str = "", call: int = 0) -> tuple[int, str]:
        """Go on with the one run of a store, or begin where there is none."""
        records = sorted((self.folder / store).glob("[0-9]*/record.json"))
        if not records:
            return self.train(store, victim=victim, call=call)
        # One that was killed at its very end has nothing left to do.
        done = json.loads(records[-1].read_text())["state"] == "done"
        return (0, "") if done else self.flopwise(store, ["--resume", "last"], victim=victim, call=call)

    def flopwise(self, store: str, words: list[str], *, victim: str = "", call: int = 0) -> tuple[int, str]:
        variables = {
            "PYTHONPATH": os.pathsep.join([str(self.folder / "hook"), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
            "KILL_POINTS_FOLDER": str(self.folder),
            "KILL_POINTS_STORE": str(self.folder / store),
            "KILL_POINTS_RANKS": str(self.ranks),
            "KILL_POINTS_VICTIM": victim,
            "KILL_POINTS_CALL": str(call),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        with tempfile.TemporaryFile("w+") as said:
            code = self.run([*words, "--store", str(self.folder / store)], variables, said)
            said.seek(0)
            return code, said.read()

    def run(self, words: list[str], variables: dict[str, str], said: IO[str]) -> int:
        """`flopwise train` in processes of its own."""
        command = python_words("flopwise", "train", *words, "--anywhere")
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **variables},
            stdout=said,
            stderr=said,
            timeout=LONGEST_S,
            check=False,
        ).returncode

    def kill(self, victim: str, call: int) -> Outcome:
        """Kill at that call, wait until nobody is left, go on, and compare."""
        (outcome,) = self.kill_in_turn([(victim, call)])
        return outcome

    def kill_in_turn(self, kills: Sequence[tuple[str, int]]) -> list[Outcome]:
        """Kill a training, then each that goes on after a kill; the last one to go on is compared."""
        store = " ".join(["killed", *(f"{victim} {call}" for victim, call in kills)])
        outcomes = [self._killed(store, victim, call) for victim, call in kills]
        last = outcomes[-1]
        ends = self._ends_as_undisturbed(store, goes_on=last.hit)
        return [*outcomes[:-1], replace(last, problems=last.problems + ends)]

    def _killed(self, store: str, victim: str, call: int) -> Outcome:
        code, said = self.resume(store, victim=victim, call=call)
        hit = code != 0
        assert hit or victim != "launcher", "the launcher was not killed"
        gone_s, left = self.wait_until_gone(store)
        problems = [f"{left} processes are left after {gone_s:.1f} s"] if left else []
        if "Traceback" in said:
            problems.append(f"a traceback: {said[-300:]}")
        problems += wrong_rows(self.folder / store)
        return Outcome(victim, call, hit, tuple(problems), gone_s)

    def _ends_as_undisturbed(self, store: str, *, goes_on: bool) -> tuple[str, ...]:
        problems = []
        again, told = self.resume(store) if goes_on else (0, "")
        if again:
            problems.append(f"resuming failed with {again}: {told[-300:]}")
        else:
            problems += compared(self.expected, self.folder / store / last_run(self.folder / store))
            problems += wrong_rows(self.folder / store)
        if not problems:
            shutil.rmtree(self.folder / store)
        return tuple(problems)

    def wait_until_gone(self, store: str) -> tuple[float, int]:
        """How long it took until no process of a training was left, and how many were after too long."""
        begun = time.monotonic()
        while (left := members(str(self.folder / store))) and time.monotonic() - begun < GONE_S:
            time.sleep(0.02)
        return time.monotonic() - begun, len(left)


class ForkedTrial(Trial):
    """A training of one process, forked from one that has imported everything: hundreds of kills in a minute or two."""

    def __init__(self, folder: Path) -> None:
        importlib.import_module("flopwise.train.running")
        super().__init__(folder, 1)

    def run(self, words: list[str], variables: dict[str, str], said: IO[str]) -> int:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            os.chdir(self.folder)
            os.environ.update(variables)
            self._train(words)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _train(self, words: list[str]) -> NoReturn:
        code: object = 1
        try:
            exec(compile(HOOK, "hook", "exec"), {})  # noqa: S102 - our own text
            sys.argv = ["flopwise", "train", *words]
            main_of_flopwise()
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def members(store: str) -> list[int]:
    """Processes whose command names a store."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(store) in words and is_running(int(entry.name)):
            found.append(int(entry.name))
    return found


def last_run(store: Path) -> str:
    return max((path.name for path in store.glob("[0-9]*")), default="none")


def digests(run: Path) -> dict[str, str]:
    """Of the last checkpoint's numbers, and the steps that were done."""
    folder = run / "checkpoints" / f"step-{STEPS:08d}"
    found = {}
    for name in ("model.safetensors", "optimizer.safetensors"):
        path = folder / name
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"
    lines = (run / "steps.jsonl").read_text().splitlines() if (run / "steps.jsonl").exists() else []
    found["steps"] = " ".join(str(json.loads(line)["step"]) for line in lines)
    return found


def compared(expected: dict[str, str], run: Path) -> list[str]:
    found = digests(run)
    return [f"{name}: {found[name]} instead of {value}" for name, value in expected.items() if found[name] != value]


def wrong_rows(store: Path) -> list[str]:
    """Runs that listings would tell otherwise than their records do."""
    found = [run for run in run_rows(store) if run.problem is None]
    return [f"row of run {run.name}: {run}" for run in found if run != row_of(read_record(store / run.name))]


def random_kills(trial: Trial, kills: int, seed: int) -> Iterator[Outcome]:
    """Kills of a random one of the processes at a random call."""
    chance = random.Random(seed)  # noqa: S311 - repeatable
    for _ in range(kills):
        yield trial.kill(chance.choice(trial.victims), chance.randint(1, trial.calls))


def even_kills(trial: Trial, kills: int) -> Iterator[Outcome]:
    """Kills of the only process at so many calls, evenly spaced from the first to the last."""
    kills = min(kills, trial.calls)
    for number in range(kills):
        yield trial.kill("launcher", 1 + number * (trial.calls - 1) // max(1, kills - 1))


def table(outcomes: list[Outcome]) -> str:
    """By victim: kills, those that hit, those that passed, and the longest that anything was left."""
    kills = Counter(outcome.victim for outcome in outcomes)
    lines = [f"{'victim':12} {'kills':>6} {'hit':>6} {'passed':>6} {'gone after':>11}"]
    for victim, count in sorted(kills.items()):
        mine = [outcome for outcome in outcomes if outcome.victim == victim]
        hit, passed = sum(one.hit for one in mine), sum(not one.problems for one in mine)
        lines.append(f"{victim:12} {count:6} {hit:6} {passed:6} {max(one.gone_s for one in mine):9.2f} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "trial"
        trial = Trial(place, asked.ranks) if asked.ranks > 1 else ForkedTrial(place)
        print(f"{trial.calls} calls of the file system in a training", flush=True)  # noqa: T201
        kills = random_kills(trial, asked.kills, asked.seed) if asked.ranks > 1 else even_kills(trial, asked.kills)
        outcomes = []
        # ^C ends it with the table of what was tried.
        with suppress(KeyboardInterrupt):
            for outcome in kills:
                outcomes.append(outcome)
                for problem in outcome.problems:
                    print(f"{outcome.victim} at call {outcome.call}: {problem}", flush=True)  # noqa: T201
    print(table(outcomes))  # noqa: T201
    sys.exit(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    main()
