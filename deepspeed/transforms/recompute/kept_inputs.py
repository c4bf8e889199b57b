"""Storage of a checkpointed region's inputs until backward recomputes it.

Used as saved-tensors hooks: ``pack`` when autograd saves an input, ``unpack`` when backward needs it. An input can be
partitioned across a group of ranks that hold replicas of it, offloaded to host memory, and placed in a persistent
buffer (so that long-lived inputs do not fragment memory between short-lived tensors), in any combination.

[Note: fetched ahead] Backward needs inputs in reverse order. When it requests one from host memory, the copy of the
preceding one starts, overlapping computation; at most two are on the device at a time.
"""

from __future__ import annotations

import weakref
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator
from deepspeed.transforms.recompute.side_stream import SideStream
from deepspeed.zero.offload.host_copies import has_own_memory


class InputSlot:
    """A slot of an arena; returned when its last reference is dropped."""

    def __init__(self, tensor: Tensor, free: list[Tensor]) -> None:
        self.tensor = tensor
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.tensor)


class Arena:
    """Buffers of ``slots_per_buffer`` equal slots for each size, dtype and device; another buffer is added when all
    slots are taken.
    """

    def __init__(self, slots_per_buffer: int) -> None:
        self.slots_per_buffer = slots_per_buffer
        self._free: dict[tuple[int, torch.dtype, torch.device, bool], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, pinned: bool) -> InputSlot:
        free = self._free.setdefault((numel, dtype, device, pinned), [])
        if not free:
            buffer = torch.empty(self.slots_per_buffer * numel, dtype=dtype, device=device, pin_memory=pinned)
            free.extend(buffer.split(numel))
        return InputSlot(free.pop(), free)

    def clear(self) -> None:
        """Drop the buffers; slots in use stay valid."""
        self._free = {}


@dataclass(eq=False)
class KeptInput:
    """One kept input. ``local``: [ceil(numel / ranks)], this rank's part, padded with zeros.

    ``before``: the preceding input in host memory; ``fetched``: its copy to the device, in flight or complete.
    """

    local: Tensor
    slot: InputSlot | None
    shape: torch.Size
    device: torch.device
    before: weakref.ref[KeptInput] | None = None
    fetched: Tensor | None = None


@dataclass(eq=False)
class HostInputs:
    """Inputs of one owner in host memory: the last one, and the stream for copies."""

    last: weakref.ref[KeptInput] | None = None
    stream: SideStream = field(default_factory=SideStream)

    def add(self, kept: KeptInput) -> None:
        kept.before, self.last = self.last, weakref.ref(kept)

    def take(self, kept: KeptInput) -> Tensor:
        """Return ``kept.local`` on its device, and start fetching the preceding one (Note: fetched ahead)."""
        found = self.stream.arrived(kept.fetched if kept.fetched is not None else self._fetch(kept))
        kept.fetched = None
        before = kept.before() if kept.before is not None else None
        if before is not None and before.fetched is None:
            before.fetched = self._fetch(before)
        return found

    def _fetch(self, kept: KeptInput) -> Tensor:
        return self.stream.copy(kept.local, torch.empty_like(kept.local, device=kept.device))


@dataclass(eq=False)
class KeptInputs:
    """``pack`` and ``unpack`` for one configuration. All ranks of the group must call them in the same order."""

    communicator: Communicator
    _: KW_ONLY
    offload: bool
    arena: Arena | None
    host_inputs: HostInputs = field(default_factory=HostInputs)

    def pack(self, tensor: Tensor) -> Any:
        # Masks and positions are small, and differ between ranks in some models: they are kept unchanged.
        if not tensor.is_floating_point() or tensor.numel() < self.communicator.size:
            return tensor
        numel = -(-tensor.numel() // self.communicator.size)
        start = self.communicator.rank * numel
        part = tensor.detach().reshape(-1)[start : start + numel]  # this rank's elements
        to_host = self.offload and has_own_memory(tensor.device)
        device = torch.device("cpu") if to_host else tensor.device
        pinned = to_host and tensor.device.type == "cuda"
        if self.arena is not None:
            slot = self.arena.take(numel, tensor.dtype, device, pinned)
            local = slot.tensor
        elif numel == tensor.numel() and not to_host:
            return tensor  # neither partitioned nor moved
        else:
            slot = None
            local = torch.empty(numel, dtype=tensor.dtype, device=device, pin_memory=pinned)
        local[part.numel() :].zero_()
        kept = KeptInput(local, slot, tensor.shape, tensor.device)
        if to_host:
            self.host_inputs.stream.copy(part, local[: part.numel()])
            self.host_inputs.add(kept)
        else:
            local[: part.numel()].copy_(part)
        return kept

    def unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, KeptInput):
            return kept
        away = self.offload and has_own_memory(kept.device)
        local = self.host_inputs.take(kept) if away else kept.local
        if self.communicator.size > 1:
            full = torch.empty(local.numel() * self.communicator.size, dtype=local.dtype, device=kept.device)
            self.communicator.all_gather(full, local).wait()
        else:
            # Cloned, because the slot returns to the arena while the recomputed region may still hold its input.
            full = local.clone() if local is kept.local and kept.slot is not None else local
        return full[: kept.shape.numel()].view(kept.shape)
