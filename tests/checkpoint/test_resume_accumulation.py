"""A run saved between two updates resumes bit for bit, at any micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from tests.checkpoint.models import assert_equal
from tests.pool import distributed

STEPS = 3  # micro-batches of an update
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 sums in fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16 autocast": {
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "fp16": {"enabled": False, "initial_scale_power": 3, "loss_scale_window": 1},
    },
}


class Net(nn.Module):
    """``sometimes`` takes part when asked to, ``never`` never does, ``shared`` is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.shared = nn.Linear(9, 9)
        self.sometimes = nn.Linear(9, 9)
        self.never = nn.Linear(2, 2)
        self.down = nn.Linear(9, 4)

    def forward(self, x: Tensor, sometimes: bool) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.block, self.up(x), use_reentrant=True)
        if sometimes:
            hidden = hidden + self.sometimes(hidden)
        return self.down(self.shared(hidden))

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(x))


def make(stage: int, precision: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": STEPS,
        "gradient_clipping": 1.0,
        # Weight decay moves a parameter without a gradient, unless it is known to have had none.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 60,
            "stage3_max_live_parameters": 0,  # sums over ranks after every micro-batch
            "stage3_param_persistence_threshold": 0,
        },
        **PRECISIONS[precision],
    }
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def loss_of(engine: Any, number: int, sometimes: bool) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + engine.global_rank)
    x = torch.randn(2, 6, generator=generator).to(next(engine.module.parameters()).dtype)
    return engine(x, sometimes).float().square().mean()


def train(engine: Any, first: int, last: int, *, rank: int | None = None) -> list[float]:
    """Micro-batches; ``sometimes`` is used in the first of each update, by ``rank`` or by all."""
    losses = []
    for number in range(first, last):
        loss = loss_of(engine, number, number % STEPS == 0 and rank in (None, engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole(engine: Any) -> dict[str, Tensor]:
    params = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().clone() for name, param in params.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_at_every_position(tmp_path, stage, precision):
    for position in range(STEPS):
        engine = make(stage, precision)
        train(engine, 0, STEPS + position, rank=1)
        engine.save_checkpoint(tmp_path, tag=str(position))
        scale = engine.state_access.scalars()
        losses = train(engine, STEPS + position, 3 * STEPS)

        resumed = make(stage, precision, seed=1)
        train(resumed, 0, 1)
        resumed.load_checkpoint(tmp_path, tag=str(position))
        assert resumed.state_access.scalars() == scale
        assert train(resumed, STEPS + position, 3 * STEPS) == losses
        assert_equal(whole(resumed), whole(engine))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_inside_sums_of_one_rank(tmp_path, stage, precision):
    """Gradients accumulated under ``no_sync`` keep their dtype."""

    def alone(engine: Any, number: int) -> None:
        with engine.no_sync():
            engine.backward(loss_of(engine, number, sometimes=number == 0))

    def finish(engine: Any) -> dict[str, Tensor]:
        alone(engine, 2)
        for number in (3, 4, 5):
            engine.backward(loss_of(engine, number, sometimes=False))
            engine.step()
        return whole(engine)

    engine = make(stage, precision)
    alone(engine, 0)
    alone(engine, 1)
    engine.save_checkpoint(tmp_path)
    sums = {name: sum_.clone() for name, sum_ in engine.state_access.pending_gradients()["local"].items()}
    expected = finish(engine)
    resumed = make(stage, precision, seed=1)
    resumed.load_checkpoint(tmp_path)
    kept = resumed.state_access.pending_gradients()["local"]
    assert sums and {n: s.dtype for n, s in kept.items()} == {n: s.dtype for n, s in sums.items()}
    assert_equal(kept, sums)
    assert_equal(finish(resumed), expected)


@distributed(world_size=2)
def test_another_cut_drops_what_was_summed(tmp_path):
    """Shards of other buckets may have the same length; they are not taken for these."""
    engine = make(2, "fp32")
    train(engine, 0, STEPS + 1)
    engine.save_checkpoint(tmp_path)
    resumed = make(3, "fp32", seed=1)
    resumed.load_checkpoint(tmp_path)
    assert resumed.state_access.pending_gradients() is None
    assert resumed.micro_steps == STEPS


@distributed(world_size=1)
def test_a_load_without_optimizer_states_begins_a_batch(tmp_path: Any) -> None:
    """Gradients of the weights from before the load are not added to those of the new ones."""
    norms = []
    for begun in (0, 1):
        engine = make(1, "fp32")
        engine.save_checkpoint(tmp_path)
        for number in range(begun + STEPS):
            if number == begun:
                engine.load_checkpoint(tmp_path, load_optimizer_states=False)
            engine.backward(engine(torch.ones(2, 6), True).square().sum())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]
