"""Parallel layers whose weight is several matrices side by side (q, k and v; gate and up), each of which is split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.tensor.cuts import Cut, even_sizes
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from deepspeed.parallel.tensor.ranks import communicator_of
from deepspeed.zero import params as zero_params

Shape = Sequence[int | Sequence[int]]


class SubParamLinearLayer(LinearLayer):
    """Column-parallel, of matrices side by side along the outputs.

    ``shape``: the weight [outputs, inputs] as these matrices: at ``partition_dim`` (0) their number, as in ``(3, -1)``,
    or their extents, as in ``((64, 16, 16), -1)``. The rest is as in ``LinearLayer``.

    ValueError: the shape does not fit the weight.
    """

    def __init__(
        self,
        module: nn.Module,
        mp_group: Communicator | ProcessGroup | None,
        shape: Shape,
        partition_dim: int = 0,
        **kwargs: Any,
    ) -> None:
        self_sizes = extents_of(module, shape, partition_dim, 0)
        super().__init__(module, mp_group, cut=_cut(self_sizes, mp_group), **kwargs)
        self.subparam_sizes = self._subparam_sizes = self_sizes
        self._describe(shape)


class SubParamLinearAllreduce(LinearAllreduce):
    """Row-parallel, of matrices side by side along the inputs; ``shape`` as in ``SubParamLinearLayer``, with
    ``partition_dim`` 1."""

    def __init__(
        self,
        module: nn.Module,
        mp_group: Communicator | ProcessGroup | None,
        shape: Shape,
        partition_dim: int = 1,
        **kwargs: Any,
    ) -> None:
        self_sizes = extents_of(module, shape, partition_dim, 1)
        super().__init__(module, mp_group, cut=_cut(self_sizes, mp_group), **kwargs)
        self.subparam_sizes = self._subparam_sizes = self_sizes
        self._describe(shape)


def extents_of(module: nn.Module, shape: Shape, partition_dim: int, dim: int) -> tuple[int, ...]:
    """The extents of the matrices along ``dim`` of the weight [outputs, inputs]."""
    if partition_dim != dim:
        raise ValueError(
            f"partition_dim={partition_dim}: this layer is split along dim {dim} of its weight [outputs, inputs]"
        )
    weight: Any = module.weight
    size = zero_params.full_shape(weight)[dim]
    stated = shape[dim]
    if isinstance(stated, Sequence):
        extents = tuple(int(extent) for extent in stated)
    else:
        count = int(stated) if stated > 0 else 1
        extents = (size // count,) * count
    if sum(extents) != size:
        raise ValueError(f"the shape {tuple(shape)} does not fit a weight that is {size} wide in dim {dim}")
    return extents


def _cut(extents: Sequence[int], mp_group: Communicator | ProcessGroup | None) -> Cut:
    ranks = communicator_of(mp_group).size
    return Cut.fused(0, [even_sizes(extent, ranks, 1) for extent in extents])
