"""Buffers that each rank has its own values of, as the statistics of BatchNorm do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.checkpoint import names
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.models import config
from tests.pool import distributed, run


def engine_of(stage: int, *, rows: int = 5):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model.register_buffer("alike", torch.arange(3.0))
    model.register_buffer("own", torch.zeros(2, 2))
    engine, _, _, _ = deepspeed.initialize(model=model, config=config(stage, scheduler=None))
    engine.module.get_buffer("own").fill_(dist.get_rank())  # all are rank 0's at first
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(rows, 4, generator=generator)).square().mean())
        engine.step()
    return engine


def buffers(engine) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def spoil(engine) -> None:
    for buffer in engine.module.buffers():
        buffer.fill_(-1)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_each_rank_has_its_own_buffers_back(tmp_path, stage):
    engine = engine_of(stage)
    saved = buffers(engine)
    assert engine.save_checkpoint(tmp_path, tag="t")
    kept = torch.load(tmp_path / "t" / names.buffers_file(dist.get_rank()))["buffers"]
    assert set(kept) == {"own", "1.running_mean", "1.running_var"}, (
        "those that are alike are in the model file"
    )
    for options in ({}, {"load_module_only": True}):
        spoil(engine)
        engine.load_checkpoint(tmp_path, **options)
        assert equal(buffers(engine), saved)


@distributed(world_size=2)
def test_buffers_that_are_alike_need_no_file(tmp_path):
    engine = engine_of(2)
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            buffer.fill_(len(name))
    saved = buffers(engine)
    engine.save_checkpoint(tmp_path, tag="t")
    assert not list((tmp_path / "t").glob("buffers*"))
    spoil(engine)
    engine.load_checkpoint(tmp_path)
    assert equal(buffers(engine), saved)
    engine.module.get_buffer("own").fill_(dist.get_rank())
    engine.save_checkpoint(tmp_path, tag="t")
    assert len(list((tmp_path / "t").glob("buffers*"))) == 2
    engine.module.get_buffer("own").fill_(0)
    engine.save_checkpoint(tmp_path, tag="t")
    assert not list((tmp_path / "t").glob("buffers*")), "the file of the save before is not carried over"


def _save(folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(1)
    engine.save_checkpoint(folder)
    return buffers(engine)


def _load(folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(1)
    spoil(engine)
    engine.load_checkpoint(folder)
    return buffers(engine)


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_takes_those_of_rank_0(tmp_path: Path, world: int) -> None:
    saved = run(_save, 2, folder=str(tmp_path))
    assert not equal(*saved)
    for found in run(_load, world, folder=str(tmp_path)):
        assert equal(found, saved[0])
    whole = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert torch.equal(whole["own"], saved[0]["own"])
