"""Makes the fixtures in tests/files/upstream_universal and tests/files/upstream_tp with DeepSpeed 0.19.8.

Not part of the suite. Needs a Python in which that release is installed:

    python tests/checkpoint/make_universal_checkpoints.py PYTHON_WITH_0_19

``upstream_universal``: what that release's ``ds_to_universal`` makes of checkpoints in ``upstream_checkpoints``.
``upstream_tp``: checkpoints of a small model whose layers two ranks share, as Megatron-LM's do, with its conversion of
one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "files"
UNIVERSAL, SPLIT = DATA / "upstream_universal", DATA / "upstream_tp"
CONVERTED = ("stage1_fp32", "stage2_bf16", "stage3_fp32", "stage3_bf16")
"""Fixtures in ``upstream_checkpoints``."""

SPLIT_CASES = {
    "stage0_fp32": (0, "fp32", 1),
    "stage0_bf16": (0, "bf16", 1),
    "stage1_bf16": (1, "bf16", 2),
    "stage2_fp32": (2, "fp32", 2),
    "stage3_bf16": (3, "bf16", 2),
}
"""Stage, precision and data-parallel size, each with two tensor-parallel ranks."""

TP, VOCAB, WIDTH, HIDDEN = 2, 12, 6, 8
INFO = {
    "universal_checkpoint_version": 0.4,
    "vocabulary_parameter_patterns": [r"words\.weight"],
    "original_vocab_size": 11,
    "padded_vocab_size": VOCAB,
    "tp_replicated_parameter_patterns": [r"norm\..*", r"down\.bias"],
    "parameter_with_row_parallelism_patterns": [r"down\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"up\..*"],
}
"""What a client of Megatron's kind saves in its ``client_state`` about how its layers are split; not at stage 0."""


def split_model(unit: Any = None) -> Any:
    """A vocabulary split by rows; ``up``, two matrices side by side, each split by rows; ``down`` split by columns; the
    rest is whole everywhere. ``unit``: the model-parallel unit; without it the whole model, marked all the same."""
    import torch
    import torch.distributed as dist
    from torch import nn

    rank = unit.get_model_parallel_rank() if unit is not None else 0
    group = unit.get_model_parallel_group() if unit is not None else None

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Any) -> Any:
            return inputs.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            grad = grads[0].contiguous()
            dist.all_reduce(grad, group=group)
            return grad

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Any) -> Any:
            total = inputs.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    def part(whole: Any, dim: int, stride: int) -> Any:
        if group is None:
            kept = whole
        else:
            blocks = [block.chunk(TP, dim)[rank] for block in whole.chunk(stride, dim)]
            kept = torch.cat(blocks, dim).contiguous()
        param = nn.Parameter(kept)
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
        return param

    class Held(nn.Module):
        def __init__(self, weight: Any, bias: Any = None) -> None:
            super().__init__()
            self.weight, self.bias = weight, bias

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = torch.Generator().manual_seed(3)

            def normal(*shape: int) -> Any:
                return torch.randn(*shape, generator=made) / 3

            self.words = Held(part(normal(VOCAB, WIDTH), 0, 1))
            self.norm = nn.LayerNorm(WIDTH)
            self.up = Held(part(normal(2 * HIDDEN, WIDTH), 0, 2), part(normal(2 * HIDDEN), 0, 2))
            self.down = Held(part(normal(WIDTH, HIDDEN), 1, 1), nn.Parameter(normal(WIDTH)))

        def forward(self, tokens: Any) -> Any:
            rows = self.words.weight.shape[0]
            first = rank * rows if group is not None else 0
            mine = (tokens >= first) & (tokens < first + rows)
            found = self.words.weight[(tokens - first).clamp(0, rows - 1)] * mine.unsqueeze(-1)
            inputs = Summed.apply(found) if group is not None else found
            hidden = self.norm(inputs)
            hidden = Copied.apply(hidden) if group is not None else hidden
            gate, value = nn.functional.linear(hidden, self.up.weight, self.up.bias).chunk(2, -1)
            made = nn.functional.linear(torch.tanh(gate) * value, self.down.weight)
            made = Summed.apply(made) if group is not None else made
            return (inputs + made + self.down.bias).float().square().mean()

    return Net()


class Unit:
    """A model-parallel unit as Megatron-LM's: neighbours share the layers."""

    def __init__(self) -> None:
        import torch.distributed as dist

        rank, world = dist.get_rank(), dist.get_world_size()
        tensor = [dist.new_group(list(range(first, first + TP))) for first in range(0, world, TP)]
        data = [dist.new_group(list(range(first, world, TP))) for first in range(TP)]
        self.tensor, self.data = tensor[rank // TP], data[rank % TP]

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        return TP

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        import torch.distributed as dist

        return dist.get_world_size(self.data)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def split_config(stage: int, precision: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    if precision == "bf16":
        made["bf16"] = {"enabled": True}
    return made


def train_split(engine: Any, replica: int) -> list[float]:
    """Three steps; the data depends on the replica alone."""
    import torch

    losses: list[float] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + replica)
        loss = engine(torch.randint(0, VOCAB - 1, (4, 5), generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def on_a_rank(folder: str, stage: int, precision: str) -> None:
    import torch

    import deepspeed

    deepspeed.init_distributed("gloo")
    unit = Unit()
    engine, _, _, _ = deepspeed.initialize(
        model=split_model(unit), config=split_config(stage, precision), mpu=unit
    )
    train_split(engine, unit.get_data_parallel_rank())
    info = {"universal_checkpoint_info": INFO} if stage else {}
    engine.save_checkpoint(folder, client_state={"epoch": 3, **info})
    torch.distributed.barrier()
    os._exit(0)  # that release's threads now and then abort at exit


def convert(python: str, folder: Path, out: Path, *options: str) -> None:
    """That release's own conversion."""
    command = [python, "-m", "deepspeed.tools.ds_to_universal", *options]
    command += ["--input_folder", str(folder), "--output_folder", str(out)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr[-3000:]}")


def make(python: str) -> None:
    from make_upstream_checkpoints import FIXTURES, launch

    for name in CONVERTED:
        if not (UNIVERSAL / name).exists():
            (UNIVERSAL / name).mkdir(parents=True)
            out = UNIVERSAL / name / "universal"
            convert(python, FIXTURES / name / "global_step3", out, "--inject_missing_state")
    for name, (stage, precision, dp) in SPLIT_CASES.items():
        folder = SPLIT / name
        if (folder / "latest").exists():
            continue  # remove the folder to make it again
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        launch(python, TP * dp, str(folder), json.dumps([stage, precision]), script=__file__)
        for path in folder.glob("*.py"):
            path.unlink()
        if stage:
            convert(python, folder / "global_step3", folder / "universal")
    for folder in (UNIVERSAL, SPLIT):
        print(folder.name, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()), "bytes")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.path = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parents[2])]
        on_a_rank(sys.argv[2], *json.loads(sys.argv[3]))
    else:
        make(sys.argv[1])
