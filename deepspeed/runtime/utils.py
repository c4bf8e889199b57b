"""Documented helpers of training scripts: devices, seeds, norms, partitions."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.placement import ATTRIBUTE, Placement
from deepspeed.ops.native import sum_of_squares
from deepspeed.runtime.helpers.backward_counts import (
    check_internal_apis_for_count_used_parameters,
    count_parameters,
)
from deepspeed.runtime.helpers.expert_norms import get_norm_with_moe_layers_fast, norm_with_experts
from deepspeed.runtime.helpers.gradient_checks import (
    CheckOverflow,
    DummyOptim,
    filter_empty_parameters,
    get_grad_zeros,
    get_inactive_params,
    mask_nan_or_inf_with_val_inplace,
)
from deepspeed.runtime.helpers.optimizer_states import offload_adam_states, reload_adam_states
from deepspeed.runtime.helpers.partitioned_tensor import PartitionedTensor
from deepspeed.runtime.helpers.partitions import partition_balanced, partition_uniform, prefix_sum_inc
from deepspeed.runtime.helpers.tensor_structures import (
    align_dense_tensors,
    all_gather_dp_groups,
    all_gather_into_tensor_dp_groups,
    compare_tensors_in_structures,
    get_tensor_bytes,
    is_transformers_cache,
    maybe_loss_for_backward,
)
from deepspeed.utils import groups
from deepspeed.utils.logging import is_rank_zero
from deepspeed.utils.memory import memory_usage, see_memory_usage

__all__ = [
    "CheckOverflow",
    "DummyOptim",
    "PartitionedTensor",
    "align_dense_tensors",
    "all_gather_dp_groups",
    "all_gather_into_tensor_dp_groups",
    "call_to_str",
    "check_internal_apis_for_count_used_parameters",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "compare_tensors_in_structures",
    "copy_to_device",
    "count_used_parameters_in_backward",
    "empty_cache",
    "ensure_directory_exists",
    "filter_empty_parameters",
    "get_checkpoint_folder_size",
    "get_flattened_grad_norm",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_grad_zeros",
    "get_inactive_params",
    "get_ma_status",
    "get_norm_with_moe_layers",
    "get_norm_with_moe_layers_fast",
    "get_only_unique_item",
    "get_tensor_bytes",
    "get_weight_norm",
    "is_model_parallel_parameter",
    "is_transformers_cache",
    "mask_nan_or_inf_with_val_inplace",
    "maybe_loss_for_backward",
    "memory_status",
    "move_to_device",
    "noop_context",
    "noop_decorator",
    "offload_adam_states",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "reload_adam_states",
    "see_memory_usage",
    "set_random_seed",
]

T = TypeVar("T")
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_

# --- Small things ---------------------------------------------------------------------------------


def noop_decorator(func: T) -> T:
    return func


class noop_context:
    """A context that does nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        pass


def ensure_directory_exists(filename: str) -> None:
    """Creates the directory of ``filename``."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seeds Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(seed)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """The text of a call: ``call_to_str("f", 1, x=2)`` is ``"f(1, x=2)"``."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def get_only_unique_item(items: Iterable[T]) -> T:
    """The one value that all items have; RuntimeError if they differ."""
    unique = set(items)
    if len(unique) != 1:
        raise RuntimeError(f"Expected one value, and found {len(unique)}: {sorted(map(repr, unique))}.")
    return unique.pop()


def empty_cache() -> None:
    """Releases cached device memory and resets peak counters."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def get_ma_status() -> int:
    """Bytes of device memory that tensors occupy; 0 on ranks other than 0."""
    return get_accelerator().memory_allocated() if is_rank_zero() else 0


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Prints device memory under the title `msg`: on every rank, or on `print_rank` alone."""
    if print_rank != -1 and torch.distributed.is_initialized() and torch.distributed.get_rank() != print_rank:
        return
    print(f"{msg}{memory_usage()}", flush=True)
    if reset_max:
        get_accelerator().reset_peak_memory_stats()


def get_checkpoint_folder_size(save_dir: str, tag: str, local_rank: int | None = None) -> int | None:
    """Bytes of the files under `save_dir/tag`; None where `local_rank` is given and is not 0."""
    if local_rank not in (None, 0):
        return None
    folder = os.path.join(save_dir, tag)
    return sum(
        os.path.getsize(os.path.join(path, file)) for path, _, files in os.walk(folder) for file in files
    )


# --- Moving structures of tensors -----------------------------------------------------------------


def _rebuilt(item: Any, change: Callable[[Any], Any]) -> Any:
    """``item`` with ``change`` applied to each leaf; dicts, lists and tuples keep their type."""
    if isinstance(item, dict):
        changed = {key: _rebuilt(value, change) for key, value in item.items()}
        return changed if type(item) is dict else type(item)(changed)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_rebuilt(value, change) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_rebuilt(value, change) for value in item)
    return change(item)


def move_to_device(
    item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """``item`` with the tensors in its dicts, lists and tuples moved to ``device``.

    Args:
        criterion_func: Which leaves to move; None moves everything with a ``to`` method. The rest stays.
    """

    def moved(leaf: Any) -> Any:
        wanted = hasattr(leaf, "to") if criterion_func is None else criterion_func(leaf)
        return leaf.to(device) if wanted else leaf

    return _rebuilt(item, moved)


def copy_to_device(item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool]) -> Any:
    """Like ``move_to_device``, but what is moved is always a copy, detached from the graph."""
    return _rebuilt(item, lambda leaf: leaf.detach().to(device, copy=True) if criterion_func(leaf) else leaf)


