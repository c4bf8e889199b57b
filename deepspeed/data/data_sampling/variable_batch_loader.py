"""Loader of batches by token count, and their loss weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from torch.utils.data import Dataset

from deepspeed.data.data_sampling.token_batches import WEIGHTINGS, TokenBatches
from deepspeed.data.loader import DeepSpeedDataLoader, EpochSampler

PadSample = Callable[[Any, int], Any]


class Packs(Dataset[list[Any]]):
    """Data set whose item p is the samples of pack p, padded to the longest in its batch if ``pad`` is given."""

    def __init__(self, dataset: Any, packs: TokenBatches, pad: PadSample | None) -> None:
        self.dataset, self.packs, self.longest, self.pad = dataset, packs, packs.longest, pad

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> list[Any]:
        batch, numbers = self.packs[index]
        whole = getattr(self.dataset, "__getitems__", None)
        samples = whole(numbers) if whole is not None else [self.dataset[number] for number in numbers]
        if self.pad is None:
            return list(samples)
        return [self.pad(sample, self.longest[batch]) for sample in samples]


def _collate_packs(collate: Callable[[list[Any]], Any] | None, packs: list[list[Any]]) -> Any:
    """Collate the samples of several packs as one micro-batch."""
    samples = list(chain.from_iterable(packs))
    return collate(samples) if collate is not None else samples


class VariableBatchLoader(DeepSpeedDataLoader):
    """Yields this rank's micro-batches of ``packs_per_step`` packs.

    Packs are read in order without shuffling, and the position is the number of packs taken by all ranks; everything
    else is as with fixed batches, so a run resumes at any micro-batch, also on another number of ranks with the same
    packs per batch.

    Args:
        dataset, packs, pad: as in `Packs`.
        packs_per_step: packs per rank and micro-batch.
        world_size, rank: data-parallel ranks.
        weighting: of the packs in the loss of their batch, one of ``WEIGHTINGS``; "none": all micro-batches of a batch
            count equally.
    """

    def __init__(
        self,
        dataset: Any,
        packs: TokenBatches,
        *,
        packs_per_step: int,
        world_size: int,
        rank: int,
        weighting: str,
        pad: PadSample | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int,
        pin_memory: bool,
        tput_timer: Any = None,
    ) -> None:
        if weighting not in WEIGHTINGS:
            raise ValueError(f"loss_weighting={weighting!r} is not one of {', '.join(WEIGHTINGS)}")
        super().__init__(
            dataset=Packs(dataset, packs, pad),
            batch_size=packs_per_step,
            pin_memory=pin_memory,
            local_rank=0,
            tput_timer=tput_timer,
            collate_fn=partial(_collate_packs, collate_fn),
            num_local_io_workers=num_workers,
            data_sampler=EpochSampler(len(packs), world_size, rank, shuffle=False),
            data_parallel_world_size=world_size,
            data_parallel_rank=rank,
        )
        self.per_batch, self.batch_sizes = packs.per_batch, packs.batch_sizes
        self.units = None if weighting == "none" else packs.units(weighting)
        self.loss_weight = 1.0
        """Loss weight of the last yielded micro-batch."""
        self.to_train: deque[float] | None = None
        """Loss weights of the yielded but untrained micro-batches, None unless ``keep_weights`` was called."""

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of one batch, on all ranks."""
        return self.per_batch // self.batch_size

    def keep_weights(self) -> None:
        """Start queueing loss weights in ``to_train``, for a consumer that trains the micro-batches in order."""
        self.to_train = deque()

    def __iter__(self) -> VariableBatchLoader:
        if not self._finished and not self._resuming:  # an abandoned pass
            self.forget_weights()
        super().__iter__()
        return self

    def __next__(self) -> Any:
        first = self.position.samples
        batch = super().__next__()
        self.loss_weight = self._weight(first)
        if self.to_train is not None:
            self.to_train.append(self.loss_weight)
        return batch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.forget_weights()

    def forget_weights(self) -> None:
        """Drop the loss weights of micro-batches that will not be trained."""
        if self.to_train is not None:
            self.to_train.clear()

    def _weight(self, first: int) -> float:
        """Return the factor of the mean loss of this rank's micro-batch at pack ``first`` that makes the mean over
        the batch's micro-batches equal the mean over all units."""
        if self.units is None:
            return 1.0
        start = first - first % self.per_batch
        ranks, rank = self.position.world_size, self.position.rank
        own = self.units[first + rank : first + ranks * self.batch_size : ranks].sum()
        total = self.units[start : start + self.per_batch].sum()
        return float(own * self.micro_batches / total) if total else 1.0
