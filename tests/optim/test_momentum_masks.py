"""Masks of momenta, for weights whose gradients are always exactly zero, which signs cannot say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.zero.tensor_fragment import safe_get_full_optimizer_state
from tests.pool import distributed

ROWS, USED, WIDTH = 12, 5, 16
KINDS = {
    "OneBitAdam": {"freeze_step": 2},
    "OneBitLamb": {"freeze_step": 2},
    "ZeroOneAdam": {
        "var_freeze_step": 3,
        "var_update_scaler": 1,
        "local_step_scaler": 1,
        "local_step_clipper": 2,
    },
}


class Table(nn.Module):
    """Only the first rows are ever looked up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(ROWS, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.last(self.words(numbers).tanh()).square().mean()


def mask(flat: bool) -> Tensor:
    rows = torch.zeros(ROWS, WIDTH)
    rows[:USED] = 1
    return rows.flatten() if flat else rows


def start(kind: str, mask: Tensor | None) -> Any:
    model = Table()
    words: dict[str, Any] = {
        "params": [model.words.weight],
        **({} if mask is None else {"exp_avg_mask": mask}),
    }
    return deepspeed.initialize(
        model=model,
        model_parameters=[words, {"params": list(model.last.parameters())}],
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": kind, "params": {"lr": 0.01, "weight_decay": 0.0, **KINDS[kind]}},
        },
    )[0]


def train(engine: Any, steps: int) -> None:
    source = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        engine.backward(engine(torch.randint(USED, (4,), generator=source)))
        engine.step()


def idle_rows(engine: Any) -> tuple[Tensor, Tensor]:
    """Momenta and weights of the rows that nothing looks up."""
    weight = engine.module.words.weight
    momentum = safe_get_full_optimizer_state(weight, "exp_avg")
    assert momentum is not None
    return momentum.view(ROWS, WIDTH)[USED:].clone(), weight.detach()[USED:].clone()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
@distributed(world_size=2)
def test_masked_momenta_stay_zero(kind: str, flat: bool) -> None:
    engine = start(kind, mask(flat))
    train(engine, 8)
    momentum, weight = idle_rows(engine)
    assert not momentum.any()
    torch.testing.assert_close(weight, Table().words.weight.detach()[USED:], rtol=0, atol=0)
    assert engine.module.words.weight[:USED].ne(Table().words.weight[:USED]).any()
    engine.destroy()


@distributed(world_size=2)
def test_without_a_mask_they_move() -> None:
    engine = start("OneBitAdam", None)
    train(engine, 8)
    assert idle_rows(engine)[0].any()
    engine.destroy()


@pytest.mark.parametrize("kind", list(KINDS))
@distributed(world_size=2)
def test_masks_are_those_of_the_script_not_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    engine = start(kind, mask(False))
    train(engine, 4)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    other = torch.ones(ROWS, WIDTH)
    other[-1] = 0
    again = start(kind, other)
    again.load_checkpoint(str(tmp_path))
    assert again.optimizer.param_groups[0]["exp_avg_mask"] is other
    again.destroy()
    plain = start(kind, None)
    plain.load_checkpoint(str(tmp_path))
    assert "exp_avg_mask" not in plain.optimizer.param_groups[0]
    plain.destroy()


@distributed(world_size=2)
def test_a_mask_of_another_size_is_refused() -> None:
    engine = start("OneBitAdam", torch.ones(3))
    with pytest.raises(ValueError, match="exp_avg_mask: expected a tensor with 192 elements"):
        train(engine, 4)
    engine.destroy()
