"""The estimators against numbers observed with release 0.19.8, and against what they claim about live models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.compat.zero_memory import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    model_sizes,
)
from tests.pool import distributed

P, L = 1_000_003, 10_007

STAGE_2 = [  # GPUs, nodes, offload, factor -> host, GPU
    ((1, 1, False, 1.0), (4000012, 20000060)),
    ((1, 1, True, 1.5), (24000072, 2000006)),
    ((4, 1, False, 3.0), (48000144, 6500019)),
    ((4, 1, True, 1.0), (16000048, 2000006)),
    ((4, 3, False, 1.5), (24000072, 3500010)),
    ((4, 3, True, 5), (240000720, 2000006)),
]
STAGE_3 = [  # GPUs, nodes, offload optimizer, offload params, zero_init, factor -> host, GPU
    ((1, 1, False, False, False, 1.0), (4000012, 18040082)),
    ((1, 1, False, True, True, 1.5), (60042, 18040082)),
    ((1, 1, True, False, True, 1.0), (16000048, 2040034)),
    ((1, 1, True, True, False, 3.0), (54000162, 40028)),
    ((4, 1, False, False, True, 1.5), (240168, 4540041)),
    ((4, 1, True, False, False, 1.0), (16000048, 540029)),
    ((4, 3, False, False, False, 1.0), (16000048, 1540032)),
    ((4, 3, True, False, True, 1.0), (5333349, 206695)),
    ((4, 3, True, True, False, 1.5), (24000072, 40028)),
    ((4, 3, True, True, True, 1.0), (6000018, 40028)),
]


@pytest.mark.parametrize(("arguments", "expected"), STAGE_2)
def test_stage_2(arguments: tuple, expected: tuple[int, int]) -> None:
    assert estimate_zero2_model_states_mem_needs(P, *arguments) == expected


@pytest.mark.parametrize(("arguments", "expected"), STAGE_3)
def test_stage_3(arguments: tuple, expected: tuple[int, int]) -> None:
    assert estimate_zero3_model_states_mem_needs(P, L, *arguments) == (*expected, 4 * L)


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero3_model_states_mem_needs_all_cold(2851_000_000, 32_000_000, 8, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "HW: Setup with 2 nodes, 8 GPUs per node."
    assert lines[2] == "SW: Model with 2851M total params, 32M largest layer params."
    columns = [[cell.strip() for cell in line.split("|")] for line in lines[4:]]
    assert [row[:2] for row in columns] == [
        ["35.85GB", "0.12GB"],
        ["127.45GB", "0.12GB"],
        ["31.86GB", "0.45GB"],
        ["127.45GB", "0.45GB"],
        ["1.43GB", "3.11GB"],
        ["127.45GB", "3.11GB"],
    ]
    assert columns[2][2] == "offload_param=none, offload_optimizer=cpu , zero_init=1"
    estimate_zero2_model_states_mem_needs_all_cold(2851_000_000, 8, 2)
    assert "254.90GB |   5.31GB | offload_optimizer=cpu" in capsys.readouterr().out


def test_live_equals_cold(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 3000))
        model.append(nn.Linear(1000, 1000))
    model[2].weight = model[0].weight
    assert model_sizes(model) == (4_005_000, 3_003_000)
    estimate_zero3_model_states_mem_needs_all_live(model, 2)
    estimate_zero3_model_states_mem_needs_all_cold(4_005_000, 3_003_000, 2)
    estimate_zero2_model_states_mem_needs_all_live(model, 2)
    estimate_zero2_model_states_mem_needs_all_cold(4_005_000, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:10] == lines[10:20]
    assert lines[20:26] == lines[26:]


@distributed(world_size=2)
def test_partitioned_models_count_whole() -> None:
    with deepspeed.zero.Init():
        model = nn.Linear(100, 30)
    assert model_sizes(model) == (3030, 3030)


def test_documented_paths() -> None:
    from deepspeed.compat import zero_memory as memory
    from deepspeed.zero import optimizer as stage3
    from deepspeed.zero import optimizer as stage_1_and_2

    for name in ("mem_needs", "mem_needs_all_live", "mem_needs_all_cold"):
        for module, stage in ((stage3, 3), (stage_1_and_2, 2)):
            full = f"estimate_zero{stage}_model_states_{name}"
            assert getattr(module, full) is getattr(memory, full)
