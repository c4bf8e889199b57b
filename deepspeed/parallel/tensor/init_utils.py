"""``deepspeed.tp_model_init``: says before ``initialize`` that a model is to be tensor-parallel."""

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
    """Have ``deepspeed.initialize`` split ``model`` over ``tp_size`` neighbouring ranks.

    Args:
        model: the whole model, with the same weights on all ranks.
        tp_size: ranks that share each layer.
        dtype: floating-point dtype to which the model is cast.
        config: the config that ``initialize`` will get, to check that it does not say otherwise.
        kwargs: ``tp_group`` is not needed: the groups are made from the config. With it ``initialize`` takes no mpu.

    Returns:
        ``model`` itself, not split yet.

    Raises:
        ValueError: ``tp_size`` is less than 1, ``dtype`` is not one of floating-point numbers, or ``tp_group`` has
            other ranks than those that will share layers.
        DeepSpeedConfigError: ``config`` has another ``tensor_parallel.autotp_size``, or another 16-bit dtype.
    """
    if tp_size < 1:
        raise ValueError(f"tp_size={tp_size}: the number of ranks that share each layer is at least 1")
    if not dtype.is_floating_point:
        raise ValueError(
            f"dtype={dtype}: a model is trained in torch.float32, torch.bfloat16 or torch.float16"
        )
    group = kwargs.get("tp_group")
    _check_group(group, tp_size)
    vars(model)[TENSOR_PARALLEL_SIZE] = tp_size
    vars(model)[_DTYPE] = dtype
    vars(model)[_GROUP] = group is not None  # not the group itself: models are copied, groups cannot be
    if config is not None:
        with_recorded_size(config, model)
    return model.to(dtype)


def with_recorded_size(config: Any, model: nn.Module, mpu: Any = None) -> Any:
    """``config`` as ``initialize`` uses it for a model that ``tp_model_init`` may have seen.

    DeepSpeedConfigError: it says another size, or both were told which ranks share layers.
    """
    size = vars(model).get(TENSOR_PARALLEL_SIZE)
    if size is None:
        return config
    if mpu is not None and vars(model).get(_GROUP):
        raise DeepSpeedConfigError(
            "tp_model_init provided tp_group, and deepspeed.initialize an mpu: give one of them"
        )
    data = read_config(config).data
    section = data.get(_SECTION)
    section = dict(section) if isinstance(section, Mapping) else {}
    stated = section.get(_SIZE) or size
    if stated != size:
        raise DeepSpeedConfigError(
            f"{_SECTION}.{_SIZE} is {stated}, but tp_model_init was called with tp_size={size}; state it in one place"
        )
    _check_dtype(data, vars(model).get(_DTYPE))
    return {**data, _SECTION: {**section, _SIZE: size}}


def _check_group(group: Any, size: int) -> None:
    """ValueError: not the neighbours that ``initialize`` will have share layers."""
    if not isinstance(group, dist.ProcessGroup):
        return
    first = dist.get_rank() // size * size
    expected, given = list(range(first, first + size)), sorted(dist.get_process_group_ranks(group))
    if given != expected:
        raise ValueError(
            f"tp_group has the ranks {given}, but with tp_size={size} rank {dist.get_rank()} shares layers with "
            f"{expected}: make groups of {size} neighbouring ranks, or leave tp_group out"
        )


def _check_dtype(data: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """DeepSpeedConfigError: ``tp_model_init`` has made the weights of one 16-bit type, the config trains the other."""
    for section, other in (("fp16", torch.bfloat16), ("bf16", torch.float16)):
        stated = data.get(section)
        if isinstance(stated, Mapping) and stated.get("enabled") is True and dtype is other:
            raise DeepSpeedConfigError(
                f"Conflicting dtype: {section}.enabled is true, but tp_model_init was called with dtype={dtype}; "
                "give both the same"
            )
