"""How the inputs of a checkpointed region are kept until backward recomputes it.

Used as saved-tensors hooks: ``pack`` when autograd saves an input, ``unpack`` when backward asks for it.
Three things can be done to an input, alone or together: partition it across a group of ranks that all
hold the same one, move it to host memory, and put it into a buffer that lives as long as training does
(so that long-lived inputs do not fragment the memory between short-lived tensors).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator


class Slot:
    """A piece of an arena; returned when its last reference is dropped."""

    def __init__(self, tensor: Tensor, free: list[Tensor]) -> None:
        self.tensor = tensor
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.tensor)


class Arena:
    """Buffers of ``slots_per_buffer`` equal pieces for each size, dtype and device; another one is added when
    all pieces are taken.
    """

    def __init__(self, slots_per_buffer: int) -> None:
        self.slots_per_buffer = slots_per_buffer
        self._free: dict[tuple[int, torch.dtype, torch.device, bool], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, pinned: bool) -> Slot:
        free = self._free.setdefault((numel, dtype, device, pinned), [])
        if not free:
            buffer = torch.empty(self.slots_per_buffer * numel, dtype=dtype, device=device, pin_memory=pinned)
            free.extend(buffer.split(numel))
        return Slot(free.pop(), free)

    def clear(self) -> None:
        """Drops the buffers; pieces in use stay valid."""
        self._free = {}


@dataclass(frozen=True, slots=True)
class Kept:
    """One kept input. ``local``: [ceil(numel / ranks)], this rank's part, padded with zeros."""

    local: Tensor
    slot: Slot | None
    shape: torch.Size
    device: torch.device


class KeptInputs:
    """``pack`` and ``unpack`` for one configuration. All ranks of the group pack and unpack in the same
    order.
    """

    def __init__(self, communicator: Communicator, *, offload: bool, arena: Arena | None) -> None:
        self._communicator = communicator
        self._offload = offload
        self._arena = arena

    def pack(self, tensor: Tensor) -> Any:
        # Masks and positions are small, and in some models differ between ranks: they stay as they are.
        if not tensor.is_floating_point() or tensor.numel() < self._communicator.size:
            return tensor
        part = self._part(tensor)
        to_host = self._offload and tensor.device.type != "cpu"
        device = torch.device("cpu") if to_host else tensor.device
        numel = -(-tensor.numel() // self._communicator.size)
        if self._arena is not None:
            slot = self._arena.take(numel, tensor.dtype, device, to_host)
            local = slot.tensor
        elif numel == tensor.numel() and not to_host:
            return tensor  # whole, and where it is
        else:
            slot = None
            local = torch.empty(numel, dtype=tensor.dtype, device=device, pin_memory=to_host)
        # Copies to and from pinned memory are ordered by the stream, so the host need not wait for them.
        local[: part.numel()].copy_(part, non_blocking=to_host)
        local[part.numel() :].zero_()
        return Kept(local, slot, tensor.shape, tensor.device)

    def unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, Kept):
            return kept
        local = kept.local.to(kept.device, non_blocking=True)
        if self._communicator.size > 1:
            full = torch.empty(local.numel() * self._communicator.size, dtype=local.dtype, device=kept.device)
            self._communicator.all_gather(full, local).wait()
        else:
            # The piece returns to the arena while the recomputed region may still hold its input.
            full = local.clone() if local is kept.local and kept.slot is not None else local
        return full[: kept.shape.numel()].view(kept.shape)

    def _part(self, tensor: Tensor) -> Tensor:
        """This rank's elements of the flattened tensor."""
        size, rank = self._communicator.size, self._communicator.rank
        numel = -(-tensor.numel() // size)
        return tensor.detach().reshape(-1)[rank * numel : (rank + 1) * numel]
