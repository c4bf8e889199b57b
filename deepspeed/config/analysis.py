"""Validation of a config: every error and every note, found in one pass.

Order: unknown keys, old spellings, types and bounds, rules between sections, features that do not exist yet, the
batch triangle. Each step removes what is invalid before the next one, so that one mistake never hides another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from deepspeed.config import batch
from deepspeed.config.arguments import OPTIMIZER, TAKES_AUTO
from deepspeed.config.axes import Axes
from deepspeed.config.batch import BatchSizes
from deepspeed.config.keys import Key, documented_name, field_at, keys_of, paths_by_key
from deepspeed.config.problems import (
    MAX_LISTED,
    DeepSpeedConfigError,
    Problem,
    Remedy,
    cut,
    misspelt,
    nearest,
    shown,
)
from deepspeed.config.reader import ConfigSource, Path, copy_containers
from deepspeed.config.rules.all import check_rules
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.section import LenientConfigModel, collect_notes, extra_facts, is_auto, note
from deepspeed.config.sections.elasticity import (
    ELASTICITY,
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
)
from deepspeed.config.sections.precision import DeepSpeedFP16Config
from deepspeed.config.sections.zero import ZERO_OPTIMIZATION, read_zero_config_deprecated

OPTIMIZER_SECTION = "optimizer"
PASSED = {OPTIMIZER_SECTION: "an optimizer", "scheduler": "a scheduler"}
"""Sections for which a client may pass an object to `initialize` instead."""
UNFINISHED = frozenset({"compile", "expert_parallel", "graph_harvesting", "nebula", "tensor_parallel"})
"""Top-level keys with unsupported values below them; without any of them `availability.py` is not consulted."""
BATCH_KEYS = (batch.TRAIN, batch.MICRO, batch.GAS)

# Keys that clients write for themselves and that are ignored here. Dotted keys (TRL) and comments are recognized by
# their form.
FOREIGN_KEYS = frozenset(
    {"cuda_visible_devices", "comment", "comments", "$schema", "allgather_size", "description"}
)
OLD_TOP_LEVEL = {"bfloat16": "bf16"}
COMMENT_MARKS = ("_", "#", "//")
# A misspelt key in published configs, with its default value, where it has never had an effect.
MISSPELT_DEFAULTS = (("grandient_accumulation_steps", 1),)
# Keys of published configs that have never had an effect, and the key that was meant. The first is a misspelling that a
# released client writes: ArcticTraining, into the config of DPO's reference model.
IDLE_KEYS = {
    "train_micro_batch_size_per_gp": "train_micro_batch_size_per_gpu",
    "micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "max_grad_norm": "gradient_clipping",
    "lr_scheduler": "scheduler",
    "learning_rate": "optimizer.params.lr",
}
# Sections that 0.19 does not have, under names that others use for sections of their own.
OWN_SECTIONS = frozenset({"audit", "comm", "fp8", "gradient_compression", "monitor", "trace"})
# The first version of MoQ had its own keys here; nothing reads them any more.
SILENT_SECTIONS = frozenset({"quantize_training"})


@dataclass
class Analysis:
    """Findings about a config. `config` and `batch` are None if too little of the config was valid to build them."""

    source: ConfigSource
    config: TrainingConfig | None = None
    batch: BatchSizes | None = None
    errors: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    auto_keys: list[str] = field(default_factory=list)
    """Keys whose value is "auto" and was not filled in; their defaults apply."""
    doubtful: set[str] = field(default_factory=set)
    """Keys of unknown value: their value was refused, or is under a misspelt key."""

    def error(
        self,
        path: Path | str,
        message: str,
        remedy: Remedy | None = None,
        raised_as: type[DeepSpeedConfigError] | None = None,
    ) -> None:
        path = tuple(path.split(".")) if isinstance(path, str) else path
        key = ".".join(str(part) for part in path) or "config"
        if raised_as is None and path and path[0] == ELASTICITY:
            raised_as = ElasticityConfigError
        self.errors.append(Problem(key, message, self.source.place(path), remedy, path, raised_as))


def analyse(
    source: ConfigSource, axes: Axes | None, *, allow_auto: bool = False, unused: Collection[str] = ()
) -> Analysis:
    """Validate a config for ranks with these axes (None: unknown, and the batch triangle is skipped).

    With `allow_auto`, batch keys that are "auto" are left for someone else to fill in, so their absence is
    not an error. `unused`: sections that are left alone, whatever they say, as in release 0.19.
    """
    result = Analysis(source)
    with collect_notes() as notes:
        written = source.data
        for section in set(unused).intersection(written):
            written = {key: value for key, value in written.items() if key != section}
            note(f"config section '{section}' is not used: {PASSED[section]} was passed to initialize")
        data = _known_part(written, TrainingConfig, (), result)
        if isinstance(data.get(ZERO_OPTIMIZATION), bool):
            data[ZERO_OPTIMIZATION] = read_zero_config_deprecated(written)
        result.auto_keys = [".".join(map(str, path)) for path in _auto_paths(data)]
        result.config = _validate(data, result)
        if result.config is not None:
            _check_rules(result.config, result)
        if axes is not None:
            for problem in axes.problems:
                result.error(problem.key, problem.message)
        fits = axes is not None and not axes.problems and not result.doubtful & set(BATCH_KEYS)
        if fits and axes is not None and result.config is not None:
            section = result.config.elasticity
            if section is not None and section.enabled:
                _resolve_elastic_batch(section, axes, result)
            else:
                _resolve_batch(result.config, axes, allow_auto, result)
    result.warnings = notes
    return result


# ------------------------------------------------------------------------------------------- unknown keys


def _known_part(
    data: Mapping[str, Any], model: type[BaseModel], path: Path, result: Analysis
) -> dict[str, Any]:
    """Return a copy of a section without its unknown keys; each of these is an error or a note."""
    table = keys_of(model)
    known: dict[str, Any] = {}
    unknown = 0
    for key, value in data.items():
        if not path and key in OLD_TOP_LEVEL:
            _old_section(key, value, data, known, result)
        elif not path and (reason := _foreign_reason(key, value)):
            note(f"config section '{key}' is ignored, as in release 0.19: {reason}")
        elif key in table:
            known[key] = _known_below(value, table[key], (*path, key), result)
        elif model.model_config.get("extra") == "allow":
            known[key] = copy_containers(value)
        else:
            unknown += 1
            if unknown <= MAX_LISTED:
                _unknown_key(key, value, data, model, path, result)
    if unknown > MAX_LISTED:
        where = ".".join(map(str, path)) or "config"
        text = f"has {unknown - MAX_LISTED} more unknown keys (not listed)"
        if issubclass(model, LenientConfigModel):
            note(f"{where} {text}")
        else:
            result.error(path, text)
    return known


def _known_below(value: Any, key: Key, path: Path, result: Analysis) -> Any:
    if key.section is None:
        return copy_containers(value)
    if key.container is None and isinstance(value, Mapping):
        return _known_part(value, key.section, path, result)
    if key.container == "dict" and isinstance(value, Mapping):
        return {
            name: _known_part(item, key.section, (*path, name), result) if isinstance(item, Mapping) else item
            for name, item in value.items()
        }
    if key.container == "list" and isinstance(value, list):
        return [
            _known_part(item, key.section, (*path, index), result) if isinstance(item, Mapping) else item
            for index, item in enumerate(value)
        ]
    return value


def _unknown_key(
    key: Any, value: Any, siblings: Mapping[str, Any], model: type[BaseModel], path: Path, result: Analysis
) -> None:
    here = (*path, str(key))
    if not isinstance(key, str):
        result.error(here, f"keys must be strings, not {type(key).__name__}")
        return
    if key.startswith(COMMENT_MARKS) or path and path[0] in SILENT_SECTIONS:
        return
    lenient = issubclass(model, LenientConfigModel)
    if not path and (key in FOREIGN_KEYS or "." in key):
        return
    if not path and (key, value) in MISSPELT_DEFAULTS:
        note(f"config key '{key}' is unknown and ignored; it looks like a misspelt key left at its default")
        return
    if not path and key in IDLE_KEYS:
        note(f"config key '{key}' is unknown and ignored; did you mean '{IDLE_KEYS[key]}'?")
        return
    suggestion = misspelt(key, _free_spellings(model, siblings)) if lenient else nearest(key, keys_of(model))
    if lenient and suggestion is not None and _is_another_section(value, keys_of(model)[suggestion]):
        suggestion = None
    if suggestion is not None:
        meant = ".".join(map(str, (*path, suggestion)))
        result.doubtful.add(meant)
        remedy = None if suggestion in siblings else Remedy(rename=suggestion)
        result.error(here, f"unknown key; did you mean '{meant}'? (value: {shown(value)})", remedy)
        return
    elsewhere = [each for each in paths_by_key(TrainingConfig).get(key, []) if each != key or path]
    if len(elsewhere) > 1 and "_" not in key:
        elsewhere = []  # "enabled" and "device" are keys of many sections, so other occurrences say nothing
    if not elsewhere and path in ((), (OPTIMIZER_SECTION,)) and key in OPTIMIZER:
        elsewhere = [f"optimizer.params.{key}"]
    hint = f"; it belongs to {' or '.join(repr(each) for each in elsewhere[:3])}" if elsewhere else ""
    close = nearest(key, keys_of(model)) if lenient and not hint else None
    if close is not None and not _is_another_section(value, keys_of(model)[close]):
        hint = f"; did you mean '{'.'.join(map(str, (*path, close)))}'?"
    if lenient:
        where = result.source.place(here)
        place = f" ({where})" if where else ""
        note(f"config key '{cut('.'.join(map(str, here)))}'{place} is unknown and ignored{hint}")
    else:
        known = ", ".join(sorted({documented_name(k.name, k.field) for k in keys_of(model).values()}))
        result.error(here, f"unknown key (value: {shown(value)}){hint}. Known here: {known}")


def _free_spellings(model: type[BaseModel], siblings: Mapping[str, Any]) -> list[str]:
    """Return the spellings that a misspelt key may mean: keys that are not already in the section."""
    table = keys_of(model)
    taken = {table[key].name for key in siblings if key in table}
    return [spelling for spelling, key in table.items() if key.name not in taken]


def _is_another_section(value: Any, meant: Key) -> bool:
    """Tell whether a section is too unlike the one that its name resembles: it has a switch, and that one has none. For
    example, scripts have loss scaling under "data_type", which is not `data_types`; 0.19 ignores it."""
    if not isinstance(value, Mapping) or meant.section is None or meant.container is not None:
        return False
    table = keys_of(meant.section)
    return "enabled" in value and not value.keys() & table.keys()


def _foreign_reason(name: str, value: Any) -> str | None:
    """Explain why a section with one of our names belongs to another tool: none of its keys is or resembles one of
    ours, or it is loss scaling under `fp8`, as in clients' files. None: it is ours."""
    if name not in OWN_SECTIONS or not isinstance(value, Mapping) or not value:
        return None
    section = keys_of(TrainingConfig)[name].section
    assert section is not None
    ours, scaling, given = keys_of(section), keys_of(DeepSpeedFP16Config), ", ".join(map(str, value))
    if name == "fp8" and value.keys() & scaling.keys() - ours.keys() and value.keys() <= scaling.keys():
        return (
            f"its keys ({given}) belong in fp16. For linear layers with 8-bit matrix products, set "
            "'enabled' and remove the loss-scaling keys"
        )
    if any(not isinstance(key, str) or key in ours or nearest(key, ours) is not None for key in value):
        return None
    return f"none of its keys ({given}) is supported in this section"


