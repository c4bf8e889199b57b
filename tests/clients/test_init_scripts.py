"""The scripts that `ds init` writes for client libraries train, and go on from what they saved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from deepspeed.tools.starter.command import main  # noqa: E402
from tests import forked  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(folder: Path, *words: str) -> str:
    environment: dict[str, Any] = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = forked.run([str(folder / "train.py"), *words], env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("client", "goal"), [("transformers", "finetune"), ("accelerate", "finetune"), ("transformers", "lora")]
)
def test_what_it_writes_trains_and_resumes(tmp_path: Path, model: Path, client: str, goal: str) -> None:
    folder = tmp_path / "run"
    words = [str(folder), "--model", str(model), "--goal", goal, "--with", client, "--device", "cpu"]
    assert main([*words, "--device-memory", "4G", "--sequence", "16", "--batch", "2"]) == 0
    run(folder, "--steps", "2")
    resumed = run(folder, "--steps", "3", "--resume")
    if client == "accelerate":
        assert "step 3: loss" in resumed and "step 2: loss" not in resumed
    else:
        assert resumed.count("'loss'") == 1


LIGHTNING = """
import sys
sys.path[:0] = {paths!r}
from tests.clients.test_lightning_trainer import CPUs
import train
train.main(accelerator=CPUs())
"""
"""Lightning's strategy takes CUDA devices only: CPUs that pass for them run the script as it is."""


def test_lightning_trains_and_resumes(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("lightning")
    folder = tmp_path / "run"
    words = [
        str(folder),
        "--model",
        str(model),
        "--goal",
        "finetune",
        "--with",
        "lightning",
        "--device",
        "cuda",
    ]
    assert main([*words, "--device-memory", "4G", "--sequence", "16", "--batch", "2"]) == 0
    config = json.loads((folder / "ds_config.json").read_text())
    config["zero_optimization"]["stage"] = 3
    (folder / "ds_config.json").write_text(json.dumps(config))
    driver = folder / "driver.py"
    driver.write_text(LIGHTNING.format(paths=[str(Path(__file__).parents[2]), str(folder)]))
    environment: dict[str, Any] = {**os.environ, "HF_HUB_OFFLINE": "1"}

    def printed(*more: str) -> str:
        done = forked.run([str(driver), *more], env=environment, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = printed("--steps", "2")
    assert "step 1: loss" in first and "step 2: loss" in first
    resumed = printed("--steps", "3", "--resume")
    assert "step 3: loss" in resumed and "step 2: loss" not in resumed


def test_lightning_is_refused_where_its_strategy_would_refuse(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--goal", "finetune", "--with", "lightning", "--device", "cpu"]
    assert main([str(tmp_path / "run"), *words]) == 2
    assert "takes CUDA devices only. Use --with torch" in capsys.readouterr().err
