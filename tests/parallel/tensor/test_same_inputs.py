"""Ranks that share layers and get different batches raise an error, or warn once."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.engine.observers.same_inputs import differing_inputs
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from tests.parallel.tensor.blocks import tensor_parallel
from tests.parallel.tensor.test_with_engine import Unit, config
from tests.pool import distributed


class Net(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up: nn.Module = nn.Linear(4, 6)
        self.down: nn.Module = nn.Linear(6, 1)
        if group is not None:
            self.up, self.down = LinearLayer(self.up, group), LinearAllreduce(self.down, group)

    def forward(self, values: Tensor, extra: dict[str, list[Tensor]] | None = None) -> Tensor:
        return self.down(self.up(values)).square().mean()


@distributed(world_size=3)
def test_names_and_ranks() -> None:
    group, rank = tensor_parallel().communicator("tp"), dist.get_rank()

    def forward(tokens: Tensor, mask: Tensor | None = None, **more: object) -> None: ...

    tokens, odd = torch.arange(4), torch.full((2,), float(rank == 1)).bfloat16()
    assert differing_inputs(forward, (tokens,), {"mask": torch.ones(2)}, group) == {}
    found = differing_inputs(forward, (tokens,), {"mask": odd, "more": {"a": [tokens, odd]}}, group)
    assert found == {"mask": [1], "more['more']['a'][1]": [1]}
    shapes = differing_inputs(forward, (torch.zeros(1, 2 + rank),), {}, group)
    assert shapes == {"tokens": [1, 2]}
    given = {} if rank == 2 else {"mask": tokens}
    assert differing_inputs(forward, (tokens,), given, group) == {"the arguments": [2]}


@distributed(world_size=2)
def test_an_engine_looks_once() -> None:
    unit, rank = Unit(), dist.get_rank()
    engine = deepspeed.initialize(model=Net(unit.tensor), config=config(1), mpu=unit)[0]
    same, other = torch.ones(2, 4), torch.ones(2, 4) * rank
    engine.eval()
    engine(other)  # only training counts
    engine.train()
    with pytest.raises(AssertionError, match="Data inconsistency within the TP group") as told:
        engine(same, extra={"a": [other]})
    assert isinstance(told.value, ValueError) and "extra['a'][0] (ranks [1])" in told.value.__notes__[0]
    engine(same, extra={"a": [other]})  # it has been told
    engine.destroy()

    foreign = deepspeed.initialize(model=Net(None), config=config(1), mpu=unit)[0]
    with mock.patch("deepspeed.engine.observers.same_inputs.logger.warning") as warn:
        for _ in range(2):
            foreign(other)
    assert sum("values (ranks [1])" in call.args[0] for call in warn.call_args_list) == 1
    foreign.destroy()
