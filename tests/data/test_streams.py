"""Iterable data sets that worker processes read: a resumed run reads each sample once, in the same order."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.data import stream_position
from tests.data.streams import PositionedShards, Shards, loader
from tests.pool import distributed

with_torchdata = pytest.mark.skipif(not stream_position.is_available(), reason="no torchdata")
BOTH = pytest.mark.parametrize("kind", [Shards, PositionedShards])


def rows(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


@with_torchdata
@BOTH
@pytest.mark.parametrize("taken", [1, 7, 10])
def test_workers_continue_where_they_were(kind: type[Shards], taken: int) -> None:
    """Though they had read ahead; with shares that end at different batches, and the draws of a straight run."""
    straight = loader(kind, 2)
    seen = rows(straight)
    assert sorted(row[0] for batch in seen for row in batch) == list(range(23))
    first = loader(kind, 2)
    batches = iter(first)
    assert [next(batches).tolist() for _ in range(taken)] == seen[:taken]
    state = first.state_dict()
    resumed = loader(kind, 2)
    resumed.load_state_dict(state)
    assert repr(resumed.state_dict()) == repr(state)  # it may be saved again before the first batch
    assert rows(resumed) == seen[taken:]
    assert rows(resumed) == rows(straight)  # the next epoch


@with_torchdata
def test_what_was_read_is_not_read_again() -> None:
    """A data set that knows its position provides it: workers that resume read only the rest."""
    first = loader(PositionedShards, 1)
    batches = iter(first)
    for _ in range(9):
        next(batches)
    state = first.state_dict()["workers"]["positions"]
    assert "'next': 18" in repr(state) and first.state_dict()["samples"] == 18


@with_torchdata
def test_another_number_of_workers_is_said(caplog: pytest.LogCaptureFixture) -> None:
    first = loader(Shards, 2)
    next(iter(first))
    resumed = loader(Shards, 1)
    resumed.load_state_dict(first.state_dict())
    assert sorted(row[0] for batch in rows(resumed) for row in batch) == list(range(2, 23))


@BOTH
def test_without_torchdata_batches_are_skipped(kind: type[Shards], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_position, "is_available", lambda: False)
    seen = rows(loader(kind, 2))
    first = loader(kind, 2)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    assert state["workers"] is None
    resumed = loader(kind, 2)
    resumed.load_state_dict(state)
    assert rows(resumed) == seen[3:]


@with_torchdata
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_and_resumed(world_size: int, tmp_path: Path) -> None:
    """SIGKILL while a batch is taken but not used, twice: all ranks together read every sample once, in order."""
    program = [sys.executable, "-m", "tests.data.streams", str(tmp_path), str(world_size)]
    for dies_after in (3, 2, 1000):
        ranks = [subprocess.Popen([*program, str(rank), str(dies_after)]) for rank in range(world_size)]
        codes = {rank.wait(120) for rank in ranks}
        assert codes == {0 if dies_after == 1000 else -signal.SIGKILL}
    found = [(tmp_path / f"rows{rank}").read_text().splitlines() for rank in range(world_size)]
    for rank in range(world_size):
        straight = rows(loader(PositionedShards, 2, world_size, rank))
        assert found[rank] == [str(row) for batch in straight for row in batch]
    assert sum(map(len, found)) == 23


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (batch.float() * self.scale).mean()


@with_torchdata
@distributed(world_size=2)
def test_an_engine_saves_and_loads_the_position(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()

    def build() -> Any:
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine = deepspeed.initialize(model=Reader(), config=config)[0]
        engine.training_dataloader = loader(PositionedShards, 2, 2, rank)
        return engine

    engine = build()
    batches = iter(engine.training_dataloader)
    for _ in range(2):
        engine.backward(engine(next(batches)))
        engine.step()
    engine.save_checkpoint(str(tmp_path))
    rest = rows(map(next, repeat(batches)))  # `iter` would begin the next epoch
    resumed = build()
    resumed.load_checkpoint(str(tmp_path))
    assert rows(resumed.training_dataloader) == rest and len(rest) > 2
    engine.destroy(), resumed.destroy()
