"""The position of an `IterableDataset` that worker processes read: exact, with torchdata's `StatefulDataLoader`.

Each worker sends its position with every batch, so read-ahead samples are neither lost nor repeated after a resume.
Map-style data sets do not need this: the loader distributes the indices itself, and resumes with any number of
workers and ranks, while torchdata needs the same number.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from deepspeed.base import rng

TORCHDATA = "torchdata"


def is_available() -> bool:
    """Return whether torchdata is installed (the extra `data`)."""
    return importlib.util.find_spec(TORCHDATA) is not None


def make_loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    """Return a `StatefulDataLoader` of ``dataset``; ``options`` are those of `torch.utils.data.DataLoader`."""
    module = importlib.import_module(f"{TORCHDATA}.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it
        loader: DataLoader[Any] = module.StatefulDataLoader(Positioned(dataset), **options)
    return loader


class Positioned(IterableDataset[Any]):
    """A data set whose iterators track their position."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        return _Samples(self.dataset)


class _Samples(Iterator[Any]):
    """Iterates over one worker's samples. For a data set (or iterator) with ``state_dict`` and ``load_state_dict``
    its state and the RNG states are saved and restored; any other is read again up to the position, with the same
    random draws."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._samples = iter(dataset)
        self._taken = 0
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            sample = next(self._samples)
        except StopIteration:
            self._ended = True
            raise
        self._taken += 1
        return sample

    def _owner(self) -> Any:
        """Return the iterator or data set that has a state, None if neither does."""
        for owner in (self._samples, self._dataset):
            if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
                return owner
        return None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"taken": self._taken, "ended": self._ended}
        owner = self._owner()
        if owner is not None:
            state |= {"position": owner.state_dict(), "random": rng.capture(device=False)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken, self._ended = state["taken"], state["ended"]
        if self._ended:  # the data set may be at its start again
            return
        owner = self._owner()
        if owner is None or "position" not in state:
            next(islice(self._samples, self._taken, self._taken), None)
            return
        owner.load_state_dict(state["position"])
        if owner is self._dataset:
            self._samples = iter(owner)
        rng.restore(state["random"])
