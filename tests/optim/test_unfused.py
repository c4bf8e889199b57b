"""``FP16_UnfusedOptimizer`` and ``FP16_Optimizer`` without an engine, against torch's optimizer on fp32 weights."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.compat.fp16.fused_optimizer import FP16_Optimizer, FP16_UnfusedOptimizer
from deepspeed.compat.fp16.loss_scaler import LossScaleConfig
from tests.pool import distributed

ARGS = {"init_scale": 64.0, "scale_window": 2, "min_scale": 1.0, "delayed_shift": 1}


def layer() -> nn.Linear:
    torch.manual_seed(2)
    made = nn.Linear(3, 2)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_((param * 64).round() / 64)  # exact in fp16
    return made


@pytest.mark.parametrize("kind", [FP16_UnfusedOptimizer, FP16_Optimizer])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_updates_as_the_optimizer_does_in_fp32(dtype: torch.dtype, kind: type) -> None:
    low, plain = layer().to(dtype), layer()
    wrapped = kind(
        torch.optim.Adam(low.parameters(), lr=0.1),
        low_precision_dtype=dtype,
        static_loss_scale=8.0,
        clip_grad=0.5,
    )
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    inputs = torch.tensor([[1.0, -2.0, 0.5]])
    scale = 8.0 if dtype is torch.float16 else 1.0
    assert (wrapped.loss_scale, wrapped.dynamic_loss_scale) == (scale, False)
    for _ in range(4):
        with torch.no_grad():  # both see the rounded weights
            for one, other in zip(plain.parameters(), low.parameters(), strict=True):
                one.grad = None
                other.grad = None
        wrapped.backward(low(inputs.to(dtype)).square().sum())
        for one, other in zip(plain.parameters(), low.parameters(), strict=True):
            assert other.grad is not None
            one.grad = other.grad.float() / scale
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert wrapped.step() is False
        adam.step()
        assert wrapped._global_grad_norm == pytest.approx(float(expected), rel=1e-5)
        for one, (other, master) in zip(plain.parameters(), wrapped._pairs(), strict=True):
            assert torch.allclose(master, one, atol=1e-5) and torch.equal(other, master.to(dtype))
            assert other.grad is None


@pytest.mark.parametrize("kind", [FP16_UnfusedOptimizer, FP16_Optimizer])
def test_overflows_lower_the_scale_and_good_steps_raise_it(kind: type) -> None:
    model = layer().half()
    scale = LossScaleConfig(torch.float16, True, 0, ARGS)
    wrapped = kind(torch.optim.SGD(model.parameters(), lr=0.5), loss_scale_config=scale)
    before = [param.detach().clone() for param in model.parameters()]
    seen = []
    for value in (float("inf"), float("nan"), 0.0, 0.0, 0.0):
        for param in model.parameters():
            param.grad = torch.full_like(param, value)
        assert wrapped.step() is wrapped.overflow is (value != 0.0)
        seen.append(wrapped.cur_scale)
    assert seen == [32.0, 16.0, 16.0, 16.0, 32.0] and scale.cur_iter == 5
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    with pytest.raises(ValueError, match="finite"):
        wrapped.override_loss_scale(0)


def test_its_state_can_be_saved_and_loaded() -> None:
    first, second = layer().half(), layer().half()
    one, other = (
        FP16_UnfusedOptimizer(
            torch.optim.Adam(m.parameters(), lr=0.1),
            dynamic_loss_scale=True,
            dynamic_loss_args=ARGS,
            has_moe_layers=False,
        )
        for m in (first, second)
    )
    for number in range(3):
        for param in first.parameters():
            param.grad = torch.full_like(param, 1.0 + number)
        one.step()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for model, wrapped in ((first, one), (second, other)):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        wrapped.step()
    for (low, master), (low_too, master_too) in zip(one._pairs(), other._pairs(), strict=True):
        assert torch.equal(low, low_too) and torch.equal(master, master_too)
    assert one.cur_scale == other.cur_scale
    with torch.no_grad():
        second.weight.fill_(0.25)
    other.refresh_fp32_params()
    assert torch.equal(other.fp32_groups[0][0], torch.full((2, 3), 0.25))


def test_flat_groups_of_the_fused_one() -> None:
    model = layer().half()
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    wrapped = FP16_Optimizer(torch.optim.SGD(groups, lr=1.0), static_loss_scale=4.0, clip_grad=1.0)
    assert not isinstance(wrapped, FP16_UnfusedOptimizer)
    assert [flat.dtype for flat in wrapped.fp32_groups_flat] == 2 * [torch.float32]
    flat = [torch.full((6,), 8.0)]
    assert wrapped.unscale_and_clip_grads(flat, 16.0) == pytest.approx(16.0, rel=1e-5)
    assert torch.allclose(flat[0], torch.full((6,), 0.5))
    assert (
        FP16_Optimizer(torch.optim.SGD([model.weight], lr=1.0), dynamic_loss_scale=True).cur_scale == 2.0**32
    )
    with pytest.raises(ValueError, match="fused_adam_legacy"):
        FP16_Optimizer(torch.optim.SGD([model.weight], lr=1.0), fused_adam_legacy=True)


def filled(value: float, marks: dict[str, object]) -> nn.Parameter:
    """Four fp16 elements with this gradient."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    param.grad = torch.full_like(param, value)
    for name, mark in marks.items():
        setattr(param, name, mark)
    return param


@pytest.mark.parametrize("kind", [FP16_UnfusedOptimizer, FP16_Optimizer])
@pytest.mark.parametrize("size", [1, 2, 4])
@distributed(world_size=4)
def test_all_experts_count_in_the_norm(kind: type, size: int) -> None:
    """Each once, on ranks that hold them and on ranks that do not; and a step is skipped by all ranks."""
    number = dist.get_rank() % size
    dense = filled(3.0, {})
    expert = filled(4.0 + number, {"allreduce": False, "group_name": f"ep_size_{size}"})
    wrapped = kind(torch.optim.SGD([dense, expert], lr=1.0), static_loss_scale=1.0, clip_grad=1.0)
    wrapped.step()
    expected = math.sqrt(4 * 3.0**2 + sum(4 * (4.0 + each) ** 2 for each in range(size)))
    assert wrapped._global_grad_norm == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(dense, torch.full_like(dense, -3.0 / expected), rtol=1e-3)
    dense.grad = torch.ones_like(dense)
    expert.grad = torch.full_like(expert, float("inf")) if number == size - 1 else None
    assert wrapped.step() is True


@pytest.mark.parametrize("kind", [FP16_UnfusedOptimizer, FP16_Optimizer])
@distributed(world_size=2)
def test_replicated_weights_count_once_among_model_parallel_ranks(kind: type) -> None:
    """Also if one rank has no gradient at all."""
    mpu = SimpleNamespace(
        get_model_parallel_group=lambda: dist.group.WORLD, get_model_parallel_rank=dist.get_rank
    )
    whole, part = filled(3.0, {}), filled(4.0, {"model_parallel": True})
    wrapped = kind(torch.optim.SGD([whole, part], lr=1.0), static_loss_scale=1.0, mpu=mpu)
    wrapped.step()
    assert wrapped._global_grad_norm == pytest.approx(math.sqrt(4 * 9.0 + 2 * 4 * 16.0), rel=1e-6)
    if dist.get_rank() == 0:
        part.grad = torch.ones_like(part)
    wrapped.step()
    assert wrapped._global_grad_norm == pytest.approx(2.0, rel=1e-6)
