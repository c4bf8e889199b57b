"""The documented functions between neighbouring stages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.topology import PipeDataParallelTopology, PipelineParallelGrid
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages import p2p
from tests.pool import distributed


@distributed(world_size=4)
def test_stages_send_to_their_neighbours() -> None:
    """Four stages in a ring, each with its own number; then objects."""
    p2p._state.grid = None
    with pytest.raises(PipelineError, match="init_process_groups"):
        p2p.send(torch.ones(1), 1)
    p2p.init_process_groups(PipelineParallelGrid(PipeDataParallelTopology(4, 1)))
    try:
        own = dist.get_rank()
        after, before = (own + 1) % 4, (own - 1) % 4
        found = torch.zeros(3)
        p2p.send(torch.full((3,), float(own)), after, async_op=True)
        p2p.recv(found, before, async_op=True)
        p2p.wait()
        assert found.tolist() == [before] * 3
        if own == 0:
            p2p.send(torch.arange(2), 1)
        elif own == 1:
            found = torch.zeros(2, dtype=torch.int64)
            p2p.recv(found, 0)
            assert found.tolist() == [0, 1]
        with pytest.raises(PipelineError, match="not a neighbour"):
            p2p.send(torch.ones(1), (own + 2) % 4)
        with pytest.raises(PipelineError, match="contiguous"):
            p2p.recv(torch.ones(2, 2).t(), after)
        with pytest.raises(ValueError, match="at least 2 stages"):
            p2p.init_process_groups(PipelineParallelGrid(PipeDataParallelTopology(1, 4)))
    finally:
        p2p._state.grid = None
