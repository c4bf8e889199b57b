"""Lightning's DeepSpeed strategy refuses devices other than CUDA when it launches; its own calls on us run on CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from tests.pool import distributed

pytest.importorskip("lightning", reason="the clients extra is not installed")


def strategy(stage: int, precision: str = "32-true") -> Any:
    """A Fabric strategy whose launch was done by the test pool."""
    from lightning.fabric.plugins.precision.deepspeed import DeepSpeedPrecision
    from lightning.fabric.strategies import DeepSpeedStrategy

    made = DeepSpeedStrategy(
        stage=stage,
        parallel_devices=[torch.device("cpu")] * torch.distributed.get_world_size(),
        precision=DeepSpeedPrecision(precision),
    )
    made._format_config()
    made._config_initialized = True
    made.config["train_micro_batch_size_per_gpu"] = 2
    return made


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def started(stage: int, precision: str = "32-true") -> tuple[Any, Any, Any]:
    made = strategy(stage, precision)
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    engine, optimizer, _ = made._initialize_engine(module, optimizer)
    made._deepspeed_engine = engine
    return made, engine, optimizer


def train(made: Any, engine: Any, steps: int = 3) -> list[float]:
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(steps):
        x = made.precision.convert_input(torch.randn(2, 8, generator=draw))
        loss = engine(x).float().square().mean()
        made.precision.backward(loss, engine)
        made.precision.optimizer_step(engine)
        losses.append(loss.item())
    return losses


def test_versions_and_lazy_import() -> None:
    from lightning.fabric.strategies import deepspeed as strategies

    assert strategies._DEEPSPEED_AVAILABLE and strategies._DEEPSPEED_GREATER_EQUAL_0_16


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_strategy_trains(stage: int, precision: str) -> None:
    made, engine, optimizer = started(stage, precision)
    assert engine.zero_optimization_stage() == stage
    assert isinstance(optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
    losses = train(made, engine)
    assert all(loss == loss for loss in losses) and engine.global_steps == 3


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_checkpoint_with_user_state_and_conversion(tmp_path: Path, stage: int) -> None:
    """The strategy's own save and load, and Lightning's conversion to one fp32 file."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    made, engine, optimizer = started(stage)
    train(made, engine)
    made.save_checkpoint(tmp_path / "saved", {"model": engine, "optimizer": optimizer, "epoch": 7})
    went_on = train(made, engine)

    made, engine, optimizer = started(stage)
    state = {"model": engine, "optimizer": optimizer, "epoch": 0}
    made.load_checkpoint(tmp_path / "saved", state)
    assert state["epoch"] == 7
    assert train(made, engine) == went_on
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        out = tmp_path / "whole.pt"
        converted = convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "saved"), str(out))
        names = set(net().state_dict())
        assert set(converted["state_dict"]) == names and converted["epoch"] == 7
        assert set(torch.load(out, weights_only=False)["state_dict"]) == names


@distributed(world_size=2)
def test_module_contexts_and_plain_weights(tmp_path: Path) -> None:
    """Stage 3 builds the module under `zero.Init`; weights of a plain file are loaded by gathers on rank 0."""
    made = strategy(3)
    with made.module_sharded_context():
        module = net()
    assert all(p.numel() == 0 for p in module.parameters())
    source = {name: torch.full_like(value, 0.5) for name, value in net().state_dict().items()}
    made._restore_zero_state(module, {"state_dict": source})
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        assert all(torch.equal(p, source[name]) for name, p in module.named_parameters())


@distributed(world_size=1)
def test_model_summary_counts_partitioned_parameters() -> None:
    with deepspeed.zero.Init():
        module = net()
    assert sum(p.ds_numel for p in module.parameters()) == 280
    assert sum(p.partition_numel() for p in module.parameters()) == 280
