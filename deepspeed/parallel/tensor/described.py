"""Descriptions of parallel layers' parameters in the form of release 0.19: a dict on each parameter, and from all of
them the ``universal_checkpoint_info`` of a model, by which tools of that release join the files of the ranks.

Our own checkpoints need neither: they record a ``Placement`` for every tensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from deepspeed.checkpoint import constants
from deepspeed.checkpoint.placement import Placement, placement_of
from deepspeed.parallel.tensor.cuts import AXIS, Cut
from deepspeed.zero import params as zero_params

CONVERSION = "conversion"
"""Key of the part of a parameter's dict by which files are joined. The rest is about this rank's own tensor."""


def conversion_of(param: Tensor) -> dict[str, Any] | None:
    """Return how the parts of ``param`` are joined; None: no parallel layer has described it."""
    return getattr(param, constants.DS_AUTOTP_UC_META, {}).get(CONVERSION)


def is_split(model: nn.Module) -> bool:
    """Return whether tensor-parallel ranks hold different parts of any parameter."""
    return any(AXIS in placement_of(param).split for param in model.parameters())


def _derived(placement: Placement) -> dict[str, Any] | None:
    """``conversion_of`` a parameter that something else than our layers has split: a ``tp_plan``, a client's layers.
    None: all ranks hold all of it."""
    shape, boxes = placement.global_shape, placement.boxes
    if AXIS not in placement.split or not boxes:
        return None
    dims = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in boxes)]
    dim, step = dims[0], shape[dims[0]] // len(boxes)
    low, high = boxes[0][dim]
    even = all(box[dim] == (low + n * step, high + n * step) for n, box in enumerate(boxes))
    # Others are of experts, stacked or over their own ranks, or of matrices of different sizes side by side.
    has_words = len(dims) == 1 and dim < 2 and len(placement.split) == 1 and even
    sides = tuple(len(boxes) if side == dim else -1 for side in range(2))
    return {
        "partition_type": AXIS if has_words else _UNSUPPORTED,
        "partition_dim": dim,
        "sub_param_shape": sides if len(boxes) > 1 else None,
        "replicated": False,
    }


def description(
    *,
    partition_type: str,
    partition_dim: int | None,
    logical_shape: Sequence[int],
    output_shape: Sequence[int],
    sub_param_shape: Sequence[Any] | None = None,
    sub_param_sizes: Sequence[int] | None = None,
    target_partition_shape: Sequence[int] | None = None,
    original_shape: Sequence[int] | None = None,
    is_bias: bool = False,
    replicated: bool = False,
) -> dict[str, Any]:
    """The dict of one parameter.

    ``logical_shape`` is the whole one's, ``target_partition_shape`` this rank's; ``sub_param_shape``: the matrices side
    by side as ``SubParamLinearLayer`` takes them, ``sub_param_sizes``: their extents.
    """
    conversion = {
        "partition_type": partition_type,
        "partition_dim": partition_dim,
        "sub_param_shape": _as_tuple(sub_param_shape),
        "original_shape": _as_tuple(original_shape),
        "is_bias": is_bias,
        "replicated": replicated,
    }
    return {
        **conversion,
        "logical_shape": _as_tuple(logical_shape),
        "output_shape": _as_tuple(output_shape),
        "sub_param_sizes": _as_tuple(sub_param_sizes),
        "target_partition_shape": _as_tuple(target_partition_shape),
        CONVERSION: conversion,
    }


def describe(
    param: Tensor, cut: Cut | None, kind: str, *, is_bias: bool, shape: Sequence[Any] | None = None
) -> None:
    """Leave its dict on a layer's ``param``, of which this rank has what ``cut`` says (None: all of it). ``shape``: how
    the user has stated the matrices side by side."""
    own = tuple(zero_params.full_shape(param))
    whole = own if cut is None else (*own[: cut.dim], cut.size, *own[cut.dim + 1 :])
    sizes = None if cut is None else _blocks(cut)
    if cut is not None and shape is None and sizes is not None and len(sizes) > 1:
        shape = tuple(sizes if dim == cut.dim else -1 for dim in range(2))
    made = description(
        partition_type=kind,
        partition_dim=None if cut is None else cut.dim,
        logical_shape=whole,
        output_shape=whole[:1],
        sub_param_shape=None if cut is None else shape,
        sub_param_sizes=sizes if sizes is not None and len(sizes) > 1 else None,
        target_partition_shape=own,
        original_shape=whole,
        is_bias=is_bias,
        replicated=cut is None,
    )
    if cut is not None and sizes is None:
        made[CONVERSION] = {**made[CONVERSION], "partition_type": _UNSUPPORTED}
    setattr(param, constants.DS_AUTOTP_UC_META, made)


def universal_checkpoint_info(model: nn.Module) -> dict[str, Any]:
    """Return how the ranks' parts of every parameter of ``model`` are joined, by regular expressions for their names.
    Parameters in no list are joined along their first dim."""
    row, copies, unsupported = [], [], []
    fused: dict[tuple[Any, ...], list[str]] = {}
    for name, param in model.named_parameters():
        pattern, how = f"^{re.escape(name)}$", conversion_of(param) or _derived(placement_of(param))
        if how is None or how["replicated"]:
            copies.append(pattern)
        elif how["partition_type"] == _UNSUPPORTED:
            unsupported.append(pattern)
        elif how["sub_param_shape"] is not None:
            fused.setdefault((how["sub_param_shape"], how["partition_dim"]), []).append(pattern)
        elif how["partition_dim"] == 1:
            row.append(pattern)
    return {
        constants.TP_REPLICATED_PARAMETER_PATTERNS: copies,
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: row,
        constants.PARAMETER_WITH_SUB_PARAMS: [
            {"patterns": patterns, "shape": list(shape), "partition_dim": dim}
            for (shape, dim), patterns in fused.items()
        ],
        constants.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS: unsupported,
    }


_UNSUPPORTED = "unsupported"
"""A cut that this form has no words for, such as heads that several ranks hold."""


def _blocks(cut: Cut) -> tuple[int, ...] | None:
    """The extents of the matrices side by side that ``cut`` splits each; None: it is none of that kind."""
    pieces = [[high - low for low, high in rank] for rank in cut.parts]
    if len(set(map(len, pieces))) != 1:
        return (cut.size,) if cut.is_plain else None
    blocks = list(zip(*pieces, strict=True))
    return tuple(map(sum, blocks)) if Cut.fused(cut.dim, blocks) == cut else None


def _as_tuple(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    if values is None:
        return None
    return tuple(tuple(each) if isinstance(each, (list, tuple)) else each for each in values)
