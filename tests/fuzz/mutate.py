"""Damage: what disks, transfers, editors and other programs do to files, and people to command lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

MOST_BYTES = 4 * 2**20
"""Of a damaged file: larger ones would only be slower."""

ODD_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        0.5,
        -0.0,
        1e308,
        -1e308,
        1e-320,
        2**31,
        2**53 + 1,
        2**63,
        2**64,
        10**30,
        -(10**30),
    ),
    *(float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "a",
        "auto",
        "none",
        "../../etc/passwd",
        "/dev/null",
        "\x00",
        "\x1b[31m",
        "\u202e",
        "\ud800",
        "é",
        "x" * 5000,
    ),
    *([], {}, [[]], [None], {"": 0}, {"a": {"a": {"a": {}}}}, ["a"] * 300),
)
ODD_TEXTS = (
    *("nan", "inf", "-inf", "null", "true", "1e999", "-1", "0", "99999999999999999999", "0x10", "1_0", "1,2", "½", "٣"),
    *(
        "\x00",
        "\x1b]0;x\x07",
        "\u202e",
        "\ufeff",
        "\n",
        "\r\n",
        "\t",
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        "=",
        ",",
        ".",
        "|",
    ),
    *("<script>", "=1+1", "%s", "{0}", "$(id)", "../", "a" * 300),
)


def damaged(content: bytes, chance: Random) -> bytes:
    """The content after one to four kinds of damage."""
    structure = _as_json(content) if chance.random() < 0.6 else None
    if structure is not None and chance.random() < 0.8:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            structure = _odd_structure(structure, chance)
        return json.dumps(structure, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    for _ in range(chance.choice((1, 1, 2, 4))):
        content = chance.choice(DAMAGES)(content, chance)
    return content[:MOST_BYTES]


def _as_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _odd_structure(structure: Any, chance: Random) -> Any:
    """One value of it removed, doubled, renamed or replaced."""
    places = list(_places(structure))
    if not places:
        return chance.choice(ODD_VALUES)
    holder, key = chance.choice(places)
    kind = chance.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[chance.choice(("", "name", "x", key + "s", key.upper()))] = holder.pop(key)
    elif kind == 2 and isinstance(holder, list):
        holder[:] = holder[: chance.randrange(len(holder) + 1)] * chance.choice((1, 2, 50))
    elif kind == 3:
        other, place = chance.choice(places)
        holder[key] = json.loads(json.dumps(other[place]))
    elif kind == 4 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * chance.choice((-1, 0, 2, 1000, 1e9, 0.1))
    else:
        holder[key] = chance.choice(ODD_VALUES)
    return structure


def _places(structure: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [structure]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            waiting.append(holder[key])


def _flip(content: bytes, chance: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 8))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(content: bytes, chance: Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _behead(content: bytes, chance: Random) -> bytes:
    return content[chance.randrange(len(content) + 1) :]


def _block(content: bytes, chance: Random) -> tuple[int, int]:
    first = chance.randrange(len(content) + 1)
    return first, min(len(content), first + chance.choice((1, 4, 64, 1024, len(content))))


def _remove(content: bytes, chance: Random) -> bytes:
    first, last = _block(content, chance)
    return content[:first] + content[last:]


def _repeat(content: bytes, chance: Random) -> bytes:
    first, last = _block(content, chance)
    times = max(1, min(chance.choice((2, 10, 1000)), MOST_BYTES // max(1, last - first)))
    return content[:first] + content[first:last] * times + content[last:]


def _overwrite(content: bytes, chance: Random) -> bytes:
    first, last = _block(content, chance)
    last = min(last, first + 1024)
    filling = chance.choice((b"\x00" * (last - first), b"\xff" * (last - first), chance.randbytes(last - first)))
    return content[:first] + filling + content[last:]


def _insert(content: bytes, chance: Random) -> bytes:
    place = chance.randrange(len(content) + 1)
    text = chance.choice(ODD_TEXTS).encode() * chance.choice((1, 1, 1, 200))
    return content[:place] + text + content[place:]


def _odd_line(content: bytes, chance: Random) -> bytes:
    """A line removed, doubled, moved, or its value replaced."""
    lines = content.split(b"\n")
    place = chance.randrange(len(lines))
    line = lines.pop(place)
    key, sign, value = line.partition(b"=")
    kind = chance.randrange(4)
    if kind == 0:
        lines[place:place] = [line, line]
    elif kind == 1:
        lines.insert(chance.randrange(len(lines) + 1), line)
    elif kind == 2:
        odd = json.dumps(chance.choice(ODD_VALUES)).encode()
        lines.insert(place, key + sign + b" " + odd if sign else value + odd)
    return b"\n".join(lines)


def _odd_number(content: bytes, chance: Random) -> bytes:
    places = [place for place, byte in enumerate(content[:65536]) if chr(byte).isdigit()]
    if not places:
        return _flip(content, chance)
    first = last = chance.choice(places)
    while last < len(content) and chr(content[last]).isdigit():
        last += 1
    return content[:first] + chance.choice(ODD_TEXTS[:14]).encode() + content[last:]


DAMAGES: tuple[Callable[[bytes, Random], bytes], ...] = (
    *(_flip, _cut, _behead, _remove, _repeat, _overwrite, _insert, _odd_line, _odd_number),
)


def odd_words(words: list[str], chance: Random) -> list[str]:
    """A command line with some of its words changed, doubled, removed or moved; the command itself stays mostly."""
    words = list(words)
    for _ in range(chance.choice((1, 1, 2, 3))):
        place = chance.randrange(min(1, len(words) - 1), len(words)) if chance.random() < 0.95 else 0
        kind = chance.randrange(6)
        if kind == 0 and len(words) > 1:
            del words[place]
        elif kind == 1:
            words.insert(place, words[place])
        elif kind == 2:
            words[place] = chance.choice(ODD_TEXTS)
        elif kind == 3:
            words[place] = _odd_number(words[place].encode("utf-8", "surrogatepass"), chance).decode("utf-8", "replace")
        elif kind == 4:
            words[place] += chance.choice(("k", "GiB", ",1", "-8*2", "=", "x", "\u202e", ",", "e9"))
        else:
            words.append(
                chance.choice(("-o", "--output", "json", "csv", "--help", "--", "-", "--nonsense", "--set", "layers=2"))
            )
    return [word.replace("\x00", "") for word in words] or ["--help"]
