"""Profile real trainings on this machine's GPU: `python -m benchmarks.gpu_profile --output FOLDER [--cases 0,1]`.

Every case is trained for a few steps with `--profile`; its summary is printed as `flopwise profile show` and
`flopwise why` print it, and its profile is kept. The last table holds steps inside the window against those outside it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from flopwise.profile.explain.verdicts import verdicts
from flopwise.records.profile import Profile
from flopwise.report.document import to_page
from flopwise.report.profile_words import why_paragraph
from flopwise.report.profiles import profiles_document
from flopwise.store.runs import PROFILE, from_text, read_steps
from flopwise.train import run as train_run
from flopwise.train.profiling import WARM_UP_STEPS

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A training."""

    model: str
    """Nothing: the small one that `flopwise train` takes by itself."""
    sequence_tokens: int
    batch_sequences: int
    steps: int
    device_gib: float | None = None
    host_gib: float | None = None
    traced: int = 2
    keeps_trace: bool = False


CASES = (
    Case("", 512, 8, 400, traced=1, keeps_trace=True),
    Case("llama-3-1b", 8192, 8, 12),
    Case("llama-3-1b", 8192, 8, 12, 10, 40),
    Case("llama-3-8b", 65536, 1, 6, 78, 72, traced=1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cases", default="")
    given = parser.parse_args()
    chosen = [int(number) for number in given.cases.split(",")] if given.cases else range(len(CASES))
    given.output.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in chosen:
        with tempfile.TemporaryDirectory() as store:
            try:
                lines.append(_run(CASES[number], Path(store), given.output / f"profile-{number}"))
            except (OSError, RuntimeError, ValueError) as error:
                # One case that fails must not cost the others, nor the minutes on the card.
                lines.append(f"{CASES[number].model:12} {error!r}")
            print(lines[-1], flush=True)
    print(f"{'model':12} {'seq':>6} {'untraced s':>10} {'traced s':>9} {'ratio':>6} {'last s':>10} {'MFU':>6}")
    print("\n".join(lines))


def _run(case: Case, store: Path, kept: Path) -> str:
    record = train_run(
        model=case.model or None,
        steps=case.steps,
        sequence_tokens=case.sequence_tokens,
        batch_sequences=case.batch_sequences,
        precision="bf16",
        device="cuda",
        device_memory_bytes=None if case.device_gib is None else int(case.device_gib * GIB),
        host_memory_bytes=None if case.host_gib is None else int(case.host_gib * GIB),
        profile=True,
        profile_steps=case.traced,
        checkpoint=False,
        from_scratch=True,
        store=str(store),
    )
    folder = store / record.id
    if case.keeps_trace:
        shutil.copyfile(folder / "trace-rank0.json.gz", kept.with_suffix(".trace.json.gz"))
    profile = from_text((folder / PROFILE).read_text(), Profile)
    judged = verdicts(profile)
    console = Console(width=120, highlight=False, markup=False, emoji=False)
    console.print(*to_page(profiles_document([(profile, judged)]), 120), sep="\n")
    console.print(why_paragraph(profile, judged))
    shutil.copyfile(folder / PROFILE, kept.with_suffix(".json"))
    first, last = WARM_UP_STEPS + 1, WARM_UP_STEPS + case.traced
    steps = read_steps(folder)
    traced = median(step.step_s for step in steps if first <= step.step <= last)
    # The step behind the window settles, and those behind it are counted for a second.
    steady = [step.step_s for step in steps if step.step > last + 1]
    untraced = median(steady)
    return (
        f"{case.model:12} {case.sequence_tokens:6} {untraced:10.4f} {traced:9.4f} {traced / untraced:6.3f} "
        f"{steady[-1]:10.4f} {profile.get('mfu') or 0:6.3f}"
    )


if __name__ == "__main__":
    main()
