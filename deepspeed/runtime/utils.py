"""Documented helpers of training scripts: devices, seeds, norms, partitions."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.native import sum_of_squares
from deepspeed.utils.memory import see_memory_usage

__all__ = [
    "call_to_str",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "copy_to_device",
    "empty_cache",
    "ensure_directory_exists",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_only_unique_item",
    "is_model_parallel_parameter",
    "move_to_device",
    "noop_context",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
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
    """Makes the directory that ``filename`` is to lie in."""
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
    """Gives cached device memory back, and starts new peaks."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


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
        criterion_func: Which leaves to move; None moves everything that has a method ``to``. The rest stays.
    """

    def moved(leaf: Any) -> Any:
        wanted = hasattr(leaf, "to") if criterion_func is None else criterion_func(leaf)
        return leaf.to(device) if wanted else leaf

    return _rebuilt(item, moved)


def copy_to_device(item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool]) -> Any:
    """As ``move_to_device``, but what is moved is always a copy, detached from the graph."""
    return _rebuilt(item, lambda leaf: leaf.detach().to(device, copy=True) if criterion_func(leaf) else leaf)


# --- Norms ----------------------------------------------------------------------------------------


def is_model_parallel_parameter(p: Tensor) -> bool:
    """Whether the ranks of a model-parallel group hold pieces of this parameter (and not a copy each)."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def get_global_norm(norm_list: Iterable[float]) -> float:
    """2-norm of several parts from their 2-norms."""
    return math.sqrt(math.fsum(norm**2 for norm in norm_list))


def _model_parallel(mpu: Any) -> tuple[Any, int]:
    """Group and rank in it; (None, 0) without model parallelism."""
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
    """Scales the gradients in place so that their norm is at most ``max_norm``; returns the norm from before.

    With a model-parallel unit the norm is that of the whole model: parameters that its ranks hold in
    pieces count on each rank, those that all hold count once.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    params = [param for param in params if param.grad is not None]
    group, rank = _model_parallel(mpu)
    device = params[0].device if params else torch.device(get_accelerator().current_device_name())
    counted = [p for p in params if group is None or rank == 0 or is_model_parallel_parameter(p)]
    norm = _norm([p.grad for p in counted if p.grad is not None], float(norm_type), group, device)
    _scale_down([p.grad for p in params if p.grad is not None], norm, max_norm, CLIP_EPSILON)
    return norm


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Norm of all tensors together, and over the ranks of the model-parallel unit: 0-dim fp32."""
    if not input_tensors:
        raise ValueError("input_tensors is empty: there is nothing to take a norm of.")
    return _norm(list(input_tensors), float(norm_type), _model_parallel(mpu)[0], input_tensors[0].device)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: Tensor | float | None = None,
    mpu: Any = None,
    eps: float = CLIP_EPSILON,
) -> Tensor | float:
    """Scales the tensors in place so that their global norm (computed if not given) is at most
    ``max_norm``.
    """
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    _scale_down(input_tensors, norm, max_norm, eps)
    return norm


def _scale_down(tensors: Sequence[Tensor], norm: Tensor | float, max_norm: float, eps: float) -> None:
    # The coefficient is multiplied in even when it is 1, as torch does: asking would wait for the device.
    coefficient = torch.clamp(torch.as_tensor(max_norm / (norm + eps)), max=1.0)
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(coefficient.to(device=tensor.device, dtype=tensor.dtype))


# --- Partitions -----------------------------------------------------------------------------------


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """Inclusive prefix sums: ``[1, 2, 3]`` gives ``[1, 3, 6]``."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds ``[0, ..., num_items]`` of ``num_parts`` runs of equal length; the first ones take what is
    left over.
    """
    size, left_over = divmod(num_items, num_parts)
    return [part * size + min(part, left_over) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds ``[0, ..., len(weights)]`` of ``num_parts`` runs whose heaviest is as light as can be.

    Among such cuts the weights, then the lengths, are spread as evenly as can be (least sum of squares),
    and the earlier runs are the longer ones. Empty runs occur only where there are fewer items than runs.
    """
    items = len(weights)
    if items <= num_parts:
        return [min(part, items) for part in range(num_parts + 1)]
    sums = [0, *accumulate(weights)]
    limit = _lightest_bottleneck(sums, num_parts)
    # best[i]: cost of cutting items i.. into the runs so far, counted from the last, and minus the first cut.
    best: list[tuple[float, int, int] | None] = [None] * (items + 1)
    best[items] = (0, 0, -items)
    cuts: list[list[int]] = []
    for _ in range(num_parts):
        better: list[tuple[float, int, int] | None] = [None] * (items + 1)
        for start in range(items):
            for stop in range(start + 1, items + 1):
                weight = sums[stop] - sums[start]
                if weight > limit:
                    break
                rest = best[stop]
                if rest is None:
                    continue
                candidate = (weight**2 + rest[0], (stop - start) ** 2 + rest[1], -stop)
                known = better[start]
                if known is None or candidate < known:
                    better[start] = candidate
        best = better
        cuts.append([0 if entry is None else -entry[2] for entry in better])
    bounds = [0]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return bounds


def _lightest_bottleneck(sums: Sequence[float], num_parts: int) -> float:
    """Least weight of the heaviest of ``num_parts`` non-empty runs; ``sums`` are prefix sums from 0."""
    items = len(sums) - 1
    heaviest = [math.inf] * items + [-math.inf]  # of items i.. in the runs so far, counted from the last
    for _ in range(num_parts):
        following, heaviest = heaviest, [math.inf] * (items + 1)
        for start in range(items):
            for stop in range(start + 1, items + 1):
                weight = sums[stop] - sums[start]
                if weight >= heaviest[start]:
                    break
                heaviest[start] = min(heaviest[start], max(weight, following[stop]))
    return heaviest[0]
