"""Moments in 8 bits and bfloat16 masters in the engine: no result depends on ranks, stage or offloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.zero.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
)
from tests.pool import distributed, run
from tests.zero.models import make_zoo

STATES = ("exp_avg", "exp_avg_sq")


def config_for(stage: int, masters: bool, **zero: Any) -> dict[str, Any]:
    small: dict[str, Any] = {"state_bits": 8, "stochastic_rounding": masters}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, **small}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": masters},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **zero},
        "zero_force_ds_cpu_optimizer": False,
    }


def start(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return deepspeed.initialize(model=make_zoo(width=48), config=config)[0]


def train(engine: Any, steps: range) -> list[float]:
    """The same batch on every rank, so that gradients do not depend on how many there are."""
    losses = []
    for step in steps:
        ids = torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = engine(ids, step % 2 == 0)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def contents(engine: Any) -> dict[str, Tensor]:
    """Masters and moments by name."""
    found: dict[str, Tensor] = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad or name == "nothing":
            continue
        found[name] = safe_get_full_fp32_param(param).float().clone()
        for key in STATES:
            value = safe_get_full_optimizer_state(param, key)
            assert value.dtype is torch.float32
            assert value.shape == found[name].shape
            found[f"{key} of {name}"] = value
    return found


def trained(config: dict[str, Any], steps: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = start(config)
    losses = train(engine, range(steps))
    found = contents(engine)
    engine.destroy()
    return losses, found


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("masters", [True, False], ids=["bf16-masters", "fp32-masters"])
def test_equal_bits_whatever_the_ranks_and_the_stage(masters: bool, tmp_path: Path) -> None:
    losses, expected = run(trained, 1, config=config_for(1, masters), steps=4)[0]
    assert len(set(losses)) == 4
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "sub_group_size": 700}
    others = [
        (2, 1, {}),
        (4, 2, {}),
        (2, 3, {}),
        (2, 2, {"offload_optimizer": {"device": "cpu"}}),
        (2, 2, {"offload_optimizer": {"device": "cpu", "super_offload": True}}),
        (2, 3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        (2, 3, nvme),
    ]
    for ranks, stage, zero in others:
        config = config_for(stage, masters, **zero)
        for found, values in run(trained, ranks, config=config, steps=4):
            assert found == losses, (ranks, stage, zero)
            assert_same(values, expected)


def test_stage_0_equals_the_others() -> None:
    losses, expected = run(trained, 1, config=config_for(1, True), steps=4)[0]
    for ranks in (1, 2):
        found, values = run(trained, ranks, config=config_for(0, True), steps=4)[0]
        assert found == losses
        assert_same(values, expected)


def _save(config: dict[str, Any], folder: str) -> None:
    engine = start(config)
    train(engine, range(3))
    engine.save_checkpoint(folder, tag="there")


def _load(config: dict[str, Any], folder: str) -> tuple[list[float], dict[str, Tensor]]:
    engine = start(config)
    engine.load_checkpoint(folder, tag="there")
    return train(engine, range(3, 5)), contents(engine)


@pytest.mark.parametrize("masters", [True, False], ids=["bf16-masters", "fp32-masters"])
def test_checkpoints_continue_to_the_bit_on_any_number_of_ranks(masters: bool, tmp_path: Path) -> None:
    losses, expected = run(trained, 1, config=config_for(1, masters), steps=5)[0]
    run(_save, 2, config=config_for(2, masters), folder=str(tmp_path))
    for ranks, stage in ((1, 1), (4, 2), (2, 3)):
        found, values = run(_load, ranks, config=config_for(stage, masters), folder=str(tmp_path))[0]
        assert found == losses[3:]
        assert_same(values, expected)


def test_a_checkpoint_of_adam_in_fp32_is_taken_over_and_back(tmp_path: Path) -> None:
    wide = config_for(2, False)
    del wide["optimizer"]["params"]["state_bits"], wide["optimizer"]["params"]["stochastic_rounding"]
    run(_save, 2, config=wide, folder=str(tmp_path / "wide"))
    expected = run(_load, 1, config=wide, folder=str(tmp_path / "wide"))[0][0]
    found = run(_load, 1, config=config_for(1, False), folder=str(tmp_path / "wide"))[0][0]
    assert found == pytest.approx(expected, rel=0.03)
    run(_save, 2, config=config_for(2, False), folder=str(tmp_path / "small"))
    back = run(_load, 1, config=wide, folder=str(tmp_path / "small"))[0][0]
    assert back == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_single_states_are_read_and_written(stage: int) -> None:
    engine = start(config_for(stage, True))
    train(engine, range(2))
    param = engine.module.blocks[0].up.weight
    for key in STATES:
        old = safe_get_full_optimizer_state(param, key)
        safe_set_full_optimizer_state(param, old, key)
        assert torch.equal(safe_get_full_optimizer_state(param, key), old)
        safe_set_full_optimizer_state(param, old * 4, key)  # of the root a factor of 2: exact
        assert torch.equal(safe_get_full_optimizer_state(param, key), old * 4)
    train(engine, range(2, 3))


@distributed(world_size=2)
def test_the_memory_that_it_takes() -> None:
    """Weights, gradients and states of this rank, counted: 6 bytes per parameter, the scales and padding."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
    config = config_for(2, True)
    engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 256)).float().square().mean())
        engine.step()
    core = engine.core
    numel = sum(owned.fragment.numel for owned in core.store.fragments)
    assert numel == 4 * 256 * 256 // dist.get_world_size()
    assert all(owned.low is None for owned in core.store.fragments)  # the weight is its own master
    states = [t for o in core.store.fragments for k, t in core.store.state_of(o).items() if k != "step"]
    weights = sum(owned.master.element_size() * owned.master.numel() for owned in core.store.fragments)
    gradients = sum(bucket.dtype.itemsize * bucket.layout.shard_numel for bucket in core.reducer.buckets)
    nbytes = weights + gradients + sum(t.numel() * t.element_size() for t in states)
    assert nbytes == numel * (6 + 8 / 256)


@distributed(world_size=1)
def test_columns_of_zenflow_would_cut_blocks() -> None:
    with pytest.raises(
        DeepSpeedConfigError, match="zenflow.*cannot be combined with optimizer.params.state_bits"
    ):
        start(config_for(2, False, offload_optimizer={"device": "cpu"}, zenflow={}))


def test_what_does_not_fit_together_is_refused() -> None:
    for change, text in (
        ({"bf16": {"enabled": True}}, "bf16_master_weights_and_grads"),
        ({"bf16": {"enabled": False}}, "bf16_master_weights_and_grads"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=text):
            deepspeed.config.deepspeed_config.DeepSpeedConfig({**config_for(1, True), **change})
    config = config_for(1, True)
    config["bf16"]["bf16_optimizer_states"] = True
    with pytest.raises(DeepSpeedConfigError, match="state_bits"):
        deepspeed.config.deepspeed_config.DeepSpeedConfig(config)
