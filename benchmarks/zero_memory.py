"""Model states of a rank by ZeRO stage: counted on a model, planned for a large one, and as the paper's table has them.

The paper's table (Rajbhandari et al. 2020, figure 1) is of 7.5B parameters on 64 ranks in mixed precision: 2 bytes of
weights, 2 of gradients and 12 of fp32 weights and moments for each parameter. Counted is what one rank of 64 holds of a
small GPT after a backward, on torch's `fake` process group (`scale.py`): bytes of weights, gradients and states, per
parameter. Planned is what `ds plan` says for 7.5B.

    python benchmarks/zero_memory.py --save cpu
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from report import Report, common_arguments
from scale import CONTEXT, one_of, state_bytes, take_step

RANKS, PARAMETERS = 64, 7.5e9
PAPER = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}
"""GB of a rank by stage."""


def config(stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


def counted(size: str, stage: int) -> tuple[float, float]:
    """Bytes per parameter that a rank in the middle of 64 holds: weights and states, and reduced gradients."""
    import deepspeed
    import gpt

    with one_of(RANKS, RANKS // 2 + 1):
        module = gpt.build(size, CONTEXT)
        numel = sum(param.numel() for param in module.parameters())
        engine = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), config=config(stage)
        )[0]
        gradients = held_gradients(engine)
        take_step(engine)  # the optimizer's states come with the first update
        return state_bytes(engine) / numel, gradients / numel


def held_gradients(engine: Any) -> int:
    """Bytes of gradients between the backward and the update, each memory once."""
    import gpt

    (batch,) = gpt.random_batches(1, 1, CONTEXT, seed=0)
    engine.backward(engine(*batch))
    tensors = [param.grad for param in engine.module.parameters()]
    tensors += [bucket.reduced for bucket in engine.core.reducer.buckets]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    engine.step()
    return sum(held.values())


def planned(stage: int) -> float:
    """GB of weights, gradients and states of a rank that `ds plan` says for 7.5B parameters on 8 x 8 GPUs."""
    text = base64.urlsafe_b64encode(json.dumps(config(stage)).encode()).decode()
    command = [
        sys.executable,
        "-m",
        "deepspeed.tools.ds",
        "plan",
        text,
        "--model",
        "gpt:78x2800x28",
        "--json",
    ]
    command += [
        "--gpus",
        "8",
        "--nodes",
        "8",
        "--dtype",
        "bf16",
        "--device",
        "cuda",
        "--device-memory",
        "200G",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode not in (0, 1):  # 1: it does not fit
        raise RuntimeError(run.stderr)
    plan = json.loads(run.stdout)
    held = plan["bytes_per_rank"]["device"]["update"]
    kinds = ("parameters", "master weights", "optimizer state", "gradients")
    return sum(held.get(kind, 0) for kind in kinds) / plan["parameters"] * PARAMETERS / 1e9


def main(argv: Sequence[str] | None = None) -> None:
    parser = common_arguments("Model states of a rank by ZeRO stage.")
    parser.add_argument("--model", default="10M", choices=["tiny", "10M", "50M"])
    arguments: argparse.Namespace = parser.parse_args(argv)
    report = Report("zero_memory", arguments)
    report.data["rows"] = rows = []
    for stage, paper in PAPER.items():
        states, gradients = counted("tiny" if arguments.quick else arguments.model, stage)
        scaled = (states + gradients) * PARAMETERS / 1e9
        rows.append({"stage": stage, "states": states, "gradients": gradients, "planned": planned(stage)})
        rows[-1] |= {"scaled": scaled, "paper": paper}
    report.table(
        f"model states of one of {RANKS} ranks, bf16, 7.5B parameters",
        ("stage", "bytes per parameter", "of them gradients", "x 7.5B, GB", "ds plan, GB", "paper, GB"),
        [
            (
                str(row["stage"]),
                f"{row['states'] + row['gradients']:.3f}",
                f"{row['gradients']:.3f}",
                f"{row['scaled']:.1f}",
                f"{row['planned']:.1f}",
                f"{row['paper']:.1f}",
            )
            for row in rows
        ],
    )
    report.save()


if __name__ == "__main__":
    main()
