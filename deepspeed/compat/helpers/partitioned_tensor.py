"""A tensor sharded over a group: every rank holds one slice."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.ops.partitions import partition_uniform


class PartitionedTensor:
    """One flat, contiguous shard of `tensor` per rank of `group`; `full()` reassembles the tensor.

    Shards differ by at most one element; earlier ranks hold the longer ones. To rebuild the object, another
    rank needs only its own shard and `to_meta()`, an int64 tensor: number of dimensions, sizes, number of
    ranks, rank, and where the shard of each rank begins (ending with the total).
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Tensor | None = None) -> None:
        self.group = group
        self.num_parts = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)
        self.orig_size = list(tensor.shape)
        self.orig_device = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        if partition_meta is not None:
            self.partition = _read_meta(partition_meta)[3]
        begin, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[begin:end].clone()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: Any, device: torch.device | str | None = None
    ) -> PartitionedTensor:
        """The tensor that `to_meta()` describes, with `local_part` as this rank's shard."""
        sizes, num_parts, rank, partition = _read_meta(meta)
        ranks = torch.distributed.get_world_size(group)
        if num_parts != ranks or partition[rank + 1] - partition[rank] != local_part.numel():
            raise RuntimeError(
                f"The meta tensor describes {partition[rank + 1] - partition[rank]} elements on each of {num_parts} "
                f"ranks; here are {local_part.numel()} elements in a group of {ranks}."
            )
        made = cls.__new__(cls)
        made.group, made.num_parts, made.rank, made.partition = group, num_parts, rank, partition
        made.orig_size = sizes
        made.orig_device = torch.device(get_accelerator().current_device_name() if device is None else device)
        made.local_data = local_part
        return made

    def full(self, device: torch.device | str | None = None) -> Tensor:
        """The whole tensor, on `device` or where it was. Collective over the group."""
        longest = max((end - begin for begin, end in self._bounds()), default=0)
        padded = self.local_data.new_zeros(longest)  # collectives require equal shards
        padded[: self.local_data.numel()] = self.local_data
        shares = [torch.empty_like(padded) for _ in range(self.num_parts)]
        torch.distributed.all_gather(shares, padded, group=self.group)
        kept = [share[: end - begin] for share, (begin, end) in zip(shares, self._bounds(), strict=True)]
        return torch.cat(kept).view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> Tensor:
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=self.orig_device)

    def data(self) -> Tensor:
        """This rank's shard, flat."""
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size

    def _bounds(self) -> list[tuple[int, int]]:
        return list(zip(self.partition, self.partition[1:], strict=False))


def _read_meta(meta: Tensor) -> tuple[list[int], int, int, list[int]]:
    """(sizes, number of ranks, rank, bounds of the shards)."""
    numbers = meta.tolist()
    dims = numbers[0]
    sizes, (num_parts, rank), partition = (
        numbers[1 : dims + 1],
        numbers[dims + 1 : dims + 3],
        numbers[dims + 3 :],
    )
    if len(partition) != num_parts + 1 or partition[-1] != math.prod(sizes):
        raise RuntimeError(f"{numbers} does not describe a partitioned tensor")
    return sizes, num_parts, rank, partition
