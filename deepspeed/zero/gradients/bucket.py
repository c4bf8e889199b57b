"""Gradient buckets: the local sum, the sum over ranks, this rank's shard of it, and at stage 0 the gradient exposed
in ``param.grad``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed.comm.collectives import Communicator
from deepspeed.zero.bucket import BufferPool
from deepspeed.zero.gradients.sums import DenseSum, GradientSum, InFlight
from deepspeed.zero.layout import BucketLayout
from deepspeed.zero.offload.host_copies import HostCopies


@dataclass(eq=False, repr=False)
class GradBucket:
    """Gradients of one bucket on their way from autograd to the shard that the optimizer reads.

    A *round* fills ``local`` [padded_numel] over one or more backwards, ``launch`` starts its sum over ranks,
    ``collect`` waits and adds this rank's shard to ``reduced`` [shard_numel], the result of earlier rounds of the
    same step. Rounds that are not launched (``no_sync``, micro-batches before the boundary) keep filling.

    ``keep_local`` (stages 0 and 1): the bucket owns the full buffer, in the accumulation dtype, and the reduced shard
    is a slice of it. Otherwise (stages 2 and 3) the buffer is borrowed, in the wire dtype, for one round, and only
    the shard is kept.

    ``shapes``: full shapes of the parameters, one per slot. ``over_ranks``: format of the sum over all ranks that
    hold these weights, times ``factors`` before and after; ``local_format``: the format while each rank, or each
    group that shares a copy, keeps its own gradients (None: impossible); ``rank``: index of this rank's shard;
    ``counts_in_norm``: whether this rank's shard counts in the norm, which exactly one holder's does. ``host``: set if
    the shard is copied to host memory (ZeRO-Offload) as soon as it is summed; ``reduced`` is then in host memory.
    ``new_shard(numel, dtype)`` allocates ``reduced`` where it is not a slice of the full buffer. ``after_sum``: called
    with this rank's result of each sum over ranks, to change it in place. ``check``: called before each round is
    added to ``reduced``, to check the file that holds it.
    """

    layout: BucketLayout
    shapes: Sequence[torch.Size]
    over_ranks: GradientSum
    pool: BufferPool
    device: torch.device
    _: KW_ONLY
    rank: int
    dtype: torch.dtype  # of accumulation
    keep_local: bool
    new_shard: Callable[[int, torch.dtype], Tensor]
    local_format: GradientSum | None = None
    factors: tuple[float, float] = (1.0, 1.0)
    counts_in_norm: bool = True
    host: HostCopies | None = None
    check: Callable[[], None] | None = None
    after_sum: Callable[[Tensor], None] | None = None

    def __post_init__(self) -> None:
        self._gaps = self.layout.gaps()
        self._formats: tuple[GradientSum | None, GradientSum] = (self.local_format, self.over_ranks)
        self.start, self.stop = self.layout.shard_range(self.rank)
        self.local: Tensor | None = None
        self.views: list[Tensor] = []  # of the current or last local buffer, shaped like the parameters
        self.written = [False] * len(self.layout.slots)
        self.reduced: Tensor | None = None
        self.in_flight: InFlight | None = None
        self._owned: Tensor | None = None  # the full buffer of keep_local
        self._owned_slot: Tensor | None = None  # this rank's shard of it
        self._shard: Tensor | None = None  # the shard otherwise

    # Arrivals -----------------------------------------------------------------------------------------------

    def accept(self, position: int, grad: Tensor, *, lasting: bool = False) -> None:
        """Add one gradient, shaped like its parameter, to the local sum; ``lasting``: the sum spans several
        backwards."""
        if self.local is None:
            self._open(lasting)
        if grad.requires_grad:  # backward with create_graph=True
            grad = grad.detach()
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if self.written[position]:
            self.views[position].add_(grad)
        else:
            self.views[position].copy_(grad)
            self.written[position] = True

    def accumulated_in_place(self, position: int, grad: Tensor) -> bool:
        """Return whether autograd added to the exposed gradient in place, so that the local sum already contains it."""
        return self.local is not None and grad.data_ptr() == self.views[position].data_ptr()

    def _open(self, lasting: bool = False) -> None:
        if self._owned is not None:
            # A second round in one step must not overwrite the result of the first.
            if self.reduced is not None and self.host is None:
                self.reduced = self.reduced.clone()
            self.local = self._owned
        elif self.keep_local:
            self.local = self._owned = torch.empty(
                self.layout.padded_numel, dtype=self.dtype, device=self.device
            )
            self._owned_slot = self.local[self.start : self.stop]
            self.views = self._parts(self.local)
        else:
            dtype = self.dtype if lasting else self.layout.wire_dtype
            self.local = self.pool.take(self.layout.padded_numel, dtype, self.device)
            self.views = self.pool.parts(self.local, self.layout.index, self._parts)
        for low, high in self._gaps:  # a wire format may have written there
            self.local[low:high].zero_()

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        slots = zip(self.layout.slots, self.shapes, strict=True)
        return [buffer[slot.offset : slot.end].view(shape) for slot, shape in slots]

    # The sum over ranks -------------------------------------------------------------------------------------

    def check_unsharded(self) -> None:
        """Raise ValueError if this rank keeps only a shard of the sum, and so needs the sum over ranks."""
        if self._formats[False] is None:
            raise ValueError("partitioned gradients (ZeRO stage 1 to 3) must be summed over ranks")

    @property
    def summed_over_ranks(self) -> GradientSum:
        """Return the format of sums over all ranks, in use or not."""
        return self._formats[1]

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of this bucket's gradients on the wire, between all ranks."""
        return getattr(self._formats[1], "dtype", self.layout.wire_dtype)

    def send_as(self, dtype: torch.dtype) -> bool:
        """Send the elements of later sums over ranks as ``dtype``. Returns False, changing nothing, if the format or
        the buffers are made for another one."""
        chosen = self._formats[1]
        if self.keep_local and type(chosen) is DenseSum:
            chosen.dtype = dtype
        return self.wire_dtype == dtype

    def sum_over_ranks(self, enabled: bool) -> None:
        """Set whether later launches sum over ranks or keep this rank's own sum. Frees the scratch memory of the
        previous format."""
        chosen = self._formats[enabled]
        assert chosen is not None, "checked by check_unsharded"
        self.over_ranks = chosen
        self.pool.clear()

    def launch(self) -> None:
        """Start the sum over ranks; missing gradients are zero."""
        if self.check is not None:
            self.check()
        if self.local is None:
            self._open()
        assert self.local is not None
        if not all(self.written):
            for view, written in zip(self.views, self.written, strict=True):
                if not written:
                    view.zero_()
        kept = self._kept_shard if self._can_keep() else None
        self.in_flight = self.over_ranks.start(self.local, kept, *self.factors)

    def _can_keep(self) -> bool:
        """Return whether the sum may be written directly to its final memory."""
        return (
            not self.keep_local
            and self.reduced is None
            and self.dtype == self.layout.wire_dtype
            and self.host is None
        )

    def _kept_shard(self) -> Tensor:
        if self._shard is None:
            self._shard = self.new_shard(self.layout.shard_numel, self.dtype)
        return self._shard

    @property
    def borrows(self) -> bool:
        """Return whether the sum in flight holds memory that the next bucket could use."""
        return self.in_flight is not None and (not self.keep_local or self.in_flight.wire is not self.local)

    def collect(self) -> None:
        """Wait for the sum and add it to the earlier rounds of this step."""
        if self.in_flight is None:
            return
        pending, out, wire, borrowed = self.in_flight
        self.in_flight = None
        pending.wait()
        if self.after_sum is not None and self.over_ranks is self.summed_over_ranks:
            self.after_sum(out)
        copied = None
        if self.host is not None:
            copied = self._collect_on_host(self.host, out)
            if copied is not None and self.keep_local:
                copied.wait()  # the pool does not guard the owned buffer
        elif self.keep_local:
            self._collect_in_place(out)
        elif self.reduced is not None:
            self.reduced.add_(out)
        else:
            self.reduced = self._kept_shard().copy_(out) if borrowed else out
        if wire is not self.local:
            self.pool.give(wire, copied)
        self._close(copied)

    def _collect_on_host(self, host: HostCopies, out: Tensor) -> Any:
        """Return an event after which ``out`` may be overwritten, or None."""
        if self.reduced is None:
            self.reduced = self._kept_shard()
            return host.copy(self.reduced, out)
        host.synchronize()
        self.reduced.add_(out.to("cpu", self.dtype))
        return None

    def _collect_in_place(self, out: Tensor) -> None:
        """Replace the local sum by the sum over ranks: all of it at stage 0, this rank's shard at stage 1."""
        slot = self._owned_slot
        assert slot is not None
        if out.data_ptr() != slot.data_ptr():
            slot.copy_(out)
        if self.reduced is not None:
            slot.add_(self.reduced)
        self.reduced = slot

    def _close(self, copied: Any = None) -> None:
        if not self.keep_local and self.local is not None:
            self.pool.give(self.local, copied)
            self.views = []
        self.local = None
        self.written = [False] * len(self.written)

    def restore(self, value: Tensor) -> None:
        """Restore the result of rounds that were reduced before a checkpoint in the middle of a step."""
        if self.keep_local and self.host is None:
            self.reduced = value.to(self.device, self.dtype).clone()
        else:
            self.reduced = self._kept_shard().copy_(value)

    def replace(self, position: int, grad: Tensor) -> None:
        """Replace the sum by a gradient that the caller assigned (stage 0, where ``reduced`` is the whole sum)."""
        if self.reduced is None:
            self._open()
            assert self.local is not None
            self._collect_in_place(self.local.zero_())
            self._close()
        self.views[position].copy_(grad.to_dense() if grad.layout is not torch.strided else grad)

    def held(self) -> list[Tensor]:
        """Return the tensors whose memory this bucket holds, with its views of them."""
        kept = [self._owned, self._owned_slot, self._shard, self.local, self.reduced, *self.views]
        if self.local is not None:
            kept += self.pool.parts_of(self.local)  # also the views of buckets that borrow it at other times
        return [tensor for tensor in kept if tensor is not None]

    def abandon(self) -> None:
        """Wait for a sum whose result is no longer needed, as its memory is in use until then."""
        flight, self.in_flight = self.in_flight, None
        if flight is None:
            return
        flight.pending.wait()
        if flight.wire is not self.local:
            self.pool.give(flight.wire)

    def clear(self) -> None:
        """Drop every gradient of this step; an owned buffer stays for the next one."""
        assert self.in_flight is None, "gradients are still being summed"
        if self.local is not None:
            self._close()
        self.reduced = None


