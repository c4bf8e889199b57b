"""Two kinds of weights: dense ones on all ranks, experts on every second one, against one process that has them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from tests.pool import distributed

WIDTH, EXPERTS, STEPS = 12, 2, 4
NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


def make_expert(index: int) -> nn.Module:
    torch.manual_seed(100 + index)
    return nn.Linear(WIDTH, WIDTH)


class Layers(nn.Module):
    """Dense, expert, dense. ``experts``: all of them in one process, the local one on a rank."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(experts)

    def forward(self, inputs: Tensor, expert: int = 0, use: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        if use:
            hidden = hidden + self.experts[expert](hidden)
        return self.last(hidden).square().mean()


def on_this_rank(index: int) -> Layers:
    expert = make_expert(index)
    for param in expert.parameters():
        param.allreduce = False
        param.group_name = f"ep_size_{EXPERTS}"
    return Layers([expert])


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def uses(step: int, rank: int) -> bool:
    """In step 2 no rank uses expert 1; the others train on."""
    return not (step == 2 and rank % EXPERTS == 1)


def alone(world: int, clip: float) -> tuple[list[float], Layers]:
    """One process with both experts and the batches of all ranks."""
    model = Layers([make_expert(i) for i in range(EXPERTS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        each = [model(batch(step, r), r % EXPERTS, uses(step, r)) for r in range(world)]
        (sum(each) / world).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, model


def config(stage: int, clip: float, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, **zero, **(NOTHING if stage == 3 else {})},
    }


def train(settings: dict[str, Any]) -> tuple[list[float], Any]:
    rank = dist.get_rank()
    engine = deepspeed.initialize(model=on_this_rank(rank % EXPERTS), config=settings)[0]
    losses = []
    for step in range(STEPS):
        loss = engine(batch(step, rank), 0, uses(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine


def assert_equals_alone(settings: dict[str, Any], *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    losses, engine = train(settings)
    expected, model = alone(world, settings["gradient_clipping"])
    torch.testing.assert_close(losses, [each[rank] for each in expected], rtol=rtol, atol=atol)
    wanted = {
        "first": model.first, "last": model.last, "experts.0": model.experts[rank % EXPERTS],
    }  # fmt: skip
    for prefix, module in wanted.items():
        for name, value in module.named_parameters():
            param = engine.module.get_parameter(f"{prefix}.{name}")
            torch.testing.assert_close(
                safe_get_full_fp32_param(param), value.detach(), rtol=rtol, atol=atol, msg=f"{prefix}.{name}"
            )
    engine.destroy()


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=(2, 4))
def test_equals_one_process(world_size: int, stage: int, clip: float) -> None:
    assert_equals_alone(config(stage, clip))


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=4)
def test_offload(stage: int, device: str, tmp_path: Any) -> None:
    where = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    more = {"offload_param": where} if stage == 3 else {}
    assert_equals_alone(config(stage, 0.05, offload_optimizer=where, **more))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=4)
def test_bf16(stage: int) -> None:
    assert_equals_alone({**config(stage, 0.05), "bf16": {"enabled": True}}, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("size", [1, 2])
@distributed(world_size=4)
def test_mics(size: int) -> None:
    assert_equals_alone(config(3, 0.05, mics_shard_size=size))


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=4)
def test_optimizers_that_join_ranks(stage: int, name: str) -> None:
    """Their sums and matrices are those of the ranks that hold the same weights: every stage equals stage 0."""

    def settings(stage: int) -> dict[str, Any]:
        return {**config(stage, 0.05), "optimizer": {"type": name, "params": {"lr": 1e-2}}}

    expected, reference = train(settings(0))
    losses, engine = train(settings(stage))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    engine.destroy(), reference.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=4)
def test_state_by_parameter_and_the_first_broadcast(stage: int) -> None:
    rank = dist.get_rank()
    model = on_this_rank(rank % EXPERTS)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(rank // EXPERTS)  # what the second half of the ranks brings does not count
    engine = deepspeed.initialize(model=model, config=config(stage, 0.0))[0]
    weight = engine.module.experts[0].weight
    torch.testing.assert_close(safe_get_full_fp32_param(weight), make_expert(rank % EXPERTS).weight.detach())
    engine.backward(engine(batch(0, rank)))
    engine.step()
    moments = [torch.empty(WIDTH, WIDTH) for _ in range(4)]
    dist.all_gather(moments, safe_get_full_optimizer_state(weight, "exp_avg"))
    assert torch.equal(moments[0], moments[2]) and torch.equal(moments[1], moments[3])
    assert not torch.equal(moments[0], moments[1])
    safe_set_full_fp32_param(weight, torch.full((WIDTH, WIDTH), float(rank % EXPERTS)))
    assert torch.equal(safe_get_full_fp32_param(weight), torch.full((WIDTH, WIDTH), float(rank % EXPERTS)))
    engine.destroy()


@distributed(world_size=4)
def test_a_group_name_that_does_not_fit() -> None:
    model = on_this_rank(0)
    model.experts[0].weight.group_name = "ep_size_3"
    with pytest.raises(
        ValueError, match="group_name='ep_size_3': expected 'ep_size_N', where N divides the 4 ranks"
    ):
        deepspeed.initialize(model=model, config=config(1, 0.0))


@pytest.mark.parametrize(
    ("stage", "later", "mics"), [(0, 2, 0), (1, 0, 0), (2, 3, 0), (3, 1, 0), (3, 3, 2), (0, 0, 0)]
)
@distributed(world_size=4)
def test_checkpoints_hold_every_kind(stage: int, later: int, mics: int, tmp_path: Path) -> None:
    """Each rank resumes with its own expert, whichever stage saved; one of the frozen ones with its own frozen part."""
    rank = dist.get_rank()
    more = {"mics_shard_size": mics} if mics else {}

    def start(stage: int, **zero: Any) -> Any:
        model = on_this_rank(rank % EXPERTS)
        model.experts[0].bias.requires_grad_(False)
        return deepspeed.initialize(model=model, config=config(stage, 0.05, **zero))[0]

    def run(engine: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = engine(batch(step, rank), 0)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    first = start(stage, **more)
    run(first, range(2))
    first.save_checkpoint(tmp_path)
    expected = run(first, range(2, 4))
    first.destroy()

    second = start(later)
    with (
        torch.no_grad(),
        deepspeed.zero.GatheredParameters(list(second.module.parameters()), modifier_rank=0),
    ):
        for param in second.module.parameters():
            param.zero_()
    second.load_checkpoint(tmp_path)
    torch.testing.assert_close(run(second, range(2, 4)), expected, rtol=1e-5, atol=1e-6)
    second.load_checkpoint(tmp_path, load_module_only=True)
    torch.testing.assert_close(run(second, range(2, 3)), expected[:1], rtol=1e-5, atol=1e-6)
    second.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=(2, 4))
def test_exports_hold_all_experts(world_size: int, stage: int, tmp_path: Path) -> None:
    """Stacked, as an export of a checkpoint has them."""
    settings = config(stage, 0.0, stage3_gather_16bit_weights_on_model_save=True)
    engine = deepspeed.initialize(model=on_this_rank(dist.get_rank() % EXPERTS), config=settings)[0]
    engine.save_16bit_model(tmp_path)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    if dist.get_rank() == 0:
        wanted = torch.stack([make_expert(number).weight.detach() for number in range(EXPERTS)])
        assert torch.equal(torch.load(tmp_path / "pytorch_model.bin")["experts.0.weight"], wanted)
        assert torch.equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path)["experts.0.weight"], wanted)
