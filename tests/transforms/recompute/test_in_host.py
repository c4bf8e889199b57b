"""Inputs of checkpointed regions in host memory: what is copied, when it comes back, and that nothing changes.

The host plays the device: memory that "leaves the device" is copied to other host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.transforms.recompute import checkpointing as ds
from deepspeed.transforms.recompute import kept_inputs
from tests.pool import distributed
from tests.transforms.recompute.models import Block, assert_same_bits, batch, gradients, plain, stack


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before, ds._state = ds._state, ds._CheckpointState()
    yield
    ds._state = before


@pytest.mark.parametrize("form", ["checkpoint", "non_reentrant_checkpoint"])
def test_inputs_leave_and_come_back_one_ahead(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_inputs, "has_own_memory", lambda device: True)
    ahead: list[int] = []
    take = kept_inputs.HostInputs.take

    def watched(self: Any, kept: Any) -> Tensor:
        found = take(self, kept)
        before = kept.before() if kept.before is not None else None
        ahead.append(int(before is not None and before.fetched is not None))
        return found

    monkeypatch.setattr(kept_inputs.HostInputs, "take", watched)
    model = stack(depth=4)
    expected = gradients(model, plain)
    ds.configure(None, checkpoint_in_cpu=True)
    for _ in range(2):
        ahead.clear()
        settings = ds._state.process
        before = settings.host_inputs.stream.copies
        assert_same_bits(gradients(model, getattr(ds, form)), expected)
        assert settings.host_inputs.stream.copies - before == 2 * 4  # to the host and back, each once
        assert ahead == [1, 1, 1, 0]  # while one is used, the next one is on its way


class Layer(nn.Module):
    """A layer that checkpoints itself, as Transformers' do."""

    gradient_checkpointing = False

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Block(dropout=0.2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.block(x)


class Layers(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Layer(reentrant) for _ in range(3))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def train(reentrant: bool, stage: int, *, checkpointed: bool, **section: Any) -> tuple[list[float], Any]:
    model = Layers(reentrant)
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": section,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for layer in model.layers:
        layer.gradient_checkpointing = checkpointed  # also after initialize
    torch.manual_seed(7)
    losses = []
    for seed in range(3):
        loss = engine(batch(seed=seed))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine


@distributed(world_size=1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_layers_of_a_model_as_it_is(stage: int, reentrant: bool) -> None:
    expected, engine = train(reentrant, stage, checkpointed=True)
    engine.destroy()
    original, kept_inputs.has_own_memory = kept_inputs.has_own_memory, lambda device: True
    try:
        losses, engine = train(reentrant, stage, checkpointed=True, cpu_checkpointing=True)
    finally:
        kept_inputs.has_own_memory = original
    assert losses == expected
    assert engine._checkpointing.host_inputs.stream.copies == 3 * 2 * 3  # steps, there and back, layers
    module = engine.module
    engine.destroy()
    assert not module.layers[0]._forward_pre_hooks