# ------------------------------------------------------------------------------------------ old spellings


def _old_section(
    key: str, value: Any, data: Mapping[str, Any], known: dict[str, Any], result: Analysis
) -> None:
    """Move a section from its old name to the new one, unless the new one is present too."""
    new = OLD_TOP_LEVEL[key]
    note(f"config key '{key}' is deprecated, use '{new}'")
    if new not in data:
        known[new] = _known_below(value, keys_of(TrainingConfig)[new], (key,), result)


def _auto_paths(value: Any, path: Path = ()) -> list[Path]:
    """Return the paths of "auto" values that are still to be filled in (not of keys for which "auto" is a valid
    choice)."""
    if is_auto(value):
        if path[:2] == ("optimizer", "params") and path[-1] in TAKES_AUTO:
            return []
        found = field_at(TrainingConfig, path)
        chosen = found is not None and (is_auto(found.get_default()) or extra_facts(found).get("takes_auto"))
        return [] if chosen else [path]
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    return [found for key, item in items for found in _auto_paths(item, (*path, key))]


# --------------------------------------------------------------------------------------- types and bounds


def _validate(data: dict[str, Any], result: Analysis) -> TrainingConfig | None:
    """Build the model of the valid part of `data`; the rest is reported, removed, and marked as doubtful."""
    refused: set[str] = set()
    while True:
        try:
            return TrainingConfig(**data)
        except ValidationError as error:
            # Only for configs with mistakes.
            from deepspeed.config.refusals import plain_meaning, refusals, value_at

            before = len(refused)
            for path, message, missing in refusals(TrainingConfig, error, data, result.source.data):
                dotted = ".".join(map(str, path))
                known = refused, result.doubtful
                if not any(key in found for key in (dotted, f"{dotted}.{missing}") for found in known):
                    value = value_at(result.source.data, path, None)
                    meant = None if missing else plain_meaning(TrainingConfig, path, value)
                    result.error(path, message, meant)
                refused.add(dotted)
            if len(refused) == before:
                return None
            result.doubtful |= refused
            for dotted in refused:
                _remove(data, dotted)


