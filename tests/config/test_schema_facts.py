"""The section models against the documented schema: every key, its default, type and choices.

`tests/files/config_schema.json` holds the facts of the reference; `<...>` in it stands for a free name or
text.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError

from deepspeed.base.dtypes import Dtype
from deepspeed.config.constants import VALID_LR_SCHEDULES
from deepspeed.config.keys import Key, is_deprecated, keys_of, type_of
from deepspeed.config.optimizers import BUILT_IN
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.section import extra_facts, parse_dtype
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.inference.v2.config_v2 import RaggedInferenceEngineConfig

FACTS = json.loads((Path(__file__).parent.parent / "files" / "config_schema.json").read_text())
ROOTS = {
    "ds_config": TrainingConfig,
    "init_inference_config": DeepSpeedInferenceConfig,
    "ragged_inference_config": RaggedInferenceEngineConfig,
}
DEFAULTS = json.loads((Path(__file__).parents[2] / "tools" / "documented_defaults.json").read_text())
TAKEN = {f"ds_config.{row['key']}": row["document"] for row in DEFAULTS if row["ours"] == "document"}
"""Keys with the documents' default instead of the release's (`docs/migrating.md` lists them)."""
PASSED_THROUGH = {"ds_config.amp.*", "ds_config.<any other top-level key>"}


def walk(facts: dict[str, Any], model: type[BaseModel], path: str) -> Iterator[Any]:
    for name, fact in facts.items():
        here = f"{path}.{name}"
        if here in PASSED_THROUGH:
            continue
        yield pytest.param(model, name, {**fact, "default": TAKEN.get(here, fact["default"])}, id=here)
        below = fact.get("fields", {})
        section = keys_of(model)[name].section if name in keys_of(model) else None
        if section is None:
            continue
        if list(below)[:1] and list(below)[0].startswith("<"):
            below = next(iter(below.values()))["fields"]
        yield from walk(below, section, here)


ALL = [case for root, model in ROOTS.items() for case in walk(FACTS[root], model, root)]


def test_every_documented_key_is_walked() -> None:
    def count(fields: dict[str, Any]) -> int:
        return sum(1 + count(fact.get("fields", {})) for fact in fields.values())

    free_names = (
        7  # one level in the facts, none in the models: a metric, and a group of each of six techniques
    )
    assert len(ALL) == sum(count(FACTS[root]) for root in ROOTS) - len(PASSED_THROUGH) - free_names


@pytest.mark.parametrize(("model", "name", "fact"), ALL)
def test_key(model: type[BaseModel], name: str, fact: dict[str, Any]) -> None:
    key = keys_of(model)[name]
    if "alias" in fact and fact["alias"] != "bfloat16":
        assert keys_of(model)[fact["alias"]].name == key.name
    if "deprecated" in fact:
        assert is_deprecated(key.field)
    assert same_default(key, fact["default"])
    simple = {
        "int": "integer",
        "float": "number",
        "bool": "boolean",
        "str": "text",
        "path": "path",
        "list[str]": "list of text",
    }
    wanted = simple.get(fact["type"])
    if wanted and not fact.get("choices"):
        assert type_of(key.field).startswith(wanted)
    for choice in fact.get("choices", ()):
        if not (isinstance(choice, str) and "<" in choice):
            assert accepts(model, key, choice), f"{choice!r} is documented"
    if (
        fact.get("choices")
        and fact["choices"][-1:] != ["torch.<dtype>"]
        and model.__name__[:3] not in ("Opt", "Sch")
    ):
        assert not accepts(model, key, "no such choice")


def same_default(key: Key, documented: Any) -> bool:
    """Whether the model's default is the documented one; sections that are off agree however they are
    written.
    """
    field = key.field
    if documented == "<required>":
        return (
            field.is_required()
            or bool(extra_facts(field).get("required_when_enabled"))
            or field.get_default() is None
        )
    if field.is_required():
        return documented is None and key.section is not None
    default = field.get_default()
    if isinstance(default, (Dtype, torch.dtype)):
        return Dtype(default) is parse_dtype(documented)
    if isinstance(default, enum.Enum):
        default = default.value
    if isinstance(default, BaseModel):
        return documented is None or isinstance(documented, (dict, str))
    named = {"sys.maxsize": sys.maxsize, "{} (stage 0)": {}}
    documented = named.get(documented, documented) if isinstance(documented, str) else documented
    return default == documented or default is None and documented == {}


def accepts(model: type[BaseModel], key: Key, value: Any) -> bool:
    """Whether the section takes this value for the key (other keys that it needs are left out of the
    question).
    """
    value = [value] if type_of(key.field).startswith("list") and value is not None else value
    try:
        model(**{key.name: value})
    except ValidationError as error:
        return not any(entry["loc"][:1] in ((key.name,), (key.field.alias,)) for entry in error.errors())
    return True


def test_builtin_names_are_known() -> None:
    optimizers = [
        name for name in FACTS["ds_config"]["optimizer"]["fields"]["type"]["choices"] if "<" not in name
    ]
    assert set(optimizers) <= set(BUILT_IN)
    schedules = [
        name for name in FACTS["ds_config"]["scheduler"]["fields"]["type"]["choices"] if "<" not in name
    ]
    assert tuple(schedules) == VALID_LR_SCHEDULES


def test_defaults_as_constructed() -> None:
    """The result of an empty config, with types converted: a few values on which training results depend."""
    config = TrainingConfig()
    assert config.gradient_clipping == 1.0
    assert config.gradient_allreduce_op == "mean"
    assert config.seq_parallel_communication_data_type is Dtype.fp32
    assert config.zero_optimization.stage == 0
    assert config.zero_optimization.overlap_comm is False
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.zero_optimization.prefetch_bucket_size == 50_000_000
    assert config.zero_optimization.offload_optimizer is None
    assert config.checkpoint.tag_validation == "WARN"
    assert config.steps_per_print is None
    assert config.fp16.loss_scale == 0
    assert config.fp16.initial_scale_power == 16


def test_every_key_has_its_meaning_in_words() -> None:
    def fields(model: type[BaseModel]) -> Iterator[tuple[str, str | None]]:
        for name, field in model.model_fields.items():
            yield f"{model.__name__}.{name}", field.description
            section = keys_of(model)[name].section
            if section is not None:
                yield from fields(section)

    silent = [where for root in ROOTS.values() for where, text in fields(root) if not text]
    assert not silent
