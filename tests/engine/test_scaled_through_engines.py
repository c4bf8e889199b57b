"""fp16: the loss of one engine trains another, too, as a discriminator's trains the generator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from tests.pool import distributed

WIDTH, LR = 4, 0.5


def build(module: nn.Module, stage: int = 0, **section: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
        **section,
    }
    return deepspeed.initialize(model=module, config=config)[0]


def fp16(scale: float) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "loss_scale": scale}}


def pair() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), torch.randn(2, WIDTH)


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_gradients_through_an_engine_with_another_scale(stage: int) -> None:
    generator, judge, x = pair()
    reference = copy.deepcopy(nn.Sequential(generator, judge))
    for section in (fp16(256.0), {}):  # with its own loss scale, and with none
        behind = build(copy.deepcopy(generator), stage, **section)
        front = build(copy.deepcopy(judge), stage, **fp16(1024.0))
        outputs = behind(x.half() if section else x)
        front.backward(front(outputs.half()).float().mean())
        behind.step(), front.step()
        torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(nn.Sequential(generator, judge).parameters()),
            reference.parameters(),
        )
        reference.zero_grad()
        reference(x).mean().backward()
        for engine, expected in ((behind, reference[0]), (front, reference[1])):
            with deepspeed.zero.GatheredParameters(list(engine.parameters())):
                for got, param in zip(engine.parameters(), expected.parameters(), strict=True):
                    assert param.grad is not None
                    torch.testing.assert_close(
                        got.detach().float(), param.detach() - LR * param.grad, rtol=2e-2, atol=2e-3
                    )
        behind.destroy(), front.destroy()


@distributed(world_size=1)
def test_losses_with_different_scales_are_refused() -> None:
    generator, judge, x = pair()
    behind = build(generator, **fp16(256.0))
    fronts = [build(copy.deepcopy(judge), **fp16(scale)) for scale in (512.0, 1024.0)]
    fake = behind(x.half())
    losses = [front.scale(front(fake).float().mean()) for front in fronts]
    with pytest.raises(RuntimeError, match="different loss scales"):
        (losses[0] + losses[1]).backward()
    behind.destroy(), [front.destroy() for front in fronts]


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_the_documented_loop_of_a_shared_loss(stage: int) -> None:
    torch.manual_seed(3)
    x, models = torch.randn(2, WIDTH), [nn.Linear(WIDTH, 1) for _ in range(2)]
    references = copy.deepcopy(models)
    engines = [build(model, stage) for model in models]
    for trained in (engines, references):
        loss = sum(model(x).mean() / (i + 1) for i, model in enumerate(trained))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
    for engine in engines:
        engine._backward_epilogue()
    for engine in engines:
        engine.step()
    for engine, reference in zip(engines, references, strict=True):
        engine.optimizer.zero_grad()
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            for got, param in zip(engine.parameters(), reference.parameters(), strict=True):
                assert param.grad is not None
                torch.testing.assert_close(got.detach(), param.detach() - LR * param.grad)
        engine.destroy()
