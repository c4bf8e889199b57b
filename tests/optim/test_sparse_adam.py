"""Stage 0: embeddings with ``sparse=True`` under ``torch.optim.SparseAdam``, alone or inside a client's optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from tests.pool import distributed

ROWS, WIDTH = 50, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


class Both(torch.optim.Optimizer):
    """One optimizer made of two, as scripts with sparse embeddings write it."""

    def __init__(self, model: Model) -> None:
        self.parts = [
            torch.optim.SparseAdam(list(model.table.parameters()), lr=0.1),
            torch.optim.Adam(model.head.parameters(), lr=0.1),
        ]
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def only_the_table(model: Model) -> torch.optim.Optimizer:
    model.head.requires_grad_(False)
    return torch.optim.SparseAdam(list(model.table.parameters()), lr=0.1)


@pytest.mark.parametrize("sparse_gradients", [False, True])
@pytest.mark.parametrize("make", [Both, only_the_table])
@distributed(world_size=2)
def test_as_in_plain_torch(make: Any, sparse_gradients: bool) -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "sparse_gradients": sparse_gradients,
    }
    engine = deepspeed.initialize(model=model, optimizer=make(model), config=config)[0]
    plain = make(reference)
    for step in range(3):
        batches = [torch.tensor([[1, step + rank], [7, 20 + step]]) for rank in range(2)]
        engine.backward(engine(batches[dist.get_rank()]).square().mean())
        engine.step()
        reference.zero_grad()
        reference(torch.cat(batches)).square().mean().backward()
        plain.step()
    for got, expected in zip(engine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, expected)
    engine.destroy()
