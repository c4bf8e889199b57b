"""Building blocks of config sections: the pydantic base class, whose validators are built when a config names the
section, the value types, and small dict helpers.

A *section model* defines the keys a user may write, with their documented defaults and bounds. It decides nothing:
`config/plan.py` reads the finished models. Each field's `description` is its text in `docs/config.md`.
"""

from __future__ import annotations

import json
import math
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    field_serializer,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema
from pydantic_core.core_schema import no_info_after_validator_function

from deepspeed.base.dtypes import Dtype
from deepspeed.base.logging import logger
from deepspeed.config.problems import DeepSpeedConfigError


class LazySection:
    """Annotation of a field that is a section, or a section or None: its value is passed to the section's own
    validators, which are only built then.

    A config names a handful of the 90 section models. pydantic would build the validators of all of them, and those of
    the whole config with all of them nested: a third of the CPU time of `ds_check`."""

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
    """Build the value's model and return it: the serializer of an unbuilt model is a mock that pydantic rejects."""
    if isinstance(value, BaseModel):
        type(value).model_rebuild()
    return value


_SECTION_DEFAULTS = "the section's own"
"""Default of a section field until its model is complete."""


def complete_sections(model: type[BaseModel]) -> None:
    """Annotate the section fields of a model and set their defaults, before its own validators are built."""
    for field in model.model_fields.values():
        section = _section_in(field.annotation)
        if section is not None and field.default is _SECTION_DEFAULTS:
            field.default = section.model_construct()
        inherited = any(isinstance(item, LazySection) for item in field.metadata)
        if section is not None and not inherited:
            field.metadata.insert(0, LazySection(section))  # inside the field's other validators


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        annotation = parts[0] if len(parts) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


AUTO = "auto"

_notes: ContextVar[list[str] | None] = ContextVar("deepspeed_config_notes", default=None)


@contextmanager
def collect_notes() -> Iterator[list[str]]:
    """Collect notes on deprecated or ineffective settings in a list within the block, instead of logging them."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note(message: str) -> None:
    """Report an accepted setting: collected inside `collect_notes`, else logged as a warning."""
    notes = _notes.get()
    if notes is None:
        logger.warning(message)
    elif message not in notes:
        notes.append(message)


# -------------------------------------------------------------------------------------------- value types


class AllowedValues:
    """Annotation of a field whose type alone does not tell users which values are allowed."""

    def __init__(self, text: str) -> None:
        self.text = text


class OneOf:
    """Annotation of a text that must be in ``names()``, a feature's table, which is only imported when a config has the
    key, or for documentation."""

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self.names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self.check, handler(source))

    def check(self, value: str) -> str:
        """Return ``value``; ValueError if it is not in the table."""
        if value not in self.names():
            raise ValueError(f"must be one of {', '.join(map(repr, self.names()))}")
        return value


NO_BOOLEAN = "expected a number, not a boolean"


def _not_bool(value: Any) -> Any:
    """Refuse booleans, which Python counts as numbers; in a config that is a mistake."""
    if isinstance(value, bool):
        raise ValueError(NO_BOOLEAN)
    return value


def finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be finite")
    return value


def _int_or_auto(value: Any) -> int | str:
    if value == AUTO:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer():
        return int(value)
    raise ValueError("must be a whole number or 'auto'")


def _whole_part(value: Any) -> Any:
    return math.floor(value) if isinstance(value, float) and math.isfinite(value) else value


def _float_or_auto(value: Any) -> float | str:
    if value == AUTO:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError("must be a number or 'auto'")


# Both accept integral floats such as 5e8 (JSON has no other short way to write a large round number).
Int = Annotated[int, BeforeValidator(_not_bool)]
# A size computed by scripts, such as 0.9 x hidden x hidden: the fraction is dropped.
Elements = Annotated[int, BeforeValidator(_not_bool), BeforeValidator(_whole_part)]
Float = Annotated[float, BeforeValidator(_not_bool), AfterValidator(finite)]
FloatOrInfinity = Annotated[float, BeforeValidator(_not_bool)]
IntOrAuto = Annotated[Any, PlainValidator(_int_or_auto), AllowedValues("a whole number or 'auto'")]
FloatOrAuto = Annotated[Any, PlainValidator(_float_or_auto), AllowedValues("a number or 'auto'")]


def parse_dtype(value: Any, allowed: Iterable[str] = ("fp16", "bf16", "fp32")) -> Dtype | None:
    """Return the dtype for a word ("bf16", "bfloat16", "torch.bfloat16"), a torch dtype, or None.

    Raises ValueError if it is not one of the `allowed` types (short names).
    """
    if value is None:
        return None
    words = list(allowed)
    try:
        found = Dtype(value)
    except ValueError:
        found = None
    if found is None or found not in words:
        raise ValueError(f"must be one of {', '.join(repr(word) for word in words)}")
    return found


DtypeOrNull = Annotated[
    Dtype | None, PlainValidator(parse_dtype), AllowedValues("'fp16', 'bf16', 'fp32' or null")
]
# The dtype of a sum may be wider than that of its terms.
SumDtypeOrNull = Annotated[
    Dtype | None,
    PlainValidator(partial(parse_dtype, allowed=("fp16", "bf16", "fp32", "fp64"))),
    AllowedValues("'fp16', 'bf16', 'fp32', 'fp64' or null"),
]


# ----------------------------------------------------------------------------------------- the base class


def section(description: str) -> Any:
    """Define a field that is another section; its default is the section's defaults, which are not validated."""
    return Field(_SECTION_DEFAULTS, description=description)


