"""Collectives over gloo as direct exchanges between pairs of ranks.

gloo's own reduce_scatter and all_gather take 3 to 5 times as long as sending each peer its part and summing locally,
at every size (benchmarks/comm_shared_memory.py prints both), and they round 16-bit sums at each hop, in an order that
depends on the algorithm. So there is one message per peer and piece, summed by `sum_in_blocks`.

Every exchange is tagged with its sequence number and a hash of its operation, size and dtype, so that messages of
different collectives, and a user's own messages on the same group, never mix. Ranks that issue different calls hang,
which is reported after a while (hangs/watch.py). Without the hash gloo would abort the process with a smaller buffer,
and fill a larger one only in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from deepspeed.comm.pending import CommunicationError, OrderedPending, Pending
from deepspeed.comm.reduction import sum_in_blocks

# Bytes of received pieces that one reduction holds at a time, over all peers. Two pieces per peer are in flight: one
# is summed while the next arrives. Smaller pieces add latency, larger ones miss the cache.
SCRATCH_BYTES = 8 << 20
_PIECES_IN_FLIGHT = 2

# Up to this many bytes an all_reduce sends the whole tensor to every rank: one latency instead of two. For two ranks
# this sends no extra bytes, so they do it up to half of SCRATCH_BYTES: `wait()` then has nothing left to send.
SMALL_ALL_REDUCE_BYTES = 8 << 10

_TAG_BASE = 0x2D50_0000  # far from typical user tags
_SEQUENCE_RANGE = 1 << 10  # two tags per collective; bounds those in flight
_MARK_RANGE = 1021  # a prime, in the upper 10 of 20 bits


class GlooChannel:
    """Tagged messages between this rank and its peers on one gloo group; ranks are group ranks."""

    def __init__(self, group: ProcessGroup, ranks: tuple[int, ...]) -> None:
        self.group = group
        # Bypasses the dispatcher, which takes 20 us per call.
        self.backend: Any = group._get_backend(torch.device("cpu"))
        self.rank = group.rank()
        self.size = group.size()
        self.ranks = ranks
        # Start with the next rank, so that not every rank sends to rank 0 first.
        self.peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        # Sums are computed within each block of ranks (those of one host), then over the blocks.
        self.blocks: tuple[tuple[int, ...], ...] = (tuple(range(self.size)),)
        self.far: frozenset[int] = frozenset()
        """Ranks on other hosts."""
        self.sent_near = self.sent_far = 0  # bytes
        self._sequence = 0

    def set_hosts(self, blocks: tuple[tuple[int, ...], ...]) -> None:
        self.blocks = blocks
        self.far = frozenset(rank for block in blocks if self.rank not in block for rank in block)

    def next_tag(self, mark: int = 0) -> int:
        """Reserve two consecutive tags. All ranks call this once per collective, in the same order, with the same
        mark."""
        self._sequence = (self._sequence + 2) % _SEQUENCE_RANGE
        return _TAG_BASE + mark * _SEQUENCE_RANGE + self._sequence

    def send(self, tensor: Tensor, peer: int, tag: int, operation: str) -> Work:
        """Start to send. CommunicationError, naming `operation`: the connection is lost."""
        if peer in self.far:
            self.sent_far += tensor.nbytes
        else:
            self.sent_near += tensor.nbytes
        return self._start(self.backend.send, tensor, peer, tag, operation)

    def count(self, nbytes: int) -> None:
        """Count the bytes of gloo's own algorithms, as if every peer got its share from this rank."""
        far = nbytes * len(self.far) // max(1, len(self.peers))
        self.sent_far += far
        self.sent_near += nbytes - far

    def receive(self, tensor: Tensor, peer: int, tag: int, operation: str) -> Work:
        return self._start(self.backend.recv, tensor, peer, tag, operation)

    def _start(self, start: Callable[..., Work], tensor: Tensor, peer: int, tag: int, operation: str) -> Work:
        try:
            return start([_bytes(tensor)], peer, tag)
        except RuntimeError as error:  # the connection is made at the first message, or has been lost since
            raise CommunicationError.of(operation, self.ranks, error, silent=self.ranks[peer]) from error

    def exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int, operation: str
    ) -> Callable[[], None]:
        """Start the messages to and from these ranks; return the function that waits for them."""
        works = [(peer, self.receive(tensor, peer, tag, operation)) for peer, tensor in received.items()]
        works += [(peer, self.send(tensor, peer, tag, operation)) for peer, tensor in sent.items()]

        def finish() -> None:
            for peer, work in works:
                self.wait(work, operation, peer)

        return finish

    def wait(self, work: Work, operation: str, peer: int | None = None) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            silent = None if peer is None else self.ranks[peer]
            raise CommunicationError.of(operation, self.ranks, error, silent=silent) from error


