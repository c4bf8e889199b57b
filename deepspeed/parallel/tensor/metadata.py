"""Metadata of tensor-parallel parameters in the format of release 0.19: a dict on each parameter, and a model's
``universal_checkpoint_info`` built from them, with which tools of that release merge the files of the ranks.

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
"""Key of the part of a parameter's dict that describes how to merge files. The rest is about this rank's tensor."""


def conversion_of(param: Tensor) -> dict[str, Any] | None:
    """Return how the parts of ``param`` are merged; None: no parallel layer has described it."""
    return getattr(param, constants.DS_AUTOTP_UC_META, {}).get(CONVERSION)


def is_split(model: nn.Module) -> bool:
    """Return whether tensor-parallel ranks hold different parts of any parameter."""
    return any(AXIS in placement_of(param).split for param in model.parameters())


def _derived(placement: Placement) -> dict[str, Any] | None:
    """Derive ``conversion_of`` for a parameter not split by our layers, but by a ``tp_plan`` or a client's layers.
    None: it is replicated."""
    shape, boxes = placement.global_shape, placement.boxes
    if AXIS not in placement.split or not boxes:
        return None
    dims = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in boxes)]
    dim, step = dims[0], shape[dims[0]] // len(boxes)
    low, high = boxes[0][dim]
    even = all(box[dim] == (low + n * step, high + n * step) for n, box in enumerate(boxes))
    # The format cannot express others: experts (stacked, or over their own ranks), unequal matrices side by side.
    has_words = len(dims) == 1 and dim < 2 and len(placement.split) == 1 and even
    sides = tuple(len(boxes) if side == dim else -1 for side in range(2))
    return {
        "partition_type": AXIS if has_words else _UNSUPPORTED,
        "partition_dim": dim,
        "sub_param_shape": sides if len(boxes) > 1 else None,
        "replicated": False,
    }


def describe(
    param: Tensor, cut: Cut | None, kind: str, *, is_bias: bool, shape: Sequence[Any] | None = None
) -> None:
    """Attach the dict to a layer's ``param``, cut by ``cut`` (None: replicated). ``shape``: the user's description of
    the matrices side by side, as ``SubParamLinearLayer`` takes it."""
    own = tuple(zero_params.full_shape(param))
    whole = own if cut is None else (*own[: cut.dim], cut.size, *own[cut.dim + 1 :])
    sizes = None if cut is None else _blocks(cut)
    several = sizes if sizes is not None and len(sizes) > 1 else None
    if cut is not None and shape is None and several is not None:
        shape = tuple(several if dim == cut.dim else -1 for dim in range(2))
    conversion = {
        "partition_type": kind,
        "partition_dim": None if cut is None else cut.dim,
        "sub_param_shape": None if cut is None else _as_tuple(shape),
        "original_shape": whole,
        "is_bias": is_bias,
        "replicated": cut is None,
    }
    expressible = cut is None or sizes is not None
    made = {
        **conversion,
        "logical_shape": whole,
        "output_shape": whole[:1],
        "sub_param_sizes": several,
        "target_partition_shape": own,
        CONVERSION: conversion if expressible else {**conversion, "partition_type": _UNSUPPORTED},
    }
    setattr(param, constants.DS_AUTOTP_UC_META, made)


def universal_checkpoint_info(model: nn.Module) -> dict[str, Any]:
    """Return how to merge the ranks' parts of every parameter of ``model``, by regular expressions for their names.
    Parameters in no list are concatenated along their first dim."""
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
"""A cut that the format cannot express, such as replicated heads."""


def _blocks(cut: Cut) -> tuple[int, ...] | None:
    """Return the extents of the matrices side by side that ``cut`` splits individually; None for other cuts."""
    pieces = [[high - low for low, high in rank] for rank in cut.parts]
    if len(set(map(len, pieces))) != 1:
        return (cut.size,) if cut.is_plain else None
    blocks = list(zip(*pieces, strict=True))
    return tuple(map(sum, blocks)) if Cut.fused(cut.dim, blocks) == cut else None


def _as_tuple(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    if values is None:
        return None
    return tuple(tuple(each) if isinstance(each, (list, tuple)) else each for each in values)
