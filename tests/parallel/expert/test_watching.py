"""Curves of experts in the monitors: loads, drops and the time of the exchange."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed import comm as dist
from deepspeed.zero.tensor_fragment import safe_set_full_fp32_param
from tests.parallel.expert.models import EXPERTS, HIDDEN, batch, config, start
from tests.pool import distributed


@distributed(world_size=2)
def test_curves(tmp_path: Path) -> None:
    """All tokens choose expert 0, which has room for a quarter of them. An evaluation in between does not count."""
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    settings = {"k": 1, "drop_tokens": True, "min_capacity": 1}
    engine = start(config(1, csv_monitor=monitor), 2, pyramid=(EXPERTS, 2), **settings)
    gate = engine.module.blocks[0].moe.deepspeed_moe.gate.wg.weight
    safe_set_full_fp32_param(gate, torch.zeros(EXPERTS, HIDDEN))
    with torch.no_grad():
        engine(batch(1, 0))
    engine.backward(engine(batch(0, dist.get_rank())))
    engine.step()
    engine.monitor.close()
    tokens = [batch(0, rank).numel() for rank in range(2)]
    kept = sum(-(-each // EXPERTS) for each in tokens)
    if dist.get_rank() == 0:
        found = {}
        for path in (tmp_path / "job").glob("*.csv"):
            rows = list(csv.reader(path.open()))
            found[path.stem] = float(rows[-1][1])
        curve = "Train_Experts_layer_0_"
        assert found[f"{curve}dropped_share"] == pytest.approx(1 - kept / sum(tokens), abs=1e-6)
        assert found[f"{curve}imbalance"] == EXPERTS and found[f"{curve}expert_0"] == 1.0
        assert found[f"{curve}expert_3"] == 0.0 and "Train_Experts_layer_1_expert_1" in found
        assert found["Train_Experts_exchange_ms"] > 0.0
    engine.destroy()


@distributed(world_size=2)
def test_breakdown_of_times() -> None:
    engine = start(config(0, wall_clock_breakdown=True), 2)
    layer = engine.module.blocks[0].moe.deepspeed_moe
    engine.backward(engine(batch(0, dist.get_rank())))
    assert layer.watch.seconds > 0.0
    engine.step()
    assert layer.watch.seconds == 0.0 and layer.watch.chosen is None
    engine.destroy()


@pytest.mark.parametrize("reentrant", [True, False])
@distributed(world_size=2)
def test_blocks_that_are_checkpointed_count_once(reentrant: bool) -> None:
    def recompute(block: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(block, hidden, use_reentrant=reentrant)

    engine = start(config(1, wall_clock_breakdown=True), 2, recompute=recompute)
    watch = engine.module.blocks[1].moe.deepspeed_moe.watch
    tokens = batch(0, dist.get_rank())
    for _ in range(2):
        engine.backward(engine(tokens))
        assert int(watch.chosen.sum()) == int(watch.kept) == 2 * tokens.numel()
        engine.step()
        assert watch.chosen is None
    engine.destroy()
