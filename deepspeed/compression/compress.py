"""Entry points of compression: prepare a model, initialize a student from its teacher, make the result permanent."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from deepspeed.base.logging import logger
from deepspeed.base.staged import Staged
from deepspeed.compression.basic_layer import Conv2dLayer_Compress, Embedding_Compress, LinearLayer_Compress
from deepspeed.compression.helper import (
    compression_preparation,
    fix_compression,
    is_module_compressible,
    make_pruner,
    recursive_getattr,
)
from deepspeed.compression.packed import pack_weights
from deepspeed.compression.pipeline import CrossStage, check_same_stage, methods_here
from deepspeed.compression.techniques import Compressible
from deepspeed.config import compression_constants as keys
from deepspeed.config.reader import load_source
from deepspeed.config.sections.compression import get_compression_config
from deepspeed.parallel.tensor.layers import TensorParallelLayer
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters
from deepspeed.zero.tensor_fragment import is_kept_by_engine

M = TypeVar("M", bound=nn.Module)
Config = str | os.PathLike[str] | Mapping[str, Any]
Methods = list[list[Any]]

EVERY = keys.DIFFERENT_GROUPS_MODULE_SCOPE_DEFAULT
_LINEAR, _CONV = (nn.Linear, LinearLayer_Compress), (nn.Conv2d, Conv2dLayer_Compress)
_FITS: dict[str, tuple[type[nn.Module], ...]] = {
    keys.WEIGHT_QUANTIZATION: (*_LINEAR, *_CONV, nn.Embedding, Embedding_Compress),
    keys.ACTIVATION_QUANTIZATION: (*_LINEAR, *_CONV),
    keys.SPARSE_PRUNING: (*_LINEAR, *_CONV),
    keys.ROW_PRUNING: _LINEAR,
    keys.HEAD_PRUNING: _LINEAR,
    keys.CHANNEL_PRUNING: _CONV,
}
"""Module classes that a technique applies to."""


def _names_of(model: nn.Module, pattern: str, mpu: Any) -> list[str]:
    """Return the names of the compressible modules that match a regular expression. ``"*"`` matches all linear layers
    and convolutions."""
    found = []
    for name, module in model.named_modules():
        if not name or not is_module_compressible(module, mpu):
            continue
        everywhere = pattern == EVERY and not isinstance(module, (nn.Embedding, nn.BatchNorm2d))
        if everywhere or (pattern != EVERY and re.search(pattern, name)):
            found.append(name)
    return found


def get_compress_methods(
    model: nn.Module, compress_methods: Mapping[str, Any], mpu: Any = None
) -> list[list[Any]]:
    """Return one row per group: [names by pattern, related names by pattern, {technique: the group's parameters merged
    with the shared ones}].

    ``compress_methods``: the section ``compression_training``.
    ValueError: two groups of a technique match the same module, or related modules do not pair up one to one.
    """
    methods: Methods = []
    section = get_compression_config({keys.COMPRESSION_TRAINING: dict(compress_methods)})
    for technique in keys.TECHNIQUES:
        shared = section[technique][keys.SHARED_PARAMETERS]
        if not shared[keys.TECHNIQUE_ENABLED]:
            continue
        taken: set[str] = set()
        for group, description in _groups(technique, section[technique]):
            scope = description[keys.DIFFERENT_GROUPS_MODULE_SCOPE]
            names = [
                _matching(technique, shared, model, group, pattern, taken, mpu)
                for pattern in ([scope] if isinstance(scope, str) else scope)
            ]
            related = _related(model, group, names, description, mpu)
            params = {**shared, **description[keys.DIFFERENT_GROUPS_PARAMETERS]}
            methods.append([names, related, {technique: params}])
    return methods


def _groups(technique: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    groups = section[keys.DIFFERENT_GROUPS]
    if not groups and section[keys.SHARED_PARAMETERS].get("method") == keys.SNIP_MOMENTUM:
        ratio = section[keys.SHARED_PARAMETERS]["dense_ratio"]
        groups = {technique: {"params": {"dense_ratio": ratio}, "modules": EVERY, "related_modules": None}}
    if not groups:
        logger.warning(f"compression_training.{technique} is enabled but has no different_groups")
    yield from groups.items()


def _matching(
    technique: str,
    shared: Mapping[str, Any],
    model: nn.Module,
    group: str,
    pattern: str,
    taken: set[str],
    mpu: Any,
) -> list[str]:
    """Return the names that match ``pattern``, suit the technique and are not in its ``excluded_modules``, and add them
    to ``taken``."""
    excluded = shared.get("excluded_modules", [])
    names = [
        name
        for name in _names_of(model, pattern, mpu)
        if isinstance(recursive_getattr(model, name), _fits(technique, mpu))
        and not any(re.search(each, name) for each in excluded)
    ]
    for name in names:
        if name in taken:
            raise ValueError(
                f"{name} matches group {group!r} and an earlier group of the same technique: make only one "
                "of their patterns match it"
            )
        taken.add(name)
    if names:
        logger.info(
            f"compression group {group}: {pattern!r} matches {len(names)} modules, such as {names[0]}"
        )
    else:
        logger.warning(f"compression group {group}: {pattern!r} matches no compressible module")
    return names


def _fits(technique: str, mpu: Any) -> tuple[type[nn.Module], ...]:
    if technique not in (keys.WEIGHT_QUANTIZATION, keys.ACTIVATION_QUANTIZATION, keys.SPARSE_PRUNING):
        return _FITS[technique]
    parallel = [getattr(mpu, name, None) for name in ("ColumnParallelLinear", "RowParallelLinear")]
    return (*_FITS[technique], *(each for each in parallel if isinstance(each, type)))


def _related(
    model: nn.Module, group: str, names: list[list[str]], description: Mapping[str, Any], mpu: Any
) -> list[list[list[str]]]:
    """Return, per pattern and per related pattern, the related names, in the order of the names they belong to."""
    wanted = description[keys.DIFFERENT_GROUPS_RELATED_MODULE_SCOPE]
    if not wanted:
        return []
    if len(wanted) != len(names):
        raise ValueError(
            f"group {group!r} has {len(names)} patterns in modules and {len(wanted)} lists in "
            "related_modules: each pattern needs its own list"
        )
    result = []
    for main, patterns in zip(names, wanted, strict=True):
        found = [_names_of(model, each, mpu) for each in patterns]
        for pattern, others in zip(patterns, found, strict=True):
            if len(others) != len(main):
                raise ValueError(
                    f"group {group!r}: {len(main)} modules have {len(others)} related modules matching "
                    f"{pattern!r} ({', '.join(others[:4]) or 'none'}): each module needs exactly one"
                )
        result.append(found)
    return result


def init_compression(model: M, deepspeed_config: Config, teacher_model: Any = None, mpu: Any = None) -> M:
    """Prepare ``model`` for the techniques in the section ``compression_training``. Call it before
    ``deepspeed.initialize`` and before creating the optimizer, as learned masks are parameters.

    The modules that the groups match become compressible in place (``LinearLayer_Compress`` and its siblings); names
    and parameters stay, and the engine's schedule switches the techniques on. With ``layer_reduction`` the model is
    initialized with layers of ``teacher_model``.

    Args:
        model: a module, or a wrapper that has one as ``.module``.
        deepspeed_config: dict, path to JSON, or base64 text.
        mpu: a Megatron-style model-parallel unit, whose parallel linears are compressed as well.

    Raises:
        ValueError: a module cannot be compressed as asked, a teacher is missing, or an engine already trains it.
    """
    section = _section(deepspeed_config)
    inner: Any = getattr(model, "module", model)
    _check_no_engine(inner)
    if section[keys.LAYER_REDUCTION][keys.LAYER_REDUCTION_ENABLED]:
        if teacher_model is None:
            raise ValueError("layer_reduction initializes the student from a teacher: pass teacher_model=")
        student_initialization(inner, teacher_model, deepspeed_config)
    methods, cross_stage = _methods(inner, section, mpu)
    channels = [each for each in cross_stage if each[0] == keys.CHANNEL_PRUNING]
    check_same_stage(channels, _TOGETHER)  # a norm needs the mask of its convolution
    compression_preparation(inner, methods, mpu)
    shared = section[keys.SPARSE_PRUNING][keys.SHARED_PARAMETERS]
    if shared[keys.TECHNIQUE_ENABLED] and shared["method"] == keys.SNIP_MOMENTUM:
        pruner = make_pruner(shared, inner)
        vars(inner)["pruners"] = [pruner] if pruner.modules else []
    return model


def _section(config: Config) -> dict[str, Any]:
    return get_compression_config(load_source(config).data)


def _check_no_engine(module: nn.Module) -> None:
    if any(map(is_kept_by_engine, module.parameters())):
        raise ValueError(
            "init_compression comes too late: an engine already trains this module. Call it before "
            "deepspeed.initialize"
        )


def _check_not_split(module: nn.Module) -> None:
    name = next(
        (name for name, each in module.named_modules() if isinstance(each, TensorParallelLayer)), None
    )
    if name is not None:
        raise ValueError(
            f"redundancy_clean needs whole layers, but {name} is split over tensor-parallel ranks: save a checkpoint, "
            "load it without tensor_parallel into a model prepared by init_compression, and clean that"
        )


_WHOLE = "save a checkpoint, load it into the whole model, prepared by init_compression"
_TOGETHER = "choose a partition_method that keeps them on one stage"


def _methods(model: nn.Module, section: Mapping[str, Any], mpu: Any) -> tuple[Methods, CrossStage]:
    """Return the rows of ``get_compress_methods`` for the model, or for this rank's pipeline stage of it."""
    return methods_here(
        model,
        lambda whole: get_compress_methods(whole, section, mpu=mpu),
        lambda module: is_module_compressible(module, mpu),
    )


