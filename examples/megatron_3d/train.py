r"""A GPT as Megatron-LM writes it, on ranks of three kinds: stages of a pipeline, parts of a layer, replicas.

    torchrun --nproc-per-node 8 train.py --stages 2 --parts 2 --save out/megatron
    torchrun --nproc-per-node 2 train.py --stages 2 --load out/megatron --save out/megatron
    python -m deepspeed.checkpoint.ds_to_universal --input_folder out/megatron/global_step60 \
        --output_folder out/megatron/universal
    torchrun --nproc-per-node 4 train.py --stages 1 --parts 2 --load out/megatron --universal

The layers split their own weights and mark them; `PipeModelDataParallelTopology` says which rank is where, and its
grid is the `mpu`. The second command goes on from the checkpoint of 2 x 2 x 2 ranks with 2 x 1 x 1. The last two take
the way of DeepSpeed 0.19: a universal checkpoint, loaded by 1 x 2 x 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
import deepspeed.comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

LENGTH, VOCABULARY = 64, 256  # bytes
WIDTH, HEADS = 64, 4


class SumGradients(torch.autograd.Function):
    """The input of a split layer: nothing forward, the sum over the parts backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOutputs(torch.autograd.Function):
    """The output of a split layer: the sum over the parts forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def part_of(whole: Tensor, dim: int, grid: PipelineParallelGrid) -> nn.Parameter:
    """This rank's part of a weight, marked as Megatron marks it (`get_model_parallel_...` counts stages, too)."""
    parts = grid.get_slice_parallel_world_size()
    part = whole.chunk(parts, dim)[grid.get_slice_parallel_rank()]
    param = nn.Parameter(part.detach().clone())
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = parts > 1, dim, 1  # type: ignore[attr-defined]
    return param


class ColumnParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, grid: PipelineParallelGrid) -> None:
        super().__init__()
        self.group = grid.get_slice_parallel_group()
        self.weight = part_of(torch.randn(outputs, inputs) * 0.02, 0, grid)
        self.bias = part_of(torch.zeros(outputs), 0, grid)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(SumGradients.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, grid: PipelineParallelGrid) -> None:
        super().__init__()
        self.group = grid.get_slice_parallel_group()
        self.weight = part_of(torch.randn(outputs, inputs) * 0.02, 1, grid)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return SumOutputs.apply(F.linear(x, self.weight), self.group) + self.bias


class Block(nn.Module):
    def __init__(self, grid: PipelineParallelGrid) -> None:
        super().__init__()
        self.heads = HEADS // grid.get_slice_parallel_world_size()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = (
            ColumnParallelLinear(WIDTH, 3 * WIDTH, grid),
            RowParallelLinear(WIDTH, WIDTH, grid),
        )
        self.up, self.down = (
            ColumnParallelLinear(WIDTH, 4 * WIDTH, grid),
            RowParallelLinear(4 * WIDTH, WIDTH, grid),
        )

    def forward(self, x: Tensor) -> Tensor:
        # Query, key and value of a head lie side by side, so that a part has whole heads.
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (self.heads, 3, -1))
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) + self.positions


def head(embedding: Embedding, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Text(torch.utils.data.Dataset):
    """Pairs (bytes, the next bytes) of this file."""

    def __init__(self) -> None:
        data = torch.tensor(list(Path(__file__).read_bytes()))
        self.rows = data[: (len(data) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


def make_engine(options: argparse.Namespace) -> deepspeed.PipelineEngine:
    ranks = options.stages * options.parts
    if dist.get_world_size() % ranks:
        raise SystemExit(
            f"{dist.get_world_size()} ranks: --stages x --parts is {ranks}, start a multiple of it"
        )
    replicas = dist.get_world_size() // ranks
    topology = PipeModelDataParallelTopology(num_pp=options.stages, num_mp=options.parts, num_dp=replicas)
    grid = PipelineParallelGrid(topology=topology)
    layers = [
        TiedLayerSpec("bytes", Embedding),
        *[LayerSpec(Block, grid) for _ in range(options.blocks)],
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("bytes", Embedding, forward_fn=head),
    ]
    model = PipelineModule(
        layers, topology=topology, loss_fn=loss_fn, seed_layers=True, base_seed=options.seed
    )
    config = {
        "train_batch_size": options.batch,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": options.zero},
        "checkpoint": {"load_universal": options.universal},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, training_data=Text())
    return engine


def evaluated(engine: deepspeed.PipelineEngine) -> float:
    rows = Text().rows[:8]
    return engine.eval_batch(iter([(rows[:, :-1], rows[:, 1:])]), num_micro_batches=1).item()


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2, help="stages of the pipeline")
    parser.add_argument("--parts", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--zero", type=int, default=1, choices=range(3), help="ZeRO stage among replicas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, over all replicas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    parser.add_argument("--load", type=Path, help="folder of a checkpoint to go on from, of any arrangement")
    parser.add_argument("--universal", action="store_true", help="that checkpoint was converted")
    parser.add_argument("--local_rank", type=int, default=-1)
    options = parser.parse_args(argv)
    deepspeed.init_distributed(auto_mpi_discovery=False)

    engine = make_engine(options)
    if options.load:
        engine.load_checkpoint(options.load)
    begun = engine.global_steps
    first = evaluated(engine)
    for _ in range(options.steps):
        engine.train_batch()
    last = evaluated(engine)
    if options.save:
        engine.save_checkpoint(options.save)
    if dist.get_rank() == 0:
        replicas = dist.get_world_size() // options.stages // options.parts
        print(f"{options.stages} stages x {options.parts} parts x {replicas} replicas")
        print(f"step {begun}: loss {first:.5f}; step {engine.global_steps}: loss {last:.5f}")
    dist.barrier()
    return {"begun": begun, "first": first, "last": last}


if __name__ == "__main__":
    main()
