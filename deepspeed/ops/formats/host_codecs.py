"""Encoding and decoding of few-bit payloads (``deepspeed/ops/formats/codecs.py``) in one pass: by the native library on
the host, by a Triton kernel on GPUs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from deepspeed.ops import gpu, native


class Payloads(ctypes.Structure):
    """The C struct `ds_payloads`."""

    _fields_ = [
        *native.fields("data", "rows stride numel block", "", "codes rounding"),
        ("seed", ctypes.c_uint32),
    ]


def encode(
    payloads: Tensor,
    values: Tensor,
    codes: int,
    block: int,
    errors: Tensor | None = None,
    seed: int | None = None,
) -> bool:
    """Encode ``values`` [..., n] plus ``errors`` into ``payloads`` [..., bytes], and set ``errors`` to the encoding
    error. With a ``seed``, integers are rounded stochastically. Returns False, without effect, if there is no
    kernel."""
    if errors is not None and not (errors.dtype is torch.float32 and errors.is_contiguous()):
        return False
    if gpu.usable(payloads, values, errors):
        from deepspeed.ops.gpu import codecs as kernels  # imports Triton

        if codes in kernels.CODES and kernels.supports(payloads, values, block):
            kernels.encode(payloads, values, codes, block, errors, seed)
            return True
    lib = native.library()
    if lib is None or not _can_encode(payloads, values, errors):
        return False
    numel = values.shape[-1]
    described = _described(payloads, numel, codes, block, seed)
    lib.ds_encode(
        ctypes.byref(described),
        values.data_ptr(),
        native.DTYPE_CODES[values.dtype],
        native.address(errors),
        torch.get_num_threads(),
    )
    return True


def decode(payloads: Tensor, values: Tensor, codes: int, block: int, *, total: bool = False) -> bool:
    """Decode ``payloads`` [..., bytes] into ``values`` [..., n]; ``total``: into their sum [n], added in order. Returns
    False, without effect, if there is no kernel."""
    if gpu.usable(payloads, values):
        from deepspeed.ops.gpu import codecs as kernels  # imports Triton

        if codes in kernels.CODES and kernels.supports(payloads, values, block):
            kernels.decode(payloads, values, codes, block, total=total)
            return True
    lib = native.library()
    if lib is None or not native.is_native(values) or payloads.is_cuda or not payloads.is_contiguous():
        return False
    described = _described(payloads, values.shape[-1], codes, block)
    code = native.DTYPE_CODES[values.dtype]
    lib.ds_decode(ctypes.byref(described), values.data_ptr(), code, total, torch.get_num_threads())
    return True


def encode_largest(payloads: Tensor, values: Tensor, count: int, errors: Tensor | None = None) -> bool:
    """``encode`` the ``count`` largest elements of each row [n] with their indices: ``payloads`` [..., 8 * count]."""
    lib = native.library()
    if lib is None or not values.numel() or not _can_encode(payloads, values, errors):
        return False
    numel, code = values.shape[-1], native.DTYPE_CODES[values.dtype]
    target = (payloads.data_ptr(), values.numel() // numel, numel, count)
    source = (values.data_ptr(), code, native.address(errors))
    return bool(lib.ds_encode_largest(*target, *source, torch.get_num_threads()))


def decode_largest(payloads: Tensor, values: Tensor, count: int, *, total: bool = False) -> bool:
    """``decode`` payloads of ``encode_largest``; ``values`` are fp32."""
    lib = native.library()
    if lib is None or payloads.is_cuda or not payloads.is_contiguous() or not values.numel():
        return False
    if values.dtype is not torch.float32 or not native.is_native(values):
        return False
    rows = payloads.numel() // (8 * count)
    threads = torch.get_num_threads()
    lib.ds_decode_largest(
        payloads.data_ptr(), rows, values.shape[-1], count, values.data_ptr(), total, threads
    )
    return True


def _can_encode(payloads: Tensor, values: Tensor, errors: Tensor | None) -> bool:
    if not native.is_native(values) or not payloads.is_contiguous():
        return False
    return errors is None or (errors.dtype is torch.float32 and native.is_native(errors))


def _described(payloads: Tensor, numel: int, codes: int, block: int, seed: int | None = None) -> Payloads:
    stride = payloads.shape[-1]
    rows = payloads.numel() // stride if stride else 0
    random = seed is not None
    return Payloads(payloads.data_ptr(), rows, stride, numel, block, codes, random, seed or 0)
