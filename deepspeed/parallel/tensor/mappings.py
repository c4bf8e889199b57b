"""Differentiable communication at the boundaries of tensor-parallel regions.

Conjugate pairs (Shoeybi et al.: Megatron-LM, 2019, and Korthikanti et al.: Reducing Activation Recomputation in Large
Transformer Models, 2022):

    function            forward          backward
    copy_to             identity         all-reduce
    reduce_from         all-reduce       identity
    gather_from         all-gather       own part
    split_to            own part         all-gather
    gather_sequence     all-gather       reduce-scatter
    scatter_sequence    reduce-scatter   all-gather
    shared_weight       identity         all-reduce of elements held by several ranks
    gather_whole       all-gather       own part

All are collective over the ranks of the ``Communicator``, in forward or backward, and return their input if there is
one rank. Sums are the communicator's: in rank order, in fp32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.parallel.tensor.cuts import Cut

Map: TypeAlias = Callable[[Tensor], Tensor]


@untraced
def copy_to(inputs: Tensor, group: Communicator) -> Tensor:
    """Pass ``inputs``, equal on all ranks, into a region whose work is partitioned over the ranks: their gradient is
    summed."""
    return _mapped(inputs, group, _same, lambda grad: _summed(grad, group))


@untraced
def reduce_from(inputs: Tensor, group: Communicator) -> Tensor:
    """Sum all ranks' ``inputs``, for work replicated on all ranks."""
    return inputs if group.size == 1 else _Sum.apply(inputs, group, False)


@untraced
def reduce_from_(inputs: Tensor, group: Communicator) -> Tensor:
    """Do ``reduce_from`` in place, for a fresh tensor that no one else uses and its backward does not need."""
    return inputs if group.size == 1 else _Sum.apply(inputs, group, True)


@untraced
def gather_from(inputs: Tensor, group: Communicator, cut: Cut) -> Tensor:
    """Gather the tensor split by ``cut``, for work replicated on all ranks."""
    return _mapped(
        inputs, group, lambda part: _whole(part, group, cut), lambda grad: _own_part(grad, group.rank, cut)
    )


@untraced
def split_to(inputs: Tensor, group: Communicator, cut: Cut) -> Tensor:
    """Return the rank's part by ``cut`` of ``inputs``, equal on all ranks. Parts of the ranks must not overlap."""
    return _mapped(
        inputs, group, lambda x: cut.take(x, group.rank).contiguous(), lambda grad: _whole(grad, group, cut)
    )


@untraced
def gather_sequence(inputs: Tensor, group: Communicator, dim: int = 0, length: int | None = None) -> Tensor:
    """Concatenate all ranks' ``inputs`` [.., n, ..] along ``dim``, for work partitioned over the ranks.

    ``length``: of the result, if less than ``n x ranks`` because the last ranks' inputs end in padding.
    """
    return _mapped(
        inputs,
        group,
        lambda own: _all_gathered(own, group, dim, length),
        lambda grad: _reduce_scattered(grad, group, dim),
    )


@untraced
def scatter_sequence(inputs: Tensor, group: Communicator, dim: int = 0) -> Tensor:
    """Return the rank's part along ``dim`` of the sum of all ranks' ``inputs`` [.., length, ..]: ``ceil(length /
    ranks)`` wide, padded with zeros if the length does not divide."""
    length = inputs.shape[dim]
    return _mapped(
        inputs,
        group,
        lambda x: _reduce_scattered(x, group, dim),
        lambda grad: _all_gathered(grad, group, dim, length),
    )


@untraced
def split_sequence(inputs: Tensor, group: Communicator, dim: int = 0) -> Tensor:
    """Return the rank's part along ``dim`` of ``inputs``, equal on all ranks, padded as by ``scatter_sequence``."""
    length = inputs.shape[dim]
    return _mapped(
        inputs, group, lambda x: _own_run(x, group, dim), lambda grad: _all_gathered(grad, group, dim, length)
    )


@untraced
def join_sequence(inputs: Tensor, group: Communicator, dim: int = 0, length: int | None = None) -> Tensor:
    """Undo ``split_sequence``, for work replicated on all ranks."""
    return _mapped(
        inputs,
        group,
        lambda own: _all_gathered(own, group, dim, length),
        lambda grad: _own_run(grad, group, dim),
    )


@untraced
def shared_weight(weight: Tensor, group: Communicator, cut: Cut | None = None) -> Tensor:
    """Return a weight whose elements are used by several ranks, each for a part of the work: gradients are summed.

    ``cut``: of the weight; None: it is replicated.
    """
    if group.size == 1 or (cut is not None and not cut.shared()):
        return weight
    total = _summed if cut is None else partial(_summed_where_shared, cut=cut)
    return mapped(weight, _same, lambda grad: total(grad, group))


@untraced
def gather_whole(part: Tensor, group: Communicator, cut: Cut) -> Tensor:
    """Gather the tensor split by ``cut`` for ranks that then use only their own part, transformed with knowledge of the
    whole (the range of a quantization)."""
    return _mapped(part, group, lambda own: _whole(own, group, cut), lambda grad: cut.take(grad, group.rank))


