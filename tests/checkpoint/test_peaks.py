"""Saving, loading, exporting and consolidating need almost no memory besides the training state: counted bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.checkpoint.foreign.upstream_export import export_checkpoint
from deepspeed.tools.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from tests.allocations import counted
from tests.checkpoint.models import config, groups
from tests.pool import distributed

ROWS, WIDTH, LAYERS = 2048, 256, 12
LARGEST = ROWS * WIDTH * 4
WHOLE = LARGEST + LAYERS * WIDTH * WIDTH * 4
SMALL = 128 << 10
"""Random states, tables of names, the numbers of a step; a small part of the smallest tensor of the model."""


def engine_of(stage: int, precision: str = "fp32", **zero: Any) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH), *layers)
    ds_config = config(stage, precision)
    ds_config["zero_optimization"] |= zero
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups(model), config=ds_config)
    engine.backward(engine(torch.randint(0, ROWS, (2, 3))).float().square().mean())
    engine.step()
    return engine


NOTHING_KEPT = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_gather_16bit_weights_on_model_save": True,
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_saving_and_loading_copy_nothing(tmp_path, stage):
    engine = engine_of(stage, "bf16", **(NOTHING_KEPT if stage == 3 else {}))
    engine.save_checkpoint(tmp_path)
    with counted(tmp_path) as saving:
        engine.save_checkpoint(tmp_path)
    dist.barrier()
    with counted(tmp_path) as loading:
        engine.load_checkpoint(tmp_path)
    # One gathered bucket of 16-bit weights at a time, to publish them.
    kept = LARGEST // 2 if stage == 3 else 0
    assert saving.peak < SMALL and loading.peak < kept + SMALL


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_state_in_swap_files_is_not_brought_to_memory(tmp_path, stage):
    """ZeRO-Infinity: several intervals per parameter, each mapped from the swap file while it is written or read."""
    (tmp_path / "swap").mkdir(exist_ok=True)
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    zero = {**(NOTHING_KEPT if stage == 3 else {}), "offload_optimizer": nvme, "sub_group_size": 50_000}
    engine = engine_of(stage, "bf16", **zero)
    engine.save_checkpoint(tmp_path / "c")
    with counted(tmp_path) as saving:
        engine.save_checkpoint(tmp_path / "c")
    state = sum(4 * 3 * index.numel for index, _ in engine.state_access.shards())
    names = [index.name for index, _ in engine.state_access.shards()]
    assert len(names) > len(set(names)) and state > 10 * SMALL
    dist.barrier()
    with counted(tmp_path) as loading:
        engine.load_checkpoint(tmp_path / "c")
    kept = LARGEST // 2 if stage == 3 else 0
    assert saving.peak < SMALL and loading.peak < kept + SMALL


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@distributed(world_size=2)
def test_a_sharded_model_is_saved_with_one_tensor_in_memory(tmp_path, name):
    """The goal is two tensors above the steady state, on every rank."""
    engine = engine_of(3, **NOTHING_KEPT)
    with counted() as saving:
        assert engine.save_16bit_model(tmp_path, name)
    assert LARGEST // 2 < saving.peak <= LARGEST + SMALL < WHOLE // 2
    assert saving.kept < SMALL


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_files_are_converted_one_tensor_at_a_time(tmp_path, stage):
    engine_of(stage, "bf16").save_checkpoint(tmp_path / "own")
    if dist.get_rank():
        return
    for safe in (False, True):
        with counted(tmp_path) as converting:
            convert_zero_checkpoint_to_fp32_state_dict(
                tmp_path / "own", tmp_path / "out", safe_serialization=safe
            )
        assert LARGEST // 2 < converting.peak <= LARGEST + SMALL
    for target in range(4):
        with counted(tmp_path) as exporting:
            export_checkpoint(tmp_path / "own", tmp_path / f"stage{target}", zero_stage=target, world_size=2)
        assert exporting.peak <= LARGEST + SMALL


def test_the_count_sees_what_is_allocated_and_freed():
    with counted() as block:
        kept = [torch.empty(1000)]
        torch.empty(5000)
        torch.empty(3000).neg()  # two of them at once
    assert (block.peak, block.kept, len(kept)) == (28000, 4000, 1)


def test_a_mapped_file_is_no_allocation(tmp_path: Path):
    torch.save(torch.zeros(100_000), tmp_path / "t.pt")
    with counted(tmp_path) as block:
        loaded = torch.load(tmp_path / "t.pt", mmap=True)
    assert block.peak < 1000 and loaded.numel() == 100_000
