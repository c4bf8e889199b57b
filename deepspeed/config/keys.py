"""Look up a config in its schema: the keys of a section, the values that a field allows, the section of a key."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed.base.dtypes import Dtype
from deepspeed.config.section import AllowedValues, OneOf, extra_facts


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a section: its field, and the model of the section below it, if any."""

    name: str
    field: FieldInfo
    section: type[BaseModel] | None
    container: str | None
    """"dict" or "list" if the sections below are values of an object or items of a list."""


@cache
def keys_of(model: type[BaseModel]) -> dict[str, Key]:
    """Return every accepted spelling (field name and alias) of a section's keys; the documented spelling first."""
    table: dict[str, Key] = {}
    for name, field in model.model_fields.items():
        section, container = _section_in(field.annotation)
        key = Key(name, field, section, container)
        for spelling in (documented_name(name, field), name, field.alias):
            if spelling:
                table.setdefault(spelling, key)
    return table


def constant_of(name: str, sections: Mapping[str, type[BaseModel]]) -> Any:
    """Return a documented constant of a section: ``PREFIX_KEY`` is the spelling of a key, ``PREFIX_KEY_DEFAULT`` its
    default.

    ``sections``: prefix -> model; the longest matching prefix counts. AttributeError: there is no such constant.
    """
    for prefix in sorted(sections, key=len, reverse=True):
        if not name.startswith(f"{prefix}_"):
            continue
        fields = sections[prefix].model_fields
        # The whole name, too: a key may start like its section.
        for key in (name.removeprefix(f"{prefix}_").lower(), name.lower()):
            if key in fields:
                return key
            if (stem := key.removesuffix("_default")) in fields:
                return fields[stem].get_default(call_default_factory=True)
    raise AttributeError(f"there is no constant named {name!r}")


def documented_name(name: str, field: FieldInfo) -> str:
    """Return the documented spelling: `stage3_*` aliases take precedence over the field's name, others do not."""
    return field.alias if field.alias and field.alias.endswith(name) and field.alias != name else name


def _section_in(annotation: Any) -> tuple[type[BaseModel] | None, str | None]:
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, None
    if origin in (list, dict):
        section, _ = _section_in(get_args(annotation)[-1])
        return section, origin.__name__ if section else None
    if origin in (Union, types.UnionType, Annotated):
        for part in get_args(annotation):
            section, container = _section_in(part)
            if section:
                return section, container
    return None, None


def walk(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Key]]:
    """Yield every key of a section and of the sections below it, as (path of documented spellings, key).

    Sections inside an object of free names are under `<name>`, those inside a list under the list itself.
    """
    for name, field in model.model_fields.items():
        key = keys_of(model)[name]
        here = (*path, documented_name(name, field))
        yield here, key
        if key.section is not None:
            yield from walk(key.section, (*here, "<name>") if key.container == "dict" else here)


@cache
def paths_by_key(model: type[BaseModel]) -> dict[str, list[str]]:
    """Return key -> dotted paths where it is valid, for keys written in the wrong section."""
    table: dict[str, list[str]] = {}
    for path, key in walk(model):
        for spelling in {path[-1], key.name}:
            table.setdefault(spelling, []).append(".".join(path))
    return table


def field_at(model: type[BaseModel], path: tuple[str | int, ...]) -> FieldInfo | None:
    """Return the field at a path of keys and list indices, None if it is not in the schema."""
    found: Key | None = None
    section: type[BaseModel] | None = model
    skip = False
    for part in path:
        if isinstance(part, int) or skip:  # a list index or a free name does not change the field
            skip = False
            continue
        if section is None or part not in keys_of(section):
            return None
        found = keys_of(section)[part]
        section, skip = found.section, found.container == "dict"
    return found.field if found else None


def section_at(model: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel] | None:
    """Return the model of the section at a path; None if there is a value or nothing."""
    section: type[BaseModel] | None = model
    for part in path:
        key = keys_of(section).get(part) if section is not None and isinstance(part, str) else None
        if key is None or key.container is not None:
            return None
        section = key.section
    return section


# ---------------------------------------------------------------------------------------- what is allowed


def type_of(field: FieldInfo) -> str:
    """Return the type of a field in words: "integer", "boolean", "list of text or null", ..."""
    return _type(field.annotation)


_SIMPLE = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    type(None): "null",
    Dtype: "dtype",
    Any: "any",
    object: "any",
}


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is None:
        return "null"
    if getattr(annotation, "__name__", "") == "dtype":  # torch's, in sections for inference
        return "dtype"
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if origin is Annotated:
        return _type(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(part) for part in args))
    if origin is Literal:
        return " or ".join(dict.fromkeys(_SIMPLE[type(value)] for value in args))
    if origin is list:
        return f"list of {_type(args[0])}"
    if origin is tuple:
        return "list"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _SIMPLE[type(next(iter(annotation)).value)]
    return "object"


def choices_of(field: FieldInfo) -> list[Any]:
    """Return the values of an enumerated field, including null where allowed; empty for other fields.

    A dtype field is not enumerated: most allow only some dtypes, which `AllowedValues` lists.
    """
    named = [name for item in field.metadata if isinstance(item, OneOf) for name in item.names()]
    return list(dict.fromkeys([*_choices(field.annotation), *named]))


def _choices(annotation: Any) -> list[Any]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return list(args)
    if origin in (Annotated, list):
        return _choices(args[0])
    if origin in (Union, types.UnionType):
        found = [value for part in args for value in _choices(part)]
        return [*found, None] if found and type(None) in args else found
    if isinstance(annotation, type) and issubclass(annotation, Enum) and annotation is not Dtype:
        return [member.value for member in annotation]
    return []


def _metadata(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        inner, *found = get_args(annotation)
        return [*found, *_metadata(inner)]
    return [item for part in get_args(annotation) for item in _metadata(part)]


_BOUNDS: Mapping[type, tuple[str, str]] = {
    annotated_types.Ge: ("ge", ">="),
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Le: ("le", "<="),
    annotated_types.Lt: ("lt", "<"),
}


def constraint_of(field: FieldInfo) -> str:
    """Return bounds or choices of a field in words; empty if its type implies them."""
    metadata = [*field.metadata, *_metadata(field.annotation)]
    for item in metadata:
        if isinstance(item, AllowedValues):
            return item.text
    choices = choices_of(field)
    if choices:
        return "one of " + ", ".join("null" if choice is None else repr(choice) for choice in choices)
    bounds = []
    for item in metadata:
        if type(item) in _BOUNDS:
            name, sign = _BOUNDS[type(item)]
            bounds.append(f"{sign} {getattr(item, name)}")
    return " and ".join(dict.fromkeys(bounds))


def allowed(field: FieldInfo) -> str:
    """Return type and constraint as one phrase, for error messages."""
    constraint = constraint_of(field)
    if constraint and not constraint.startswith((">", "<")):
        listed = "a list of " if type_of(field).startswith("list") else ""
        return listed + constraint
    kind = type_of(field)
    article = "an" if kind[0] in "aeiou" else "a"
    kind = kind if kind in ("text", "null", "any") else f"{article} {kind}"
    return f"{kind} {constraint}".strip()


def is_deprecated(field: FieldInfo) -> bool:
    return bool(extra_facts(field).get("deprecated"))
