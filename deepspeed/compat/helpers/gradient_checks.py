"""Documented helpers about gradients: groups without an optimizer, and whether one is not finite on any rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm import documented_groups as groups


class DummyOptim:
    """Parameter groups without an optimizer, for a ZeRO-3 model that is only evaluated."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params}]


def has_non_finite(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(tensor).all())


class CheckOverflow:
    """Check for gradients that are not finite, on any rank."""

    def __init__(
        self,
        param_groups: Iterable[Iterable[Tensor]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.params = [param for group in param_groups for param in group] if param_groups else None
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed
        self.has_moe_params = any(not getattr(param, "allreduce", True) for param in self.params or [])

    def check(self, param_groups: Iterable[Iterable[Tensor]] | None = None) -> bool:
        """Like `has_overflow`, for these parameter groups or those given to the constructor."""
        params = self.params if param_groups is None else [p for group in param_groups for p in group]
        if params is None:
            raise ValueError("CheckOverflow has no parameters: pass param_groups to it or to check()")
        return self.has_overflow(params)

    def check_using_norm(self, norm_group: Iterable[float | Tensor], reduce_overflow: bool = True) -> bool:
        """Return whether any of the norms, in which -1 also stands for "not finite", indicates an overflow.

        Args:
            reduce_overflow: Ask all ranks. Otherwise only those this rank shares a layer with: the ranks of the
                model-parallel unit, and those that hold other experts if the constructor was given experts.
        """
        norms = torch.as_tensor([float(norm) for norm in norm_group], dtype=torch.float64)
        overflow = bool((~torch.isfinite(norms) | (norms == -1)).any())
        if reduce_overflow:
            return self._anywhere(overflow)
        if self.has_moe_params:
            overflow = self._anywhere(overflow, groups._get_max_expert_parallel_group())
        return overflow if self.mpu is None else self._anywhere(overflow, self.mpu.get_model_parallel_group())

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient on this rank is not finite."""
        return any(self._has_inf_or_nan(param.grad) for param in params if param.grad is not None)

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """Return whether a gradient on any rank is not finite; every rank takes part."""
        return self._anywhere(self.has_overflow_serial(params))

    def _anywhere(self, overflow: bool, group: Any = None) -> bool:
        if not torch.distributed.is_initialized():
            return overflow
        flag = torch.tensor([overflow], dtype=torch.float32, device=get_accelerator().current_device_name())
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group)
        return bool(flag.item())

    @staticmethod
    def _has_inf_or_nan(x: Tensor, index: int | None = None) -> bool:
        return has_non_finite(x)
