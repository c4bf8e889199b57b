"""Documented helpers about gradients: which parameters have one, and whether one is not finite."""

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


def filter_empty_parameters(params: Any) -> Any:
    """The parameters, or parameter groups, without empty parameters; groups left empty are removed too."""
    items = list(params)
    if items and isinstance(items[0], dict):
        groups = [{**group, "params": _with_elements(group["params"])} for group in items]
        return [group for group in groups if group["params"]]
    return _with_elements(items)


def _with_elements(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [p for p in ([params] if isinstance(params, Tensor) else params) if _numel(p) > 0]


def _numel(param: Tensor) -> int:
    return getattr(param, "ds_numel", param.numel())  # ZeRO-3 leaves a partitioned parameter empty


def get_grad_zeros(parameters: Tensor | Iterable[Tensor], mpu: Any = None) -> Tensor:
    """Count the elements of the gradients that are exactly 0, over the ranks of a model-parallel unit: 0-dim fp32."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    zeros = sum(grad.numel() - int(torch.count_nonzero(grad)) for grad in grads)
    device = grads[0].device if grads else torch.device(get_accelerator().current_device_name())
    total = torch.tensor(zeros, dtype=torch.float64, device=device)
    if mpu is not None:
        torch.distributed.all_reduce(total, group=mpu.get_model_parallel_group())
    return total.float()


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """The partitioned parameters among these that are not currently gathered."""
    # by name: this module is a layer below ZeRO
    return [p for p in param_list if getattr(getattr(p, "ds_status", None), "name", "") == "NOT_AVAILABLE"]


def mask_nan_or_inf_with_val_inplace(
    input: Tensor, device: torch.device | str | None = None, val: float = -1.0
) -> None:
    """Overwrite a norm that is not finite with `val`, in place and without waiting for the device."""
    mark = torch.tensor(val, dtype=input.dtype, device=input.device if device is None else device)
    input.copy_(torch.where(torch.isfinite(input), input, mark.to(input.device)))


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
