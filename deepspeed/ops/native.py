"""The native host library: how it is found, its functions, and its plain tensor operations.

The library (`csrc/`, C++ with a plain C interface) is built with the package and found as a package resource; nothing
is compiled at run time. Without it every operation here, and every optimizer built on it, runs in PyTorch with the same
results. Optimizer kernels are called through `deepspeed.ops.multi_tensor`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed.base.logging import log_dist

ABI = 4
"""Version of `deepspeed_host.h` that the tables below describe."""

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Storage dtypes of the kernels (`enum ds_dtype`)."""

ISA_NAMES = ("plain", "avx2", "avx512")


def fields(pointers: str, int64s: str = "", floats: str = "", int32s: str = "") -> list[tuple[str, Any]]:
    """Return struct fields in this order of types, as in the headers."""
    kinds = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32)
    names = (pointers, int64s, floats, int32s)
    return [(name, kind) for kind, each in zip(kinds, names, strict=True) for name in each.split()]


class NativeSpan(ctypes.Structure):
    _fields_ = fields("data", "numel dtype")


class Bytes(ctypes.Structure):
    _fields_ = fields("target source", "bytes")


class Copy(ctypes.Structure):
    _fields_ = fields("output input", "numel", "", "output_dtype input_dtype")


class Storage(ctypes.Structure):
    """Storage dtypes of all segments of one optimizer call (`struct ds_storage`)."""

    _fields_ = fields("", "", "", "param grad state low_precision")


SEGMENT_WORDS = 7
"""64-bit words of `struct ds_segment`: param, grad, state1, state2, low_precision, step, numel."""

_pointer, _int32, _int64, _double = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_segments = (_pointer, _int64, _pointer)  # segments, count, storage

_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ds_abi": (_int32, ()),
    "ds_isa": (_int32, ()),
    "ds_set_isa": (_int32, (_int32,)),
    "ds_adam": (None, (*_segments, *[_double] * 6, *[_int32] * 3)),
    "ds_compact_adam": (None, (*_segments, *[_double] * 6, *[_int32] * 4)),
    "ds_lion": (None, (*_segments, *[_double] * 5, _int32)),
    "ds_adagrad": (None, (*_segments, *[_double] * 5, _int32)),
    "ds_sgd": (None, (*_segments, *[_double] * 5, *[_int32] * 2)),
    "ds_lamb_moments": (None, (*_segments, *[_double] * 5, *[_int32] * 2, _pointer, _int32)),
    "ds_lamb_apply": (None, (*_segments, *[_double] * 5, *[_int32] * 2, _pointer, _int32)),
    "ds_sum_of_squares": (_double, (_pointer, _int64, _pointer, _int32)),
    "ds_copy_bytes": (None, (_pointer, _int64, _int32)),
    "ds_scale_copy": (None, (_pointer, _int64, _double, _int32)),
    "ds_reduce_chunks": (None, (_pointer, _int32, _pointer, _int64, _int32, _int64, _double, _int32)),
    "ds_run": (None, (_pointer, _int64, _pointer, _int32)),
    "ds_paged_attention": (None, (_pointer, _pointer, _int64, _int32)),
    "ds_matrix_product_is_fast": (_int32, ()),
    "ds_matrix_product_run": (_int32, (_pointer, _int32)),
    "ds_dropout": (None, (_pointer, _int32)),
    "ds_sparse_attention_forward": (_int32, (_pointer, _int32)),
    "ds_sparse_attention_backward": (_int32, (_pointer, _int32)),
    "ds_follow_momentum": (None, (_pointer, _pointer, _int32, _int64, _double, _double, _int32)),
    "ds_frozen_step": (None, (_pointer, *[_double] * 4, _int32)),
    "ds_encode": (None, (_pointer, _pointer, _int32, _pointer, _int32)),
    "ds_decode": (None, (_pointer, _pointer, *[_int32] * 3)),
    "ds_encode_floats": (_int32, (_pointer, _pointer, *[_int32] * 2)),
    "ds_decode_floats": (None, (_pointer, _pointer, *[_int32] * 2)),
    "ds_encode_largest": (_int32, (_pointer, *[_int64] * 3, _pointer, _int32, _pointer, _int32)),
    "ds_decode_largest": (None, (_pointer, *[_int64] * 3, _pointer, *[_int32] * 2)),
    "ds_crc32_blocks": (_int32, (_pointer, _int64, _int64, _pointer)),
}


