"""Simulated steps against times computed by hand and closed formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed.planning.ledger import MemoryPhase
from deepspeed.planning.planner import PlanSetting
from deepspeed.planning.request import PlanRequest, answer
from deepspeed.planning.step_time.fabric import BETWEEN, INSIDE, Costs, Fabric, RankGroup
from deepspeed.planning.step_time.hardware import DEVICES, NetworkSpec
from deepspeed.planning.step_time.step import (
    CollectiveStart,
    CollectiveWait,
    ComputeCall,
    OptimizerUpdate,
    StepMachine,
    StepProgram,
    run,
    step_time,
)
from deepspeed.planning.step_time.work import PlannedExchange, StepWork
from tests.planning.memory.models import NOTHING_KEPT, Gpt, config_for

SLOW = NetworkSpec(name="slow", rate=1e6)
FAST = NetworkSpec(name="fast", rate=1e18)


def setting(config: dict[str, Any], ranks: int = 2, device_type: str = "cuda") -> PlanSetting:
    with torch.device("meta"):
        module = Gpt()
    return answer(PlanRequest(module=module, config=config, ranks=ranks, device_type=device_type)).setting


def machine(network: NetworkSpec = SLOW, per_node: int = 1, **more: Any) -> StepMachine:
    return StepMachine(fabric=Fabric(ranks_per_node=per_node, between=network, inside=FAST, **more))


def work(calls: int, forward: float = 1.0, backward: float = 2.0, **more: Any) -> StepWork:
    return StepWork(forward=[forward] * calls, backward=[backward] * calls, per_element=0.0, **more)


def hand(events: list[Any], update: list[Any], **more: Any) -> float:
    at = setting(config_for(0))
    return run(StepProgram([events], update), at, work(2, **more), machine()).seconds


F0, F1 = ComputeCall(MemoryPhase.FORWARD, 0), ComputeCall(MemoryPhase.FORWARD, 1)
B0, B1 = ComputeCall(MemoryPhase.BACKWARD, 0), ComputeCall(MemoryPhase.BACKWARD, 1)


def test_a_sum_beside_a_backward() -> None:
    """Two forwards of 1, then a backward of 2 whose sum of 2 x 3 s hides behind the second backward but for 4."""
    total = CollectiveStart(0, "all_reduce", 6e6, 2)  # each rank sends 3 MB twice
    assert hand([F0, F1, B1, total, B0, CollectiveWait(0)], []) == 1 + 1 + 2 + max(2, 6)
    assert hand([F0, F1, B1, B0, total, CollectiveWait(0)], []) == 1 + 1 + 2 + 2 + 6
    assert hand([F0, F1, B1, total, CollectiveWait(0), B0], []) == 1 + 1 + 2 + 6 + 2


def test_a_gather_ahead() -> None:
    gathers = [CollectiveStart(0, "all_gather", 4e6, 2), CollectiveStart(1, "all_gather", 4e6, 2)]
    assert hand([*gathers, CollectiveWait(0), F0, CollectiveWait(1), F1], []) == 2 + max(1, 2) + 1
    assert hand([gathers[0], CollectiveWait(0), F0, gathers[1], CollectiveWait(1), F1], []) == 2 + 1 + 2 + 1


def test_an_update_on_shared_processors() -> None:
    at = setting(config_for(0))
    spent = StepWork(forward=[1.0], backward=[2.0], per_element=0.5, contention=2.0)
    found = run(StepProgram([[F0, B0]], [OptimizerUpdate(4)]), at, spent, machine())
    assert found.seconds == found.compute == 2 * (1 + 2 + 2)
    assert found.exposed == 0
    assert found.waits_for == ""
    longer = run(StepProgram([[F0, B0]], [OptimizerUpdate(4)]), at, spent.stretched(1.5), machine())
    assert longer.seconds == 1.5 * found.seconds


def small(at: PlanSetting) -> int:
    """Elements below the threshold of ``NOTHING_KEPT``."""
    return sum(spec.numel for spec in at.model.specs if spec.numel < 1000)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("stage", "ways"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_slow_link_is_all_there_is(stage: int, ways: int, ranks: int) -> None:
    """With nothing to compute a step is what a rank sends, 4 (6 at stage 3) bytes per parameter and (N-1)/N of it,
    by the closed formula of ``link_time``."""
    at = setting(config_for(stage, bf16=True, **(NOTHING_KEPT if stage == 3 else {})), ranks)
    found = step_time(at, work(len(at.model.calls), 0, 0), machine())
    moved = ways * at.model.numel
    if stage == 3:  # the table of tokens is the head, too; what is small is gathered once
        moved += 1000 * 128 - small(at)
    nbytes = 2.0 * moved * (ranks - 1) / ranks
    assert found.seconds == pytest.approx(nbytes / SLOW.rate, rel=0.02)
    assert found.waits_for == BETWEEN


def test_an_infinite_network_leaves_the_arithmetic() -> None:
    for stage in range(4):
        at = setting(config_for(stage, gas=2))
        calls = len(at.model.calls)
        found = step_time(at, work(calls), machine(FAST))
        assert found.seconds == pytest.approx(2 * calls * 3.0, rel=1e-6)
        assert found.exposed == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bounds(stage: int) -> None:
    """Never shorter than the longer of arithmetic and link, never longer than both one after the other."""
    at = setting(config_for(stage, bf16=True, **(NOTHING_KEPT if stage == 3 else {})))
    calls = len(at.model.calls)
    alone = step_time(at, work(calls, 0, 0), machine()).seconds
    for each in (0.01, 0.05, 0.2):
        arithmetic = calls * 3 * each
        both = step_time(at, work(calls, each, 2 * each), machine()).seconds
        assert max(alone, arithmetic) <= both * (1 + 1e-9)
        assert both <= (alone + arithmetic) * (1 + 1e-9)


def test_foresight_hides_gathers() -> None:
    config = config_for(3, bf16=True, **NOTHING_KEPT)
    found = {}
    for ahead in (0, 10**7):
        zero = {**config["zero_optimization"], "stage3_prefetch_bucket_size": ahead}
        at = setting({**config, "zero_optimization": zero})
        found[ahead] = step_time(at, work(len(at.model.calls), 0.1, 0.2), machine()).seconds
    assert found[10**7] < found[0]


def test_quantized_payloads_make_gathers_shorter() -> None:
    nothing = work(20, 0, 0)
    plain = setting(config_for(3, bf16=True, **NOTHING_KEPT))
    packed = setting(
        config_for(3, bf16=True, zero_quantized_weights=True, zero_quantized_gradients=True, **NOTHING_KEPT)
    )
    ratio = step_time(packed, nothing, machine()).seconds / step_time(plain, nothing, machine()).seconds
    assert ratio == pytest.approx((2 * 1.016 + 0.516) / 6, rel=0.05)


def test_groups_keep_gathers_within_a_node() -> None:
    """hpZ: of 6 bytes per parameter 4 leave the node: those of the sum, and those of one exchange after the update."""
    nothing = work(20, 0, 0)
    config = config_for(3, bf16=True, zero_hpz_partition_size=2, **NOTHING_KEPT)
    at = setting(config, 4)
    near = step_time(at, nothing, machine(per_node=2)).seconds
    assert near == pytest.approx(4 * at.model.numel / 2 / SLOW.rate, rel=0.02)
    apart = step_time(at, nothing, machine(per_node=1)).seconds
    assert apart > 1.5 * near


def test_copies_in_groups() -> None:
    """MiCS: gathers and their sums stay within a node, sums over the groups leave it: of each rank's half, twice."""
    nothing = work(20, 0, 0)
    at = setting(config_for(3, bf16=True, mics_shard_size=2, **NOTHING_KEPT), 4)
    near = step_time(at, nothing, machine(per_node=2)).seconds
    assert near == pytest.approx(2 * 2 * at.model.numel / 2 / SLOW.rate, rel=0.02)


