"""The table of ways to train: what is possible, what fits, and that the fastest is the fastest."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed.planning.activations import shape_of
from deepspeed.planning.machine import Capacity
from deepspeed.planning.model_split import ModelSplit
from deepspeed.planning.request import PlanRequest, answer
from deepspeed.planning.step_time import parallel
from deepspeed.planning.step_time.hardware import NETWORKS, device, network
from deepspeed.planning.step_time.layout_search import LayoutRanking, LayoutSearch, ParallelLayout
from deepspeed.planning.step_time.parallel import ParallelJob, seconds_of
from deepspeed.planning.step_time.shapes import build_shape, shape_flops
from deepspeed.planning.step_time.work import flops_by_call

GIB = 2**30


def request(model: str, ranks: int, nodes: int, **more: Any) -> PlanRequest:
    with torch.device("meta"):
        module = build_shape(model).to(torch.bfloat16)
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_accumulation_steps": more.pop("gas", 1),
        "zero_optimization": {"stage": more.pop("stage", 3)},
    }
    return PlanRequest(
        module=module,
        config=config,
        ranks=ranks,
        nodes=nodes,
        shape=shape_of(module.config),
        micro_batch=1,
        **{"sequence": 2048, "capacity": Capacity(80 * 10**9, 1 << 40, None), **more},
    )


def job(asked: PlanRequest, net: str = "NDR", on: str = "H100") -> ParallelJob:
    return ParallelJob(
        network=network(net),
        ranks_per_node=asked.ranks_per_node,
        device=device(on),
        tokens=asked.sequence or 1,
        sequence=asked.sequence or 0,
        shape=asked.shape,
    )


def search(asked: PlanRequest, samples: int, net: str = "NDR") -> LayoutSearch:
    return LayoutSearch(request=asked, job=job(asked, net), samples=samples)


@pytest.fixture(scope="module")
def seventy() -> tuple[LayoutRanking, float]:
    begin = time.process_time()
    asked = request("gpt:70b", 64, 8)
    return search(asked, 64).run(), time.process_time() - begin


def test_seventy_billion(seventy: tuple[LayoutRanking, float]) -> None:
    found, seconds = seventy
    assert seconds < 5
    assert found.best is not None
    fitting = [row for row in found.rows if row.fits]
    assert [row.time.seconds for row in fitting] == sorted(row.time.seconds for row in fitting)
    assert {row.layout for row in found.rows} >= {ParallelLayout(stage=stage) for stage in range(4)}
    whole = next(row for row in found.rows if row.layout == ParallelLayout(stage=0))
    assert not whole.fits
    assert whole.need > 16 * 69e9


def test_the_table(seventy: tuple[LayoutRanking, float]) -> None:
    found, _ = seventy
    lines = found.lines()
    assert lines[0] == "a step of 64 samples (131,072 tokens), fastest fitting first (predicted):"
    assert lines[-1] == f"fastest that fits: {found.best.layout}"  # type: ignore[union-attr]
    rows = found.as_json()
    assert [row["way"] for row in rows] == [str(row.layout) for row in found.rows]
    shape = request("gpt:70b", 64, 8).shape
    assert shape is not None
    at_best = 3 * shape_flops(shape, 64 * 2048) / (64 * 989e12)
    assert all(row["seconds"] > at_best for row in rows)  # no device computes faster than it can


def test_every_axis_is_tried() -> None:
    asked = request("gpt:7b", 16, 2, sequence=32768)
    layouts = list(search(asked, 32).layouts())
    assert {layout.stage for layout in layouts} == {0, 1, 2, 3}
    assert {layout.tensor for layout in layouts} == {1, 2, 4, 8}
    assert {layout.stages for layout in layouts} >= {1, 2, 4}
    assert {layout.sequence for layout in layouts} >= {1, 2, 4, 8}
    assert {layout.offload for layout in layouts} == {0, 1, 2}
    assert all(layout.stage <= 1 for layout in layouts if layout.stages > 1)
    assert all(layout.stage == 3 for layout in layouts if layout.offload == 2)
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        assert 16 % layout.model_ranks == 0
        # Otherwise there is no rank to share with.
        assert layout.stage == 0 or layout.offload or layout.tensor * layout.stages < 16


def test_processors_have_nothing_to_offload_to() -> None:
    asked = replace(request("gpt:10m", 2, 1, sequence=256), device_type="cpu")
    assert {layout.offload for layout in search(asked, 4).layouts()} == {0}


# What a rank has ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_parts_are_the_whole(tensor: int, stages: int) -> None:
    """Matrices are cut, every parameter is on one stage."""
    asked = request("gpt:8x128x4x512", 4, 1, stage=0)
    whole = answer(asked).setting.model
    vectors = sum(spec.numel for spec in whole.specs if spec.numel <= 128)
    numel = 0
    for stage in range(stages):
        part = answer(replace(asked, ranks=1, split=ModelSplit(tensor=tensor, stages=stages, stage=stage)))
        numel += part.setting.model.numel
        assert part.setting.model.trained == len(part.setting.model.specs)
        assert sorted({i for call in part.setting.model.calls for i in call}) == list(
            range(len(part.setting.model.specs))
        )
    assert numel == (whole.numel - vectors) // tensor + vectors


def test_operations_by_the_closed_formula() -> None:
    asked = request("gpt:8x128x4x512", 1, 1)
    model = answer(asked).setting.model
    found = flops_by_call(asked.module, model, 100)
    assert sum(found) == pytest.approx(shape_flops(asked.shape, 100), rel=0.01)  # type: ignore[arg-type]
    half = answer(replace(asked, split=ModelSplit(tensor=2))).setting.model
    assert sum(flops_by_call(asked.module, half, 100)) == pytest.approx(sum(found) / 2)
    with_scores = flops_by_call(asked.module, model, 100, 50, asked.shape)
    assert sum(with_scores) - sum(found) == 2 * 100 * 50 * 128 * 8


def test_tied_heads_are_counted_and_lookups_are_not() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(1000, 8)
            self.layer = torch.nn.Linear(8, 8, bias=False)

    module = Tied()
    model = answer(PlanRequest(module=module, config={}, ranks=1)).setting.model
    assert sum(flops_by_call(module, model, 10)) == 2 * 10 * (1000 * 8 + 64)


# How long it takes ----------------------------------------------------------------------------------------------


def seconds(
    model: str, layout: ParallelLayout, samples: int, ranks: int = 8, nodes: int = 1, net: str = "NDR"
) -> float:
    asked = request(model, ranks, nodes)
    at = search(asked, samples, net)
    row = at._planned(layout)
    assert row is not None
    return row.time.seconds


def test_a_pipeline_has_its_bubble() -> None:
    """With a network that costs nothing, p stages and m micro-batches take (m + p - 1) / m as long as no bubble."""
    model = "gpt:32x1024x16x256"
    few = seconds(model, ParallelLayout(stage=0, stages=4), 8)  # 4 micro-batches on 2 replicas
    many = seconds(model, ParallelLayout(stage=0, stages=4), 64)  # 32
    per_batch = many / 32
    assert few == pytest.approx(per_batch * 32 / 35 * 7, rel=0.1)


def test_more_ranks_are_faster_on_a_fast_network() -> None:
    for layout in (ParallelLayout(stage=1), ParallelLayout(stage=3)):
        assert seconds("gpt:1.3b", layout, 64, ranks=16, nodes=2) < seconds("gpt:1.3b", layout, 64, ranks=8)


def test_tensor_parallelism_between_nodes_waits() -> None:
    slow = seconds("gpt:1.3b", ParallelLayout(stage=0, tensor=8), 8, ranks=8, nodes=8, net="10GbE")
    fast = seconds("gpt:1.3b", ParallelLayout(stage=0, tensor=8), 8, ranks=8)
    assert slow > 10 * fast


def test_long_accumulation_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all micro-batches were simulated."""
    asked = request("gpt:4x256x4x512", 4, 1, gas=12)
    found = answer(asked)
    at = job(asked)
    short = seconds_of([found], at, ParallelLayout()).seconds
    monkeypatch.setattr(parallel, "SIMULATED", 100)
    assert seconds_of([found], at, ParallelLayout()).seconds == pytest.approx(short, rel=1e-3)


def test_experts_that_are_called_in_parts() -> None:
    asked = request("gpt:4x256x4x512", 4, 1)
    found = answer(asked)
    plain = seconds_of([found], job(asked, "10GbE"), ParallelLayout())
    spread = seconds_of([found], job(asked, "10GbE"), ParallelLayout(experts=4))
    assert spread.seconds > plain.seconds


def test_names_of_networks() -> None:
    assert network("ndr") is NETWORKS["ndr"]
    assert network("100Mbit").rate == 12.5e6
    assert all(each.source for each in NETWORKS.values())


def test_what_a_rank_has_of_the_logits() -> None:
    shape = request("gpt:7b", 1, 1).shape
    assert shape is not None
    assert ModelSplit(stages=2, stage=0).local_shape(shape).vocabulary == 0
    assert ModelSplit(tensor=2, stages=2, stage=1).local_shape(shape).vocabulary == -(-shape.vocabulary // 2)