def declare(lib: ctypes.CDLL, signatures: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> str | None:
    """Set result and argument types of a library's functions. Return the name of the first missing one, else None."""
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name, None)
        if function is None:
            return name
        function.restype, function.argtypes = result, arguments
    return None


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library with its signatures set, or None (logged once) if the package was built without it."""
    suffix = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")
    path = str(resources.files("deepspeed").joinpath("lib").joinpath(f"libdeepspeed_host.{suffix}"))
    try:
        lib = ctypes.CDLL(path)
        found = lib.ds_abi()
        if found != ABI:
            raise OSError(f"interface version {found}, this package needs {ABI}: reinstall the package")
        if missing := declare(lib, _SIGNATURES):
            raise OSError(f"{path} is older than this package and lacks {missing}: reinstall the package")
    except OSError as error:
        log_dist(
            f"Native host kernels are not available ({error}): falling back to slower PyTorch operations.",
            ranks=[0],
            level=logging.WARNING,
        )
        return None
    return lib


def isa() -> str | None:
    """Return the instruction set of the kernels: "avx512", "avx2" or "plain"; None without the library.

    The environment variable DS_NATIVE_ISA, read when the library is loaded, lowers it. Results do not depend on it.
    """
    lib = library()
    return None if lib is None else ISA_NAMES[lib.ds_isa()]


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's memory; None for an omitted one."""
    return None if tensor is None else tensor.data_ptr()


def is_native(tensor: Tensor) -> bool:
    """Return whether the kernels can use this tensor's memory: on the CPU, contiguous, fp32, bf16 or fp16."""
    return tensor.device.type == "cpu" and tensor.dtype in DTYPE_CODES and tensor.is_contiguous()


# ---- plain operations --------------------------------------------------------------------------------------


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Sum the squares of all elements, in fp64; inf or nan if and only if some element is not finite.

    Squares of fp32 and 16-bit values are exact in fp64, so only the additions round: a different partitioning of the
    tensors changes at most the last bits of the double, which vanish when a norm is rounded to fp32.
    """
    on_host = [t for t in tensors if t.device.type == "cpu"]
    total = float(sum(sums_of_squares(on_host)))
    if len(on_host) < len(tensors):  # a single transfer for all of them
        total += float(sum(_sum_of_squares(t) for t in tensors if t.device.type != "cpu"))
    return total


def sums_of_squares(tensors: Sequence[Tensor]) -> list[float]:
    """Return `sum_of_squares` of each tensor."""
    lib = library()
    if lib is None or not all(map(is_native, tensors)):
        return torch.stack([_sum_of_squares(t).cpu() for t in tensors]).tolist() if tensors else []
    sums = (ctypes.c_double * len(tensors))()
    lib.ds_sum_of_squares(_spans(tensors), len(tensors), sums, torch.get_num_threads())
    return list(sums)


class SumOfSquares:
    """Repeated `sum_of_squares` of the same tensors: each call reads their current values. Their addresses
    must not change."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._lib = library() if tensors and all(map(is_native, tensors)) else None
        self._spans = None if self._lib is None else _spans(self.tensors)
        self._sums = (ctypes.c_double * len(self.tensors))()

    def __call__(self) -> float:
        if self._lib is None:
            return sum_of_squares(self.tensors)
        self._lib.ds_sum_of_squares(self._spans, len(self.tensors), self._sums, torch.get_num_threads())
        return float(sum(self._sums))


