"""Documented helpers of training scripts: devices, seeds, norms, partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import is_rank_zero
from deepspeed.base.memory import see_memory_usage
from deepspeed.base.rng import set_random_seed
from deepspeed.compat.helpers.backward_counts import (
    check_internal_apis_for_count_used_parameters,
    count_parameters,
)
from deepspeed.compat.helpers.gradient_checks import CheckOverflow, DummyOptim
from deepspeed.compat.helpers.optimizer_states import offload_adam_states, reload_adam_states
from deepspeed.compat.helpers.partitioned_tensor import PartitionedTensor
from deepspeed.compat.helpers.tensor_structures import align_dense_tensors, all_gather_dp_groups
from deepspeed.ops.partitions import partition_balanced, partition_uniform, prefix_sum_inc
from deepspeed.zero.tensor_norms import (
    clip_grad_norm_,
    clip_tensors_by_global_norm,
    get_flattened_grad_norm,
    get_global_norm,
    get_global_norm_of_tensors,
    get_norm_with_moe_layers,
    get_norm_with_moe_layers_fast,
    get_weight_norm,
    is_model_parallel_parameter,
)

__all__ = [
    "CheckOverflow",
    "DummyOptim",
    "PartitionedTensor",
    "align_dense_tensors",
    "all_gather_dp_groups",
    "call_to_str",
    "check_internal_apis_for_count_used_parameters",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "count_used_parameters_in_backward",
    "empty_cache",
    "get_flattened_grad_norm",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_ma_status",
    "get_norm_with_moe_layers",
    "get_norm_with_moe_layers_fast",
    "get_only_unique_item",
    "get_weight_norm",
    "is_model_parallel_parameter",
    "move_to_device",
    "offload_adam_states",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "reload_adam_states",
    "see_memory_usage",
    "set_random_seed",
]

T = TypeVar("T")

# --- Small things ---------------------------------------------------------------------------------


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


def count_used_parameters_in_backward(parameters: Iterable[Any]) -> int:
    """Count the ``parameters`` that the running backward will reach: for hooks. Where torch cannot tell, those that
    require gradients. RuntimeError: no backward is running."""
    return count_parameters(parameters, exact=check_internal_apis_for_count_used_parameters())
