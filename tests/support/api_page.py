"""Writes docs/api.md from the signatures and docstrings of the Python door: `python -m tests.support.api_page`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_overloads

import flopwise as fw
from flopwise import door

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
COMMAND = "python -m tests.support.api_page"
FUNCTIONS = ("predict", "plan", "train", "load_model", "load_hardware", "read_profile", "verdicts", "results")
RECORDS = (
    *("Prediction", "Interval", "Planned", "PlannedCluster", "RunRecord", "Profile", "Verdict", "Result", "Results"),
    *("Transformer", "Lstm", "Hardware", "FlopwiseError", "DoesNotFit"),
)
HEAD = f"""# From Python

<!-- Written by `{COMMAND}` from the docstrings; a test runs the examples. -->

```python
import flopwise as fw

print(fw.predict("llama-3-8b", on="h100-sxm", seq="8k", batch=16))
```

Models and hardware are taken by name, by the path of a file, or as descriptions; quantities as numbers or as people
write them (`seq="8k"`, `device_mem="40GiB"`). None leaves a choice to flopwise, and the answer says what was chosen and
why. Keywords are the options of the command line, with `devices` for `--gpus` and `changes` for `--set`.

`print(answer)` gives a few lines, a notebook shows a table, and every figure is an attribute. What can be put right
raises `FlopwiseError` with `what`, `why` and a `hint` that speaks of keywords; `DoesNotFit` is one of them. Nothing is
imported before it is used, and only `train` needs torch.
"""


def page() -> str:
    """The whole of docs/api.md."""
    parts = [HEAD, "## Functions\n"]
    parts += [function_section(name) for name in FUNCTIONS]
    parts.append("## What they return\n")
    parts += [record_section(name) for name in RECORDS]
    return "\n".join(parts)


def function_section(name: str) -> str:
    function = getattr(door, name)
    text, examples = _split(inspect.getdoc(function) or "")
    signatures = "\n".join(signature_text(name, one) for one in get_overloads(function) or [function])
    parts = [f"### fw.{name}\n", f"```python\n{signatures}\n```\n", text]
    if examples:
        parts.append(f"```python\n{examples}\n```\n")
    return "\n".join(parts)


def signature_text(name: str, function: Callable[..., object]) -> str:
    """A keyword a line, as annotated."""
    found = inspect.signature(function)
    lines = []
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        default = "" if parameter.default is parameter.empty else f" = {_literal(parameter.default)}"
        lines.append(f"    {parameter.name}: {parameter.annotation}{default},")
    return "\n".join([f"fw.{name}(", *lines, f") -> {found.return_annotation}"])


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _split(doc: str) -> tuple[str, str]:
    """What is said, and the examples below it."""
    text, sign, examples = doc.partition(">>> ")
    return text.rstrip() + "\n", (sign + examples).rstrip()


def record_section(name: str) -> str:
    kind = getattr(fw, name)
    text = inspect.getdoc(kind) or ""
    rows = [f"| `{field}` | {_cell(annotation, code=True)} | {_cell(doc)} |" for field, annotation, doc in fields(kind)]
    table = "| field | type | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n" if rows else ""
    return f"### fw.{name}\n\n{text}\n\n{table}"


def _cell(text: str, *, code: bool = False) -> str:
    words = " ".join(text.split()).replace("|", "\\|")
    return f"`{words}`" if code else words


def fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Public fields, properties and methods of a record and of what it extends, each as the last of them says it."""
    found: dict[str, tuple[str, str]] = {}
    for one in reversed(kind.__mro__):
        for name, annotation, doc in _own_fields(one) if one is kind or is_dataclass(one) else ():
            found[name] = annotation, doc or found.get(name, ("", ""))[1]
    for name, (annotation, doc) in found.items():
        yield name, annotation, doc


def _own_fields(kind: type) -> Iterator[tuple[str, str, str]]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, following in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            told = following.value if isinstance(following, ast.Expr) else None
            doc = told.value if isinstance(told, ast.Constant) and isinstance(told.value, str) else ""
            yield node.target.id, ast.unparse(node.annotation), doc
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
            is_property = any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list)
            arguments = "" if is_property else f"({ast.unparse(node.args).removeprefix('self').lstrip(', ')})"
            returned = ast.unparse(node.returns) if node.returns else "None"
            yield f"{node.name}{arguments}", returned, (ast.get_docstring(node) or "").splitlines()[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