def required(description: str) -> Any:
    """Define a field that is required if its section has `enabled: true`."""
    return Field(None, description=description, json_schema_extra={"required_when_enabled": True})


def lower(value: Any) -> Any:
    """Lower-case a word, so that any case is accepted: the documents write "FLOPS"."""
    return value.lower() if isinstance(value, str) else value


def key(default: Any, description: str, **more: Any) -> Any:
    """Define a key with its default, its text in `docs/config.md`, and bounds as arguments of pydantic's `Field`."""
    return Field(default, description=description, **more)


def deprecated(
    default: Any,
    description: str,
    *,
    new_param: str | None = None,
    new_param_fn: Callable[[Any], Any] | None = None,
    message: str = "",
    alias: str | None = None,
) -> Any:
    """Define an old spelling: accepted with one note and, if `new_param` is given, copied to that field."""
    extra: dict[str, Any] = {"deprecated": True, "deprecated_msg": message}
    if new_param is not None:
        extra |= {"new_param": new_param, "set_new_param": True, "new_param_fn": new_param_fn or _same}
    return Field(default, description=description, json_schema_extra=extra, alias=alias)


def _same(value: Any) -> Any:
    return value


def keeps_value(facts: Mapping[str, Any]) -> bool:
    """Return whether a deprecated key maps to its successor with the value unchanged."""
    return facts.get("new_param_fn", _same) is _same


def extra_facts(field: FieldInfo) -> dict[str, Any]:
    """Return the `json_schema_extra` of a field as a dict (empty if there is none)."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _is_default(value: Any, default: Any) -> bool:
    """Return whether an old key has its default, or, if that is empty, another empty value."""
    return value is None or value == default or not (value or default)


@cache
def _special_fields(model: type[BaseModel]) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return (deprecated fields, fields required by `enabled: true`, fields with a value "auto") of a model class."""
    facts = {name: extra_facts(field) for name, field in model.model_fields.items()}
    return (
        frozenset(name for name, fact in facts.items() if fact.get("deprecated")),
        frozenset(name for name, fact in facts.items() if fact.get("required_when_enabled")),
        frozenset(name for name, fact in facts.items() if fact.get("takes_auto")),
    )


