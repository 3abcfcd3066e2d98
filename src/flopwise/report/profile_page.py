"""Profiles as one HTML file: no script, nothing from the network, light and dark; every word of a file is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import isfinite

from flopwise.profile.explain.comparing import ProfileComparison
from flopwise.records.profile import Profile, TaskTime, Verdict
from flopwise.report.profile_comparison import (
    LENGTH_COLUMNS,
    cell_words,
    length_rows,
    same_words,
    sentences,
    split_rows,
    titles,
    warned,
)
from flopwise.report.profile_files import page_tables
from flopwise.report.profile_timeline import Span, measured, predicted
from flopwise.report.profile_words import (
    UNKNOWN,
    about,
    evidence_words,
    name_words,
    safe,
    scaled,
    seconds,
    stake_words,
    title,
    value_words,
    why_paragraph,
)
from flopwise.report.profiles import (
    Judged,
    Table,
    capacity_words,
    class_shares,
    engine_shares,
    heading_parts,
    memory_rows,
    summary_rows,
)

MOST_TASKS = 2000
"""That a timeline draws: the longest."""
COLOURS = 8
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--faint:#5b6570;--line:#d8dee4;--panel:#f6f8fa;--bar:#2f6fd0;
--warn:#9a5b00;--c0:#2f6fd0;--c1:#d1701f;--c2:#2f9152;--c3:#b13f8f;--c4:#8a6d00;--c5:#0b8793;--c6:#c23b3b;--c7:#6b5fc7}
@media (prefers-color-scheme:dark){:root{--paper:#0f1317;--ink:#e6eaee;--faint:#9aa5b1;--line:#2c343d;--panel:#171d23;
--bar:#6ea8ff;--warn:#f0b357;--c0:#6ea8ff;--c1:#f29b57;--c2:#65c98a;--c3:#e58acb;--c4:#d6b84a;--c5:#56c8d4;--c6:#f08080;
--c7:#a79bff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1100px;padding:1rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.3rem 0}h2{font-size:1.3rem;margin:2.2rem 0 .2rem;border-top:2px solid var(--line);
padding-top:1rem}h3{font-size:1.05rem;margin:0 0 .1rem}
p{margin:.3rem 0 .7rem}.faint{color:var(--faint);font-size:.92em}.warn{color:var(--warn)}
.panel{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:.8rem 1rem;margin:.9rem 0}
.cards{display:flex;flex-wrap:wrap;gap:.6rem;margin:.8rem 0}
.card{flex:1 1 8rem;background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:.5rem .8rem}
.card b{display:block;font-size:1.15rem;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.92em;overflow-wrap:normal}
th,td{padding:.18rem .6rem .18rem 0;text-align:right;vertical-align:top;white-space:nowrap}
th{color:var(--faint);font-weight:600;border-bottom:1px solid var(--line)}
th.left,td.left{text-align:left}td.wide{white-space:normal;min-width:11rem}td small{color:var(--faint)}
td:first-child,th:first-child{position:sticky;left:0;background:var(--panel)}a{color:var(--bar)}
tr.first td{border-top:1px solid var(--line)}
.bars{display:grid;grid-template-columns:max-content max-content max-content 1fr;gap:.2rem .8rem;align-items:center}
.bars>span{font-variant-numeric:tabular-nums;text-align:right}.bars>span.left{text-align:left;overflow-wrap:anywhere}
svg{display:block;width:100%}rect.bar{fill:var(--bar)}rect.back{fill:var(--line)}
.predicted{opacity:.55}path.area{fill:var(--bar);opacity:.35}path.edge{fill:none;stroke:var(--bar);stroke-width:1.5}
i.dot{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em}
ol,ul{margin:.3rem 0;padding-left:1.3rem}li{margin:.4rem 0}
.row{display:grid;grid-template-columns:9.5rem 1fr;gap:.15rem .6rem;align-items:center}
@media (max-width:560px){body{padding:.7rem;font-size:14px}.panel{padding:.6rem .7rem}
.bars{grid-template-columns:1fr max-content max-content}.bars>svg{grid-column:1/-1}.row{grid-template-columns:1fr}
.wide{display:none}td.name{white-space:normal;overflow-wrap:anywhere;min-width:8rem;max-width:9rem}}
"""


