"""A training that goes on, whatever happens to its ranks.

    deepspeed --elastic_training --num_gpus 4 examples/elastic/train.py
    kill -9 PID          # of any rank, in another shell, as often as you like

The same command begins the run and goes on with it, also after SIGTERM to it or when the machine was switched off: what
that needs is in the config below, and a loop that counts with `engine.global_steps`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import deepspeed
from deepspeed.runtime.dataloader import RepeatingLoader


def config(folder: str) -> dict[str, Any]:
    return {
        # The same 48 samples per step with 1, 2, 3, 4, 6 or 12 ranks; the states of ranks that are lost are in memory.
        "elasticity": {
            "enabled": True,
            "version": 0.1,
            "max_train_batch_size": 64,
            "micro_batch_sizes": [4, 8, 16],
            "replicate_state": True,
        },
        # On disk: what is left when the whole job is stopped.
        "checkpoint": {"folder": folder, "resume": True, "save_at_sigterm": True, "keep_last": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 2},
        "steps_per_print": 50,
    }


def data() -> TensorDataset:
    """Points of a function of 16 numbers."""
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(4096, 16, generator=made)
    return TensorDataset(inputs, torch.sin(inputs.cumsum(1)).mean(1, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save_every", type=int, default=500)
    parser.add_argument("--folder", default="runs/elastic")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, training_data=data(), config=config(args.folder)
    )
    print(f"rank {engine.global_rank} of {engine.world_size}: PID {os.getpid()}", flush=True)
    batches = iter(RepeatingLoader(loader))
    loss = torch.tensor(0.0)
    while engine.global_steps < args.steps:
        for _ in range(engine.gradient_accumulation_steps()):
            inputs, wanted = next(batches)
            loss = nn.functional.mse_loss(engine(inputs), wanted)
            engine.backward(loss)
            engine.step()
        if engine.global_steps % args.save_every == 0:
            engine.save_checkpoint(args.folder)
    if engine.global_rank == 0:
        print(f"step {engine.global_steps}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
