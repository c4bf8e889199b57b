"""Compute norms of plain lists of tensors over model-parallel and expert ranks, and clip by them.

Used for gradients outside of buckets: stage 0 with the caller's own training loop, and the documented helpers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.checkpoint.placement import ATTRIBUTE, Placement
from deepspeed.comm import documented_groups as groups
from deepspeed.ops.native import sum_of_squares

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


def is_model_parallel_parameter(p: Tensor) -> bool:
    """Return whether this parameter is split over a model-parallel group, rather than replicated."""
    marked = getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False)
    placed: Placement | None = getattr(p, ATTRIBUTE, None)
    return bool(marked or (placed is not None and "tp" in placed.split))


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the 2-norm of several tensors from their 2-norms.

    The result is inf if one of them is Inf, NaN or negative: some callers report an overflow as -1.
    """
    norms = [float(norm) for norm in norm_list]
    if not all(0 <= norm < math.inf for norm in norms):
        return math.inf
    return math.sqrt(math.fsum(norm**2 for norm in norms))


def _model_parallel(mpu: Any) -> tuple[Any, int]:
    """Return the model-parallel group and the rank in it; (None, 0) without model parallelism."""
    if mpu is None:
        return None, 0
    kind = "tensor_model" if hasattr(mpu, "get_tensor_model_parallel_group") else "model"
    return getattr(mpu, f"get_{kind}_parallel_group")(), getattr(mpu, f"get_{kind}_parallel_rank")()


def _norm(tensors: Sequence[Tensor], norm_type: float, group: Any, device: torch.device) -> Tensor:
    """Return the norm over all tensors and ranks of the group: 0-dim fp32, summed in fp64 and rounded once."""
    maximum = math.isinf(norm_type)
    if norm_type == 2:
        local = sum_of_squares(tensors)
    elif maximum:
        local = max((float(tensor.detach().abs().max()) for tensor in tensors if tensor.numel()), default=0.0)
    else:
        local = math.fsum(float(tensor.detach().abs().double().pow(norm_type).sum()) for tensor in tensors)
    if group is not None:
        operation = torch.distributed.ReduceOp.MAX if maximum else torch.distributed.ReduceOp.SUM
        total = torch.tensor([local], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(total, op=operation, group=group)
        local = float(total)
    value = local if maximum else local ** (1.0 / norm_type)
    return torch.tensor(value, dtype=torch.float32, device=device)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale the gradients in place so that their norm is at most ``max_norm``; return the norm before scaling.

    With a model-parallel unit this is the norm of the whole model: parameters split over its ranks count on each
    rank, replicated ones count once. With experts distributed over ranks (``allreduce = False``), it is the mean over
    the data-parallel ranks, so that all ranks scale by the same factor.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = _norm_over_model(given, attrgetter("grad"), float(norm_type), mpu)
    if torch.distributed.is_initialized() and any(not getattr(p, "allreduce", True) for p in given):
        mean = get_norm_with_moe_layers_fast(norm, groups._get_data_parallel_group())
        norm = torch.full_like(norm, mean)
    _scale_down([p.grad for p in given if p.grad is not None], norm, max_norm, CLIP_EPSILON)
    return norm


def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Return the norm of the weights (0-dim fp32), over the whole model if a model-parallel unit is given."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return _norm_over_model(params, Tensor.detach, float(norm_type), mpu)


def norm_of_gradients(params: Sequence[Tensor], mpu: Any) -> float:
    """Return the 2-norm of all gradients of the model: as ``clip_grad_norm_``, but experts distributed over ranks
    count on each of these. Inf if one is not finite. Collective, also for ranks without gradients."""
    by_group: dict[str, list[Tensor]] = {}
    for param in params:
        name = "" if getattr(param, "allreduce", True) else getattr(param, "group_name", None) or "ep_size_1"
        by_group.setdefault(name, []).append(param)
    everyone, norms = groups._get_data_parallel_group(), list[Tensor]()
    for name, alike in sorted(by_group.items()):
        norm = _norm_over_model(alike, attrgetter("grad"), 2.0, mpu)
        if name and everyone is not None:  # each expert is on as many ranks as there are copies of all
            copies = everyone.size() / groups._expert_parallel_size(name)
            norm = _norm([norm], 2.0, everyone, norm.device) / math.sqrt(copies)
        norms.append(norm)
    return get_global_norm(map(float, norms))


def _norm_over_model(
    params: Sequence[Tensor], value_of: Callable[[Tensor], Tensor | None], norm_type: float, mpu: Any
) -> Tensor:
    """Return the norm of the values that there are, over the model-parallel ranks. Replicated ones count once."""
    group, rank = _model_parallel(mpu)
    device = params[0].device if params else torch.device(get_accelerator().current_device_name())
    counted = [p for p in params if group is None or rank == 0 or is_model_parallel_parameter(p)]
    values = [value for value in map(value_of, counted) if value is not None]
    return _norm(values, norm_type, group, device)


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    use_graph: bool = False,
    moe_ep_group: Any = None,
) -> Tensor:
    """Return the norm of all tensors together, over the ranks of the model-parallel unit: 0-dim fp32.

    Args:
        use_graph: No effect; used to request a CUDA graph.
        moe_ep_group: Ranks over which experts are distributed; their norms are included.
    """
    if not input_tensors:
        raise ValueError("input_tensors is empty: there is nothing to compute a norm of.")
    tensors, device = list(input_tensors), input_tensors[0].device
    norm = _norm(tensors, float(norm_type), _model_parallel(mpu)[0], device)
    return norm if moe_ep_group is None else _norm([norm], float(norm_type), moe_ep_group, device)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: Tensor | float | None = None,
    mpu: Any = None,
    eps: float = CLIP_EPSILON,
    use_graph: bool = False,
) -> Tensor | float:
    """Scale the tensors in place so that their global norm (computed if not given) is at most ``max_norm``.

    `use_graph` has no effect. Return the norm before scaling.
    """
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    _scale_down(input_tensors, norm, max_norm, eps)
    return norm


def _scale_down(tensors: Sequence[Tensor], norm: Tensor | float, max_norm: float, eps: float) -> None:
    # The coefficient is applied even when it is 1, as in torch: checking would wait for the device.
    coefficient = torch.clamp(torch.as_tensor(max_norm / (norm + eps)), max=1.0)
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(coefficient.to(device=tensor.device, dtype=tensor.dtype))


def get_norm_with_moe_layers_fast(all_groups_norm: Tensor | float, group: Any) -> float:
    """Return the mean of the ranks' norms over ``group``."""
    norm = torch.tensor([float(all_groups_norm)], dtype=torch.float64)
    norm = norm.to(get_accelerator().current_device_name())
    torch.distributed.all_reduce(norm, group=group)
    return float(norm) / torch.distributed.get_world_size(group)
