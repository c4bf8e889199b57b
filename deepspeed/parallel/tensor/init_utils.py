"""``deepspeed.tp_model_init``: requests tensor parallelism for a model before ``initialize``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.base.constants import TENSOR_PARALLEL_SIZE
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.reader import read_config

_DTYPE = "_ds_tp_model_init_dtype"
_GROUP = "_ds_tp_model_init_group"
_SECTION, _SIZE = "tensor_parallel", "autotp_size"


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype,
    config: str | dict[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Have ``deepspeed.initialize`` split ``model`` over ``tp_size`` consecutive ranks.

    Args:
        model: the whole model, with the same weights on all ranks.
        tp_size: ranks that share each layer.
        dtype: floating-point dtype to which the model is cast.
        config: the config for ``initialize``, to check that it does not contradict.
        kwargs: ``tp_group`` is optional: groups are created from the config. With it, ``initialize`` accepts no mpu.

    Returns:
        ``model`` itself, not split yet.

    Raises:
        ValueError: ``tp_size`` is less than 1, ``dtype`` is not floating-point, or ``tp_group`` has other ranks than
            those that will share layers.
        DeepSpeedConfigError: ``config`` has another ``tensor_parallel.autotp_size``, or another 16-bit dtype.
    """
    if tp_size < 1:
        raise ValueError(f"tp_size={tp_size}: must be at least 1")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: must be torch.float32, torch.bfloat16 or torch.float16")
    group = kwargs.get("tp_group")
    _check_group(group, tp_size)
    vars(model)[TENSOR_PARALLEL_SIZE] = tp_size
    vars(model)[_DTYPE] = dtype
    vars(model)[_GROUP] = group is not None  # not the group itself: models are copied, groups cannot be
    if config is not None:
        with_recorded_size(config, model)
    return model.to(dtype)


def with_recorded_size(config: Any, model: nn.Module, mpu: Any = None) -> Any:
    """Return ``config`` with the size that ``tp_model_init`` recorded on ``model``, if any.

    DeepSpeedConfigError: the config has another size or 16-bit dtype, or both a ``tp_group`` and ``mpu`` were given.
    """
    size = vars(model).get(TENSOR_PARALLEL_SIZE)
    if size is None:
        return config
    if mpu is not None and vars(model).get(_GROUP):
        raise DeepSpeedConfigError(
            "tp_model_init provided tp_group, and deepspeed.initialize an mpu: pass only one of them"
        )
    data = read_config(config).data
    section = data.get(_SECTION)
    section = dict(section) if isinstance(section, Mapping) else {}
    stated = section.get(_SIZE) or size
    if stated != size:
        raise DeepSpeedConfigError(
            f"{_SECTION}.{_SIZE} is {stated}, but tp_model_init was called with tp_size={size}; set it "
            "in one place only"
        )
    _check_dtype(data, vars(model).get(_DTYPE))
    return {**data, _SECTION: {**section, _SIZE: size}}


def _check_group(group: Any, size: int) -> None:
    """Raise ValueError unless ``group`` has the consecutive ranks with which ``initialize`` will share layers."""
    if not isinstance(group, dist.ProcessGroup):
        return
    first = dist.get_rank() // size * size
    expected, given = list(range(first, first + size)), sorted(dist.get_process_group_ranks(group))
    if given != expected:
        raise ValueError(
            f"tp_group has the ranks {given}, but with tp_size={size} rank {dist.get_rank()} shares layers "
            f"with {expected}: create groups of {size} neighbouring ranks, or leave tp_group out"
        )


def _check_dtype(data: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """Raise DeepSpeedConfigError if ``tp_model_init`` cast to one 16-bit dtype and the config trains in the other."""
    for section, other in (("fp16", torch.bfloat16), ("bf16", torch.float16)):
        stated = data.get(section)
        if isinstance(stated, Mapping) and stated.get("enabled") is True and dtype is other:
            raise DeepSpeedConfigError(
                f"Conflicting dtype: {section}.enabled is true, but tp_model_init was called with "
                f"dtype={dtype}; use the same dtype in both"
            )
