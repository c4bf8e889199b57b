"""Offline analysis of a data set: metrics per sample, and index files from values to samples.

Map: each thread of each worker computes the metrics of its share and writes them below
``save_path/METRIC/workerW_threadT``. Reduce: one process merges the shares into

- ``METRIC_sample_to_metric``: the value of each sample, in the order of the data set;
- ``METRIC_index_to_metric``, ``METRIC_index_to_sample``: the values in ascending order, and the samples of each;
- ``METRIC_index_to_sample_percentile_merged``: the same samples in about 100 entries, which are read faster;
- ``METRIC_metric_value``: the value of a metric summed over all samples.

Each is a pair of files for `MMapIndexedDataset`. Memory does not grow with the data set: values are read from the
map's files, and sorted one range of values at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from deepspeed import comm as dist
from deepspeed.base.logging import logger
from deepspeed.data.data_sampling.distributed_analyzer import Dist, DistributedDataAnalyzer
from deepspeed.data.data_sampling.index_files import (
    ACCUMULATED,
    PERCENTILES,
    SINGLE,
    Counts,
    batches_of,
    checked_values,
    joined,
    merge_entries,
    merged,
    numpy_dtype,
    write_groups,
)
from deepspeed.data.data_sampling.indexed_dataset import MMapIndexedDataset
from deepspeed.data.data_sampling.utils import (
    close_mmap_dataset_builder,
    create_mmap_dataset_builder,
    find_fit_int_dtype,
    split_dataset,
    split_index,
)

__all__ = ["DataAnalyzer", "Dist", "DistributedDataAnalyzer"]

_CHUNK = 1 << 20
_LOG_EVERY_S = 10.0


class DataAnalyzer:
    """Computes metrics of a data set once, before training.

    Args:
        dataset: map-style.
        num_workers, worker_id: number of processes (on hosts that share ``save_path``) that split the data set, and
            the index of this one.
        num_threads: parts of a worker's share, computed in parallel in separate processes.
        num_threads_reduce: the same for the reduction.
        specific_threads: compute only these parts, to repeat failed ones; empty: all.
        batch_size: samples per call of a metric.
        metric_names, metric_functions, metric_types, metric_dtypes: one of each per metric. A function takes a batch
            and returns integers of the dtype (a torch dtype): one per sample for the type
            ``single_value_per_sample``, an array of any length, which is summed over batches, for
            ``accumulate_value_over_samples``.
        collate_fn: samples to batch; None: torch's.
        custom_map_init, custom_map_update, custom_map_finalize: replace the methods ``init_metric_results``,
            ``update_metric_results`` and ``finalize_metric_results``, with the same arguments.
        custom_reduce: replaces ``merge_map_results``, with the same arguments.
        sample_indices: number of each sample in the files; None: its index in ``dataset``.

    Raises:
        ValueError: the lists of metrics differ in length, or a type is unknown.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., Any] | None = None,
        custom_map_finalize: Callable[..., Any] | None = None,
        custom_reduce: Callable[..., Any] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        metric_dtypes = metric_dtypes or [torch.int64] * len(metric_names)
        lengths = {len(metric_names), len(metric_functions), len(metric_types), len(metric_dtypes)}
        if custom_map_init is None and len(lengths) > 1:
            raise ValueError(
                "metric_names, metric_functions, metric_types and metric_dtypes differ in length"
            )
        unknown = [kind for kind in metric_types if kind not in (SINGLE, ACCUMULATED)]
        if unknown and custom_map_update is None:
            raise ValueError(f"metric type {unknown[0]!r} is neither {SINGLE} nor {ACCUMULATED}")
        self.dataset = dataset
        self.num_workers, self.worker_id = num_workers, worker_id
        self.num_threads, self.num_threads_reduce = num_threads, num_threads_reduce
        self.specific_threads = list(specific_threads)
        self.batch_size = batch_size
        self.metric_names, self.metric_functions = list(metric_names), list(metric_functions)
        self.metric_types, self.metric_dtypes = list(metric_types), list(metric_dtypes)
        self.save_path = save_path
        self.collate_fn = collate_fn if collate_fn is not None else default_collate
        self.custom_map_init, self.custom_map_update = custom_map_init, custom_map_update
        self.custom_map_finalize, self.custom_reduce = custom_map_finalize, custom_reduce
        self.sample_indices = sample_indices

    # Map ----------------------------------------------------------------------------------------------------

    def run_map(self) -> None:
        """Compute this worker's share. RuntimeError: names the part that failed."""
        if self.num_threads <= 1:
            self.run_map_helper(0)
        else:
            threads = self.specific_threads or range(self.num_threads)
            _in_processes(self.run_map_helper, [(thread,) for thread in threads], "map, thread")

    def run_map_helper(self, thread_id: int) -> None:
        """Compute one part of this worker's share."""
        _, parts = split_dataset(self.dataset, self.num_workers, self.worker_id, self.num_threads)
        first, last = parts[thread_id]
        init = self.custom_map_init or self.init_metric_results
        update = self.custom_map_update or self.update_metric_results
        finalize = self.custom_map_finalize or self.finalize_metric_results
        results = init(
            thread_id,
            self.metric_names,
            self.metric_types,
            self.metric_dtypes,
            self.save_path,
            self.worker_id,
        )
        progress = _AnalysisProgress(f"worker {self.worker_id} thread {thread_id}", last - first)
        for start, batch in batches_of(self.dataset, first, last, self.batch_size, self.collate_fn):
            update(batch, self.metric_types, self.metric_dtypes, self.metric_functions, results, start)
            progress.at(start - first)
        finalize(self.metric_types, self.metric_dtypes, results)
        progress.end()

    def init_metric_results(
        self,
        thread_id: int,
        metric_names: Sequence[str],
        metric_types: Sequence[str],
        metric_dtypes: Sequence[Any],
        save_path: str,
        worker_id: int,
    ) -> list[dict[str, Any]]:
        """Open the accumulator of each metric: a file of values, or a sum."""
        results: list[dict[str, Any]] = []
        for name, kind, dtype in zip(metric_names, metric_types, metric_dtypes, strict=True):
            fname = _part_file(str(Path(save_path) / name), name, kind, worker_id, thread_id)
            Path(fname).parent.mkdir(parents=True, exist_ok=True)
            for old in (f"{fname}.idx", f"{fname}.bin"):
                Path(old).unlink(missing_ok=True)  # the index marks a finished part
            builder = create_mmap_dataset_builder(fname, numpy_dtype(dtype, name)) if kind == SINGLE else None
            results.append({"metric_name": name, "fname": fname, "builder": builder, "metric_value": None})
        return results

    def update_metric_results(
        self,
        data: Any,
        metric_types: Sequence[str],
        metric_dtypes: Sequence[Any],
        metric_functions: Sequence[Callable[[Any], Any]],
        metric_results: list[dict[str, Any]],
        batch_start_idx: int = 0,
    ) -> None:
        """Add the metrics of one batch. TypeError: a function returned another dtype than declared."""
        for kind, dtype, function, result in zip(
            metric_types, metric_dtypes, metric_functions, metric_results, strict=True
        ):
            values = checked_values(function(data), dtype, result["metric_name"])
            if kind == SINGLE:
                result["builder"].add_flat(values.reshape(-1), np.ones(values.size, np.int32))
            elif result["metric_value"] is None:
                result["metric_value"] = values.copy()
            else:
                result["metric_value"] += values

    def finalize_metric_results(
        self, metric_types: Sequence[str], metric_dtypes: Sequence[Any], metric_results: list[dict[str, Any]]
    ) -> None:
        """Write the files of a part; the index marks it as complete."""
        for kind, dtype, result in zip(metric_types, metric_dtypes, metric_results, strict=True):
            builder = result["builder"]
            if kind == ACCUMULATED:
                builder = create_mmap_dataset_builder(
                    result["fname"], numpy_dtype(dtype, result["metric_name"])
                )
                if result["metric_value"] is not None:
                    builder.add_item_numpy(result["metric_value"].reshape(-1))
            close_mmap_dataset_builder(builder, result["fname"])

    # Reduce -------------------------------------------------------------------------------------------------

    def run_reduce(self) -> None:
        """Merge the results of all workers. FileNotFoundError: names the missing part."""
        reduce = self.custom_reduce or self.merge_map_results
        reduce(
            self.dataset,
            self.metric_names,
            self.metric_types,
            self.save_path,
            self.num_workers,
            self.num_threads,
            self.num_threads_reduce,
        )

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Map, wait for all workers (ranks of ``comm_group``), and let worker 0 reduce.

        RuntimeError: there are several workers but no process group.
        """
        if self.num_workers > 1 and not dist.is_initialized():
            raise RuntimeError(
                f"run_map_reduce() with num_workers={self.num_workers} waits for the other workers in a process group: "
                "call deepspeed.init_distributed(), or run_map() in every worker and run_reduce() afterwards"
            )
        self.run_map()
        if self.num_workers > 1:
            dist.barrier(group=comm_group)
        if self.worker_id == 0:
            self.run_reduce()
        if self.num_workers > 1:
            dist.barrier(group=comm_group)

    def merge_map_results(
        self,
        dataset: Any,
        metric_names: Sequence[str],
        metric_types: Sequence[str],
        save_path: str,
        num_workers: int,
        num_threads: int,
        num_threads_reduce: int,
    ) -> None:
        """Write the index files of every metric."""
        for name, kind in zip(metric_names, metric_types, strict=True):
            folder = str(Path(save_path) / name)
            _require_parts(folder, name, kind, num_workers, num_threads)
            if kind == ACCUMULATED:
                _sum_parts(folder, name, num_workers, num_threads)
            else:
                self._merge_values(folder, name, len(dataset), num_workers, num_threads, num_threads_reduce)

    def _merge_values(
        self, folder: str, name: str, samples: int, num_workers: int, num_threads: int, reducers: int
    ) -> None:
        counted: dict[int, Counts] = {}
        for thread in range(reducers):
            self.merge_gather_map_stats(num_workers, num_threads, reducers, thread, folder, name, counted)
        values, numbers = joined(list(counted.values()))
        if numbers.sum() != samples:
            raise ValueError(f"metric {name!r} returned {numbers.sum()} values for {samples} samples")
        if not samples:
            raise ValueError(f"metric {name!r} has no values: the data set is empty")
        value_dtype = find_fit_int_dtype(int(values[0]), int(values[-1]))
        last = samples - 1 if self.sample_indices is None else int(max(self.sample_indices))
        sample_dtype = find_fit_int_dtype(0, last)
        self.get_metric_value_percentiles(name, (values, numbers), samples)
        parts = _parts(num_workers, num_threads)
        shares = [parts[a:b] for a, b in split_index(0, len(parts), reducers)]
        _in_processes(
            self.merge_sample_to_metric,
            [(thread, folder, name, value_dtype, share) for thread, share in enumerate(shares)],
            "reduce, thread",
        )
        merged(f"{folder}/{name}_sample_to_metric", value_dtype, reducers)
        bounds = split_index(0, len(values), reducers)
        _in_processes(
            self.merge_metric_to_sample,
            [
                (
                    thread,
                    folder,
                    name,
                    sample_dtype,
                    value_dtype,
                    values[a:b],
                    num_workers,
                    num_threads,
                    numbers[a:b],
                )
                for thread, (a, b) in enumerate(bounds)
            ],
            "reduce, thread",
        )
        fname = f"{folder}/{name}_index_to_sample"
        merged(fname, sample_dtype, reducers)
        merged(f"{folder}/{name}_index_to_metric", value_dtype, reducers)
        self.output_index_to_sample_percentile(
            fname, f"{folder}/{name}_index_to_metric", name, folder, samples, sample_dtype
        )

    def merge_gather_map_stats(
        self,
        num_workers: int,
        num_threads: int,
        num_threads_reduce: int,
        t_idx_reduce: int,
        metric_save_path: str,
        metric_name: str,
        return_dict: dict[int, Counts],
    ) -> None:
        """Count the samples of each value in one share of the parts: ``return_dict[t_idx_reduce]`` becomes (values,
        numbers of samples), ascending."""
        parts = _parts(num_workers, num_threads)
        first, last = split_index(0, len(parts), num_threads_reduce)[t_idx_reduce]
        counts = joined([])
        for _, values in _values_of(metric_save_path, metric_name, parts[first:last]):
            counts = joined([counts, np.unique(values, return_counts=True)])
        return_dict[t_idx_reduce] = counts

    def merge_sample_to_metric(
        self,
        t_idx_reduce: int,
        metric_save_path: str,
        metric_name: str,
        metric_value_dtype: Any,
        map_worker_thread: Sequence[tuple[int, int]],
    ) -> None:
        """Join the values of some parts, given as (worker, thread), into ``..._sample_to_metric_threadT``."""
        fname = f"{metric_save_path}/{metric_name}_sample_to_metric_thread{t_idx_reduce}"
        builder = create_mmap_dataset_builder(fname, metric_value_dtype)
        for _, values in _values_of(metric_save_path, metric_name, map_worker_thread):
            builder.add_flat(values, np.ones(len(values), np.int32))
        close_mmap_dataset_builder(builder, fname)

    def merge_metric_to_sample(
        self,
        t_idx_reduce: int,
        metric_save_path: str,
        metric_name: str,
        sample_idx_dtype: Any,
        metric_value_dtype: Any,
        unique_metric_values: np.ndarray | Sequence[int],
        num_workers: int,
        num_threads: int,
        counts: np.ndarray | None = None,
    ) -> None:
        """Write the samples of some values to ``..._index_to_sample_threadT`` and ``..._index_to_metric_threadT``.

        ``unique_metric_values``: ascending; ``counts``: the number of samples of each, which bounds the memory.
        """
        numbers = np.asarray(self.sample_indices) if self.sample_indices is not None else None
        write_groups(
            f"{metric_save_path}/{metric_name}_index_to_sample_thread{t_idx_reduce}",
            f"{metric_save_path}/{metric_name}_index_to_metric_thread{t_idx_reduce}",
            np.asarray(unique_metric_values),
            counts,
            lambda: _values_of(metric_save_path, metric_name, _parts(num_workers, num_threads)),
            sample_idx_dtype,
            metric_value_dtype,
            numbers,
        )

    def get_metric_value_percentiles(
        self, metric_name: str, num_sample_per_value: dict[int, int] | Counts, total_num_samples: int
    ) -> dict[int, int]:
        """Log and return the value at each percentile (100: the largest)."""
        if isinstance(num_sample_per_value, dict):
            present = sorted(num_sample_per_value)
            counts = np.array(present), np.array([num_sample_per_value[value] for value in present])
        else:
            counts = num_sample_per_value
        values, numbers = counts
        shares = np.arange(1, PERCENTILES + 1)
        places = np.searchsorted(np.cumsum(numbers), -(-shares * total_num_samples // PERCENTILES))
        found = {
            int(share): int(values[place])
            for share, place in zip(shares, places, strict=True)
            if place < len(values)
        }
        shown = ", ".join(
            f"{share}%: {found[share]}" for share in (1, 5, 25, 50, 75, 95, 100) if share in found
        )
        logger.info(f"metric {metric_name}: {len(values)} values of {total_num_samples} samples; {shown}")
        return found

    @staticmethod
    def output_index_to_sample_percentile(
        index_to_sample_fname: str,
        index_to_metric_fname: str,
        metric_name: str,
        metric_save_path: str,
        total_num_samples: int,
        sample_idx_dtype: Any,
    ) -> None:
        """Write ``..._index_to_sample_percentile_merged``: entries merged into about 100."""
        target = f"{metric_save_path}/{metric_name}_index_to_sample_percentile_merged"
        merge_entries(index_to_sample_fname, target, sample_idx_dtype)


# Parts of the map ------------------------------------------------------------------------------------------


def _parts(num_workers: int, num_threads: int) -> list[tuple[int, int]]:
    return [(worker, thread) for worker in range(num_workers) for thread in range(num_threads)]


def _part_file(folder: str, name: str, kind: str, worker: int, thread: int) -> str:
    suffix = "sample_to_metric" if kind == SINGLE else "metric_value"
    return f"{folder}/worker{worker}_thread{thread}/{name}_{suffix}"


def _require_parts(folder: str, name: str, kind: str, num_workers: int, num_threads: int) -> None:
    for worker, thread in _parts(num_workers, num_threads):
        fname = _part_file(folder, name, kind, worker, thread)
        if not MMapIndexedDataset.exists(fname):
            raise FileNotFoundError(
                f"worker {worker} thread {thread} has not finished metric {name!r}: {fname}.idx is missing. "
                f"Rerun it with DataAnalyzer(..., worker_id={worker}, specific_threads=[{thread}]).run_map()"
            )


def _values_of(folder: str, name: str, parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the values of these parts in chunks, each with the index of its first value."""
    place = 0
    for worker, thread in parts:
        values = MMapIndexedDataset(_part_file(folder, name, SINGLE, worker, thread), skip_warmup=True).flat
        for start in range(0, len(values), _CHUNK):
            yield place + start, np.asarray(values[start : start + _CHUNK])
        place += len(values)


