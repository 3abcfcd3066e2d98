"""Plans for one device as documents: memory by owner and place, the schedule, the answer, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from flopwise.base.units import show_bytes, show_count, show_seconds, show_share, significant
from flopwise.records.outcome import Interval
from flopwise.records.plan import Help, Plan, Planned, Residency
from flopwise.records.program import OWNERS
from flopwise.report.document import Block, Document, Table, Words, beside_rows, facts, note_rows
from flopwise.report.predictions import OPTIMIZER_TITLES, TIGHT, outside_words
from flopwise.report.tables import Styled
from flopwise.report.words import count_nouns, lengths_words, list_words, padded_words, signed_share, size_words
from flopwise.work.formats import parse_formats
from flopwise.work.optimizers import Optimizer
from flopwise.work.parameters import ENDS

SAME = 5e-4
"""Speeds that differ by less are printed as the same."""

LITTLE = 0.005
"""Gains that differ by less are not told apart: they are estimates."""

LEVEL_WORDS = {"full": "full", "attention": "input+context+attention", "context": "input+context", "input": "input"}
"""What is kept of a (layer, chunk) at each save level."""

MOMENT_WORDS: dict[Optimizer, str] = {
    "adamw": "m and v, {}",
    "adamw-8bit": "m and v, 8 bits",
    "muon": "m, {}; v around the blocks",
    "lion": "m, {}",
    "sgd": "",
    "sgd-momentum": "m, {}",
    "adafactor": "rows and columns of v",
}
OWNER_WORDS = {"residual": "between layers", "context": "keys and values of a sequence"}
"""Owners of device memory whose names do not say it all."""


def device_plan_document(planned: Planned, title: str) -> Document:
    """The plan: memory by owner and place, the schedule, the answer, and why."""
    return Document(
        blocks=_blocks(planned, title),
        tables=[
            Table(columns=tuple(CELLS), rows=[[words(planned) for words in CELLS.values()]], left=LEFT),
            _memory(planned, ("memory", "device", "on device", "host", "on host")),
        ],
        rows=[_flat(planned, owners_of([planned]))],
        told=beside_rows(planned.notes),
    )


def _blocks(planned: Planned, title: str) -> Iterator[Block]:
    plan = planned.plan
    caps = f"caps: device {show_bytes(plan.device_memory_bytes)}, host {show_bytes(plan.host_memory_bytes)}"
    uneven = f"\nsequences {lengths_words(plan.lengths)}" if plan.lengths else ""
    rule = "" if plan.rule == "flopwise" else f" · by the rule {plan.rule}"
    yield Words(
        f"{planned.model} · 1 × {title} · sequence {plan.sequence_tokens:,}"
        f" · {OPTIMIZER_TITLES[plan.optimizer]} · {plan.precision}{uneven}\n{caps}{rule}"
    )
    yield _memory(planned, ("", "device", " ", "host", "  "))
    yield _answer(planned)
    if planned.reasons:
        yield facts([(value_words(plan, name), reason) for name, reason in planned.reasons.items()], "why")


# -- memory ---------------------------------------------------------------------------------------------------------


def _memory(planned: Planned, columns: Sequence[str]) -> Table:
    """Owner, bytes on the device and words about them, bytes on the host and words about them."""
    left = (columns[0], columns[2], columns[4])
    return Table(columns=columns, rows=memory_rows(planned), left=left, folded={columns[2]: 0, columns[4]: 0})


def memory_rows(planned: Planned) -> list[list[str]]:
    """The rows of the memory table, the total last."""
    plan, forecast = planned.plan, planned.forecast
    rows: list[list[str]] = []
    for owner in owners_of([planned]):
        device, host = forecast.device_bytes.get(owner, 0), forecast.host_bytes.get(owner, 0)
        # Optimizer state may pass through memory of the activations, and then has none of its own.
        words = _device_words(plan, owner) if device or _borrows(plan, owner) else ""
        if owner == "optimizer" and not host:
            words = "; ".join(part for part in (words, moment_words(plan)) if part)
        others = _host_words(plan, owner, device) if host else ""
        rows.append([owner, size_words(device), words, size_words(host), others])
    device, host = forecast.device_total, forecast.host_total
    verdicts = _verdict(device, plan.device_memory_bytes), _verdict(host, plan.host_memory_bytes)
    return [*rows, ["total", size_words(device), verdicts[0], size_words(host), verdicts[1]]]


def owners_of(planneds: Iterable[Planned]) -> list[str]:
    """Owners of memory in any of the plans, in the order in which programs name them."""
    found = {owner for planned in planneds for owner in (*planned.forecast.device_bytes, *planned.forecast.host_bytes)}
    return [*(owner for owner in OWNERS if owner in found), *sorted(found.difference(OWNERS))]


def _verdict(total: int, cap: int) -> Styled:
    """Whether a total keeps to its cap."""
    spare = cap - total
    if spare < 0:
        return Styled(f"✗ does not fit, {show_bytes(-spare)} too much", "red")
    if not total:
        return Styled("✓ nothing is kept there", "green")
    if spare < TIGHT * cap:
        return Styled(f"✓ fits, tight: {show_bytes(spare)} spare", "yellow")
    return Styled(f"✓ fits, {show_bytes(spare)} spare", "green")


def _device_words(plan: Plan, owner: str) -> str:
    if owner in (states := _states(plan)):
        words = residency_words(states[owner], plan.layers)
        return f"{words} in the room of activations" if _borrows(plan, owner) else words
    if owner == "activations":
        return _slot_words(plan)
    if owner == "head":
        return f"{plan.head_chunk_tokens:,} tokens at a time"
    return OWNER_WORDS.get(owner, "")


def _states(plan: Plan) -> dict[str, Residency]:
    return {"weights": plan.weights, "gradients": plan.gradients, "optimizer": plan.optimizer_state}


def _borrows(plan: Plan, owner: str) -> bool:
    """Whether state that passes does so at the step's end, when there are no activations."""
    state = plan.optimizer_state
    passes = owner == "optimizer" and state.passing > 0 and state.blocks < plan.layers
    return passes and (plan.update_place, plan.update_when) == ("device", "end")