def _remove(data: dict[str, Any], dotted: str) -> None:
    *parents, leaf = dotted.split(".")
    owner: Any = data
    for part in parents:
        if isinstance(owner, list):
            owner = owner[int(part)]
        else:
            owner = owner.get(part) if isinstance(owner, dict) else None
    if isinstance(owner, dict):
        owner.pop(leaf, None)
    elif isinstance(owner, list):  # the whole list is removed, so that other items keep their indices
        _remove(data, ".".join(parents))


# --------------------------------------------------------------------------------------- between sections


def _check_rules(config: TrainingConfig, result: Analysis) -> None:
    def spoiled(key: str) -> bool:
        return any(
            key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.") for bad in result.doubtful
        )

    for finding in check_rules(config):
        if any(spoiled(key) for key in finding.keys) or finding.keys[0] in result.auto_keys:
            continue
        if finding.is_error:
            result.error(finding.keys[0], finding.message, finding.remedy, finding.raised_as)
        else:
            note(f"config key '{finding.keys[0]}' {finding.message}")
    if config.model_fields_set.isdisjoint(UNFINISHED):
        return
    from deepspeed.config.availability import missing_features
    from deepspeed.config.refusals import value_at

    for row in missing_features(config):
        if spoiled(row.key):
            continue
        if row.changes_numbers:
            value = value_at(result.source.data, tuple(row.key.split(".")), None)
            result.error(row.key, f"{shown(value)} is {row.message}" if value is not None else row.message)
        else:
            note(f"config key '{row.key}' is {row.message}")


