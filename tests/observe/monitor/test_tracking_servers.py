"""MLflow and Aim through their real clients, if they are installed: curves, config and artifacts are read back.

    pip install mlflow-skinny aim          # 4 and 7 MB, and about 140 MB of dependencies

In a separate process: each client starts threads and changes what the process prints.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUN = """
import torch, deepspeed
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
    "comet": {"enabled": False, "api_key": "k3y"},
    KEY: SECTION,
}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
for _ in range(2):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
open("notes.txt", "w").write("kept")
engine.monitor.write_artifact("notes.txt")
engine.monitor.close()
engine.destroy()
"""


def train(folder: Path, key: str, section: dict[str, object]) -> None:
    """Two steps with one monitor, in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_ALLOW_FILE_STORE": "true"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    code = RUN.replace("KEY", repr(key)).replace("SECTION", repr({"enabled": True, **section}))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "curves are not written" not in done.stdout + done.stderr


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed: it is in no extra")
    uri = (tmp_path / "runs").as_uri()
    train(tmp_path, "mlflow", {"tracking_uri": uri, "experiment": "e", "run_name": "r"})
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_name, run.info.status) == ("r", "FINISHED")
    assert run.data.params["optimizer.params.lr"] == "0.25"
    assert run.data.params["comet.api_key"] == "(hidden)"
    points = client.get_metric_history(run.info.run_id, "Train/Samples/lr")
    assert [(point.step, point.value) for point in points] == [(2, 0.25), (4, 0.25)]
    assert {"Train/Samples/train_loss", "Train/Samples/grad_norm"} <= run.data.metrics.keys()
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["notes.txt"]


def test_aim(tmp_path: Path) -> None:
    aim = pytest.importorskip("aim", reason="aim is not installed: it is in no extra")
    train(tmp_path, "aim", {"repo": ".", "experiment": "e"})
    repo = aim.Repo(str(tmp_path))
    (name,) = repo.list_all_runs()
    indexes = importlib.import_module("aim.sdk.index_manager").RepoIndexManager
    assert indexes.get_index_manager(repo).index(name)  # as `aim up` does before it shows a run
    run = aim.Repo(str(tmp_path)).get_run(name)
    assert run.experiment == "e"
    assert run["hparams"]["optimizer.params.lr"] == 0.25
    assert run["hparams"]["comet.api_key"] == "(hidden)"
    curves = {metric.name: metric.values.values_list() for metric in run.metrics()}
    assert curves["Train/Samples/lr"] == [0.25, 0.25]
    assert {"Train/Samples/train_loss", "Train/Samples/grad_norm"} <= curves.keys()
