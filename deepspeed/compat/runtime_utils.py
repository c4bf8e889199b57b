"""Documented helpers of training scripts: devices, seeds, norms, partitions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import is_rank_zero
from deepspeed.base.memory import memory_usage, see_memory_usage
from deepspeed.base.rng import set_random_seed
from deepspeed.compat.helpers.backward_counts import (
    check_internal_apis_for_count_used_parameters,
    count_parameters,
)
from deepspeed.compat.helpers.gradient_checks import (
    CheckOverflow,
    DummyOptim,
    filter_empty_parameters,
    get_grad_zeros,
    get_inactive_params,
    mask_nan_or_inf_with_val_inplace,
)
from deepspeed.compat.helpers.optimizer_states import offload_adam_states, reload_adam_states
from deepspeed.compat.helpers.partitioned_tensor import PartitionedTensor
from deepspeed.compat.helpers.tensor_structures import (
    align_dense_tensors,
    all_gather_dp_groups,
    all_gather_into_tensor_dp_groups,
    compare_tensors_in_structures,
    get_tensor_bytes,
    is_transformers_cache,
    maybe_loss_for_backward,
)
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
    """Count the ``parameters`` that the running backward will reach: for hooks. Where torch cannot tell, those that
    require gradients. RuntimeError: no backward is running."""
    return count_parameters(parameters, exact=check_internal_apis_for_count_used_parameters())
