"""One shard server per replica group behind the face of a single one: buckets of different replica groups have
different peers."""

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
    """Fetches each bucket from the ranks of its replica group; where a replica group is one rank, its shard is the
    whole bucket."""

    def __init__(
        self, buckets: Sequence[ShardedBucket], replica_groups: ReplicaGroupTable, timeout_s: float
    ) -> None:
        self.buckets = list(buckets)
        self._slot: list[int] = []  # a bucket's number among those of its replica group
        shards: dict[str, list[Tensor]] = {}
        for bucket in self.buckets:
            assert bucket.shard is not None
            mine = shards.setdefault(bucket.layout.replica_group, [])
            self._slot.append(len(mine))
            mine.append(bucket.shard)
        shards.setdefault(DENSE, [])  # ranks also meet there
        self.servers = {
            name: ShardServer(replica_groups[name].shard, shards[name], timeout_s)
            for name in sorted(shards)
            if replica_groups[name].shard.size > 1
        }
        self._retire_when_dropped(self.servers)

    def _retire_when_dropped(self, servers: dict[str, ShardServer]) -> None:
        """Threads keep a server alive: without this it would outlive an engine that nobody destroys."""
        for server in servers.values():
            call_when_dropped(self, server.retire)

    def fetch(self, index: int, full: Tensor, phase: Phase) -> None:
        """Fill ``full`` with the shards of bucket ``index``, for a use in this phase."""
        bucket = self.buckets[index]
        server = self.servers.get(bucket.layout.replica_group)
        if server is None:
            full.copy_(bucket.own_shard())
        else:
            bucket.at_rest()
            server.fetch(self._slot[index], full)
        bucket.communicator.count_fetch(full)

    def is_exact(self, index: int) -> bool:
        """Return whether a gather gives the exact values of the shards, in every phase."""
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
