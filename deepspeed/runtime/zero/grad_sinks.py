"""The life of a gradient bucket: the local sum, the sum over ranks, and where its shard is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.runtime.zero.host_copies import HostCopies
from deepspeed.runtime.zero.layout import BucketLayout


class BufferPool:
    """Flat scratch buffers that are reused, so that memory is touched (and paged in) only once."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._read_until: dict[int, Any] = {}  # address of a free buffer -> event after its last use

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of exactly ``numel`` elements with undefined contents."""
        free = self._free.setdefault((dtype, device), [])
        fitting = [i for i, buffer in enumerate(free) if buffer.numel() >= numel]
        if fitting:
            buffer = free.pop(min(fitting, key=lambda i: free[i].numel()))
            self._settle(buffer)
            return buffer[:numel]
        for buffer in free:  # all too small: a larger one takes their place
            self._settle(buffer)
        free.clear()
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor, read_until: Any = None) -> None:
        """``read_until``: an event after the last use of the buffer on another stream."""
        whole = buffer if buffer._base is None else buffer._base
        if read_until is not None:
            self._read_until[whole.data_ptr()] = read_until
        self._free.setdefault((whole.dtype, whole.device), []).append(whole)

    def _settle(self, buffer: Tensor) -> None:
        """Order the current stream's next work after the buffer's last use on another stream."""
        event = self._read_until.pop(buffer.data_ptr(), None)
        if event is not None:
            event.wait()

    def clear(self) -> None:
        """Release the free buffers."""
        for free in self._free.values():
            for buffer in free:
                self._settle(buffer)
        self._free.clear()


class InFlight(NamedTuple):
    """A sum over ranks that was started; ``out`` and ``wire`` must live until ``pending.wait()`` returns."""

    pending: Pending
    out: Tensor  # [shard_numel]
    wire: Tensor  # [padded_numel]
    borrowed: bool


class GradBucket:
    """Gradients of one bucket on their way from autograd to the slice that the optimizer reads.

    A *round* fills ``local`` [padded_numel] over one or more backwards, ``launch`` starts its sum over ranks,
    ``collect`` waits and adds this rank's slice to what earlier rounds of the same step left in ``reduced``
    [shard_numel]. Rounds that are not launched (``no_sync``, micro-batches before the boundary) keep filling.

    ``keep_local`` (stages 0 and 1): the full buffer is owned, in the accumulation dtype, and the reduced slice
    takes its own place inside it. Otherwise (stages 2 and 3) the buffer is borrowed, in the wire dtype, for one
    round, and only the slice is kept.

    ``host``: set if the slice leaves the device (ZeRO-Offload) as soon as it is summed; ``reduced`` is then in host
    memory. ``new_slice(numel, dtype)`` creates the tensor that holds ``reduced`` if it has its own memory.
    """

    def __init__(
        self,
        layout: BucketLayout,
        communicator: Communicator,
        pool: BufferPool,
        device: torch.device,
        *,
        accumulate_dtype: torch.dtype,
        keep_local: bool,
        reduce_scatter: bool,
        new_slice: Callable[[int, torch.dtype], Tensor],
        host: HostCopies | None = None,
    ) -> None:
        self.host = host
        self.new_slice = new_slice
        self.layout = layout
        self.communicator = communicator
        self.pool = pool
        self.device = device
        self.dtype = accumulate_dtype
        self.keep_local = keep_local
        self.reduce_scatter = reduce_scatter and layout.num_shards > 1
        self.start, self.stop = layout.shard_range(communicator.rank if layout.num_shards > 1 else 0)
        self.local: Tensor | None = None
        self.views: list[Tensor] = []  # 1-D, one per slot, of the open or last local buffer
        self.written = [False] * len(layout.slots)
        self.reduced: Tensor | None = None
        self.in_flight: InFlight | None = None
        self._owned: Tensor | None = None  # the full buffer of keep_local
        self._slice: Tensor | None = None  # the slice otherwise

    # Arrivals -----------------------------------------------------------------------------------------------

    def accept(self, position: int, grad: Tensor, *, lasting: bool = False) -> None:
        """Add one gradient, shaped like its parameter, to the local sum; ``lasting``: of several backwards."""
        if self.local is None:
            self._open(lasting)
        grad = grad.detach()  # it has a graph if the client asked for one (create_graph)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        view = self.views[position]
        if self.written[position]:
            view.add_(grad.reshape(-1))
        else:
            view.copy_(grad.reshape(-1))
            self.written[position] = True

    def accumulated_in_place(self, position: int, grad: Tensor) -> bool:
        """Whether autograd added to the exposed gradient itself: then the local sum already contains it."""
        return self.local is not None and grad.data_ptr() == self.views[position].data_ptr()

    def _open(self, lasting: bool = False) -> None:
        if self._owned is not None:
            # A second round in one step: its arrivals must not hit the first result.
            if self.reduced is not None and self.host is None:
                self.reduced = self.reduced.clone()
            self.local = self._owned
            return
        numel = self.layout.padded_numel
        if self.keep_local:
            self.local = self._owned = torch.empty(numel, dtype=self.dtype, device=self.device)
        else:
            dtype = self.dtype if lasting else self.layout.wire_dtype
            self.local = self.pool.take(numel, dtype, self.device)
        for low, high in self.layout.gaps():
            self.local[low:high].zero_()
        self.views = [self.local[slot.offset : slot.end] for slot in self.layout.slots]

    # The sum over ranks -------------------------------------------------------------------------------------

    def launch(self, pre: float, post: float) -> None:
        """Start the sum over ranks of what arrived, times ``pre`` before and ``post`` after; missing ones are zero."""
        if self.local is None:
            self._open()
        assert self.local is not None
        for view, written in zip(self.views, self.written, strict=True):
            if not written:
                view.zero_()
        wire = self._to_wire(self.local)
        if pre != 1.0:
            wire.mul_(pre)
        if self.reduce_scatter:
            out, borrowed = self._output(wire)
            pending = self.communicator.reduce_scatter(out, wire, scale=post)
        else:
            out, borrowed = wire[self.start : self.stop], True
            pending = self.communicator.all_reduce(wire, scale=post)
        self.in_flight = InFlight(pending, out, wire, borrowed)

    def _to_wire(self, local: Tensor) -> Tensor:
        if local.dtype == self.layout.wire_dtype:
            return local
        wire = self.pool.take(local.numel(), self.layout.wire_dtype, self.device)
        return wire.copy_(local)

    def _output(self, wire: Tensor) -> tuple[Tensor, bool]:
        """Where the slice goes, and whether that memory is borrowed for this round only.

        The sum is rounded to the wire dtype even if wider memory is available: stage 0 has to forward it in that
        dtype, and every stage gives the same bits.
        """
        if not self.keep_local and self.reduced is None and self.dtype == wire.dtype and self.host is None:
            return self._kept_slice(), False
        return wire[self.start : self.stop], True

    def _kept_slice(self) -> Tensor:
        if self._slice is None:
            self._slice = self.new_slice(self.layout.shard_numel, self.dtype)
        return self._slice

    @property
    def borrows(self) -> bool:
        """Whether the sum in flight holds memory that the next bucket could use."""
        return self.in_flight is not None and (not self.keep_local or self.in_flight.wire is not self.local)

    def collect(self) -> None:
        """Wait for the sum and add it to the earlier rounds of this step."""
        if self.in_flight is None:
            return
        pending, out, wire, borrowed = self.in_flight
        self.in_flight = None
        pending.wait()
        leaving = None
        if self.host is not None:
            leaving = self._collect_on_host(self.host, out)
            if leaving is not None and self.keep_local:
                leaving.wait()  # the owned buffer is rewritten without passing through the pool
        elif self.keep_local:
            self._collect_in_place(out)
        elif self.reduced is not None:
            self.reduced.add_(out)
        else:
            self.reduced = self._kept_slice().copy_(out) if borrowed else out
        if wire is not self.local:
            self.pool.give(wire, leaving)
        self._close(leaving)

    def _collect_on_host(self, host: HostCopies, out: Tensor) -> Any:
        """Returns an event after which ``out`` may be overwritten, or None."""
        if self.reduced is None:
            self.reduced = self._kept_slice()
            return host.copy(self.reduced, out)
        host.synchronize()
        self.reduced.add_(out.to("cpu", self.dtype))
        return None

    def _collect_in_place(self, out: Tensor) -> None:
        """The sum replaces the local one: all of it at stage 0, this rank's slice at stage 1."""
        assert self.local is not None
        place = self.local[self.start : self.stop]
        if out.data_ptr() != place.data_ptr():
            place.copy_(out)
        if self.reduced is not None:
            place.add_(self.reduced)
        self.reduced = place

    def _close(self, leaving: Any = None) -> None:
        if not self.keep_local and self.local is not None:
            self.pool.give(self.local, leaving)
            self.views = []
        self.local = None
        self.written = [False] * len(self.written)

    def restore(self, value: Tensor) -> None:
        """Continue a step whose earlier rounds were reduced before a checkpoint."""
        if self.keep_local and self.host is None:
            self.reduced = value.to(self.device, self.dtype).clone()
        else:
            self.reduced = self._kept_slice().copy_(value)

    def held(self) -> list[Tensor]:
        """The tensors whose memory this bucket owns, with the views of them it keeps."""
        kept = [self._owned, self._slice, self.local, self.reduced, *self.views]
        return [tensor for tensor in kept if tensor is not None]

    def abandon(self) -> None:
        """Wait for a sum whose result is no longer needed: until then its memory is in use."""
        flight, self.in_flight = self.in_flight, None
        if flight is None:
            return
        flight.pending.wait()
        if flight.wire is not self.local:
            self.pool.give(flight.wire)

    def clear(self) -> None:
        """Forget every gradient of this step; an owned buffer stays for the next one."""
        assert self.in_flight is None, "gradients are still being summed"
        self._close()
        self.reduced = None
