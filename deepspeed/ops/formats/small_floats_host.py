"""Groups of small floating-point numbers on the host, encoded and decoded in one pass over memory (``csrc/codec``)."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

from deepspeed.ops import native


class _Groups(ctypes.Structure):
    """``struct ds_float_groups``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("stride", "scale_stride", "numel", "group")),
        ("bits", ctypes.c_int32),
    ]


def _library(values: Tensor, codes: Tensor, scales: Tensor) -> ctypes.CDLL | None:
    """None where the kernels cannot work on these."""
    rows = all(
        t.device.type == "cpu" and t.dtype is torch.uint8 and t.stride(-1) == 1 for t in (codes, scales)
    )
    return native.library() if rows and native.is_native(values) and sys.byteorder == "little" else None


def encode(values: Tensor, codes: Tensor, scales: Tensor, group: int, bits: int) -> bool:
    """Write ``codes`` [groups, bytes] and ``scales`` [groups, 4], uint8, rows of any stride. False, and both are of no
    use: the kernels cannot, or a value is not finite."""
    lib = _library(values, codes, scales)
    if lib is None:
        return False
    groups = _of(codes, scales, values.numel(), group, bits)
    code = native.DTYPE_CODES[values.dtype]
    return not lib.ds_encode_floats(ctypes.byref(groups), values.data_ptr(), code, torch.get_num_threads())


def decode(values: Tensor, codes: Tensor, scales: Tensor, group: int, bits: int) -> bool:
    """Write ``values``, of which there may be fewer than in all groups. False: the kernels cannot."""
    lib = _library(values, codes, scales)
    if lib is None or codes.shape[0] * group < values.numel():
        return False
    groups = _of(codes, scales, values.numel(), group, bits)
    code = native.DTYPE_CODES[values.dtype]
    lib.ds_decode_floats(ctypes.byref(groups), values.data_ptr(), code, torch.get_num_threads())
    return True


def _of(codes: Tensor, scales: Tensor, numel: int, group: int, bits: int) -> _Groups:
    addresses = codes.data_ptr(), scales.data_ptr()
    return _Groups(*addresses, codes.stride(0), scales.stride(0), numel, group, bits)
