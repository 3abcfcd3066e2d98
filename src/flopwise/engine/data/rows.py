"""Rows of tables as examples to learn: conversations, prompts with their completions, instructions, tokens.

An example is a list of segments, each text or tokens and whether it is learned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from flopwise.base.errors import FlopwiseError, shown
from flopwise.engine.data.chat import ANSWERED_BY, LEARNED, Message

Kind = Literal["text", "messages", "conversations", "prompt", "instruction", "tokens", "pairs"]

COLUMNS: dict[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("tools",)),
    "conversations": (("conversations",), ("system", "tools")),
    "prompt": (("prompt", "completion"), ("tools",)),
    "instruction": (("instruction", "output"), ("input", "system")),
    "tokens": (("input_ids",), ("labels",)),
    "pairs": (("chosen", "rejected"), ("prompt", "conversations", "tools")),
}
"""Kind of rows → columns that it has, and others that it may have. The first that fits is taken."""

ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool", "developer")},
    **{"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"},
    **{"observation": "tool", "function": "tool"},
}
"""Who speaks, as ShareGPT and its kin call them."""

WEIGHTS = ("weight", "train", "training")
"""Whether an answer of a conversation is learned, as OpenAI's and Axolotl's files say it: 1 or 0, true or false."""

ASKING = ("question", "instruction", "input", "query", "system", "context", "history")
"""Columns that may hold what was asked beside two answers, and that nobody reads as such."""
IGNORED_LABEL = -100
"""Of a token without a loss, in rows of tokens, as torch has it."""

ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
"""How rows of instructions are written where a tokenizer has no template of its own."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and from which of them on answers are learned."""

    messages: list[Message]
    first: int = 0
    tools: object = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A text that is given and one that is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Identifiers:
    """Tokens, and which of them are learned."""

    tokens: list[int]
    learned: list[bool]


@dataclass(frozen=True, slots=True)
class Whole:
    """A text that is learned from end to end."""

    text: str


Row = Conversation | Completion | Identifiers | Whole


def kind_of(columns: Collection[str], text_column: str, *, named: bool) -> Kind:
    """What rows with these columns are; `named`: the user said which column is the text."""
    if named:
        return "text"
    found = next((kind for kind in COLUMNS if kind != "pairs" and set(COLUMNS[kind][0]) <= set(columns)), None)
    # A text beside a conversation is mostly the same, written by another model's template; tokens beside a text are
    # mostly another tokenizer's.
    if found is not None and (found != "tokens" or text_column not in columns):
        return found
    if text_column in columns:
        return "text"
    if set(columns) >= set(COLUMNS["pairs"][0]):
        raise FlopwiseError(
            "rows have a chosen and a rejected answer, and the task is no comparison of them",
            why="every token of them would be learned, of the rejected ones too",
            hint="--task dpo, or rows of {'messages': …} with the chosen answers",
        )
    return "text"


def check_pairs(columns: Collection[str]) -> None:
    """Refuse rows without two answers, and those whose question would not be read."""
    missing = [name for name in COLUMNS["pairs"][0] if name not in columns]
    if missing:
        raise FlopwiseError(
            f"rows have no {missing[0]}",
            why=f"their columns are {', '.join(sorted(columns)[:8]) or 'none'}; DPO compares two answers",
            hint="rows with chosen and rejected, perhaps with prompt; or another --task",
        )
    asking = [name for name in ASKING if name in columns]
    if asking and not {"prompt", "conversations"} & set(columns):
        raise FlopwiseError(
            f"rows have {asking[0]} beside chosen and rejected, and no prompt",
            why="what was asked is read from prompt, or from what both answers begin with",
            hint=f"call {asking[0]} prompt, or write chosen and rejected as lists of messages",
        )


