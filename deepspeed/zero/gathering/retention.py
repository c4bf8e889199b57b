"""Keeping gathered parameters whole from one use to the next, where the same module runs many times in a row."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket, Status


class KeptWhole:
    """A block at whose beginning, and at each ``take``, what is whole of ``params`` is held until its end.

    It gathers nothing and is therefore not collective: whoever uses a parameter gathers it. Without stage 3 it does
    nothing.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        homes = {id(home): home for param in params if isinstance(home := _home(param), ShardedBucket)}
        self._waiting = list(homes.values())
        self._held: list[ShardedBucket] = []

    def take(self) -> None:
        if not self._waiting:
            return
        whole = [home for home in self._waiting if home.status is Status.GATHERED]
        for home in whole:
            with home.transitions.lock:
                home.transitions.take((home.layout.index,), Phase.BY_HAND)
        self._held += whole
        self._waiting = [home for home in self._waiting if home not in whole]

    def __enter__(self) -> KeptWhole:
        self.take()
        return self

    def __exit__(self, *exc: object) -> None:
        for home in self._held:
            with home.transitions.lock:
                home.transitions.drop((home.layout.index,))
        self._waiting += self._held
        self._held = []


def _home(param: Tensor) -> object:
    return getattr(param, "ds_home", None)
