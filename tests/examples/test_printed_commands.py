"""Every command that a page, a README or a docstring prints is one that its program accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import forked
from tests.tools.launcher.programs import environment

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
SCRIPT = """
import torch

def build_model():
    return torch.nn.Linear(8, 8)

CharacterModel = build_model
"""
# Commands, and what is wrong with each.
WRONG = {
    "python examples/pipeline/train.py --stagse 2": "unrecognized arguments: --stagse 2",
    "torchrun --nproc-per-node 2 examples/pipeline/train.py --schedule none": "invalid choice: 'none'",
    "python examples/pipeline/trian.py": "'examples/pipeline/trian.py' is none of",
    "python benchmarks/adam.py --save": "expected one argument",
    "python examples/moe_gpt/train.py --num-layers 3 --num-experts 4 8": "--num-experts 4 8: give one number, or 1",
    "deepspeed --num_gpu two train.py": "--num_gpu",
    "deepspeed --num_gpus 2 examples/rlhf/train.py --actor_stage 3": "--actor_stage",
    "deepspeed --hostfile machines train.py": "machines",
    "ds_check config.json --gpu": "--gpu",
    "ds_check missing/config.json": "there is no missing/config.json",
    "ds_plan config.json": "'ds_plan' is none of",
    "ds plan config.json --model absent:build_model --gpus 2": "No module named 'absent'",
    "ds_bench --num_gpus 2 --all-redcue": "--all-redcue",
    "make tset": "'tset' is none of",
    'pip install ".[client]"': "'client' is none of",
    "pip instal .": "'instal' is none of",
    "pytest -m fast": "'fast' is none of",
    "python -m deepspeed.checkpoint.ds_to_universe": "there is no module",
    "accelerate tune": "'tune' is none of",
}


def report(tmp_path: Path, texts: list[str]) -> dict[str, Any]:
    """In a folder of the reader's, with a config and a script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    for name in ("config.json", "ds_config.json"):
        (tmp_path / name).write_text(json.dumps(CONFIG))
    code = f"from tests.examples import printed_commands; printed_commands.report({texts!r})"
    done = forked.run(["-c", code], env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_printed_commands_are_accepted(tmp_path: Path) -> None:
    found = report(tmp_path, [])
    assert found["commands"] > 350
    assert found["wrong"] == {}


def test_wrong_commands_are_found(tmp_path: Path) -> None:
    found = report(tmp_path, list(WRONG))["wrong"]
    reasons = {command.removeprefix("docs/page.md:1: "): reason for command, reason in found.items()}
    assert list(reasons) == list(WRONG)
    assert [command for command, part in WRONG.items() if part not in reasons[command]] == [], reasons
