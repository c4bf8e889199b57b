"""Packets of signs and small integers (``deepspeed/comm/codecs.py``), made and read in one pass: on the host by the
native library, on GPUs by a Triton kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from deepspeed.ops import gpu, native


class Packets(ctypes.Structure):
    """`struct ds_packets`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("numel", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("bits", ctypes.c_int32),
    ]


def encode(packets: Tensor, values: Tensor, bits: int, block: int, errors: Tensor | None = None) -> bool:
    """Fill ``packets`` [..., bytes] with ``values`` [..., n] plus ``errors``, which become what that took away. False:
    there is no kernel for them here, and nothing was done."""
    if errors is not None and not (errors.dtype is torch.float32 and errors.is_contiguous()):
        return False
    if gpu.usable(packets, values, errors):
        from deepspeed.ops.gpu import packets as kernels  # imports Triton

        if kernels.takes(packets, values, block):
            kernels.encode(packets, values, bits, block, errors)
            return True
    lib = native.library()
    if lib is None or not native.is_native(values) or not packets.is_contiguous():
        return False
    if errors is not None and not native.is_native(errors):
        return False
    numel = values.shape[-1]
    described = _described(packets, numel, bits, block)
    lib.ds_encode(
        ctypes.byref(described),
        values.data_ptr(),
        native.DTYPE_CODES[values.dtype],
        None if errors is None else errors.data_ptr(),
        torch.get_num_threads(),
    )
    return True


def decode(packets: Tensor, values: Tensor, bits: int, block: int, *, total: bool = False) -> bool:
    """Fill ``values`` [..., n] with what ``packets`` [..., bytes] hold; ``total``: [n] with the sum of all in their
    order. False: there is no kernel for them here, and nothing was done."""
    if gpu.usable(packets, values):
        from deepspeed.ops.gpu import packets as kernels  # imports Triton

        if kernels.takes(packets, values, block):
            kernels.decode(packets, values, bits, block, total=total)
            return True
    lib = native.library()
    if lib is None or not native.is_native(values) or packets.is_cuda or not packets.is_contiguous():
        return False
    described = _described(packets, values.shape[-1], bits, block)
    code = native.DTYPE_CODES[values.dtype]
    lib.ds_decode(ctypes.byref(described), values.data_ptr(), code, total, torch.get_num_threads())
    return True


def _described(packets: Tensor, numel: int, bits: int, block: int) -> Packets:
    stride = packets.shape[-1]
    rows = packets.numel() // stride if stride else 0
    return Packets(packets.data_ptr(), rows, stride, numel, block, bits)
