"""Analysis over the ranks of a process group: values are exchanged instead of written to files, and rank 0 writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from deepspeed import comm as dist
from deepspeed.data.data_sampling.index_files import (
    ACCUMULATED,
    SINGLE,
    batches_of,
    checked_values,
    merge_entries,
)
from deepspeed.data.data_sampling.utils import (
    close_mmap_dataset_builder,
    create_mmap_dataset_builder,
    find_fit_int_dtype,
    split_dataset,
)


class DistributedDataAnalyzer:
    """Computes metrics of a data set on all ranks of ``comm_group`` and writes the same index files as `DataAnalyzer`.

    Arguments as there, but ``num_workers`` and ``worker_id`` are taken from the process group if there is one,
    ``num_threads`` threads of this process split its share, and values are exchanged on ``device`` ('cuda' without a
    GPU: the CPU). Each rank keeps its share in memory, 16 bytes per sample; only rank 0 needs ``save_path``.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: str = "cuda",
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if len({len(metric_names), len(metric_functions), len(metric_types)}) > 1:
            raise ValueError("metric_names, metric_functions and metric_types differ in length")
        unknown = [kind for kind in metric_types if kind not in (SINGLE, ACCUMULATED)]
        if unknown:
            raise ValueError(f"metric type {unknown[0]!r} is neither {SINGLE} nor {ACCUMULATED}")
        self.dataset = dataset
        self.comm_group = comm_group
        self.num_workers, self.worker_id = num_workers, worker_id
        if dist.is_initialized():
            self.num_workers, self.worker_id = dist.get_world_size(comm_group), dist.get_rank(comm_group)
        elif num_workers > 1:
            raise RuntimeError(
                "DistributedDataAnalyzer exchanges values in a process group: call deepspeed.init_distributed() first"
            )
        self.num_threads, self.batch_size = num_threads, batch_size
        self.metric_names, self.metric_functions = list(metric_names), list(metric_functions)
        self.metric_types = list(metric_types)
        self.save_path = save_path
        self.collate_fn = collate_fn if collate_fn is not None else default_collate
        available = torch.cuda.is_available() or not str(device).startswith("cuda")
        self.device = torch.device(device if available else "cpu")
        self.sample_indices = sample_indices

    def run_map_helper(
        self, thread_id: int = 0, metric_queues: Sequence[Any] | None = None
    ) -> list[np.ndarray | None]:
        """Return the metrics of one thread's part: values, or an int64 sum (None: no samples). Each is also put in the
        queue of its metric, as (thread_id, metric)."""
        _, parts = split_dataset(self.dataset, self.num_workers, self.worker_id, self.num_threads)
        found: list[list[np.ndarray]] = [[] for _ in self.metric_names]
        for _, batch in batches_of(self.dataset, *parts[thread_id], self.batch_size, self.collate_fn):
            for index, function in enumerate(self.metric_functions):
                values = checked_values(function(batch), None, self.metric_names[index])
                if self.metric_types[index] == SINGLE:
                    found[index].append(values.reshape(-1))
                elif found[index]:
                    found[index][0] += values
                else:
                    found[index].append(values.astype(np.int64))
        metrics = [np.concatenate(each) if each else None for each in found]
        for queue, metric in zip(metric_queues or [], metrics, strict=bool(metric_queues)):
            queue.put((thread_id, metric))
        return metrics

    def run_map_reduce(self) -> None:
        """Compute and write everything. Collective."""
        with ThreadPoolExecutor(self.num_threads) as pool:
            parts = list(pool.map(self.run_map_helper, range(self.num_threads)))
        for index, (name, kind) in enumerate(zip(self.metric_names, self.metric_types, strict=True)):
            own: list[np.ndarray] = [each for part in parts if (each := part[index]) is not None]
            folder = Path(self.save_path) / name
            if self.worker_id == 0:
                folder.mkdir(parents=True, exist_ok=True)
            if kind == SINGLE:
                self._write_values(name, folder, [torch.from_numpy(each.astype(np.int64)) for each in own])
            else:
                self._write_sum(name, folder, own)
        if dist.is_initialized():
            dist.barrier(group=self.comm_group)

    def _write_sum(self, name: str, folder: Path, own: list[np.ndarray]) -> None:
        mine: Any = sum(own) if own else None
        sums = [mine] * self.num_workers
        if dist.is_initialized():
            dist.all_gather_object(sums, mine, group=self.comm_group)
        total: Any = sum(each for each in sums if each is not None)
        dtype = find_fit_int_dtype(int(np.min(total)), int(np.max(total)))
        entries = [torch.as_tensor(total).reshape(-1)] if self.worker_id == 0 else []
        flat = torch.cat([torch.empty(0, dtype=torch.int64), *entries])
        sizes = torch.tensor([len(entry) for entry in entries], dtype=torch.int64)
        self._write_rows(str(folder / f"{name}_metric_value"), dtype, flat, sizes)

    def _write_values(self, name: str, folder: Path, own: list[Tensor]) -> None:
        values = torch.cat(own) if own else torch.empty(0, dtype=torch.int64)
        lowest, highest = Dist.min_max(values.to(self.device), self.comm_group)
        value_dtype = find_fit_int_dtype(lowest, highest)
        first, last = split_dataset(self.dataset, self.num_workers, self.worker_id, 1)[0][self.worker_id]
        if len(values) != last - first:
            raise ValueError(f"metric {name!r} has {len(values)} values for {last - first} samples")
        numbers = torch.arange(first, last)
        if self.sample_indices is not None:
            numbers = torch.as_tensor(self.sample_indices)[first:last]
        self._write_rows(str(folder / f"{name}_sample_to_metric"), value_dtype, values, None)
        pairs = torch.stack((values, numbers), dim=1).to(self.device)
        pairs = Dist.sample_sort(pairs, self.comm_group, self.num_workers).cpu()
        present, sizes = torch.unique_consecutive(pairs[:, 0], return_counts=True)
        last_number = Dist.min_max(numbers.to(self.device), self.comm_group)[1]
        sample_dtype = find_fit_int_dtype(0, last_number)
        rows = str(folder / f"{name}_index_to_sample")
        self._write_rows(str(folder / f"{name}_index_to_metric"), value_dtype, present, None)
        self._write_rows(rows, sample_dtype, pairs[:, 1].contiguous(), sizes)
        if self.worker_id == 0:
            merge_entries(rows, f"{rows}_percentile_merged", sample_dtype)

    def file_write_ordered(self, tensor_list: Sequence[Tensor], fname: str, numpy_dtype: Any) -> None:
        """Write the tensors of all ranks as entries of ``fname`` in rank order. Collective."""
        sizes = torch.tensor([tensor.numel() for tensor in tensor_list], dtype=torch.int64)
        flat = torch.cat(
            [torch.empty(0, dtype=torch.int64), *(each.reshape(-1).cpu() for each in tensor_list)]
        )
        self._write_rows(fname, numpy_dtype, flat, sizes)

    def _write_rows(self, fname: str, dtype: Any, flat: Tensor, sizes: Tensor | None) -> None:
        """Write ``flat`` [n] int64 of all ranks as entries of ``sizes``; None: entries of one element. Collective."""
        counts = sizes if sizes is not None else torch.ones(0, dtype=torch.int64)
        builder = create_mmap_dataset_builder(fname, dtype) if self.worker_id == 0 else None
        lengths = in_rank_order(counts.to(self.device), self.comm_group)
        rows = in_rank_order(flat.to(self.device), self.comm_group)
        # in lockstep, so that rank 0 holds one rank's data at a time
        for of_one, entries in zip(lengths, rows, strict=True):
            if builder is not None:
                ones = np.ones(len(entries), np.int32)
                builder.add_flat(entries.cpu().numpy(), of_one.cpu().numpy() if sizes is not None else ones)
        if builder is not None:
            close_mmap_dataset_builder(builder, fname)


