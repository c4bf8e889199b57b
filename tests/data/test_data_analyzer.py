"""Analysis of a data set: the files against sorting in memory, however the work is divided."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from deepspeed.data.data_sampling import index_files
from deepspeed.data.data_sampling.data_analyzer import (
    DataAnalyzer,
    DistributedDataAnalyzer,
)
from deepspeed.data.data_sampling.indexed_dataset import MMapIndexedDataset
from tests.pool import distributed

SIZE, MAX_TOKENS = 257, 60


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1 + (index * 37) % MAX_TOKENS,), index)


def lengths(batch: list[Tensor]) -> Tensor:
    return torch.tensor([len(each) for each in batch])


def histogram(batch: list[Tensor]) -> Tensor:
    return torch.bincount(lengths(batch), minlength=MAX_TOKENS + 1)


METRICS: dict[str, Any] = {
    "metric_names": ["seqlen", "histogram"],
    "metric_functions": [lengths, histogram],
    "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
    "collate_fn": list,
    "batch_size": 10,
}
DTYPES = [torch.int64, torch.int64]
EXPECTED = np.array([1 + (index * 37) % MAX_TOKENS for index in range(SIZE)])


def rows(folder: Path, name: str) -> list[list[int]]:
    return [entry.tolist() for entry in MMapIndexedDataset(folder / name, skip_warmup=True)]


def check(folder: Path, numbers: np.ndarray | None = None) -> None:
    numbers = np.arange(SIZE) if numbers is None else numbers
    values = sorted(set(EXPECTED.tolist()))
    groups = [numbers[value == EXPECTED].tolist() for value in values]
    assert rows(folder, "seqlen/seqlen_sample_to_metric") == [[value] for value in EXPECTED.tolist()]
    assert rows(folder, "seqlen/seqlen_index_to_metric") == [[value] for value in values]
    assert rows(folder, "seqlen/seqlen_index_to_sample") == groups
    merged = rows(folder, "seqlen/seqlen_index_to_sample_percentile_merged")
    assert sum(merged, []) == sum(groups, []) and len(merged) < 200
    assert rows(folder, "histogram/histogram_metric_value") == [np.bincount(EXPECTED).tolist()]
    assert MMapIndexedDataset(folder / "seqlen/seqlen_index_to_metric").dtype is np.uint8
    kind = np.uint16 if numbers.max() > 255 else np.uint8
    assert MMapIndexedDataset(folder / "seqlen/seqlen_index_to_sample").dtype is kind


@pytest.mark.parametrize(("workers", "threads", "reducers"), [(1, 1, 1), (2, 1, 1), (1, 3, 2)])
def test_files(tmp_path: Path, workers: int, threads: int, reducers: int) -> None:
    parts = [
        DataAnalyzer(
            Sentences(),
            num_workers=workers,
            worker_id=worker,
            num_threads=threads,
            num_threads_reduce=reducers,
            metric_dtypes=DTYPES,
            save_path=str(tmp_path),
            **METRICS,
        )
        for worker in range(workers)
    ]
    for part in parts:
        part.run_map()
    parts[0].run_reduce()
    check(tmp_path)
    assert not list(tmp_path.glob("*/*_thread*.bin"))


def test_memory_is_bounded_by_sorting_some_values_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_files, "_MAX_SORTED", 20)
    DataAnalyzer(Sentences(), metric_dtypes=DTYPES, save_path=str(tmp_path), **METRICS).run_map_reduce()
    check(tmp_path)


def test_joined_entries(tmp_path: Path) -> None:
    """1013 samples of 400 values: four to an entry, as release 0.19 writes them."""

    def values(batch: Tensor) -> Tensor:
        return (batch * 37) % 400

    analyzer = DataAnalyzer(
        list(range(1013)),
        metric_names=["v"],
        metric_functions=[values],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[torch.int64],
        batch_size=100,
        save_path=str(tmp_path),
    )
    analyzer.run_map_reduce()
    merged = rows(tmp_path, "v/v_index_to_sample_percentile_merged")
    single = rows(tmp_path, "v/v_index_to_sample")
    assert merged == [sum(single[first : first + 4], []) for first in range(0, 400, 4)]
    assert rows(tmp_path, "v/v_index_to_sample_percentile_merged")[0] == [
        0, 400, 800, 173, 573, 973, 346, 746, 119, 519, 919,
    ]  # fmt: skip
    found = analyzer.get_metric_value_percentiles("v", {1: 100, 2: 300, 3: 600}, 1000)
    assert (found[10], found[11], found[40], found[41], found[100]) == (1, 2, 2, 3, 3)


def test_numbers_of_a_part_of_a_data_set(tmp_path: Path) -> None:
    numbers = np.arange(SIZE) * 3
    analyzer = DataAnalyzer(
        Sentences(), metric_dtypes=DTYPES, save_path=str(tmp_path), sample_indices=numbers.tolist(), **METRICS
    )
    analyzer.run_map_reduce()
    check(tmp_path, numbers)


def test_what_is_missing_is_named_and_can_be_repeated(tmp_path: Path) -> None:
    def analyzer(**more: Any) -> DataAnalyzer:
        return DataAnalyzer(
            Sentences(), num_threads=2, metric_dtypes=DTYPES, save_path=str(tmp_path), **METRICS, **more
        )

    analyzer().run_map_helper(0)
    with pytest.raises(FileNotFoundError, match=r"worker 0 thread 1.*specific_threads=\[1\]"):
        analyzer().run_reduce()
    analyzer(specific_threads=[1]).run_map()
    analyzer().run_reduce()
    check(tmp_path)


def test_mistakes_are_named(tmp_path: Path) -> None:
    def analyzer(
        function: Any, dtype: Any = torch.int64, kind: str = "single_value_per_sample"
    ) -> DataAnalyzer:
        return DataAnalyzer(
            list(range(10)),
            metric_names=["m"],
            metric_functions=[function],
            metric_types=[kind],
            metric_dtypes=[dtype],
            save_path=str(tmp_path),
            batch_size=5,
        )

    with pytest.raises(ValueError, match="'mean' is neither"):
        analyzer(lambda batch: batch, kind="mean")
    with pytest.raises(TypeError, match="'m' returned int64, but its metric_dtype is torch.int32"):
        analyzer(lambda batch: batch, torch.int32).run_map()
    with pytest.raises(TypeError, match="'m' has the dtype torch.float32: index files hold integers"):
        analyzer(lambda batch: batch.float(), torch.float32).run_map()
    with pytest.raises(ValueError, match="'m' returned 2 values for 10 samples"):
        analyzer(lambda batch: batch.sum().view(1)).run_map_reduce()
    with pytest.raises(RuntimeError, match="run_map.. in every worker"):
        DataAnalyzer(list(range(3)), num_workers=2).run_map_reduce()
    with pytest.raises(ValueError, match="differ in length"):
        DataAnalyzer([], metric_names=["m"])
    assert DataAnalyzer(Sentences(), **METRICS).metric_dtypes == DTYPES


def test_custom_functions_replace_all_steps(tmp_path: Path) -> None:
    seen: list[Any] = []

    def init(thread: int, names: Any, types: Any, dtypes: Any, path: str, worker: int) -> dict[str, int]:
        seen.append(("init", thread, worker))
        return {"sum": 0}

    def update(batch: Tensor, types: Any, dtypes: Any, functions: Any, results: Any, first: int) -> None:
        results["sum"] += int(batch.sum()) + first

    def finalize(types: Any, dtypes: Any, results: Any) -> None:
        seen.append(results["sum"])

    def reduce(
        dataset: Any, names: Any, types: Any, path: str, workers: int, threads: int, reducers: int
    ) -> None:
        seen.append(("reduce", len(dataset), workers, threads, reducers))

    DataAnalyzer(
        list(range(10)),
        batch_size=5,
        custom_map_init=init,
        custom_map_update=update,
        custom_map_finalize=finalize,
        custom_reduce=reduce,
    ).run_map_reduce()
    assert seen == [("init", 0, 0), 50, ("reduce", 10, 1, 1, 1)]


@pytest.mark.parametrize("threads", [1, 2])
def test_one_process_of_the_distributed_analysis(tmp_path: Path, threads: int) -> None:
    DistributedDataAnalyzer(
        Sentences(), num_threads=threads, save_path=str(tmp_path), device="cpu", **METRICS
    ).run_map_reduce()
    check(tmp_path)


def test_sums_of_the_distributed_analysis_are_wider_than_their_terms(tmp_path: Path) -> None:
    DistributedDataAnalyzer(
        list(range(300)),
        batch_size=100,
        metric_names=["count"],
        metric_functions=[lambda batch: torch.tensor([len(batch)], dtype=torch.uint8)],
        metric_types=["accumulate_value_over_samples"],
        save_path=str(tmp_path),
        device="cpu",
    ).run_map_reduce()
    assert rows(tmp_path, "count/count_metric_value") == [[300]]


@distributed(world_size=3)
def test_ranks_of_the_distributed_analysis(tmp_path: Path) -> None:
    analyzer = DistributedDataAnalyzer(Sentences(), save_path=str(tmp_path), device="cpu", **METRICS)
    analyzer.run_map_reduce()
    check(tmp_path)


@distributed(world_size=2)
def test_steps_of_the_distributed_analysis(tmp_path: Path) -> None:
    analyzer = DistributedDataAnalyzer(Sentences(), save_path=str(tmp_path), device="cpu", **METRICS)
    queues: list[queue.Queue[Any]] = [queue.Queue() for _ in METRICS["metric_names"]]
    found = analyzer.run_map_helper(0, queues)
    assert all(each.get_nowait() == (0, metric) for each, metric in zip(queues, found, strict=True))
    rank = dist.get_rank()
    analyzer.file_write_ordered([torch.full((rank + 1,), rank)], str(tmp_path / "rows"), np.uint8)
    dist.barrier()
    rows = MMapIndexedDataset(str(tmp_path / "rows"), skip_warmup=True)
    assert [row.tolist() for row in rows[:]] == [[0], [1, 1]]
