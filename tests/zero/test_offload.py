"""Offload changes where state rests and nothing else: the same losses, norms and weights, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import distributed
from tests.zero.models import assert_same, config_for, engine_losses, make_zoo

STEPS = 5


def offloaded(config: dict[str, Any], folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    zero = {**config["zero_optimization"], "sub_group_size": 100}
    for name, section in sections.items():
        path = {"nvme_path": str(folder)} if section["device"] == "nvme" else {}
        zero[name] = {**path, **section}
    return {**config, "zero_optimization": zero}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=[1, 2])
def test_state_on_storage(world_size: int, stage: int, precision: str, tmp_path: Path) -> None:
    config = config_for(stage, gas=2, stage3_param_persistence_threshold=0)
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    expected = engine_losses(make_zoo, config, STEPS, groups=True)
    swapped = offloaded(config, tmp_path, offload_optimizer={"device": "nvme"})
    losses, weights, norms = engine_losses(make_zoo, swapped, STEPS, groups=True)
    assert (losses, norms) == (expected[0], expected[2])
    assert_same(weights, expected[1])
    assert not list(tmp_path.rglob("deepspeed_swap*"))