@pytest.mark.parametrize("offload", [{"device": "cpu"}, {"device": "nvme", "nvme_path": "."}])
def test_an_update_on_the_host(offload: dict[str, Any]) -> None:
    """As long as the slowest of its parts: the host's arithmetic, the way back, the files."""
    at = setting(config_for(2, bf16=True, offload_optimizer=offload), ranks=1)
    device = replace(DEVICES["h100"], host_update=1e-6, host_rate=1e12, storage_rate=1e12)
    nothing = work(len(at.model.calls), 0, 0)
    fabric = Fabric(ranks_per_node=1, between=SLOW, inside=FAST)
    found = step_time(at, nothing, StepMachine(fabric=fabric, device=device)).seconds
    assert found == pytest.approx(at.model.numel * 1e-6, rel=0.01)
    slow = replace(device, storage_rate=1e6)
    slower = step_time(at, nothing, StepMachine(fabric=fabric, device=slow)).seconds
    assert slower == pytest.approx(found if offload["device"] == "cpu" else at.model.numel * 24e-6, rel=0.1)


def test_layers_that_exchange() -> None:
    """Two sums of 1 MB among two ranks of a node, in forward and in backward, are waited for."""
    extra = [[PlannedExchange("all_reduce", 1e6, 2, 2)]]
    fabric = Fabric(ranks_per_node=2, between=FAST, inside=NetworkSpec(name="in", rate=1e6, per_device=True))
    spent = StepWork(forward=[1.0], backward=[2.0], per_element=0.0, extra=extra)
    at = setting(config_for(0))
    found = run(StepProgram([[F0, B0]], []), at, spent, StepMachine(fabric=fabric))
    assert found.seconds == pytest.approx(3 + 2 * 2 * 1)  # each sum: half of it twice
    assert found.waits_for == INSIDE


