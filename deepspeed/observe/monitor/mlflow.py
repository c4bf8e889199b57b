"""Curves for MLflow."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.observe.monitor.base import MonitorBackend, Point, flat
from deepspeed.observe.monitor.utils import check_mlflow_availability

MAX_PARAMETERS = 100
"""In a request, which MLflow limits."""


class MlflowMonitor(MonitorBackend):
    """A run of ``experiment`` at ``tracking_uri``, through MLflow's client: a run that the script has active is left
    alone."""

    key = "mlflow"

    def __init__(self, mlflow_config: object) -> None:
        self._client: Any = None
        self.run_id: str | None = None
        super().__init__(mlflow_config)

    def _open(self) -> None:
        check_mlflow_availability()
        mlflow: Any = importlib.import_module("mlflow")
        section = self.monitor_config
        self._client = mlflow.MlflowClient(tracking_uri=section.tracking_uri)
        found = self._client.get_experiment_by_name(section.experiment)
        experiment = (
            self._client.create_experiment(section.experiment) if found is None else found.experiment_id
        )
        self.run_id = self._client.create_run(experiment, run_name=section.run_name).info.run_id

    def _write(self, points: Iterable[Point]) -> None:
        entities: Any = importlib.import_module("mlflow.entities")
        now_ms = int(time.time() * 1000)
        rows = [entities.Metric(name, value, now_ms, samples) for name, value, samples in points]
        self._client.log_batch(self.run_id, metrics=rows)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        entities: Any = importlib.import_module("mlflow.entities")
        rows = [entities.Param(name, str(value)) for name, value in flat(config).items()]
        for at in range(0, len(rows), MAX_PARAMETERS):
            self._client.log_batch(self.run_id, params=rows[at : at + MAX_PARAMETERS])

    def _write_artifact(self, path: str) -> None:
        self._client.log_artifact(self.run_id, path)

    def _close(self) -> None:
        self._client.set_terminated(self.run_id)
