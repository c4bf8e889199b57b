"""A run stopped at any point resumes with the same samples in the same order: none repeated, none lost."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest

from deepspeed.data.loader import DeepSpeedDataLoader, EpochSampler

POINTS = 100


def loaders(
    size: int, ranks: int, batch: int, *, shuffle: bool, seed: int, workers: int = 0
) -> list[DeepSpeedDataLoader]:
    return [
        DeepSpeedDataLoader(
            range(size),
            batch,
            False,
            0,
            None,
            collate_fn=list,
            num_local_io_workers=workers,
            data_parallel_world_size=ranks,
            data_parallel_rank=rank,
            deepspeed_dataloader_config={"shuffle": shuffle, "seed": seed},
        )
        for rank in range(ranks)
    ]


def order_of(size: int, epoch: int, *, shuffle: bool, seed: int) -> list[int]:
    sampler = EpochSampler(size, shuffle=shuffle, seed=seed)
    sampler.epoch = epoch
    return list(sampler)


def read(group: list[DeepSpeedDataLoader], steps: int | None = None) -> list[int]:
    """Return the samples read by all ranks, in the order of the epoch; None: to its end."""
    found: list[list[int]] = [[] for _ in group]
    for samples, loader in zip(found, group, strict=True):
        stream = iter(loader)
        for _ in range(len(loader) if steps is None else steps):
            batch: Any = next(stream, None)
            if batch is None:
                break
            samples += batch
    return [number for row in zip(*found, strict=True) for number in row]


@pytest.mark.parametrize("point", range(POINTS))
def test_any_point_on_any_ranks(point: int) -> None:
    draw = random.Random(point)
    size, epoch = draw.randrange(1, 300), draw.randrange(3)
    how = {"shuffle": draw.random() < 0.7, "seed": draw.randrange(9)}
    before, after = ((draw.randrange(1, 5), draw.randrange(1, 6)) for _ in range(2))
    order = order_of(size, epoch, **how)
    first = loaders(size, *before, **how)
    for loader in first:
        loader.set_epoch(epoch)
    steps = draw.randrange(len(first[0]) + 1)
    taken = read(first, steps)
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states) and len(pickle.dumps(states[0])) < 300
    rest = loaders(size, *after, **how)
    for loader in rest:
        loader.load_state_dict(pickle.loads(pickle.dumps(states[0])))
    found = taken + read(rest)
    assert found[:size] == order
    # only the end of an epoch is filled up, for every rank to have as many samples
    assert len(found) - size < max(before[0], after[0]) and set(found[size:]) <= set(order)
    again = read(rest)
    assert again[:size] == order_of(size, epoch + 1, **how)


@pytest.mark.parametrize("point", range(6))
def test_worker_processes_read_ahead_and_lose_nothing(point: int) -> None:
    draw = random.Random(point)
    size, steps = 60 + point, draw.randrange(1, 9)
    first = loaders(size, 2, 3, shuffle=True, seed=1, workers=1 + point % 2)
    taken = read(first, steps)
    rest = loaders(size, 1, 4, shuffle=True, seed=1, workers=point % 3)
    rest[0].load_state_dict(first[0].state_dict())
    assert taken + read(rest) == order_of(size, 0, shuffle=True, seed=1)


def test_the_state_does_not_grow_with_the_data() -> None:
    (loader,) = loaders(3_000_000, 1, 4, shuffle=True, seed=1)
    stream = iter(loader)
    next(stream)
    assert len(pickle.dumps(loader.state_dict())) < 300
