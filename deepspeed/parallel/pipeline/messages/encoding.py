"""Encoding of messages as numbers and bytes: any nest of tuples, lists and dicts of tensors, None, bool, int, float and
str.

A message is *described* by a list of int64: the nest, the values that are not tensors, and each tensor's dtype, shape
and whether its gradient comes back. Messages with equal descriptions differ only in the bytes of their tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from deepspeed.parallel.pipeline.errors import PipelineError

DTYPES = (
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
_NONE, _BOOL, _INT, _FLOAT, _STR, _TENSOR, _TUPLE, _LIST, _DICT = range(9)
ALIGNMENT = 64
"""Tensors start at multiples of this many bytes, as torch's own allocations do."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a message; ``start``: offset of its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def describe(value: Any) -> tuple[list[int], list[Tensor]]:
    """Return the description of ``value`` and its tensors in order. PipelineError: it holds an unsupported type."""
    words: list[int] = []
    tensors: list[Tensor] = []
    _describe(value, words, tensors)
    return words, tensors


def _describe(value: Any, words: list[int], tensors: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES or value.layout != torch.strided:
            raise PipelineError(f"stages cannot send tensors of {value.dtype} and {value.layout}")
        flags = int(value.requires_grad)
        words += [_TENSOR, DTYPES.index(value.dtype), flags, value.dim(), *value.shape]
        tensors.append(value)
    elif value is None:
        words.append(_NONE)
    elif isinstance(value, bool):
        words += [_BOOL, int(value)]
    elif isinstance(value, int):
        words += [_INT, value]
    elif isinstance(value, float):
        words += [_FLOAT, *struct.unpack("<q", struct.pack("<d", value))]
    elif isinstance(value, str):
        data = value.encode()
        words += [_STR, len(data), *data]
    elif type(value) in (tuple, list):
        words += [_TUPLE if type(value) is tuple else _LIST, len(value)]
        for item in value:
            _describe(item, words, tensors)
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        words += [_DICT, len(value)]
        for key, item in value.items():
            _describe(key, words, tensors)
            _describe(item, words, tensors)
    else:
        raise PipelineError(
            f"a layer returned {type(value).__name__}, which stages cannot send: return tensors, None, "
            "bool, int, float or str, alone or in tuples, lists and dicts with str keys"
        )


def specs(words: Sequence[int]) -> list[TensorSpec]:
    """Decode the tensor specs of a description."""
    found: list[TensorSpec] = []

    def tensor(dtype: torch.dtype, shape: tuple[int, ...], needs_grad: bool) -> None:
        start = found[-1].start + found[-1].nbytes if found else 0
        found.append(TensorSpec(dtype, shape, needs_grad, -(-start // ALIGNMENT) * ALIGNMENT))

    _rebuild(iter(words), tensor)
    return found


def total_bytes(found: Sequence[TensorSpec]) -> int:
    return found[-1].start + found[-1].nbytes if found else 0


def rebuild(words: Sequence[int], tensors: Sequence[Tensor]) -> Any:
    """Reconstruct the described value with these tensors."""
    left = iter(tensors)
    return _rebuild(iter(words), lambda *_: next(left))


def _rebuild(words: Iterator[int], tensor: Any) -> Any:
    kind = next(words)
    if kind == _TENSOR:
        dtype, flags, dims = DTYPES[next(words)], next(words), next(words)
        return tensor(dtype, tuple(next(words) for _ in range(dims)), bool(flags))
    if kind == _NONE:
        return None
    if kind == _BOOL:
        return bool(next(words))
    if kind == _INT:
        return next(words)
    if kind == _FLOAT:
        return struct.unpack("<d", struct.pack("<q", next(words)))[0]
    if kind == _STR:
        return bytes(next(words) for _ in range(next(words))).decode()
    count = next(words)
    if kind == _DICT:
        items = [(_rebuild(words, tensor), _rebuild(words, tensor)) for _ in range(count)]
        return dict(items)
    values = [_rebuild(words, tensor) for _ in range(count)]
    return tuple(values) if kind == _TUPLE else values


def pack(tensors: Sequence[Tensor], found: Sequence[TensorSpec]) -> Tensor:
    """Return the bytes of a message, uint8 [total_bytes]; a single contiguous tensor is not copied."""
    if len(tensors) == 1:
        return tensors[0].detach().contiguous().view(-1).view(torch.uint8)
    device = tensors[0].device if tensors else None
    packed = torch.empty(total_bytes(found), dtype=torch.uint8, device=device)
    pack_into(packed, tensors, found)
    return packed


def pack_into(packed: Tensor, tensors: Sequence[Tensor], found: Sequence[TensorSpec]) -> None:
    """Write the bytes of a message into ``packed``, uint8 [total_bytes]."""
    for tensor, spec in zip(tensors, found, strict=True):
        _part(packed, spec).copy_(tensor.detach())


def unpack(packed: Tensor, found: Sequence[TensorSpec]) -> list[Tensor]:
    """Return the tensors of a message. Each has its own version counter, though they share memory."""
    return [_part(packed, spec).data.requires_grad_(spec.needs_grad) for spec in found]


def _part(packed: Tensor, spec: TensorSpec) -> Tensor:
    return packed[spec.start : spec.start + spec.nbytes].view(spec.dtype).view(spec.shape)
