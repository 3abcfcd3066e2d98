"""`flopwise schema`: the JSON Schema of what a command prints with `-o json`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flopwise.base.errors import unknown_name


def schema(
    command: Annotated[list[str], typer.Argument(help="The command: predict, plan, report, profile show.")],
) -> None:
    """Print the JSON Schema of what a command prints with `-o json`."""
    from flopwise.base.files import to_json

    typer.echo(to_json(schema_of(" ".join(command))))


def schema_of(command: str) -> dict[str, Any]:
    """A schema with a branch for each kind of object that the command prints."""
    from flopwise.cli.json_types import MEASURED, PRINTED

    if command not in PRINTED:
        raise unknown_name("command with -o json", command, PRINTED, hint="`flopwise schema predict`")
    definitions: dict[str, Any] = {}
    branches = [_branch(kind, definitions) for kind in PRINTED[command]]
    measured = any(kind.removesuffix("-list") in MEASURED for kind in PRINTED[command])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"flopwise {command} -o json",
        "anyOf": branches,
        "$defs": _with_words(definitions) if measured else definitions,
    }


def _branch(printed: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one kind; the types that it is made of go to the definitions."""
    from flopwise.base.files import schema_name
    from flopwise.cli.json_types import ALTERNATIVES, KINDS

    kind = printed.removesuffix("-list")
    several = kind != printed
    wanted, found = _components(KINDS[kind])
    definitions |= found
    record = wanted[0] if len(wanted) == 1 else {"allOf": list(wanted)}
    if kind in ALTERNATIVES:
        alternatives, found = _components(ALTERNATIVES[kind])
        definitions |= found
        record = {"allOf": [record, {"anyOf": list(alternatives)}]}
    told = {"schema": {"const": schema_name(kind, several=several)}}
    if several:
        rows = {"rows": {"type": "array", "items": record}}
        return {"type": "object", "properties": told | rows, "required": ["schema", "rows"]}
    if wanted[0].get("type") == "object":
        # A table of free names, to which that of the schema is one more.
        return {"additionalProperties": True} | record | {"properties": told, "required": ["schema"]}
    return {"type": "object", "properties": told, "required": ["schema"], "allOf": [record]}


def _components(kinds: tuple[Any, ...]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    import msgspec

    return msgspec.json.schema_components(kinds)


def _with_words(schema: object) -> Any:  # noqa: ANN401 - a schema is of any shape
    """Numbers that may be words: JSON has none for what is not finite."""
    if isinstance(schema, list):
        return [_with_words(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        rest = {key: item for key, item in schema.items() if key != "type"}
        return {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}], **rest}
    return {key: _with_words(item) for key, item in schema.items()}