class DeepSpeedConfigModel(BaseModel):
    """Base of every section: unknown keys are refused, a value "auto" counts as absent, assignments are validated.

    Fields may have in `json_schema_extra`: `deprecated: True`, `new_param` (dotted path of the field that replaces it,
    relative to the model), `set_new_param` (copy the value there, default True), `new_param_fn` (converts the value)
    and `deprecated_msg` (added to the note); `takes_auto: True`: "auto" is a valid value. `strict=True` keeps all
    "auto" values, so that they are validated like any other.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        defer_build=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        complete_sections(cls)

    def __init__(self, /, strict: bool = False, **data: Any) -> None:
        old_spellings, required_fields, takes_auto = _special_fields(type(self))
        if not strict:
            kept = {"replace_method", *takes_auto}
            data = {key: value for key, value in data.items() if key in kept or not is_auto(value)}
        super().__init__(**data)
        for name in sorted(old_spellings & self.model_fields_set):
            self._carry_over(name)
        if required_fields and getattr(self, "enabled", False):
            absent = required_fields - self.model_fields_set
            missing = [name for name in type(self).model_fields if name in absent and self._needs(name)]
            if missing:
                raise ValueError(f"enabled, but without {', '.join(missing)}")

    def _needs(self, name: str) -> bool:
        """Return whether a `required` field is needed, given the others; sections may override this."""
        return True

    def _carry_over(self, name: str) -> None:
        facts = extra_facts(type(self).model_fields[name])
        target = facts.get("new_param") or ""
        text = f"config key '{name}' is deprecated"
        text += f", use '{target}'" if target else ""
        text += f" ({facts['deprecated_msg']})" if facts.get("deprecated_msg") else ""
        note(text)
        default = type(self).model_fields[name].get_default()
        if not target or not facts.get("set_new_param", True) or _is_default(getattr(self, name), default):
            return  # nothing to copy, or the old switch is still read
        owner: Any = self
        *parents, leaf = target.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        if leaf in owner.model_fields_set:
            raise DeepSpeedConfigError(
                f"both '{target}' and its deprecated spelling '{name}' are given: keep '{target}'"
            )
        setattr(owner, leaf, facts.get("new_param_fn", _same)(getattr(self, name)))

    @field_serializer("dtype", check_fields=False)
    def serialize_torch_dtype(self, dtype: Any) -> str:
        return f"torch.{dtype.long_name}" if isinstance(dtype, Dtype) else str(dtype)


class LenientConfigModel(DeepSpeedConfigModel):
    """A section whose unknown keys never stopped a run: misspellings are errors, other unknown keys get one note."""

    model_config = ConfigDict(extra="ignore")


class Switched(DeepSpeedConfigModel):
    """A section with a switch."""

    enabled: bool = key(False, "Turn it on.")


class LenientSwitched(Switched, LenientConfigModel):
    """Both: a switch, and unknown keys that do not stop a run."""


def is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO


# ------------------------------------------------------------------------------------------- dict helpers


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    return param_dict.get(param_name, param_default_value)


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from key-value pairs, as `object_pairs_hook` of a JSON or HJSON parser. ValueError: a key is
    duplicated.
    """
    pairs = list(ordered_pairs)
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"Duplicate keys in DeepSpeed config: {twice}")
    return result


class pp_int(int):
    """An int that prints with thousands separators, or as `custom_print_str`."""

    custom_print_str: str | None

    def __new__(cls, val: float, custom_print_str: str | None = None) -> pp_int:
        number = super().__new__(cls, val)
        number.custom_print_str = custom_print_str
        return number

    def __repr__(self) -> str:
        return self.custom_print_str or f"{int(self):,}"


class ScientificNotationEncoder(json.JSONEncoder):
    """Writes numbers above 1000 as 5.000000e+08, and unknown types as text."""

    def iterencode(self, o: Any, _one_shot: bool = False, level: int = 0) -> Iterator[str]:
        pad = "    " * (level + 1)
        if isinstance(o, bool):
            yield "true" if o else "false"
        elif isinstance(o, (int, float)):
            yield f"{o:e}" if o > 1e3 else str(o)
        elif isinstance(o, Mapping):
            items = [
                f"\n{pad}{json.dumps(str(k))}: {''.join(self.iterencode(v, level=level + 1))}"
                for k, v in o.items()
            ]
            yield "{" + ", ".join(items) + "\n" + "    " * level + "}"
        elif isinstance(o, (list, tuple)):
            yield "[" + ", ".join("".join(self.iterencode(v, level=level)) for v in o) + "]"
        else:
            yield json.dumps(o, default=str)
