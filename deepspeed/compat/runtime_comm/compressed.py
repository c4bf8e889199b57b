"""The 1-bit compressed all-reduce under its documented names, for scripts that call it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm.collectives import communicator
from deepspeed.ops.formats.codecs import pack_signs, unpack_signs


class CompressedBackend:
    """Averages over the data-parallel ranks of ``mpu`` (default: all ranks) with one bit per element each way and error
    feedback (H. Tang et al. 2021). Works with every backend of torch.distributed."""

    def __init__(self, mpu: Any = None) -> None:
        self.world_group: Any = dist.group.WORLD if mpu is None else mpu.get_data_parallel_group()
        self.ranks = communicator(self.world_group)
        self.rank, self.size = self.ranks.rank, self.ranks.size

    def pack(self, buffer: Tensor, size: int) -> Tensor:
        """Return the signs of ``buffer`` in ``size`` equal rows, 8 to a byte: uint8 [size, bytes]."""
        return pack_signs(buffer.reshape(size, -1))

    def unpack(self, buffer: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Return the signs as +1 and -1: [size, 8 * bytes]."""
        rows = buffer.reshape(size, -1)
        return unpack_signs(rows, rows.shape[1] * 8).to(dtype)

    def compressed_allreduce(
        self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: Any = None
    ) -> Tensor:
        """Replace ``buffer_m`` by the mean over ranks of its signs times its root mean square, and return it.

        Args:
            buffer_m: any shape; padded with zeros to the size of ``worker_error``.
            worker_error: 1-D, its length a multiple of the ranks: error feedback of this rank's signs, updated in
                place.
            server_error: 1-D, ``worker_error.numel()`` divided by the ranks: error feedback of the mean's signs,
                updated in place.
            local_rank: ignored.

        ValueError: the sizes do not match.
        """
        part = server_error.numel()
        if worker_error.numel() != part * self.size or worker_error.numel() < buffer_m.numel():
            raise ValueError(
                f"compressed_allreduce over {self.size} ranks: worker_error has {worker_error.numel()} elements, which "
                f"must be at least the buffer's {buffer_m.numel()} and {self.size} times those of server_error ({part})"
            )
        numel = buffer_m.numel()
        wanted = torch.zeros(self.size, part, dtype=torch.float32, device=buffer_m.device)
        wanted.view(-1)[:numel] = buffer_m.detach().reshape(-1)
        wanted.add_(worker_error.view(self.size, part))
        scale = _scale(wanted)
        worker_error.copy_((wanted - scale * _signs(wanted)).view(-1))
        packed = pack_signs(wanted)
        received = torch.empty_like(packed)
        scales = torch.empty(self.size, device=buffer_m.device)
        waiting = (
            self.ranks.all_to_all(received.view(-1), packed.view(-1)),
            self.ranks.all_gather(scales, scale.view(1)),
        )
        for pending in waiting:
            pending.wait()
        average = (unpack_signs(received, part) * scales.unsqueeze(-1)).sum(0) / self.size
        average.add_(server_error)
        mine, own_scale = pack_signs(average), _scale(average)
        server_error.copy_(average - own_scale * _signs(average))
        everyone = torch.empty_like(packed)
        waiting = (
            self.ranks.all_gather(everyone.view(-1), mine),
            self.ranks.all_gather(scales, own_scale.view(1)),
        )
        for pending in waiting:
            pending.wait()
        whole = (unpack_signs(everyone, part) * scales.unsqueeze(-1)).view(-1)[:numel]
        buffer_m.data.copy_(whole.view(buffer_m.shape))
        return buffer_m


def _scale(values: Tensor) -> Tensor:
    """Return the root mean square."""
    return values.norm() / values.numel() ** 0.5


def _signs(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0)


# The compressed all-reduce under its name for NCCL.


class NcclBackend(CompressedBackend):
    """``CompressedBackend``; the transport is that of the process group."""