def residency_words(residency: Residency, layers: int) -> str:
    """What stays and what passes: `19 of 32 blocks and head stay, 13 pass through 2 slots`."""
    blocks, rest = residency.blocks, layers - residency.blocks
    everything = f"all {layers} blocks" if layers > 1 else "the one block"
    staying: list[str] = [everything if not rest else f"{blocks} of {layers} blocks"] if blocks else []
    staying += [end for end in ENDS if end in residency.ends]
    words = []
    if staying:
        one = len(staying) == 1 and blocks <= 1
        words.append(f"{list_words(staying)} {'stays' if one else 'stay'}")
    if rest and residency.passing:
        others = f"{rest}" if blocks else count_nouns(rest, "block")
        words.append(f"{others} pass{'es' if rest == 1 else ''} through {count_nouns(residency.passing, 'slot')}")
    return ", ".join(words)


def _slot_words(plan: Plan) -> str:
    """Room for activations, and how many (layer, chunk) stay in it."""
    saved = plan.saved("device")
    staying = sum(saved.values())
    words = f"{count_nouns(plan.activation_slots, 'slot')} for (layer, chunk)"
    if not staying:
        return f"{words}, none stays"
    less = staying - saved["full"]
    return f"{words}, {staying:,} stay{'s' if staying == 1 else ''}" + (f", {less:,} of them not full" if less else "")


def saved_words(saved: dict[str, int]) -> str:
    """How many (layer, chunk) at each save level: `6 full · 17 input+context+attention`."""
    return " · ".join(f"{count:,} {LEVEL_WORDS[level]}" for level, count in saved.items() if count)


def _host_words(plan: Plan, owner: str, on_device: int) -> str:
    if owner == "activations":
        return saved_words(plan.saved("host"))
    if owner not in (states := _states(plan)):
        return ""
    which = _others_words(states[owner], plan.layers)
    if plan.host_copies or plan.update_place == "host":
        which = f"copies of all {plan.layers}" if plan.host_copies else f"all {plan.layers}, updated there"
    if owner != "optimizer":
        return which
    return "; ".join(part for part in (moment_words(plan), which if on_device else "") if part)


