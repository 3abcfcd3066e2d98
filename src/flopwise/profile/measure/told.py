"""Why there is no profile of a program that ran, from the lines in which its processes told how far they came."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NO_PYTHON = (
    "flopwise's start-up file ran in none of its processes: there was no Python among them, or one that was started "
    "with -E, -I or -S or with an environment of its own"
)
CUT_SHORT = "by a signal, os._exit or exec, with which Python runs nothing at the end"


@dataclass(slots=True)
class Process:
    """A Python process, or what took its place by exec."""

    torch: bool = False
    stepped: bool = False
    ended: bool = False
    steps: int = 0
    """That were counted."""
    other_steps: int = 0
    """In other threads than the one that was watched."""
    profiles_itself: bool = False
    in_daemon: bool = False
    """Its steps on a GPU are those of a daemon thread."""
    failure: str | None = None


def read_told(place: Path) -> list[Process]:
    """All processes that told anything, and the file that they did it in removed."""
    try:
        lines = place.read_text(encoding="utf-8", errors="replace").splitlines()
        place.unlink()
    except OSError:
        return []
    found: list[Process] = []
    latest: dict[str, Process] = {}
    for line in lines:
        number, _, words = line.partition(" ")
        if words == "python" or number not in latest:
            # A copy by fork begins without a word; where a process begins a second time, it was replaced by exec.
            latest[number] = Process(torch=words != "python")
            found.append(latest[number])
        _take(latest[number], words)
    return found


def _take(process: Process, words: str) -> None:
    what, _, more = words.partition(" ")
    match what:
        case "torch":
            process.torch = True
        case "step":
            process.stepped = True
        case "profiler":
            process.profiles_itself = True
        case "daemon":
            process.in_daemon = True
        case "failed":
            process.failure = more
        case "ended":
            process.ended = True
            counts = [int(word) for word in more.split() if word.isdecimal()]
            process.steps, process.other_steps = (*counts, 0, 0)[:2]


def reason(processes: list[Process], needed: int) -> str:
    """Why none of them left a profile; `needed`: steps that must be taken before one is written."""
    failures = [process.failure for process in processes if process.failure]
    with_torch = [process for process in processes if process.torch]
    if failures:
        return f"profiling failed: {failures[0]}"
    if any(process.profiles_itself for process in processes):
        return "it uses torch's profiler itself, and there can be only one"
    if any(process.in_daemon for process in processes):
        return (
            "a daemon thread takes its steps on the GPU, and nobody could stop the profiler there when the program ends"
        )
    if any(process.stepped and not process.ended for process in processes):
        return f"a process that had begun to take steps was ended {CUT_SHORT}"
    if with_torch:
        return _too_few(with_torch, needed)
    return "it never imported torch" if processes else NO_PYTHON


def _too_few(processes: list[Process], needed: int) -> str:
    """Of processes that imported torch."""
    furthest = max(processes, key=lambda process: (process.stepped, process.steps))
    if furthest.stepped:
        told = f"it took {furthest.steps} of the {needed} steps that are needed"
        others = furthest.other_steps
        return f"{told} in one thread, and {others} in others, which are not counted" if others else told
    if any(not process.ended for process in processes):
        return f"it imported torch, took no step, and was ended {CUT_SHORT}"
    return "it imported torch, but stepped no torch.optim.Optimizer and called no module that has parameters"