class GradLocation(NamedTuple):
    """Place of a parameter's gradient: its bucket, the bucket's number, and the position in it."""

    number: int
    bucket: GradBucket
    position: int


def _own_references() -> int:
    """Return ``sys.getrefcount`` of an object without other references, as measured in `ExposedGrads.withdraw`."""
    held = [object()]
    last = held.pop()
    return sys.getrefcount(last)


_OWN_REFERENCES = _own_references()


class ExposedGrads:
    """Views of summed gradients in ``param.grad``. A script may read, change, assign and keep them."""

    def __init__(self) -> None:
        self.params: list[nn.Parameter] = []
        """Parameters whose ``grad`` is a view of the sum, unless the script has set it."""
        self._views: list[Tensor] = []
        """All views exposed after the last backward."""

    def show(
        self, params: Sequence[nn.Parameter], used: Sequence[bool], places: Mapping[int, GradLocation]
    ) -> None:
        """Set ``grad`` of the ``used`` parameters."""
        self.params, self._views = [], []
        for index, param in enumerate(params):
            if used[index]:
                _, bucket, position = places[index]
                if bucket.dtype == param.dtype:  # autograd refuses a gradient of another dtype
                    param.grad = bucket.views[position].detach()  # a new tensor object, the caller's
                    self.params.append(param)
                    self._views.append(param.grad)

    def withdraw(self) -> bool:
        """Set ``grad`` to None, so that autograd leaves new tensors instead of adding in place. Gradients that a
        script still references are cloned first, since the sums will be overwritten.

        Return whether the script, or its optimizer, had set all of them to None, and so dropped the sums.
        """
        dropped = bool(self.params) and all(param.grad is None for param in self.params)
        for param in self.params:
            param.grad = None
        self.params = []
        while self._views:
            grad = self._views.pop()
            if sys.getrefcount(grad) > _OWN_REFERENCES:
                grad.data = grad.data.clone()
        return dropped

    def forget(self) -> None:
        """Stop tracking ``grad``: the sums are dropped."""
        self.params = []

    def take_assigned(
        self, params: Sequence[nn.Parameter], used: list[bool], places: Mapping[int, GradLocation]
    ) -> None:
        """Take gradients that the script assigned, after a backward or without one, as the sums over ranks.
        Parameters whose gradient it set to None are not updated: ``used`` becomes False."""
        exposed = {id(param) for param in self.params}
        for index, param in enumerate(params):
            grad = param.grad
            if grad is None:
                if id(param) in exposed:
                    used[index] = False
                continue
            _, bucket, position = places[index]
            if bucket.local is not None or bucket.in_flight is not None:
                continue  # still to be summed
            if id(param) in exposed and grad.data_ptr() == bucket.views[position].data_ptr():
                continue
            with torch.no_grad():
                bucket.replace(position, grad.detach())
            used[index] = True


