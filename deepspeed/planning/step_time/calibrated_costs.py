"""Costs of a rank of any job, derived from a calibration on two ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from deepspeed.planning.planner import PlanSetting
from deepspeed.planning.step_time.calibration import Calibration
from deepspeed.planning.step_time.fabric import Costs, Fabric
from deepspeed.planning.step_time.hardware import NetworkSpec
from deepspeed.planning.step_time.program import program_of
from deepspeed.planning.step_time.step import StepMachine, StepTime, run, step_time
from deepspeed.planning.step_time.work import StepWork


def costs_of(found: Calibration) -> Costs:
    """Return the costs of collectives between hosts. The excess of a reduce-scatter over an all-gather of the same
    bytes is the ranks' summation."""
    gather, scatter = found.lines["all_gather"], found.lines["reduce_scatter"]
    return Costs(
        start={name: line.start for name, line in found.lines.items()},
        byte=gather.byte,
        sum=max(0.0, scatter.byte - gather.byte),
    )


def contention(found: Calibration, ranks_beside: int) -> float:
    """Return the slow-down of a rank's compute if ``ranks_beside`` ranks share the calibrated machine's cores."""
    if found.device_type != "cpu":
        return 1.0
    return max(1.0, ranks_beside * found.threads / found.cores)


def fabric_of(found: Calibration, network: NetworkSpec, ranks_per_node: int) -> Fabric:
    """Return the fabric of machines like the calibrated one: the given network between nodes, shared memory at the
    ranks' copy rate within a node."""
    byte = found.lines["all_gather"].byte
    inside = NetworkSpec(name="shared memory", rate=4.0 / byte if byte > 0 else 1e10)
    return Fabric(
        ranks_per_node=ranks_per_node,
        between=network,
        inside=inside,
        costs=costs_of(found),
        background=found.device_type != "cpu",
        crowded=CROWDED if found.device_type == "cpu" else 1.0,
    )


CROWDED = 0.9
"""Share of a link's rate if three or more hosts exchange at once, which a calibration of two ranks cannot show:
TCP connections end at different times, and packets are dropped where they collide. Measured with 3 and 4 hosts
(benchmarks/results/predicted_steps_3to4.txt)."""
STRETCH_LIMITS = (0.5, 8.0)
BISECTIONS = 16
UNLIMITED = NetworkSpec(name="none", rate=1e12)
"""Link between the two ranks of a calibration, whose own costs are the limit."""


def work_of(found: Calibration, setting: PlanSetting, flops: Sequence[float], ranks_beside: int) -> StepWork:
    """Return the work of a rank of ``setting``, with ``ranks_beside`` ranks on its machine.

    The calibrated model takes its measured times; another one is scaled by FLOPs at the measured rate. Ranks that
    communicate compute more slowly: their threads also copy what they send and receive.
    """
    work = replace(
        _work_of(found, setting, flops, min(2, setting.ranks)), contention=contention(found, ranks_beside)
    )
    return work if setting.ranks == 1 else work.stretched(_stretch(found, setting, flops))


def is_same_model(found: Calibration, setting: PlanSetting, flops: Sequence[float]) -> bool:
    model = setting.model
    trained = sum(spec.numel for spec in model.specs[: model.trained])
    return (
        trained == found.elements
        and len(model.calls) == len(found.forward_share)
        and math.isclose(sum(flops), found.flops, rel_tol=1e-6)
    )


def _work_of(found: Calibration, setting: PlanSetting, flops: Sequence[float], ranks: int) -> StepWork:
    stage = setting.plan.zero.stage
    alone = found.of(1, stage) or found.of(1, 0)
    assert alone is not None  # a calibration measures every stage on one rank
    plain, crowded = found.of(1, 0), found.of(2, 0)
    slower = 1.0
    if ranks > 1 and plain is not None and crowded is not None:
        slower = max(1.0, crowded.forward / plain.forward)  # a forward of stage 0 does not communicate
    forward, backward = alone.forward * slower, alone.backward * slower
    if is_same_model(found, setting, flops):
        shares = (found.forward_share, found.backward_share)
    else:
        total = sum(flops) or 1.0
        scale = total / found.flops
        forward, backward = forward * scale, backward * scale
        shares = ([each / total for each in flops],) * 2
    return StepWork(
        forward=[forward * share for share in shares[0]],
        backward=[backward * share for share in shares[1]],
        per_element=alone.update * slower / max(1, found.elements),
    )


def _stretch(found: Calibration, setting: PlanSetting, flops: Sequence[float]) -> float:
    """Return the factor on the compute of ``_work_of`` with which the simulated step of the calibration's two ranks
    takes the measured time.

    It is 1 unless this model was calibrated at this stage: another model communicates differently while it computes.
    """
    measured = found.of(2, setting.plan.zero.stage)
    if measured is None or not is_same_model(found, setting, flops):
        return 1.0
    pair = replace(setting, ranks=2, micro_batches=1)
    program, work = program_of(pair), _work_of(found, pair, flops, 2)
    machine = StepMachine(fabric=fabric_of(found, UNLIMITED, 1))
    low, high = STRETCH_LIMITS
    for _ in range(BISECTIONS):  # the step time never decreases with more compute
        middle = (low + high) / 2
        if run(program, pair, work.stretched(middle), machine).seconds < measured.step:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def predict_step(
    found: Calibration,
    setting: PlanSetting,
    flops: Sequence[float],
    network: NetworkSpec,
    *,
    ranks_per_node: int,
    ranks_beside: int | None = None,
) -> StepTime:
    """Predict the step time of ``setting`` on machines like the calibrated one. ``ranks_beside``: ranks that share a
    machine's cores; default: ``ranks_per_node``."""
    beside = ranks_per_node if ranks_beside is None else ranks_beside
    work = work_of(found, setting, flops, beside)
    return step_time(setting, work, StepMachine(fabric=fabric_of(found, network, ranks_per_node)))
