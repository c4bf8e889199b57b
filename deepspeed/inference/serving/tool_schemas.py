"""JSON schemas of tool arguments: validation, and the types that they name. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed.inference.serving.bodies import RequestError, kind_of

_BY_NAME = ("properties", "$defs", "definitions")
_EACH = ("anyOf", "oneOf", "allOf")
_MAX_DEPTH = 64
"""Nesting depth of schemas."""

_MAX_ENTRIES = 256
"""Most schemas, types and values inspected to find one parameter's types, which recur per answer; also the most
characters of a reference."""


def check_schema(schema: Any, where: str, depth: int = 0) -> None:
    """Raise RequestError naming the first place, under ``where``, that is not a JSON schema."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        problem = f"nested at most {_MAX_DEPTH} deep" if depth > _MAX_DEPTH else f"not {kind_of(schema)}"
        raise RequestError(f"{where}: expected a JSON schema, {problem}", where)
    kinds, needed, values = (schema.get(name) for name in ("type", "required", "enum"))
    if kinds is not None and not isinstance(kinds, str) and not _is_texts(kinds):
        raise _wrong(f"{where}.type", "expected the name of a type or a list of these", kinds)
    if needed is not None and not _is_texts(needed):
        raise _wrong(f"{where}.required", "expected a list of names", needed)
    if values is not None and not isinstance(values, list):
        raise _wrong(f"{where}.enum", "expected a list of values", values)
    for part, place in _parts(schema, where):
        check_schema(part, place, depth + 1)


def _parts(schema: Mapping[str, Any], where: str) -> Iterator[tuple[Any, str]]:
    """Yield the nested schemas and their places. RequestError: a container of schemas has another type."""
    for name in _BY_NAME:
        found = schema.get(name)
        if found is not None and not isinstance(found, dict):
            raise _wrong(f"{where}.{name}", "expected an object of schemas", found)
        yield from ((each, f"{where}.{name}.{key[:64]}") for key, each in (found or {}).items())
    for name in _EACH:
        found = schema.get(name)
        if found is not None and not isinstance(found, list):
            raise _wrong(f"{where}.{name}", "expected a list of schemas", found)
        yield from ((each, f"{where}.{name}.{at}") for at, each in enumerate(found or ()))
    if isinstance(schema.get("items"), dict):
        yield schema["items"], f"{where}.items"


def _is_texts(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(each, str) for each in given)


def _wrong(where: str, expected: str, given: Any) -> RequestError:
    shown = "a list with other items" if isinstance(given, list) else kind_of(given)
    return RequestError(f"{where}: {expected}, not {shown}", where)


def kinds_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return all types that a schema within ``root`` names, "value" for one without a name; empty if it names none.
    Both must have passed ``check_schema``."""
    made, todo, seen = set[str](), [schema], set[int]()
    for _ in range(_MAX_ENTRIES):
        part = todo.pop() if todo else None
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        made |= _own_kinds(part)
        for name in _EACH:
            todo += (part.get(name) or ())[:_MAX_ENTRIES]
        if "$ref" in part:
            found = _referred(part["$ref"], root)
            made |= {"value"} if found is None else set()
            todo.append(found)
    return made


def _own_kinds(schema: Mapping[str, Any]) -> set[str]:
    kind, values = schema.get("type"), (schema.get("enum") or ())[:_MAX_ENTRIES]
    if kind:
        return {kind} if isinstance(kind, str) else set(kind[:_MAX_ENTRIES])
    if "properties" in schema or "items" in schema:
        return {"value"}
    return {"null" if each is None else "string" if isinstance(each, str) else "value" for each in values}


def _referred(reference: Any, root: Any) -> Any:
    """Resolve a reference within ``root``. None: there is no such schema."""
    if not isinstance(reference, str) or len(reference) > _MAX_ENTRIES or not reference.startswith("#/"):
        return None
    found = root
    for name in reference[2:].split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None
