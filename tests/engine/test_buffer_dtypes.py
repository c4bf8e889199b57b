"""A model whose fp32 buffers meet 16-bit weights: the error is explained, and the key that it names works."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.base.logging import logger
from tests.pool import distributed

WIDTH, LENGTH = 8, 10


class Positions(nn.Module):
    """Positions in a buffer, as the usual tutorials have them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.register_buffer("positions", torch.randn(1, LENGTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) + self.positions[:, : ids.shape[1]])


class SpectralNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def build(module: nn.Module, name: str, chosen_by: str = "section", **config: Any) -> Any:
    by_section = chosen_by == "section"
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": optimizer,
        **({name: {"enabled": True}} if by_section else {"data_types": {"param_dtype": name}}),
        **config,
    }
    return deepspeed.initialize(model=module, config=settings)[0]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(("make", "buffer"), [(Positions, "positions"), (SpectralNorm, "_u")])
@pytest.mark.parametrize("chosen_by", ["section", "data_types.param_dtype"])
@distributed(world_size=1)
def test_the_error_is_explained(make: type[nn.Module], buffer: str, name: str, chosen_by: str) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    ids = torch.randint(0, 20, (2, 5))
    engine = build(make(), name, chosen_by)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="dtype"):
            engine(ids)
    logger.removeHandler(handler)
    [message] = [line for line in told if "buffer_dtype" in line]
    assert buffer in message and f'"{name}"' in message
    engine.destroy()
    engine = build(make(), name, data_types={"buffer_dtype": name})
    engine.backward(engine(ids).float().mean())
    engine.step()
    engine.destroy()
