"""Collectives by the process group's own operations: NCCL and every backend other than gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.groups import all_gather_single, reduce_scatter_single
from deepspeed.comm.pending import Pending
from deepspeed.comm.reduction import accumulation_dtype
from deepspeed.comm.transports.exchanged_sums import ExchangedSum, GroupOperation


class ProcessGroupTransport(GroupOperation):
    """Transport by the backend's own collectives. 16-bit sums are exchanged in 16 bits and computed here in fp32
    (``exchanged``)."""

    name, background = "process_group", True

    def __init__(self, group: ProcessGroup, ranks: tuple[int, ...]) -> None:
        super().__init__(group, ranks)
        self.exchanged = ExchangedSum(group, ranks)

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        work = all_gather_single(output, input, group=self.group, async_op=True)
        return Pending(lambda: self._wait(work, "all_gather"))

    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
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

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        if accumulation_dtype(tensor.dtype) != tensor.dtype:
            return self.exchanged.all_reduce(tensor, scale)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return self._then_scaled(work, "all_reduce", tensor, scale)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        work = dist.all_reduce(tensor, ReduceOp.MAX, group=self.group, async_op=True)
        return Pending(lambda: self._wait(work, "all_reduce_max"))

    def reduce(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending:
        work = dist.reduce(tensor, group=self.group, group_dst=dst, async_op=True)
        return self._then_scaled(work, "reduce", tensor, scale if self.group.rank() == dst else 1.0)

    def _then_scaled(self, work: Work | None, operation: str, tensor: Tensor, scale: float) -> Pending:
        def finish() -> None:
            self._wait(work, operation)
            if scale != 1.0:
                tensor.mul_(scale)

        return Pending(finish)

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        work = dist.broadcast(tensor, group=self.group, group_src=src, async_op=True)
        return Pending(lambda: self._wait(work, "broadcast"))

    def all_to_all(
        self, output: Tensor, input: Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Pending:
        work = dist.all_to_all_single(
            output, input, list(output_counts), list(input_counts), group=self.group, async_op=True
        )
        return Pending(lambda: self._wait(work, "all_to_all"))

    def barrier(self) -> Pending:
        work = dist.barrier(group=self.group, async_op=True)
        return Pending(lambda: self._wait(work, "barrier"))

    def close(self) -> None:
        """Do nothing: the group belongs to its creator."""


class StagedTransport:
    """Transport of CPU tensors in a group whose backend moves only device tensors (NCCL)."""

    name, background = "staged", False

    def __init__(self, on_device: ProcessGroupTransport) -> None:
        self.all_gather = through_device(on_device.all_gather)
        self.reduce_scatter = through_device(on_device.reduce_scatter)
        self.all_reduce = through_device(on_device.all_reduce)
        self.all_reduce_max = through_device(on_device.all_reduce_max)
        self.reduce = through_device(on_device.reduce)
        self.broadcast = through_device(on_device.broadcast)
        self.all_to_all = through_device(on_device.all_to_all)
        self.barrier, self.close = on_device.barrier, on_device.close


def through_device(operation: Callable[..., Pending]) -> Callable[..., Pending]:
    """Wrap ``operation`` on the accelerator for CPU tensors: all are copied to the accelerator, and the first, which
    every operation writes, back."""

    def call(written: Tensor, *args: Any, **kwargs: Any) -> Pending:
        device = get_accelerator().current_device_name()
        result = written.to(device)
        others = (arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)
        pending = operation(result, *others, **kwargs)

        def finish() -> None:
            pending.wait()
            written.copy_(result)

        return Pending(finish)

    return call
