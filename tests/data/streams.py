"""Iterable data sets for the tests, and a program that reads one until it is killed."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from deepspeed.data.loader import DeepSpeedDataLoader


class Shards(IterableDataset):
    """Rows (sample, a drawn number) of this rank; a worker reads every n-th. Workers have shares of other sizes."""

    def __init__(self, size: int, world_size: int = 1, rank: int = 0) -> None:
        self.size, self.world_size, self.rank = size, world_size, rank

    def _own(self) -> range:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        return range(self.rank + self.world_size * number, self.size, self.world_size * workers)

    def __iter__(self) -> Iterator[Any]:
        for sample in self._own():
            yield torch.tensor([sample, random.random(), torch.rand(()).item()], dtype=torch.float64)


class PositionedShards(Shards):
    """Continues on its own, and restarts after the end."""

    next = 0

    def __iter__(self) -> Iterator[Any]:
        own, start = self._own(), self.next
        for place in range(start, len(own)):
            self.next = place + 1
            yield torch.tensor([own[place], random.random(), torch.rand(()).item()], dtype=torch.float64)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def loader(kind: type[Shards], workers: int, world_size: int = 1, rank: int = 0) -> DeepSpeedDataLoader:
    return DeepSpeedDataLoader(
        kind(23, world_size, rank),
        2,
        False,
        -1,
        None,
        num_local_io_workers=workers,
        data_parallel_world_size=world_size,
        data_parallel_rank=rank,
    )


def main(folder: Path, world_size: int, rank: int, dies_after: int) -> None:
    """Write every batch to a file, and the position after it; read on from there. Killed after some batches."""
    position, seen = folder / f"position{rank}.pt", folder / f"rows{rank}"
    own = loader(PositionedShards, 2, world_size, rank)
    if position.exists():
        own.load_state_dict(torch.load(position, weights_only=True))
    for number, batch in enumerate(own):
        if number == dies_after:  # a batch that was read, but not used
            os.kill(os.getpid(), signal.SIGKILL)
        with open(seen, "a") as file:
            file.writelines(f"{row}\n" for row in batch.tolist())
        torch.save(own.state_dict(), position)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
