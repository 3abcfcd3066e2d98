"""A validator for the JSON Schema that flopwise prints: the keywords that it uses, and no key beside those it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KNOWN = {
    *("$schema", "$defs", "$ref", "title", "description", "default", "type", "properties", "required", "items"),
    *("prefixItems", "minItems", "maxItems", "anyOf", "allOf", "enum", "const", "additionalProperties"),
}
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def violations(value: object, schema: dict[str, Any]) -> list[str]:
    """Where a value is not as the schema says; else keys that the schema does not name."""
    definitions = schema.get("$defs", {})
    return list(_violations(value, schema, definitions, "$")) or list(_unnamed(value, [schema], definitions, "$"))


def _resolved(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    return schema


def _violations(value: object, schema: dict[str, Any], definitions: dict[str, Any], where: str) -> Iterator[str]:
    schema = _resolved(schema, definitions)
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, TYPES[kind]) or (kind != "boolean" and isinstance(value, bool))):
        yield f"{where} is {value!r:.60}, not {kind}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where} is {value!r:.60}, not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r:.60}, not one of {schema['enum']}"
    for part in schema.get("allOf", ()):
        yield from _violations(value, part, definitions, where)
    branches = [list(_violations(value, part, definitions, where)) for part in schema.get("anyOf", ())]
    if branches and all(branches):
        yield f"{where} is none of {len(branches)}: {min(branches, key=len)[:3]}"
    if isinstance(value, dict):
        yield from (f"{where}.{key} is missing" for key in schema.get("required", ()) if key not in value)
        for key, item in value.items():
            inner = _inner(schema, key)
            if inner is not None:
                yield from _violations(item, inner, definitions, f"{where}.{key}")
    if isinstance(value, list):
        for number, item in enumerate(value):
            inner = _item(schema, number)
            if inner is not None:
                yield from _violations(item, inner, definitions, f"{where}[{number}]")


def _inner(schema: dict[str, Any], key: str) -> dict[str, Any] | None:
    found = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
    return found if isinstance(found, dict) else None


def _item(schema: dict[str, Any], number: int) -> dict[str, Any] | None:
    first = schema.get("prefixItems", [])
    found = first[number] if number < len(first) else schema.get("items")
    return found if isinstance(found, dict) else None


def _parts(value: object, schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and those of its parts that hold for the value."""
    schema = _resolved(schema, definitions)
    yield schema
    for part in (*schema.get("allOf", ()), *schema.get("anyOf", ())):
        if not list(_violations(value, part, definitions, "$")):
            yield from _parts(value, part, definitions)


def _unnamed(value: object, schemas: list[dict[str, Any]], definitions: dict[str, Any], where: str) -> Iterator[str]:
    """Keys of objects that none of the schemas which hold for them names; a table of free names may have any."""
    parts = [part for schema in schemas for part in _parts(value, schema, definitions)]
    if isinstance(value, dict):
        listed = {key for part in parts for key in part.get("properties", ())}
        free = not listed or any(part.get("additionalProperties") for part in parts)
        for key, item in value.items():
            if not free and key not in listed:
                yield f"{where}.{key} is not in the schema"
            inner = [found for part in parts if (found := _inner(part, key)) is not None]
            yield from _unnamed(item, inner, definitions, f"{where}.{key}")
    if isinstance(value, list):
        for number, item in enumerate(value):
            inner = [found for part in parts if (found := _item(part, number)) is not None]
            yield from _unnamed(item, inner, definitions, f"{where}[{number}]")
