"""The transforms of torch.func through an engine, against the same model in plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import deepspeed
from tests.pool import distributed

BEYOND_THE_BUDGET = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 10,
    "stage3_max_reuse_distance": 0,
}


def both(stage: int, **section):
    """An engine whose updates are plain SGD, and a twin of its model."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, **section},
        },
    )
    return engine, plain


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(3).sum()


TRANSFORMS = {
    "grad": lambda m, x: grad(lambda x: total(m, x))(x),
    "vmap": lambda m, x: vmap(m)(x),
    "grad per sample": lambda m, x: vmap(grad(lambda x: total(m, x)))(x),
    "jvp": lambda m, x: jvp(m, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda m, x: vjp(m, x)[1](torch.ones(4, 1))[0],
    "jacrev": lambda m, x: jacrev(m)(x),
    "hessian": lambda m, x: hessian(lambda x: total(m, x))(x),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=[1, 2])
def test_transforms_of_the_input(world_size, stage):
    engine, plain = both(stage, **BEYOND_THE_BUDGET)
    x = torch.randn(4, 4)
    before = [bucket.reduced for bucket in engine.core.reducer.buckets]
    for name, transform in TRANSFORMS.items():
        torch.testing.assert_close(transform(engine, x), transform(plain, x), msg=name)
        with torch.no_grad():
            torch.testing.assert_close(vmap(engine)(x), plain(x))
    # Nothing was taken for a gradient.
    assert before == [bucket.reduced for bucket in engine.core.reducer.buckets]
    assert not any(engine.core.reducer.used)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=[1, 2])
def test_training_on_a_loss_made_of_transforms(world_size, stage):
    """Sobolev training: the loss holds derivatives by the input; ordinary steps come between."""
    engine, plain = both(stage, **BEYOND_THE_BUDGET)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        if step % 3 == 1:
            return model(x).pow(2).mean()
        slopes = vmap(grad(lambda x: total(model, x)))(x)
        return slopes.pow(2).mean() if step % 3 else slopes.pow(2).mean() + model(x).mean()

    for step in range(6):
        engine.backward(loss_of(engine, step))
        engine.step()
        loss_of(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    x = torch.randn(4, 4)
    torch.testing.assert_close(engine(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=[1, 2])
def test_transforms_of_the_parameters(world_size, stage):
    """Gradients per sample (differential privacy, influence functions) by functional_call."""
    engine, plain = both(stage)
    x = torch.randn(4, 4)

    def per_sample(model: nn.Module) -> dict[str, Tensor]:
        weights = {name: param.detach() for name, param in model.named_parameters()}
        return vmap(grad(lambda w, x: functional_call(model, w, (x,)).sum()), in_dims=(None, 0))(weights, x)

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found = per_sample(engine)
    for name, value in per_sample(plain).items():
        torch.testing.assert_close(found[f"module.{name}"], value)


@distributed(world_size=2)
def test_memory_of_stage_3_returns_with_the_step():
    engine, _ = both(3, **BEYOND_THE_BUDGET)
    x = torch.randn(4, 4)
    engine.backward(vmap(grad(lambda x: total(engine, x)))(x).sum())
    engine.step()
    assert all(param.numel() == 0 for param in engine.module.parameters())
    grad(lambda x: total(engine, x))(x)
    engine.empty_partition_cache()
    assert all(param.numel() == 0 for param in engine.module.parameters())
    with torch.no_grad():
        vmap(engine)(x)
    assert all(param.numel() == 0 for param in engine.module.parameters())
