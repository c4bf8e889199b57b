"""MLflow's client, replaced by a fake in this file: its calls, their thread, and the cost of a server that hangs or
refuses. The real client is in `test_tracking_servers.py`.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from deepspeed.base.logging import logger
from deepspeed.config.sections.monitor import get_monitor_config
from deepspeed.observe.monitor import mlflow
from deepspeed.observe.monitor.mlflow import MlflowMonitor


class Param(NamedTuple):
    key: str
    value: str


class NoAnswerError(Exception):
    error_code = "INTERNAL_ERROR"


class FakeClient:
    """A server behind it answers while ``up`` is set."""

    def __init__(self, tracking_uri: str | None) -> None:
        self.up = threading.Event()
        self.up.set()
        self.asked = threading.Event()
        self.metrics: list[list[tuple[Any, ...]]] = []
        self.params: list[list[Param]] = []
        self.requests = 0
        self.refused = ""
        self.ended: list[threading.Thread] = []

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment: str, run_name: str | None) -> Any:
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))

    def log_batch(self, run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        self.asked.set()
        self.requests += 1
        if params and not self.up.is_set():
            raise NoAnswerError("no route")
        if metrics:
            assert threading.current_thread() is not threading.main_thread() and self.up.wait(60.0)
            self.metrics.append(list(metrics))
        if self.refused and any(self.refused in row[0] for row in (*metrics, *params)):
            raise ValueError(f"{self.refused} is refused")
        if params:
            self.params.append(list(params))

    def set_terminated(self, run_id: str) -> None:
        self.ended.append(threading.current_thread())


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    module.MlflowClient = FakeClient  # type: ignore[attr-defined]
    entities.Metric = lambda *words: words  # type: ignore[attr-defined]
    entities.Param = Param  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)


@pytest.fixture
def warnings_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(logger, "warning", told.append)
    return told


@pytest.fixture
def monitor() -> Iterator[MlflowMonitor]:
    made = MlflowMonitor(get_monitor_config({"mlflow": {"enabled": True}}).mlflow)
    yield made
    made._client.up.set()
    made.close()


def sent(monitor: MlflowMonitor) -> list[int]:
    """The steps of the points that have arrived."""
    return [point[3] for batch in monitor._client.metrics for point in batch]


def test_training_does_not_wait_for_the_server(monitor: MlflowMonitor, warnings_of: list[str]) -> None:
    client = monitor._client
    client.up.clear()
    monitor.write_events([("loss", 1.0, 0)])
    assert client.asked.wait(10.0)
    for step in range(1, 1500):
        monitor.write_events([("loss", 1.0, step)])
    assert client.metrics == [], "all of that without an answer"
    client.up.set()
    monitor.close()
    assert sent(monitor) == list(range(1500))
    assert [len(batch) for batch in client.metrics] == [1, 1000, 499], "few requests, within MLflow's limit"
    assert len(client.ended) == 1 and client.ended[0] is not threading.main_thread()
    assert warnings_of == []


def test_a_server_that_hangs_costs_one_warning_and_little_memory(
    monitor: MlflowMonitor, warnings_of: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow, "MAX_WAITING", 10)
    monkeypatch.setattr(mlflow, "CLOSE_S", 0.01)
    client = monitor._client
    client.up.clear()
    monitor.write_events([("loss", 1.0, 0)])
    assert client.asked.wait(10.0)
    for step in range(1, 100):
        monitor.write_events([("loss", 1.0, step)])
    monitor.close()
    assert monitor._sender._waiting.qsize() == 11, "ten points and the end"
    (told,) = warnings_of
    assert told.startswith("mlflow: curves are not written (TimeoutError: 10 points are waiting")


def test_what_the_server_refuses_is_one_warning(monitor: MlflowMonitor, warnings_of: list[str]) -> None:
    monitor._client.refused = "loss"
    monitor.write_events([("loss", 1.0, 0)])
    monitor.close()
    assert len(warnings_of) == 1 and "loss is refused" in warnings_of[0]
    assert len(monitor._client.ended) == 1


def test_the_thread_of_a_dropped_monitor_ends_the_run() -> None:
    made = MlflowMonitor(get_monitor_config({"mlflow": {"enabled": True}}).mlflow)
    client, thread = made._client, made._sender._thread
    made.write_events([("loss", 1.0, 8)])
    del made
    thread.join(10.0)
    assert len(client.metrics) == 1 and client.ended == [thread]


def test_only_the_parameters_that_are_refused_are_lost(
    monitor: MlflowMonitor, warnings_of: list[str]
) -> None:
    client = monitor._client
    client.refused = "n7"
    monitor.write_config({"outer": {f"n{at}": at for at in range(100, 250)}, "n7": "x", "long": "y" * 9000})
    recorded = dict(row for batch in client.params for row in batch)
    assert len(recorded) == 151 and recorded["outer.n249"] == "249" and "n7" not in recorded
    assert recorded["long"] == "y" * 6000, "which MLflow takes"
    assert client.requests == 1 + 1 + 52, "one by one in the request that is refused"
    (told,) = warnings_of
    assert told == "mlflow: the config is not recorded in full (ValueError: n7: n7 is refused)"
    monitor.write_events([("loss", 1.0, 8)])
    monitor.close()
    assert sent(monitor) == [8], "the curves go on at once"


def test_a_server_without_an_answer_is_asked_once_for_a_config(
    monitor: MlflowMonitor, warnings_of: list[str]
) -> None:
    monitor._client.up.clear()
    monitor.write_config({f"n{at}": at for at in range(250)})
    assert monitor._client.requests == 1
    assert warnings_of == ["mlflow: the config is not recorded in full (NoAnswerError: no route)"]