# Collectives on links ---------------------------------------------------------------------------------------


def test_what_leaves_a_node() -> None:
    """Hierarchical collectives send each byte out of a node once; a direct exchange once per rank that wants it."""
    fabric = Fabric(ranks_per_node=4, between=SLOW, inside=FAST)
    wide = RankGroup(8, 4)
    (gather,) = fabric.parts("all_gather", 8e6, wide)
    assert (gather.resource, gather.nbytes) == (BETWEEN, 4e6)
    (fetch,) = fabric.parts("fetch", 8e6, wide)
    assert fetch.nbytes == 16e6
    assert [part.nbytes for part in fabric.parts("all_reduce", 8e6, wide)] == [4e6, 4e6]
    (inside,) = fabric.parts("all_gather", 8e6, RankGroup(4, 4))
    assert (inside.resource, inside.nbytes) == (INSIDE, 4 * 6e6)  # all four ranks receive three quarters
    (two_groups,) = fabric.parts("all_gather", 8e6, RankGroup(4, 2))
    assert two_groups.nbytes == 2 * 4e6  # the other two ranks of the node gather too
    assert fabric.parts("all_gather", 8e6, RankGroup(1, 1)) == []


def test_many_that_exchange_at_once_get_less() -> None:
    """If more than two nodes exchange with each other; a rank that fetches does not."""
    fabric = Fabric(ranks_per_node=1, between=SLOW, inside=FAST, crowded=0.5)
    for operation, nodes, share in (("all_gather", 2, 1), ("all_gather", 4, 0.5), ("fetch", 4, 1)):
        (transmission,) = fabric.parts(operation, 8e6, RankGroup(nodes, 1))
        assert transmission.nbytes == 8e6 * (nodes - 1) / nodes / share


def test_ranks_limit_themselves() -> None:
    """A link is no faster than those who send; a sum is added up by the thread that waits."""
    costs = Costs(start={"reduce_scatter": 0.5}, byte=1e-6, sum=2e-6)
    fabric = Fabric(ranks_per_node=1, between=FAST, inside=FAST, costs=costs, background=False)
    total = CollectiveStart(0, "reduce_scatter", 2e6, 2)
    at = setting(config_for(2))
    found = run(StepProgram([[total, CollectiveWait(0)]], []), at, work(1), StepMachine(fabric=fabric))
    assert found.seconds == pytest.approx(0.5 + 1 + 2)
    assert found.compute == pytest.approx(2)


def test_a_burst_is_saved_between_steps() -> None:
    """10 MB at 1 MB/s, after 2 s of rest in each step: 2 MB have been saved, of the 5 MB that could be."""
    link = NetworkSpec(name="bucket", rate=1e6, burst=5e6, peak=1e12)
    program = StepProgram([[F0, F1, CollectiveStart(0, "all_gather", 20e6, 2), CollectiveWait(0)]], [])
    found = run(program, setting(config_for(1)), work(2), machine(link)).seconds
    assert found == pytest.approx(2 + 10 - 2, rel=1e-3)
    rests = StepProgram([[F0, F1, CollectiveStart(0, "all_gather", 1e6, 2), CollectiveWait(0)]], [])
    assert run(rests, setting(config_for(1)), work(2), machine(link)).seconds == pytest.approx(2, rel=1e-3)


def test_halves_of_a_sum_over_gloo() -> None:
    """The second half begins when someone waits for it: computation before that overlaps only with the first half."""
    total = CollectiveStart(0, "all_reduce", 4e6, 2)  # 2 s and 2 s
    at = setting(config_for(0))
    program = StepProgram([[total, F0, F1, CollectiveWait(0)]], [])
    assert run(program, at, work(2, 5.0), machine(background=True)).seconds == 10
    assert run(program, at, work(2, 5.0), machine(background=False)).seconds == 12
