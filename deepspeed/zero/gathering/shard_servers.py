"""One shard server per replica group behind a common interface, as buckets of different replica groups have different
peers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepspeed.base.python_gc import call_when_dropped
from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.rendezvous import Arrival
from deepspeed.zero.gathering.shard_server import ShardServer
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket
from deepspeed.zero.replica_groups import DENSE, ReplicaGroupTable


class ShardServers:
    """Fetches each bucket from the ranks of its replica group; with one rank in it, the shard is the whole bucket."""

    def __init__(
        self, buckets: Sequence[ShardedBucket], replica_groups: ReplicaGroupTable, timeout_s: float
    ) -> None:
        self.buckets = list(buckets)
        self._slot: list[int] = []  # a bucket's index within its replica group
        shards: dict[str, list[Tensor]] = {}
        for bucket in self.buckets:
            assert bucket.shard is not None
            mine = shards.setdefault(bucket.layout.replica_group, [])
            self._slot.append(len(mine))
            mine.append(bucket.shard)
        shards.setdefault(DENSE, [])  # it also hosts the rendezvous
        self.servers = {
            name: ShardServer(replica_groups[name].shard, shards[name], timeout_s)
            for name in sorted(shards)
            if replica_groups[name].shard.size > 1
        }
        self._retire_when_dropped(self.servers)

    def _retire_when_dropped(self, servers: dict[str, ShardServer]) -> None:
        """Retire the servers when ``self`` is garbage-collected: their threads would otherwise keep them alive after
        an engine that was not destroyed."""
        for server in servers.values():
            call_when_dropped(self, server.retire)

    def fetch(self, index: int, full: Tensor, phase: Phase) -> None:
        """Fill ``full`` [padded_numel] with the shards of bucket ``index``, for a use in this phase."""
        bucket = self.buckets[index]
        server = self.servers.get(bucket.layout.replica_group)
        if server is None:
            full.copy_(bucket.device_shard())
        else:
            bucket.stored_shard()
            server.fetch(self._slot[index], full)
        bucket.communicator.count_fetch(full)

    def is_exact(self, index: int) -> bool:
        """Return whether gathers in every phase give the exact values of the shards."""
        return True

    def advance(self) -> None:
        for server in self.servers.values():
            server.advance()

    def meet(self, arrival: Arrival) -> list[int] | None:
        return self.servers[DENSE].meet(arrival)

    def retire(self) -> None:
        for server in self.servers.values():
            server.retire()

    @property
    def version(self) -> int:
        return self.servers[DENSE].version

    @property
    def fetches(self) -> int:
        return sum(server.fetches for server in self.servers.values())
