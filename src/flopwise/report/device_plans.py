"""A plan for one device on a page: memory by owner and place, the schedule, the answer, and why."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from flopwise.base.units import show_bytes, show_count, show_seconds, show_share, significant
from flopwise.records.plan import Help, Plan, Planned, Residency
from flopwise.records.prediction import Interval
from flopwise.records.program import OWNERS
from flopwise.report.predictions import NOTHING_KNOWN, OPTIMIZER_TITLES, outside_words
from flopwise.setup.words import MOMENTS
from flopwise.work.formats import parse_formats
from flopwise.work.parameters import ENDS

SAME = 5e-4
"""Speeds that differ by less are printed as the same."""

LITTLE = 0.005
"""Gains that differ by less are not told apart: they are estimates."""

TIGHT = 0.05
"""A total with less than this share of the cap to spare is tight."""

LONGEST_LABEL = 26
"""Columns for what stands before words."""

LEVEL_WORDS = {"full": "full", "attention": "input+context+attention", "context": "input+context", "input": "input"}
"""What is kept of a (layer, chunk) at each save level."""

MOMENT_WORDS = {0: "", 1: "m", 2: "m and v"}
OWNER_WORDS = {"residual": "between layers", "context": "keys and values of a sequence"}
"""Owners of device memory whose names do not say it all."""


def device_plan_page(planned: Planned, title: str) -> RenderableType:
    """The plan on a page: memory by owner and place, the schedule, the answer, and why."""
    return Group(_heading(planned, title), "", _Memory(planned), "", _answer(planned), *_why(planned))


FIRM = "\u00a0"
"""A blank at which `textwrap` does not break a line."""
UNIT = re.compile(r"(?<=\d) (?=(?:%|tok/s|[kMGTP]?i?B|s|ms|µs|min|h|days|tokens)(?:[\s),;]|$))")


def _bound(words: str) -> str:
    """Words with the blanks made firm that stand between a number and its unit."""
    return UNIT.sub(FIRM, words).replace("± ", f"±{FIRM}")


def _folded(words: str, width: int) -> str:
    """Words in lines of at most `width`."""
    lines = [line for part in words.split("\n") for line in textwrap.wrap(_bound(part), width, break_on_hyphens=False)]
    return "\n".join(lines).replace(FIRM, " ")


@dataclass(frozen=True, slots=True)
class _Lines:
    """Rows of a label and words, folded where they are longer than the page is wide; with them the rows' styles."""

    rows: Sequence[tuple[str, str, str]]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        labels = [_folded(label, LONGEST_LABEL) for label, _, _ in self.rows]
        room = options.max_width - max(cell_len(line) for label in labels for line in label.split("\n")) - 2
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for label, (_, words, style) in zip(labels, self.rows, strict=True):
            table.add_row(Text(label), Text(_folded(words, room)), style=style)
        yield table


def _heading(planned: Planned, title: str) -> Text:
    plan = planned.plan
    caps = f"caps: device {show_bytes(plan.device_memory_bytes)}, host {show_bytes(plan.host_memory_bytes)}"
    rule = "" if plan.rule == "flopwise" else f" · by the rule {plan.rule}"
    return Text(
        f"{planned.model} · 1 × {title} · sequence {plan.sequence_tokens:,}"
        f" · {OPTIMIZER_TITLES[plan.optimizer]} · {plan.precision}\n{caps}{rule}"
    )


# -- memory ---------------------------------------------------------------------------------------------------------

