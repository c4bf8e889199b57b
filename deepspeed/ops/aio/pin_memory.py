"""The op ``pin_memory``: host tensors in locked memory, without a handle for files."""

from __future__ import annotations

from torch import Tensor

from deepspeed.ops.aio.memory import LockedMemory, is_locked, is_pinned


class pin_handle:
    """Gives out locked tensors: the same memory as that of ``aio_handle``."""

    def __init__(self) -> None:
        self._locked = LockedMemory()

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A 1-D host tensor of the example's dtype in aligned, resident (and, if the limit allows, locked) memory."""
        if num_elem < 0:
            raise ValueError(f"new_cpu_locked_tensor: num_elem = {num_elem}: expected at least 0")
        return self._locked.new(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        """Release a tensor of ``new_cpu_locked_tensor``; its memory is freed with its last view. False: it is none."""
        return self._locked.free(locked_tensor)

    def is_pinned(self, buffer: Tensor) -> bool:
        """Return whether the tensor, or its base, is locked memory of any handle or memory pinned by torch."""
        return self._locked.holds(buffer) or is_locked(buffer) or is_pinned(buffer)