def count_used_parameters_in_backward(parameters: Iterable[Any]) -> int:
    """How many of ``parameters`` the running backward will reach: for hooks. Where torch cannot tell, how many require
    gradients. RuntimeError: no backward is running."""
    return count_parameters(parameters, exact=check_internal_apis_for_count_used_parameters())


# --- Norms ----------------------------------------------------------------------------------------


def is_model_parallel_parameter(p: Tensor) -> bool:
    """Whether the ranks of a model-parallel group hold pieces of this parameter (and not a copy each)."""
    marked = getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False)
    placed: Placement | None = getattr(p, ATTRIBUTE, None)
    return bool(marked or (placed is not None and "tp" in placed.split))


def get_global_norm(norm_list: Iterable[float]) -> float:
    """2-norm of several parts from their 2-norms; inf if one is Inf, NaN or, as norms of overflown gradients are told
    in places, -1."""
    norms = [float(norm) for norm in norm_list]
    if not all(0 <= norm < math.inf for norm in norms):
        return math.inf
    return math.sqrt(math.fsum(norm**2 for norm in norms))


def _model_parallel(mpu: Any) -> tuple[Any, int]:
    """Model-parallel group and the rank in it; (None, 0) without model parallelism."""
    if mpu is None:
        return None, 0
    kind = "tensor_model" if hasattr(mpu, "get_tensor_model_parallel_group") else "model"
    return getattr(mpu, f"get_{kind}_parallel_group")(), getattr(mpu, f"get_{kind}_parallel_rank")()


def _norm(tensors: Sequence[Tensor], norm_type: float, group: Any, device: torch.device) -> Tensor:
    """Norm over all tensors and ranks of the group: 0-dim fp32, summed in fp64 and rounded once."""
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
    """Scales the gradients in place so that their norm is at most ``max_norm``; returns the norm before scaling.

    With a model-parallel unit the norm is that of the whole model: parameters partitioned across its
    ranks count on each rank, replicated ones count once. With experts that ranks spread (``allreduce = False``), it is
    the mean over the data-parallel ranks, so that all scale alike.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    params = [param for param in given if param.grad is not None]
    group, rank = _model_parallel(mpu)
    device = params[0].device if params else torch.device(get_accelerator().current_device_name())
    counted = [p for p in params if group is None or rank == 0 or is_model_parallel_parameter(p)]
    norm = _norm([p.grad for p in counted if p.grad is not None], float(norm_type), group, device)
    if torch.distributed.is_initialized() and any(not getattr(p, "allreduce", True) for p in given):
        mean = get_norm_with_moe_layers_fast(norm, groups._get_data_parallel_group())
        norm = torch.full_like(norm, mean)
    _scale_down([p.grad for p in params if p.grad is not None], norm, max_norm, CLIP_EPSILON)
    return norm


def get_flattened_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    grad_norm_mask: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> Tensor:
    """Norm of gradients, each flat in one tensor; 0-dim fp32, over the ranks of a model-parallel unit.

    Args:
        grad_norm_mask: For each parameter the (begin, end) of elements not counted here because they are elsewhere.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    masks = grad_norm_mask if grad_norm_mask is not None else [()] * len(params)
    group, _ = _model_parallel(mpu)
    device = params[0].device if params else torch.device(get_accelerator().current_device_name())
    pieces = [
        piece
        for param, mask in zip(params, masks, strict=True)
        if param.grad is not None
        for piece in _outside(param.grad.reshape(-1), mask)
    ]
    return _norm(pieces, float(norm_type), group, device)


def _outside(flat: Tensor, mask: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The pieces of a flat tensor between masked intervals."""
    begins = [0, *(int(end) for _, end in sorted(map(tuple, mask)))]
    ends = [*(int(begin) for begin, _ in sorted(map(tuple, mask))), flat.numel()]
    return [flat[begin:end] for begin, end in zip(begins, ends, strict=True) if begin < end]


def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Norm of weights: 0-dim fp32; with a model-parallel unit that of the whole model."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    group, rank = _model_parallel(mpu)
    device = params[0].device if params else torch.device(get_accelerator().current_device_name())
    counted = [p.detach() for p in params if group is None or rank == 0 or is_model_parallel_parameter(p)]
    return _norm(counted, float(norm_type), group, device)


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    use_graph: bool = False,
    moe_ep_group: Any = None,
) -> Tensor:
    """Norm of all tensors together, and over the ranks of the model-parallel unit: 0-dim fp32.

    Args:
        use_graph: No effect; used to request a CUDA graph.
        moe_ep_group: Ranks over which experts are distributed: their parts are added too.
    """
    if not input_tensors:
        raise ValueError("input_tensors is empty: there is nothing to take a norm of.")
    tensors, device = list(input_tensors), input_tensors[0].device
    norm = _norm(tensors, float(norm_type), _model_parallel(mpu)[0], device)
    return norm if moe_ep_group is None else _norm([norm], float(norm_type), moe_ep_group, device)


def get_norm_with_moe_layers(
    non_expert_norm: Tensor | float,
    mpu: Any,
    expert_tensors: Mapping[str, Sequence[Tensor]],
    norm_type: float = 2,
) -> float:
    """Norm of all parameters or gradients, from that of the others and this rank's tensors of the experts, by the name
    of their expert group (``MoE``'s ``expert_group_name``)."""
    known = [
        (get_global_norm_of_tensors(tensors, norm_type, mpu), groups._get_expert_parallel_group(name))
        for name, tensors in expert_tensors.items()
        if tensors
    ]
    return norm_with_experts(non_expert_norm, known, float(norm_type))


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: Tensor | float | None = None,
    mpu: Any = None,
    eps: float = CLIP_EPSILON,
    use_graph: bool = False,
) -> Tensor | float:
    """Scales the tensors in place so that their global norm (computed if not given) is at most
    ``max_norm``. `use_graph` has no effect.
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