def _spans(tensors: Sequence[Tensor]) -> ctypes.Array[NativeSpan]:
    return (NativeSpan * len(tensors))(*[(t.data_ptr(), t.numel(), DTYPE_CODES[t.dtype]) for t in tensors])


HOST_PIECE, DEVICE_PIECE = 1 << 20, 1 << 22
"""Elements that are widened to fp64 at a time: 8 and 32 MiB. More on devices, where each chunk is a few launches."""


def _sum_of_squares(tensor: Tensor) -> Tensor:
    """Return an fp64 scalar on the tensor's device. Works in chunks, as fp64 copies of everything would take 16 bytes
    per element."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    piece = min(flat.numel(), HOST_PIECE if tensor.device.type == "cpu" else DEVICE_PIECE)
    wide = torch.empty(piece, dtype=torch.float64, device=tensor.device)
    for chunk in flat.split(piece or 1):
        total += wide[: chunk.numel()].copy_(chunk).square_().sum()
    return total


def scale_copy(outputs: Iterable[Tensor], inputs: Iterable[Tensor], scale: float = 1.0) -> None:
    """Compute `output = input * scale` for each pair, converted; fp32 product, rounded once. An output may be its own
    input."""
    pairs = list(zip(outputs, inputs, strict=True))
    lib = library()
    if lib is None or not all(is_native(o) and is_native(i) for o, i in pairs):
        for output, source in pairs:
            output.copy_(_widest(source) * scale)
        return
    copies = (Copy * len(pairs))(
        *[
            (o.data_ptr(), i.data_ptr(), i.numel(), DTYPE_CODES[o.dtype], DTYPE_CODES[i.dtype])
            for o, i in pairs
        ]
    )
    lib.ds_scale_copy(copies, len(pairs), scale, torch.get_num_threads())


def copy_bytes(runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy host memory: (target address, source address, bytes) each. Large copies bypass the cache, as other cores
    read them, or later. Releases the GIL."""
    lib = library()
    if lib is None:
        for target, source, nbytes in runs:
            ctypes.memmove(target, source, nbytes)
        return
    lib.ds_copy_bytes((Bytes * len(runs))(*runs), len(runs), torch.get_num_threads())


def crc32_blocks(address: int, nbytes: int, block: int) -> np.ndarray:
    """Return zlib's CRC-32 of each block of the bytes at `address`: [blocks] uint32. Releases the GIL."""
    crcs = np.empty(-(-nbytes // block), dtype=np.uint32)
    lib = library()
    if lib is None or not lib.ds_crc32_blocks(address, nbytes, block, crcs.ctypes.data):
        data = memoryview((ctypes.c_ubyte * nbytes).from_address(address))
        crcs[:] = [zlib.crc32(data[start : start + block]) for start in range(0, nbytes, block)]
    return crcs


def reduce_chunks(output: Tensor, inputs: Sequence[Tensor], scale: float = 1.0) -> None:
    """Compute `output = (inputs[0] + inputs[1] + ...) * scale`: summed in this order in fp32 (fp64 and integers keep
    their dtype), rounded once to the output's dtype. All have the same number of elements, and all inputs the
    same dtype; the output may be one of the inputs."""
    lib = library()
    if lib is not None and is_native(output) and all(map(is_native, inputs)):
        pointers = (ctypes.c_void_p * len(inputs))(*[t.data_ptr() for t in inputs])
        target, source = (output.data_ptr(), DTYPE_CODES[output.dtype]), DTYPE_CODES[inputs[0].dtype]
        given = (pointers, len(inputs), source, output.numel())
        lib.ds_reduce_chunks(*target, *given, scale, torch.get_num_threads())
        return
    total = _widest(inputs[0]).clone()
    for chunk in inputs[1:]:
        total += chunk
    output.copy_(total if scale == 1.0 else total * scale)


def _widest(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of its sums."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
