"""Documented path of the parallel layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from deepspeed.runtime.tensor_parallel.config import AUTOTP_MODE
from deepspeed.runtime.tensor_parallel.fused_layers import SubParamLinearAllreduce, SubParamLinearLayer
from deepspeed.runtime.tensor_parallel.layers import LinearAllreduce, LinearLayer

__all__ = [
    "GatherReplacedLayerParams",
    "LinearAllreduce",
    "LinearLayer",
    "SubParamLinearAllreduce",
    "SubParamLinearLayer",
    "get_auto_tp_mode",
    "is_autotp_training_mode",
    "set_autotp_mode",
]


def set_autotp_mode(training: bool = False) -> None:
    """Nothing: layers have gradients wherever autograd records, and none under ``torch.no_grad``."""


def get_auto_tp_mode() -> AUTOTP_MODE:
    """TRAINING: layers can always be trained."""
    return AUTOTP_MODE.TRAINING


def is_autotp_training_mode() -> bool:
    return True


class GatherReplacedLayerParams:
    """Within it, those of ``params`` of which each tensor-parallel rank has a part are whole: to be read, or changed
    alike on all ranks. Collective; not for layers that stage 3 trains.

    Args:
        params: one parameter, or several; others than those of parallel layers are left alone.
        module: whose they are; accepted for compatibility.
        enabled: False: do nothing.
    """

    def __init__(self, params: Iterable[Tensor] | Tensor, module: nn.Module, enabled: bool = True) -> None:
        given: list[Any] = [params] if isinstance(params, Tensor) else list(params)
        self.params = [param for param in given if enabled and hasattr(param, "gather_params")]

    def __enter__(self) -> None:
        for param in self.params:
            param.gather_params([param])

    def __exit__(self, *_: object) -> None:
        for param in self.params:
            param._tp_partition([param])
