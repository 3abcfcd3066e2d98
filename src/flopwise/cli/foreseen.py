"""What is foreseen of rows that nobody has run, predicted once more: memory by owner, operators, the interval.

A row holds its figures alone. Where the catalogue's model on the catalogue's device, asked for the same, takes the step
that the row has, all else of that prediction is the row's too; where it takes another one, nothing of it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import TYPE_CHECKING, Any

from flopwise.base.errors import FlopwiseError

if TYPE_CHECKING:
    from flopwise.records.prediction import Prediction
    from flopwise.setup.setup import Setup
    from flopwise.store.results import Result

View = dict[str, Any]
MOST_ROWS = 1000
"""That are predicted for one page: some four seconds."""
SAME = 1e-9


def foresee_rows(rows: Sequence[Result], kept: dict[Result, View | None] | None = None) -> dict[int, View]:
    """Place of a row → what the planner shows of its prediction; `kept` holds those of the last time."""
    known = {} if kept is None else kept
    wanted = [place for place, row in enumerate(rows) if row.state == "planned" and row.run is None][:MOST_ROWS]
    new = [rows[place] for place in wanted if rows[place] not in known]
    known.update(zip(new, _views(new), strict=True))
    found = {place: known[rows[place]] for place in wanted}
    return {place: view for place, view in found.items() if view is not None}


def _views(rows: Sequence[Result]) -> list[View | None]:
    """Of each row its prediction; None: it cannot be asked in words of the catalogue, or it is another one."""
    from flopwise.report.page.planner import prediction_view

    setups = [_setup(row) for row in rows]
    predictions = iter(_predictions([setup for setup in setups if setup is not None]))
    found: list[View | None] = []
    for row, setup in zip(rows, setups, strict=True):
        one = next(predictions) if setup is not None else None
        found.append(prediction_view(one, _command(row)) if one is not None and _is_same(one, row) else None)
    return found


def _predictions(setups: Sequence[Setup]) -> list[Prediction | None]:
    """All at once, which takes a fifth of the time; one by one where any is refused."""
    from flopwise.door.intervals import predict_step, predict_steps

    def alone(setup: Setup) -> Prediction | None:
        try:
            return predict_step(setup, "causal")
        except FlopwiseError:
            return None

    try:
        return list(predict_steps(setups, "causal"))
    except FlopwiseError:
        return [alone(setup) for setup in setups]


def _is_same(prediction: Prediction, row: Result) -> bool:
    if row.predicted_fits is False:
        return not prediction.fits and prediction.device_bytes.total == row.predicted_device_bytes
    return row.predicted_step_s is not None and isclose(prediction.step_s, row.predicted_step_s, rel_tol=SAME)


def _setup(row: Result) -> Setup | None:
    from flopwise.catalog.load import hardware_names, load_hardware, load_model, model_names
    from flopwise.setup.parallel import shard_all
    from flopwise.setup.setup import Setup
    from flopwise.setup.written import read_setup
    from flopwise.work.work import RECOMPUTE_POLICIES

    if not isinstance(row.model, str) or row.model not in model_names() or row.hardware not in hardware_names():
        return None
    policy = row.recompute if row.recompute in RECOMPUTE_POLICIES else None
    try:
        return read_setup(
            row,
            Setup,
            load_model(row.model),
            load_hardware(row.hardware),
            hardware_name=row.hardware,
            parallel=shard_all(row.devices or 1),
            device_cap_bytes=row.device_cap_bytes,
            recompute=policy,
        )
    except FlopwiseError:
        return None


def _command(row: Result) -> str:
    said = {
        "on": row.hardware,
        "gpus": row.devices if (row.devices or 1) > 1 else None,
        "seq": row.sequence_tokens,
        "batch": row.batch_sequences,
        "micro": row.micro_batch_sequences,
        "precision": row.precision,
        "optimizer": row.optimizer if row.optimizer != "adamw" else None,
    }
    options = " ".join(f"--{name} {value}" for name, value in said.items() if value is not None)
    return f"flopwise predict {row.model} {options}"
