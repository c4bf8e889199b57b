"""Curves for Comet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.observe.monitor.base import MonitorBackend, Point, by_samples, flat
from deepspeed.observe.monitor.utils import check_comet_availability


class CometMonitor(MonitorBackend):
    """An experiment that ``comet_ml.start`` creates or resumes. Sends one point of each curve per
    ``samples_log_interval`` samples."""

    key = "comet"

    def __init__(self, comet_config: Any) -> None:
        self._experiment: Any = None
        super().__init__(comet_config)
        self._scheduler = EventsLogScheduler(self.samples_log_interval)

    @property
    def experiment(self) -> Any:
        """The ``comet_ml`` experiment; None on ranks other than 0."""
        return self._experiment

    @property
    def samples_log_interval(self) -> int:
        return self.monitor_config.samples_log_interval

    def _open(self) -> None:
        check_comet_availability()
        import comet_ml

        section = self.monitor_config
        passed = {"api_key", "project", "workspace", "experiment_key", "mode", "online"}
        self._experiment = comet_ml.start(**section.model_dump(include=passed))
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)

    def _write(self, points: Iterable[Point]) -> None:
        due = [point for point in points if self._scheduler.needs_logging(point[0], point[2])]
        for samples, row in by_samples(due).items():
            self._experiment.log_metrics(row, step=samples)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        self._experiment.log_parameters(flat(config))

    def _write_artifact(self, path: str) -> None:
        self._experiment.log_asset(path)

    def _close(self) -> None:
        self._experiment.end()


class EventsLogScheduler:
    """Passes one point of each curve every ``samples_log_interval`` samples, starting with the first."""

    def __init__(self, samples_log_interval: int) -> None:
        self.samples_log_interval = samples_log_interval
        self._last: dict[str, int] = {}

    def needs_logging(self, name: str, current_sample: int) -> bool:
        last = self._last.get(name)
        if last is not None and 0 <= current_sample - last < self.samples_log_interval:
            return False
        self._last[name] = current_sample
        return True
