"""Sequence chunks offloaded to host memory between uses, and prefetched to the device one ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepspeed.transforms.recompute.side_stream import SideStream
from deepspeed.zero.offload.host_copies import has_own_memory

HOST = torch.device("cpu")


class SequenceChunk:
    """A tensor in host memory, with a second copy on the device while it is in use.

    Copies overlap computation and run in the order in which they were requested. If the device is the host, there is
    only one tensor, and nothing is copied.

    Args:
        chunk: a tensor of any shape on ``device`` (or in host memory already).
        device: device on which it is used. None: that of ``chunk``.
        is_in_use: whether ``chunk`` stays on the device until `offload`.
        stream: stream for copies. None: a new one.
        away: False keeps the tensor on the device permanently, with the same interface.
    """

    def __init__(
        self,
        chunk: Tensor,
        device: torch.device | str | None = None,
        is_in_use: bool = False,
        *,
        stream: SideStream | None = None,
        away: bool = True,
    ) -> None:
        self.device = chunk.device if device is None else torch.device(device)
        self.chunk_shape, self.chunk_dtype = chunk.shape, chunk.dtype
        self._stream = SideStream() if stream is None else stream
        self._away = away and has_own_memory(self.device)
        chunk = chunk.detach()
        if not self._away:
            self.cpu_chunk, self._on_device = chunk, chunk
            return
        self.cpu_chunk = chunk
        if has_own_memory(chunk.device):
            pinned = chunk.device.type == "cuda"
            self.cpu_chunk = torch.empty(chunk.shape, dtype=chunk.dtype, device=HOST, pin_memory=pinned)
            self._stream.copy(chunk, self.cpu_chunk)
        self._on_device = chunk if is_in_use and chunk.device == self.device else None
        if is_in_use and self._on_device is None:
            self.load_to_gpu()

    def load_to_gpu(self) -> None:
        """Start the copy to the device, unless it is there already."""
        if self._on_device is None:
            target = torch.empty(self.chunk_shape, dtype=self.chunk_dtype, device=self.device)
            self._on_device = self._stream.copy(self.cpu_chunk, target)

    def get_gpu_chunk(self) -> Tensor:
        """Return the tensor on the device, ready for the current stream. RuntimeError: it is not there."""
        chunk = self._checked()
        return self._stream.arrived(chunk) if self._away else chunk

    def _checked(self) -> Tensor:
        if self._on_device is None:
            raise RuntimeError(
                f"this chunk of shape {list(self.chunk_shape)} is in host memory: call load_to_gpu() first"
            )
        return self._on_device

    def offload(self) -> None:
        """Free the copy on the device. Changes to it are lost unless `overwrite_to_cpu` was called before."""
        if self._away:
            self._on_device = None

    def overwrite_to_cpu(self) -> None:
        """Copy the tensor on the device back to host memory. RuntimeError: it is not on the device."""
        chunk = self._checked()
        if self._away:
            self._stream.copy(chunk, self.cpu_chunk)


class Prefetcher:
    """Iterates over groups of chunks, yielding their tensors on the device while the next group is being fetched.

    ``written``: positions in a group that the consumer modifies, to be copied back. A group is evicted from the device
    when the next one is requested. The first group is fetched on construction.
    """

    def __init__(self, groups: Sequence[Sequence[SequenceChunk]], written: Sequence[int] = ()) -> None:
        self._groups = groups
        self._written = written
        self._load(0)

    def __iter__(self) -> Iterator[list[Tensor]]:
        before: Sequence[SequenceChunk] = ()
        for at, group in enumerate(self._groups):
            # Waits for the copies requested so far: this group, but not yet the write-back of the previous one.
            tensors = [chunk.get_gpu_chunk() for chunk in group]
            self._release(before)
            self._load(at + 1)
            yield tensors
            del tensors
            before = group
        self._release(before)

    def _load(self, at: int) -> None:
        for chunk in self._groups[at] if at < len(self._groups) else ():
            chunk.load_to_gpu()

    def _release(self, group: Sequence[SequenceChunk]) -> None:
        for at in self._written if group else ():
            group[at].overwrite_to_cpu()
        for chunk in group:
            chunk.offload()
