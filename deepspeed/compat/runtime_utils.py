"""Documented helpers for training scripts: devices, seeds, norms, lists of tensors, partitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import is_rank_zero
from deepspeed.base.memory import see_memory_usage
from deepspeed.base.rng import set_random_seed
from deepspeed.comm import documented_groups as groups
from deepspeed.compat.nested import rebuilt
from deepspeed.compat.offload_states import offload_adam_states, reload_adam_states
from deepspeed.ops.partitions import partition_balanced, partition_uniform, prefix_sum_inc
from deepspeed.zero.tensor_norms import (
    clip_grad_norm_,
    clip_tensors_by_global_norm,
    get_global_norm,
    get_global_norm_of_tensors,
    get_norm_with_moe_layers_fast,
    get_weight_norm,
    is_model_parallel_parameter,
)

__all__ = [
    "CheckOverflow", "DummyOptim", "PartitionedTensor", "align_dense_tensors", "all_gather_dp_groups",
    "call_to_str", "check_internal_apis_for_count_used_parameters", "clip_grad_norm_",
    "clip_tensors_by_global_norm", "count_used_parameters_in_backward", "empty_cache",
    "get_global_norm", "get_global_norm_of_tensors", "get_ma_status",
    "get_norm_with_moe_layers_fast", "get_weight_norm",
    "is_model_parallel_parameter", "mask_nan_or_inf_with_val_inplace", "move_to_device",
    "offload_adam_states", "partition_balanced", "partition_uniform", "prefix_sum_inc",
    "reload_adam_states", "see_memory_usage", "set_random_seed",
]  # fmt: skip

T = TypeVar("T")

# --- Small things ---------------------------------------------------------------------------------


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return the text of a call: ``call_to_str("f", 1, x=2)`` is ``"f(1, x=2)"``."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def empty_cache() -> None:
    """Release cached device memory and reset peak counters."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def get_ma_status() -> int:
    """Return the bytes of device memory that tensors occupy; 0 on ranks other than 0."""
    return get_accelerator().memory_allocated() if is_rank_zero() else 0


def mask_nan_or_inf_with_val_inplace(
    input: Tensor, device: torch.device | str | None = None, val: float = -1.0
) -> None:
    """Set the entries of ``input`` that are not finite to ``val``. ``device`` is not needed."""
    input.masked_fill_(~input.isfinite(), val)


# --- Moving structures of tensors -----------------------------------------------------------------