def in_rank_order(tensor: Tensor, group: Any) -> Iterator[Tensor]:
    """Yield the tensors of all ranks in rank order on the first rank of ``group``; on other ranks the items are
    meaningless. Every rank must iterate to the end."""
    if not dist.is_initialized():
        yield tensor
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    for source in range(size):
        if source == 0:
            yield tensor
            continue
        sender = dist.get_global_rank(group, source) if group is not None else source
        if rank == source:
            dist.send(torch.tensor([tensor.shape[0]], device=tensor.device), first, group=group)
            if tensor.shape[0]:
                dist.send(tensor.contiguous(), first, group=group)
        elif rank == 0:
            count = torch.empty(1, dtype=torch.int64, device=tensor.device)
            dist.recv(count, sender, group=group)
            received = tensor.new_empty((int(count), *tensor.shape[1:]))
            if len(received):
                dist.recv(received, sender, group=group)
            yield received
            continue
        yield tensor[:0]


class Dist:
    """Collectives over tensors whose lengths differ between ranks."""

    @staticmethod
    def min_max(tensor: Tensor, comm_group: Any) -> tuple[int, int]:
        """Return the minimum and maximum over all ranks. ValueError: no rank has elements."""
        limits = torch.iinfo(torch.int64)
        ends = [limits.max, limits.max]
        if tensor.numel():
            ends = [int(tensor.min()), -int(tensor.max())]
        found = torch.tensor(ends, dtype=torch.int64, device=tensor.device)
        if dist.is_initialized():
            dist.all_reduce(found, op=dist.ReduceOp.MIN, group=comm_group)
        if int(found[0]) == limits.max:
            raise ValueError("no rank has any values: the data set is empty")
        return int(found[0]), -int(found[1])

    @staticmethod
    def sample_sort(tensor: Tensor, comm_group: Any, num_workers: int, n_samples: int = 100) -> Tensor:
        """Sort the rows [n, columns] of all ranks by their columns: each rank gets an interval of the first column,
        in rank order (sample sort, Frazer and McKellar 1970). Rows of equal first column are on one rank."""
        tensor = _sorted_rows(tensor)
        if num_workers == 1 or not dist.is_initialized():
            return tensor
        picks = torch.linspace(
            0, max(len(tensor) - 1, 0), min(n_samples, len(tensor)), dtype=torch.float64
        ).long()
        everyones: list[Any] = [None] * num_workers
        dist.all_gather_object(everyones, tensor[picks, 0].tolist(), group=comm_group)
        candidates = sorted(value for each in everyones for value in each)
        splits = [candidates[len(candidates) * part // num_workers] for part in range(1, num_workers)]
        bounds = torch.searchsorted(tensor[:, 0].contiguous(), torch.tensor(splits, device=tensor.device))
        ends = [0, *bounds.tolist(), len(tensor)]
        sizes = [end - start for start, end in zip(ends[:-1], ends[1:], strict=True)]
        theirs: list[Any] = [None] * num_workers
        dist.all_gather_object(theirs, sizes, group=comm_group)
        coming = [each[dist.get_rank(comm_group)] for each in theirs]
        received = tensor.new_empty((sum(coming), tensor.shape[1]))
        dist.all_to_all_single(received, tensor.contiguous(), coming, sizes, group=comm_group)
        return _sorted_rows(received)


def _sorted_rows(tensor: Tensor) -> Tensor:
    """Sort rows by the first column, then the second, and so on."""
    for column in reversed(range(tensor.shape[1])):
        tensor = tensor[torch.sort(tensor[:, column], stable=True).indices]
    return tensor
