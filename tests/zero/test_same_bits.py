"""Gradients that are summed in fp64: the same bits on any number of ranks, if every rank takes micro-batches of one
size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests import pool

ROWS, MICRO, STEPS = 16, 4, 12
HOST = {"device": "cpu"}
WIDE = {"data_types": {"grad_accum_dtype": "fp64"}, "communication_data_type": "fp64"}
RUNS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 1, bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "stage 2": {"zero_optimization": {"stage": 2}},
    "stage 2, host": {"zero_optimization": {"stage": 2, "offload_optimizer": HOST}},
    "stage 3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "stage 3, host": {"zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}},
    "stage 2, Lamb": {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-2}},
    },
}


def trained(sums: dict[str, Any], run: str) -> Tensor:
    """Weights after some clipped steps over rows that are dealt to the ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(50, 32), nn.Flatten(), nn.Linear(256, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 50)
    )
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.1,
        "steps_per_print": None,
    }
    engine = deepspeed.initialize(model=model, config=config | sums | RUNS[run])[0]
    own = ROWS // dist.get_world_size()
    mine = slice(dist.get_rank() * own, (dist.get_rank() + 1) * own)
    draw = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        ids = torch.randint(50, (ROWS, 8), generator=draw)[mine]
        labels = torch.randint(50, (ROWS,), generator=draw)[mine]
        for inputs, targets in zip(ids.split(MICRO), labels.split(MICRO), strict=True):
            engine.backward(nn.functional.cross_entropy(engine(inputs).float(), targets))
            engine.step()
    assert engine.global_steps == STEPS
    found = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    engine.destroy()
    return torch.cat([param.detach().flatten() for param in found])


def on_ranks(count: int, sums: dict[str, Any], run: str) -> Tensor:
    return pool.run(trained, count, sums=sums, run=run)[0]


@pytest.mark.parametrize("run", RUNS)
def test_ranks_and_stages_have_the_same_bits(run: str) -> None:
    one = on_ranks(1, WIDE, run)
    for count in (2, 4):
        assert torch.equal(on_ranks(count, WIDE, run), one)
    if RUNS[run].keys() <= {"zero_optimization"}:
        assert torch.equal(one, on_ranks(1, WIDE, "stage 0"))


def test_sums_in_fp32_depend_on_the_ranks() -> None:
    """So that the test above tests something."""
    one, two = (on_ranks(count, {}, "stage 0") for count in (1, 2))
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-4)
    assert not torch.equal(two, one)
