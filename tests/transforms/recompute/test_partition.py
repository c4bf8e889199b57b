"""Inputs cut over tensor-parallel ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm.collectives import communicator, process_network
from deepspeed.transforms.recompute import checkpointing as ds
from deepspeed.transforms.recompute.kept_inputs import Arena, KeptInput, KeptInputs
from tests.pool import distributed
from tests.transforms.recompute.models import WIDTH, assert_same_bits, gradients, plain, stack


class Mpu:
    """All ranks are one tensor-parallel group."""

    def get_tensor_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size()


OPTIONS = [
    {},
    {"checkpoint_in_cpu": True},
    {"contiguous_checkpointing": True, "num_checkpoints": 3},
]


@distributed(world_size=2)
@pytest.mark.parametrize("form", ["checkpoint", "non_reentrant_checkpoint"])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_with_partitioned_inputs(form: str, options: dict[str, Any]) -> None:
    before, ds._state = ds._state, ds._CheckpointState()
    try:
        model = stack()
        expected = gradients(model, plain)
        ds.configure(Mpu(), partition_activations=True, **options)
        group = communicator(dist.group.WORLD)
        gathers = group.collectives["all_gather"]
        run = getattr(ds, form)
        for _ in range(2):
            assert_same_bits(gradients(model, run), expected)
        # One gather per region and step: the mask is None and the scale no tensor.
        assert group.collectives["all_gather"] - gathers == 2 * len(model.blocks)
    finally:
        ds._state = before


@distributed(world_size=[2, 3])
def test_each_rank_keeps_its_part(world_size: int) -> None:
    keeper = KeptInputs(communicator(dist.group.WORLD), offload=False, arena=Arena(2))
    for numel in (1, 7, 12):
        whole = torch.arange(numel, dtype=torch.float32).view(1, -1)
        kept = keeper.pack(whole)
        if numel < world_size:
            assert kept is whole
            continue
        part = -(-numel // world_size)
        assert isinstance(kept, KeptInput) and kept.local.numel() == part
        mine = whole.view(-1)[dist.get_rank() * part : (dist.get_rank() + 1) * part]
        assert torch.equal(kept.local[: mine.numel()], mine) and not kept.local[mine.numel() :].any()
        assert torch.equal(keeper.unpack(kept), whole)


@distributed(world_size=2)
def test_integer_inputs_stay_whole() -> None:
    keeper = KeptInputs(communicator(dist.group.WORLD), offload=False, arena=None)
    mask: Tensor = torch.arange(8)
    assert keeper.unpack(keeper.pack(mask)) is mask


@distributed(world_size=2)
def test_ranks_of_an_engine_keep_half_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a model-parallel unit: those that ``tensor_parallel.autotp_size`` made."""
    before, ds._state = ds._state, ds._CheckpointState()
    kept: list[int] = []
    pack = KeptInputs.pack

    def watched(self: KeptInputs, tensor: Tensor) -> Any:
        found = pack(self, tensor)
        kept.append(found.local.nbytes if isinstance(found, KeptInput) else found.nbytes)
        return found

    monkeypatch.setattr(KeptInputs, "pack", watched)
    try:
        model = stack()
        expected = gradients(model, plain)
        section = ds._section_of({"activation_checkpointing": {"partition_activations": True}})
        config = SimpleNamespace(activation_checkpointing_config=section)
        group = communicator(dist.group.WORLD)
        settings = ds.settings_for(config, None, process_network, group)
        with ds.applied(settings):
            assert_same_bits(gradients(model, ds.checkpoint), expected)
        assert kept == [5 * WIDTH * 4 // 2] * len(model.blocks)
    finally:
        ds._state = before
