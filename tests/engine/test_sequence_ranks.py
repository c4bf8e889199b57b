"""4 ranks are 2 data-parallel ones with 2 sequence shards each.

A model-parallel unit says so, or `mesh_param`, or the config.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.engine.observers.planned_memory import request_of
from deepspeed.planning.request import answer
from tests.pool import distributed


class SequenceUnit:
    """The object that Transformers and Accelerate pass for Ulysses: it has only sequence groups."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        runs = [dist.new_group([first, first + 1]) for first in (0, 2)]
        self.sequence = runs[rank // 2]

    def get_sequence_parallel_group(self) -> Any:
        return self.sequence

    def get_sequence_parallel_world_size(self) -> int:
        return 2

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank() % 2


class FullUnit(SequenceUnit):
    def __init__(self) -> None:
        super().__init__()
        strided = [dist.new_group([first, first + 2]) for first in (0, 1)]
        self.data = strided[dist.get_rank() % 2]

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // 2


UNITS = {
    "sequences only": lambda: {"mpu": SequenceUnit()},
    "data and sequences": lambda: {"mpu": FullUnit()},
    "mesh_param": lambda: {"mesh_param": (2, 2)},
    "config": dict,
}


def start(unit: str, stage: int = 2, **config: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    (
        engine,
        *_,
    ) = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_batch_size": 24,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **({"sequence_parallel_size": 2} if unit == "config" else {}),
            **config,
        },
        **UNITS[unit](),
        training_data=torch.arange(64.0).view(16, 4),
    )
    return engine


@pytest.mark.parametrize("unit", UNITS)
@distributed(world_size=4)
def test_every_number_counts_data_parallel_ranks(unit: str) -> None:
    engine = start(unit)
    assert (engine.world_size, engine.dp_world_size, engine.seq_dp_world_size) == (4, 2, 4)
    assert (engine.get_sequence_parallel_world_size(), engine.get_sequence_parallel_rank()) == (
        2,
        dist.get_rank() % 2,
    )
    assert (engine.get_data_parallel_world_size(), engine.get_data_parallel_rank()) == (
        2,
        dist.get_rank() // 2,
    )
    assert (engine.get_tensor_parallel_world_size(), engine.get_tensor_parallel_rank()) == (1, 0)
    assert (engine.get_pipeline_parallel_world_size(), engine.get_pipeline_parallel_rank()) == (1, 0)
    assert engine.gradient_accumulation_steps() == 6
    for size in (24, 48, 24):
        engine.set_train_batch_size(size)
        assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (size, size // 4)
    engine.set_train_micro_batch_size(5)
    assert engine.train_batch_size() == 5 * 6 * 2
    with pytest.raises(ValueError, match="data-parallel ranks = 5 x 2"):
        engine.set_train_batch_size(24)
    planned = answer(request_of(engine))
    assert (planned.setting.ranks, planned.config.world_size) == (4, 2)  # states over four, data over two
    # Ranks of one sequence get the same samples, and both halves together all of them.
    seen = torch.cat([batch[:, 0] for batch in engine.training_dataloader])
    everyone = [torch.empty_like(seen) for _ in range(4)]
    dist.all_gather(everyone, seen)
    assert torch.equal(everyone[0], everyone[1]) and torch.equal(everyone[2], everyone[3])
    assert set(everyone[0].tolist()).isdisjoint(everyone[2].tolist()) and len(seen) == 8
    assert deepspeed.comm.documented_groups._get_broadcast_src_rank() == 0
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("unit", UNITS)
@distributed(world_size=4)
def test_gradients_are_averaged_over_all_four(unit: str, stage: int, tmp_path: Path) -> None:
    engine = start(unit, stage, train_batch_size=4)
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    shares = [torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    for _ in range(3):
        engine.backward(engine(shares[dist.get_rank()]).square().mean())
        engine.step()
        (sum(plain(share).square().mean() for share in shares) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.global_samples == 12
    engine.save_checkpoint(str(tmp_path))
    again = start(unit, stage, train_batch_size=4)
    assert again.load_checkpoint(str(tmp_path))[0] is not None
    for restored in (engine, again):
        restored.destroy()
        for param, expected in zip(restored.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param, expected)


@distributed(world_size=4)
def test_sequences_of_far_ranks_need_more_groups() -> None:
    class Strided(SequenceUnit):
        def __init__(self) -> None:
            pairs = [dist.new_group([first, first + 2]) for first in (0, 1)]
            self.sequence = pairs[dist.get_rank() % 2]

    model = nn.Linear(4, 3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="get_data_parallel_group"):
        deepspeed.initialize(model=model, mpu=Strided(), config={"train_micro_batch_size_per_gpu": 1})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
