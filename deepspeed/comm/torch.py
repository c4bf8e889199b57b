"""`TorchBackend`: the operations of `deepspeed.comm` on torch.distributed.

If a `Communicator` is faster than the process group (flat CPU tensors over gloo), the operation goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.collectives import Communicator, communicator, forget_communicators
from deepspeed.comm.groups import all_gather_single, default_timeout, reduce_scatter_single
from deepspeed.comm.pending import Pending
from deepspeed.comm.reduce_op import ReduceOp, to_torch


class Backend:
    """Base of communication backends, also custom ones: a name, and whether its process group exists."""

    def __init__(self, name: str = "backend", rank: int = 0, size: int = 1) -> None:
        self.name = name
        self.world_group = None
        self.world_size = size
        self.world_rank = rank
        self.initialized = False

    def is_initialized(self) -> bool:
        return self.initialized

    def new_group(self, ranks):
        raise NotImplementedError(f"backend {self.name!r} cannot create groups")

    def init_process_group(self, *args, **kwargs) -> None:
        self.initialized = True


Group: TypeAlias = ProcessGroup | None
"""A process group; None: all ranks."""
_SUM = ReduceOp.SUM
_UNSUMMED = frozenset((torch.bool, torch.complex32, torch.complex64, torch.complex128))  # left to gloo


class TorchBackend(Backend):
    """Backend with torch.distributed's operations under the documented argument names. Reductions take our ReduceOp
    or torch's."""

    def __init__(
        self,
        backend: str | None,
        timeout: timedelta | None,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        """Create the default process group, unless it exists or `backend` is None."""
        super().__init__(name=name)
        if backend is not None and not dist.is_initialized():
            self.init_process_group(backend, timeout, init_method, rank, world_size)

    @classmethod
    def get_all_gather_function(cls) -> Any:
        return all_gather_single

    @classmethod
    def get_reduce_scatter_function(cls) -> Any:
        return reduce_scatter_single

    def has_all_gather_into_tensor(self) -> bool:
        return True

    def has_reduce_scatter_tensor(self) -> bool:
        return True

    # ---- process groups

    def init_process_group(
        self,
        backend: str,
        timeout: timedelta | None,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
    ) -> None:
        dist.init_process_group(
            backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size
        )

    def is_initialized(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def destroy_process_group(self, group: Group = None) -> None:
        """Destroy this group (None: all of them)."""
        forget_communicators(None if group is dist.group.WORLD else group)
        dist.destroy_process_group(group)

    def new_group(self, ranks: Sequence[int]) -> Any:
        """Create a group with the job's timeout. All ranks call this; ranks outside the group get
        GroupMember.NON_GROUP_MEMBER."""
        return dist.new_group(list(ranks), timeout=default_timeout())

    def get_rank(self, group: Group = None) -> int:
        return dist.get_rank(group)

    def get_world_size(self, group: Group = None) -> int:
        return dist.get_world_size(group)

    def get_backend(self, group: Group = None) -> str:
        return dist.get_backend(group)

    def get_world_group(self) -> Any:
        return dist.group.WORLD

    def get_global_rank(self, group: Group = None, group_rank: int = 0) -> int:
        return group_rank if group is None else dist.get_global_rank(group, group_rank)

    def get_all_ranks_from_group(self, group: Group = None) -> list[int]:
        return dist.get_process_group_ranks(group)

    def init_device_mesh(self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
        device = get_accelerator().device_name()
        return dist.init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))

    # ---- reductions

    def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
    ) -> Any:
        ours = _communicator_for(group, async_op, tensor)
        scale = None if ours is None else _scale(op, tensor, ours)
        if ours is not None and scale is not None:
            if tensor.is_contiguous():
                return _result(ours.all_reduce(tensor, scale=scale), async_op)
            return _in_place(tensor, lambda flat: ours.all_reduce(flat, scale=scale), async_op)
        kind = to_torch(op)
        if ours is not None and kind == dist.ReduceOp.MAX:
            return _in_place(tensor, ours.all_reduce_max, async_op)
        return dist.all_reduce(tensor, kind, group, async_op)

    def inference_all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
    ) -> Any:
        return self.all_reduce(tensor, op, group, async_op)

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
    ) -> Any:
        """Reduce many tensors with one collective per dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        batches = list(kinds.values())
        flats = [_flatten_dense_tensors([tensor.detach() for tensor in batch]) for batch in batches]
        handles = [self.all_reduce(flat, op, group, async_op) for flat in flats]

        def finish() -> None:
            for batch, flat, handle in zip(batches, flats, handles, strict=True):
                if handle is not None:
                    handle.wait()
                for tensor, reduced in zip(batch, _unflatten_dense_tensors(flat, batch), strict=True):
                    tensor.detach().copy_(reduced)

        return _result(Pending(finish), async_op)

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
    ) -> Any:
        ours = _communicator_for(group, async_op, tensor)
        scale = None if ours is None else _scale(op, tensor, ours)
        if ours is not None and scale is not None and dst in ours.ranks:
            root = ours.ranks.index(dst)
            return _in_place(tensor, lambda flat: ours.reduce(flat, root, scale=scale), async_op)
        return dist.reduce(tensor, dst, to_torch(op), group, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op: Any = ReduceOp.SUM,
        group: Group = None,
        async_op: bool = False,
    ) -> Any:
        return dist.reduce_scatter(output, input_list, to_torch(op), group, async_op)

    def reduce_scatter_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any = ReduceOp.SUM,
        group: Group = None,
        async_op: bool = False,
    ) -> Any:
        ours = _communicator_for(group, async_op, output_tensor, input_tensor)
        scale = None if ours is None else _scale(op, input_tensor, ours)
        if ours is not None and scale is not None:
            given = input_tensor.contiguous()
            return _in_place(
                output_tensor, lambda flat: ours.reduce_scatter(flat, given, scale=scale), async_op
            )
        return reduce_scatter_single(output_tensor, input_tensor, to_torch(op), group, async_op)

    # ---- copies and exchanges

    def broadcast(self, tensor: Tensor, src: int, group: Group = None, async_op: bool = False) -> Any:
        ours = _communicator_for(group, async_op, tensor)
        if ours is not None and src in ours.ranks:
            return _in_place(tensor, lambda flat: ours.broadcast(flat, ours.ranks.index(src)), async_op)
        return dist.broadcast(tensor, src, group, async_op)

    def broadcast_object_list(
        self, object_list: list[Any], src: int, group: Group = None, device: Any = None
    ) -> None:
        dist.broadcast_object_list(object_list, src=src, group=group, device=device)

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
    ) -> Any:
        return dist.all_gather(tensor_list, tensor, group, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
    ) -> Any:
        ours = _communicator_for(group, async_op, output_tensor, input_tensor)
        if ours is not None and output_tensor.dtype == input_tensor.dtype:
            given = input_tensor.contiguous()
            return _in_place(output_tensor, lambda flat: ours.all_gather(flat, given), async_op)
        return all_gather_single(output_tensor, input_tensor, group, async_op)

    def all_gather_base(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
    ) -> Any:
        return self.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    def all_gather_coalesced(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        group: Group = None,
        async_op: bool = False,
    ) -> Any:
        """Gather many tensors; all gathers are in flight before the first wait."""
        handles = [
            self.all_gather_into_tensor(output, input, group, async_op=True)
            for output, input in zip(output_tensors, input_tensors, strict=True)
        ]

        def finish() -> None:
            for handle in handles:
                handle.wait()

        return _result(Pending(finish), async_op)

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Group = None) -> None:
        dist.all_gather_object(object_list, obj, group=group)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Group = None,
        async_op: bool = False,
    ) -> Any:
        ours = _communicator_for(group, async_op, output, input)
        if ours is not None and output.dtype == input.dtype:
            given = input.contiguous()
            received = _element_counts(output, output_split_sizes)
            sent = _element_counts(input, input_split_sizes)
            return _in_place(output, lambda flat: ours.all_to_all(flat, given, received, sent), async_op)
        return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Group = None,
        async_op: bool = False,
    ) -> Any:
        return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int = 0,
        group: Group = None,
        async_op: bool = False,
    ) -> Any:
        return dist.gather(tensor, gather_list, dst, group, async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        group: Group = None,
        async_op: bool = False,
    ) -> Any:
        return dist.scatter(tensor, scatter_list, src, group, async_op)

    # ---- pairs of ranks, and barriers

    def send(self, tensor: Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
        dist.send(tensor, dst, group, tag)

    def recv(self, tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> int:
        """Receive a tensor and return the global rank of its sender (`src=None`: any rank)."""
        return dist.recv(tensor, src, group, tag)

    def isend(self, tensor: Tensor, dst: int, group: Group = None, tag: int = 0) -> Any:
        return dist.isend(tensor, dst, group, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> Any:
        return dist.irecv(tensor, src, group, tag)

    def batch_isend_irecv(self, p2p_op_list: Sequence[Any]) -> list[Any]:
        """Start all operations together and return their handles, so that ranks can exchange without an order."""
        return dist.batch_isend_irecv(
            [
                dist.P2POp(getattr(dist, each.op), each.tensor, each.peer, each.group, each.tag)
                for each in p2p_op_list
            ]
        )

    def barrier(
        self, group: Group = None, async_op: bool = False, device_ids: list[int] | None = None
    ) -> Any:
        if dist.get_backend(group) == dist.Backend.GLOO:
            ours = _communicator_for(group, async_op)
            if ours is not None:
                return _result(ours.barrier(), async_op)
        return dist.barrier(group, async_op, device_ids)

    def monitored_barrier(
        self, group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Run a barrier whose error names the ranks that did not arrive (gloo groups only)."""
        dist.monitored_barrier(group, timeout, wait_all_ranks)


