"""Options of `zero_optimization` and of gradients: those that move work around change no bit, the others do what they
say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from tests.pool import distributed
from tests.zero.models import assert_same, batch, config_for, engine_losses, make_zoo, uses_sometimes

STEPS = 4
NEUTRAL = [
    {"reduce_scatter": False},
    {"allgather_partitions": False},
    {"contiguous_gradients": False},
    {"round_robin_gradients": True},
    {"use_multi_rank_bucket_allreduce": False},
    {"load_from_fp32_weights": False},
    {"elastic_checkpoint": True},
    {"allgather_bucket_size": 300},
    {"overlap_comm": True, "reduce_bucket_size": 300},
]


@pytest.mark.parametrize("options", NEUTRAL, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=2)
def test_where_the_work_is_done_changes_no_bit(stage: int, options: dict[str, Any]) -> None:
    plain = engine_losses(make_zoo, config_for(stage, gas=2), STEPS)
    other = engine_losses(make_zoo, config_for(stage, gas=2, **options), STEPS)
    assert other[0] == plain[0] and other[2] == plain[2]
    assert_same(other[1], plain[1])


@distributed(world_size=2)
def test_reduce_scatter_false_sums_by_all_reduce() -> None:
    counts = []
    for reduce_scatter in (True, False):
        config = config_for(2, reduce_scatter=reduce_scatter)
        engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
        for step in range(2):
            before = engine.core.reducer.communicator.collectives.copy()
            engine.backward(engine(batch(step, 0, dist.get_rank())))
            engine.step()
        counts.append(engine.core.reducer.communicator.collectives - before)
        engine.destroy()
    assert counts[0]["reduce_scatter"] > 0 and counts[1]["reduce_scatter"] == 0
    assert counts[1]["all_reduce"] > counts[0]["all_reduce"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_gradients_may_be_summed_instead_of_averaged(stage: int) -> None:
    """The sum over two ranks with half the rate is the mean, for an optimizer that is linear in its gradients."""
    if stage == 3:  # documented: not with stage 3
        with pytest.raises(ValueError, match="gradient_allreduce_op"):
            deepspeed.initialize(model=make_zoo(), config={**config_for(3), "gradient_allreduce_op": "sum"})
        return
    results = []
    for operation, lr in (("mean", 0.5), ("sum", 0.25)):
        config = config_for(stage, clip=0.0) | {
            "optimizer": {"type": "SGD", "params": {"lr": lr}},
            "gradient_allreduce_op": operation,
        }
        results.append(engine_losses(make_zoo, config, STEPS))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])
    assert [2 * norm for norm in results[0][2]] == results[1][2]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_an_engine_can_be_told_to_sum(stage: int) -> None:
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=config_for(stage, clip=0.0))
    assert engine.gradient_average is True
    engine.gradient_average = True
    if stage == 3:
        with pytest.raises(ValueError, match="stage 3"):
            engine.gradient_average = False
        return
    norms, lr = [], engine.optimizer.param_groups[0]["lr"]
    for average in (True, False, True):
        engine.gradient_average = average
        engine.optimizer.param_groups[0]["lr"] = 0.0  # the weights of every step are the same
        engine.backward(engine(batch(0, 0, dist.get_rank())))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert lr > 0 and norms[0] > 0 and norms[1] == 2 * norms[0] and norms[2] == norms[0]


class Mixed(nn.Module):
    """Layers of three dtypes in one model; autograd casts between them."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 6).to(torch.bfloat16)
        self.plain = nn.Linear(6, 6)
        self.high = nn.Linear(6, 3).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(x.bfloat16()) * self.scale
        return self.high(self.plain(x.float()).double()).square().mean()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_a_model_of_several_dtypes_keeps_them(stage: int) -> None:
    """Every dtype has its own buckets; the result is that of stage 0, which is the optimizer on whole tensors."""
    results = []
    for s in (0, stage):
        torch.manual_seed(0)
        config = config_for(s) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        model = Mixed()
        engine, *_ = deepspeed.initialize(model=model, config=config)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step + 10 * dist.get_rank())
            engine.backward(engine(torch.randn(2, 6, generator=generator)))
            engine.step()
        engine.destroy()
        assert [p.dtype for p in model.parameters()] == [
            torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.float64, torch.float64
        ]  # fmt: skip
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, value in results[0].items():
        torch.testing.assert_close(
            results[1][name], value, rtol=1e-2 if value.dtype == torch.bfloat16 else 1e-5, atol=1e-6
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_gradients_add_up_in_the_dtype_asked_for(stage: int) -> None:
    """`data_types.grad_accum_dtype`: a large gradient, then sixteen of half its last bf16 bit. Added in bf16 they are
    lost one by one, in fp32 none is."""
    sums = {}
    for name in ("bf16", "fp32"):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 17,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": name},
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_optimization": {"stage": stage},
        }
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        for micro in range(17):
            x = torch.full((1, 4), 256.0 if micro == 0 else 1.0)
            engine.backward(engine(x).sum(), scale_wrt_gas=False)
            engine.step()
        sums[name] = -deepspeed.utils.safe_get_full_fp32_param(model.weight)[0, 0].item()
        assert engine.get_global_grad_norm() == 2 * sums[name]
        engine.destroy()
    assert sums == {"bf16": 256.0, "fp32": 272.0}


@distributed(world_size=2)
def test_the_wire_rounds_to_the_dtype_asked_for() -> None:
    """fp32 gradients that travel as bf16 arrive as the mean of what each rank rounded, rounded once."""
    config = config_for(1, clip=0.0) | {"communication_data_type": "bf16"}
    model = nn.Linear(5, 3, bias=False)
    nn.init.ones_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    x = [torch.randn(1, 5, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    engine.backward(engine(x[dist.get_rank()]).sum())
    gradients = [part.expand(3, 5).bfloat16() for part in x]
    expected = ((gradients[0].float() + gradients[1].float()) / 2).bfloat16().float()  # rounded once
    assert torch.equal(deepspeed.utils.safe_get_full_grad(model.weight), expected)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_evaluation_between_steps_changes_nothing(stage: int) -> None:
    results = []
    for evaluate in (False, True):
        engine, *_ = deepspeed.initialize(model=make_zoo(), config=config_for(stage, gas=2))
        losses = []
        for step in range(STEPS):
            for micro in range(2):
                loss = engine(batch(step, micro, dist.get_rank()), uses_sometimes(step, dist.get_rank()))
                losses.append(loss.item())
                if evaluate:
                    engine.eval()
                    with torch.no_grad() if micro else torch.inference_mode():
                        engine(batch(99, 0, 0))
                    engine.train()
                engine.backward(loss)
                engine.step()
        results.append(losses)
        engine.destroy()
    assert results[0] == results[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_backwards_without_a_sum_add_up_in_that_dtype_too(stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
    }
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    with engine.no_sync():
        for value in [256.0] + [1.0] * 15:
            engine.backward(engine(torch.full((1, 4), value)).sum())
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert deepspeed.utils.safe_get_full_fp32_param(model.weight)[0, 0].item() == -272.0
    engine.destroy()
