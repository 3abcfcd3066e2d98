"""Going on with a run: what it was asked for, where it stands, and its last checkpoint that is whole and finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import entry_kind
from flopwise.catalog.load import load_plan
from flopwise.engine.data.tokenizer import BYTES
from flopwise.engine.weights import checkpoint
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.measurement import RunRecord
from flopwise.records.plan import Plan
from flopwise.store.runs import PLAN, find_run, read_record, store_folder
from flopwise.train.request import TrainRequest
from flopwise.work.model import Model


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run that is gone on with."""

    folder: Path
    record: RunRecord
    plan: tuple[Plan | ClusterPlan, Model]
    loaded: checkpoint.Loaded | None
    """None: it was ended before its first checkpoint."""
    checkpoint: Path | None


def find_resumed(request: TrainRequest, tell: Callable[[str], None]) -> Resumed:
    """The run that a request names, with its newest checkpoint that is whole and finite."""
    assert request.resume is not None
    folder = find_run(store_folder(request.store), request.resume)
    record = read_record(folder)
    try:
        plan = load_plan(folder / PLAN)
    except FlopwiseError as error:
        raise FlopwiseError(
            f"the plan of run {folder.name} cannot be read",
            why=error.why or error.what,
            hint=f"begin a new run with --weights and a checkpoint of {folder}",
        ) from None
    _check_hardware_file(request, record, plan[0])
    problems = []
    for found in checkpoint.checkpoints(folder):
        try:
            # Before gigabytes are read, whose checksums are in order all the same.
            checkpoint.check_finite(found.path, checkpoint.read_state(found.path))
            loaded = checkpoint.load(found.path)
        except FlopwiseError as error:
            problems.append(f"{found.path.name}: {error.why or error.what}")
            tell(f"{found.path.name} is passed over: {error.why or error.what}")
            continue
        return Resumed(folder, record, plan, loaded, found.path)
    if problems:
        raise FlopwiseError(
            f"no checkpoint of run {folder.name} is whole and finite",
            why="; ".join(problems[:3]),
            hint="bring a good one back, or begin a new run: one that diverged with a smaller --learning-rate",
        )
    if record.checkpoint is not None:
        raise FlopwiseError(
            f"run {folder.name} has saved {record.checkpoint}, and it is gone",
            why="to begin anew would lose what is left of it",
            hint="bring it back into its place, or begin a new run",
        )
    return Resumed(folder, record, plan, None, None)


def _check_hardware_file(request: TrainRequest, record: RunRecord, plan: Plan | ClusterPlan) -> None:
    """Refuse to go on where the file of the run's hardware is gone, and nothing is named in its place."""
    if request.on is not None:
        return
    name = record.request.get("on")
    if name is None and not record.request.get("anywhere"):
        name = plan.hardware
    is_file = isinstance(name, str) and ("/" in name or name.endswith((".toml", ".json")))
    if is_file and entry_kind(Path(str(name))) == "nothing":
        raise FlopwiseError(
            f"the hardware of run {record.id} is described in {name}, and there is no such file",
            why="what it is measured against comes from there",
            hint="--on this-machine, or --on with the place where the file is now",
        )


def laid_out_as_before(request: TrainRequest, resumed: Resumed, ranks: int) -> TrainRequest:
    """The request with examples in sequences as the checkpoint's were: several share one on one device alone."""
    packed = resumed.loaded.state.data.get("packed") if resumed.loaded is not None else None
    if packed and ranks > 1:
        raise FlopwiseError(
            f"run {resumed.folder.name} has several examples in a sequence, and several devices have one",
            why="its batches would hold other examples than those that are still to come",
            hint="--gpus 1, or begin a run with --no-packing, which goes on with any number of devices",
        )
    return replace(request, packing=False) if packed is False else request


def as_written(request: TrainRequest, *, batch_sequences: int, weights: Path | None) -> dict[str, Any]:
    """A request for the record, with what was chosen for it: paths in full, so that it can be resumed from anywhere."""
    settled = replace(
        request, resume=None, store=None, batch_sequences=batch_sequences, weights=str(weights) if weights else None
    )
    table = asdict(settled)
    for name in ("data", "evaluation_data"):
        table[name] = [str(Path(source).resolve()) for source in table[name]]
    table["log"] = list(table["log"])
    for name in ("tokenizer", "weights", "adapters"):
        if table[name] and (name, table[name]) != ("tokenizer", BYTES):
            table[name] = str(Path(table[name]).resolve())
    if table["on"] and Path(table["on"]).is_file():
        table["on"] = str(Path(table["on"]).resolve())
    return {name: value for name, value in table.items() if value is not None}