def redundancy_clean(model: M, deepspeed_config: Config, mpu: Any = None, *, packed: bool = False) -> M:
    """Make compression permanent: weights are rounded, pruned weights are zero, pruned rows, heads and channels that
    have related modules are removed from both, and all modules are ordinary ones again.

    ``packed``: quantized weights become packed integers (`packed.py`) of the bit width they were trained for, and
    layers with quantized inputs keep quantizing them. The state dict shrinks accordingly; it loads into a model that
    was prepared and cleaned in the same way.

    For an engine, ``engine.destroy()`` is called first, which makes its module whole and ends its training.
    Returns ``model``. ValueError: a module that the config names was not prepared by ``init_compression``.
    """
    section = _section(deepspeed_config)
    inner: Any = getattr(model, "module", model)
    _check_not_split(inner)
    methods, cross_stage = _methods(inner, section, mpu)
    check_same_stage(cross_stage, f"{_WHOLE}, and clean that; or {_TOGETHER}")
    if inner is not model and any(is_kept_by_engine(p) or hasattr(p, "ds_owner") for p in inner.parameters()):
        destroy: Any = model.destroy
        destroy()
    done: set[tuple[str, int]] = set()
    for names, related, techniques in methods:
        [technique] = techniques
        for i, group in enumerate(names):
            for j, name in enumerate(group):
                weight = recursive_getattr(inner, name).weight
                if (technique, id(weight)) in done:  # tied weights
                    continue
                done.add((technique, id(weight)))
                followers = [pattern[j] for pattern in related[i]] if related else []
                mask = fix_compression(inner, name, techniques, dim_reduction=bool(followers))
                for follower in followers:
                    fix_compression(inner, follower, techniques, mask=mask, dim_reduction=True)
                if technique == keys.HEAD_PRUNING and followers and mask is not None:
                    _set_head_counts(inner, followers, mask)
    if packed:
        logger.info(f"compression: {pack_weights(inner)}")
    for module in list(inner.modules()):
        if isinstance(module, Compressible):
            module.release()
    vars(inner).pop("pruners", None)
    return model


HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
WIDTH = "all_head_size"


def _set_head_counts(model: nn.Module, followers: Sequence[str], mask: torch.Tensor) -> None:
    """Update the head count and width attributes of the module around query, key and value."""
    before, after = mask.numel(), int(mask.sum())
    for owner_name in {name.rpartition(".")[0] for name in followers}:
        owner = recursive_getattr(model, owner_name) if owner_name else model
        for name in HEADS:
            if vars(owner).get(name) == before:
                setattr(owner, name, after)
        width = vars(owner).get(WIDTH)
        if isinstance(width, int) and width % before == 0:
            setattr(owner, WIDTH, width // before * after)


# Layer reduction --------------------------------------------------------------------------------------------


def student_initialization(student_model: M, teacher_model: nn.Module, deepspeed_config: Config) -> M:
    """Copy layers of the teacher to the student: layer ``teacher_layer[i]`` to the student's i-th under
    ``module_name_prefix``, and the modules in ``other_module_name``. A student with more layers than
    ``keep_number_layer`` is truncated. Returns the student.

    ValueError: list lengths or shapes differ, or a layer does not exist.
    """
    section = _section(deepspeed_config)[keys.LAYER_REDUCTION]
    student: Any = getattr(student_model, "module", student_model)
    teacher: Any = getattr(teacher_model, "module", teacher_model)
    if isinstance(student, Staged):
        raise ValueError(
            "layer_reduction copies layers between whole models: initialize the student before splitting it "
            "into pipeline stages"
        )
    chosen = section[keys.TEACHER_LAYER] or []
    prefix = section[keys.MODULE_NAME_PREFIX]
    if prefix:
        count = section[keys.KEEP_NUMBER_LAYERS]
        if count is not None and count != len(chosen):
            raise ValueError(
                f"layer_reduction.keep_number_layer={count} but teacher_layer names {len(chosen)} layers"
            )
        _shorten(student, prefix, len(chosen))
        for i, layer in enumerate(chosen):
            _copy(student, f"{prefix}.{i}", teacher, f"{prefix}.{layer}")
    for name in section[keys.OTHER_MODULE_NAME] or []:
        _copy(student, name, teacher, name)
    return student_model


def _shorten(student: nn.Module, prefix: str, count: int) -> None:
    layers = recursive_getattr(student, prefix)
    before = len(layers)
    if not isinstance(layers, nn.ModuleList) or before <= count:
        return
    del layers[count:]
    config = getattr(student, "config", None)
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if config is not None and getattr(config, name, None) == before:
            setattr(config, name, count)


def _copy(student: nn.Module, name: str, teacher: nn.Module, source: str) -> None:
    try:
        mine, other = recursive_getattr(student, name), recursive_getattr(teacher, source)
    except (AttributeError, IndexError, KeyError) as error:
        raise ValueError(f"layer_reduction copies {source} of the teacher to {name}: {error}") from error
    values = dict(_tensors(other))
    written = GatheredParameters(list(mine.parameters()), modifier_rank=0)
    with torch.no_grad(), GatheredParameters([*values.values()]), written:
        for key, tensor in _tensors(mine):
            if key not in values or values[key].shape != tensor.shape:
                there = tuple(values[key].shape) if key in values else "not there"
                raise ValueError(
                    f"layer_reduction copies {source} of the teacher to {name}, but {key} is {tuple(tensor.shape)} "
                    f"here and {there} in the teacher"
                )
            tensor.copy_(values[key])


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
