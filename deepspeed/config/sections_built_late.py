"""Sections whose validators are built when a config first names them.

A config names a handful of the 90 section models. pydantic would build the validators of all of them, and those of the
whole config with every one inside: a third of the CPU time of `ds_check`.
"""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class BuiltWhenNamed:
    """Annotation of a field that is a section, or a section or None: a value is passed to the section's own validators,
    which are built by then."""

    def __init__(self, section: type[BaseModel]) -> None:
        self.section = section

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        section, optional = self.section, source is not self.section

        def validate(value: Any) -> Any:
            if isinstance(value, section) or (optional and value is None):
                return value
            return section.model_validate(value)  # its errors are reported below this field's key

        written = core_schema.plain_serializer_function_ser_schema(_with_serializer)
        return core_schema.no_info_plain_validator_function(validate, serialization=written)


def _with_serializer(value: Any) -> Any:
    """Return the value, built: the serializer of one that never was is a stand-in that pydantic does not take."""
    if isinstance(value, BaseModel):
        type(value).model_rebuild()
    return value


def build_sections_late(model: type[BaseModel]) -> None:
    """Annotate the fields of a model that are sections, before its own validators are built."""
    for field in model.model_fields.values():
        section = _section_in(field.annotation)
        inherited = any(isinstance(item, BuiltWhenNamed) for item in field.metadata)
        if section is not None and not inherited:
            field.metadata.insert(0, BuiltWhenNamed(section))  # below the field's other validators


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        annotation = parts[0] if len(parts) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