def move_to_device(
    item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return ``item`` with the tensors in its dicts, lists and tuples moved to ``device``.

    Args:
        criterion_func: selects the leaves to move; None: all with a ``to`` method.
    """

    def moved(leaf: Any) -> Any:
        wanted = hasattr(leaf, "to") if criterion_func is None else criterion_func(leaf)
        return leaf.to(device) if wanted else leaf

    return rebuilt(item, moved)


def count_used_parameters_in_backward(parameters: Iterable[Any]) -> int:
    """Count the ``parameters`` that the running backward will reach (for hooks); if torch lacks the API, those that
    require gradients. RuntimeError: no backward is running."""
    trainable = [p for p in parameters if isinstance(p, Tensor) and p.requires_grad]
    if not check_internal_apis_for_count_used_parameters():
        return len(trainable)
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError("count_used_parameters_in_backward must be called during backward execution")
    with torch.enable_grad():  # a parameter's node is found through a view of it
        nodes = [torch.autograd.graph._get_grad_fn_or_grad_acc(p) for p in trainable]
    return sum(torch._C._will_engine_execute_node(node) for node in nodes)


def check_internal_apis_for_count_used_parameters() -> bool:
    """Return whether torch has the APIs to tell which parameters a running backward will reach."""
    return hasattr(torch.autograd.graph, "_get_grad_fn_or_grad_acc") and all(
        hasattr(torch._C, name) for name in ("_current_graph_task_id", "_will_engine_execute_node")
    )


# --- Lists of tensors -----------------------------------------------------------------------------


def detach_variable(inputs: Any, device: torch.device | str | None = None) -> tuple[Any, ...]:
    """Return a tuple with its tensors detached, with their ``requires_grad`` kept, and moved to ``device`` if given.

    TypeError: not a tuple.
    """
    if not isinstance(inputs, tuple):
        raise TypeError(
            f"detach_variable needs a tuple of tensors and other values, not a {type(inputs).__name__}"
        )

    def detached(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        moved = item if device is None else item.to(device=device)
        return moved.detach().requires_grad_(item.requires_grad)

    return tuple(map(detached, inputs))


def align_dense_tensors(tensor_list: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """Return the flat tensors, plus a tensor of zeros if their total number of elements is not a multiple of
    `alignment`."""
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    return [*tensor_list, tensor_list[0].new_zeros(missing)] if missing else list(tensor_list)


def all_gather_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """All-gather each flat tensor from the ranks' slices, `allgather_bucket_size` elements of all ranks at a time.

    Chunks begin at multiples of `start_alignment_factor` elements of a slice.
    """
    for slices, group in zip(partitioned_param_groups, dp_process_group, strict=True):
        ranks, rank = len(slices), torch.distributed.get_rank(group)
        size = max(1, allgather_bucket_size // ranks)
        size = max(start_alignment_factor, size - size % start_alignment_factor)
        for begin in range(0, slices[rank].numel(), size):
            pieces = [part[begin : begin + size] for part in slices]
            torch.distributed.all_gather(pieces, pieces[rank].clone(), group=group)
    del groups_flat  # the slices are views of them


# --- A tensor sharded over a group ----------------------------------------------------------------


class PartitionedTensor:
    """One flat, contiguous shard of `tensor` per rank of `group`; `full()` reassembles the tensor.

    Shards differ by at most one element; earlier ranks hold the longer ones. To rebuild the object, another rank
    needs only its own shard and `to_meta()`, an int64 tensor: number of dims, sizes, number of ranks, rank, and the
    offset of each rank's shard (ending with the total).
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Tensor | None = None) -> None:
        self.group = group
        self.num_parts = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)
        self.orig_size = list(tensor.shape)
        self.orig_device = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        if partition_meta is not None:
            self.partition = _read_meta(partition_meta)[3]
        begin, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[begin:end].clone()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: Any, device: torch.device | str | None = None
    ) -> PartitionedTensor:
        """Return the tensor described by `to_meta()`, with `local_part` as this rank's shard."""
        sizes, num_parts, rank, partition = _read_meta(meta)
        ranks = torch.distributed.get_world_size(group)
        if num_parts != ranks or partition[rank + 1] - partition[rank] != local_part.numel():
            raise RuntimeError(
                f"The meta tensor describes {partition[rank + 1] - partition[rank]} elements on each of "
                f"{num_parts} ranks, but got {local_part.numel()} elements in a group of {ranks}."
            )
        made = cls.__new__(cls)
        made.group, made.num_parts, made.rank, made.partition = group, num_parts, rank, partition
        made.orig_size = sizes
        made.orig_device = torch.device(get_accelerator().current_device_name() if device is None else device)
        made.local_data = local_part
        return made

    def full(self, device: torch.device | str | None = None) -> Tensor:
        """Return the whole tensor, on `device` or its original device. Collective over the group."""
        longest = max((end - begin for begin, end in self._bounds()), default=0)
        padded = self.local_data.new_zeros(longest)  # collectives require equal shards
        padded[: self.local_data.numel()] = self.local_data
        shares = [torch.empty_like(padded) for _ in range(self.num_parts)]
        torch.distributed.all_gather(shares, padded, group=self.group)
        kept = [share[: end - begin] for share, (begin, end) in zip(shares, self._bounds(), strict=True)]
        return torch.cat(kept).view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> Tensor:
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=self.orig_device)

    def data(self) -> Tensor:
        """Return this rank's flat shard."""
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size

    def _bounds(self) -> list[tuple[int, int]]:
        return list(zip(self.partition, self.partition[1:], strict=False))


def _read_meta(meta: Tensor) -> tuple[list[int], int, int, list[int]]:
    """Return (sizes, number of ranks, rank, offsets of the shards)."""
    numbers = meta.tolist()
    dims = numbers[0]
    sizes, partition = numbers[1 : dims + 1], numbers[dims + 3 :]
    num_parts, rank = numbers[dims + 1 : dims + 3]
    if len(partition) != num_parts + 1 or partition[-1] != math.prod(sizes):
        raise RuntimeError(f"{numbers} does not describe a partitioned tensor")
    return sizes, num_parts, rank, partition


# Documented helpers for gradients: parameter groups without an optimizer, and overflow checks over ranks.


class DummyOptim:
    """Parameter groups without an optimizer, for a ZeRO-3 model that is only evaluated."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params}]


def has_non_finite(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(tensor).all())


class CheckOverflow:
    """Checks for non-finite gradients on any rank."""

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
        """Call `has_overflow` for these parameter groups, or those of the constructor."""
        params = self.params if param_groups is None else [p for group in param_groups for p in group]
        if params is None:
            raise ValueError("CheckOverflow has no parameters: pass param_groups to it or to check()")
        return self.has_overflow(params)

    def check_using_norm(self, norm_group: Iterable[float | Tensor], reduce_overflow: bool = True) -> bool:
        """Return whether any of the norms is not finite; -1 also means not finite.

        Args:
            reduce_overflow: reduce over all ranks. Otherwise only over the model-parallel group, and the
                expert-parallel group if the constructor was given experts.
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
        return any(has_non_finite(param.grad) for param in params if param.grad is not None)

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """Return whether any gradient on any rank is not finite. Collective."""
        return self._anywhere(self.has_overflow_serial(params))

    def _anywhere(self, overflow: bool, group: Any = None) -> bool:
        if not torch.distributed.is_initialized():
            return overflow
        flag = torch.tensor([overflow], dtype=torch.float32, device=get_accelerator().current_device_name())
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group)
        return bool(flag.item())
