"""Ordinary scripts of Transformers and Accelerate on two CPU ranks, under each launcher."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deepspeed.launcher import ports
from tests.tools.launcher.programs import COMMAND, environment

for client in ("transformers", "accelerate"):
    pytest.importorskip(client, reason="the clients extra is not installed")

TRAINER = """\
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
texts = [torch.randint(0, 64, (12,)) for _ in range(32)]
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=arguments,
    train_dataset=[{"input_ids": text, "labels": text} for text in texts],
)
trainer.train()
sys.stdout.write(f"ranks {arguments.world_size}, epoch {trainer.state.epoch}\\n")
"""
CONFIG = """\
{
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}
}
"""
LOOP = """\
import sys
import torch
import deepspeed
from accelerate import Accelerator, DeepSpeedPlugin

deepspeed.init_distributed()  # as many scripts do, before Accelerate has said a word
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1))
model = torch.nn.Linear(4, 1)
data = torch.utils.data.DataLoader(torch.arange(32.0).view(8, 4), batch_size=2)
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
batches = 0
for batch in data:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
    batches += 1
sys.stdout.write(f"ranks {accelerator.num_processes}, batches {batches}\\n")
"""
LAUNCHERS = {
    "deepspeed": [*COMMAND[1:], "--num_gpus", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate": ["-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2"],
}


def run(folder, launcher: str, *command: str) -> str:
    # Accelerate always takes the same port, even if it is in use.
    port = ["--main_process_port", str(ports.find_free("127.0.0.1"))] if launcher == "accelerate" else []
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], *port, *command],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_ordinary_trainer_script(tmp_path, launcher):
    """Four samples in each of two steps: an eighth of an epoch each, which a job of one rank would not come to."""
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "ds.json").write_text(CONFIG)
    options = [
        "--max_steps",
        "2",
        "--per_device_train_batch_size",
        "2",
        "--report_to",
        "none",
        "--save_strategy",
        "no",
    ]
    said = run(tmp_path, launcher, "train.py", "--deepspeed", "ds.json", "--output_dir", "out", *options)
    assert said.count("ranks 2, epoch 0.25") == 2, said


def test_a_loop_of_accelerate_after_init_distributed(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    assert run(tmp_path, "deepspeed", "loop.py").count("ranks 2, batches 2") == 2
