"""What the planner's page shows of an answer: figures in the command line's words, bars, the step, what would help.

A figure comes twice: as the number that programs read, and as the words that a terminal has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.base.units import exact_bytes, show_bytes, show_count, show_seconds, show_share, significant
from flopwise.records.cluster_plan import PlannedCluster
from flopwise.records.outcome import Interval
from flopwise.records.plan import Help, Plan, Planned
from flopwise.records.prediction import DeviceBytes, Prediction
from flopwise.records.program import STREAMS, task_name
from flopwise.records.simulation import MemoryPoint, Simulation
from flopwise.report.device_plans import LITTLE, interval_words, more_words, owners_of, value_words
from flopwise.report.plans import plan_document
from flopwise.report.predictions import PART_WORDS, TIGHT
from flopwise.report.words import safe

MOST_TASKS = 12_000
"""Of a step that a page draws: the longest ones."""
MOST_POINTS = 400
"""Moments at which a page knows what memory holds; of every stretch between two it is the fullest one."""
MOST_STRATEGIES = 12

View = dict[str, Any]
Wait = tuple[float, float, str]


# -- answers ---------------------------------------------------------------------------------------------------------


def prediction_view(prediction: Prediction, command: str) -> View:
    """A prediction: what the terminal says of it."""
    owners = [field.name for field in fields(DeviceBytes) if field.name != "total"]
    memory = prediction.device_bytes
    cap = prediction.device_capacity_bytes
    bars = [_bar("device", {owner: getattr(memory, owner) for owner in owners}, cap)]
    if prediction.host_bytes:
        bars.append(_bar("host", {"offloaded": prediction.host_bytes}, None))
    parts = {PART_WORDS[name]: seconds for name, seconds in prediction.parts.items()} if prediction.stages else {}
    operators = {op.name: op.time_s for op in prediction.ops}
    return {
        "kind": "predicted",
        "command": command,
        **_figures(prediction, prediction.interval, prediction.devices, prediction.batch_tokens),
        "model": prediction.model,
        "hardware": prediction.hardware,
        "parameters": _parameters(prediction),
        "bound": prediction.bound,
        "fit": fit_of(memory.total, cap),
        "bars": bars,
        "parts": _parts(parts or operators, prediction.step_s),
        "setup": {
            "sequence_tokens": prediction.sequence_tokens,
            "batch_sequences": prediction.batch_sequences,
            "micro_batch_sequences": prediction.micro_batch_sequences,
            "recompute": prediction.recompute,
            "precision": prediction.precision,
            "optimizer": prediction.optimizer,
            "parallel": prediction.parallel.label if prediction.devices > 1 else "",
        },
        "chosen": [[name.replace("_", " "), why] for name, why in prediction.chosen.items()],
        "notes": list(prediction.notes),
    }


def _parameters(prediction: Prediction) -> str:
    """How many, how many of them for a token, how many are trained."""
    words = [show_count(prediction.n_params)]
    if prediction.n_active_params != prediction.n_params:
        words.append(f"{show_count(prediction.n_active_params)} active")
    if prediction.n_trained_params is not None:
        words.append(f"{show_count(prediction.n_trained_params)} trained")
    return ", ".join(words)


def plan_view(planned: Planned, command: str, step: View | None = None) -> View:
    """A plan for one device; `step`: its simulation, as `step_view` has it."""
    plan, forecast = planned.plan, planned.forecast
    owners = owners_of([planned])
    places = {"device": forecast.device_bytes, "host": forecast.host_bytes}
    caps = {"device": plan.device_memory_bytes, "host": plan.host_memory_bytes}
    bars = [_bar(place, {owner: held.get(owner, 0) for owner in owners}, caps[place]) for place, held in places.items()]
    _, evidence = interval_words(planned.interval, forecast.step_s)
    figures = _figures(forecast, planned.interval, 1, plan.batch_tokens)
    waits = dict(sorted(forecast.idle.items(), key=lambda item: -item[1]))
    return {
        "kind": "planned",
        "command": command,
        **figures,
        "words": {**figures["words"], **({"evidence": evidence} if evidence else {})},
        "model": planned.model,
        "hardware": forecast.hardware,
        "bound": forecast.bound,
        "fit": fit_of(forecast.device_total, plan.device_memory_bytes),
        "bars": [bar for bar in bars if bar["bytes"] or bar["place"] == "device"],
        "parts": _parts(
            {
                "compute": forecast.compute_s - forecast.recompute_s,
                "recompute": forecast.recompute_s,
                **{f"waits for {name}": seconds for name, seconds in waits.items()},
            },
            forecast.step_s,
        ),
        "setup": {
            "sequence_tokens": plan.sequence_tokens,
            "batch_sequences": plan.batch_sequences,
            "micro_batch_sequences": plan.micro_batch_sequences,
            "recompute": plan.recompute,
            "precision": plan.precision,
            "optimizer": plan.optimizer,
            "parallel": "",
        },
        "chosen": [[value_words(plan, name), why] for name, why in planned.reasons.items()],
        "notes": list(planned.notes),
        "searched": f"{planned.searched:,} plans, {planned.simulated:,} of them simulated",
        "helps": [_help_chip(found, plan) for found in planned.helps if found.speed - 1 >= LITTLE],
        **({"step": step} if step else {}),
    }


def _help_chip(found: Help, plan: Plan) -> View:
    caps = {"device_mem": found.device_memory_bytes, "host_mem": found.host_memory_bytes}
    before = {"device_mem": plan.device_memory_bytes, "host_mem": plan.host_memory_bytes}
    change = {name: exact_bytes(size) for name, size in caps.items() if size != before[name]}
    return {"words": more_words(found, plan), "gain": found.speed - 1, "fits": True, "change": change}


def cluster_view(found: PlannedCluster, title: str, command: str) -> View:
    """The best strategy as a prediction, and what it was chosen from."""
    strategies = plan_document(found.prediction, found.answer, title).tables
    (table,) = strategies or ()
    return {
        **prediction_view(found.prediction, command),
        "kind": "planned",
        "searched": f"{found.answer.evaluated:,} strategies, {found.answer.fitting:,} fit",
        "strategies": {
            "columns": list(getattr(table, "columns", ())),
            "rows": [[str(cell) for cell in row] for row in getattr(table, "rows", ())][:MOST_STRATEGIES],
        },
    }


def refusal_view(error: FlopwiseError, command: str) -> View:
    """What cannot be, why not, and what can."""
    return {
        "kind": "refused",
        "command": command,
        "what": safe(error.what, 400),
        "why": safe(error.why or "", 600),
        "hint": safe(error.hint or "", 400),
        "needed": show_bytes(error.needed_bytes) if isinstance(error, DoesNotFit) and error.needed_bytes else "",
    }


# -- figures ---------------------------------------------------------------------------------------------------------


def _figures(outcome: Any, interval: Interval | None, devices: int, tokens: int) -> View:  # noqa: ANN401 - both kinds of outcome
    """The figures of a step, with where measured ones may lie."""
    step_s: float = outcome.step_s
    low, high = (step_s / interval.high_s, step_s / interval.low_s) if interval else (None, None)
    return {
        "step_s": step_s,
        "low_s": interval.low_s if interval else None,
        "high_s": interval.high_s if interval else None,
        "tokens_per_s": outcome.tokens_per_s,
        "low_tokens_per_s": outcome.tokens_per_s * low if low else None,
        "high_tokens_per_s": outcome.tokens_per_s * high if high else None,
        "mfu": outcome.mfu,
        "hfu": outcome.hfu,
        "model_flops": outcome.model_flops,
        "batch_tokens": tokens,
        "devices": devices,
        "words": {
            "step": show_seconds(step_s),
            "step_range": f"{show_seconds(interval.low_s)} to {show_seconds(interval.high_s)}" if interval else "",
            "speed": f"{significant(outcome.tokens_per_s)} tok/s",
            "speed_range": _range(outcome.tokens_per_s, low, high, significant),
            "mfu": show_share(outcome.mfu),
            "mfu_range": _range(outcome.mfu, low, high, show_share),
            "hfu": show_share(outcome.hfu),
            "evidence": _evidence(interval),
            "outside": ", ".join(interval.outside) if interval else "",
        },
    }


def _range(value: float, low: float | None, high: float | None, words: Callable[[float], str]) -> str:
    return "" if low is None or high is None else f"{words(value * low)} to {words(value * high)}"


def _evidence(interval: Interval | None) -> str:
    if interval is None:
        return "no interval: nothing of this kind was held against its prediction"
    return f"8 of 10 measured steps ({interval.basis})"


def fit_of(total: int, cap: int) -> View:
    """Whether it fits, with the words of the tables."""
    spare = cap - total
    tone = "bad" if spare < 0 else "warn" if spare < TIGHT * cap else "good"
    words = {"bad": f"{show_bytes(-spare)} too much", "warn": f"tight, {show_bytes(spare)} spare"}
    return {
        "tone": tone,
        "words": words.get(tone, f"{show_bytes(spare)} spare"),
        "of": f"{show_bytes(total)} of {show_bytes(cap)}",
        "total": total,
        "cap": cap,
    }


def _bar(place: str, held: Mapping[str, int], cap: int | None) -> View:
    there = {owner: size for owner, size in held.items() if size}
    return {
        "place": place,
        "owners": list(there),
        "bytes": list(there.values()),
        "words": [show_bytes(size) for size in there.values()],
        "cap": cap,
        "cap_words": show_bytes(cap) if cap is not None else "",
    }


def _parts(seconds: Mapping[str, float], step_s: float) -> list[list[Any]]:
    """What a step's seconds are made of: name, seconds, both in words."""
    return [
        [name, spent, show_seconds(spent), show_share(spent / step_s)]
        for name, spent in seconds.items()
        if spent > 1e-6 * step_s
    ]