def _sum_parts(folder: str, name: str, num_workers: int, num_threads: int) -> None:
    total: np.ndarray | None = None
    for worker, thread in _parts(num_workers, num_threads):
        part = MMapIndexedDataset(_part_file(folder, name, ACCUMULATED, worker, thread), skip_warmup=True)
        if len(part):
            total = part[0].astype(np.int64) if total is None else total + part[0]
    if total is None:
        raise ValueError(f"metric {name!r} has no value: the data set is empty")
    fname = f"{folder}/{name}_metric_value"
    builder = create_mmap_dataset_builder(fname, find_fit_int_dtype(int(total.min()), int(total.max())))
    builder.add_item_numpy(total)
    close_mmap_dataset_builder(builder, fname)


# Processes -------------------------------------------------------------------------------------------------


def _in_processes(work: Callable[..., Any], calls: Sequence[tuple[Any, ...]], what: str) -> None:
    """Run all calls, in separate processes if there are several. RuntimeError: one failed."""
    if len(calls) == 1:
        work(*calls[0])
        return
    fork = multiprocessing.get_context("fork")  # functions of a script need not be importable
    processes = [fork.Process(target=_run_worker, args=(work, call)) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [call[0] for call, process in zip(calls, processes, strict=True) if process.exitcode]
    if failed:
        raise RuntimeError(f"{what} {failed[0]} failed; its traceback is above")


def _run_worker(work: Callable[..., Any], call: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # the threads of the parent do not exist here
    work(*call)


class _AnalysisProgress:
    """Logs progress periodically while a part is computed."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.start = self.logged_at = time.monotonic()

    def at(self, done: int) -> None:
        now = time.monotonic()
        if done and now - self.logged_at >= _LOG_EVERY_S:
            self.logged_at = now
            rate = done / (now - self.start)
            left = (self.total - done) / rate
            logger.info(
                f"{self.what}: {done} of {self.total} samples ({100 * done / self.total:.0f} %), {rate:,.0f}/s, "
                f"{left:.0f} s left"
            )

    def end(self) -> None:
        seconds = time.monotonic() - self.start
        logger.info(f"{self.what}: {self.total} samples in {seconds:.1f} s (process {os.getpid()})")
