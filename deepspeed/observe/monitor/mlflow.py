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
"""Limits of MLflow per request."""

MAX_CHARACTERS = 6000
"""Limit on the length of a parameter's value."""

MAX_WAITING = 20 * MAX_POINTS
CLOSE_S = 30.0
"""Seconds for pending points at the end: a dead server must not keep the process alive."""


class MlflowMonitor(MonitorBackend):
    """A run of ``experiment`` at ``tracking_uri``, through MLflow's client API: the script's own active run is not
    affected."""

    key = "mlflow"
    run_id: str | None = None
    _client: Any = None
    _sender: Any = None

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
        call_when_dropped(self, self._sender.end)  # its thread would outlive this object

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
        """Record parameters; return the refused ones with the reasons. Raises the error if the server does not
        answer."""
        try:
            self._client.log_batch(self.run_id, params=rows)
        except Exception as error:
            if getattr(error, "error_code", None) == "INTERNAL_ERROR":  # the client's code for a dead server
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
    """Sends points, and terminates the run, in a separate thread.

    A request to a dead server takes minutes, which must not block training. MLflow's own queue (``synchronous=False``)
    is unbounded, and the process waits for it at exit however long that takes.
    """

    def __init__(self, client: Any, run_id: str | None) -> None:
        self._client, self._run_id = client, run_id
        self._waiting: SimpleQueue[Any] = SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="deepspeed mlflow", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def put(self, points: list[Any]) -> None:
        """Queue ``points``. Raises any error of earlier requests; TimeoutError: ``MAX_WAITING`` points are pending."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._waiting.qsize() + len(points) > MAX_WAITING:
            raise TimeoutError(f"{self._waiting.qsize()} points are waiting for the server")
        for point in points:
            self._waiting.put(point)

    def close(self) -> None:
        """Wait until all points are sent. Raises any error of a request; TimeoutError: it takes more than
        ``CLOSE_S``."""
        atexit.unregister(self.end)
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"no answer from the server for {CLOSE_S:.0f} s; the last points are lost")
        self.put([])

    def end(self) -> None:
        """Close and ignore errors, at exit or after the monitor was dropped."""
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
