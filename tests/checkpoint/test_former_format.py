"""Checkpoints of former formats still load: 1, which had other checksums and all ranks' random states in every model
file, and 2, whose shard map was gathered from all ranks instead of being computed.

Two ranks wrote those in ``tests/files/format*_checkpoints``: ``models.Zoo`` after some micro-batches, two of which make
a step; ``expected.pt`` is what all ranks held then, and ``random0.pt`` what rank 0 drew next.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.consolidate import consolidate
from tests.checkpoint.models import assert_restored, config, full_state, make_engine
from tests.pool import distributed

DATA = Path(__file__).resolve().parents[1] / "files"


@pytest.mark.parametrize(
    ("saved_at", "precision", "micro_steps"), [(0, "fp32", 2), (2, "fp32", 3), (3, "bf16", 2)]
)
@pytest.mark.parametrize("former", [1, 2])
@distributed(world_size=[1, 2])
def test_checkpoints_of_former_formats_load(saved_at, precision, micro_steps, former, world_size):
    folder = DATA / f"format{former}_checkpoints" / f"stage{saved_at}"
    expected = torch.load(folder / "expected.pt")
    for stage in (saved_at, 1):
        engine = make_engine(config(stage, precision, accumulation=2), seed=9)
        path, client_state = engine.load_checkpoint(str(folder))
        drawn = torch.rand(3)
        assert path == str(folder / "t")
        assert client_state["epoch"] == 3 and client_state["t"].tolist() == [0, 1, 2, 3]
        assert_restored(full_state(engine), expected)
        assert engine.micro_steps == (micro_steps if world_size == 2 else 2)
        assert torch.equal(drawn, torch.load(folder / f"random{dist.get_rank()}.pt"))
    masters = consolidate(folder / "t").materialized()
    assert all(
        torch.equal(masters[n].view(-1), expected[f"{n}/fp32"]) for n in masters if f"{n}/fp32" in expected
    )