def read_pair(values: dict[str, Any]) -> tuple[Row, Row] | None:
    """A row as its chosen and its rejected example, as TRL reads them; None: there is nothing to compare."""
    chosen, rejected = ([each] if isinstance(each, dict) else each for each in (values["chosen"], values["rejected"]))
    asked = values.get("conversations") if values.get("prompt") is None else values["prompt"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _compared_texts(asked, chosen, rejected)
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise ValueError("chosen and rejected are two texts, or two lists of messages")
    better, worse = _messages(chosen), _messages(rejected)
    if any(not message.get(LEARNED, True) for message in (*better, *worse)):
        raise ValueError("a message is not to be learned, and answers are compared whole")
    if isinstance(asked, list):
        before = _messages(asked)
        better, worse, first = [*before, *better], [*before, *worse], len(before)
    else:
        # Both are whole conversations: what was asked, be it told once more as a text or not, is how they begin.
        alike = [one == other for one, other in zip(better, worse, strict=False)]
        first = alike.index(False) if False in alike else len(alike)
    if better == worse or not all(_answers(each, first) for each in (better, worse)):
        return None
    tools = values.get("tools") or None
    return Conversation(better, first, tools), Conversation(worse, first, tools)


def _answers(messages: list[Message], first: int) -> bool:
    return any(message["role"] == ANSWERED_BY for message in messages[first:])


def _compared_texts(asked: object, chosen: str, rejected: str) -> tuple[Row, Row] | None:
    """Two texts, with what was asked before them or in both of them."""
    if not isinstance(asked, str | None):
        raise ValueError("the answers are texts, and what was asked is none; both are texts, or lists of messages")
    if asked is None:
        asked = _common_text(chosen, rejected)
        if not asked and chosen and rejected:
            raise ValueError("there is no prompt, and the answers do not begin alike: nothing was asked")
        chosen, rejected = chosen[len(asked) :], rejected[len(asked) :]
    if not chosen or not rejected or chosen == rejected:
        return None
    return Completion(asked, chosen), Completion(asked, rejected)


def _common_text(one: str, other: str) -> str:
    """What both begin with; a space before the first difference is left to the answers."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((place for place, (first, second) in pairs if first != second), min(len(one), len(other)))
    return one[: same - 1] if same and one[same - 1] == " " else one[:same]


def read_row(kind: Kind, values: dict[str, Any], *, has_template: bool) -> Row | None:
    """A row as an example; None: there is nothing in it. A ValueError says what is wrong with it."""
    if kind == "text":
        text = values["text"]
        if not isinstance(text, str):
            raise ValueError(f"its text is {shown(text)}")
        return Whole(text) if text.strip() else None
    if kind == "tokens":
        return _identifiers(values["input_ids"], values.get("labels"))
    tools = values.get("tools") or None
    if kind == "prompt":
        return _prompted(values["prompt"], values["completion"], tools)
    if kind == "instruction":
        return _instructed(values, has_template=has_template)
    messages = _messages(values[kind])
    system = values.get("system")
    if isinstance(system, str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, tools=tools) if messages else None


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"a conversation is a list of messages, and this is {shown(value)}")
    return [_message(each) for each in value]


def _message(value: object) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"a message is an object with role and content, and this is {shown(value)}")
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"nobody is called {shown(role)}; roles are {', '.join(ROLES)}")
    if not isinstance(content, str | list) and not value.get("tool_calls"):
        raise ValueError(f"a message of the role {role} says nothing: its content is {shown(content)}")
    rest = {key: item for key, item in value.items() if key not in ("role", "from", "content", "value")}
    weights = {name: rest.pop(name) for name in WEIGHTS if rest.get(name) is not None}
    for name, weight in weights.items():
        if not isinstance(weight, int | float) or weight not in (0, 1):
            raise ValueError(f"{name} of a message is {shown(weight)}: it is learned (1), or it is not (0)")
    if 0 in weights.values():
        rest[LEARNED] = False
    if isinstance(rest.get("tool_calls"), list):
        rest["tool_calls"] = [_call(each) for each in rest["tool_calls"]]
    return {**rest, "role": ROLES[role], "content": _joined(content) if isinstance(content, list) else content}


def _joined(parts: list[object]) -> str:
    """A content in parts, all of which are texts."""
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        other = next(
            (part.get("type") for part in parts if isinstance(part, dict) and part.get("type") != "text"), None
        )
        raise ValueError(f"a message has a part that is no text, {shown(other)}; models read text alone here")
    return "".join(map(str, texts))


def _call(call: object) -> object:
    """A tool call as templates want it: its arguments an object, where they are one written as a text."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            arguments = msgspec.json.decode(function["arguments"])
            if isinstance(arguments, dict):
                return {**call, "function": {**function, "arguments": arguments}}
    return call


def _prompted(prompt: object, completion: object, tools: object) -> Row | None:
    if isinstance(prompt, list) and isinstance(completion, list):
        given = _messages(prompt)
        return Conversation([*given, *_messages(completion)], len(given), tools)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ValueError("prompt and completion are two texts, or two lists of messages")
    return Completion(prompt, completion) if completion else None


def _instructed(values: dict[str, Any], *, has_template: bool) -> Row | None:
    instruction, given, output = (values.get(name) or "" for name in ("instruction", "input", "output"))
    if not all(isinstance(each, str) for each in (instruction, given, output)):
        raise ValueError("instruction, input and output are texts")
    if not output.strip():
        return None
    if not has_template:
        about = ", paired with an input that provides further context" if given else ""
        return Completion(ALPACA.format(about, instruction, f"### Input:\n{given}\n\n" if given else ""), output)
    asked = f"{instruction}\n\n{given}" if given else instruction
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    system = values.get("system")
    before = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    return Conversation([*before, *turns])


def _identifiers(tokens: object, labels: object) -> Identifiers | None:
    if not _whole_numbers(tokens) or (labels is not None and not _whole_numbers(labels)):
        raise ValueError("input_ids and labels are lists of whole numbers")
    assert isinstance(tokens, list)
    if labels is None:
        return Identifiers(tokens, [True] * len(tokens)) if tokens else None
    assert isinstance(labels, list)
    if len(labels) != len(tokens):
        raise ValueError(f"there are {len(tokens):,} input_ids and {len(labels):,} labels")
    learned = [label != IGNORED_LABEL for label in labels]
    if any(label != token for token, label, here in zip(tokens, labels, learned, strict=True) if here):
        raise ValueError("a label is neither -100 nor the token at its place")
    return Identifiers(tokens, learned) if tokens else None


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def placed(found: Iterator[tuple[int, dict[str, Any]]], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with the file and line that they stand in."""
    for line, values in found:
        yield f"{name}:{line}", values
