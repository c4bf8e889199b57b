"""Collectives among several hosts with equally many ranks each: shared memory within hosts, gloo between them.

Rank r = h * L + l is the l-th rank of host h. Only ranks with the same l talk across hosts, so the network carries
1/L of what a direct exchange among all ranks sends. Sums are computed per host in rank order, in fp32, and then over
hosts: the order that `sum_in_blocks` gives on gloo, so the bits are the same.

All work in shared memory is done while a caller waits, in order of issue (OrderedPending): the ranks of a host then use
it in the same order, which does not depend on the speed of the network. What a gather or an all-to-all sends to other
hosts is known when it is issued, and travels from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import Work

from deepspeed.comm.pending import OrderedPending, Pending
from deepspeed.comm.reduction import accumulation_dtype, sum_in_order
from deepspeed.comm.transports.gloo import SCRATCH_BYTES, GlooChannel
from deepspeed.comm.transports.shared_memory import (
    SharedMemoryAllGather,
    SharedMemoryAllReduceMax,
    SharedMemoryAllToAll,
    SharedMemoryBarrier,
    SharedMemoryBroadcast,
    SharedMemoryChannel,
    SharedMemoryReduce,
    SharedMemoryReduceScatter,
    can_reduce,
)

Works = list[tuple[int, Work]]
"""Messages under way, with the host at their other end."""


class TwoLevels:
    """The ranks of this host (shared memory) and this rank's counterparts on the other hosts (gloo)."""

    def __init__(self, channel: SharedMemoryChannel, gloo: GlooChannel) -> None:
        self.gloo = gloo
        self.local_size = channel.size
        self.local_rank = channel.rank
        self.num_hosts = gloo.size // channel.size
        self.host = gloo.rank // channel.size
        self.all_gather = SharedMemoryAllGather(channel)
        self.reduce_scatter = SharedMemoryReduceScatter(channel, _refuse)
        self.all_reduce_max = SharedMemoryAllReduceMax(channel, _refuse)
        self.reduce = SharedMemoryReduce(channel, _refuse)
        self.broadcast = SharedMemoryBroadcast(channel)
        self.all_to_all = SharedMemoryAllToAll(channel)
        self.barrier = SharedMemoryBarrier(channel)

    def counterpart(self, host: int, local_rank: int | None = None) -> int:
        """The counterpart's rank in the group."""
        return host * self.local_size + (self.local_rank if local_rank is None else local_rank)

    @property
    def other_hosts(self) -> list[int]:
        return [(self.host + step) % self.num_hosts for step in range(1, self.num_hosts)]

    def exchange(
        self, sent: dict[int, Tensor], received: dict[int, Tensor], tag: int, operation: str
    ) -> None:
        """Exchange with the counterparts on these hosts."""
        self.finish_exchange(self.begin_exchange(sent, received, tag, operation), operation)

    def begin_exchange(
        self, sent: dict[int, Tensor], received: dict[int, Tensor], tag: int, operation: str
    ) -> Works:
        gloo = self.gloo
        works = [
            (host, gloo.receive(tensor, self.counterpart(host), tag, operation))
            for host, tensor in received.items()
        ]
        return works + [
            (host, gloo.send(tensor, self.counterpart(host), tag, operation)) for host, tensor in sent.items()
        ]

    def finish_exchange(self, works: Works, operation: str) -> None:
        for host, work in works:
            self.gloo.wait(work, operation, self.counterpart(host))


def _refuse(*arguments: object, **options: object) -> Pending:
    raise AssertionError("a dtype that shared memory cannot reduce passed the check")


class HierarchicalAllGather:
    def __init__(self, levels: TwoLevels) -> None:
        self.levels = levels

    def __call__(self, output: Tensor, input: Tensor) -> Pending:
        """Gather ``input`` of all ranks into ``output``; transfers between hosts are in flight before anybody waits."""
        return OrderedPending(self.begin(output, input, self.levels.gloo.next_tag()))

    def begin(self, output: Tensor, input: Tensor, tag: int) -> Callable[[], None]:
        """Start the gather and return the function that finishes it."""
        levels = self.levels
        shards = output.view(levels.num_hosts, levels.local_size, -1)
        own = shards[levels.host, levels.local_rank]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        received = {host: shards[host, levels.local_rank] for host in levels.other_hosts}
        works = levels.begin_exchange(dict.fromkeys(received, own), received, tag, "all_gather")

        def finish() -> None:
            levels.finish_exchange(works, "all_gather")
            for host in range(levels.num_hosts):
                levels.all_gather(shards[host].view(-1), shards[host, levels.local_rank]).wait()

        return finish


