"""Reading a data set once to measure its samples, and drawing batches by what was found.

The analysis computes one metric (a length below 1,000, given as a batch of numbers) of every sample in two processes,
and writes and merges the index files. Memory is what its processes have together beyond what this one had before, at
the highest: all of it (Pss of /proc/PID/smaps_rollup), and without the pages of mapped files, which the kernel may take
back at any time. The sampler draws batches from the files: its time is compared with a training step of 50 ms.

    python benchmarks/data_analysis.py --save cpu2
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from report import Report, common_arguments

STEP_MS = 50.0


class OneByOne(torch.utils.data.Dataset[Any]):
    """Sample i is its own length: what is measured is the analysis, not the reading of text."""

    def __init__(self, size: int) -> None:
        self.values = np.random.default_rng(0).integers(1, 1000, size, dtype=np.int16)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> int:
        return int(self.values[index])


class AtOnce(OneByOne):
    """The same, which gives a batch of samples in one call."""

    def __getitems__(self, indices: list[int]) -> np.ndarray:
        return self.values[indices]


def lengths(batch: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(batch, dtype=np.int64))


def same(batch: Any) -> Any:
    return batch


class Peak:
    """The most memory of this process and its children while it is watched, in MiB beyond the start."""

    def __enter__(self) -> Peak:
        self.highest = self.start = _memory_mib()
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._stopped.wait(0.05):
            self.highest = np.maximum(self.highest, _memory_mib())

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._watcher.join()

    @property
    def grown(self) -> list[float]:
        return (self.highest - self.start).tolist()


def _memory_mib() -> np.ndarray:
    """All of it, and without mapped files."""
    children = Path("/proc/self/task").glob("*/children")
    found = ["self", *(number for path in children for number in path.read_text().split())]
    total = np.zeros(2)
    for process in found:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except (OSError, ProcessLookupError):  # it has ended
            continue
        sizes = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
        total += (sizes["Pss:"], sizes.get("Pss_Anon:", sizes["Private_Dirty:"]))
    return total / 1024


def analyse(dataset: OneByOne, threads: int, folder: Path) -> dict[str, float]:
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer

    analyzer = DataAnalyzer(
        dataset,
        batch_size=10_000,
        num_threads=threads,
        num_threads_reduce=threads,
        metric_names=["seqlen"],
        metric_functions=[lengths],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[torch.int64],
        save_path=str(folder),
        collate_fn=same,
    )
    with Peak() as peak:
        begin = time.perf_counter()
        analyzer.run_map()
        middle = time.perf_counter()
        analyzer.run_reduce()
        end = time.perf_counter()
    whole, own = peak.grown
    return {
        "map_s": middle - begin,
        "reduce_s": end - middle,
        "rate": len(dataset) / (end - begin),
        "mib": whole,
        "own_mib": own,
    }


def draw(size: int, folder: Path, batches: int) -> dict[str, float]:
    """Milliseconds that a global batch of 512 takes one of 8 ranks: as it is drawn, and the slowest one."""
    from deepspeed.runtime.data_pipeline.config import get_data_efficiency_config
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

    prefix = f"{folder}/seqlen/seqlen"
    metric = {
        "index_to_sample_path": f"{prefix}_index_to_sample",
        "index_to_metric_path": f"{prefix}_index_to_metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 100,
        "max_difficulty": 1000,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": batches, "difficulty_step": 8},
    }
    curriculum = {"enabled": True, "data_cluster_path": str(folder), "curriculum_metrics": {"seqlen": metric}}
    config = {
        "enabled": True,
        "data_sampling": {"enabled": True, "num_epochs": 5, "curriculum_learning": curriculum},
    }
    section = get_data_efficiency_config({"data_efficiency": config})
    stream = iter(DeepSpeedDataSampler(section, size, 64, 0, 8, None, 1, 1))
    spent = []
    for _ in range(batches):
        begin = time.perf_counter()
        next(stream)
        spent.append(1e3 * (time.perf_counter() - begin))
    return {"median_ms": median(spent), "mean_ms": sum(spent) / batches, "largest_ms": max(spent)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--samples", type=int, default=10_000_000, help="of the data set")
    parser.add_argument("--threads", type=int, default=2, help="processes of the analysis")
    parser.add_argument("--batches", type=int, default=2000, help="drawn by the sampler")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.samples, arguments.batches = 200_000, 200
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("data_analysis", arguments)
    with tempfile.TemporaryDirectory() as name:
        found = {
            "samples one by one": analyse(OneByOne(arguments.samples), arguments.threads, Path(name)),
            "a batch in one call": analyse(AtOnce(arguments.samples), arguments.threads, Path(name)),
        }
        drawn = draw(arguments.samples, Path(name), arguments.batches)
    report.data |= {"analysis": found, "sampler": drawn}
    report.table(
        f"one metric of {arguments.samples:,} samples, {arguments.threads} processes",
        ("", "map s", "reduce s", "samples/s", "MiB", "without files"),
        [
            (
                kind,
                *(f"{row[key]:.3g}" for key in ("map_s", "reduce_s")),
                *(f"{row[key]:,.0f}" for key in ("rate", "mib", "own_mib")),
            )
            for kind, row in found.items()
        ],
    )
    report.table(
        f"{arguments.batches:,} batches of 512 samples, drawn by each of 8 ranks",
        ("", "median ms", "mean ms", "largest ms", f"% of {STEP_MS:.0f} ms"),
        [
            (
                "sampler",
                *(f"{drawn[key]:.3g}" for key in ("median_ms", "mean_ms", "largest_ms")),
                f"{100 * drawn['mean_ms'] / STEP_MS:.2f}",
            )
        ],
    )
    report.save()


if __name__ == "__main__":
    main()