def _mapped(inputs: Tensor, group: Communicator, forward: Map, backward: Map) -> Tensor:
    return inputs if group.size == 1 else mapped(inputs, forward, backward)


def mapped(inputs: Tensor, forward: Map, backward: Map) -> Tensor:
    """Return ``forward(inputs)``, computed outside autograd; the gradient is ``backward(gradient of the result)``."""
    return _Mapping.apply(inputs, forward, backward)


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.map = backward
        return forward(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.map(grad), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Communicator, in_place: bool) -> Tensor:
        if not in_place or not inputs.is_contiguous():
            return _summed(inputs, group)
        ctx.mark_dirty(inputs)
        group.all_reduce(inputs).wait()
        return inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


# --- Moving bytes, outside autograd ---------------------------------------------------------------------------


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _summed(tensor: Tensor, group: Communicator) -> Tensor:
    """All-reduce into a new tensor: autograd may pass the same gradient elsewhere, and callers may reuse inputs."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total).wait()
    return total


def _parts(tensor: Tensor, group: Communicator) -> Tensor:
    """Gather every rank's ``tensor``, of the same shape everywhere, into [ranks, *shape]."""
    tensor = tensor.contiguous()
    parts = tensor.new_empty((group.size, *tensor.shape))
    group.all_gather(parts.view(-1), tensor.view(-1)).wait()
    return parts


def _padded(tensor: Tensor, dim: int, extent: int) -> Tensor:
    """Pad ``tensor`` with zeros at the end of ``dim``, up to ``extent``."""
    missing = extent - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _whole(tensor: Tensor, group: Communicator, cut: Cut) -> Tensor:
    """Gather the tensor split by ``cut``."""
    extents = cut.extents
    if tensor.shape[cut.dim] != extents[group.rank]:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is not rank {group.rank}'s part, which is {extents[group.rank]} "
            f"wide in dim {cut.dim}"
        )
    parts = _parts(_padded(tensor, cut.dim, max(extents)), group)
    return cut.joined([part.narrow(cut.dim, 0, n) for part, n in zip(parts, extents, strict=True)])


def _own_part(grad: Tensor, rank: int, cut: Cut) -> Tensor:
    """Return the rank's part by ``cut`` of the whole gradient, zero for elements taken from another rank."""
    own, elsewhere = cut.take(grad, rank), cut.elsewhere(rank)
    if elsewhere:
        own = own.clone()
        for (low, high), _ in cut.local(rank, elsewhere):
            own.narrow(cut.dim, low, high - low).zero_()
    return own


def _all_gathered(tensor: Tensor, group: Communicator, dim: int, length: int | None) -> Tensor:
    parts = _parts(tensor, group)
    dim = dim % tensor.dim()
    whole = parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)
    return whole if length is None else whole.narrow(dim, 0, length)


def _reduce_scattered(tensor: Tensor, group: Communicator, dim: int) -> Tensor:
    return begin_reduce_scatter(tensor, group, dim).wait()


class Scattering(NamedTuple):
    """A reduce-scatter in flight; ``source`` must stay alive until ``wait``."""

    own: Tensor
    source: Tensor
    pending: Pending

    def wait(self) -> Tensor:
        self.pending.wait()
        return self.own


def begin_reduce_scatter(tensor: Tensor, group: Communicator, dim: int) -> Scattering:
    """Start the reduce-scatter of ``scatter_sequence``, outside autograd, and return its handle."""
    dim = dim % tensor.dim()
    run = -(-tensor.shape[dim] // group.size)
    whole = _padded(tensor, dim, run * group.size)
    # The rank becomes the first dim: a copy unless the sequence is the first dim.
    parts = whole.unflatten(dim, (group.size, run)).movedim(dim, 0).contiguous()
    own = parts.new_empty(parts.shape[1:])
    return Scattering(own, parts, group.reduce_scatter(own.view(-1), parts.view(-1)))


def _own_run(tensor: Tensor, group: Communicator, dim: int) -> Tensor:
    run = -(-tensor.shape[dim] // group.size)
    low = min(run * group.rank, tensor.shape[dim])
    own = tensor.narrow(dim, low, min(run, tensor.shape[dim] - low))
    return _padded(own, dim, run).contiguous()


def _summed_where_shared(grad: Tensor, group: Communicator, cut: Cut) -> Tensor:
    """Sum the elements of ``grad`` that several ranks hold over these ranks; only they are communicated."""
    shared = cut.shared()
    starts = [sum(b - a for a, b in shared[:i]) for i in range(len(shared))]
    shape = list(grad.shape)
    shape[cut.dim] = sum(high - low for low, high in shared)
    total = grad.new_zeros(shape)
    runs = [  # (position in ``grad``, position in ``total``, extent)
        (own[0], start + whole[0] - interval[0], own[1] - own[0])
        for interval, start in zip(shared, starts, strict=True)
        for own, whole in cut.local(group.rank, [interval])
    ]
    for position, target, extent in runs:
        total.narrow(cut.dim, target, extent).copy_(grad.narrow(cut.dim, position, extent))
    group.all_reduce(total).wait()
    result = grad.clone(memory_format=torch.contiguous_format)
    for position, target, extent in runs:
        result.narrow(cut.dim, position, extent).copy_(total.narrow(cut.dim, target, extent))
    return result
