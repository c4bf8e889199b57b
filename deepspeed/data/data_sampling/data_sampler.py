"""Curriculum sampler: easy samples first, by any number of metrics."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from deepspeed.base.logging import logger
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.data.curriculum_scheduler import CUSTOM, CurriculumScheduler
from deepspeed.data.data_sampling.clusters import MetricIndex, Samples, newly_accepted
from deepspeed.data.data_sampling.shuffling import ShuffledPasses

SCHEDULE_BASED = "schedule_based"
_REMEMBERED = 256
"""Batches whose state is remembered, since workers read ahead of training."""


class DeepSpeedDataSampler:
    """Yields lists of sample numbers, one per micro-batch of this rank.

    Each global batch is one step of the curriculum. Whenever the difficulty of a metric of clustering type
    ``schedule_based`` rises, the newly accepted samples form a cluster. A batch is drawn from all clusters, every
    accepted sample with the same probability; each cluster is read in shuffled passes, every sample once per pass.
    Metrics of type ``single_cluster`` do not restrict samples: their difficulty is in the state, for the client.

    All ranks compute the same batches without communication, and hold no orders or indices in memory.

    Args:
        data_efficiency_config: the section ``data_efficiency`` with its defaults.
        one_epoch_total_samples: samples of the data set.
        micro_batch_size, data_parallel_rank, data_parallel_size, gradient_accumulation_steps: division of a global
            batch.
        data_parallel_group: accepted for the documented signature.
        global_rank: rank 0 writes the cluster files, which are needed with several metrics only.
        drop_last: drop a last micro-batch that is not full on all ranks.

    Raises:
        DeepSpeedConfigError: the section is incomplete, names missing files, or accepts no sample at the start.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any,
        gradient_accumulation_steps: int,
        global_rank: int,
        drop_last: bool = True,
    ) -> None:
        sampling = data_efficiency_config["data_sampling"]
        curriculum = sampling["curriculum_learning"]
        self.data_efficiency_config = data_efficiency_config
        self.one_epoch_total_samples = one_epoch_total_samples
        self.total_samples = one_epoch_total_samples * sampling["num_epochs"]
        self.micro_batch_size = self.batch_size = micro_batch_size
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.global_batch_size = self.micro_batch_times_data_parallel_size * gradient_accumulation_steps
        self.global_rank, self.drop_last = global_rank, drop_last
        self.num_workers = sampling["num_workers"]
        self.seed = data_efficiency_config["seed"]
        if not one_epoch_total_samples:
            raise DeepSpeedConfigError("the data set is empty; a curriculum needs samples")
        self.curriculum_schedulers: dict[str, CurriculumScheduler] = {}
        self.indices: dict[str, MetricIndex] = {}
        self._folder = curriculum.get("data_cluster_path") or "."
        for name, metric in (curriculum.get("curriculum_metrics") or {}).items():
            self.curriculum_schedulers[name] = CurriculumScheduler(metric)
            if metric["clustering_type"] == SCHEDULE_BASED:
                self.indices[name] = self._index(name, metric)
        self.consumed_samples = 0
        self.curriculum_step = 0
        self.current_difficulties: dict[str, int] = {}
        self.batch = np.empty(0, np.int64)
        self.data_clusters: list[tuple[dict[str, int], dict[str, int]]] = []
        """The difficulties before and after each cluster."""
        self.data_cluster_current_position: list[int] = []
        """Samples taken from each cluster, over all passes."""
        self._samples: list[Samples] = []
        self._orders: list[ShuffledPasses] = []
        self._history: deque[tuple[int, np.ndarray, dict[str, Any]]] = deque(maxlen=_REMEMBERED)
        self._remember()

    def _index(self, name: str, metric: Mapping[str, Any]) -> MetricIndex:
        index = MetricIndex(name, metric)
        if len(index.order) > self.one_epoch_total_samples:
            raise DeepSpeedConfigError(
                f"curriculum metric {name!r}: {index.path} lists {len(index.order)} samples, but the data set has "
                f"{self.one_epoch_total_samples}; analyse this data set"
            )
        if len(index.order) < self.one_epoch_total_samples:
            logger.warning(
                f"curriculum metric {name!r}: {index.path} lists {len(index.order)} of the "
                f"{self.one_epoch_total_samples} samples of the data set; the others are never drawn"
            )
        return index

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], int]]
    ) -> None:
        """Set the schedules, step -> difficulty, of metrics whose ``schedule_type`` is custom; the same functions on
        every rank and after a restart. KeyError: no such metric. ValueError: its schedule is not custom."""
        for name, function in schedule_func_dict.items():
            scheduler = self.curriculum_schedulers.get(name)
            if scheduler is None:
                raise KeyError(
                    f"{name!r} is not a curriculum metric: {', '.join(self.curriculum_schedulers)}"
                )
            if scheduler.state["schedule_type"] != CUSTOM:
                raise ValueError(
                    f"curriculum metric {name!r} has schedule_type={scheduler.state['schedule_type']!r}"
                )
            scheduler.set_custom_get_difficulty(function)

    # Batches ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the samples of all passes over the data set, on all ranks."""
        return self.total_samples

    @property
    def num_batches(self) -> int:
        """Micro-batches of one rank in all passes."""
        whole = self.micro_batch_times_data_parallel_size
        return self.total_samples // whole if self.drop_last else -(-self.total_samples // whole)

    def __iter__(self) -> Iterator[list[int]]:
        whole = self.micro_batch_times_data_parallel_size
        while self.consumed_samples < self.total_samples:
            wanted = min(whole, self.total_samples - self.consumed_samples)
            if wanted < whole and self.drop_last:
                return
            while len(self.batch) < wanted:
                self.get_next_global_batch()
            taken, self.batch = self.batch[:wanted], self.batch[wanted:]
            self.consumed_samples += wanted
            start, end = self.get_start_end_idx(None if wanted == whole else wanted)
            yield taken[start:end].tolist()

    def get_start_end_idx(self, batch_len: int | None = None) -> tuple[int, int]:
        """Return [start, end) of this rank in a micro-batch of all ranks; ``batch_len``: its size, if not full."""
        if batch_len is None:
            start = self.data_parallel_rank * self.micro_batch_size
            return start, start + self.micro_batch_size
        bounds = [batch_len * rank // self.data_parallel_size for rank in range(self.data_parallel_size + 1)]
        return bounds[self.data_parallel_rank], bounds[self.data_parallel_rank + 1]

    def get_next_global_batch(self) -> None:
        """Advance the curriculum by one step, and append its global batch to ``batch``."""
        self.curriculum_step += 1
        before = dict(self.current_difficulties)
        self.current_difficulties = {
            name: scheduler.update_difficulty(self.curriculum_step)
            for name, scheduler in self.curriculum_schedulers.items()
        }
        if not self.data_clusters or any(
            self.current_difficulties[name] != before[name] for name in self.indices
        ):
            self.get_new_cluster(before)
        counts = self.sample_from_clusters()
        drawn = [
            self.get_sample_from_cluster(cluster, int(count)) for cluster, count in enumerate(counts) if count
        ]
        batch = np.concatenate(drawn)
        batch = batch[self._source(1).permutation(len(batch))]
        self.batch = np.concatenate((self.batch, batch))
        self._remember(batch)

    def sample_from_clusters(self) -> np.ndarray:
        """Draw the number of samples from each cluster for the next batch."""
        sizes = np.array([len(samples) for samples in self._samples], dtype=np.float64)
        left = self.total_samples - self.consumed_samples - len(self.batch)
        return self._source(0).multinomial(min(self.global_batch_size, left), sizes / sizes.sum())

    def _source(self, purpose: int) -> np.random.Generator:
        """Return this step's random generator for one purpose."""
        key = (self.seed % 2**64 << 64) + (purpose << 56) + self.curriculum_step
        return np.random.Generator(np.random.Philox(key=key))

    def get_sample_from_cluster(self, cidx: int, num_samples: int) -> np.ndarray:
        """Return the next ``num_samples`` sample numbers of a cluster."""
        position = self.data_cluster_current_position[cidx]
        self.data_cluster_current_position[cidx] = position + num_samples
        return self._samples[cidx].numbers(self._orders[cidx].take(position, num_samples))

    # Clusters -----------------------------------------------------------------------------------------------

    def get_new_cluster(self, previous_difficulties: Mapping[str, int]) -> None:
        """Add a cluster of the samples accepted now but not at ``previous_difficulties`` (empty: at the start)."""
        before = {name: previous_difficulties[name] for name in self.indices if name in previous_difficulties}
        now = {name: self.current_difficulties[name] for name in self.indices}
        for _, reached in self.data_clusters:  # a custom schedule may decrease; accepted samples stay
            before = {name: max(value, reached[name]) for name, value in before.items()}
            now = {name: max(value, reached[name]) for name, value in now.items()}
        if self.data_clusters and before == now:
            return
        samples = self._accepted(before, now)
        if not len(samples):
            if not self.data_clusters and not before:
                self._check_not_empty(now)
            return
        self.data_clusters.append((before, now))
        self.data_cluster_current_position.append(0)
        self._add(samples)

    def _add(self, samples: Samples) -> None:
        self._orders.append(ShuffledPasses(len(samples), self.seed, len(self._samples)))
        self._samples.append(samples)

    def _accepted(self, before: Mapping[str, int], now: Mapping[str, int]) -> Samples:
        return newly_accepted(
            list(self.indices.values()),
            before,
            now,
            self.one_epoch_total_samples,
            self._folder,
            self.global_rank == 0,
        )

    def _check_not_empty(self, now: Mapping[str, int]) -> None:
        limits = ", ".join(f"{name} <= {value}" for name, value in now.items())
        raise DeepSpeedConfigError(
            f"no sample is easy enough for the start of the curriculum ({limits}): raise min_difficulty of its metrics"
        )

    # Position -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next batch: a few numbers per cluster, and the rest of the current
        global batch.
        """
        return copy.deepcopy({**self._state(), "batch": self.batch.tolist()})

    def _state(self) -> dict[str, Any]:
        """Return the state without the rest of the batch. One is kept per batch, so immutable cluster entries are
        shared, not copied."""
        return {
            "consumed_samples": self.consumed_samples,
            "curriculum_step": self.curriculum_step,
            "current_difficulties": dict(self.current_difficulties),
            "data_cluster_paths": [samples.path for samples in self._samples],
            "data_cluster_current_position": list(self.data_cluster_current_position),
            "data_clusters": list(self.data_clusters),
            "seed": self.seed,
        }

    def state_at(self, consumed_samples: int) -> dict[str, Any]:
        """Return the state after ``consumed_samples``, which may be in the past, since batches are read ahead.

        LookupError: too far in the past.
        """
        for start, batch, state in reversed(self._history):
            if start < consumed_samples <= start + len(batch) or (
                start == consumed_samples and not len(batch)
            ):
                rest = batch[consumed_samples - start :].tolist()
                return {**copy.deepcopy(state), "batch": rest, "consumed_samples": consumed_samples}
        raise LookupError(f"the position after {consumed_samples} samples is no longer known")

    def _remember(self, batch: np.ndarray | None = None) -> None:
        """Remember the position of ``batch`` in the sample stream, and the state after it."""
        if batch is None:  # the state itself
            self._history.clear()
            self._history.append((self.consumed_samples, np.empty(0, np.int64), self._state()))
            batch = self.batch
        start = self.consumed_samples + len(self.batch) - len(batch)
        if len(batch):
            self._history.append((start, batch, self._state()))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state, on any number of ranks and with any accumulation."""
        self.batch = np.array(state_dict["batch"], dtype=np.int64)
        self.consumed_samples = state_dict["consumed_samples"]
        self.curriculum_step = state_dict["curriculum_step"]
        self.current_difficulties = dict(state_dict["current_difficulties"])
        self.seed = state_dict["seed"]
        for name, difficulty in self.current_difficulties.items():
            if name in self.curriculum_schedulers:
                self.curriculum_schedulers[name].set_current_difficulty(difficulty)
        self.data_clusters = [(dict(before), dict(now)) for before, now in state_dict["data_clusters"]]
        self.data_cluster_current_position = list(state_dict["data_cluster_current_position"])
        self._samples, self._orders = [], []
        for before, now in self.data_clusters:
            self._add(self._accepted(before, now))
        self._remember()
