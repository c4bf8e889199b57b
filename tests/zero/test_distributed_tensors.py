"""Models whose parameters are DTensors when ``initialize`` gets them, split by torch's own tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import deepspeed
from deepspeed.checkpoint.placement import placement_of
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.transforms.distributed_tensors import placement_of_dtensor
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.pool import distributed

TP, WIDTH, HIDDEN, STEPS = 2, 6, 9, 3
"""9 columns over 2 ranks: 5 and 4."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.unused = nn.Linear(WIDTH, 2 * TP)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.down(torch.tanh(self.up(self.norm(inputs))))
        return (inputs + made + self.frozen(inputs)).square().mean()


def split(model: Block) -> Block:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))["tp"]
    styles = {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(),
        "unused": ColwiseParallel(),
        "frozen": ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate()),
    }
    parallelize_module(model, mesh, styles)
    model.frozen.requires_grad_(False)
    return model


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica))


def alone(last: int, replicas: int) -> tuple[list[list[float]], list[float], Block]:
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(last):
        each = [model(batch(step, replica)) for replica in range(replicas)]
        (sum(each) / replicas).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, norms, model


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **more,
    }


def train(engine: Any, first: int, last: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, last):
        loss = engine(batch(step, engine.mesh.rank("dp")))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def assert_weights(engine: Any, model: nn.Module, **close: float) -> None:
    whole = dict(model.named_parameters())
    for name, param in engine.module.named_parameters():
        own = safe_get_full_fp32_param(param)
        if own is None:
            continue
        (box,) = placement_of(param).boxes or (tuple((0, size) for size in own.shape),)
        wanted = whole[name].detach()[tuple(slice(*side) for side in box)]
        torch.testing.assert_close(own, wanted, msg=name, **close)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=(2, 4))
def test_distributed_models_train_like_whole_ones(world_size: int, stage: int) -> None:
    engine = deepspeed.initialize(model=split(Block()), config=config(stage))[0]
    assert engine.mesh.size("tp") == TP and engine.dp_world_size == world_size // TP
    losses, norms = train(engine, 0, STEPS)
    expected, expected_norms, model = alone(STEPS, world_size // TP)
    mine = [each[engine.mesh.rank("dp")] for each in expected]
    torch.testing.assert_close(losses, mine, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    assert_weights(engine, model, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_optimizers_of_distributed_parameters_follow(stage: int) -> None:
    model = split(Block())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    settings = config(stage)
    del settings["optimizer"]
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    losses, _ = train(engine, 0, STEPS)
    torch.testing.assert_close(losses, [each[0] for each in alone(STEPS, 1)[0]], rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_checkpoints_and_exports_of_distributed_models(stage: int, tmp_path: Path) -> None:
    engine = deepspeed.initialize(model=split(Block()), config=config(stage))[0]
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    engine.save_16bit_model(tmp_path)
    after, _ = train(engine, 2, 3)
    engine.load_checkpoint(tmp_path)
    assert train(engine, 2, 3)[0] == after
    engine.destroy()
    if dist.get_rank() == 0:
        whole = alone(2, 1)[2].state_dict()
        for found in (
            torch.load(tmp_path / "pytorch_model.bin"),
            get_fp32_state_dict_from_zero_checkpoint(tmp_path),
        ):
            torch.testing.assert_close(dict(found), dict(whole), rtol=1e-5, atol=1e-6)
    dist.barrier()

    plain = deepspeed.initialize(model=Block(), config=config(0))[0]  # two replicas of whole layers
    plain.load_checkpoint(tmp_path)
    loss = plain(batch(2, 0)).item()
    torch.testing.assert_close([loss], after, rtol=1e-5, atol=1e-6)
    plain.destroy()


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_the_module_shows_distributed_tensors(stage: int) -> None:
    engine = deepspeed.initialize(model=split(Block()), config=config(stage))[0]
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    assert isinstance(before["up.weight"], DTensor) and before["up.weight"].shape == (HIDDEN, WIDTH)
    torch.testing.assert_close(before["up.weight"].full_tensor(), Block().up.weight.detach())
    train(engine, 0, 1)
    for given in (before, Block().state_dict()):  # distributed and whole tensors
        with torch.no_grad():
            engine.module.up.weight.zero_()
        engine.load_module_state_dict({"module": given})
        loss, _ = train(engine, 0, 1)
        assert loss == pytest.approx([alone(1, 1)[0][0][0]], rel=1e-5)
    engine.destroy()


@distributed(world_size=2)
def test_a_later_engine_takes_the_parts_again() -> None:
    model = split(Block())
    deepspeed.initialize(model=model, config=config(2))[0].destroy()
    engine = deepspeed.initialize(model=model, config=config(1))[0]
    assert engine.mesh.size("tp") == TP
    losses, norms = train(engine, 0, STEPS)
    expected, expected_norms, _ = alone(STEPS, 1)
    torch.testing.assert_close(losses, [each[0] for each in expected], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    engine.destroy()


@distributed(world_size=4)
def test_what_does_not_fit_is_refused_by_name() -> None:
    settings = config(1)
    with pytest.raises(
        DeepSpeedConfigError, match="4 was given, but the model's parameters are split over 2"
    ):
        deepspeed.initialize(model=split(Block()), config={**settings, "tensor_parallel": {"autotp_size": 4}})
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Block()
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), both, [Shard(1), Shard(0)]))
    with pytest.raises(NotImplementedError, match="up.weight are DTensors over .* one axis"):
        deepspeed.initialize(model=model, config=settings)
    model = Block()
    parallelize_module(model, both["dp"], {"up": ColwiseParallel()})
    with pytest.raises(Exception, match="split the model over neighbouring ranks"):
        deepspeed.initialize(model=model, config=settings)
    assert isinstance(model.up.weight, DTensor)


@distributed(world_size=2)
def test_strided_shards_are_read() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(12 * 3.0).view(12, 3)
    tensor = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2)])
    boxes = placement_of_dtensor(tensor).boxes
    assert len(boxes) == 2
    parts = [whole[tuple(slice(*side) for side in box)] for box in boxes]
    assert torch.equal(torch.cat(parts), tensor.to_local())