MemoryRow = tuple[str, str, Text, str, Text]
"""Owner, bytes on the device and words about them, bytes on the host and words about them."""
HEADER = ("", "device", "", "host", "")


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory by owner and place as a table whose columns of words share what room there is, and fold between words."""

    planned: Planned

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        rows = memory_rows(self.planned)
        fixed = sum(max(cell_len(str(row[index])) for row in (HEADER, *rows)) for index in (0, 1, 3))
        texts = [[row[2].plain for row in rows], [row[4].plain for row in rows]]
        wanted = [max(cell_len(text) for text in column) for column in texts]
        least = [max(cell_len(word) for text in column for word in _bound(text).split(" ")) for column in texts]
        widths = _shared(options.max_width - fixed - 4 * 2, wanted, least)
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name in HEADER:
            table.add_column(name, no_wrap=True, justify="right" if name else "left")
        for owner, device, on_device, host, on_host in rows:
            first = Text(_folded(on_device.plain, widths[0]), on_device.style)
            second = Text(_folded(on_host.plain, widths[1]), on_host.style)
            table.add_row(owner, device, first, host, second)
        yield table


def _shared(room: int, wanted: Sequence[int], least: Sequence[int]) -> tuple[int, int]:
    """Widths of two columns: as wide as they want to be, else half each but for the longest word."""
    if sum(wanted) <= room:
        return max(1, wanted[0]), max(1, wanted[1])
    first = max(least[0], room // 2, room - wanted[1])
    first = min(first, wanted[0], max(least[0], room - least[1]))
    return max(1, first), max(1, room - first)


def memory_rows(planned: Planned) -> list[MemoryRow]:
    """The rows of the memory table, the total last."""
    plan, forecast = planned.plan, planned.forecast
    rows: list[MemoryRow] = []
    for owner in owners_of([planned]):
        device, host = forecast.device_bytes.get(owner, 0), forecast.host_bytes.get(owner, 0)
        # Optimizer state may pass through memory of the activations, and then has none of its own.
        words = _device_words(plan, owner) if device or _borrows(plan, owner) else ""
        if owner == "optimizer" and not host:
            words = "; ".join(part for part in (words, moment_words(plan)) if part)
        others = _host_words(plan, owner, device) if host else ""
        rows.append((owner, size_words(device), Text(words), size_words(host), Text(others)))
    device, host = forecast.device_total, forecast.host_total
    verdicts = _verdict(device, plan.device_memory_bytes), _verdict(host, plan.host_memory_bytes)
    return [*rows, ("total", size_words(device), verdicts[0], size_words(host), verdicts[1])]


def owners_of(planneds: Iterable[Planned]) -> list[str]:
    """Owners of memory in any of the plans, in the order in which programs name them."""
    found = {owner for planned in planneds for owner in (*planned.forecast.device_bytes, *planned.forecast.host_bytes)}
    return [*(owner for owner in OWNERS if owner in found), *sorted(found.difference(OWNERS))]


def size_words(size: int) -> str:
    return show_bytes(size) if size else "-"


def _verdict(total: int, cap: int) -> Text:
    """Whether a total keeps to its cap."""
    spare = cap - total
    if spare < 0:
        return Text(f"✗ does not fit, {show_bytes(-spare)} too much", style="red")
    if not total:
        return Text("✓ nothing is kept there", style="green")
    if spare < TIGHT * cap:
        return Text(f"✓ fits, tight: {show_bytes(spare)} spare", style="yellow")
    return Text(f"✓ fits, {show_bytes(spare)} spare", style="green")


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
        words.append(f"{_listed(staying)} {'stays' if one else 'stay'}")
    if rest and residency.passing:
        others = f"{rest}" if blocks else _counted(rest, "block")
        words.append(f"{others} pass{'es' if rest == 1 else ''} through {_counted(residency.passing, 'slot')}")
    return ", ".join(words)


def _slot_words(plan: Plan) -> str:
    """Room for activations, and how many (layer, chunk) stay in it."""
    saved = plan.saved("device")
    staying = sum(saved.values())
    words = f"{_counted(plan.activation_slots, 'slot')} for (layer, chunk)"
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
    return _listed([*words, *(end for end in ENDS if end not in residency.ends)])


def moment_words(plan: Plan) -> str:
    """What the optimizer remembers of a parameter: `m and v, bf16`."""
    formats = parse_formats(plan.precision)
    moments = MOMENT_WORDS[MOMENTS[plan.optimizer]]
    words = [f"{moments}, {formats.moments}"] if moments else []
    if formats.master:
        words.append(f"master weights, {formats.master}")
    return "; ".join(words)


def _listed(words: Sequence[str]) -> str:
    """`one`, `one and two`, `one, two and three`."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# -- schedule, time, speed ------------------------------------------------------------------------------------------


def _answer(planned: Planned) -> _Lines:
    forecast, (spread, evidence) = planned.forecast, interval_words(planned.interval, planned.forecast.step_s)
    waited = [(name, s) for name, s in forecast.idle.items() if s > 1e-6 * forecast.step_s]
    waits = sorted(waited, key=lambda item: -item[1])
    rate = f"{significant(forecast.tokens_per_s)} tok/s{spread}"
    ceiling = f"{show_share(forecast.ceiling_share)} of the kernels' own ceiling (matrix products and attention alone)"
    peak = f"{show_count(forecast.peak_flops)}FLOP/s dense {forecast.peak_format}"
    rows = [
        ("schedule", _schedule(planned.plan), ""),
        ("step", _step(planned), ""),
        ("waits for", " · ".join(f"{name} {show_seconds(s)}" for name, s in waits) or "nothing", ""),
        ("speed", f"{rate} · {show_share(forecast.mfu)} MFU · {show_share(forecast.hfu)} HFU", "bold"),
        ("", f"{ceiling} · bound by {forecast.bound}", ""),
        ("against", f"{peak}, FLOPs counted {forecast.convention}", ""),
        ("evidence", evidence, ""),
        ("outside", outside_words(planned.interval) if planned.interval and planned.interval.outside else "", ""),
        ("link", _link(planned), ""),
        ("would help", "\n".join(help_words(planned)), ""),
        ("searched", f"{_counted(planned.searched, 'plan')}, {planned.simulated:,} of them simulated", ""),
        *(("note", note, "cyan") for note in planned.notes),
    ]
    return _Lines([row for row in rows if row[1] and (row[0] != "searched" or planned.searched)])


