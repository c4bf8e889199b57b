"""Compression in an engine: every stage on two ranks as plain PyTorch on one, and resumed in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compression import init_compression, redundancy_clean
from deepspeed.compression.scheduler import compression_scheduler
from deepspeed.compression.techniques import Compressible
from deepspeed.config.sections.compression import get_compression_config
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.compression.models import (
    ACTIVATIONS,
    HEADS_HALF,
    ROWS,
    SNIP,
    WEIGHTS,
    Bert,
    batch,
    config,
    technique,
)
from tests.pool import distributed

STEPS = 6


def asked(stage: int, **more: Any) -> dict[str, Any]:
    return config(
        WEIGHTS,
        ACTIVATIONS,
        SNIP,
        ROWS,
        HEADS_HALF,
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        optimizer={"type": "Adam", "params": {"lr": 0.01}},
        **more,
    )


def start(section: dict[str, Any]) -> Bert:
    torch.manual_seed(7)
    return init_compression(Bert(), section)


def alone(section: dict[str, Any], ranks: int) -> tuple[list[float], Bert]:
    """Losses and model of one process that has all ranks' batches, in plain PyTorch."""
    model = start(section)
    scheduler = compression_scheduler(model, get_compression_config(section))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [model(*batch(step * ranks + rank)) for rank in range(ranks)]
        loss = torch.stack(parts).mean()
        losses.append(float(loss))
        loss.backward()
        pruners: Any = model.pruners
        for pruner in pruners:
            pruner.on_before_optimizer_step()
        optimizer.step()
        for pruner in pruners:
            pruner.on_after_optimizer_step()
        scheduler.step()
    return losses, model


def trained(engine: Any, first: int, last: int) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(first, last):
        loss = engine(*batch(step * ranks + rank))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
    return losses


def engine_of(section: dict[str, Any]) -> Any:
    engine, *_ = deepspeed.initialize(model=start(section), config=section)
    return engine


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_as_one(stage: int, tmp_path: Path) -> None:
    section = asked(stage)
    expected, plain = alone(section, 2)
    engine = engine_of(section)
    query = engine.module.layer[0].attention.self.query
    assert engine.compression_scheduler.training_steps == 0 and query.weight_quantize_bits == 8
    torch.testing.assert_close(trained(engine, 0, 4), expected[:4], rtol=1e-5, atol=1e-6)
    assert query.weight_quantize_bits == 6
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    resumed = engine_of(section)
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    assert resumed.module.layer[0].attention.self.query.weight_quantize_bits == 6
    losses = trained(resumed, 4, STEPS)
    torch.testing.assert_close(losses, expected[4:], rtol=1e-5, atol=1e-6)
    assert losses == trained(engine, 4, STEPS)
    for (name, mask), other in zip(plain.named_buffers(), resumed.module.buffers(), strict=True):
        if name.endswith("mask"):
            assert torch.equal(mask, other) and 0 < int(mask.sum()) < mask.numel()

    check_cleaning(resumed, section)


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (1, {"offload_optimizer": {"device": "cpu"}}),
        (2, {"offload_optimizer": {"device": "nvme"}}),
        (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        (3, {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}),
    ],
)
def test_offloaded_states_and_parameters(
    stage: int, offload: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    section = asked(stage)
    expected, plain = alone(section, 2)
    for name, where in offload.items():
        section["zero_optimization"][name] = {**where, "nvme_path": str(tmp_path)}
    engine = engine_of(section)
    torch.testing.assert_close(trained(engine, 0, 4), expected[:4], rtol=1e-5, atol=1e-6)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    resumed = engine_of(section)
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    losses = trained(resumed, 4, STEPS)
    torch.testing.assert_close(losses, expected[4:], rtol=1e-5, atol=1e-6)
    assert losses == trained(engine, 4, STEPS)
    masks = {name: mask for name, mask in plain.named_buffers() if name.endswith("mask")}
    assert masks
    for name, mask in masks.items():
        assert torch.equal(mask, resumed.module.get_buffer(name)), name


def check_cleaning(engine: Any, section: dict[str, Any]) -> None:
    """The engine's module becomes plain and whole, and computes what it did with the bits at the schedule's end."""
    tokens, _ = batch(99)
    for module in engine.module.modules():
        if isinstance(module, Compressible):
            module.activation_quantization_enabled = False  # no part of a plain module
            module.weight_quantize_bits = 4
    engine.eval()
    with torch.no_grad():
        before = engine(tokens)
        assert redundancy_clean(engine, section) is engine
        assert not any(isinstance(module, Compressible) for module in engine.module.modules())
        assert engine.module.layer[0].intermediate["dense"].weight.shape[0] == 12
        torch.testing.assert_close(engine(tokens), before, rtol=1e-5, atol=1e-6)


def written(stage: int, rounding: str) -> tuple[list[float], Any]:
    section = config(
        technique(
            "weight_quantization",
            ["attention.self"],
            {"start_bits": 6, "target_bits": 4, "quantization_period": 2},
            schedule_offset=1,
            quantize_groups=2,
            rounding=rounding,
        ),
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        optimizer={"type": "Adam", "params": {"lr": 0.01}},
        bf16={"enabled": True},
    )
    engine = engine_of(section)
    return trained(engine, 0, STEPS), engine


@distributed(world_size=2)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_weights_quantized_after_the_update(rounding: str) -> None:
    results = {stage: written(stage, rounding) for stage in (0, 2, 3)}
    assert results[0][0] == results[2][0] == results[3][0]
    query = results[2][1].module.layer[0].attention.self.query
    assert query.weight_quantize_bits == 4
    assert all(half.unique().numel() <= 16 for half in query.weight.detach().view(2, -1))
    assert safe_get_full_fp32_param(query.weight).unique().numel() > 200
    other = query.weight.detach().clone()
    dist.broadcast(other, 0)
    assert torch.equal(other, query.weight)


@distributed(world_size=1)
def test_single_precision_quantizes_in_forward_only() -> None:
    section = config(
        technique("weight_quantization", ["query"], {"start_bits": 8, "target_bits": 8}),
        optimizer={"type": "Adam", "params": {"lr": 0.01}},
    )
    with pytest.raises(ValueError, match="quantize_weight_in_forward=false"):
        engine_of(section)


@distributed(world_size=1)
def test_an_engine_without_prepared_modules_trains_them_as_they_are() -> None:
    section = asked(0)
    model = Bert()
    engine, *_ = deepspeed.initialize(model=model, config=section)
    assert engine.compression_scheduler is None
    with pytest.raises(ValueError, match="too late"):
        init_compression(engine, section)
    engine.destroy()


@distributed(world_size=1)
def test_prepared_modules_need_their_config() -> None:
    model = init_compression(Bert(), config(WEIGHTS))
    with pytest.raises(ValueError, match="init_compression"):
        deepspeed.initialize(model=model, config=config(optimizer={"type": "Adam", "params": {"lr": 0.01}}))


@distributed(world_size=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits(precision: str) -> None:
    section = config(
        WEIGHTS,
        ACTIVATIONS,
        SNIP,
        technique("row_pruning", ["intermediate.dense"], {"dense_ratio": 0.5}, method="l1"),
        optimizer={"type": "Adam", "params": {"lr": 0.01}},
        **{precision: {"enabled": True}},
    )
    engine = engine_of(section)
    losses = []
    for _ in range(8):
        loss = engine(*batch(0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    masks = [buffer for name, buffer in engine.module.named_buffers() if name.endswith("sparse_pruning_mask")]
    assert all(mask.dtype == torch.bool for mask in masks)
    engine.destroy()
