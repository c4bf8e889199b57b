"""Documented path of the parallel layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.comm.collectives import Communicator, communicator_of
from deepspeed.config.sections.parallel import AUTOTP_MODE
from deepspeed.parallel.tensor.cuts import Cut, even_sizes
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from deepspeed.parallel.tensor.layers import TensorParallelLayer as TensorParallel_Layer
from deepspeed.parallel.tensor.metadata import universal_checkpoint_info
from deepspeed.zero import params as zero_params

__all__ = [
    "GatherReplacedLayerParams", "GateUpPack_LinearLayer", "LinearAllreduce", "LinearLayer",
    "LmHeadLinearAllreduce", "SubParamLinearAllreduce", "SubParamLinearLayer", "TensorParallel_Layer",
    "VocabParallelLinear", "collect_autotp_universal_checkpoint_info", "get_auto_tp_mode",
    "is_autotp_training_mode", "set_autotp_mode",
]  # fmt: skip

# Parallel layers whose weight is several matrices side by side (q, k and v; gate and up), each split individually.

Shape = Sequence[int | Sequence[int]]


class SubParamLinearLayer(LinearLayer):
    """Column-parallel layer whose weight is several matrices side by side along the outputs.

    ``shape``: the weight [outputs, inputs] as these matrices. Its entry at ``partition_dim`` (0) is their number, as in
    ``(3, -1)``, or their extents, as in ``((64, 16, 16), -1)``. Other arguments as in ``LinearLayer``.

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
    """Row-parallel layer whose weight is several matrices side by side along the inputs; ``shape`` as in
    ``SubParamLinearLayer``, with ``partition_dim`` 1."""

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
    """Return the extents of the matrices along ``dim`` of the weight [outputs, inputs]."""
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
        raise ValueError(f"the shape {tuple(shape)} does not match a weight that is {size} wide in dim {dim}")
    return extents


def _cut(extents: Sequence[int], mp_group: Communicator | ProcessGroup | None) -> Cut:
    ranks = communicator_of(mp_group).size
    return Cut.fused(0, [even_sizes(extent, ranks, 1) for extent in extents])


collect_autotp_universal_checkpoint_info = universal_checkpoint_info

Group = Communicator | ProcessGroup | None


def set_autotp_mode(training: bool = False) -> None:
    """Do nothing: layers have gradients whenever autograd records, and none under ``torch.no_grad``."""


def get_auto_tp_mode() -> AUTOTP_MODE:
    """Return TRAINING: layers can always be trained."""
    return AUTOTP_MODE.TRAINING


def is_autotp_training_mode() -> bool:
    return True


class LmHeadLinearAllreduce(LinearAllreduce):
    """Row-parallel layer with a replicated input, of which each rank takes its part."""

    def __init__(self, module: nn.Module, mp_group: Group, **kwargs: Any) -> None:
        super().__init__(module, mp_group, split_input=True, **kwargs)


class VocabParallelLinear(LinearLayer):
    """Head that leaves its logits split over the vocabulary, with their range of words;
    ``configure_vocab_parallel_loss`` gives a model the matching loss.

    ValueError: there are more ranks than words.
    """

    is_vocab_parallel_lm_head = True

    def __init__(self, module: nn.Module, mp_group: Group = None, **kwargs: Any) -> None:
        super().__init__(module, mp_group, gather_output=False, **kwargs)
        sizes, rank = self.cut.extents, self.group.rank
        self.vocab_size = self.cut.size
        if 0 in sizes:
            raise ValueError(
                f"{self.vocab_size} vocabulary entries cannot be split over {len(sizes)} ranks: use at "
                "most that many ranks"
            )
        self.vocab_start_index = sum(sizes[:rank])
        self.vocab_end_index = self.vocab_start_index + sizes[rank]


class GateUpPack_LinearLayer(SubParamLinearLayer):
    """Column-parallel layer of the two matrices of a gated unit, one after the other."""

    def __init__(self, module: nn.Module, mp_group: Group = None, **kwargs: Any) -> None:
        super().__init__(module, mp_group, (2, -1), 0, **kwargs)


class GatherReplacedLayerParams:
    """Context manager in which parameters of parallel layers below ``module`` are whole. On exit, changes to them are
    kept. Collective over the ranks that share them.

    Args:
        params: a parameter, or several. Others than those of parallel layers are left alone.
        module: the module that contains their layers.
        enabled: False: do nothing.
    """

    def __init__(self, params: Iterable[Tensor] | Tensor, module: nn.Module, enabled: bool = True) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self.params = [each for each in given if hasattr(each, "gather_params")] if enabled else []
        self.module = module

    def __enter__(self) -> None:
        for param in self.params:
            param.gather_params([param])  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        for param in self.params:
            param._tp_partition([param])  # type: ignore[attr-defined]