# -- the step --------------------------------------------------------------------------------------------------------


def step_view(
    simulation: Simulation, points: Sequence[MemoryPoint], waits: Sequence[Wait], *, rounds: int, cap: int
) -> View:
    """A simulated step by columns, in nanoseconds: its tasks, what the device waits for, and memory by owner."""
    tasks = simulation.program.tasks
    chosen: Sequence[int] = range(len(tasks))
    if len(tasks) > MOST_TASKS:
        longest = sorted(chosen, key=lambda place: simulation.starts[place] - simulation.ends[place])
        chosen = sorted(longest[:MOST_TASKS])
    names = [task_name(tasks[place]) for place in chosen]
    kinds = [_kind(name) for name in names]
    known = list(dict.fromkeys(kinds))
    streams = [stream for stream in STREAMS if any(tasks[place].stream == stream for place in chosen)]
    played = simulation.program.rounds
    return {
        "end_ns": round(simulation.step_s * 1e9),
        "streams": streams,
        "kinds": known,
        "stream": [streams.index(tasks[place].stream) for place in chosen],
        "kind": [known.index(kind) for kind in kinds],
        "label": [name.removeprefix(kind).strip() for name, kind in zip(names, kinds, strict=True)],
        "round": [tasks[place].round for place in chosen],
        "bytes": [tasks[place].bytes for place in chosen],
        "start_ns": [round(simulation.starts[place] * 1e9) for place in chosen],
        "end_ns_of": [round(simulation.ends[place] * 1e9) for place in chosen],
        "waits": [[round(start * 1e9), round(end * 1e9), words] for start, end, words in waits],
        "memory": _memory(points, cap),
        "note": _step_note(len(chosen), len(tasks), played, rounds),
    }


