"""Wire formats of gradients: how the local sums of a bucket become one sum over ranks.

A format takes this rank's sum of a whole bucket and returns the part of the total that this rank keeps. ``DenseSum``
is the plain one. Others wrap a format and may be combined: ``ReplicatedSum`` adds a sum over ranks that hold the same
shard (MiCS), ``RowSum`` sends only the touched rows of an embedding. ``QuantizedSum`` (``quantized_sum.py``) replaces
the plain one. A new format is a class with a ``start`` method; ``factory.py`` decides which ones a bucket gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.comm.pending import DONE
from deepspeed.zero.bucket import BufferPool
from deepspeed.zero.layout import BucketLayout

MakeOut = Callable[[], Tensor]


class InFlight(NamedTuple):
    """A sum over ranks in flight; ``out`` and ``wire`` must live until ``pending.wait()`` returns."""

    pending: Pending
    out: Tensor
    """[shard_numel] This rank's shard of the total."""
    wire: Tensor
    """[padded_numel] The buffer on the wire: the local sum itself, or a buffer of the pool."""
    borrowed: bool
    """Whether ``out`` lies in memory that is only borrowed for this sum."""


class GradientSum(Protocol):
    """Wire format: how the local sums of a bucket become one sum over ranks."""

    def start(self, local: Tensor, make_out: MakeOut | None, prescale: float, postscale: float) -> InFlight:
        """Start the sum over ranks of ``local`` [padded_numel], times ``prescale`` on each rank and ``postscale`` in
        total.

        ``make_out`` returns memory [shard_numel] of the wire dtype that outlives the sum; it is None if there is none
        yet, or the result will be added to an earlier one. ``local`` may be overwritten. Every rank of the bucket's
        replica group starts the same sums in the same order.
        """
        ...


