"""Checkpoints with experts that DeepSpeed 0.19.8 wrote (``make_upstream_checkpoints.py`` made them)."""

from __future__ import annotations

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.parallel.expert.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.parallel.expert.make_upstream_checkpoints import CASES, FIXTURES, config, loss_of, model
from tests.pool import distributed


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("stage", "ep_size", "grouped"), [(0, 2, True), (2, 2, False), (1, 1, True), (3, 2, False)]
)
@distributed(world_size=2)
def test_continues_like_that_release(case: str, stage: int, ep_size: int, grouped: bool) -> None:
    """Weights are those that were saved, and after one more step those that the release had after it."""
    expected, rank = torch.load(FIXTURES / case / "expected.pt"), dist.get_rank()
    net = model(ep_size)
    groups = [{"params": list(net.parameters())}]
    if grouped:
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    engine = deepspeed.initialize(model=net, model_parameters=groups, config=config(stage))[0]
    _, client = engine.load_checkpoint(FIXTURES / case)
    assert client == {} and engine.global_steps == 3
    for when in ("before", "after"):
        if when == "after":
            engine.backward(loss_of(engine, 3, rank))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(net.parameters())):
            for name, param in net.named_parameters():
                torch.testing.assert_close(param.detach(), expected[when][name], rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("case", CASES)
def test_whole_weights(case: str) -> None:
    expected = torch.load(FIXTURES / case / "expected.pt")["before"]
    found = get_fp32_state_dict_from_zero_checkpoint(FIXTURES / case)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=0.0)
