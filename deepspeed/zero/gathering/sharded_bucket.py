"""Stage 3's bucket, whose parameters exist as one shard per rank and are gathered only around their use.

[Note: gather and reshard] Tensors that autograd saves (``weight.t()``) share the storage of the flat buffer, so
resharding frees the storage and keeps the tensor objects: ``param.data`` becomes an empty tensor (shape [0], the
documented contract) and the buffer's storage is resized to 0. Gathering resizes it again and fills it in place, which
makes the saved tensors valid again. The views are created once, outside inference mode, because a view created inside
it could never be trained.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.shards import ShardCut
from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.zero import params as zero_params
from deepspeed.zero.bucket import ParamBucket
from deepspeed.zero.layout import BucketLayout


class Status(enum.Enum):
    SHARDED = "only this rank's shard exists; parameters have shape [0]"
    GATHERING = "the buffer is allocated and shards are arriving"
    GATHERED = "parameters are views of the whole buffer"


class ShardedBucket(ParamBucket):
    """Bucket that owns ``shard`` [shard_numel] permanently, and the memory of ``full`` [padded_numel] while gathered.

    ``Transitions`` decides when; only it calls ``allocate``, ``arrived`` and ``reshard``.

    ``persistent`` buckets (small parameters) stay gathered and are refreshed after every update. ``communicator``
    joins the ranks that hold one copy, ``all_ranks`` those of all replicas (MiCS). ``store`` copies this rank's
    part of the whole bucket to ``shard``: on the device, or where shards are offloaded to; ``check_storage`` is called
    before an offloaded shard is accessed.
    """

    standalone = False

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[nn.Parameter],
        communicator: Communicator,
        *,
        persistent: bool,
        all_ranks: Communicator | None = None,
        store: Callable[[Tensor], Tensor] = torch.clone,
        check_storage: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(layout, params, communicator)
        self.store = store
        self.check_storage = check_storage
        self.all_ranks = all_ranks or communicator
        self.persistent = persistent
        self.lossy = False  # whether gathers round the weights
        self.status = Status.SHARDED
        self.transitions: Any = None  # set by its owner
        self.on_shards_written: Callable[[], None] = lambda: None
        self.device = self.params[0].device
        self.views: list[Tensor] = []
        self._empty = torch.empty(0, dtype=layout.dtype, device=self.device)
        self.nbytes = layout.padded_numel * self._empty.element_size()  # of the whole bucket

    def evict(self) -> None:
        self.transitions.evict(self.layout.index)

    def flatten(self) -> None:
        """Partition the parameters (whole, or sharded one by one under ``zero.Init``) into this bucket's shards.

        Peak: the bucket itself. The old memory of each parameter is freed as soon as it has been copied.
        """
        with torch.inference_mode(False), torch.no_grad():
            full = torch.zeros(self.layout.padded_numel, dtype=self.layout.dtype, device=self.device)
            for slot, param in zip(self.layout.slots, self.params, strict=True):
                view = full[slot.offset : slot.end].view(zero_params.full_shape(param))
                zero_params.read_full(param, view)
                param.data = self._empty
                self.views.append(view)
            start, stop = self.layout.shard_range(self.rank)
            self.full, self.shard = full, self.store(full[start:stop])
        for position, param in enumerate(self.params):
            zero_params.adopt(param, self, position)
        self.arrived()
        if not self.persistent:
            self.reshard()

    # Transitions --------------------------------------------------------------------------------------------

    def allocate(self) -> Tensor:
        """SHARDED -> GATHERING: return memory for the whole bucket, which the caller fills."""
        assert self.full is not None
        self.full.untyped_storage().resize_(self.nbytes)
        self.status = Status.GATHERING
        zero_params.mark(self.params, zero_params.ZeroParamStatus.INFLIGHT)
        return self.full

    def arrived(self) -> None:
        """GATHERING -> GATHERED: ``full`` holds every shard."""
        self.status = Status.GATHERED
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view
        zero_params.mark(self.params, zero_params.ZeroParamStatus.AVAILABLE)

    def failed(self) -> None:
        """GATHERING -> SHARDED. The memory stays until the next gather: a transfer may still write to it."""
        self.status = Status.SHARDED
        for param in self.params:
            whole = param.shape == param.ds_shape  # type: ignore[attr-defined]  # gathered alone
            zero_params.mark([param], zero_params.ZeroParamStatus["AVAILABLE" if whole else "NOT_AVAILABLE"])

    def reshard(self) -> None:
        """GATHERED -> SHARDED: free the memory (Note: gather and reshard)."""
        assert self.full is not None
        for param, view in zip(self.params, self.views, strict=True):
            state = vars(param)
            if state.get(zero_params.GATHER_COUNT) or zero_params.GATHERED_ALONE in state:  # stays whole
                param.data = view.clone()
            else:
                param.data = self._empty
                param.ds_status = zero_params.ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
        self.full.untyped_storage().resize_(0)
        self.status = Status.SHARDED

    def reattach(self, position: int) -> bool:
        """Make a parameter, whose data may have been replaced, a view of the whole bucket again. Return whether the
        bucket is gathered."""
        if self.status is Status.GATHERED:
            self.params[position].data = self.views[position]
        return self.status is Status.GATHERED

    def shards_written(self) -> None:
        """Notify the shard server, after every rank wrote its shard outside a step."""
        torch.autograd.graph.increment_version(self.params)
        self.on_shards_written()

    # What the step sees -------------------------------------------------------------------------------------

    def publish(self) -> Pending | None:
        """Refresh persistent parameters after an update; evict stale copies of the others."""
        if self.persistent:
            return self.refresh()
        self.transitions.evict_stale(self.layout.index)
        return None

    def refresh(self) -> Pending:
        """Gather the shards again into the whole bucket."""
        assert self.full is not None
        return self.communicator.all_gather(self.full, self.device_shard())

    def stored_shard(self) -> Tensor:
        """Return ``shard`` for immediate reading or writing. OSError: the file that holds it was truncated."""
        assert self.shard is not None
        if self.check_storage is not None:
            self.check_storage()
        return self.shard

    def device_shard(self) -> Tensor:
        """Return this rank's shard [shard_numel] on the device: ``shard`` itself, or a copy at its
        place in ``full``."""
        assert self.full is not None
        shard = self.stored_shard()
        if shard.device == self.full.device:
            return shard
        start, stop = self.layout.shard_range(self.rank)
        return self.full[start:stop].copy_(shard, non_blocking=True)

    def detached(self) -> list[int]:
        return []  # between uses a parameter has no memory that could have been replaced

    def tensors(self) -> Iterator[Tensor]:
        if self.shard is not None:
            yield self.shard
            yield from (param.ds_tensor for param in self.params)  # type: ignore[attr-defined]
        if self.full is not None and self.status is Status.GATHERED:
            yield self.full
            yield from self.views
            yield from self.params

    def destroy(self) -> None:
        """Give every parameter, gathered by ``Transitions.dissolve`` before, its own memory."""
        if self.full is None or self.shard is None:
            return
        for param in self.params:
            zero_params.forget(param)
            param.data = param.data.clone()
        self.full = self.shard = None
        self.views = []

    # Single parameters --------------------------------------------------------------------------------------

    @property
    def first_replica(self) -> bool:
        """Return whether this rank is in the first replica (neighbouring ranks hold one copy)."""
        return self.all_ranks.rank < self.communicator.size

    def cut_of(self, position: int) -> ShardCut:
        """Return how one parameter is divided among the shards."""
        return self.layout.cut_of(self.layout.slots[position])

    def owning_ranks(self, position: int) -> list[tuple[int, int, int]]:
        """Return ``(rank, start, stop)`` of the parts of one parameter, as offsets into the flat parameter."""
        return self.layout.parts(self.layout.slots[position])

    def local_part(self, position: int) -> Tensor:
        """Return this rank's part of one parameter, a 1-D view of the shard (possibly empty): its ``ds_tensor``."""
        shard = self.stored_shard()
        slot = self.layout.slots[position]
        start, stop = self.layout.shard_range(self.rank)
        low, high = max(start, slot.offset), min(stop, slot.end)
        return shard[low - start : high - start] if low < high else shard[:0]

    def read_param(self, position: int, out: Tensor) -> None:
        """Fill ``out`` with the whole parameter, moving only its own bytes. Collective, also where the bucket is
        gathered: ranks differ in what they have used."""
        flat = out.view(-1)
        mine = self.local_part(position)
        for rank, start, stop in self.owning_ranks(position):
            if rank == self.rank:
                flat[start:stop] = mine
            self.communicator.broadcast(flat[start:stop], src=rank).wait()

    def write_param(self, position: int, value: Tensor) -> None:
        """Write a new value of the whole parameter (the same on every rank) to the shards."""
        flat = value.detach().reshape(-1)
        for rank, start, stop in self.owning_ranks(position):
            if rank == self.rank:
                self.local_part(position).copy_(flat[start:stop])
        if self.status is Status.GATHERED and self.views[position].data_ptr() != value.data_ptr():
            self.views[position].copy_(value)