class HierarchicalReduceScatter:
    def __init__(self, levels: TwoLevels, fallback: Callable[..., Pending]) -> None:
        self.levels = levels
        self.fallback = fallback

    def __call__(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        if not can_reduce(input.dtype, accumulation_dtype(input.dtype)):
            return self.fallback(output, input, scale=scale)
        tag = self.levels.gloo.next_tag()
        return OrderedPending(lambda: self.run(output, input, scale, tag))

    def run(self, output: Tensor, input: Tensor, scale: float, tag: int) -> None:
        """Piece by piece, so that the partial sums of all hosts fit into the scratch."""
        levels, wide = self.levels, accumulation_dtype(input.dtype)
        count = output.numel()
        shards = input.view(levels.num_hosts, levels.local_size, count)
        piece = max(1, min(count, SCRATCH_BYTES // (2 * levels.num_hosts * wide.itemsize)))
        mine = torch.empty((levels.num_hosts, piece), dtype=wide)  # this host's sums, for each host
        theirs = torch.empty((levels.num_hosts, piece), dtype=wide)  # each host's sum, for this rank
        for start in range(0, count, piece):
            stop = min(start + piece, count)
            length = stop - start
            for host in range(levels.num_hosts):
                whole = shards[host, :, start:stop].contiguous().view(-1)
                target = theirs if host == levels.host else mine
                levels.reduce_scatter(target[host, :length], whole).wait()
            levels.exchange(
                {host: mine[host, :length] for host in levels.other_hosts},
                {host: theirs[host, :length] for host in levels.other_hosts},
                tag,
                "reduce_scatter",
            )
            sum_in_order(output[start:stop], list(theirs[:, :length]), scale)


class HierarchicalAllReduce:
    """reduce_scatter and all_gather, on a padded copy if the tensor is not divisible by the ranks."""

    def __init__(self, levels: TwoLevels, fallback: Callable[..., Pending]) -> None:
        self.levels = levels
        self.fallback = fallback
        self.reduce_scatter = HierarchicalReduceScatter(levels, _refuse)
        self.all_gather = HierarchicalAllGather(levels)

    def __call__(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        if not can_reduce(tensor.dtype, accumulation_dtype(tensor.dtype)):
            return self.fallback(tensor, scale=scale)
        tag = self.levels.gloo.next_tag()
        return OrderedPending(lambda: self.run(tensor, scale, tag))

    def run(self, tensor: Tensor, scale: float, tag: int) -> None:
        size, rank = self.levels.gloo.size, self.levels.gloo.rank
        share = -(-tensor.numel() // size)
        padded = tensor
        if share * size != tensor.numel():
            padded = tensor.new_zeros(share * size)
            padded[: tensor.numel()].copy_(tensor)
        own = padded[rank * share : (rank + 1) * share]
        self.reduce_scatter.run(own, padded, scale, tag)
        self.all_gather.begin(padded, own, tag + 1)()
        if padded is not tensor:
            tensor.copy_(padded[: tensor.numel()])


class HierarchicalAllReduceMax:
    def __init__(self, levels: TwoLevels, fallback: Callable[..., Pending]) -> None:
        self.levels = levels
        self.fallback = fallback

    def __call__(self, tensor: Tensor) -> Pending:
        if not can_reduce(tensor.dtype, tensor.dtype):
            return self.fallback(tensor)
        tag = self.levels.gloo.next_tag()
        return OrderedPending(lambda: self._run(tensor, tag))

    def _run(self, tensor: Tensor, tag: int) -> None:
        levels = self.levels
        levels.all_reduce_max(tensor).wait()
        received = {host: torch.empty_like(tensor) for host in levels.other_hosts}
        levels.exchange(dict.fromkeys(received, tensor), received, tag, "all_reduce_max")
        for theirs in received.values():
            torch.maximum(tensor, theirs, out=tensor)


class HierarchicalReduce:
    """Reduce to the rank with the destination's position on each host, and from there to the destination."""

    def __init__(self, levels: TwoLevels, fallback: Callable[..., Pending]) -> None:
        self.levels = levels
        self.fallback = fallback

    def __call__(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending:
        if not can_reduce(tensor.dtype, accumulation_dtype(tensor.dtype)):
            return self.fallback(tensor, dst, scale=scale)
        tag = self.levels.gloo.next_tag()
        return OrderedPending(lambda: self._run(tensor, dst, scale, tag))

    def _run(self, tensor: Tensor, dst: int, scale: float, tag: int) -> None:
        levels, wide = self.levels, accumulation_dtype(tensor.dtype)
        target_host, target = divmod(dst, levels.local_size)
        piece = max(1, SCRATCH_BYTES // (levels.num_hosts * wide.itemsize))
        for own in tensor.split(piece):
            partial = own.to(wide, copy=True)
            levels.reduce(partial, target).wait()
            if levels.local_rank != target:
                continue
            if levels.host != target_host:
                levels.exchange({target_host: partial}, {}, tag, "reduce")
                continue
            received = {host: torch.empty_like(partial) for host in levels.other_hosts}
            levels.exchange({}, received, tag, "reduce")
            received[levels.host] = partial
            sum_in_order(own, [received[host] for host in range(levels.num_hosts)], scale)


class HierarchicalAllToAll:
    """Runs for this host's ranks go through shared memory, the others directly."""

    def __init__(self, levels: TwoLevels) -> None:
        self.levels = levels

    def __call__(
        self, output: Tensor, input: Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Pending:
        levels, gloo, tag = self.levels, self.levels.gloo, self.levels.gloo.next_tag()
        first = levels.counterpart(levels.host, 0)
        here = range(first, first + levels.local_size)
        received, sent = output.split(list(output_counts)), input.split(list(input_counts))
        far = [peer for peer in gloo.peers if peer not in here]
        works = [
            (peer, gloo.receive(received[peer], peer, tag, "all_to_all"))
            for peer in far
            if output_counts[peer]
        ]
        works += [
            (peer, gloo.send(sent[peer], peer, tag, "all_to_all")) for peer in far if input_counts[peer]
        ]

        def run() -> None:
            counts = [output_counts[rank] for rank in here], [input_counts[rank] for rank in here]
            levels.all_to_all(
                output.narrow(0, sum(output_counts[:first]), sum(counts[0])),
                input.narrow(0, sum(input_counts[:first]), sum(counts[1])),
                *counts,
            ).wait()
            for peer, work in works:
                gloo.wait(work, "all_to_all", peer)

        return OrderedPending(run)


class HierarchicalBarrier:
    """Once all ranks of this host have arrived, notify the counterparts and wait for theirs."""

    def __init__(self, levels: TwoLevels) -> None:
        self.levels = levels

    def __call__(self) -> Pending:
        tag = self.levels.gloo.next_tag()
        return OrderedPending(lambda: self._run(tag))

    def _run(self, tag: int) -> None:
        levels = self.levels
        levels.barrier().wait()
        word = torch.zeros(1, dtype=torch.uint8)
        received = {host: torch.empty_like(word) for host in levels.other_hosts}
        levels.exchange(dict.fromkeys(received, word), received, tag, "barrier")


class HierarchicalBroadcast:
    """From the source to its counterparts, and from there within each host."""

    def __init__(self, levels: TwoLevels) -> None:
        self.levels = levels

    def __call__(self, tensor: Tensor, src: int) -> Pending:
        tag = self.levels.gloo.next_tag()
        return OrderedPending(lambda: self._run(tensor, src, tag))

    def _run(self, tensor: Tensor, src: int, tag: int) -> None:
        levels = self.levels
        source_host, source = divmod(src, levels.local_size)
        if levels.local_rank == source:
            from_here = levels.host == source_host
            sent = dict.fromkeys(levels.other_hosts, tensor) if from_here else {}
            received = {} if from_here else {source_host: tensor}
            levels.exchange(sent, received, tag, "broadcast")
        levels.broadcast(tensor, source).wait()
