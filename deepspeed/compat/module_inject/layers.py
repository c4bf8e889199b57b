"""Documented path of the parallel layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.comm.collectives import Communicator
from deepspeed.compat.module_inject.plain_layers import EmbeddingLayer, Normalize, OPTEmbedding, RMSNormalize
from deepspeed.config.sections.tensor import AUTOTP_MODE
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.described import universal_checkpoint_info
from deepspeed.parallel.tensor.fused_layers import SubParamLinearAllreduce, SubParamLinearLayer
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from deepspeed.parallel.tensor.layers import TensorParallelLayer as TensorParallel_Layer
from deepspeed.parallel.tensor.mappings import copy_to, gather_from, reduce_from
from deepspeed.parallel.tensor.ranks import communicator_of

__all__ = [
    "ColumnParallel",
    "Conv_LinearALlreduce",
    "EmbeddingLayer",
    "GatherFromTensorParallelRegion",
    "GatherReplacedLayerParams",
    "GateUpPack_LinearLayer",
    "LinearAllreduce",
    "LinearLayer",
    "LmHeadLinearAllreduce",
    "Normalize",
    "OPTEmbedding",
    "RMSNormalize",
    "RowParallel",
    "SubParamLinearAllreduce",
    "SubParamLinearLayer",
    "TensorParallel_Layer",
    "VocabParallelLinear",
    "add_bias",
    "collect_autotp_universal_checkpoint_info",
    "conv_LinearLayer",
    "get_auto_tp_mode",
    "is_autotp_training_mode",
    "set_autotp_mode",
]

conv_LinearLayer = LinearLayer
Conv_LinearALlreduce = LinearAllreduce
"""Both know Transformers' ``Conv1D``."""

collect_autotp_universal_checkpoint_info = universal_checkpoint_info

Group = Communicator | ProcessGroup | None


def set_autotp_mode(training: bool = False) -> None:
    """Nothing: layers have gradients wherever autograd records, and none under ``torch.no_grad``."""


def get_auto_tp_mode() -> AUTOTP_MODE:
    """TRAINING: layers can always be trained."""
    return AUTOTP_MODE.TRAINING


def is_autotp_training_mode() -> bool:
    return True


def add_bias(input: Tensor, bias: Tensor | None) -> Tensor:
    """``input``, to which ``bias`` is added in place where autograd allows it; None adds nothing."""
    if bias is None:
        return input
    return input + bias if torch.is_grad_enabled() else input.add_(bias)


class LmHeadLinearAllreduce(LinearAllreduce):
    """Row-parallel, of an input that is whole on every rank: each takes its part of it."""

    def __init__(self, module: nn.Module, mp_group: Group, **kwargs: Any) -> None:
        super().__init__(module, mp_group, split_input=True, **kwargs)


class VocabParallelLinear(LinearLayer):
    """A head that leaves its logits in parts, and says which words they are: ``configure_vocab_parallel_loss`` gives a
    model the loss for it.

    ValueError: there are more ranks than words.
    """

    is_vocab_parallel_lm_head = True

    def __init__(self, module: nn.Module, mp_group: Group = None, **kwargs: Any) -> None:
        super().__init__(module, mp_group, gather_output=False, **kwargs)
        sizes, rank = self.cut.extents, self.group.rank
        self.vocab_size = self.cut.size
        if 0 in sizes:
            raise ValueError(
                f"{self.vocab_size} words cannot be shared by {len(sizes)} ranks: use at most as many"
            )
        self.vocab_start_index = sum(sizes[:rank])
        self.vocab_end_index = self.vocab_start_index + sizes[rank]


class GateUpPack_LinearLayer(SubParamLinearLayer):
    """Column-parallel, of the two matrices of a gated unit one after the other."""

    def __init__(self, module: nn.Module, mp_group: Group = None, **kwargs: Any) -> None:
        super().__init__(module, mp_group, (2, -1), 0, **kwargs)


class RowParallel:
    """``apply(group, input, is_inference_mode)``: the sum over the ranks; its gradient passes as it is."""

    @staticmethod
    def apply(group: Group, input: Tensor, is_inference_mode: bool = False) -> Tensor:
        return reduce_from(input, communicator_of(group))


class ColumnParallel:
    """``apply(group, input)``: ``input`` itself; its gradient is summed over the ranks."""

    @staticmethod
    def apply(group: Group, input: Tensor) -> Tensor:
        return copy_to(input, communicator_of(group))


class GatherFromTensorParallelRegion:
    """``apply(group, input, partition_sizes)``: the parts of all ranks, of these extents, along the last dim."""

    @staticmethod
    def apply(group: Group, input: Tensor, partition_sizes: Sequence[int]) -> Tensor:
        return gather_from(input, communicator_of(group), Cut.of_sizes(-1, partition_sizes))


class GatherReplacedLayerParams:
    """A block in which parameters of parallel layers below ``module`` are whole. Collective over the ranks that share
    them; what the block writes to them is kept.

    Args:
        params: the parameters, or one. Others are left as they are.
        module: where their layers are.
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