def _kind(name: str) -> str:
    """`load weights` of `load weights 3`."""
    return " ".join(word for word in name.split() if not word[0].isdigit() and not word.startswith("(")) or name


def _step_note(drawn: int, tasks: int, played: int, rounds: int) -> str:
    words = [f"{played} of the step's {rounds:,} rounds, which are alike, and the update"] if played < rounds else []
    words += [f"the {drawn:,} longest of {tasks:,} tasks"] if drawn < tasks else []
    return f"Drawn: {'; '.join(words)}." if words else ""


def _memory(points: Sequence[MemoryPoint], cap: int) -> View:
    """Bytes of the device by owner over the step."""
    stretch = max(1, -(-len(points) // MOST_POINTS))
    kept = [
        max(points[first : first + stretch], key=lambda point: sum(point.device.values()))
        for first in range(0, len(points), stretch)
    ]
    owners = [owner for owner in (points[0].device if points else ()) if any(point.device[owner] for point in kept)]
    return {
        "owners": owners,
        "at_ns": [round(point.seconds * 1e9) for point in kept],
        "bytes": [[point.device[owner] for point in kept] for owner in owners],
        "cap": cap,
    }


# -- around an answer ------------------------------------------------------------------------------------------------


def device_rows(found: Sequence[tuple[str, Prediction | FlopwiseError]]) -> list[View]:
    """Each device in a row, the fastest that fits first."""
    rows = [_device_row(name, one) for name, one in found]
    return sorted(rows, key=lambda row: (not row["fits"], -(row["tokens_per_s"] or 0.0)))


def _device_row(name: str, one: Prediction | FlopwiseError) -> View:
    if isinstance(one, FlopwiseError):
        return {"name": name, "fits": False, "tokens_per_s": None, "why": safe(one.what, 200)}
    seen = _figures(one, one.interval, one.devices, one.batch_tokens)
    return {
        "name": name,
        "fits": one.fits,
        "fit": fit_of(one.device_bytes.total, one.device_capacity_bytes),
        "tokens_per_s": one.tokens_per_s,
        "low_tokens_per_s": seen["low_tokens_per_s"],
        "high_tokens_per_s": seen["high_tokens_per_s"],
        "devices": one.devices,
        "words": seen["words"],
        "bound": one.bound,
    }


def help_chips(found: Sequence[tuple[dict[str, str], Prediction]], seen: Prediction) -> list[View]:
    """Changes with what they gain, the largest first; one that makes it fit comes before all."""
    chips = []
    for change, then in found:
        gain = then.tokens_per_s / seen.tokens_per_s - 1
        if then.fits == seen.fits and abs(gain) < LITTLE:
            continue
        chips.append({"words": _change_words(change, then), "gain": gain, "fits": then.fits, "change": change})
    return sorted(chips, key=lambda chip: (not chip["fits"], -float(str(chip["gain"]))))


def _change_words(change: Mapping[str, str], then: Prediction) -> str:
    words: dict[str, Callable[[str], str]] = {
        "gpus": lambda value: f"{value} × {then.hardware}",
        "batch": lambda value: f"batch {int(value):,}",
        "batch_tokens": lambda _: "",
        "seq": lambda value: f"sequence {int(value):,}",
        "lora": lambda value: f"LoRA of rank {value}",
        "base": lambda value: f"frozen weights in {value.upper()}",
        "recompute": lambda value: "nothing recomputed" if value == "none" else f"recompute {value}",
        "device_mem": lambda _: "no device cap",
        "optimizer": lambda value: value.capitalize(),
    }
    found = [words[name](value) if name in words else value for name, value in change.items()]
    return ", ".join(part for part in found if part)
