"""The engine's loader: what each rank reads, and that a resumed run reads exactly what is left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from deepspeed.data.loader import DeepSpeedDataLoader, EpochSampler, RepeatingLoader
from tests.pool import distributed


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index


class Noisy(Numbers):
    """Augments with every generator that data sets use."""

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        import numpy

        return torch.tensor(
            [index, random.random(), numpy.random.rand(), torch.rand(()).item()], dtype=torch.float64
        )


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class StatefulStream(Stream):
    """Continues on its own, and must not be read twice."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.next, self.read = 0, 0

    def __iter__(self) -> Iterator[int]:
        start, self.next = self.next, 0
        for i in range(start, self.size):
            self.next = i + 1
            self.read += 1
            yield i
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def _loader(
    dataset: Any, batch_size: int = 3, world_size: int = 1, rank: int = 0, **arguments: Any
) -> DeepSpeedDataLoader:
    return DeepSpeedDataLoader(
        dataset,
        batch_size,
        False,
        0,
        None,
        data_parallel_world_size=world_size,
        data_parallel_rank=rank,
        **arguments,
    )


def _lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 5, 12, 100])
def test_batches_are_those_of_a_distributed_sampler(
    size: int, world_size: int, drop_last: bool, shuffle: bool
) -> None:
    for rank in range(world_size):
        loader = _loader(
            data := Numbers(size),
            world_size=world_size,
            rank=rank,
            dataloader_drop_last=drop_last,
            deepspeed_dataloader_config={"shuffle": shuffle, "seed": 5},
        )
        sampler = DistributedSampler(data, world_size, rank, shuffle=shuffle, seed=5)
        oracle = DataLoader(data, 3, sampler=sampler, drop_last=drop_last) if size else []
        for epoch in range(3):
            if size:
                sampler.set_epoch(epoch)
            batches = _lists(loader)
            assert batches == _lists(oracle)
            assert len(loader) == len(batches)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 7, 9, 14])
def test_resume_at_every_position(position: int, drop_last: bool) -> None:
    straight = RepeatingLoader(_loader(Numbers(13), dataloader_drop_last=drop_last))
    seen = [next(straight).tolist() for _ in range(30)]
    first = RepeatingLoader(_loader(Numbers(13), dataloader_drop_last=drop_last))
    for _ in range(position):
        next(first)
    resumed = RepeatingLoader(_loader(Numbers(13), dataloader_drop_last=drop_last))
    resumed.load_state_dict(first.state_dict())
    assert [next(resumed).tolist() for _ in range(30 - position)] == seen[position:]


def test_every_pass_has_an_order_of_its_own() -> None:
    loader = _loader(Numbers(12))
    passes = [_lists(loader) for _ in range(3)]
    assert all(sorted(sum(each, [])) == list(range(12)) for each in passes)
    assert passes[0] != passes[1] != passes[2]
    again = _loader(Numbers(12))
    assert [_lists(again) for _ in range(3)] == passes


def test_resume_after_the_last_batch_and_after_the_epoch() -> None:
    loader = _loader(Numbers(6))
    batches = iter(loader)
    epochs = [_lists(_loader_at(epoch)) for epoch in range(3)]
    next(batches), next(batches)
    resumed = _loader(Numbers(6))
    resumed.load_state_dict(loader.state_dict())
    assert _lists(resumed) == []  # this epoch has nothing left
    assert _lists(resumed) == epochs[1]
    with pytest.raises(StopIteration):
        next(batches)
    resumed = _loader(Numbers(6))
    resumed.load_state_dict(loader.state_dict())
    assert _lists(resumed) == epochs[1] and _lists(resumed) == epochs[2]


