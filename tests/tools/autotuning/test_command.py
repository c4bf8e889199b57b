"""``deepspeed --autotuning`` as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.launcher.programs import deepspeed

SCRIPT = """\
import argparse
import torch
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--steps", type=int, default=40)
args = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step in range(args.steps):
    loss = engine(torch.randn(engine.train_micro_batch_size_per_gpu(), 64)).square().mean()
    engine.backward(loss)
    engine.step()
if engine.global_rank == 0:
    print("steps", engine.global_steps, "stage", engine.zero_optimization_stage())
"""


@pytest.mark.parametrize("ranks", [1])
def test_tune_and_run(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    config = {
        "train_batch_size": ranks,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": [0, 1]},
        "autotuning": {"enabled": True, "max_train_batch_size": 2 * ranks, "metric": "flops"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    run = deepspeed(
        "--autotuning", "run", "--num_gpus", ranks, "train.py", "--deepspeed", "--deepspeed_config", "ds.json",
        cwd=tmp_path,
    )  # fmt: skip
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert "| global" in said and "steps 40 stage" in said
    folder = tmp_path / "autotuning_results"
    info = json.loads((folder / "profile_model_info" / "model_info.json").read_text())
    assert info["num_params"] == 64 * 256 + 256 + 257 and info["activation_mem_per_gpu"] > 256 * 4
    assert info["stages"]["0"]["fits"] and info["stages"]["3"]["need"]["host"] > 0
    metrics = json.loads((folder / "profile_model_info" / "metrics.json").read_text())
    flops = metrics["flops"] * metrics["latency"]
    assert flops == pytest.approx(2 * (64 * 256 + 256) * 3 - 2 * 64 * 256 + 2 * 256, rel=1e-3)
    for name in ("ds_config.json", "cmd.txt", "stdout.log", "stderr.log", "exp.json"):
        assert (folder / "profile_model_info" / name).exists()
    best = json.loads((folder / "ds_config_optimal.json").read_text())
    assert best["zero_optimization"]["stage"] in (0, 1) and best["optimizer"]["type"] == "Adam"
