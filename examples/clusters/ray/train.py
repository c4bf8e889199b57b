"""Train with Ray Train: a TorchTrainer starts the ranks, each of which makes an engine.

    python examples/clusters/ray/train.py --workers 2 --storage /some/disk

Each worker saves into a temporary folder of its own, and Ray brings their files together in the storage of the run. A
worker that is lost is started again with the others, and they go on from the last checkpoint; `--lose` kills one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
}


def train(options: dict[str, Any]) -> None:
    """Run in each worker, where Ray has set the variables of a rank and initialised torch.distributed."""
    import ray.train

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    if (last := ray.train.get_checkpoint()) is not None:
        with last.as_directory() as folder:
            engine.load_checkpoint(folder)
        print(f"resumed at step {engine.global_steps}", flush=True)
    while engine.global_steps < options["steps"]:
        drawn = torch.Generator().manual_seed(1000 * engine.global_steps + engine.global_rank)
        x = torch.randn(8, 32, generator=drawn).to(engine.device)
        loss = (engine(x) - x.sin().sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_steps % options["save_every"] == 0:
            report(engine, loss.item())
        if engine.global_steps == options["lose"] and last is None and engine.global_rank == 1:
            time.sleep(5)  # Ray asks workers every two seconds what they have reported
            os._exit(1)


def report(engine: Any, loss: float) -> None:
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        kept = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": engine.global_steps, "loss": loss}, checkpoint=kept)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save_every", type=int, default=10)
    parser.add_argument("--storage", type=Path, default=Path(tempfile.gettempdir(), "ds_ray"))
    parser.add_argument("--lose", type=int, default=-1, help="kill a worker after this step, once")
    args = parser.parse_args()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config={
            "steps": args.steps,
            "save_every": args.save_every,
            "lose": args.lose,
        },
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(
            name="deepspeed",
            storage_path=str(args.storage.absolute()),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    print(
        f"trained: step {result.metrics['step']}, loss {result.metrics['loss']:.4f}, {result.checkpoint.path}"
    )


if __name__ == "__main__":
    main()