def _loader_at(epoch: int) -> DeepSpeedDataLoader:
    loader = _loader(Numbers(6))
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize(
    ("before", "after"), [((2, 3), (3, 4)), ((4, 2), (1, 5)), ((1, 7), (4, 1)), ((3, 2), (3, 2))]
)
def test_sample_order_goes_on_at_another_world_and_batch_size(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    size, steps = 97, 5
    (world, batch), (new_world, new_batch) = before, after
    order = list(iter(EpochSampler(size)))
    old = [_loader(Numbers(size), batch, world, rank) for rank in range(world)]
    taken = []
    for loader in old:
        batches = iter(loader)
        taken.append([next(batches).tolist() for _ in range(steps)])
    done = steps * world * batch
    for step in range(steps):  # together the ranks take the order from front to back
        together = sorted(i for rank in taken for i in rank[step])
        assert together == sorted(order[step * world * batch : (step + 1) * world * batch])
    assert all(loader.state_dict() == old[0].state_dict() for loader in old)
    new = [_loader(Numbers(size), new_batch, new_world, rank) for rank in range(new_world)]
    for loader in new:
        loader.load_state_dict(old[0].state_dict())
    rest = [_lists(loader) for loader in new]
    flat = [[i for batch in batches for i in batch] for batches in rest]
    interleaved = [i for step in zip(*flat, strict=True) for i in step]
    assert interleaved[: size - done] == order[done:]
    assert len(interleaved) == -(-(size - done) // new_world) * new_world


def test_nothing_is_drawn_from_the_global_generators() -> None:
    state, python_state = torch.get_rng_state(), random.getstate()
    cases: list[dict[str, Any]] = [
        {},
        {"num_local_io_workers": 1},
        {"data_sampler": RandomSampler(Numbers(10))},
    ]
    for arguments in cases:
        _lists(_loader(Numbers(10), **arguments))
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state


def test_workers_read_and_resume_exactly() -> None:
    def rows(batches: Any) -> list[Any]:
        return [batch.tolist() for batch in batches]

    straight = _loader(Noisy(12), num_local_io_workers=2)
    seen = rows(straight)
    assert sorted(row[0] for batch in seen for row in batch) == list(range(12))
    assert len({value for batch in seen for row in batch for value in row[1:]}) == 36
    first = _loader(Noisy(12), num_local_io_workers=2)
    batches = iter(first)
    next(batches), next(batches)
    resumed = _loader(Noisy(12), num_local_io_workers=1)
    resumed.load_state_dict(first.state_dict())  # though workers had read ahead
    assert rows(resumed) == seen[2:]
    other = _loader(Noisy(12), num_local_io_workers=1, world_size=2, rank=1)
    assert not {v for b in rows(other) for r in b for v in r[1:]} & {
        v for b in seen for r in b for v in r[1:]
    }


def test_abandoned_passes_and_set_epoch() -> None:
    epochs = [_lists(_loader_at(epoch)) for epoch in range(4)]
    loader = _loader(Numbers(6))
    next(iter(loader))
    assert _lists(loader) == epochs[1]  # a pass left early counts
    loader.set_epoch(3)
    assert _lists(loader) == epochs[3]
    resumed = _loader(Numbers(6))
    next(iter(resumed))
    state = resumed.state_dict()
    resumed.load_state_dict(state)
    resumed.set_epoch(0)  # what loops do at the start of each epoch
    assert _lists(resumed) == epochs[0][1:]
    with pytest.raises(StopIteration):
        next(resumed)


def test_client_samplers() -> None:
    data = Numbers(11)
    assert _lists(_loader(data, data_sampler=SequentialSampler(data)))[0] == [0, 1, 2]
    batches = BatchSampler(SequentialSampler(data), 4, drop_last=True)
    assert (
        _lists(loader := _loader(data, data_sampler=batches)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        and len(loader) == 2
    )
    sampler = DistributedSampler(data, 2, 1, seed=9)
    assert _lists(_loader(data, world_size=2, rank=1, data_sampler=sampler)) == _lists(
        DataLoader(data, 3, sampler=sampler)
    )


@pytest.mark.parametrize(
    "make",
    [
        SequentialSampler,
        RandomSampler,
        lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(4)),
        lambda data: BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(4)), 4, False),
        lambda data: DistributedSampler(data, 1, 0, seed=3),
    ],
    ids=["sequential", "random", "random-own-generator", "batches", "distributed"],
)
@pytest.mark.parametrize("position", [2, 6])
def test_client_samplers_resume(make: Any, position: int) -> None:
    def repeating() -> RepeatingLoader:
        data = Numbers(11)
        return RepeatingLoader(_loader(data, data_sampler=make(data)))

    straight, first, resumed = repeating(), repeating(), repeating()
    seen = [next(straight).tolist() for _ in range(9)]
    for _ in range(position):
        next(first)
    resumed.load_state_dict(first.state_dict())
    assert [next(resumed).tolist() for _ in range(9 - position)] == seen[position:]


@pytest.mark.parametrize("dataset", [Stream, StatefulStream])
def test_iterable_data_sets_resume(dataset: type[Stream]) -> None:
    first = _loader(dataset(11))
    batches = iter(first)
    assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1, 2], [3, 4, 5]]
    resumed = _loader(source := dataset(11))
    resumed.load_state_dict(first.state_dict())
    assert _lists(resumed) == [[6, 7, 8], [9, 10]]
    assert isinstance(source, StatefulStream) is (getattr(source, "read", 11) == 5)  # it skipped on its own
    assert _lists(resumed) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    with pytest.raises(TypeError):
        len(resumed)


def test_a_data_set_of_another_size_starts_anew() -> None:
    first = _loader(Numbers(6))
    next(iter(first))
    other = _loader(Numbers(9))
    other.load_state_dict(first.state_dict())
    assert len(_lists(other)) == 3


def test_collate_function_and_timer() -> None:
    starts: list[int] = []
    loader = DeepSpeedDataLoader(
        Numbers(4),
        2,
        True,
        -1,
        SimpleNamespace(start=lambda: starts.append(1)),
        collate_fn=lambda samples: {"ids": samples},
        data_parallel_world_size=1,
        data_parallel_rank=0,
    )
    assert [len(batch["ids"]) for batch in loader] == [2, 2]
    assert len(starts) >= 2


def test_repeating_loader_over_anything() -> None:
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert iter(loader) is loader and len(loader) == 2
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))


def test_bad_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="rank=2"):
        _loader(Numbers(4), world_size=2, rank=2)


@distributed(world_size=2)
def test_ranks_share_the_data_set() -> None:
    from deepspeed import comm

    loader = DeepSpeedDataLoader(Numbers(8), 2, False, 0, None)
    assert (loader.data_parallel_world_size, loader.data_parallel_rank) == (2, comm.get_rank())
    own = torch.tensor([i for batch in _lists(loader) for i in batch])
    everyone = [torch.empty_like(own) for _ in range(2)]
    comm.all_gather(everyone, own)
    assert sorted(torch.cat(everyone).tolist()) == list(range(8))