def _schedule(plan: Plan) -> str:
    """How a step is cut, how attention runs, and where and when the update does."""
    if plan.chunks_per_sequence > 1:
        part = f" ({plan.chunks_per_sequence} make a sequence)"
    else:
        part = f" ({_counted(max(1, plan.chunk_tokens // plan.sequence_tokens), 'sequence')})"
    attention = "over a whole sequence at once" if plan.attention == "sequence" else "by chunk"
    if plan.chunks_per_sequence == 1:
        attention = "over whole sequences"
    when = {"backward": "right after a layer's last backward", "end": "when all gradients are there"}
    return (
        f"chunk {plan.chunk_tokens:,} tokens{part} · {_counted(plan.chunks_per_round, 'chunk')} a round"
        f" · {_counted(plan.rounds_per_step, 'round')} a step = {plan.tokens_per_step:,} tokens\n"
        f"attention {attention} · update on the {plan.update_place}, {when[plan.update_when]}"
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
    return f"{whole}\n{_listed(spent)} of it" if spent else whole


def interval_words(interval: Interval | None, step_s: float) -> tuple[str, str]:
    """Behind a speed, how far measured ones may be off (` ± 3 %`); and whose errors say so."""
    if interval is None:
        return "", ""
    if interval.low_s <= 0 or interval.high_s > (1 + NOTHING_KNOWN) * step_s:
        return "", "nothing of this kind has been measured"
    # Outward, so that the words never promise more than the interval. The slowest step is the lowest speed.
    below = max(0, math.ceil(100 * (1 - step_s / interval.high_s)))
    above = max(0, math.ceil(100 * (step_s / interval.low_s - 1)))
    spread = f" ± {above} %" if below == above else f" (−{below} % to +{above} %)"
    if interval.outside:
        return spread, f"from the errors of simulated runs that another trainer recorded ({interval.basis}), widened"
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
    return [f"{_more(found, planned.plan)} → {_gain(gain)}, by estimate, with this batch" for found, gain in gains]


def _more(found: Help, plan: Plan) -> str:
    changes = {
        "device": found.device_memory_bytes - plan.device_memory_bytes,
        "host": found.host_memory_bytes - plan.host_memory_bytes,
    }
    words = [f"{'+' if more > 0 else '−'}{show_bytes(abs(more))} {place}" for place, more in changes.items() if more]
    return _listed(words) or "the same memory"


def _gain(gain: float) -> str:
    return "little" if abs(gain) < LITTLE else f"about {'+' if gain > 0 else '−'}{100 * abs(gain):.0f} %"


# -- why ------------------------------------------------------------------------------------------------------------


def _why(planned: Planned) -> list[RenderableType]:
    rows = [(value_words(planned.plan, name), reason, "") for name, reason in planned.reasons.items()]
    return ["", Text("why", style="bold"), _Lines(rows)] if rows else []


def value_words(plan: Plan, name: str) -> str:
    """A derived value of a plan in words, with its name."""
    when = {"backward": "during backward", "end": "at the end"}[plan.update_when]
    stays = {kind: f"{residency.blocks} of {plan.layers} stay" for kind, residency in _states(plan).items()}
    leave, stay = sum(plan.saved("host").values()), sum(plan.saved("device").values())
    words = {
        "chunk_tokens": f"chunk of {plan.chunk_tokens:,} tokens",
        "chunks_per_round": f"{_counted(plan.chunks_per_round, 'chunk')} a round",
        "rounds_per_step": f"{_counted(plan.rounds_per_step, 'round')} a step",
        "head_chunk_tokens": f"head, {plan.head_chunk_tokens:,} tokens at a time",
        "tokens_per_step": f"{plan.tokens_per_step:,} tokens a step",
        "attention": f"attention by {plan.attention}",
        "activation_slots": _counted(plan.activation_slots, "activation slot"),
        "saves": f"saves, {leave:,} leave, {stay:,} stay",
        "update_place": f"update on the {plan.update_place}",
        "update_when": f"update {when}",
        "precision": f"precision {plan.precision}",
        "sequence_tokens": f"sequence {plan.sequence_tokens:,}",
        "weights": f"weights, {stays['weights']}",
        "gradients": f"gradients, {stays['gradients']}",
        "optimizer_state": f"optimizer state, {stays['optimizer']}",
    }
    return words.get(name, name.replace("_", " "))
