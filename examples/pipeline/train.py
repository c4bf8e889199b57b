"""A model written as a list of layers, cut into stages on as many ranks: train_batch(), eval_batch(), a checkpoint.

    deepspeed --num_gpus 2 examples/pipeline/train.py
    torchrun --nproc-per-node 2 examples/pipeline/train.py --schedule zero-bubble
    torchrun --nproc-per-node 4 examples/pipeline/train.py --stages 2 --schedule interleaved --zero 2

A small GPT learns the bytes of this file. The first and the last layer share their weight, on two stages. Ranks beyond
the stages hold replicas. Every schedule prints the same losses.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

LENGTH, VOCABULARY, WIDTH, HEADS, BLOCKS = 64, 256, 64, 4, 4
CHUNKS = {"interleaved": {"chunks": 2}, "zero-bubble-v": {"chunks": 2, "zigzag": True}}


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) + self.positions


def head(embedding: Embedding, x: Tensor) -> Tensor:
    """Scores each byte by the vector that also reads it."""
    return F.linear(x, embedding.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Text(torch.utils.data.Dataset):
    """Pairs (bytes, the next bytes) of this file."""

    def __init__(self) -> None:
        data = torch.tensor(list(Path(__file__).read_bytes()))
        self.rows = data[: (len(data) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_engine(options: argparse.Namespace) -> tuple[PipelineModule, deepspeed.PipelineEngine]:
    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("bytes", Embedding),
        *[LayerSpec(Block) for _ in range(BLOCKS)],
        nn.LayerNorm(WIDTH),
        TiedLayerSpec("bytes", Embedding, forward_fn=head),
    ]
    model = PipelineModule(
        layers,
        num_stages=options.stages,
        loss_fn=loss_fn,
        seed_layers=True,  # the weights do not depend on where the cuts are
        **CHUNKS.get(options.schedule, {}),
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": options.zero},
        "pipeline": {"schedule": options.schedule},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, training_data=Text())
    return model, engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument(
        "--schedule", default="1f1b", choices=["1f1b", "zero-bubble", "auto", *CHUNKS], help="order of work"
    )
    parser.add_argument("--zero", type=int, default=1, choices=range(4), help="ZeRO stage among replicas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_pipeline"))
    parser.add_argument("--local_rank", type=int, default=-1)
    options = parser.parse_args()
    deepspeed.init_distributed(auto_mpi_discovery=False)

    model, engine = make_engine(options)
    losses = [engine.train_batch().item() for _ in range(options.steps)]
    rows = Text().rows[:4]
    probe = [(rows[:, :-1], rows[:, 1:])]
    reached = engine.eval_batch(iter(probe), num_micro_batches=1).item()
    engine.save_checkpoint(options.output)

    _, again = make_engine(options)
    again.load_checkpoint(options.output)
    loaded = again.eval_batch(iter(probe), num_micro_batches=1).item()
    if deepspeed.comm.get_rank() == 0:
        print(f"layers of the stages end at {model.partitions()[1:]}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
        print(f"evaluated {reached:.5f}, from the checkpoint {loaded:.5f}")
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