def profiles_page(judged: Sequence[Judged], comparison: ProfileComparison | None = None) -> str:
    """One page for profiles, the comparison first where there is one."""
    heading = name_words(judged[0][0]) if len(judged) == 1 else f"{len(judged)} profiles"
    parts = [*_comparison(comparison)] if comparison else []
    if len(judged) == 1:
        parts += _profile(*judged[0])
    else:
        parts += [part for number, each in enumerate(judged, 1) for part in _section(number, *each)]
    body = "\n".join(part for part in parts if part)
    links = _contents(judged) if len(judged) > 1 else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(heading)} · flopwise</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{_text(heading)}</h1>\n{links}\n{body}\n</body>\n</html>\n"
    )


def _text(words: str, longest: int = 400) -> str:
    """Words of a file, fit for HTML, also within a quoted attribute."""
    return escape(safe(words, longest), quote=True)


def _contents(judged: Sequence[Judged]) -> str:
    columns = ("profile", "batch", "seq", "step", "device", "rate", "MFU", "MBU", "memory", "limited by")
    rows = []
    for number, cells in enumerate(summary_rows(judged), 1):
        name, *rest = [_text(cell) for cell in cells]
        rows.append([f'<a href="#p{number}">{name}</a>', *rest])
    return _panel("What was profiled?", "", _raw_table(columns, rows, {"profile", "limited by"}))


