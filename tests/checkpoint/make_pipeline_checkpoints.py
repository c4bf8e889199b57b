"""Makes the fixtures in tests/files/upstream_pipeline with DeepSpeed 0.19.8.

Not part of the suite. Needs a Python in which that release is installed:

    python tests/checkpoint/make_pipeline_checkpoints.py PYTHON_WITH_0_19

A small pipeline of two stages, whose first and last layer share a weight, trained for three batches.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

PIPELINES = Path(__file__).resolve().parents[1] / "files" / "upstream_pipeline"
CASES = {
    "stage0_fp32": (0, "fp32", 1),
    "stage0_bf16": (0, "bf16", 1),
    "stage1_fp32": (1, "fp32", 2),
    "stage1_bf16": (1, "bf16", 2),
}
"""ZeRO stage, precision and data-parallel size, each with two pipeline stages."""
VOCAB, WIDTH = 11, 6
MICRO_BATCHES = 2


def layers() -> list[Any]:
    """Layers by which the loss is made; the classes of either release."""
    import torch
    from torch import nn

    from deepspeed.parallel.pipeline import LayerSpec, TiedLayerSpec

    def words(embedding: Any, tokens: Any) -> Any:
        return embedding(tokens)

    def head(embedding: Any, hidden: Any) -> Any:
        return hidden @ embedding.weight.t()

    return [
        TiedLayerSpec("words", nn.Embedding, VOCAB, WIDTH, forward_fn=words),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        torch.tanh,
        LayerSpec(nn.LayerNorm, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False),
        TiedLayerSpec("words", nn.Embedding, VOCAB, WIDTH, forward_fn=head),
    ]


def make_pipeline(stages: int, **options: Any) -> Any:
    import torch

    from deepspeed.parallel.pipeline import PipelineModule

    torch.manual_seed(5)

    def loss(made: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(made.float().flatten(0, 1), labels.flatten())

    return PipelineModule(
        layers(), num_stages=stages, loss_fn=loss, partition_method="uniform", base_seed=7, **options
    )


def config(stage: int, precision: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage},
    }
    if precision == "bf16":
        made["bf16"] = {"enabled": True}
    return made


def batches(steps: int, replica: int) -> Any:
    """Micro-batches; the data depends on the replica alone."""
    import torch

    for number in range(steps * MICRO_BATCHES):
        generator = torch.Generator().manual_seed(100 * number + replica)
        tokens = torch.randint(0, VOCAB, (4, 6), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def on_a_rank(folder: str, stage: int, precision: str) -> None:
    import torch

    import deepspeed

    deepspeed.init_distributed("gloo")
    engine, _, _, _ = deepspeed.initialize(model=make_pipeline(2), config=config(stage, precision))
    data = batches(3, engine.grid.get_data_parallel_rank())
    for _ in range(3):
        engine.train_batch(data)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    torch.distributed.barrier()
    os._exit(0)  # that release's threads now and then abort at exit


def make(python: str) -> None:
    from make_upstream_checkpoints import launch

    for name, (stage, precision, dp) in CASES.items():
        folder = PIPELINES / name
        if (folder / "latest").exists():
            continue  # remove the folder to make it again
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        launch(python, 2 * dp, str(folder), json.dumps([stage, precision]), script=__file__)
        for path in folder.glob("*.py"):
            path.unlink()
    print(PIPELINES.name, sum(p.stat().st_size for p in PIPELINES.rglob("*") if p.is_file()), "bytes")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.path = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parents[2])]
        on_a_rank(sys.argv[2], *json.loads(sys.argv[3]))
    else:
        make(sys.argv[1])
