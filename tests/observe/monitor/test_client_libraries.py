"""A run with all monitors at once through the real client libraries, offline; their files are read back.

In a separate process: each library starts threads and changes what the process prints.
"""

from __future__ import annotations

import csv
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

RUN = """
import torch, deepspeed
from deepspeed.observe.monitor.monitor import MonitorMaster
from deepspeed.config.deepspeed_config import DeepSpeedConfig
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
    "fp16": {"enabled": True, "loss_scale": 8},
    "tensorboard": {"enabled": True, "output_path": "curves", "job_name": "tb"},
    "csv_monitor": {"enabled": True, "output_path": "curves", "job_name": "csv"},
    "wandb": {"enabled": True, "project": "p", "group": "g", "team": "t"},
    "comet": {"enabled": True, "project": "p", "online": False, "samples_log_interval": 8, "experiment_name": "e"},
}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
losses = [[], [], []]
for step in losses:
    for _ in range(2):
        loss = engine(torch.ones(2, 4)).square().mean()
        step.append(loss.item())
        engine.backward(loss)
        engine.step()
mine = MonitorMaster(DeepSpeedConfig(config).monitor_config)
mine.write_events([("mine", 7.0, engine.global_samples)])
mine.tb_monitor.close()
engine.monitor.tb_monitor.close()
print("LOSSES", [sum(step) / 2 for step in losses])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of a run of 3 steps, and its losses."""
    for package in ("tensorboard", "wandb", "comet_ml"):
        pytest.importorskip(package, reason="the monitor extra is not installed")
    folder = tmp_path_factory.mktemp("run")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "WANDB_MODE": "offline",
        "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = next(line for line in done.stdout.splitlines() if "LOSSES" in line)
    return folder, json.loads(told.split("LOSSES")[1])


def curves_of(losses: list[float]) -> dict[str, list[tuple[int, float]]]:
    """Expected contents of every monitor: x is in samples, 4 per step."""
    return {
        "Train/Samples/train_loss": [(4 * step, loss) for step, loss in enumerate(losses, 1)],
        "Train/Samples/lr": [(4 * step, 0.25) for step in (1, 2, 3)],
        "Train/Samples/loss_scale": [(4 * step, 8.0) for step in (1, 2, 3)],
        "mine": [(12, 7.0)],
    }


MEASURED = {"grad_norm": [4, 8, 12], "memory_gib": [4, 8, 12], "samples_per_second": [8, 12]}
"""Where each curve that differs from run to run has points; the inputs are no tokens."""


def same(
    found: dict[str, list[tuple[int, float]]],
    wanted: dict[str, list[tuple[int, float]]],
    measured: dict[str, list[int]] = MEASURED,
) -> None:
    assert found.keys() == wanted.keys() | {f"Train/Samples/{name}" for name in measured}
    for name, points in measured.items():
        assert [x for x, _ in found[f"Train/Samples/{name}"]] == points, name
        assert all(y > 0 for _, y in found[f"Train/Samples/{name}"]), name
    for name, points in wanted.items():
        assert [x for x, _ in found[name]] == [x for x, _ in points], name
        assert [y for _, y in found[name]] == pytest.approx([y for _, y in points], rel=2e-3), name  # fp16


def test_the_config_is_beside_the_curves(run: tuple[Path, list[float]]) -> None:
    """As a file, a text and parameters; Comet's and W&B's are read in their records."""
    folder, _ = run
    written = json.loads((folder / "curves/csv/config.json").read_text())
    assert written["optimizer"] == {"type": "AdamW", "params": {"lr": 0.25}}
    files = sorted((folder / "curves/tb").iterdir())
    texts = [
        each.Tensors("config/text_summary") for each in map(_read_events, files) if each.Tags()["tensors"]
    ]
    assert b'"lr": 0.25' in texts[0][0].tensor_proto.string_val[0]
    (file,) = (folder / "comet").glob("*.zip")
    with zipfile.ZipFile(file) as archive:
        lines = archive.read("messages.json").decode().splitlines()
    assert any("optimizer.params.lr" in line and "0.25" in line for line in lines)
    (log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert any(b'"lr": 0.25' in data or b'"lr":0.25' in data for data in log_records(log.read_bytes()))


def _read_events(file: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(file)).Reload()


def test_tensorboard(run: tuple[Path, list[float]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, losses = run
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted((folder / "curves" / "tb").iterdir()):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend((event.step, event.value) for event in events.Scalars(name))
    same(found, curves_of(losses))


def test_csv(run: tuple[Path, list[float]]) -> None:
    folder, losses = run
    found = {}
    for file in (folder / "curves" / "csv").glob("*.csv"):
        with open(file, newline="") as text:
            header, *rows = csv.reader(text)
        assert header == ["step", file.stem.removeprefix("Train_Samples_")]
        name = file.stem.replace("Train_Samples_", "Train/Samples/")
        found[name] = [(int(samples), float(value)) for samples, value in rows]
    same(found, curves_of(losses))


def test_wandb(run: tuple[Path, list[float]]) -> None:
    from wandb.proto import wandb_internal_pb2

    folder, losses = run
    # The second monitor has shared the run of the first.
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[str, list[tuple[int, float]]] = {}
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            assert (record.run.project, record.run.run_group, record.run.entity) == ("p", "g", "t")
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                found.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    same(found, curves_of(losses))


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format behind a file header of 7 bytes: blocks of 32 KiB with chunks of (crc32,
    length, kind), kinds 1 whole, 2 first, 3 middle, 4 last."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if (room := 2**15 - at % 2**15) < 7:  # padding at the end of a block
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_comet(run: tuple[Path, list[float]]) -> None:
    folder, losses = run
    wanted = curves_of(losses)
    found: dict[str, list[tuple[int, float]]] = {}
    names = []
    for file in (folder / "comet").glob("*.zip"):
        with zipfile.ZipFile(file) as archive:
            lines = archive.read("messages.json").decode().splitlines()
        for message in map(json.loads, lines):
            payload = message["payload"]
            if message["type"] == "metric_msg":
                metric = payload["metric"]
                if metric["metricName"].startswith(("Train/", "mine")):  # not measurements of the machine
                    point = (metric["step"], float(metric["metricValue"]))
                    found.setdefault(metric["metricName"], []).append(point)
            elif message["type"] == "log_other" and payload["key"] == "Name":
                names.append(payload["value"])
    sparser = {name: [point for point in points if point[0] != 8] for name, points in wanted.items()}
    same(found, sparser, {"grad_norm": [4, 12], "memory_gib": [4, 12], "samples_per_second": [8]})
    assert set(names) == {"e"}
