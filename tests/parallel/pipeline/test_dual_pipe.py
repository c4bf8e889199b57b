"""``DualPipeVModule``: a V over its ranks trains as the whole model does, and names what it needs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.data.loader import RepeatingLoader
from deepspeed.parallel.pipeline import DualPipeVModule, PipelineModule
from tests.pool import distributed

WIDTH, RATE = 6, 0.1


def config(micro_batches: int, interval: int = 0) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_allow_untested_optimizer": True,
        "pipeline": {"activation_checkpoint_interval": interval},
    }


def make(layers: list[nn.Module], stages: int) -> DualPipeVModule:
    return DualPipeVModule(layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform")


@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("interval", [0, 1])
def test_it_trains_as_the_whole_model(world_size: int, tmp_path: Path, interval: int) -> None:
    ranks = world_size
    count = 2 * ranks + 1
    torch.manual_seed(0)
    layers = [part for _ in range(2 * ranks) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    whole = copy.deepcopy(nn.Sequential(*layers))
    data = [(torch.randn(1, WIDTH), torch.randn(1, WIDTH)) for _ in range(count)]
    model = make(layers, ranks)
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(count, interval)
    )[0]
    assert type(engine) is deepspeed.DualPipeVEngine
    engine.set_dataiterator(RepeatingLoader(data))
    expected = dict(whole.named_parameters())
    plain = torch.optim.SGD(whole.parameters(), lr=RATE)
    for _ in range(2):
        plain.zero_grad()
        losses = [nn.functional.mse_loss(whole(inputs), labels) for inputs, labels in data]
        mean = torch.stack(losses).mean()
        mean.backward()
        plain.step()
        torch.testing.assert_close(engine.train_batch(), mean.detach())
        for name, param in engine.module.named_parameters():
            torch.testing.assert_close(param.detach(), expected[name].detach())
        assert all(slot is None for slots in engine.pipe_buffers.values() for slot in slots)
    with pytest.raises(ValueError, match="num_micro_batches"):
        engine.eval_batch(iter(data), num_micro_batches=1)
    with torch.no_grad():
        mean = torch.stack([nn.functional.mse_loss(whole(inputs), labels) for inputs, labels in data]).mean()
    torch.testing.assert_close(engine.eval_batch(iter(data)), mean)
    engine.save_checkpoint(str(tmp_path))
    fresh = make([copy.deepcopy(layer) for layer in layers], ranks)
    for param in fresh.parameters():
        nn.init.zeros_(param)
    other = deepspeed.initialize(
        model=fresh, model_parameters=fresh.parameters(), config=config(count, interval)
    )[0]
    other.load_checkpoint(str(tmp_path))
    for name, param in other.module.named_parameters():
        torch.testing.assert_close(param.detach(), expected[name].detach())
    engine.destroy()
    other.destroy()


@distributed(world_size=2)
def test_a_batch_of_too_few_micro_batches_is_refused() -> None:
    model = make([nn.Linear(WIDTH, WIDTH) for _ in range(4)], 2)
    with pytest.raises(ValueError, match="needs at least 4 micro-batches, not 3"):
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(3))


@distributed(world_size=1)
def test_what_a_stage_recomputes() -> None:
    layers = [nn.ReLU() for _ in range(4)] + [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    module = PipelineModule(layers, num_stages=1, activation_checkpoint_interval=4)
    assert module.is_checkpointable_results == [False, True]
    module._precompute_checkpointable_values()  # public tests call it
    module.set_checkpoint_interval(3)  # ReLU x 3; ReLU, Linear x 2; Linear x 2
    assert module.is_checkpointable_results == [False, True, True]
    module.set_checkpoint_interval(0)
    assert module.is_checkpointable_results == []
