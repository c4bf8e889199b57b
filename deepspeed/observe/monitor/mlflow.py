"""Curves for MLflow."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any

from deepspeed.base.python_gc import call_when_dropped
from deepspeed.observe.monitor.base import MonitorBackend, Point, flat
from deepspeed.observe.monitor.utils import check_mlflow_availability

MAX_PARAMETERS = 100
MAX_POINTS = 1000
"""In a request, which MLflow limits."""

MAX_CHARACTERS = 6000
"""Of the value of a parameter."""

MAX_WAITING = 20 * MAX_POINTS
CLOSE_S = 30.0
"""Seconds for what waits at the end: a server that is down must not keep the process."""


class MlflowMonitor(MonitorBackend):
    """A run of ``experiment`` at ``tracking_uri``, through MLflow's client: a run that the script has active is left
    alone."""

    key = "mlflow"

    def __init__(self, mlflow_config: object) -> None:
        self._client: Any = None
        self._sender: Any = None
        self.run_id: str | None = None
        super().__init__(mlflow_config)

    def _open(self) -> None:
        mlflow: Any = check_mlflow_availability()
        section = self.monitor_config
        self._client = mlflow.MlflowClient(tracking_uri=section.tracking_uri)
        found = self._client.get_experiment_by_name(section.experiment)
        experiment = (
            self._client.create_experiment(section.experiment) if found is None else found.experiment_id
        )
        self.run_id = self._client.create_run(experiment, run_name=section.run_name).info.run_id
        self._sender = _Sender(self._client, self.run_id)
        call_when_dropped(self, self._sender.end)  # it has a thread, which would outlive this

    def _write(self, points: Iterable[Point]) -> None:
        entities: Any = importlib.import_module("mlflow.entities")
        now_ms = int(time.time() * 1000)
        self._sender.put([entities.Metric(name, value, now_ms, samples) for name, value, samples in points])

    def _write_config(self, config: Mapping[str, Any]) -> None:
        entities: Any = importlib.import_module("mlflow.entities")
        rows = [entities.Param(name, str(value)[:MAX_CHARACTERS]) for name, value in flat(config).items()]
        batches = [rows[at : at + MAX_PARAMETERS] for at in range(0, len(rows), MAX_PARAMETERS)]
        if refused := [problem for batch in batches for problem in self._refused(batch)]:
            raise ValueError("; ".join(refused))

    def _refused(self, rows: list[Any]) -> list[str]:
        """Record parameters, and return what is refused of them, with the reasons. Any error of a server that does not
        answer."""
        try:
            self._client.log_batch(self.run_id, params=rows)
        except Exception as error:
            if getattr(error, "error_code", None) == "INTERNAL_ERROR":  # as the client calls it
                raise
            if len(rows) == 1:
                return [f"{rows[0].key}: {error}"]
            return [problem for row in rows for problem in self._refused([row])]
        return []

    def _write_artifact(self, path: str) -> None:
        self._client.log_artifact(self.run_id, path)

    def _close(self) -> None:
        self._sender.close()


class _Sender:
    """Sends points from a thread of its own, and ends the run there.

    A request to a server that is down takes minutes, and must not take them from training. MLflow's own queue
    (``synchronous=False``) has no limit, and is waited for at the end of the process however long that takes.
    """

    def __init__(self, client: Any, run_id: str | None) -> None:
        self._client, self._run_id = client, run_id
        self._waiting: SimpleQueue[Any] = SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="deepspeed mlflow", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def put(self, points: list[Any]) -> None:
        """Have ``points`` sent. Any error of what was sent before; TimeoutError: ``MAX_WAITING`` points wait."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._waiting.qsize() + len(points) > MAX_WAITING:
            raise TimeoutError(f"{self._waiting.qsize()} points wait for an answer of the server")
        for point in points:
            self._waiting.put(point)

    def close(self) -> None:
        """Wait until all is sent. Any error of that; TimeoutError: it takes more than ``CLOSE_S``."""
        atexit.unregister(self.end)
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the server gave no answer for {CLOSE_S:.0f} s, and the last points are lost")
        self.put([])

    def end(self) -> None:
        """Close where nobody is left whom an error would concern."""
        with contextlib.suppress(Exception):
            self.close()

    def _run(self) -> None:
        running = True
        while running:
            taken = [self._waiting.get()]
            while len(taken) < MAX_POINTS and not self._waiting.empty():
                taken.append(self._waiting.get())
            points = [point for point in taken if point is not None]
            running = len(points) == len(taken)
            if points:
                self._try(self._client.log_batch, self._run_id, metrics=points)
        self._try(self._client.set_terminated, self._run_id)

    def _try(self, request: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        try:
            request(*arguments, **named)
        except Exception as error:  # anything a client library raises
            self._failure = error