# The launch order of gradient buckets, and how full each is in the backward in progress.


class BucketOrder:
    """Launch order common to all ranks (Note: order of collectives, in `reducer.py`): at first the reverse of
    registration, then the one that rank 0 observed in a backward that sums. A bucket is full when as many gradients
    have arrived as in that backward.

    Args:
        members: by bucket, the indices of its parameters.
        expected: arrivals of each parameter in one backward.
    """

    def __init__(self, members: Sequence[Sequence[int]], expected: Sequence[int]) -> None:
        self._members = members
        self._expected = list(expected)
        self._buckets = list(reversed(range(len(members))))
        self.agreed = False
        """False: the next backward that sums calls ``agree``."""
        self._count_arrivals()
        self.begin()

    def _count_arrivals(self) -> None:
        self._to_arrive = [sum(self._expected[index] for index in indices) for indices in self._members]
        self.repeats = any(count > 1 for count in self._expected)  # some parameter arrives several times

    def begin(self) -> None:
        """Begin a backward: nothing has arrived, and nothing is launched."""
        self._arrived = [0] * len(self._expected)
        self._missing = self._to_arrive.copy()
        self._next = 0  # position of the first bucket that has not had its turn
        self._filled: list[int] = []
        self.launched = [False] * len(self._members)

    def arrive(self, index: int, b: int) -> bool:
        """Count an arrival of parameter ``index`` in bucket ``b``. Return whether it has filled the bucket."""
        self._arrived[index] += 1
        if self.launched[b] or self._arrived[index] > self._expected[index]:
            return False
        self._missing[b] -= 1
        if self._missing[b]:
            return False
        self._filled.append(b)
        return True

    def launch(self, start: Callable[[int], None], *, rest: bool) -> None:
        """Call ``start`` on each bucket whose turn it is, up to the first that is not full; ``rest``: on each that has
        not had its turn in this backward."""
        while self._next < len(self._buckets) and (rest or not self._missing[self._buckets[self._next]]):
            self._next += 1
            start(self._buckets[self._next - 1])

    def __iter__(self) -> Iterator[int]:
        return iter(self._buckets)

    def agree(self, late: bool, communicator: Communicator, device: torch.device) -> bool:
        """Adopt the order and the numbers of arrivals that rank 0 observed in this backward, and return its ``late``.
        Collective."""
        filled = set(self._filled)
        order = self._filled + [b for b in self._buckets if b not in filled]
        arrived = [max(1, n) for n in self._arrived]
        seen = torch.tensor([late, *order, *arrived], dtype=torch.int64, device=device)
        communicator.broadcast(seen, src=0).wait()
        late, *values = seen.tolist()
        self._buckets, self._expected = values[: len(order)], values[len(order) :]
        self.agreed = True
        self._count_arrivals()
        return bool(late)

    def extended(self, members: Sequence[Sequence[int]], more: int) -> BucketOrder:
        """Return an order, not yet agreed on, of buckets that hold ``more`` additional parameters."""
        return BucketOrder(members, [*self._expected, *[1] * more])
