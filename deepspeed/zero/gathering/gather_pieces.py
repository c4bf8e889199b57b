"""ZeRO++ at stage 3 (G. Wang et al. 2023): gathers that send fewer bytes, and none across slow links.

Each rank makes a *payload* of its shard of a bucket whenever the weights have changed: 8-bit codes with a scale per
block (qwZ), or the shard unencoded. A *piece* is one rank's contribution to a gather: its payload, or, with groups of
ranks (hpZ), the payloads of all ranks at its position in their groups. Those are exchanged once per change of the
weights; from then on each group holds all payloads, and every gather of the step, in forward, backward and
recomputation, stays within the group.

All ranks decode the same payloads, their own included, so that all compute with the same weights. The shards themselves
and the master weights are not rounded: they are what checkpoints, exports and ``GatheredParameters`` see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.config.plan import Packing
from deepspeed.ops.formats.codecs import BlockCodec
from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.shard_server import ShardServer
from deepspeed.zero.gathering.shard_servers import ShardServers
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket
from deepspeed.zero.gradients.quantized_sum import codec_for
from deepspeed.zero.replica_groups import Levels, ReplicaGroup, ReplicaGroupTable


class GatherPiece:
    """This rank's contribution to gathers of one bucket; also assembles the whole bucket from all contributions.

    ``data`` [groups, payload]: uint8, or the bucket's dtype without a ``codec``.
    """

    def __init__(self, bucket: ShardedBucket, codec: BlockCodec | None, replica_group: ReplicaGroup) -> None:
        self.bucket = bucket
        self.codec = codec
        self.replica_group = replica_group
        self.near, self.across = replica_group.levels or Levels(replica_group.shard, Communicator(None))
        numel, dtype = bucket.layout.shard_numel, bucket.layout.dtype
        payload = numel if codec is None else codec.nbytes(numel)
        dtype = dtype if codec is None else torch.uint8
        self.data = torch.empty(self.across.size, payload, dtype=dtype, device=bucket.device)
        bucket.lossy = codec is not None

    def refresh(self) -> Pending:
        """Rebuild the payload after every rank wrote its shard, and exchange it across groups."""
        shard = self.bucket.stored_shard()
        own = self.data[self.across.rank]
        own.copy_(shard if self.codec is None else self.codec.encode(shard.to(own.device)))
        return self.across.all_gather(self.data.view(-1), own)

    def buffer(self) -> Tensor:
        """Return memory for the pieces of all ranks of the group."""
        return self.data.new_empty(self.near.size * self.data.numel())

    def place(self, pieces: Tensor, full: Tensor) -> None:
        """Fill ``full`` [padded_numel] from the ``pieces`` of all ranks of the group."""
        shards = full.view(self.across.size, self.near.size, -1)
        payloads = pieces.view(self.near.size, self.across.size, -1)
        if self.codec is None:
            shards.copy_(payloads.transpose(0, 1))
            return
        for i in range(self.near.size):
            for group in range(self.across.size):
                self.codec.decode(payloads[i, group], shards.shape[-1], out=shards[group, i])


class PieceChannel:
    """Gather channel of one bucket that all-gathers pieces instead of shards."""

    def __init__(self, piece: GatherPiece, ranks: Communicator) -> None:
        self.piece = piece
        self.ranks = ranks

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        """Gather the whole bucket into ``output``. ``input``, this rank's shard, is ignored: its payload was made
        when it was written."""
        pieces = self.piece.buffer()
        pending = self.ranks.all_gather(pieces, self.piece.data.view(-1))

        def finish() -> None:
            pending.wait()
            self.piece.place(pieces, output)

        return Pending(finish)


class PieceServers(ShardServers):
    """Serves pieces for gathers of training and evaluation, and exact shards for gathers by hand.

    ``pieces``: by bucket index; buckets without one are served as exact shards.
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        replica_groups: ReplicaGroupTable,
        timeout_s: float,
        pieces: dict[int, GatherPiece],
    ) -> None:
        super().__init__(buckets, replica_groups, timeout_s)
        self.pieces = pieces
        served: dict[str, list[Tensor]] = {}
        self._piece_index: dict[int, int] = {}  # a piece's index within its replica group
        near: dict[str, Communicator] = {}
        for index, piece in pieces.items():
            mine = served.setdefault(piece.replica_group.name, [])
            self._piece_index[index] = len(mine)
            mine.append(piece.data.view(-1))
            near[piece.replica_group.name] = piece.near
        self.refresh()
        self.nearby = {name: ShardServer(near[name], served[name], timeout_s) for name in sorted(served)}
        self._retire_when_dropped(self.nearby)

    def fetch(self, index: int, full: Tensor, phase: Phase) -> None:
        piece = self.pieces.get(index)
        if piece is None or phase is Phase.MANUAL:
            super().fetch(index, full, phase)
            return
        pieces = piece.buffer()
        self.nearby[piece.replica_group.name].fetch(self._piece_index[index], pieces)
        piece.place(pieces, full)
        piece.near.count_fetch(pieces)

    def is_exact(self, index: int) -> bool:
        return index not in self.pieces or self.pieces[index].codec is None

    def refresh(self) -> None:
        """Rebuild all pieces after the weights have changed. Collective with groups of ranks."""
        for pending in [piece.refresh() for piece in self.pieces.values()]:
            pending.wait()

    def advance(self) -> None:
        self.refresh()
        super().advance()
        for server in self.nearby.values():
            server.advance()

    def retire(self) -> None:
        super().retire()
        for server in self.nearby.values():
            server.retire()


def make_pieces(
    buckets: Sequence[ShardedBucket], replica_groups: ReplicaGroupTable, packing: Packing
) -> dict[int, GatherPiece]:
    """Return the pieces, by bucket index, of the buckets that the plan quantizes or groups. Persistent buckets are
    small and are refreshed after each step without loss."""
    pieces: dict[int, GatherPiece] = {}
    for bucket in buckets:
        layout = bucket.layout
        replica_group = replica_groups[layout.replica_group]
        bits = packing.weights if layout.requires_grad else packing.frozen_weights
        codec = codec_for(layout, bits, random=packing.random, rank=replica_group.shard.rank)
        if (
            not bucket.persistent
            and replica_group.shard.size > 1
            and (codec is not None or replica_group.levels is not None)
        ):
            pieces[layout.index] = GatherPiece(bucket, codec, replica_group)
    return pieces
