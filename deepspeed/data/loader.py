"""The data loader of an engine: each rank's share of a data set, in an order that a resumed run continues.

The order of an epoch is one permutation of the whole data set, which depends on (seed, epoch) alone. Step k
of all ranks together takes the next `batch_size * world_size` entries of it, so the position is one
number, the samples taken so far, and stays valid for any other number of ranks. Nothing here draws from the
global random generators.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, cast, runtime_checkable

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import logger
from deepspeed.data import stream_position


class RepeatingLoader:
    """Repeats `loader` without end; `next()` only stops if the loader is empty."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self.data_iter = iter(self.loader)


class EpochSampler(Sampler[int]):
    """A rank's indices for one epoch, in the order of torch's DistributedSampler, starting at any position.

    The epoch is a permutation (seeded with `seed + epoch`), repeated from its start until its length is a
    multiple of `num_replicas`; rank r takes entries r, r + num_replicas, ... The first `skip` entries,
    counted over all ranks, are left out.
    """

    def __init__(
        self, num_samples: int, num_replicas: int = 1, rank: int = 0, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank={rank} must be from 0 to {num_replicas - 1} (num_replicas - 1)")
        self.num_samples, self.num_replicas, self.rank = num_samples, num_replicas, rank
        self.shuffle, self.seed = shuffle, seed
        self.epoch = 0
        self.skip = 0

    def __len__(self) -> int:
        """Return the indices per rank in a full epoch."""
        return -(-self.num_samples // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        if self.num_samples == 0:
            return iter(())
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator)
        else:
            order = torch.arange(self.num_samples)
        remaining = max(0, self.num_samples - self.skip)
        padded = -(-remaining // self.num_replicas) * self.num_replicas
        positions = torch.arange(self.rank, max(self.rank, padded), self.num_replicas) + self.skip
        return iter(order[positions % self.num_samples].tolist())


@dataclass
class Position:
    """Position that determines the next batch. The loader's parts share this object instead of the loader: a
    reference cycle through worker processes would delay their shutdown by timeouts."""

    seed: int
    world_size: int
    rank: int
    samples_per_batch: int
    epoch: int = 0
    samples: int = 0  # taken in this epoch, by all ranks together

    @property
    def samples_per_step(self) -> int:
        return self.samples_per_batch * self.world_size


@runtime_checkable
class ResumableSampler(Protocol):
    """A batch sampler with its own order, which can return its state at earlier positions."""

    @property
    def num_batches(self) -> int: ...
    def state_at(self, consumed_samples: int) -> dict[str, Any]:
        """Return the state after ``consumed_samples`` of all ranks, even if it has read further."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class DeepSpeedDataLoader:
    """Batches of this rank; one pass is one epoch, `len()` the number of steps in it.

    Args:
        dataset: map-style, or an IterableDataset (which then splits itself over ranks).
        batch_size: samples per rank and step.
        pin_memory: pin batches, if there is a device to copy them to.
        local_rank: accepted for the documented signature.
        tput_timer: its `start()` is called before each batch, if not None.
        collate_fn: turns a list of samples into a batch.
        num_local_io_workers: worker processes; None and 0: this process reads. Worker RNGs are seeded from the
            position of each batch, so that a resumed run draws the same augmentations. Workers of an IterableDataset
            resume exactly if torchdata is installed and their number is unchanged; else the batches before the
            position are read again and dropped.
        data_sampler: this rank's indices, or lists of them (a BatchSampler, which then decides the batch
            size); None: a shuffled `EpochSampler`.
        data_parallel_world_size, data_parallel_rank: None: from `deepspeed.comm`.
        dataloader_drop_last: drop a last batch that is not full.
        deepspeed_dataloader_config: `seed`, `shuffle` of the EpochSampler.

    `state_dict()` identifies the next batch exactly; it is the same on all ranks unless the sampler or data set has
    its own state. With another world size or batch size the samples continue in the same order. A client's sampler
    does not know other ranks' indices: at another world size it is advanced by the same fraction of the epoch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: dict[str, Any] | None = None,
    ) -> None:
        config = deepspeed_dataloader_config or {}
        self.dataset, self.batch_size, self.collate_fn = dataset, batch_size, collate_fn
        self.local_rank, self.tput_timer = local_rank, tput_timer
        self.post_process_func: Callable[[Any, Any], Any] | None = None  # (batch, sampler state) -> batch
        self.num_local_io_workers = num_local_io_workers or 0
        self.pin_memory = pin_memory and get_accelerator().device_name() != "cpu"
        self.dataloader_drop_last = dataloader_drop_last
        world_size, rank = _group_position(data_parallel_world_size, data_parallel_rank)
        self.data_parallel_world_size, self.data_parallel_rank = world_size, rank
        self.iterable = isinstance(dataset, IterableDataset)
        self.data_sampler = data_sampler
        if data_sampler is None and not self.iterable:
            shuffle, seed = bool(config.get("shuffle", True)), config.get("seed", 0)
            self.data_sampler = EpochSampler(len(dataset), world_size, rank, shuffle=shuffle, seed=seed)
        self._generator = torch.Generator()
        order = _innermost(data_sampler)
        if isinstance(order, RandomSampler) and order.generator is None:
            order.generator = self._generator  # otherwise it draws from the global generator
        self._sampler_start: Any = None  # client sampler's state at the start of the epoch
        self._workers_start: dict[str, Any] | None = None  # positions to resume from
        if _yields_batches(self.data_sampler):
            batch_size = getattr(self.data_sampler, "batch_size", None) or batch_size
        self.position = Position(int(config.get("seed", 0)), world_size, rank, batch_size)
        self._finished = False
        self._resuming = False
        self.data: Iterator[Any] | None = None
        self.dataloader = self._make_dataloader()
        if self.iterable and self.data_parallel_world_size > 1:
            logger.debug(
                "Every rank reads the whole IterableDataset: it must skip the samples of other ranks itself."
            )

    # ---- batches -------------------------------------------------------------------------------------------

    def _make_dataloader(self) -> DataLoader[Any]:
        common: dict[str, Any] = {
            "pin_memory": self.pin_memory,
            "num_workers": self.num_local_io_workers,
            "generator": self._generator,
            "collate_fn": self.collate_fn,
        }
        if self.iterable:
            make = stream_position.make_loader if self._workers_have_state else DataLoader
            return make(
                self.dataset, batch_size=self.batch_size, drop_last=self.dataloader_drop_last, **common
            )
        batches: Sampler[Any] = _Remainder(self.data_sampler, self.position)
        if not _yields_batches(self.data_sampler):
            batches = BatchSampler(batches, self.batch_size, self.dataloader_drop_last)
        if self.num_local_io_workers == 0:
            return DataLoader(self.dataset, batch_sampler=batches, **common)
        return DataLoader(
            _SeededDataset(self.dataset), batch_sampler=_SeededBatches(batches, self.position), **common
        )

    @property
    def epoch(self) -> int:
        return self.position.epoch

    def __len__(self) -> int:
        """Return the steps in a full epoch."""
        return len(self.dataloader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass (each pass also advances it); a position to resume from within it
        is kept."""
        if isinstance(self.data_sampler, ResumableSampler):  # such a sampler counts its own passes
            self.position.epoch = epoch
            return
        if self._resuming and epoch == self.position.epoch:
            return
        self._start_epoch(epoch)
        order = _innermost(self.data_sampler)
        if hasattr(order, "set_epoch"):
            order.set_epoch(epoch)

    def _start_epoch(self, epoch: int) -> None:
        self.position.epoch, self.position.samples = epoch, 0
        self._finished = self._resuming = False
        self._sampler_start = self._workers_start = None
        self.data = None

    def __iter__(self) -> DeepSpeedDataLoader:
        if self._finished or (self.position.samples > 0 and not self._resuming):
            if isinstance(self.data_sampler, ResumableSampler):
                self._continue(self.data_sampler)
            else:
                self._start_epoch(self.position.epoch + 1)
        return self

    def _continue(self, sampler: ResumableSampler) -> None:
        """Start another pass where the last one stopped."""
        self._sampler_start = sampler.state_at(self.position.samples)
        self._finished, self.data = False, None

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        if self.tput_timer is not None:
            self.tput_timer.start()
        if self.data is None:
            self.data = self._open()
        try:
            batch = next(self.data)
        except StopIteration:
            self._finished, self._resuming, self.data = True, False, None
            raise
        self._resuming = False
        self.position.samples += self.position.samples_per_step
        if self.post_process_func is not None:
            state = self.sampler_position() or getattr(self.data_sampler, "state_dict", lambda: None)()
            batch = self.post_process_func(batch, state)
        return batch

    def sampler_position(self) -> dict[str, Any] | None:
        """Return the state of a ``ResumableSampler`` sampler after the last batch taken; None for other samplers."""
        sampler = self.data_sampler
        return sampler.state_at(self.position.samples) if isinstance(sampler, ResumableSampler) else None

    def _open(self) -> Iterator[Any]:
        """Return an iterator over this epoch's batches, from the current position."""
        position = self.position
        self._generator.manual_seed(_hash(position.seed, position.epoch))
        done = position.samples // position.samples_per_step  # steps
        if isinstance(self.data_sampler, EpochSampler):
            self.data_sampler.epoch, self.data_sampler.skip = position.epoch, position.samples
        elif self.iterable:
            if self._dataset_has_state and self._sampler_start is not None:
                self.dataset.load_state_dict(self._sampler_start)
                done = 0
            elif self._resume_workers():
                done = 0
        elif isinstance(self.data_sampler, ResumableSampler):
            if self._sampler_start is not None:
                self.data_sampler.load_state_dict(self._sampler_start)
        elif self._sampler_start is None:
            self._sampler_start = _epoch_start(self.data_sampler)
        else:
            _restore_epoch_start(self.data_sampler, self._sampler_start)
        batches = iter(self.dataloader)
        return islice(batches, done, None) if self.iterable and done else batches

    # ---- position ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch: plain numbers, plus the state of the client's sampler or data set."""
        start = self._sampler_start
        if self._dataset_has_state:
            start = self.dataset.state_dict()
        elif isinstance(self.data_sampler, ResumableSampler):
            start = self.sampler_position()
        return {
            "epoch": self.position.epoch,
            "samples": self.position.samples,
            "finished": self._finished,
            "seed": self.position.seed,
            "num_samples": None if self.iterable else len(self.dataset),
            "sampler": start,
            "workers": self._workers_state(),
        }

    @property
    def _dataset_has_state(self) -> bool:
        """Return whether the data set is iterable and has a state; not if it is read in worker processes."""
        return self.iterable and hasattr(self.dataset, "load_state_dict") and self.num_local_io_workers == 0

    @property
    def _workers_have_state(self) -> bool:
        """Return whether worker processes report their positions in an iterable data set."""
        return self.iterable and self.num_local_io_workers > 0 and stream_position.is_available()

    def _workers_state(self) -> dict[str, Any] | None:
        """Return the workers' positions after the last batch taken; None: at the start of an epoch, or unknown."""
        if not self._workers_have_state or self._finished:
            return None
        if self.data is None or self._resuming:
            return self._workers_start
        loader: Any = self.dataloader
        return {"number": self.num_local_io_workers, "positions": loader.state_dict()}

    def _resume_workers(self) -> bool:
        """Resume the workers at their saved positions; return False if there are none or their number changed."""
        start, self._workers_start = self._workers_start, None
        if start is None or not self._workers_have_state:
            return False
        if start["number"] != self.num_local_io_workers:
            logger.warning(
                f"{start['number']} workers read the IterableDataset when its position was saved, now there are "
                f"{self.num_local_io_workers}: skipping batches instead, and samples may come in a different order."
            )
            return False
        loader: Any = self.dataloader
        loader.load_state_dict(start["positions"])
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`. A data set of another size is read from its start, with a warning."""
        num_samples = None if self.iterable else len(self.dataset)
        if num_samples != state["num_samples"]:
            logger.warning(
                f"The data position is not resumed: it belongs to a data set of {state['num_samples']} "
                f"samples, this one has {num_samples}. Starting from the beginning."
            )
            self._start_epoch(state["epoch"])
            return
        self._start_epoch(state["epoch"])
        self.position.samples, self._finished = state["samples"], state["finished"]
        self._resuming = not self._finished
        self._sampler_start, self._workers_start = state["sampler"], state.get("workers")
        self.position.seed = state["seed"]
        self._follow_sampler()
        if isinstance(self.data_sampler, EpochSampler):
            self.data_sampler.seed = state["seed"]

    def _follow_sampler(self) -> None:
        """Adjust the position after a change between sampler types."""
        position, start = self.position, self._sampler_start
        theirs = isinstance(start, dict) and "consumed_samples" in start
        if isinstance(self.data_sampler, ResumableSampler) and not theirs:
            logger.warning(
                "The data position is not resumed: it was saved without a curriculum, which starts now."
            )
            self._sampler_start, position.samples = None, 0
        elif isinstance(self.data_sampler, EpochSampler) and theirs:
            epochs, position.samples = divmod(position.samples, max(1, len(self.dataset)))
            position.epoch, self._sampler_start = position.epoch + epochs, None


def _group_position(world_size: int | None, rank: int | None) -> tuple[int, int]:
    from deepspeed import comm  # a heavy import, not needed if both are given

    ready = (world_size is None or rank is None) and comm.is_initialized()
    return (
        world_size if world_size is not None else comm.get_world_size() if ready else 1,
        rank if rank is not None else comm.get_rank() if ready else 0,
    )


def _hash(*numbers: int) -> int:
    """Return a 63-bit hash of the numbers."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") >> 1


# ---- the client's samplers ---------------------------------------------------------------------------------


def _yields_batches(sampler: Any) -> bool:
    return isinstance(sampler, BatchSampler) or (
        hasattr(sampler, "batch_size") and hasattr(sampler, "drop_last")
    )


def _innermost(sampler: Any) -> Any:
    """Return the sampler that decides the order: a BatchSampler only groups the indices of another."""
    return sampler.sampler if isinstance(sampler, BatchSampler) else sampler


def _epoch_start(sampler: Any) -> dict[str, Any]:
    """Return the state from which the sampler yields the same epoch again."""
    sampler = _innermost(sampler)
    start: dict[str, Any] = {}
    if hasattr(sampler, "state_dict"):
        start["state"] = sampler.state_dict()
    elif isinstance(getattr(sampler, "epoch", None), int):
        start["epoch"] = sampler.epoch
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        start["generator"] = generator.get_state()
    return start


def _restore_epoch_start(sampler: Any, start: dict[str, Any]) -> None:
    sampler = _innermost(sampler)
    if "state" in start:
        sampler.load_state_dict(start["state"])
    if "epoch" in start and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(start["epoch"])
    elif "epoch" in start:
        sampler.epoch = start["epoch"]
    if "generator" in start and isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.set_state(start["generator"])


class _Remainder(Sampler[Any]):
    """Yields the rest of another sampler after the part already taken; an EpochSampler skips that part itself."""

    def __init__(self, sampler: Any, position: Position) -> None:
        self.sampler, self.position = sampler, position

    def __len__(self) -> int:
        return self.sampler.num_batches if isinstance(self.sampler, ResumableSampler) else len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.sampler, (EpochSampler, ResumableSampler)):
            return iter(cast("Sampler[Any]", self.sampler))
        skip = self.position.samples // self.position.world_size
        if _yields_batches(self.sampler):
            skip //= self.position.samples_per_batch
        return islice(iter(self.sampler), skip, None)


# ---- worker processes --------------------------------------------------------------------------------------


class _SeededBatches(Sampler[list[int]]):
    """Batches preceded by a seed that is derived from epoch, position and rank."""

    def __init__(self, batches: Any, position: Position) -> None:
        self.batches, self.position = batches, position

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        position = self.position
        samples = position.samples  # not the shared position: workers read ahead of it
        for batch in self.batches:
            yield [_hash(position.seed, position.epoch, samples, position.rank), *batch]
            samples += position.samples_per_step


class _SeededDataset(Dataset[Any]):
    """Reads batches in a worker process and seeds its random generators for each."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: list[int]) -> list[Any]:
        seed, *indices = batch
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]
