"""One monitor that fans out to all backends of a config."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.base.logging import is_rank_zero
from deepspeed.config.redaction import without_secrets
from deepspeed.observe.monitor.base import Event, Monitor, MonitorBackend

__all__ = ["Event", "Monitor", "MonitorMaster"]


class MonitorMaster(Monitor):
    """Writes each event to every monitor that the config enables, on rank 0.

    Args:
        monitor_config: ``DeepSpeedConfig(...).monitor_config``.
    """

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.enabled: bool = monitor_config.enabled
        self.backends: list[MonitorBackend] = []
        """The enabled backends; empty on ranks other than 0."""
        self.tb_monitor = self._make("tensorboard", "tensorboard:TensorBoardMonitor")
        self.wandb_monitor = self._make("wandb", "wandb:WandbMonitor")
        self.csv_monitor = self._make("csv_monitor", "csv_monitor:csvMonitor")
        self.comet_monitor = self._make("comet", "comet:CometMonitor")
        self.trackio_monitor = self._make("trackio", "trackio:TrackioMonitor")
        self.mlflow_monitor = self._make("mlflow", "mlflow:MlflowMonitor")
        self.aim_monitor = self._make("aim", "aim:AimMonitor")
        self._listeners: list[Monitor] = []

    def _make(self, key: str, path: str) -> Any:
        """Build the backend of a section. ``path``: "module:class" in this folder, imported if the section is
        enabled."""
        section = getattr(self.monitor_config, key)
        # None on other ranks: scripts test for a backend before they use its client's writer, which only rank 0 has.
        if not section.enabled or not is_rank_zero():
            return None
        module, name = path.split(":")
        made = getattr(importlib.import_module(f"deepspeed.observe.monitor.{module}"), name)(section)
        self.backends.append(made)
        return made

    def also_to(self, listener: Monitor) -> None:
        """Forward every further event to ``listener``, too."""
        self._listeners.append(listener)
        self.enabled = True

    def write_events(self, event_list: Iterable[Event]) -> None:
        events = list(event_list)
        for monitor in (*self.backends, *self._listeners):
            monitor.write_events(events)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Record the config and hyperparameters of the run, without secrets, in all backends that support it."""
        shown = without_secrets(config)
        for backend in self.backends:
            backend.write_config(shown)

    def write_artifact(self, path: str) -> None:
        """Record the file at ``path`` in all backends that support files."""
        for backend in self.backends:
            backend.write_artifact(path)

    def close(self) -> None:
        for backend in self.backends:
            backend.close()