def _others_words(residency: Residency, layers: int) -> str:
    """What is on the host because it does not stay on the device."""
    rest = layers - residency.blocks
    words = [f"the other {rest}" if residency.blocks else f"all {layers}"] if rest else []
    return list_words([*words, *(end for end in ENDS if end not in residency.ends)])


def moment_words(plan: Plan) -> str:
    """What the optimizer remembers of a parameter: `m and v, bf16`."""
    formats = parse_formats(plan.precision)
    moments = MOMENT_WORDS[plan.optimizer].format(formats.moments)
    words = [moments] if moments else []
    if formats.master:
        words.append(f"master weights, {formats.master}")
    return "; ".join(words)


# -- schedule, time, speed ------------------------------------------------------------------------------------------


def _answer(planned: Planned) -> Table:
    forecast, interval = planned.forecast, planned.interval
    spread, evidence = interval_words(interval, forecast.step_s)
    waited = [(name, s) for name, s in forecast.idle.items() if s > 1e-6 * forecast.step_s]
    waits = sorted(waited, key=lambda item: -item[1])
    rate = f"{significant(forecast.tokens_per_s)} tok/s{padded_words(forecast.padded_tokens_per_s)}{spread}"
    ceiling = f"{show_share(forecast.ceiling_share)} of the kernels' own ceiling (matrix products and attention alone)"
    peak = f"{show_count(forecast.peak_flops)}FLOP/s dense {forecast.peak_format}"
    searched = f"{count_nouns(planned.searched, 'plan')}, {planned.simulated:,} of them simulated"
    return facts(
        [
            ("schedule", _schedule(planned.plan)),
            ("step", _step(planned)),
            ("waits for", " · ".join(f"{name} {show_seconds(s)}" for name, s in waits) or "nothing"),
            ("speed", Styled(f"{rate} · {show_share(forecast.mfu)} MFU · {show_share(forecast.hfu)} HFU", "bold")),
            ("", f"{ceiling} · bound by {forecast.bound}"),
            ("against", f"{peak}, FLOPs counted {forecast.convention}"),
            ("evidence", evidence),
            ("outside", outside_words(interval) if interval and interval.outside else ""),
            ("link", _link(planned)),
            ("would help", "\n".join(help_words(planned))),
            ("searched", searched if planned.searched else ""),
            *note_rows(planned.notes),
        ]
    )


def _schedule(plan: Plan) -> str:
    """How a step is cut, how attention runs, and where and when the update does."""
    if plan.chunks_per_sequence > 1:
        part = f" ({plan.chunks_per_sequence} make a sequence)"
    else:
        part = f" ({count_nouns(max(1, plan.chunk_tokens // plan.sequence_tokens), 'sequence')})"
    attention = "over a whole sequence at once" if plan.attention == "sequence" else "by chunk"
    if plan.chunks_per_sequence == 1:
        attention = "over whole sequences"
    when = {"backward": "right after a layer's last backward", "end": "when all gradients are there"}
    room = f", and room for {plan.tokens_per_step:,}" if plan.batch_tokens != plan.tokens_per_step else ""
    return (
        f"chunk {plan.chunk_tokens:,} tokens{part} · {count_nouns(plan.chunks_per_round, 'chunk')} a round"
        f" · {count_nouns(plan.rounds_per_step, 'round')} a step = {plan.batch_tokens:,} tokens{room}\n"
        f"attention {attention} · update on the {plan.update_place}, {when[plan.update_when]}"
        f"{' · steps replayed' if plan.replay else ''}"
    )


def _step(planned: Planned) -> str:
    """The step's seconds: parts that add up to it, then what some of them are spent on."""
    forecast = planned.forecast
    beside_copies = sum(forecast.idle.values()) - forecast.exposed_copy_s
    parts = [f"compute {show_seconds(forecast.compute_s)}"]
    if forecast.exposed_copy_s > 0:
        parts.append(f"exposed copies {show_seconds(forecast.exposed_copy_s)}")
    # What is left of a subtraction of equal sums is rounding, not time.
    if beside_copies > 1e-9 * forecast.step_s:
        parts.append(f"waiting for the host {show_seconds(beside_copies)}")
    spent = [
        f"{name} {show_seconds(seconds)} ({show_share(seconds / forecast.step_s)})"
        for name, seconds in (("recompute", forecast.recompute_s), ("update", forecast.update_s))
        if seconds > 0
    ]
    whole = f"{show_seconds(forecast.step_s)} = {' + '.join(parts)}"
    return f"{whole}\n{list_words(spent)} of it" if spent else whole


