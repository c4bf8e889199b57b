"""Names that public trainers import, read, call or replace in an engine and its optimizer."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.base.logging import logger
from deepspeed.compat.module_inject.replace_policy import transpose
from deepspeed.config.constants import PLD_GAMMA, PLD_GAMMA_DEFAULT, PLD_THETA
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.misuse import ENGINE
from deepspeed.parallel.expert.layer import MoE
from deepspeed.transforms.recompute import checkpointing
from deepspeed.zero.tensor_fragment import safe_set_full_fp32_param
from tests.pool import distributed

VALUES = {
    "deepspeed.config.deepspeed_config.ADAM_W_MODE": "adam_w_mode",
    "deepspeed.config.deepspeed_config.ADAM_W_MODE_DEFAULT": True,
    "deepspeed.config.deepspeed_config.TORCH_ADAM_PARAM": "torch_adam",
    "deepspeed.compat.runtime_utils.inf": float("inf"),
    "deepspeed.config.compression_constants.WEIGHT_QUANTIZE_ENABLED": "enabled",
}


def test_constants_and_helpers() -> None:
    for path, value in VALUES.items():
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name) == value
    assert (PLD_THETA, PLD_GAMMA, PLD_GAMMA_DEFAULT) == ("theta", "gamma", 0.001)
    from deepspeed.compat.module_inject.tp_shard import get_shard_size_list
    from deepspeed.engine.engine import MoE as layer

    assert layer is MoE
    assert get_shard_size_list(8, 2) == [4, 4]


def test_keys_of_weight_quantization_are_those_of_the_config() -> None:
    from deepspeed.config import compression_constants as constants
    from deepspeed.config.sections.compression import WeightQuantizationShared

    names = [name for name in vars(constants) if name.startswith("WEIGHT_QUANTIZE_")]
    assert len(names) == 9
    keys = {getattr(constants, name) for name in names} - {"quantize_change_ratio"}
    assert keys <= set(WeightQuantizationShared.model_fields)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4)])
def test_transpose_in_its_own_memory(shape: tuple[int, ...]) -> None:
    data = torch.arange(float(torch.Size(shape).numel())).view(shape)
    expected, memory = data.transpose(-1, -2).clone(), data.data_ptr()
    found = transpose(data)
    assert torch.equal(found, expected) and found.is_contiguous() and found.data_ptr() == memory


def test_the_state_of_random_numbers() -> None:
    before = torch.get_rng_state()
    drawn = torch.rand(4)
    checkpointing._set_cuda_rng_state(before)
    assert torch.equal(torch.rand(4), drawn)


def engine_of(stage: int, *, optimizer: bool = True, **zero: Any) -> DeepSpeedEngine:
    torch.manual_seed(1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **zero},
    }
    if optimizer:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.1}}
    return deepspeed.initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), config=config)[0]


def step(engine: DeepSpeedEngine) -> None:
    engine.backward(engine(torch.ones(2, 8)).square().sum())
    engine.step()


@pytest.mark.parametrize("optimizer", [True, False])
@distributed(world_size=2)
def test_persistent_parameters(optimizer: bool) -> None:
    """A loop that saves whole weights gathers again what should stay gathered."""
    engine = engine_of(3, optimizer=optimizer, stage3_param_persistence_threshold=10)
    found = engine.optimizer.persistent_parameters
    assert {param.ds_numel for param in found} == {8, 2}
    found[0].all_gather(found)
    assert [param.numel() for param in found] == [param.ds_numel for param in found]
    if optimizer:
        step(engine)
        assert [param.numel() for param in found] == [param.ds_numel for param in found]
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=2)
def test_flat_weights_and_their_ranks(stage: int) -> None:
    engine = engine_of(stage, allgather_bucket_size=1000)
    optimizer = engine.optimizer
    assert optimizer.allgather_bucket_size == 1000
    flat, groups = optimizer.bit16_groups_flat, optimizer.real_dp_process_group
    parts = optimizer.parallel_partitioned_bit16_groups
    assert len(flat) == len(groups) == len(parts) > 0
    for whole, part, group in zip(flat, parts, groups, strict=True):
        assert torch.equal(torch.cat(part), whole) and torch.distributed.get_world_size(group) == 2
    weight = engine.module[0].weight
    optimizer.override_loss_scale(4.0)
    assert optimizer.external_loss_scale == 4.0
    expected = torch.full_like(weight, 0.5)
    safe_set_full_fp32_param(weight, expected)
    optimizer.update_lp_params()
    assert torch.equal(weight, expected)
    engine.destroy()


@pytest.mark.parametrize("stage", [0])
@distributed(world_size=2)
def test_an_optimizer_that_comes_later(stage: int) -> None:
    expected, engine = engine_of(stage), engine_of(stage, optimizer=False)
    engine._support_torch_style_backward = True
    assert engine.optimizer is None
    engine._configure_optimizer(lambda params: torch.optim.Adam(params, lr=0.1), engine.module.parameters())
    for _ in range(3):
        step(expected)
        step(engine)
    for own, other in zip(engine.module.parameters(), expected.module.parameters(), strict=True):
        torch.testing.assert_close(own, other)
    with pytest.raises(RuntimeError, match=r"without an optimizer.*initialize\(optimizer=\.\.\.\)"):
        engine._configure_optimizer(torch.optim.SGD(engine.module.parameters(), 0.1))
    engine.destroy()
    expected.destroy()


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "has no effect" in record.getMessage():
            self.lines.append(record.getMessage())


def test_no_engine_calls_what_has_no_effect() -> None:
    for name in set(ENGINE) - {"clip_fp32_gradients"}:
        assert not hasattr(DeepSpeedEngine, name), f"{name} exists: take it out of the table"


@distributed(world_size=1)
def test_replaced_names_without_effect_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told, called = Told(), []
    logger.addHandler(told)
    try:
        engine_of(0).destroy()
        assert told.lines == []
        monkeypatch.setattr(DeepSpeedEngine, "_save_moe_checkpoint", lambda *_: None, raising=False)
        monkeypatch.setattr(DeepSpeedEngine, "clip_fp32_gradients", lambda self: None)
        monkeypatch.setattr(DeepSpeedEngine, "_broadcast_model", lambda self: called.append(self.module))
        monkeypatch.setattr("deepspeed.engine.engine.MoE", nn.Linear, raising=False)
        engine_of(0).destroy()
        engine_of(0).destroy()
    finally:
        logger.removeHandler(told)
    assert len(called) == 2  # honoured
    begins = [line.split(" was replaced")[0] for line in told.lines]
    assert sorted(begins) == [
        "DeepSpeedEngine._save_moe_checkpoint",
        "DeepSpeedEngine.clip_fp32_gradients",
        "deepspeed.engine.engine.MoE",
    ]
    assert any("allreduce=False" in line for line in told.lines)