class ErrorFeedback(Protocol):
    """Error feedback of a wire format: keeps what encoding this rank's gradients lost, and adds it to the next
    message."""

    parts: frozenset[str]
    """Keys of its state, which differ between stages."""

    def saved(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None: nothing yet."""
        ...

    def forget(self) -> None:
        """Drop the state, as before the first sum."""
        ...

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> None: ...


def feedback_of(over_ranks: GradientSum) -> ErrorFeedback | None:
    """Return the error feedback of a format or of one that it wraps; formats that may keep errors have ``feedback``."""
    found: Any = over_ranks
    while found is not None:
        if hasattr(found, "feedback"):
            return found.feedback
        found = getattr(found, "inner", None) or getattr(found, "dense", None)
    return None


class DenseSum:
    """Sends every element in the wire dtype: by reduce-scatter, or by all-reduce where the whole sum is needed.

    The sum is rounded to the wire dtype even if wider memory is available: stage 0 has to forward it in that dtype,
    and every stage must give the same bits.
    """

    def __init__(
        self, layout: BucketLayout, communicator: Communicator, pool: BufferPool, *, scatter: bool
    ) -> None:
        self.communicator = communicator
        self.pool = pool
        self.dtype = layout.wire_dtype
        self.scatter = scatter and layout.num_shards > 1
        self.mine = slice(*layout.shard_range(communicator.rank)) if layout.num_shards > 1 else None

    def start(self, local: Tensor, make_out: MakeOut | None, prescale: float, postscale: float) -> InFlight:
        wire = local
        if local.dtype != self.dtype:
            wire = self.pool.take(local.numel(), self.dtype, local.device).copy_(local)
        if prescale != 1.0:
            wire.mul_(prescale)
        if not self.scatter:
            pending = self.communicator.all_reduce(wire, scale=postscale)
            return InFlight(pending, wire if self.mine is None else wire[self.mine], wire, True)
        out = wire[self.mine] if make_out is None else make_out()
        pending = self.communicator.reduce_scatter(out, wire, scale=postscale)
        return InFlight(pending, out, wire, make_out is None)


class LocalSum:
    """Sends nothing (``Cadence.NEVER``): each of ``holders`` ranks keeps its own sum, in the accumulation dtype,
    scaled such that the mean over the holders equals the sum over ranks."""

    def __init__(self, holders: int) -> None:
        self.holders = holders

    def start(self, local: Tensor, make_out: MakeOut | None, prescale: float, postscale: float) -> InFlight:
        scale = prescale * postscale * self.holders
        if not math.isclose(scale, 1.0, rel_tol=1e-12):
            local.mul_(scale)
        return InFlight(DONE, local, local, True)


class GroupSum:
    """Sums only over the ranks that share one copy (``Cadence.NEVER`` with sharded states): ``inner``, scaled such
    that the mean over the ``copies`` equals the sum over all ranks."""

    def __init__(self, inner: GradientSum, copies: int) -> None:
        self.inner = inner
        self.copies = copies

    def start(self, local: Tensor, make_out: MakeOut | None, prescale: float, postscale: float) -> InFlight:
        return self.inner.start(local, make_out, prescale, postscale * self.copies)


class ReplicatedSum:
    """Sums ``inner`` over the ranks that share one copy of the states, then over the ranks with the same shard (MiCS,
    Z. Zhang et al. 2022).

    [Note: order of sums] The result is (sum within group 0) + (sum within group 1) + ..., each in rank order in fp32:
    a regrouping of plain stage 3's sum, equal to it up to rounding. A 16-bit wire rounds once more, between the two.
    """

    def __init__(self, inner: GradientSum, replicas: Communicator) -> None:
        self.inner = inner
        self.replicas = replicas

    def start(self, local: Tensor, make_out: MakeOut | None, prescale: float, postscale: float) -> InFlight:
        flight = self.inner.start(local, make_out, prescale, 1.0)

        def finish() -> None:
            # Buckets are collected in the order in which they were launched, which all ranks share.
            flight.pending.wait()
            self.replicas.all_reduce(flight.out, scale=postscale).wait()

        return flight._replace(pending=Pending(finish))


class RowSum:
    """Sends only rows of an embedding's gradient [rows, width] that some rank touched (``sparse_gradients``).

    The ranks exchange their numbers of touched rows. Where it is cheaper than ``dense``, they all-gather (row number,
    row) pairs, padded to the largest count, and each rank adds them up in rank order: in fp32, rounded once, like the
    dense sum, so both give the same bits.
    """

    def __init__(
        self, dense: GradientSum, layout: BucketLayout, communicator: Communicator, shape: torch.Size
    ) -> None:
        self.dense = dense
        self.communicator = communicator
        self.dtype = layout.wire_dtype
        self.rows, self.width = shape
        self.mine = slice(*layout.shard_range(communicator.rank))

    def start(self, local: Tensor, make_out: MakeOut | None, prescale: float, postscale: float) -> InFlight:
        size = self.communicator.size
        table = local[: self.rows * self.width].view(self.rows, self.width)
        touched = table.ne(0).any(dim=1).nonzero().view(-1)
        counts = torch.empty(size, dtype=torch.int64, device=local.device)
        self.communicator.all_gather(counts, torch.tensor([touched.numel()], device=local.device)).wait()
        most = int(counts.max())
        if size == 1 or most * size >= self.rows:
            return self.dense.start(local, make_out, prescale, postscale)
        finish = self._exchange(table, touched, counts.tolist(), most, prescale, postscale)
        return InFlight(Pending(finish), local[self.mine], local, True)

    def _exchange(
        self, table: Tensor, touched: Tensor, counts: list[int], most: int, prescale: float, postscale: float
    ) -> Callable[[], None]:
        size, device = self.communicator.size, table.device
        rows = torch.zeros(most, dtype=torch.int64, device=device)
        values = torch.zeros(most, self.width, dtype=self.dtype, device=device)
        rows[: touched.numel()] = touched
        if touched.numel():
            values[: touched.numel()] = table[touched]
        all_rows = torch.empty(size * most, dtype=torch.int64, device=device)
        all_values = torch.empty(size * most * self.width, dtype=self.dtype, device=device)
        pendings = (
            self.communicator.all_gather(all_rows, rows),
            self.communicator.all_gather(all_values, values.mul_(prescale).view(-1)),
        )

        def add_up() -> None:
            for pending in pendings:
                pending.wait()
            numbers = torch.cat([all_rows[r * most : r * most + count] for r, count in enumerate(counts)])
            touched_by_any, place = numbers.unique(return_inverse=True)
            wide = torch.promote_types(self.dtype, torch.float32)
            total = torch.zeros(touched_by_any.numel(), self.width, dtype=wide, device=device)
            received = all_values.view(size, most, self.width)
            for rank, (count, mine) in enumerate(zip(counts, place.split(counts), strict=True)):
                total.index_add_(0, mine, received[rank, :count].to(wide))
            table.zero_()
            table[touched_by_any] = total.mul_(postscale).to(self.dtype).to(table.dtype)

        return add_up