def interval_words(interval: Interval | None, step_s: float) -> tuple[str, str]:
    """Behind a speed, how far measured ones may be off (` ± 3 %`); and whose errors say so."""
    if interval is None:
        return "", ""
    # Outward, so that the words never promise more than the interval. The slowest step is the lowest speed.
    below = max(0, math.ceil(100 * (1 - step_s / interval.high_s)))
    above = max(0, math.ceil(100 * (step_s / interval.low_s - 1)))
    spread = f" ± {above} %" if below == above else f" (−{below} % to +{above} %)"
    if interval.outside:
        return spread, f"from the errors of simulated runs that were recorded ({interval.basis}), widened"
    return spread, f"8 of 10 recorded runs lie in that range ({interval.basis})"


def _link(planned: Planned) -> str:
    forecast = planned.forecast
    if not forecast.copy_in_bytes and not forecast.copy_out_bytes:
        return "nothing passes it"
    inward, outward = (show_count(size, "B") for size in (forecast.copy_in_bytes, forecast.copy_out_bytes))
    return f"{inward} in and {outward} out a step · in use {show_share(forecast.link_share)} of the time"


def help_words(planned: Planned) -> list[str]:
    """What more memory would buy, a line each; nothing where nobody asked."""
    gains = [(found, found.speed - 1) for found in planned.helps]
    if gains and all(gain < LITTLE for _, gain in gains):
        return ["with this batch more memory changes little"]
    return [f"{more_words(found, planned.plan)} → {_gain(gain)}, by estimate, with this batch" for found, gain in gains]


def more_words(found: Help, plan: Plan) -> str:
    """What is more of memory than the plan has."""
    changes = {
        "device": found.device_memory_bytes - plan.device_memory_bytes,
        "host": found.host_memory_bytes - plan.host_memory_bytes,
    }
    words = [f"{'+' if more > 0 else '−'}{show_bytes(abs(more))} {place}" for place, more in changes.items() if more]
    return list_words(words) or "the same memory"


def _gain(gain: float) -> str:
    return "little" if abs(gain) < LITTLE else f"about {signed_share(gain, 0)}"


def value_words(plan: Plan, name: str) -> str:
    """A derived value of a plan in words, with its name."""
    when = {"backward": "during backward", "end": "at the end"}[plan.update_when]
    stays = {kind: f"{residency.blocks} of {plan.layers} stay" for kind, residency in _states(plan).items()}
    leave, stay = sum(plan.saved("host").values()), sum(plan.saved("device").values())
    words = {
        "chunk_tokens": f"chunk of {plan.chunk_tokens:,} tokens",
        "chunks_per_round": f"{count_nouns(plan.chunks_per_round, 'chunk')} a round",
        "rounds_per_step": f"{count_nouns(plan.rounds_per_step, 'round')} a step",
        "head_chunk_tokens": f"head, {plan.head_chunk_tokens:,} tokens at a time",
        "tokens_per_step": f"{plan.tokens_per_step:,} tokens a step",
        "attention": f"attention by {plan.attention}",
        "activation_slots": count_nouns(plan.activation_slots, "activation slot"),
        "saves": f"saves, {leave:,} leave, {stay:,} stay",
        "update_place": f"update on the {plan.update_place}",
        "update_when": f"update {when}",
        "replay": "steps replayed",
        "precision": f"precision {plan.precision}",
        "sequence_tokens": f"sequence {plan.sequence_tokens:,}",
        "weights": f"weights, {stays['weights']}",
        "gradients": f"gradients, {stays['gradients']}",
        "optimizer_state": f"optimizer state, {stays['optimizer']}",
    }
    return words.get(name, name.replace("_", " "))


# -- rows and records for programs -----------------------------------------------------------------------------------

