"""A small Llama from scratch with Transformers' Trainer and a JSON: train, evaluate, resume, save.

    python examples/hf_trainer/train.py                                  # one process
    torchrun --nproc-per-node 2 examples/hf_trainer/train.py             # two ranks, or:
    deepspeed --num_gpus 2 examples/hf_trainer/train.py

Text: the source of Python's standard library, as bytes. Shows that the loss falls below what byte frequencies
alone can reach, that a run resumed from a checkpoint ends with the same loss, and that the whole model is saved.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH = 128
CONFIG = Path(__file__).with_name("ds_config.json")


class Bytes(Dataset):
    """Consecutive pieces of the standard library's source: a byte is a token."""

    def __init__(self, first: int, count: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[first : first + count]
        text = b"".join(path.read_bytes() for path in files)
        usable = len(text) // LENGTH * LENGTH
        self.rows = torch.frombuffer(bytearray(text[:usable]), dtype=torch.uint8).view(-1, LENGTH).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}

    def entropy(self) -> float:
        """The best loss, in nats per byte, that a model without any context can reach."""
        share = torch.bincount(self.rows.view(-1), minlength=256).double()
        share = share[share > 0] / share.sum()
        return float(-(share * share.log()).sum())


def start() -> bool:
    """Without a launcher, be the only rank; without a GPU, tell Accelerate the backend. True on CPU."""
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
    return on_cpu


def make_trainer(folder: Path, steps: int, on_cpu: bool, train: Bytes, evaluation: Bytes) -> Trainer:
    AcceleratorState._reset_state()  # a second Trainer in one process gets its own DeepSpeed settings
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder),
        deepspeed=str(CONFIG),
        accelerator_config={"use_configured_state": on_cpu},
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        warmup_steps=steps // 10,
        bf16=not on_cpu,
        logging_steps=max(1, steps // 10),
        save_steps=steps // 2,
        save_total_limit=2,
        disable_tqdm=True,
        report_to=[],
    )
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    return Trainer(LlamaForCausalLM(config), args, train_dataset=train, eval_dataset=evaluation)


def last_loss(run: Any) -> float:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry][-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_hf_trainer"))
    options = parser.parse_args()
    on_cpu = start()
    data = Bytes(0, 60), Bytes(60, 2)
    run = make_trainer(options.output, options.steps, on_cpu, *data)
    run.train()
    reached = run.evaluate()["eval_loss"]
    run.save_model(str(options.output / "model"))

    again = make_trainer(options.output, options.steps, on_cpu, *data)
    again.train(resume_from_checkpoint=str(options.output / f"checkpoint-{options.steps // 2}"))
    if run.is_world_process_zero():
        saved = load_file(options.output / "model" / "model.safetensors")
        print(
            f"evaluation loss {reached:.3f} nats per byte; byte frequencies alone reach {data[1].entropy():.3f}"
        )
        print(f"last training loss straight through {last_loss(run)}, resumed half-way {last_loss(again)}")
        print(f"saved whole: {sum(weight.numel() for weight in saved.values()):,} parameters")


if __name__ == "__main__":
    main()