def _resolve_batch(config: TrainingConfig, axes: Axes, allow_auto: bool, result: Analysis) -> None:
    given = [getattr(config, key) for key in BATCH_KEYS]
    sharing = axes.layout.tp if axes.layout is not None else 1
    if sharing > 1 and all(given) and given[0] == math.prod(given[1:]) * axes.data_parallel * sharing:
        given[0] //= sharing  # clients count all ranks, including those that share layers
    open_keys = [key for key in BATCH_KEYS if key in result.auto_keys]
    if open_keys and allow_auto and given[0] is None and given[1] is None:
        return
    try:
        result.batch = batch.resolve(given[0], given[1], given[2], axes.data_parallel, world_from=axes.origin)
    except batch.BatchError as error:
        message = str(error)
        if open_keys and given[0] is None and given[1] is None:
            message = (
                f"{' and '.join(open_keys)} {'is' if len(open_keys) == 1 else 'are'} 'auto', and no value "
                "was filled in"
            )
        result.error(error.key, message)


def _resolve_elastic_batch(section: ElasticityConfig, axes: Axes, result: Analysis) -> None:
    """Compute the batch that the `elasticity` section implies for these ranks, whatever the batch keys say."""
    if any(problem.path[:1] == (ELASTICITY,) for problem in result.errors):
        return
    shared = axes.layout.sp * axes.layout.tp if axes.layout is not None else section.model_parallel_size
    if shared != section.model_parallel_size:
        result.error(
            f"{ELASTICITY}.model_parallel_size",
            f"{section.model_parallel_size} does not match the {shared} ranks that share a batch here "
            "(tensor-parallel x sequence-parallel)",
        )
        return
    from deepspeed.config.elastic_batch import elastic_batch  # only for elastic runs

    try:
        found = elastic_batch(section, axes.data_parallel)
    except ElasticityError as error:
        kind = type(error) if isinstance(error, DeepSpeedConfigError) else ElasticityConfigError
        result.error(ELASTICITY, str(error), raised_as=kind)
        return
    assert found.micro is not None
    accumulation = found.train // (found.micro * axes.data_parallel)
    origin: dict[str, str] = dict.fromkeys(BATCH_KEYS, ELASTICITY)
    result.batch = BatchSizes(found.train, found.micro, accumulation, axes.data_parallel, origin)
