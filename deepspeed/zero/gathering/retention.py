"""Keep gathered parameters whole between uses, where the same module runs many times in a row."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket, Status


class KeepGathered:
    """Context that, on entry and at each ``take``, takes hold of those of ``params`` that are whole, until its exit.

    It gathers nothing and is therefore not collective: the use of a parameter gathers it. Without stage 3 it does
    nothing.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        owners = {id(owner): owner for param in params if isinstance(owner := _owner(param), ShardedBucket)}
        self._waiting = list(owners.values())
        self._held: list[ShardedBucket] = []

    def take(self) -> None:
        if not self._waiting:
            return
        whole = [owner for owner in self._waiting if owner.status is Status.GATHERED]
        for owner in whole:
            with owner.transitions.lock:
                owner.transitions.take((owner.layout.index,), Phase.MANUAL)
        self._held += whole
        self._waiting = [owner for owner in self._waiting if owner not in whole]

    def __enter__(self) -> KeepGathered:
        self.take()
        return self

    def __exit__(self, *exc: object) -> None:
        for owner in self._held:
            with owner.transitions.lock:
                owner.transitions.release((owner.layout.index,))
        self._waiting += self._held
        self._held = []


def _owner(param: Tensor) -> object:
    return getattr(param, "ds_owner", None)
