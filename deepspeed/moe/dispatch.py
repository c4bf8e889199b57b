"""Tokens to their experts and back: sort, exchange over ranks, and add up, with gradients.

Nothing is padded: what a rank sends another are the tokens that chose its experts, after one exchange of their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.comm.collectives import Communicator
from deepspeed.moe.routes import Routes


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The ``n`` kept choices of ``S`` tokens, sorted by expert; those of one expert in the order of tokens.

    ``tokens`` [n]: whose choice. ``slots`` [n]: its number among all ``S x k`` choices. ``place`` [S, k]: where it is
    in the order; ``n`` for choices that are not kept. ``counts`` [E]: choices per expert.
    """

    tokens: Tensor
    slots: Tensor
    place: Tensor
    counts: Tensor

    @classmethod
    def of(cls, routes: Routes) -> Order:
        count = len(routes.exp_counts)
        return cls.sort(torch.where(routes.kept, routes.experts, count), count)

    @classmethod
    def sort(cls, experts: Tensor, count: int) -> Order:
        """``experts`` [S, k], int64: the choices; ``count`` for one that is not kept."""
        k = experts.shape[1]
        flat = experts.reshape(-1)
        counts = torch.bincount(flat, minlength=count + 1)
        slots = flat.argsort(stable=True)
        kept = len(flat) - int(counts[count])
        place = torch.full_like(flat, kept)
        slots = slots[:kept]
        place[slots] = torch.arange(kept, device=flat.device)
        return cls(slots // k, slots, place.view(-1, k), counts[:count])


def permute(inputs: Tensor, order: Order) -> Tensor:
    """[n, h]: the rows of ``inputs`` [S, h] as the experts get them."""
    return _Permute.apply(inputs, order)


def combine(outputs: Tensor, weights: Tensor, order: Order) -> Tensor:
    """[S, h]: for each token the sum of ``outputs`` [n, h] of its choices times ``weights`` [S, k], added up in the
    order of choices, in fp32 at least, and rounded once."""
    return _Combine.apply(outputs, weights, order)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return inputs.index_select(0, order.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, None, ctx.order), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(outputs, weights)
        return _gathered(outputs, weights.detach(), order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        order: Order = ctx.order
        outputs, weights = ctx.saved_tensors
        rows = grad.index_select(0, order.tokens)
        to_outputs = to_weights = None
        wide = torch.promote_types(outputs.dtype, torch.float32)
        if ctx.needs_input_grad[1]:
            flat = weights.new_zeros(weights.numel())
            flat[order.slots] = (rows.to(wide) * outputs).sum(1).to(weights.dtype)
            to_weights = flat.view_as(weights)
        if ctx.needs_input_grad[0]:
            factors = weights.reshape(-1).index_select(0, order.slots)
            to_outputs = (rows.to(wide) * factors[:, None]).to(outputs.dtype)
        return to_outputs, to_weights, None


def _gathered(values: Tensor, weights: Tensor | None, order: Order) -> Tensor:
    """The sum over choices of rows of ``values`` [n, h], outside autograd."""
    wide = torch.promote_types(values.dtype, torch.float32)
    complete = len(order.tokens) == order.place.numel()
    total: Tensor | None = None
    for choice in range(order.place.shape[1]):
        place = order.place[:, choice]
        if complete:
            rows = values.index_select(0, place).to(wide)
        else:
            rows = values.new_zeros(len(place), values.shape[1], dtype=wide)
            kept = (place < len(values)).nonzero().view(-1)
            rows[kept] = values.index_select(0, place[kept]).to(wide)
        if weights is not None:
            rows = rows * weights[:, choice, None]
        total = rows if total is None else total.add_(rows)
    assert total is not None
    return total.to(values.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Trip:
    """An exchange of rows between ranks that each have ``local`` of the experts.

    ``sent[rank]`` rows go to that rank; ``received[rank][expert]`` come from it for each local expert.
    """

    group: Communicator
    sent: tuple[int, ...]
    received: tuple[tuple[int, ...], ...]

    @classmethod
    def plan(cls, counts: Tensor, group: Communicator) -> Trip:
        """Tell every rank how many rows come from here for each of its experts: ``counts`` [E], int64. Collective, and
        the only point at which the host waits."""
        if group.size == 1:
            own = tuple(counts.tolist())
            return cls(group, (sum(own),), (own,))
        theirs = torch.empty_like(counts)
        group.all_to_all(theirs, counts.contiguous()).wait()
        both = torch.stack([counts, theirs]).view(2, group.size, -1).tolist()
        return cls(group, tuple(sum(run) for run in both[0]), tuple(tuple(run) for run in both[1]))

    @property
    def per_expert(self) -> list[int]:
        """Rows that each local expert gets."""
        return [sum(column) for column in zip(*self.received, strict=True)]

    def there(self, rows: Tensor) -> Tensor:
        """[rows of the local experts, h], sorted by expert and then by where they come from. Collective."""
        return rows if self.group.size == 1 else _There.apply(rows, self)

    def back(self, rows: Tensor) -> Tensor:
        """The opposite. Collective."""
        return rows if self.group.size == 1 else _Back.apply(rows, self)

    def _there(self, rows: Tensor) -> Tensor:
        from_ranks = [sum(run) for run in self.received]
        got = self._swap(rows, self.sent, from_ranks)
        if len(self.received[0]) == 1:
            return got
        runs = got.split([count for run in self.received for count in run])
        local = len(self.received[0])
        return torch.cat([runs[place * local + e] for e in range(local) for place in range(self.group.size)])

    def _back(self, rows: Tensor) -> Tensor:
        local, size = len(self.received[0]), self.group.size
        if local > 1:
            runs = rows.split([self.received[place][e] for e in range(local) for place in range(size)])
            rows = torch.cat([runs[e * size + place] for place in range(size) for e in range(local)])
        return self._swap(rows, [sum(run) for run in self.received], self.sent)

    def _swap(self, rows: Tensor, sent: Any, received: Any) -> Tensor:
        width = rows.shape[1]
        got = rows.new_empty(sum(received), width)
        self.group.all_to_all(
            got, rows.contiguous(), [n * width for n in received], [n * width for n in sent]
        ).wait()
        return got


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip._there(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.trip._back(grad), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip._back(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.trip._there(grad), None
