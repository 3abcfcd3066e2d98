"""Conversations as a tokenizer's own chat template writes them, and which of their characters the assistant said.

Templates come with models and are programs of others: they run in jinja's sandbox, where nothing can be imported,
opened or changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from flopwise.base.errors import FlopwiseError

Message = Mapping[str, Any]
Span = tuple[int, int]
"""First character and the one behind the last."""

ANSWERED_BY = "assistant"
LEARNED = "learned"
"""Key of a message that is there, and false, where what it says is not learned."""
WHOLE_HINT = "--train-on all, or a template with {% generation %} around what the assistant says"


class ChatTemplate:
    """A tokenizer's template, with its special tokens by name."""

    def __init__(self, source: str, special: Mapping[str, str], owner: str) -> None:
        self.owner, self._special = owner, special
        self._ends = tuple(filter(None, (special.get("eos_token"), special.get("eot_token"))))
        self._marks: list[Span] = []
        self._before: list[str] = []
        self.marks_answers = "generation" in source and "endgeneration" in source
        with self._in_words("cannot be compiled"):
            self._template = _environment(self).from_string(source)

    @contextmanager
    def _in_words(self, what: str) -> Iterator[None]:
        """Whatever a template raises, as a mistake of the file."""
        try:
            yield
        except FlopwiseError:
            raise
        except (Exception, RecursionError) as error:
            raise FlopwiseError(
                f"the chat template of {self.owner} {what}",
                why=f"{type(error).__name__}: {str(error)[:200]}",
                hint="rows that the template takes, or a tokenizer with another one",
            ) from None

    def render(self, messages: Sequence[Message], *, tools: object = None, asks: bool = False) -> str:
        """The conversation as text; `asks`: up to where the assistant would go on."""
        self._marks, self._before = [], []
        with self._in_words("does not take a conversation"):
            for piece in self._template.generate(
                messages=list(messages), tools=tools, documents=None, add_generation_prompt=asks, **self._special
            ):
                self._before.append(piece)
        return "".join(self._before)

    def mark(self, text: str) -> str:
        """Called within {% generation %}: what it wraps is the assistant's."""
        start = sum(map(len, self._before))
        self._marks.append((start, start + len(text)))
        return text

    def answers(self, messages: Sequence[Message], *, tools: object = None, first: int = 0) -> tuple[str, list[Span]]:
        """The conversation and what the assistant says in it, from the message `first` on.

        By the template's own marks; else a turn begins where the template would ask for it and ends with what it writes
        behind the content. Both are looked for in the whole conversation, which must hold them, or it is refused.
        """
        whole = self.render(messages, tools=tools)
        said = [message.get(LEARNED, True) for message in messages if message.get("role") == ANSWERED_BY]
        # A template may mark nothing of an answer, or it in two parts: then nobody knows which mark is whose.
        if self.marks_answers and not first and all(said):
            return whole, list(self._marks)
        if self.marks_answers and not first and len(said) == len(self._marks):
            return whole, [mark for mark, learned in zip(self._marks, said, strict=True) if learned]
        spans: list[Span] = []
        for number, message in enumerate(messages):
            if number < first or message.get("role") != ANSWERED_BY or not message.get(LEARNED, True):
                continue
            begin = self.render(messages[:number], tools=tools, asks=True)
            if not whole.startswith(begin) or (spans and len(begin) < spans[-1][1]):
                raise self._untold("it writes a conversation otherwise when the assistant is to go on")
            spans.append((len(begin), self._end(whole, messages[: number + 1], len(begin), tools)))
        return whole, spans

    def _end(self, whole: str, messages: Sequence[Message], begin: int, tools: object) -> int:
        """Where the last turn of `messages` ends in the whole conversation."""
        alone = self.render(messages, tools=tools)
        content = _text(messages[-1]).strip()
        behind = alone.rfind(content) + len(content)
        tail = alone[behind:]
        if whole.startswith(alone):
            end = len(alone)
        else:
            # Some write the last turn otherwise, with an empty thought before it.
            place = whole.find(content, begin) if content else -1
            end = place + len(content) + len(tail)
            if place < 0 or whole[place + len(content) : end] != tail:
                raise self._untold("it writes a turn otherwise once another one follows")
        ends = [found + len(name) for name in self._ends if (found := tail.find(name)) >= 0]
        # What follows the end of a turn is nobody's; without an end, no more than spaces are.
        return end - len(tail) + (min(ends) if ends else len(tail.rstrip()))

    def _untold(self, why: str) -> FlopwiseError:
        return FlopwiseError(
            f"which tokens the assistant said cannot be told with the chat template of {self.owner}",
            why=why,
            hint=WHOLE_HINT,
        )


def _text(message: Message) -> str:
    """What a message says, where it is text or a list of parts that are."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _environment(chat: ChatTemplate) -> Any:  # noqa: ANN401 - jinja is only there where training is
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise FlopwiseError(
            "a chat template cannot be used",
            why="the package jinja2 is not installed",
            hint="pip install 'jinja2>=3.1.6'",
        ) from None

    class Generation(Extension):
        """{% generation %} … {% endgeneration %}, as transformers has it."""

        tags = {"generation"}  # noqa: RUF012 - as jinja has it

        def parse(self, parser: Any) -> Any:  # noqa: ANN401
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:  # noqa: ANN401
            return chat.mark(caller())

    def fail(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, **settings: Any) -> str:  # noqa: ANN401
        allowed = {key: settings[key] for key in ("indent", "separators", "sort_keys") if key in settings}
        return json.dumps(value, ensure_ascii=bool(settings.get("ensure_ascii")), **allowed)

    # As transformers sets it up: templates are written for these settings.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": fail,
        "strftime_now": lambda form: datetime.now().astimezone().strftime(form),
    }
    return environment
