"""Encoding of messages as numbers and bytes: any nest of tuples, lists and dicts of tensors, None, bool, int, float and
str.

The *outline* of a message is the nest with each tensor's dtype, shape and whether its gradient comes back in its place.
It is sent as int64 words. Messages with equal words differ only in the bytes of their tensors.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages.values import map_leaves

DTYPES = (
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
PLAIN = (bool, int, float, str)
ALIGNMENT = 64
"""Tensors start at multiples of this many bytes, as torch's own allocations do."""


class TensorSpec(NamedTuple):
    """A tensor of a message; ``start``: offset of its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape) * self.dtype.itemsize


class Outline(NamedTuple):
    """A message without the bytes of its tensors: ``nest`` has the ``specs``, in this order, where they were."""

    nest: Any
    specs: list[TensorSpec]

    @classmethod
    def of(cls, value: Any, tensors: Sequence[Tensor]) -> Outline:
        """Return the outline of ``value``, of which ``describe`` returned these tensors."""
        specs: list[TensorSpec] = []
        start = 0
        for tensor in tensors:
            specs.append(TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.requires_grad, start))
            start = -(-specs[-1].stop // ALIGNMENT) * ALIGNMENT
        left = iter(specs)
        return cls(map_leaves(value, Tensor, lambda _: next(left)), specs)

    @property
    def nbytes(self) -> int:
        return self.specs[-1].stop if self.specs else 0

    def words(self) -> list[int]:
        text = pickle.dumps(tuple(self))
        return array(
            "q", text.ljust(-(-len(text) // 8) * 8, b"\0")
        ).tolist()  # pickle ignores what follows its end

    @classmethod
    def of_words(cls, words: Sequence[int]) -> Outline:
        return cls(*pickle.loads(array("q", words).tobytes()))

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the bytes of a message, uint8 [nbytes]; a single contiguous tensor is not copied."""
        if len(tensors) == 1:
            return tensors[0].detach().contiguous().view(-1).view(torch.uint8)
        packed = torch.empty(self.nbytes, dtype=torch.uint8, device=tensors[0].device if tensors else None)
        self.pack_into(packed, tensors)
        return packed

    def pack_into(self, packed: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the bytes of a message into ``packed``, uint8 [nbytes]."""
        for tensor, spec in zip(tensors, self.specs, strict=True):
            _part(packed, spec).copy_(tensor.detach())

    def unpack(self, packed: Tensor) -> Any:
        """Reconstruct the message from its bytes. Each tensor has its own version counter, though they share memory."""
        return map_leaves(
            self.nest, TensorSpec, lambda spec: _part(packed, spec).data.requires_grad_(spec.needs_grad)
        )


def describe(value: Any) -> tuple[list[Any], list[Tensor]]:
    """Return marks, which are equal for messages with equal outlines, and the tensors of ``value`` in order. Runs for
    every message. PipelineError: ``value`` holds an unsupported type."""
    marks: list[Any] = []
    tensors: list[Tensor] = []
    _describe(value, marks, tensors)
    return marks, tensors


def _describe(value: Any, marks: list[Any], tensors: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES or value.layout != torch.strided:
            raise PipelineError(f"stages cannot send tensors of {value.dtype} and {value.layout}")
        marks += value.dtype, value.shape, value.requires_grad
        tensors.append(value)
    elif type(value) in (tuple, list):
        marks += type(value), len(value)
        for item in value:
            _describe(item, marks, tensors)
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        marks += dict, len(value), *value
        for item in value.values():
            _describe(item, marks, tensors)
    elif value is None or isinstance(value, PLAIN):
        kind: Any = next((each for each in PLAIN if isinstance(value, each)), type(None))
        marks += type(value), kind.__repr__(value)  # a subclass's own could leave digits out
    else:
        raise PipelineError(
            f"a layer returned {type(value).__name__}, which stages cannot send: return tensors, None, "
            "bool, int, float or str, alone or in tuples, lists and dicts with str keys"
        )


def _part(packed: Tensor, spec: TensorSpec) -> Tensor:
    return packed[spec.start : spec.stop].view(spec.dtype).view(spec.shape)
