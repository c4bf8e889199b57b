"""Calibration: measurements of a short training run on one and two ranks, as a JSON file, and the costs of a rank of
any job that follow from them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed.base.exceptions import ExplainedError
from deepspeed.planning.planner import PlanSetting
from deepspeed.planning.step_time.fabric import Costs, Fabric
from deepspeed.planning.step_time.hardware import NetworkSpec
from deepspeed.planning.step_time.step import StepMachine, program_of, run
from deepspeed.planning.step_time.work import StepWork

VERSION = 1
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "fetch")


class CalibrationError(ExplainedError, ValueError):
    """A file is not a calibration of this version, or a calibration run is impossible or has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Medians at a ZeRO stage, in seconds: a step, and its parts on the training thread (communication included).
    ``spread``: (slowest - fastest step) / median."""

    step: float
    forward: float
    backward: float
    update: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """Linear cost of a collective between two ranks, in seconds: ``start + byte * n`` for n bytes sent by each."""

    start: float
    byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A calibration. ``steps``: by "ranks/stage". ``forward_share``, ``backward_share``: each call's share of the
    model's forward and backward time. ``lines``: costs of the transport between hosts, by operation. ``elements``:
    trained elements; ``tokens``: per micro-batch; ``flops``: of a forward."""

    machine: str
    date: str
    release: str
    device_type: str
    cores: int
    threads: int
    model: str
    elements: int
    tokens: int
    precision: str
    flops: float
    forward_share: Sequence[float]
    backward_share: Sequence[float]
    steps: Mapping[str, Steps]
    lines: Mapping[str, CostLine]
    version: int = VERSION

    def of(self, ranks: int, stage: int) -> Steps | None:
        return self.steps.get(f"{ranks}/{stage}")

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    def lines_of_text(self) -> list[str]:
        """Return lines that describe the calibration."""
        result = [
            f"calibrated {self.date} on {self.machine} ({self.device_type}, {self.threads} threads per rank)",
            f"{self.model}, {self.elements:,} parameters, {self.tokens} tokens, {self.precision}",
        ]
        for key, steps in self.steps.items():
            ranks, _, stage = key.partition("/")
            result.append(
                f"  {ranks} rank{'s' * (ranks != '1')}, stage {stage}: {steps.step * 1e3:9.2f} ms "
                f"(forward {steps.forward * 1e3:.2f}, backward {steps.backward * 1e3:.2f}, "
                f"update {steps.update * 1e3:.2f}; spread {steps.spread:.0%})"
            )
        for name, line in self.lines.items():
            rate = f"{1 / line.byte / 1e6:,.0f} MB/s" if line.byte > 0 else "no cost per byte"
            result.append(f"  {name:<14} {line.start * 1e6:7.0f} us + bytes / ({rate})")
        return result


def load(path: str | Path) -> Calibration:
    """Read a calibration file. CalibrationError: there is none, or it is not a valid calibration."""

    def refused(problem: str) -> CalibrationError:
        remedy = "write one with `ds plan CONFIG --model MODEL --calibrate FILE`"
        return CalibrationError(f"--calibration {path}: {problem}; {remedy}")

    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise refused(str(error.strerror or error)) from None
    except ValueError as error:
        raise refused(f"not JSON ({error})") from None
    fields = {field.name for field in dataclasses.fields(Calibration)}
    if not isinstance(data, dict) or "version" not in data:
        raise refused("not a calibration")
    if data["version"] != VERSION:
        raise refused(f"version {data['version']}, but this release reads version {VERSION}")
    if data.keys() != fields:
        raise refused(f"{', '.join(sorted(data.keys() ^ fields))} is missing or unknown")
    try:
        steps = {key: Steps(**row) for key, row in data["steps"].items()}
        lines = {key: CostLine(**row) for key, row in data["lines"].items()}
        numbers = [n for row in (*steps.values(), *lines.values()) for n in dataclasses.astuple(row)]
        numbers += [data["elements"], data["tokens"], data["flops"], data["cores"], data["threads"]]
        numbers += [*data["forward_share"], *data["backward_share"]]
        usable = bool(steps) and all(math.isfinite(n) and n >= 0 for n in numbers)
    except (TypeError, AttributeError):
        usable = False
    if not usable:
        raise refused("its numbers are invalid")
    return Calibration(**{**data, "steps": steps, "lines": lines})


# Costs ---------------------------------------------------------------------------------------------------------


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
