"""Counting the tensor memory of a device exactly and without computing: tensors on "meta" are those of the device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MetaMemory(TorchDispatchMode):
    """``now`` and ``peak``: bytes of storages on meta that came into being inside and are alive, and the most of them;
    ``host`` and ``host_peak``: likewise on the CPU.

    What an operator needs inside itself does not count. Copies between the host and the device do nothing. Storages
    count from the operation that first returns them; what is older counts if it was given to `adopt`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = {"meta": 0, "cpu": 0}
        self._peak = {"meta": 0, "cpu": 0}
        self._seen: set[int] = set()
        self._shapes: dict[Any, Any] = {}

    now = property(lambda self: self._now["meta"])
    peak = property(lambda self: self._peak["meta"])
    host = property(lambda self: self._now["cpu"])
    host_peak = property(lambda self: self._peak["cpu"])

    def restart(self) -> None:
        """Peaks are those from here on."""
        self._peak = dict(self._now)

    def adopt(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and _apart(args[0], args[1]):
            return args[0]
        result = self._shaped(func, args, kwargs)
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._add(each)
        return result

    def _shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the operator. Shapes of new tensors are cached, since torch computes them slowly."""
        leaves = tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if not tensors or not all(each.is_meta for each in tensors):
            return func(*args, **kwargs)
        schema = func._schema
        if torch.Tag.pointwise in func.tags and schema.name.endswith("_"):  # in place
            return args[0]
        if any(each.alias_info for each in (*schema.arguments, *schema.returns)):
            return func(*args, **kwargs)
        key = (func, *(_shape(each) if isinstance(each, Tensor) else each for each in leaves))
        found = self._shapes.get(key)
        if found is None:
            result = func(*args, **kwargs)
            whole = result if isinstance(result, tuple) else (result,)
            if all(isinstance(each, Tensor) for each in whole):
                self._shapes[key] = (isinstance(result, tuple), [_shape(each) for each in whole])
            return result
        several, shapes = found
        made = [
            torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in shapes
        ]
        return tuple(made) if several else made[0]

    def _add(self, tensor: Tensor) -> None:
        storage, kind = tensor.untyped_storage(), tensor.device.type
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self._now[kind] += size
        self._peak[kind] = max(self._peak[kind], self._now[kind])
        weakref.finalize(storage, self._forget, key, kind, size)

    def _forget(self, key: int, kind: str, size: int) -> None:
        self._seen.discard(key)
        self._now[kind] -= size


def _shape(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _apart(one: Tensor, other: Tensor) -> bool:
    return one.device != other.device and "meta" in (one.device.type, other.device.type)
