"""Calibration file: measurements of a short training run on one and two ranks, as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.base.exceptions import ExplainedError

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
