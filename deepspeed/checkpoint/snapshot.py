"""A copy of what a checkpoint's files hold, in host memory, so that training goes on while they are written."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.archive import LazyTensor

_ALIGNMENT = 64


class Snapshot:
    """Copies nested containers of tensors. The memory is kept for the next copy: new pages cost as much as copying."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Of the memory that is kept."""
        return self._memory.numel()

    def take(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """``contents`` with each tensor copied; it is valid until the next call. Tensors that share memory completely
        share their copy."""
        found = {_key(tensor): tensor for tensor in _tensors(contents)}
        offsets, end = {}, 0
        for key, tensor in found.items():
            offsets[key] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # released before the larger one is taken
            self._memory = torch.empty(end, dtype=torch.uint8)
        copies = {key: self._copied(tensor, offsets[key]) for key, tensor in found.items()}
        return {name: _rebuilt(content, copies) for name, content in contents.items()}

    def _copied(self, tensor: Tensor | LazyTensor, offset: int) -> Tensor:
        place = self._memory[offset : offset + tensor.nbytes].view(tensor.dtype)
        if isinstance(tensor, LazyTensor):
            start = 0
            for part in tensor.parts():
                place[start : start + part.numel()].copy_(part.detach().reshape(-1))
                start += part.numel()
            return place.view(tensor.shape)
        copied = place.view(tensor.shape).copy_(tensor.detach())
        if type(tensor) in (torch.nn.Parameter, torch.nn.Buffer):
            return type(tensor)(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)


def _is_plain(value: Any) -> bool:
    return (
        type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and value.device.type != "meta"
    )


def _key(value: Tensor | LazyTensor) -> Any:
    if isinstance(value, LazyTensor):
        return id(value)
    return (
        type(value), value.device, value.data_ptr() or id(value), value.dtype, tuple(value.shape), value.stride(),
        value.requires_grad,
    )  # fmt: skip


def _tensors(value: Any) -> Iterator[Tensor | LazyTensor]:
    if isinstance(value, LazyTensor) or _is_plain(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif type(value) in (list, tuple):
        for item in value:
            yield from _tensors(item)


def _rebuilt(value: Any, copies: Mapping[Any, Tensor]) -> Any:
    """``value`` with its tensors replaced and everything that can change copied."""
    if isinstance(value, LazyTensor) or _is_plain(value):
        return copies[_key(value)]
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = _rebuilt(item, copies)
        return made
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, copies) for item in value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.Size)):
        return value
    return copy.deepcopy(value)
