"""Owner of a parameter between ``zero.Init`` and ``initialize``: sharded individually, evenly, with padding.

There are no buckets yet, because blocks, optimizer groups, freezing and tying are not known.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepspeed.comm.collectives import Communicator
from deepspeed.zero import params as zero_params
from deepspeed.zero.offload.swap_file import SwapFile


class StandaloneShard:
    """Owner of ``shard`` [ceil(numel / ranks)], the documented ``ds_tensor`` of a parameter created under
    ``zero.Init``."""

    standalone = True
    persistent = False

    def __init__(
        self,
        param: nn.Parameter,
        communicator: Communicator,
        all_ranks: Communicator | None = None,
        swap: SwapFile | None = None,
    ) -> None:
        self.swap = swap
        self.communicator = communicator
        self.all_ranks = all_ranks or communicator
        self.numel = param.numel()
        size = communicator.size
        per_rank = -(-self.numel // size)
        start = min(communicator.rank * per_rank, self.numel)
        stop = min(start + per_rank, self.numel)
        shard = torch.zeros(per_rank, dtype=param.dtype, device=param.device)
        shard[: stop - start] = param.data.reshape(-1)[start:stop]
        self.shard = self._kept(shard)

    def _kept(self, shard: Tensor) -> Tensor:
        return shard if self.swap is None else self.swap.put(shard)

    def local_part(self, position: int) -> Tensor:
        """Return the shard for immediate reading or writing. OSError: the file that holds it was truncated."""
        if self.swap is not None:
            self.swap.check()
        return self.shard

    def read_param(self, position: int, out: Tensor) -> None:
        """Fill ``out`` with the whole parameter. Collective."""
        flat = out.view(-1)
        padded = self.shard.numel() * self.communicator.size
        whole = flat if padded == self.numel else torch.empty(padded, dtype=out.dtype, device=out.device)
        self.communicator.all_gather(whole, self.local_part(position)).wait()
        if whole is not flat:
            flat.copy_(whole[: self.numel])

    def write_param(self, position: int, value: Tensor) -> None:
        start = self.communicator.rank * self.shard.numel()
        part = value.detach().reshape(-1)[start : start + self.shard.numel()]
        self.local_part(position)[: part.numel()].copy_(part)

    def copy_of(self, param: nn.Parameter) -> nn.Parameter:
        """Return a new parameter whose own shard equals ``param``'s."""
        zero_params.sync_shard_dtype(param)
        copy = nn.Parameter(torch.empty_like(param.data), requires_grad=param.requires_grad)
        owner = object.__new__(type(self))
        owner.__dict__.update(self.__dict__)
        shard = self.local_part(0)
        owner.shard = shard.clone() if self.swap is None else self.swap.put(shard)
        zero_params.adopt_copy(copy, param, owner)
        return copy

    def cast(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        self.shard = self._kept(self.local_part(0).to(dtype))
        zero_params.adopt(param, self, 0)

    def shard_like_this(self, param: nn.Parameter) -> None:
        """Partition another parameter, still whole, over the same ranks."""
        shard_standalone(param, self.communicator, self.all_ranks, self.swap)


def shard_standalone(
    param: nn.Parameter,
    communicator: Communicator,
    all_ranks: Communicator | None = None,
    swap: SwapFile | None = None,
) -> None:
    """Shard a whole parameter across ``communicator``, with the values of rank 0 of ``all_ranks`` (the replicas
    included). ``swap``: file for the shard; None: memory. Collective."""
    with torch.inference_mode(False), torch.no_grad():
        param.data = param.data.contiguous()
        (all_ranks or communicator).broadcast(param.data.view(-1), src=0).wait()
        zero_params.convert(param, StandaloneShard(param, communicator, all_ranks, swap), 0, param.shape)
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    zero_params.mark([param], zero_params.ZeroParamStatus.NOT_AVAILABLE)
