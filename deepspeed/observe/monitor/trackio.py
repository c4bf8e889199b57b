"""Curves for Trackio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.observe.monitor.base import MonitorBackend, Point, by_samples, flat
from deepspeed.observe.monitor.utils import check_trackio_availability


class TrackioMonitor(MonitorBackend):
    """A run of ``project`` that ``trackio.init`` starts, with the samples processed so far as the step of each row."""

    key = "trackio"
    _trackio: Any = None
    _run: Any = None

    @property
    def project(self) -> str:
        return self.monitor_config.project

    def log(self, data: Mapping[str, Any], step: int | None = None) -> None:
        """Call ``trackio.log`` on rank 0."""
        if self._may_write():
            self._try(lambda: self._trackio.log(dict(data), step=step))

    def _open(self) -> None:
        trackio: Any = check_trackio_availability()
        self._run = trackio.init(project=self.project)
        self._trackio = trackio

    def _write(self, points: Iterable[Point]) -> None:
        for samples, row in by_samples(points).items():
            self._trackio.log(row, step=samples)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(flat(config))

    def _close(self) -> None:
        self._trackio.finish()
