"""Dtypes, kinds of layers and small sums of the ragged engine."""

from __future__ import annotations

from enum import Enum, IntEnum

import torch

from deepspeed.config.section import DtypeEnum

__all__ = ["ActivationType", "DtypeEnum", "NormTypeEnum", "ceil_div", "elem_size", "is_gated"]


class NormTypeEnum(Enum):
    LayerNorm = "layer_norm"
    RMSNorm = "rms_norm"


class ActivationType(IntEnum):
    """GEGLU, ReGLU and SiGLU take a product of two halves of their input."""

    GELU = 0
    RELU = 1
    SILU = 2
    GEGLU = 3
    ReGLU = 4
    SiGLU = 5
    IDENTITY = 6
    InvalidType = -1


def is_gated(act_fn: ActivationType | str) -> bool:
    """Whether an activation, or the value or name of one, takes a product of two halves of its input."""
    kind = ActivationType[act_fn] if isinstance(act_fn, str) else ActivationType(act_fn)
    return kind in (ActivationType.GEGLU, ActivationType.ReGLU, ActivationType.SiGLU)


def elem_size(dtype: torch.dtype) -> int:
    """Bytes of an element."""
    return dtype.itemsize


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    if b == 0:
        raise ValueError(f"ceil_div({a}, 0): the divisor must be non-zero")
    return -(-a // b)
