"""Collectives by the process group's own operations: NCCL and every backend that is not gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from deepspeed.comm.groups import all_gather_single, reduce_scatter_single
from deepspeed.comm.pending import Pending
from deepspeed.comm.reduction import accumulation_dtype
from deepspeed.comm.transports.exchanged_sums import ExchangedSum, GroupOperation


class _GroupSum(GroupOperation):
    def __init__(
        self, group: ProcessGroup, ranks: tuple[int, ...], exchanged: ExchangedSum | None = None
    ) -> None:
        super().__init__(group, ranks)
        self.exchanged = exchanged or ExchangedSum(group, ranks)


class GroupAllGather(GroupOperation):
    def __call__(self, output: Tensor, input: Tensor) -> Pending:
        work = all_gather_single(output, input, group=self.group, async_op=True)
        return Pending(lambda: self._wait(work, "all_gather"))


class GroupReduceScatter(_GroupSum):
    """16-bit inputs cross the wire as they are and are summed here in fp32 (`ExchangedSum`)."""

    def __call__(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        wide = accumulation_dtype(input.dtype)
        if wide != input.dtype:
            return self.exchanged.reduce_scatter(output, input, scale)
        total = output if output.dtype == wide else torch.empty_like(output, dtype=wide)
        work = reduce_scatter_single(total, input, group=self.group, async_op=True)

        def finish() -> None:
            self._wait(work, "reduce_scatter")
            if scale != 1.0:
                total.mul_(scale)
            if total is not output:
                output.copy_(total)

        return Pending(finish)


class GroupAllReduce(_GroupSum):
    def __call__(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        if accumulation_dtype(tensor.dtype) != tensor.dtype:
            return self.exchanged.all_reduce(tensor, scale, all_gather_single)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def finish() -> None:
            self._wait(work, "all_reduce")
            if scale != 1.0:
                tensor.mul_(scale)

        return Pending(finish)


class GroupReduce(GroupOperation):
    def __call__(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending:
        work = dist.reduce(tensor, group=self.group, group_dst=dst, async_op=True)

        def finish() -> None:
            self._wait(work, "reduce")
            if scale != 1.0 and self.group.rank() == dst:
                tensor.mul_(scale)

        return Pending(finish)


class GroupAllToAll(GroupOperation):
    def __call__(
        self, output: Tensor, input: Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Pending:
        work = dist.all_to_all_single(
            output, input, list(output_counts), list(input_counts), group=self.group, async_op=True
        )
        return Pending(lambda: self._wait(work, "all_to_all"))


class GroupBarrier(GroupOperation):
    def __call__(self) -> Pending:
        work = dist.barrier(group=self.group, async_op=True)
        return Pending(lambda: self._wait(work, "barrier"))


class GroupAllReduceMax(GroupOperation):
    def __call__(self, tensor: Tensor) -> Pending:
        work = dist.all_reduce(tensor, ReduceOp.MAX, group=self.group, async_op=True)
        return Pending(lambda: self._wait(work, "all_reduce_max"))


class GroupBroadcast(GroupOperation):
    def __call__(self, tensor: Tensor, src: int) -> Pending:
        work = dist.broadcast(tensor, group=self.group, group_src=src, async_op=True)
        return Pending(lambda: self._wait(work, "broadcast"))