_MARKED = ("all_gather", "reduce_scatter", "all_reduce", "reduce", "all_to_all")


def _mark(operation: str, tensor: Tensor, *, sized: bool = True) -> int:
    """Return a hash of the call, equal on ranks that issue the same call."""
    kind = _MARKED.index(operation) * 64 + _DTYPE_NUMBERS.get(tensor.dtype, 0)
    return (kind * 331 + (tensor.numel() * 7 if sized else 0)) % _MARK_RANGE


def _bytes(tensor: Tensor) -> Tensor:
    """Return a uint8 view if gloo does not support the dtype (fp8, complex)."""
    return tensor if tensor.dtype in _GLOO_DTYPES else tensor.view(torch.uint8)


_GLOO_DTYPES = frozenset((
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32,
    torch.int64,
))  # fmt: skip

_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(sorted(_GLOO_DTYPES, key=str), 1)}


def shares(numel: int, size: int) -> list[tuple[int, int]]:
    """Return each rank's [start, stop) of a flat tensor: equal lengths, the last ones shorter or empty."""
    length = -(-numel // size)
    return [(min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(size)]


def piece_numel(size: int, item_bytes: int) -> int:
    """Return the elements of a piece such that the scratch of a reduction stays within SCRATCH_BYTES."""
    return max(1, SCRATCH_BYTES // (_PIECES_IN_FLIGHT * (size - 1) * item_bytes))


def scratch_shape(count: int, size: int, item_bytes: int) -> tuple[int, int, int]:
    """Return [slots, peers, elements of a piece] of the receive scratch for the sum of a shard of
    ``count`` elements."""
    piece = max(1, min(count, piece_numel(size, item_bytes)))
    return min(_PIECES_IN_FLIGHT, -(-count // piece)), size - 1, piece


def _pieces(start: int, stop: int, piece: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + piece, stop)) for first in range(start, stop, piece))


class _ShardedSum:
    """Sum of this rank's shard over ranks, received piece by piece into bounded scratch.

    Sends are posted immediately (gloo moves them once the peer has posted its receive), as are the receives of
    the first pieces; `run()` sums a piece, then posts the receive that reuses its scratch.
    """

    def __init__(
        self, channel: GlooChannel, operation: str, input: Tensor, bounds: list[tuple[int, int]]
    ) -> None:
        self.channel, self.operation = channel, operation
        self.tag = channel.next_tag(_mark(operation, input))
        start, stop = bounds[channel.rank]
        self.own = input[start:stop]
        fitting = piece_numel(channel.size, input.element_size())
        shape = scratch_shape(stop - start, channel.size, input.element_size())
        self.pieces = list(_pieces(0, stop - start, shape[2]))
        self.scratch = torch.empty(shape, dtype=input.dtype)
        self.received = [self._receive(index) for index in range(shape[0])]
        self.sent = [
            (peer, channel.send(input[first:last], peer, self.tag, operation))
            for peer in channel.peers
            for first, last in _pieces(*bounds[peer], fitting)
        ]

    def _receive(self, index: int) -> list[tuple[int, Tensor, Work]]:
        first, last = self.pieces[index]
        slot = self.scratch[index % _PIECES_IN_FLIGHT]
        buffers = [slot[position, : last - first] for position in range(len(self.channel.peers))]
        return [
            (peer, buffer, self.channel.receive(buffer, peer, self.tag, self.operation))
            for peer, buffer in zip(self.channel.peers, buffers, strict=True)
        ]

    def run(self, output: Tensor, scale: float, each: Callable[[int, int], None] | None = None) -> None:
        """Fill `output`; call `each(start, stop)` when that part of it is final."""
        for index, (first, last) in enumerate(self.pieces):
            summands = [self.own[first:last]] * self.channel.size
            for peer, buffer, work in self.received[index]:
                self.channel.wait(work, self.operation, peer)
                summands[peer] = buffer
            sum_in_blocks(output[first:last], summands, self.channel.blocks, scale)
            if index + _PIECES_IN_FLIGHT < len(self.pieces):
                self.received.append(self._receive(index + _PIECES_IN_FLIGHT))
            if each is not None:
                each(first, last)
        for peer, work in self.sent:
            self.channel.wait(work, self.operation, peer)


class GlooTransport:
    """Transport by direct exchanges over one channel; uses gloo's own algorithms where no order of sums matters."""

    name, background = "gloo", False

    def __init__(self, channel: GlooChannel) -> None:
        self.channel = channel

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        """Send this rank's shard to each peer and receive theirs in place: no scratch."""
        channel, count = self.channel, input.numel()
        tag = channel.next_tag(_mark("all_gather", input))
        own = output[channel.rank * count : (channel.rank + 1) * count]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        received = {peer: output[peer * count : (peer + 1) * count] for peer in channel.peers}
        return Pending(channel.exchange(dict.fromkeys(channel.peers, own), received, tag, "all_gather"))

    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        """Send each peer its shard in the input's dtype; sum locally, in rank order."""
        shards = _ShardedSum(self.channel, "reduce_scatter", input, shares(input.numel(), self.channel.size))
        return OrderedPending(lambda: shards.run(output, scale))

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        """Run reduce_scatter into this rank's shard and all_gather of the shards, piece by piece in one pass.

        The receives of the gathered pieces are posted immediately although their memory is still being sent: a peer
        sends a summed piece only after it has received that piece from this rank.
        """
        channel = self.channel
        most = SCRATCH_BYTES // 2 if channel.size == 2 else SMALL_ALL_REDUCE_BYTES
        if tensor.nbytes <= max(most, SMALL_ALL_REDUCE_BYTES):
            return self._all_reduce_whole(tensor, scale)
        bounds = shares(tensor.numel(), channel.size)
        shards = _ShardedSum(channel, "all_reduce", tensor, bounds)
        tag = shards.tag + 1
        own_start, own_stop = bounds[channel.rank]
        own = tensor[own_start:own_stop]
        fitting = piece_numel(channel.size, tensor.element_size())
        works = [
            (peer, channel.receive(tensor[first:last], peer, tag, "all_reduce"))
            for peer in channel.peers
            for first, last in _pieces(*bounds[peer], fitting)
        ]

        def publish(first: int, last: int) -> None:
            works.extend(
                (peer, channel.send(own[first:last], peer, tag, "all_reduce")) for peer in channel.peers
            )

        def finish() -> None:
            shards.run(own, scale, publish)
            for peer, work in works:
                channel.wait(work, "all_reduce", peer)

        return OrderedPending(finish)

    def _all_reduce_whole(self, tensor: Tensor, scale: float) -> Pending:
        channel = self.channel
        tag = channel.next_tag(_mark("all_reduce", tensor))
        everyone = torch.empty((channel.size, tensor.numel()), dtype=tensor.dtype)
        own = everyone[channel.rank]
        own.copy_(tensor)
        received = {peer: everyone[peer] for peer in channel.peers}
        wait = channel.exchange(dict.fromkeys(channel.peers, own), received, tag, "all_reduce")

        def finish() -> None:
            wait()
            sum_in_blocks(tensor, list(everyone), channel.blocks, scale)

        # A large one that is never waited for is finished with a later one.
        return OrderedPending(finish) if tensor.nbytes > SMALL_ALL_REDUCE_BYTES else Pending(finish)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """Take the elementwise maximum with gloo's own all_reduce: any order gives the same bits."""
        self.channel.count(2 * tensor.nbytes * (self.channel.size - 1) // self.channel.size)
        work = torch.distributed.all_reduce(tensor, ReduceOp.MAX, group=self.channel.group, async_op=True)
        assert work is not None
        return Pending(lambda: self.channel.wait(work, "all_reduce_max"))

    def reduce(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending:
        """Send to `dst`, which sums piece by piece; the other tensors are left unchanged."""
        count = tensor.numel()
        bounds = [(0, count) if rank == dst else (0, 0) for rank in range(self.channel.size)]
        shards = _ShardedSum(self.channel, "reduce", tensor, bounds)
        start, stop = bounds[self.channel.rank]
        return OrderedPending(lambda: shards.run(tensor[start:stop], scale))

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        """Run gloo's own broadcast (a tree over the ranks)."""
        self.channel.count(tensor.nbytes * (self.channel.size - 1) if self.channel.rank == src else 0)
        work = torch.distributed.broadcast(
            _bytes(tensor), group=self.channel.group, group_src=src, async_op=True
        )
        assert work is not None
        return Pending(lambda: self.channel.wait(work, "broadcast", src))

    def all_to_all(
        self, output: Tensor, input: Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Pending:
        """Exchange runs pairwise; they may be uneven or empty."""
        channel = self.channel
        tag = channel.next_tag(_mark("all_to_all", input, sized=False))
        received, sent = output.split(list(output_counts)), input.split(list(input_counts))
        wait = channel.exchange(
            {peer: sent[peer] for peer in channel.peers if input_counts[peer]},
            {peer: received[peer] for peer in channel.peers if output_counts[peer]},
            tag,
            "all_to_all",
        )
        received[channel.rank].copy_(sent[channel.rank])
        return Pending(wait)

    def barrier(self) -> Pending:
        work = torch.distributed.barrier(group=self.channel.group, async_op=True)
        assert work is not None
        return Pending(lambda: self.channel.wait(work, "barrier"))

    def close(self) -> None:
        """Do nothing: it holds no resources."""
