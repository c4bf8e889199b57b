"""Token dispatch and combine: sort by expert, exchange over ranks, sum up, with gradients.

Nothing is padded: after one exchange of counts, a rank sends another exactly the tokens that chose its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.parallel.expert.metrics import RoutingStats
from deepspeed.parallel.expert.routes import Routes
from deepspeed.parallel.tensor.mappings import mapped

_CACHED = 2**17
"""Elements per run of rows on a CPU (see `_runs`)."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenOrder:
    """The ``n`` kept choices of ``S`` tokens, sorted by expert, then by token.

    ``tokens`` [n]: the token of each choice. ``slots`` [n]: its index among all ``S x k`` choices. ``place`` [S, k]:
    position of a choice in the order; ``n`` if it is not kept. ``counts`` [E]: choices per expert.
    """

    tokens: Tensor
    slots: Tensor
    place: Tensor
    counts: Tensor

    @classmethod
    def of(cls, routes: Routes, tokens: slice = slice(None)) -> TokenOrder:
        """Sort the choices of ``tokens`` (a slice of them) by expert."""
        count = len(routes.exp_counts)
        return cls.sort(torch.where(routes.kept[tokens], routes.experts[tokens], count), count)

    @classmethod
    def sort(cls, experts: Tensor, count: int) -> TokenOrder:
        """Sort the choices ``experts`` [S, k], int64, in which ``count`` means not kept."""
        k = experts.shape[1]
        flat = experts.reshape(-1)
        counts = torch.bincount(flat, minlength=count + 1)
        slots = flat.argsort(stable=True)
        kept = len(flat) - int(counts[count])
        place = torch.full_like(flat, kept)
        slots = slots[:kept]
        place[slots] = torch.arange(kept, device=flat.device)
        return cls(slots // k, slots, place.view(-1, k), counts[:count])


def permute(inputs: Tensor, order: TokenOrder) -> Tensor:
    """Return the rows of ``inputs`` [S, h] in the order of the experts, [n, h]."""
    return mapped(
        inputs, lambda rows: rows.index_select(0, order.tokens), lambda grad: _gathered(grad, None, order)
    )


def combine(outputs: Tensor, weights: Tensor, order: TokenOrder) -> Tensor:
    """Return [S, h]: for each token the sum of ``outputs`` [n, h] of its choices times ``weights`` [S, k], accumulated
    in the order of choices, in fp32 at least, and rounded once."""
    return _Combine.apply(outputs, weights, order)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: TokenOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(outputs, weights)
        return _gathered(outputs, weights.detach(), order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        order: TokenOrder = ctx.order
        outputs, weights = ctx.saved_tensors
        rows = grad.index_select(0, order.tokens)
        to_outputs = to_weights = None
        if ctx.needs_input_grad[1]:
            flat = weights.new_zeros(weights.numel())
            flat[order.slots] = _dot_products(rows, outputs).to(weights.dtype)
            to_weights = flat.view_as(weights)
        if ctx.needs_input_grad[0]:
            factors = weights.reshape(-1).index_select(0, order.slots)[:, None]
            wide = torch.promote_types(outputs.dtype, torch.float32)
            to_outputs = rows.to(wide).mul_(factors).to(outputs.dtype)
        return to_outputs, to_weights, None


def _gathered(values: Tensor, weights: Tensor | None, order: TokenOrder) -> Tensor:
    """Sum each token's rows of ``values`` [n, h] over its choices, optionally weighted, outside autograd: [S, h]."""
    wide = torch.promote_types(values.dtype, torch.float32)
    complete = len(order.tokens) == order.place.numel()
    result = values.new_empty(len(order.place), values.shape[1])
    for run in _runs(len(result), values.shape[1], values):
        total: Tensor | None = None
        for choice in range(order.place.shape[1]):
            rows = _rows(values, order.place[run, choice], complete).to(wide)
            factors = weights[run, choice, None] if weights is not None else None
            if total is None:
                total = rows if factors is None else rows.mul_(factors)
            elif factors is None:
                total.add_(rows)
            else:
                total.addcmul_(rows, factors.to(wide))
        assert total is not None
        result[run] = total
    return result


def _rows(values: Tensor, place: Tensor, complete: bool) -> Tensor:
    """Return a copy of the rows of ``values`` at ``place``; zeros for choices that are not kept."""
    if complete:
        return values.index_select(0, place)
    rows = values.new_zeros(len(place), values.shape[1])
    kept = (place < len(values)).nonzero().view(-1)
    rows[kept] = values.index_select(0, place[kept])
    return rows


def _dot_products(first: Tensor, second: Tensor) -> Tensor:
    """Return the dot product of each row [n, h] of the first with that of the second: [n], fp32 at least."""
    wide = torch.promote_types(first.dtype, torch.float32)
    result = first.new_empty(len(first), dtype=wide)
    for run in _runs(len(first), first.shape[1], first):
        result[run] = (first[run].to(wide) * second[run]).sum(1)
    return result


def _runs(rows: int, width: int, like: Tensor) -> Iterator[slice]:
    """Yield slices of rows: on a CPU, few enough to stay in its cache between two operations, since allocating memory
    for all of them costs more than the arithmetic; elsewhere all at once."""
    step = max(1, _CACHED // max(width, 1)) if like.device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


@dataclass(frozen=True, slots=True, eq=False)
class TokenExchange:
    """Exchange of rows between expert-parallel ranks: *outward* to the experts, and back.

    Outward, ``sent[rank]`` rows go to that rank, and ``received[rank][expert]`` come from it for each local expert.
    """

    group: Communicator
    sent: tuple[int, ...]
    received: tuple[tuple[int, ...], ...]
    watch: RoutingStats | None = None

    @classmethod
    def agree(
        cls, counts: Sequence[Tensor], group: Communicator, watch: RoutingStats | None = None
    ) -> list[TokenExchange]:
        """Exchange the number of rows for each expert. ``counts``: an int64 [E] for each of several exchanges.
        Collective, and the only point at which the host waits for the device."""
        both = torch.stack([torch.stack(list(counts))] * 2)
        if group.size > 1:
            sent = both[0].view(len(counts), group.size, -1).transpose(0, 1).contiguous()
            theirs = torch.empty_like(sent)
            with _timed(watch):
                group.all_to_all(theirs, sent).wait()
            both[1] = theirs.transpose(0, 1).reshape(both[1].shape)
        table = both.view(2, len(counts), group.size, -1).tolist()
        return [
            cls(group, tuple(sum(run) for run in sent), tuple(tuple(run) for run in received), watch)
            for sent, received in zip(*table, strict=True)
        ]

    @property
    def per_expert(self) -> list[int]:
        """Number of rows that each local expert receives."""
        return [sum(column) for column in zip(*self.received, strict=True)]

    def start(self, rows: Tensor, *, outward: bool) -> Arrival:
        """Send rows [n, h] to their experts, or back to the ranks of the tokens. Arriving at the experts: [rows of the
        local experts, h], sorted by expert, then by source rank. Collective."""
        if self.group.size == 1:
            return lambda: rows
        flight = _InFlight(self)
        sent = mapped(rows, lambda rows: flight.depart(rows, outward), lambda _: flight.arrive(not outward))
        shape = sent.shape

        def send_gradient(grad: Tensor) -> Tensor:
            """Send the gradient; autograd gets a placeholder of the expected shape that takes no memory."""
            flight.depart(grad, not outward)
            return grad.new_zeros(()).expand(shape)

        return lambda: mapped(sent, lambda _: flight.arrive(outward), send_gradient)


Arrival: TypeAlias = Callable[[], Tensor]
"""Waits for the rows in flight and returns them; to be called once."""


class _InFlight:
    """An in-flight exchange, in forward and again in backward: its handle, and the buffers that must stay alive until
    it completes."""

    def __init__(self, exchange: TokenExchange) -> None:
        self.exchange = exchange
        self._pending: tuple[Tensor, Pending, Tensor] | None = None

    def depart(self, rows: Tensor, outward: bool) -> Tensor:
        """Send ``rows`` and return the receive buffer, in rank order."""
        exchange, width = self.exchange, rows.shape[1]
        sent, received = exchange.sent, tuple(sum(run) for run in exchange.received)
        if not outward:
            sent, received = received, sent
            rows = _transposed(rows, list(zip(*exchange.received, strict=True)))
        rows = rows.contiguous()
        got = rows.new_empty(sum(received), width)
        sizes = [n * width for n in received], [n * width for n in sent]
        with _timed(exchange.watch):
            pending = exchange.group.all_to_all(got, rows, *sizes)
        self._pending = got, pending, rows
        return got

    def arrive(self, outward: bool) -> Tensor:
        assert self._pending is not None
        got, pending, _ = self._pending
        with _timed(self.exchange.watch):
            pending.wait()
        self._pending = None
        got = got.view_as(got)  # another tensor than `depart` has returned
        return _transposed(got, self.exchange.received) if outward else got


def _transposed(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Reorder runs of ``sizes[i][j]`` rows from the order (i, j) to (j, i)."""
    if min(len(sizes), len(sizes[0])) == 1:
        return rows
    runs, columns = rows.split([size for each in sizes for size in each]), len(sizes[0])
    return torch.cat([run for column in range(columns) for run in runs[column::columns]])


def route_to_experts(
    tokens: Tensor,
    weights: Tensor,
    order_of: Callable[[slice], TokenOrder],
    ranks: Communicator,
    compute: Callable[[Tensor, list[int]], Tensor],
    watch: RoutingStats | None,
) -> Tensor:
    """Return the sum of the chosen experts' outputs times ``weights`` [S, k], for each of the ``tokens`` [S, h].

    Dispatches them in parts, applies ``compute(rows, rows per expert)`` and sends the results back. Part i is computed
    while part i + 1 is dispatched and part i - 1 returns; in backward, too. Collective over ``ranks``.

    Args:
        order_of: the order of the choices of a part of the tokens.
    """
    parts = halve(len(tokens), ranks, tokens.device)
    orders = [order_of(part) for part in parts]
    exchanges = TokenExchange.agree([order.counts for order in orders], ranks, watch)
    arriving = [
        exchange.start(permute(tokens[part], order), outward=True)
        for exchange, part, order in zip(exchanges, parts, orders, strict=True)
    ]
    returning = [
        exchange.start(compute(arrival(), exchange.per_expert), outward=False)
        for exchange, arrival in zip(exchanges, arriving, strict=True)
    ]
    made = [
        combine(arrival(), weights[part], order)
        for arrival, part, order in zip(returning, parts, orders, strict=True)
    ]
    return made[0] if len(made) == 1 else torch.cat(made)


def halve(tokens: int, ranks: Communicator, device: torch.device) -> list[slice]:
    """Split the tokens into two halves, to overlap exchange and computation, where the exchange runs in the background
    of a device; into one part on a CPU, which would do both. All ranks get the same number of parts, whatever their
    token counts."""
    if ranks.size == 1 or device.type == "cpu" or not ranks.works_in_background(device.type):
        return [slice(0, tokens)]
    return [slice(0, tokens // 2), slice(tokens // 2, tokens)]


def _timed(watch: RoutingStats | None) -> AbstractContextManager[None]:
    return nullcontext() if watch is None else watch.exchanging()
