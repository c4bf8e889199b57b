"""Stage 0: what a script assigns to ``param.grad`` is what the optimizer gets, as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.compat.fp16.fused_optimizer import FP16_Optimizer, FP16_UnfusedOptimizer
from tests.pool import distributed

WIDTH = 4


def build(optimizer: str = "SGD", **config: Any) -> tuple[Any, Any]:
    torch.manual_seed(5)
    engine, wrapped, _, _ = deepspeed.initialize(
        model=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "optimizer": {"type": optimizer, "params": {"lr": 0.5}},
            **config,
        },
    )
    return engine, wrapped


@distributed(world_size=2)
def test_gradients_without_a_backward_are_not_summed_again() -> None:
    engine, _ = build()
    before = [p.detach().clone() for p in engine.parameters()]
    for number, param in enumerate(engine.parameters()):
        param.grad = torch.full_like(param, float(number)) if number else None
    engine.step()
    for number, (old, new) in enumerate(zip(before, engine.parameters(), strict=True)):
        assert torch.allclose(new, old - 0.5 * number)
        assert new.grad is None
    engine.destroy()


@distributed(world_size=1)
def test_a_replaced_and_a_removed_gradient_after_the_backward() -> None:
    engine, _ = build()
    before = [p.detach().clone() for p in engine.parameters()]
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    expected = [p.grad.clone() for p in engine.parameters()]
    first, second, third, _ = engine.parameters()
    first.grad = expected[0] = torch.full_like(first, 3.0)
    second.grad = None
    third.grad.mul_(2.0)
    expected[1].zero_()
    expected[2] *= 2.0
    engine.step()
    for old, new, grad in zip(before, engine.parameters(), expected, strict=True):
        assert torch.allclose(new, old - 0.5 * grad)
    engine.destroy()


@pytest.mark.parametrize(("name", "kind"), [("Adam", FP16_Optimizer), ("Lamb", FP16_UnfusedOptimizer)])
@distributed(world_size=1)
def test_the_loss_scale_can_be_watched_step_by_step(name: str, kind: type) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    engine, optimizer = build(name, fp16=fp16)
    assert isinstance(optimizer, kind) and optimizer.low_precision_dtype is torch.float16
    scale = optimizer.loss_scale_config
    assert (scale.dynamic_loss_scale, scale.scale_window, scale.min_loss_scale) == (True, 2, 1)
    seen = []
    for value in (0.1, 0.1, 0.1, float("inf"), float("nan"), 0.1):
        for param in engine.parameters():
            param.grad = torch.full_like(param, value)
        engine.step()
        assert scale.cur_iter == optimizer.cur_iter == len(seen) + 1
        seen.append(optimizer.cur_scale)
    assert seen == [256.0, 256.0, 512.0, 256.0, 128.0, 128.0]
    assert optimizer.last_overflow_iter == 4 and engine.skipped_steps == 2
    with pytest.raises(ValueError, match="finite"):
        optimizer.override_loss_scale(float("inf"))
    engine.destroy()


@pytest.mark.parametrize(("name", "kind"), [("Adam", FP16_Optimizer), ("Lamb", FP16_UnfusedOptimizer)])
@distributed(world_size=1)
def test_the_divisor_of_gradients_is_the_loss_scale_times_clipping(name: str, kind: type) -> None:
    fp16 = {"enabled": True, "loss_scale": 8.0}
    engine, wrapped = build(name, fp16=fp16, gradient_clipping=0.5)
    assert isinstance(wrapped, kind)
    flat = [torch.full((4,), 16.0)]
    args = (flat,) if kind is FP16_Optimizer else ()
    assert wrapped.unscale_and_clip_grads(*args, 32.0, apply_scale=False) == pytest.approx(64.0, rel=1e-5)
    assert torch.equal(flat[0], torch.full((4,), 16.0))
    assert wrapped.unscale_and_clip_grads(*args, 2.0) == 8.0  # a norm of 0.25, below what is clipped
    if args:
        assert torch.equal(flat[0], torch.full((4,), 2.0))
    engine.destroy()