def _section(number: int, profile: Profile, verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield f'<section id="p{number}">\n<h2>{_text(name_words(profile))}</h2>'
    yield from _profile(profile, verdicts)
    yield "</section>"


# -- pieces ----------------------------------------------------------------------------------------------------------


def _panel(question: str, sentence: str, content: str) -> str:
    told = f'<p class="faint">{sentence}</p>\n' if sentence else ""
    return f'<div class="panel">\n<h3>{question}</h3>\n{told}{content}\n</div>' if content else ""


def _raw_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: set[str] | frozenset[str]) -> str:
    """A table of cells that are HTML already."""
    places = [
        ' class="left wide"' if column in WIDE else ' class="left"' if column in left else "" for column in columns
    ]
    head = "".join(f"<th{place}>{escape(column)}</th>" for column, place in zip(columns, places, strict=True))
    lines = []
    for row in rows:
        cells = []
        for cell, column, place in zip(row, columns, places, strict=True):
            shape = ' class="left name"' if column in NAMES else place
            cells.append(f"<td{shape}>{cell}</td>")
        first = ' class="first"' if columns[0] == "Group" and row[0] else ""
        lines.append(f"<tr{first}>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n' + "\n".join(lines) + "\n</table></div>"


WIDE = {"Meaning"}
"""Columns that are folded, and left out where there is no room at all."""
NAMES = {"name", "profile", "task", "figure"}
"""Columns of long words without blanks."""


def _table(table: Table) -> str:
    rows = [[_text(cell) for cell in row] for row in table.rows]
    note = f'<p class="faint">{_text(table.note)}</p>' if table.note else ""
    return _raw_table(table.columns, rows, table.words) + note


def _bars(rows: Sequence[tuple[str, float, float | None]]) -> str:
    """Name, time and share in words, and a bar as long as the share."""
    cells = []
    for name, taken, share in rows:
        told = UNKNOWN if share is None or not isfinite(share) else about(share)
        cells.append(
            f'<span class="left">{_text(name)}</span><span>{seconds(taken)}</span><span>{told}</span>'
            f'<svg height="12" role="img" aria-label="{told}"><rect class="back" width="100%" height="12" rx="2"/>'
            f'<rect class="bar" width="{_percent(share)}" height="12" rx="2"/></svg>'
        )
    return f'<div class="bars">{"".join(cells)}</div>' if cells else ""


def _percent(share: float | None) -> str:
    known = share if share is not None and isfinite(share) else 0.0
    return f"{100 * min(1.0, max(0.0, known)):.3f}%"


# -- a profile -------------------------------------------------------------------------------------------------------


def _profile(profile: Profile, verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield f'<p class="faint">{_text(" · ".join(heading_parts(profile)[1:]))}</p>'
    yield f"<p>{_text(why_paragraph(profile, verdicts), 4000)}</p>"
    yield _cards(profile)
    yield _list("Warnings", profile.warnings, "warn")
    yield _verdicts(verdicts)
    sentence = "Time is charged to one class at a time, so that classes add up to the busy time."
    yield _panel("Where did the time go?", sentence, _bars(class_shares(profile)))
    sentence = "Shares of the device's span; engines run beside each other."
    yield _panel("Which engines had work?", sentence, _bars(engine_shares(profile)))
    tables = {table.title: table for table in page_tables(profile, verdicts)}
    for name in ("Kernels", "Operators"):
        if name in tables:
            sentence = "Of roof: the time it would take at the peaks, over the time it took. Lost: the difference."
            yield _panel(f"{name}: how near are they to their roofs?", sentence, _table(tables[name]))
    yield _memory(profile, tables)
    yield _timeline(profile, tables)
    for name, question in (
        ("Figures", "What are the figures?"),
        ("Train metrics", "What did the trainer say?"),
        ("System", "What did it run on?"),
    ):
        if name in tables:
            yield _panel(question, "", _table(tables[name]))
    yield _list("Notes", profile.notes, "")


def _cards(profile: Profile) -> str:
    shown = (
        *(("step", "step_wall_s"), ("device", "device_span_s"), ("tokens", "tokens_per_s")),
        *(("samples", "samples_per_s"), ("MFU", "mfu"), ("bandwidth used", "mbu"), ("power", "power_w")),
    )
    cards = [(label, value_words(name, profile.values[name])) for label, name in shown if name in profile.values]
    if profile.memory_total_bytes is not None:
        cards.append(("memory", scaled(profile.memory_total_bytes, "B")))
    inner = "".join(
        f'<div class="card"><span class="faint">{label}</span><b>{words}</b></div>' for label, words in cards
    )
    return f'<div class="cards">{inner}</div>' if cards else ""


def _list(question: str, lines: Sequence[str], style: str) -> str:
    items = "".join(f'<li class="{style}">{_text(line)}</li>' for line in lines)
    return _panel(question, "", f"<ul>{items}</ul>" if items else "")


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    items = []
    for verdict in verdicts:
        at_stake = f" · up to {stake_words(verdict)} of the time" if verdict.share is not None else ""
        style = ' class="warn"' if verdict.kind == "invalid" else ""
        items.append(
            f"<li><b{style}>{_text(title(verdict))}</b>{at_stake}<br>{_text(evidence_words(verdict), 800)}"
            f'<br><span class="faint">→ {_text(verdict.advice)}</span></li>'
        )
    sentence = "The most time at stake first; what is at stake for two limits may be the same time."
    return _panel("What limits it?", sentence, f"<ol>{''.join(items)}</ol>" if items else "")


# -- memory ----------------------------------------------------------------------------------------------------------


def _memory(profile: Profile, tables: dict[str, Table]) -> str:
    rows = memory_rows(profile)
    whole = profile.memory_capacity_bytes or profile.memory_total_bytes or sum(size for _, size, _ in rows)
    owners = [(owner, size, share) for owner, size, share in rows if owner != "total"]
    parts = []
    if owners and whole:
        parts.append(_stack([(owner, size / whole) for owner, size, _ in owners]))
        body = [
            [
                f"{_dot(place) if size > 0 else ''}{_text(owner)}",
                _signed(size),
                UNKNOWN if share is None else about(share),
            ]
            for place, (owner, size, share) in enumerate(owners)
        ]
    else:
        body = []
    body += [["total", _signed(size), ""] for owner, size, _ in rows if owner == "total"]
    if body:
        parts.append(_raw_table(("owner", "size", "share"), body, {"owner"}))
    parts += [
        f"<p></p>{_table(tables[name])}"
        for name in ("Memory as planned and as it was", "Device memory as the tool names it")
        if name in tables
    ]
    parts.append(_over_time(profile))
    return _panel("Does it fit?", _text(capacity_words(profile)), "\n".join(part for part in parts if part))


def _signed(size: float) -> str:
    return f"−{scaled(-size, 'B')}" if size < 0 else scaled(size, "B")


def _dot(place: int) -> str:
    return f'<i class="dot" style="background:var(--c{place % COLOURS})"></i>'


def _stack(shares: Sequence[tuple[str, float]]) -> str:
    """One bar of pieces; the rest of it is free."""
    begin, pieces = 0.0, []
    for place, (owner, share) in enumerate(shares):
        if share > 0 and isfinite(share):
            pieces.append(
                f'<rect x="{_percent(begin)}" width="{_percent(min(share, 1 - begin))}" height="26" '
                f'style="fill:var(--c{place % COLOURS})"><title>{_text(owner)}</title></rect>'
            )
            begin += share
    return (
        '<svg height="26" role="img" aria-label="memory by owner">'
        f'<rect class="back" width="100%" height="26"/>{"".join(pieces)}</svg>'
    )


def _over_time(profile: Profile) -> str:
    points = [(when, size) for when, size in profile.memory_over_time if isfinite(when) and isfinite(size)]
    most = max((size for _, size in points), default=0.0)
    first, last = (points[0][0], points[-1][0]) if points else (0.0, 0.0)
    if len(points) < 2 or most <= 0 or last <= first:
        return ""
    steps: list[str] = []
    for when, size in points:
        across, up = 1000 * (when - first) / (last - first), 100 - 100 * max(0.0, size) / most
        # Memory stays as it is until the next change.
        steps.append(f"H{across:.2f}V{up:.2f}" if steps else f"M{across:.2f} {up:.2f}")
    edge = "".join(steps)
    return (
        f'<p class="faint">Over {seconds(last - first)}: the peak is {scaled(most, "B")}.</p>'
        '<svg viewBox="0 0 1000 100" preserveAspectRatio="none" height="110" role="img" aria-label="memory over time">'
        f'<path class="area" d="{edge}V100H0Z"/>'
        f'<path class="edge" vector-effect="non-scaling-stroke" d="{edge}"/></svg>'
    )


# -- predicted above measured ----------------------------------------------------------------------------------------

Times = Callable[[TaskTime], Span | None]


def _timeline(profile: Profile, tables: dict[str, Table]) -> str:
    kinds: tuple[tuple[str, Times], ...] = (("predicted", predicted), ("measured", measured))
    begins = {name: _least(profile.tasks, times) for name, times in kinds}
    ends = [when[1] - begins[name] for name, times in kinds for task in profile.tasks if (when := times(task))]
    whole = max(ends, default=0.0)
    if whole <= 0:
        return ""
    streams = list(dict.fromkeys(task.stream for task in profile.tasks))
    rows = []
    for place, stream in enumerate(streams):
        for name, times in kinds:
            drawn = _drawn(profile.tasks, stream, times, begins[name], whole)
            label = f"{_text(stream, 20)} " if name == "predicted" else ""
            rows.append(
                f'<span class="faint">{label}{name}</span><svg height="14" role="img" class="{name}" '
                f'aria-label="{_text(stream, 20)}, {name}" style="fill:var(--c{place % COLOURS})">'
                f'<rect class="back" width="100%" height="14" style="opacity:.4"/>{drawn}</svg>'
            )
    sentence = f"One step, {seconds(whole)} from left to right: each stream as predicted above as it ran."
    more = [
        _table(tables[name]) for name in ("Tasks, predicted and measured", "Tasks that differ most") if name in tables
    ]
    return _panel(
        "Was the prediction right?", sentence, f'<div class="row">{"".join(rows)}</div><p></p>{"<p></p>".join(more)}'
    )


def _least(tasks: Sequence[TaskTime], times: Times) -> float:
    return min((when[0] for task in tasks if (when := times(task))), default=0.0)


def _drawn(tasks: Sequence[TaskTime], stream: str, times: Times, begin: float, whole: float) -> str:
    found = [(when, task.name) for task in tasks if task.stream == stream and (when := times(task))]
    longest = sorted(found, key=lambda pair: pair[0][0] - pair[0][1])[:MOST_TASKS]
    return "".join(
        f'<rect x="{_percent((start - begin) / whole)}" width="{_percent((end - start) / whole)}" height="14">'
        f"<title>{_text(name, 60)}: {seconds(end - start)}</title></rect>"
        for (start, end), name in longest
    )


# -- the comparison --------------------------------------------------------------------------------------------------


def _comparison(comparison: ProfileComparison) -> Iterator[str]:
    told = "".join(f"<p>{_text(line)}</p>" for line in sentences(comparison))
    told += "".join(f'<p class="warn">{_text(line, 1000)}</p>' for line in warned(comparison))
    rows, same = split_rows(comparison)
    columns = ("figure", *titles(comparison))
    cells = [
        [_text(row.name), *(_pair(*cell_words(row, number)) for number in range(len(comparison.names)))] for row in rows
    ]
    table = _raw_table(columns, cells, {"figure"})
    note = f'<p class="faint">{_text(same_words(same, comparison.baseline), 4000)}</p>' if same else ""
    base = _text(comparison.names[comparison.baseline])
    yield _panel("What changes from one to the next?", f"Changes are relative to {base}.", told + table + note)
    if comparison.lengths:
        lengths = [[_text(cell) for cell in row] for row in length_rows(comparison)]
        yield _panel("What does a shorter sequence buy?", "", _raw_table(LENGTH_COLUMNS, lengths, {"profile"}))


def _pair(figure: str, change: str) -> str:
    return f"{_text(figure)} <small>{_text(change)}</small>" if change and change != "=" else _text(figure)
