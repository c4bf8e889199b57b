"""The autotuner with a script of the Trainer, whose batch sizes are its own arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

for needed in ("transformers", "accelerate"):
    pytest.importorskip(needed, reason="the clients extra is not installed")

from tests.tools.launcher.programs import deepspeed  # noqa: E402

SCRIPT = """\
import os, torch
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
from accelerate import PartialState
if not torch.cuda.is_available():
    PartialState(backend="gloo")
del os.environ["ACCELERATE_USE_DEEPSPEED"]
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args.accelerator_config.use_configured_state = not torch.cuda.is_available()
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 512
Trainer(LlamaForCausalLM(config), args, train_dataset=rows).train()
"""
AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)


def test_trainer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    mappings = {
        "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
        "gradient_accumulation_steps ": "--gradient_accumulation_steps",  # with a space, as in a published example
    }
    config = {
        **AUTO,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": [1, 3]},
        "autotuning": {"enabled": True, "fast": True, "max_train_batch_size": 16, "arg_mappings": mappings},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    run = deepspeed(
        "--autotuning", "tune", "--num_gpus", 1, "train.py", "--deepspeed", "ds.json", "--output_dir", "out",
        "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2, "--max_steps", 20,
        "--report_to", "none", "--disable_tqdm", "True",
        cwd=tmp_path,
    )  # fmt: skip
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    best = json.loads((tmp_path / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert best["gradient_accumulation_steps"] == 2 and 1 <= best["train_micro_batch_size_per_gpu"] <= 8
    command = (tmp_path / "autotuning_results" / "cmd_optimal.txt").read_text()
    assert f"--per_device_train_batch_size {best['train_micro_batch_size_per_gpu']} " in command
    assert "--gradient_accumulation_steps 2" in command and "ds_config_optimal.json" in command
