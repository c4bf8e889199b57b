"""The order in which gradient buckets are launched, and how full each is in the backward in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from deepspeed.comm.collectives import Communicator


class BucketOrder:
    """One order for all ranks (Note: order of collectives, in `reducer.py`): at first the reverse of registration, then
    what rank 0 has observed in a backward that sums. A bucket is full when as many gradients have arrived as then.

    Args:
        members: by bucket, the indices of its parameters.
        expected: arrivals of each parameter in one backward.
        alone: there are no other ranks to agree with.
    """

    def __init__(self, members: Sequence[Sequence[int]], expected: Sequence[int], *, alone: bool) -> None:
        self._members = members
        self._expected = list(expected)
        self._buckets = list(reversed(range(len(members))))
        self._alone = self.agreed = alone
        self._count_arrivals()
        self.begin()

    def _count_arrivals(self) -> None:
        self._to_arrive = [sum(self._expected[index] for index in indices) for indices in self._members]

    def begin(self) -> None:
        """Begin a backward: nothing has arrived, and nothing is launched."""
        self._arrived = [0] * len(self._expected)
        self._missing = self._to_arrive.copy()
        self._next = 0  # position up to which buckets had their turn
        self._filled: list[int] = []
        self.launched = [False] * len(self._members)

    def arrive(self, index: int, b: int) -> bool:
        """Count an arrival of parameter ``index`` in bucket ``b``. Return whether it has filled the bucket."""
        self._arrived[index] += 1
        if self.launched[b] or self._arrived[index] > self._expected[index]:
            return False
        self._missing[b] -= 1
        if self._missing[b]:
            return False
        self._filled.append(b)
        return True

    def take_turns(self, launch: Callable[[int], None]) -> None:
        """Call ``launch`` with the buckets whose turn it is, up to the first that is not full."""
        while self._next < len(self._buckets) and not self._missing[self._buckets[self._next]]:
            self._next += 1
            launch(self._buckets[self._next - 1])

    def take_rest(self, launch: Callable[[int], None]) -> None:
        """Call ``launch`` with the buckets that have not had their turn in this backward."""
        while self._next < len(self._buckets):
            self._next += 1
            launch(self._buckets[self._next - 1])

    def __iter__(self) -> Iterator[int]:
        return iter(self._buckets)

    def agree(self, communicator: Communicator, device: torch.device) -> None:
        """Adopt the order and the numbers of arrivals that rank 0 has seen in this backward. Collective."""
        filled = set(self._filled)
        order = self._filled + [b for b in self._buckets if b not in filled]
        seen = torch.tensor(order + [max(1, n) for n in self._arrived], dtype=torch.int64, device=device)
        communicator.broadcast(seen, src=0).wait()
        values = seen.tolist()
        self._buckets, self._expected = values[: len(order)], values[len(order) :]
        self.agreed = True
        self._count_arrivals()

    def observe_again(self) -> None:
        """Agree anew in the next backward that sums: the graph has changed."""
        self.agreed = self._alone

    def extended(self, members: Sequence[Sequence[int]], more: int) -> BucketOrder:
        """Return an order of buckets that hold ``more`` parameters, which is to be observed."""
        return BucketOrder(members, [*self._expected, *[1] * more], alone=self._alone)
