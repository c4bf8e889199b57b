"""Samples that a curriculum accepts by difficulty, read from memory-mapped index files."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.data.data_sampling.indexed_dataset import MMapIndexedDataset

_CHUNK = 1 << 20
_WAIT_S = 600.0

Difficulties = Mapping[str, int]


class MetricIndex:
    """The samples of a data set, sorted by one metric.

    Raises:
        DeepSpeedConfigError: a file of the config is missing.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self.by_percentile = config["difficulty_type"] == "percentile"
        self.path = str(config["index_to_sample_path"])
        self._samples = _opened(name, "index_to_sample_path", self.path)
        self._values = None
        if not self.by_percentile:
            values = _opened(name, "index_to_metric_path", str(config["index_to_metric_path"]))
            if len(values) != len(self._samples):
                raise DeepSpeedConfigError(
                    f"curriculum metric {name!r}: {config['index_to_metric_path']} has {len(values)} entries, but "
                    f"{self.path} has {len(self._samples)}. With difficulty_type='value', index_to_sample_path is the "
                    "file without '_percentile_merged'"
                )
            self._values = values.flat
        self.order = self._samples.flat
        """Numbers of all samples, easiest first (memory-mapped)."""
        self._ends = np.cumsum(self._samples.sizes, dtype=np.int64) if self._values is not None else None

    def accepted(self, difficulty: int) -> int:
        """Count the samples up to this value or percentile; they are the first in ``order``."""
        if self._values is None:
            return len(self.order) * min(max(int(difficulty), 0), 100) // 100
        assert self._ends is not None
        entries = int(np.searchsorted(self._values, difficulty, side="right"))
        return int(self._ends[entries - 1]) if entries else 0


def _opened(name: str, key: str, path: str) -> MMapIndexedDataset:
    if not MMapIndexedDataset.exists(path):
        raise DeepSpeedConfigError(
            f"curriculum metric {name!r}: {key}={path!r} is not an index file ({path}.idx and {path}.bin, "
            "as DataAnalyzer writes them)"
        )
    return MMapIndexedDataset(path, skip_warmup=True)


class AllSamples:
    """All samples."""

    path = ""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def numbers(self, places: np.ndarray) -> np.ndarray:
        return places


class ClusterPart:
    """Consecutive entries of a file of numbers."""

    def __init__(self, order: np.ndarray, path: str, start: int, end: int) -> None:
        self._order = order.view(np.ndarray)  # indexing a memmap is slow
        self.path, self._start, self._end = path, start, end

    def __len__(self) -> int:
        return self._end - self._start

    def numbers(self, places: np.ndarray) -> np.ndarray:
        return self._order[places + self._start].astype(np.int64)


Samples = AllSamples | ClusterPart


def newly_accepted(
    metrics: Sequence[MetricIndex],
    before: Difficulties,
    now: Difficulties,
    count: int,
    folder: str,
    writer: bool,
) -> Samples:
    """Return the samples, out of ``count``, that all metrics accept at ``now`` but not at ``before`` (empty: at the
    start).

    With one metric this is an interval of its index file. With several it is a file in ``folder``, which one rank
    writes and the others wait for; its name is a hash of its inputs. RuntimeError: timeout.
    """
    if not metrics:
        return AllSamples(count if not before else 0)
    reached = {each.name: each.accepted(now[each.name]) for each in metrics}
    left = {each.name: each.accepted(before[each.name]) if before else 0 for each in metrics}
    if len(metrics) == 1:
        (metric,) = metrics
        start, end = left[metric.name], reached[metric.name]
        return ClusterPart(metric.order, metric.path, start, max(start, end))
    described = repr([(each.name, len(each.order), left[each.name], reached[each.name]) for each in metrics])
    origin = repr([_origin(each.path) for each in metrics])
    tag = hashlib.blake2b((described + origin).encode(), digest_size=8).hexdigest()
    path = Path(folder) / f"cluster_{tag}.samples"
    if not path.exists():
        if writer:
            _write_common(path, metrics, left, reached, count)
        else:
            _wait_for(path)
    order = np.memmap(path, np.int64, mode="r") if path.stat().st_size else np.empty(0, np.int64)
    return ClusterPart(order, str(path), 0, len(order))


def _origin(path: str) -> tuple[str, int]:
    """Return an identity of an index file: a hash of its beginning, and its size in bytes."""
    with open(f"{path}.bin", "rb") as stream:
        begin = stream.read(1 << 16)
    return hashlib.blake2b(begin, digest_size=8).hexdigest(), os.path.getsize(f"{path}.bin")


def _write_common(
    path: Path, metrics: Sequence[MetricIndex], left: Difficulties, reached: Difficulties, count: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    votes = path.with_suffix(".votes")
    try:
        now = np.memmap(votes, np.uint8, mode="w+", shape=(2, max(count, 1)))
        for metric in metrics:
            for row, limits in enumerate((reached, left)):
                for numbers in _chunks(metric.order, limits[metric.name]):
                    now[row, numbers] += 1
        unfinished = path.with_suffix(".part")
        with open(unfinished, "wb") as stream:
            for start in range(0, count, _CHUNK):
                accepted = now[:, start : start + _CHUNK] == len(metrics)
                (np.flatnonzero(accepted[0] & ~accepted[1]).astype(np.int64) + start).tofile(stream)
        del now
        os.replace(unfinished, path)
    finally:
        votes.unlink(missing_ok=True)


def _chunks(order: np.ndarray, end: int) -> Iterable[np.ndarray]:
    for start in range(0, end, _CHUNK):
        yield np.asarray(order[start : min(start + _CHUNK, end)]).astype(np.int64)


def _wait_for(path: Path) -> None:
    until = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > until:
            raise RuntimeError(
                f"rank 0 has not written {path} for {_WAIT_S:.0f} s: data_cluster_path must be a folder "
                "shared by all ranks"
            )
        time.sleep(0.05)