OF_PLAN = (
    *("hardware", "rule", "precision", "optimizer", "device_memory_bytes", "host_memory_bytes", "sequence_tokens"),
    *("lengths", "chunk_tokens", "chunks_per_round", "rounds_per_step", "head_chunk_tokens", "tokens_per_step"),
    *("attention", "update_place", "update_when", "replay", "activation_slots"),
)
OF_FORECAST = ("step_s", "tokens_per_s", "padded_tokens_per_s", "mfu", "hfu", "ceiling_share", "bound")
MORE_OF_FORECAST = (
    *("compute_s", "recompute_s", "update_s", "exposed_copy_s", "copy_in_bytes", "copy_out_bytes", "link_share"),
    *("peak_flops", "model_flops", "hardware_flops"),
)


def main_values(planned: Planned) -> dict[str, object]:
    """A plan's decisions and its figures at full precision, as every file of it names them."""
    plan, forecast = planned.plan, planned.forecast
    states = {"param": plan.weights, "grad": plan.gradients, "optimizer": plan.optimizer_state}
    return {
        "model": planned.model,
        **{name: getattr(plan, name) for name in OF_PLAN},
        **{f"{kind}_blocks": residency.on_device for kind, residency in states.items()},
        **{f"resident_{kind}_blocks": residency.blocks for kind, residency in states.items()},
        "host_saved": plan.saved("host"),
        "device_saved": plan.saved("device"),
        **{name: getattr(forecast, name) for name in OF_FORECAST},
        "device_bytes": forecast.device_total,
        "host_bytes": forecast.host_total,
        "device_bytes_by_owner": forecast.device_bytes,
        "host_bytes_by_owner": forecast.host_bytes,
    }


def device_plan_record(planned: Planned) -> dict[str, object]:
    """The whole plan: its main values, then the records that they come from."""
    records = ("plan", "forecast", "reasons", "helps", "interval", "notes", "searched", "simulated")
    return {**main_values(planned), **{name: getattr(planned, name) for name in records}}


def _flat(planned: Planned, owners: Sequence[str]) -> dict[str, object]:
    """Every figure in one row; what is a table in the JSON has a column for each of its entries."""
    forecast, interval = planned.forecast, planned.interval
    row: dict[str, object] = {}
    for name, value in main_values(planned).items():
        if name.endswith("_by_owner"):
            sizes = forecast.device_bytes if name.startswith("device") else forecast.host_bytes
            row |= {f"{name.removesuffix('_by_owner')}_{owner}": sizes.get(owner, 0) for owner in owners}
        elif isinstance(value, dict):
            row |= {f"{name}_{level}": count for level, count in value.items()}
        else:
            row[name] = value
    return {
        **row,
        **{name: getattr(forecast, name) for name in MORE_OF_FORECAST},
        "idle_s": sum(forecast.idle.values()),
        "low_s": interval.low_s if interval else None,
        "high_s": interval.high_s if interval else None,
        "searched": planned.searched,
        "simulated": planned.simulated,
    }


CELLS: dict[str, Callable[[Planned], str]] = {
    "model": lambda one: one.model,
    "hardware": lambda one: one.plan.hardware,
    "seq": lambda one: f"{one.plan.sequence_tokens:,}",
    "chunk": lambda one: f"{one.plan.chunk_tokens:,}",
    "chunks": lambda one: f"{one.plan.chunks_per_round:,}",
    "rounds": lambda one: f"{one.plan.rounds_per_step:,}",
    "device": lambda one: _of_cap(one.forecast.device_total, one.plan.device_memory_bytes),
    "host": lambda one: _of_cap(one.forecast.host_total, one.plan.host_memory_bytes),
    "step": lambda one: show_seconds(one.forecast.step_s),
    "tok/s": lambda one: significant(one.forecast.tokens_per_s),
    "MFU": lambda one: show_share(one.forecast.mfu),
    "HFU": lambda one: show_share(one.forecast.hfu),
    "bound by": lambda one: one.forecast.bound,
}
LEFT = {"model", "hardware", "bound by"}


def _of_cap(total: int, cap: int) -> str:
    return f"{'✓' if total <= cap else '✗'} {size_words(total)} of {show_bytes(cap)}"
