"""Page-locked host memory of this package's own (`memory.py`), by the names of `deepspeed.utils.pin_memory`."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from deepspeed.ops.aio.memory import LockedMemory

BACKEND = "DS_PIN_MEMORY_BACKEND"


class NativePinnedMemory:
    """Tensors in locked memory, which is free again when the last tensor on it is gone."""

    def __init__(self) -> None:
        self._memory = LockedMemory()
        self._ends: dict[int, int] = {}
        """First address of what was given out -> the address after it."""

    def pin(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """A tensor of this size in locked memory; ``match_shape=False``: flat."""
        shape = tensor.shape if match_shape else (tensor.numel(),)
        made = self.pin_empty(tensor, shape)
        return made.copy_(tensor.reshape(shape)) if make_copy else made

    def pin_empty(self, example: Tensor, shape: Sequence[int]) -> Tensor:
        """Of ``example`` only the dtype counts."""
        flat = self._memory.new(prod(shape), example.dtype)
        start = flat.data_ptr()
        self._ends[start] = start + flat.nbytes
        weakref.finalize(flat, self._ends.pop, start, None)  # views keep it alive
        made = flat.view(tuple(shape))
        made.ds_pinned, made.ds_pin_base = True, start  # type: ignore[attr-defined]
        return made

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it, or what it is a view of, came from here."""
        if getattr(tensor, "ds_pinned", False):
            return True
        if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return False  # no address in host memory
        at = tensor.data_ptr()
        return any(start <= at < end for start, end in self._ends.items())

    def unpin(self, tensor: Tensor) -> bool:
        """Forget it and its views. False: it did not come from here."""
        start = getattr(tensor, "ds_pin_base", None)
        known = self._ends.pop(tensor.data_ptr() if start is None else start, None) is not None
        if hasattr(tensor, "ds_pinned"):
            tensor.ds_pinned = False  # type: ignore[attr-defined]
        self._memory.free(tensor)
        return known


@functools.cache
def get_native_pinned_memory() -> NativePinnedMemory:
    """The one of this process."""
    return NativePinnedMemory()


def get_active_native_pinned_memory() -> NativePinnedMemory | None:
    """The one of this process if ``DS_PIN_MEMORY_BACKEND`` is "native", else None."""
    is_wanted = os.environ.get(BACKEND, "torch").strip().lower() == "native"
    return get_native_pinned_memory() if is_wanted else None