def _communicator_for(group: Group, async_op: bool, *tensors: Tensor) -> Communicator | None:
    """Return the communicator that moves these tensors faster than the process group itself, if one does. All ranks
    get the same answer: it depends on nothing that may differ between them, such as strides."""
    for tensor in tensors:
        if not tensor.is_cpu:
            return None
    if group is not None and not isinstance(group, ProcessGroup):  # not a member
        return None
    found = communicator(group)
    if found.size > 1:
        if async_op and not found.works_in_background("cpu"):
            return None
        if not found.bypasses_group():
            return None
    return found


def _scale(op: Any, tensor: Tensor, ours: Communicator) -> float | None:
    """Return the factor that turns a sum into this reduction (ours or torch's); None for other kinds."""
    if op is _SUM or op == dist.ReduceOp.SUM:
        return 1.0 if tensor.dtype not in _UNSUMMED else None
    if to_torch(op) == dist.ReduceOp.AVG and tensor.is_floating_point():
        return 1.0 / ours.size
    return None


def _element_counts(tensor: Tensor, split_sizes: list[int] | None) -> list[int] | None:
    """Convert rows per rank to elements per rank."""
    if not split_sizes:
        return None
    row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
    return [rows * row for rows in split_sizes]


def _in_place(tensor: Tensor, issue: Callable[[Tensor], Pending], async_op: bool = False) -> Pending | None:
    """Issue an operation that writes to `tensor`, through a copy if it is not contiguous."""
    if tensor.is_contiguous():
        return _result(issue(tensor), async_op)
    copy = tensor.detach().contiguous()
    pending = issue(copy)

    def finish() -> None:
        pending.wait()
        tensor.detach().copy_(copy)

    return _result(Pending(finish), async_op)


def _result(pending: Pending, async_op: bool) -> Pending | None:
    if async_op:
        return pending
    pending.wait()
    return None
