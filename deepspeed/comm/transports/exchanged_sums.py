"""Sum 16-bit tensors with the process group's own all-to-all: 16 bits on the wire, summed in fp32, rounded once.

A backend's own reduction (NCCL's) rounds 16-bit partial sums at each hop. So ranks exchange their inputs and sum them
locally, in rank order. If a group spans hosts, the ranks of each host do so first, and then the ranks at the same
position on every host exchange the fp32 sums of their hosts: with L ranks on each of H hosts, a tensor of n elements
sends 4 n (H - 1) / H bytes out of each host, for any L; a direct exchange sends L / 2 times that.

Scratch memory is bounded: the tensor is processed in pieces, one after another. On a device all of this runs on a
separate stream, after the caller's queued work; the host never waits, and all pieces share one scratch buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.groups import all_gather_single, new_group
from deepspeed.comm.pending import DONE, CommunicationError, Pending
from deepspeed.comm.reduction import accumulation_dtype, sum_in_order
from deepspeed.comm.transports import hosts

SCRATCH_BYTES = 32 << 20
"""Bytes sent per piece; with receive buffers and sums, up to three times as much is allocated."""


@dataclass(frozen=True, slots=True)
class ExchangeLevels:
    """Two levels of groups: ``inside``, this host's ranks; ``across``, the ranks at this rank's position on every
    host; None: all ranks are at one level."""

    num_hosts: int
    inside: ProcessGroup
    across: ProcessGroup | None


class GroupOperation:
    """Base of operations in one process group."""

    def __init__(self, group: ProcessGroup, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks
        self.size = len(ranks)

    def _wait(self, work: Work | None, operation: str) -> None:
        """Wait for ``work``; on a device the current stream waits, not the host."""
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise CommunicationError.of(operation, self.ranks, error) from error


class ExchangedSum(GroupOperation):
    """``reduce_scatter`` and ``all_reduce`` of 16-bit tensors in one process group."""

    def __init__(self, group: ProcessGroup, ranks: tuple[int, ...]) -> None:
        super().__init__(group, ranks)
        self._levels: ExchangeLevels | None = None
        self._stream: Any = None

    def reduce_scatter(self, output: Tensor, input: Tensor, scale: float) -> Pending:
        return self._issue(lambda levels: self._sum(levels, output, input, scale), input)

    def all_reduce(self, tensor: Tensor, scale: float) -> Pending:
        """Sum in place."""

        def run(levels: ExchangeLevels) -> None:
            share = -(-tensor.numel() // self.size)
            padded = tensor
            if share * self.size != tensor.numel():
                padded = tensor.new_zeros(share * self.size)
                padded[: tensor.numel()].copy_(tensor)
            own = tensor.new_empty(share)
            self._sum(levels, own, padded, scale)
            self._wait(all_gather_single(padded, own, group=self.group, async_op=True), "all_reduce")
            if padded is not tensor:
                tensor.copy_(padded[: tensor.numel()])

        return self._issue(run, tensor)

    # Arithmetic and messages --------------------------------------------------------------------------------

    def _sum(self, levels: ExchangeLevels, output: Tensor, input: Tensor, scale: float) -> None:
        count = output.numel()
        strips = input.view(levels.num_hosts, -1, count)
        piece = max(1, min(count, SCRATCH_BYTES // (self.size * input.element_size())))
        for start in range(0, count, piece):
            stop = min(start + piece, count)
            self._sum_piece(levels, output[start:stop], strips[:, :, start:stop], scale)

    def _sum_piece(self, levels: ExchangeLevels, output: Tensor, strips: Tensor, scale: float) -> None:
        if levels.across is None:
            received = self._exchange(strips[0], levels.inside)
        else:
            received = self._exchange(self._sums_of_host(strips, levels), levels.across)
        sum_in_order(output, list(received), scale)

    def _sums_of_host(self, strips: Tensor, levels: ExchangeLevels) -> Tensor:
        """Reduce this rank's [H, L, n] to [H, n] summed over this host's ranks, unrounded: one row for each host."""
        num_hosts, local_size, count = strips.shape
        received = self._exchange(strips.transpose(0, 1), levels.inside).view(local_size, -1)
        sums = strips.new_empty((num_hosts, count), dtype=accumulation_dtype(strips.dtype))
        sum_in_order(sums.view(-1), list(received))
        return sums

    def _exchange(self, sent: Tensor, group: ProcessGroup) -> Tensor:
        """Send row i of ``sent`` to rank i of the group, whose row for this rank becomes row i of the result."""
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=True)
        self._wait(work, "reduce_scatter")
        return received

    # Streams and groups -------------------------------------------------------------------------------------

    def _issue(self, run: Callable[[ExchangeLevels], None], tensor: Tensor) -> Pending:
        levels = self._levels
        if levels is None:
            levels = self._levels = self._find_levels(tensor.device)
        if tensor.device.type == "cpu":
            run(levels)
            return DONE
        accelerator = get_accelerator()
        if self._stream is None:
            self._stream = accelerator.Stream()
        stream = self._stream
        stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            run(levels)
            done = stream.record_event()
        # The closure keeps the tensors of `run` (input, output) alive until the caller's stream has waited for the
        # sum.
        return Pending(lambda run=run: accelerator.current_stream().wait_event(done))

    def _find_levels(self, device: torch.device) -> ExchangeLevels:
        """Determine which ranks share a host. Collective, at the first sum."""
        identity = hashlib.sha256(hosts.host_identity()).digest()
        mine = torch.tensor(list(identity), dtype=torch.uint8, device=device)
        everyone = mine.new_empty(mine.numel() * self.size)
        all_gather_single(everyone, mine, group=self.group)
        blocks = hosts.blocks_of([bytes(row) for row in everyone.view(self.size, -1).tolist()])
        if len(blocks) == 1 or not hosts.are_regular(blocks):
            return ExchangeLevels(1, self.group, None)
        local_rank = self.group.rank() % len(blocks[0])
        here = next(block for block in blocks if self.group.rank() in block)
        inside = new_group([self.ranks[rank] for rank in here])
        across = new_group([self.ranks[block[local_rank]] for block in blocks])
        return ExchangeLevels(len(blocks), inside, across)
