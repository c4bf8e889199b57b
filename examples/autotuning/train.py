r"""A script of one's own that the autotuner tunes without a change of it.

    deepspeed --num_gpus 2 --autotuning run train.py --batch 4 --deepspeed_config ds_config.json

It has what a script needs for that: its config comes from an argument, and so does the size of its batches, which
`arg_mappings` of `ds_config.json` names.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
import deepspeed.comm as dist

CONTEXT, VOCABULARY = 64, 256  # bytes


class Model(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.recurrent = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, rows: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(rows[:, :-1]))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), rows[:, 1:].flatten())


def text() -> torch.utils.data.TensorDataset:
    data = b"".join(file.read_bytes() for file in sorted(Path(deepspeed.__file__).parent.glob("zero/*.py")))
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return torch.utils.data.TensorDataset(rows[: len(rows) // CONTEXT * CONTEXT].view(-1, CONTEXT))


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The loss of each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank's step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    options = parser.parse_args(argv)

    deepspeed.init_distributed(auto_mpi_discovery=False)
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(args=options, model=Model(options.width))
    data = text()
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), dist.get_rank())
    losses: list[float] = []
    while len(losses) < options.steps:
        for (rows,) in torch.utils.data.DataLoader(data, options.batch, sampler=sampler, drop_last=True):
            loss = engine(rows.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if len(losses) == options.steps:
                break
    if dist.get_rank() == 0:
        print(f"{options.batch} samples per rank: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
