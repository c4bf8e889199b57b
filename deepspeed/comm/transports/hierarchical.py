"""Collectives among several hosts with equally many ranks each: shared memory within hosts, gloo between them.

Rank r = h * L + l is the l-th rank of host h. Only ranks with the same l communicate across hosts, so the network
carries 1/L of the bytes of a direct exchange among all ranks. Sums are computed per host in rank order, in fp32, and
then over hosts: the order of `sum_in_blocks` on gloo, so the bits are the same.

All work in shared memory is done inside `wait()`, in order of issue (OrderedPending), so that the ranks of a host use
it in the same order at any speed of the network. A gather or an all-to-all starts its messages to other hosts when it
is issued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepspeed.comm.pending import OrderedPending, Pending
from deepspeed.comm.reduction import accumulation_dtype, sum_in_order
from deepspeed.comm.transports.gloo import SCRATCH_BYTES, GlooTransport
from deepspeed.comm.transports.shared_memory import SharedMemoryChannel, SharedMemoryTransport, can_reduce


class HierarchicalTransport:
    """Transport among the ranks of this host (``inside``, shared memory) and this rank's counterparts on the other
    hosts (gloo). ``fallback``: for dtypes that shared memory cannot reduce."""

    name, background = "hierarchical", False

    def __init__(self, channel: SharedMemoryChannel, fallback: GlooTransport) -> None:
        self.inside = SharedMemoryTransport(channel)
        self.fallback, self.gloo = fallback, fallback.channel
        self.local_size, self.local_rank = channel.size, channel.rank
        self.num_hosts = self.gloo.size // channel.size
        self.host = self.gloo.rank // channel.size

    @property
    def other_hosts(self) -> list[int]:
        return [(self.host + step) % self.num_hosts for step in range(1, self.num_hosts)]

    def _exchange(
        self, sent: dict[int, Tensor], received: dict[int, Tensor], tag: int, operation: str
    ) -> Callable[[], None]:
        """Start messages to and from the counterparts on these hosts; return the waiting function."""
        outward, inward = (
            {host * self.local_size + self.local_rank: tensor for host, tensor in tensors.items()}
            for tensors in (sent, received)
        )
        return self.gloo.exchange(outward, inward, tag, operation)

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        """Gather ``input`` of all ranks into ``output``; transfers between hosts start at once."""
        return OrderedPending(self._begin_gather(output, input, self.gloo.next_tag()))

    def _begin_gather(self, output: Tensor, input: Tensor, tag: int) -> Callable[[], None]:
        """Start the gather and return the function that finishes it."""
        shards = output.view(self.num_hosts, self.local_size, -1)
        own = shards[self.host, self.local_rank]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        received = {host: shards[host, self.local_rank] for host in self.other_hosts}
        wait = self._exchange(dict.fromkeys(received, own), received, tag, "all_gather")

        def finish() -> None:
            wait()
            for host in range(self.num_hosts):
                self.inside.all_gather(shards[host].view(-1), shards[host, self.local_rank]).wait()

        return finish

    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        if not can_reduce(input.dtype, accumulation_dtype(input.dtype)):
            return self.fallback.reduce_scatter(output, input, scale=scale)
        tag = self.gloo.next_tag()
        return OrderedPending(lambda: self._run_reduce_scatter(output, input, scale, tag))

    def _run_reduce_scatter(self, output: Tensor, input: Tensor, scale: float, tag: int) -> None:
        """Reduce piece by piece, so that the partial sums of all hosts fit into the scratch."""
        wide, count = accumulation_dtype(input.dtype), output.numel()
        shards = input.view(self.num_hosts, self.local_size, count)
        piece = max(1, min(count, SCRATCH_BYTES // (2 * self.num_hosts * wide.itemsize)))
        mine = torch.empty((self.num_hosts, piece), dtype=wide)  # this host's sums, for each host
        theirs = torch.empty((self.num_hosts, piece), dtype=wide)  # each host's sum, for this rank
        for start in range(0, count, piece):
            stop = min(start + piece, count)
            length = stop - start
            for host in range(self.num_hosts):
                whole = shards[host, :, start:stop].contiguous().view(-1)
                target = theirs if host == self.host else mine
                self.inside.reduce_scatter(target[host, :length], whole).wait()
            sent, received = ({h: rows[h, :length] for h in self.other_hosts} for rows in (mine, theirs))
            self._exchange(sent, received, tag, "reduce_scatter")()
            sum_in_order(output[start:stop], list(theirs[:, :length]), scale)

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        """Run reduce_scatter and all_gather, on a padded copy if the tensor is not divisible by the ranks."""
        if not can_reduce(tensor.dtype, accumulation_dtype(tensor.dtype)):
            return self.fallback.all_reduce(tensor, scale=scale)
        tag = self.gloo.next_tag()
        return OrderedPending(lambda: self._run_all_reduce(tensor, scale, tag))

    def _run_all_reduce(self, tensor: Tensor, scale: float, tag: int) -> None:
        size, rank = self.gloo.size, self.gloo.rank
        share = -(-tensor.numel() // size)
        padded = tensor
        if share * size != tensor.numel():
            padded = tensor.new_zeros(share * size)
            padded[: tensor.numel()].copy_(tensor)
        own = padded[rank * share : (rank + 1) * share]
        self._run_reduce_scatter(own, padded, scale, tag)
        self._begin_gather(padded, own, tag + 1)()
        if padded is not tensor:
            tensor.copy_(padded[: tensor.numel()])

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        if not can_reduce(tensor.dtype, tensor.dtype):
            return self.fallback.all_reduce_max(tensor)
        tag = self.gloo.next_tag()

        def run() -> None:
            self.inside.all_reduce_max(tensor).wait()
            received = {host: torch.empty_like(tensor) for host in self.other_hosts}
            self._exchange(dict.fromkeys(received, tensor), received, tag, "all_reduce_max")()
            for theirs in received.values():
                torch.maximum(tensor, theirs, out=tensor)

        return OrderedPending(run)

    def reduce(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending:
        """Reduce to the rank at the destination's position on each host, and from there to the destination."""
        if not can_reduce(tensor.dtype, accumulation_dtype(tensor.dtype)):
            return self.fallback.reduce(tensor, dst, scale=scale)
        tag = self.gloo.next_tag()
        return OrderedPending(lambda: self._run_reduce(tensor, dst, scale, tag))

    def _run_reduce(self, tensor: Tensor, dst: int, scale: float, tag: int) -> None:
        wide = accumulation_dtype(tensor.dtype)
        target_host, target = divmod(dst, self.local_size)
        piece = max(1, SCRATCH_BYTES // (self.num_hosts * wide.itemsize))
        for own in tensor.split(piece):
            partial = own.to(wide, copy=True)
            self.inside.reduce(partial, target).wait()
            if self.local_rank != target:
                continue
            if self.host != target_host:
                self._exchange({target_host: partial}, {}, tag, "reduce")()
                continue
            received = {host: torch.empty_like(partial) for host in self.other_hosts}
            self._exchange({}, received, tag, "reduce")()
            received[self.host] = partial
            sum_in_order(own, [received[host] for host in range(self.num_hosts)], scale)

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        """Send from the source to its counterparts, and from there within each host."""
        tag = self.gloo.next_tag()

        def run() -> None:
            source_host, source = divmod(src, self.local_size)
            if self.local_rank == source:
                from_here = self.host == source_host
                sent = dict.fromkeys(self.other_hosts, tensor) if from_here else {}
                self._exchange(sent, {} if from_here else {source_host: tensor}, tag, "broadcast")()
            self.inside.broadcast(tensor, source).wait()

        return OrderedPending(run)

    def all_to_all(
        self, output: Tensor, input: Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Pending:
        """Send runs for this host's ranks through shared memory, the others directly."""
        first = self.host * self.local_size
        here = range(first, first + self.local_size)
        received, sent = output.split(list(output_counts)), input.split(list(input_counts))
        far = [peer for peer in self.gloo.peers if peer not in here]
        wait = self.gloo.exchange(
            {peer: sent[peer] for peer in far if input_counts[peer]},
            {peer: received[peer] for peer in far if output_counts[peer]},
            self.gloo.next_tag(),
            "all_to_all",
        )

        def run() -> None:
            counts = [output_counts[rank] for rank in here], [input_counts[rank] for rank in here]
            self.inside.all_to_all(
                output.narrow(0, sum(output_counts[:first]), sum(counts[0])),
                input.narrow(0, sum(input_counts[:first]), sum(counts[1])),
                *counts,
            ).wait()
            wait()

        return OrderedPending(run)

    def barrier(self) -> Pending:
        """Wait for the ranks of this host, then notify the counterparts and wait for them."""
        tag = self.gloo.next_tag()

        def run() -> None:
            self.inside.barrier().wait()
            word = torch.zeros(1, dtype=torch.uint8)
            received = {host: torch.empty_like(word) for host in self.other_hosts}
            self._exchange(dict.fromkeys(received, word), received, tag, "barrier")()

        return OrderedPending(run)

    def close(self) -> None:
        self.inside.close()
