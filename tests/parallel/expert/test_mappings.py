"""Tokens divided among tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm import documented_groups as groups
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.parallel.expert.sharded_moe import drop_tokens, gather_tokens
from tests.pool import distributed


@pytest.mark.parametrize("dim", [0, 1])
@distributed(world_size=4)
def test_each_rank_takes_a_part(dim: int) -> None:
    mesh = ProcessMesh.build(dp=2, tp=2)
    groups.set_mesh(mesh)
    try:
        place = dist.get_rank() % 2
        whole = torch.arange(24.0).view(4, 6).requires_grad_()
        own = drop_tokens(whole, dim)
        assert torch.equal(own, whole.chunk(2, dim)[place])
        joined = gather_tokens(own * (place + 1), dim)
        wanted = torch.cat([part * (number + 1) for number, part in enumerate(whole.chunk(2, dim))], dim)
        assert torch.equal(joined, wanted)
        factor = torch.arange(24.0).view(4, 6)
        (mine,) = torch.autograd.grad((joined * factor).sum(), whole)
        (theirs,) = torch.autograd.grad((wanted * factor).sum(), whole)
        assert torch.equal(mine, theirs)
        with pytest.raises(
            AssertionError, match="3 tokens in dim 0 cannot be divided among 2 tensor-parallel"
        ):
            drop_tokens(torch.zeros(3, 2))
    finally:
        groups.set_mesh(None)


def test_one_rank_has_all() -> None:
    whole = torch.randn(3, 2)
    assert drop_tokens(whole) is whole and gather_tokens(whole) is whole
