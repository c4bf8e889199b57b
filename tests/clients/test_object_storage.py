"""Checkpoints in a real S3 server (moto's), over s3fs: large files in parts, outages, half an upload."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

moto_server = pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")
serving = pytest.importorskip("werkzeug.serving")

import deepspeed  # noqa: E402
from deepspeed.checkpoint.errors import CheckpointError  # noqa: E402
from deepspeed.checkpoint.remote import mirror as mirrors  # noqa: E402
from deepspeed.checkpoint.remote.store import Store  # noqa: E402

URL = "s3://checkpoints/runs/one"


class Service:
    """An S3 server on a free port, which answers 503 to writes of keys that contain ``refused``."""

    refused = ""

    def __init__(self) -> None:
        self._app = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
        self._server = serving.make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        writes = environ["REQUEST_METHOD"] in ("PUT", "POST")
        if writes and self.refused and self.refused in environ["PATH_INFO"]:
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [
                b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            ]
        return self._app(environ, start_response)

    def stop(self) -> None:
        self._server.shutdown()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    found = Service()
    for name, value in {
        "AWS_ENDPOINT_URL": found.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = s3fs.S3FileSystem()
    if bucket.exists("checkpoints"):  # servers of one process share what they hold
        bucket.rm("checkpoints", recursive=True)
    bucket.makedirs("checkpoints", exist_ok=True)
    yield found
    found.stop()
    deepspeed.comm.destroy_process_group()
    s3fs.S3FileSystem.clear_instance_cache()


def engine_at(staging: Path) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"staging_folder": str(staging), "keep_last": 2},
    }
    return deepspeed.initialize(model=torch.nn.Linear(1024, 1600), config=config)[0]


def train(engine: Any, steps: int) -> float:
    loss = torch.zeros(())
    for step in range(steps):
        loss = engine(torch.full((2, 1024), 0.01 * (step + 1))).square().mean()
        engine.backward(loss)
        engine.step()
    return loss.item()


def test_a_bucket_holds_the_checkpoints_of_a_run(service: Service, tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "here")
    for step in range(3):
        train(engine, 1)
        engine.save_checkpoint(URL, client_state={"step": step})
    expected = train(engine, 2)
    engine.destroy()
    bucket = s3fs.S3FileSystem()
    bucket.invalidate_cache()
    names = [path.removeprefix("checkpoints/runs/one/") for path in bucket.find("checkpoints/runs/one")]
    assert {name.split("/")[0] for name in names} == {
        "global_step2", "global_step3", "latest", "zero_to_fp32.py", "zero_to_torch.py",
    }  # fmt: skip
    assert max(entry["size"] for entry in bucket.find("checkpoints/runs", detail=True).values()) > 10 * 2**20

    elsewhere = engine_at(tmp_path / "there")
    path, state = elsewhere.load_checkpoint(URL)
    assert path is not None and state["step"] == 2
    assert train(elsewhere, 2) == expected
    elsewhere.destroy()


def test_an_outage_loses_nothing(service: Service, tmp_path: Path) -> None:
    """The service refuses the larger part of a checkpoint until the next run."""
    engine = engine_at(tmp_path / "here")
    mirror = engine.checkpoints.mirror(URL)
    mirror.store = Store(URL, attempts=2, first_wait_s=0.01)
    train(engine, 1)
    engine.save_checkpoint(URL)
    mirror.wait()

    service.refused = "optim_states.pt"
    train(engine, 1)
    engine.save_checkpoint(URL)
    expected = train(engine, 2)
    with pytest.raises(
        CheckpointError,
        match="'global_step2' is not in s3://checkpoints/runs/one yet: .*reduce your request rate",
    ):
        engine.destroy()
    other = mirrors.Mirror(URL, str(tmp_path / "there"))
    assert other.fetch() == "global_step1"
    with pytest.raises(
        CheckpointError,
        match="global_step2: its upload is incomplete; complete checkpoints there: global_step1",
    ):
        other.fetch("global_step2")

    service.refused = ""
    restarted = engine_at(tmp_path / "here")
    restarted.load_checkpoint(URL)
    assert restarted.global_steps == 2
    assert train(restarted, 2) == expected
    assert other.fetch() == "global_step2"
    restarted.destroy()
