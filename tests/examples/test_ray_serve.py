"""examples/clusters/ray/serve.py: real Ray Serve with two replicas, one of which is killed under load."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from typing import Any

import pytest

from tests.pool import ROOT

ray = pytest.importorskip("ray", reason="Ray is not installed")
serve = pytest.importorskip("ray.serve", reason='Ray Serve is not installed: pip install "ray[serve]"')

TOKENS = 200


def parrot() -> Any:
    """A server without a model, in a replica; it tells its process. 2 s for an answer."""
    from deepspeed.inference.serving.app import ServerSettings, make_app
    from deepspeed.inference.serving.models import Models
    from deepspeed.inference.serving.service import Service
    from deepspeed.tools.serve_loading import LoadedServer
    from tests.inference.standin import Parrot, served

    service = Service(Parrot(delay=0.01), max_requests=64)
    models = Models([served(service, name=f"parrot-{os.getpid()}")])
    return LoadedServer(models.services, make_app(models, ServerSettings()))


def asked(port: int, path: str, body: Any = None) -> tuple[int, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    content = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, content)
    answer = connection.getresponse()
    return answer.status, answer


def streamed(port: int) -> str:
    """One answer: "whole"; "broken" where the connection ended within it, "cut" where nothing says so; "refused"."""
    try:
        status, answer = asked(port, "/v1/completions", {"prompt": "a", "max_tokens": TOKENS, "stream": True})
    except (OSError, http.client.HTTPException):
        return "refused"
    if status != 200:
        return "refused" if status in (500, 502, 503) else str(status)
    try:
        text = answer.read().decode()
    except (OSError, http.client.HTTPException):
        return "broken"
    if not text:
        return "refused"
    return "whole" if text.endswith("data: [DONE]\n\n") and text.count("data: ") > 1 else "cut"


@pytest.mark.slow
def test_a_replica_is_killed_under_load() -> None:
    path = ROOT / "examples" / "clusters" / "ray" / "serve.py"
    spec = importlib.util.spec_from_file_location("deployment", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(module.deployment_of(parrot, replicas=(2, 2), ongoing=16, drain=5.0))
        seen: Counter[str] = Counter()
        for _ in range(100):  # both replicas answer
            _, answer = asked(port, "/v1/models")
            seen[json.loads(answer.read())["data"][0]["id"]] += 1
            if len(seen) == 2:
                break
        assert len(seen) == 2
        victim = int(next(iter(seen)).removeprefix("parrot-"))
        found: list[tuple[str, str]] = []
        ends = time.monotonic() + 12

        def client() -> None:
            while time.monotonic() < ends:
                first = streamed(port)
                found.append((first, streamed(port) if first == "refused" else ""))

        clients = [threading.Thread(target=client) for _ in range(8)]
        for each in clients:
            each.start()
        time.sleep(3)
        os.kill(victim, signal.SIGKILL)
        for each in clients:
            each.join(120)
        outcomes = Counter(first for first, _ in found)
        assert outcomes["whole"] >= 16 and outcomes["broken"] >= 1, outcomes
        assert outcomes.keys() <= {"whole", "broken", "refused"}, outcomes  # nothing is cut silently
        assert all(second in ("", "whole") for _, second in found), found
        for _ in range(300):  # another one has taken its place
            _, answer = asked(port, "/v1/models")
            name = json.loads(answer.read())["data"][0]["id"]
            if name not in seen:
                break
            time.sleep(0.2)
        assert name not in seen
    finally:
        serve.shutdown()
        ray.shutdown()
