"""Step times in `ds plan`: calibration and prediction, for the options in ``planning/step_time/options.py``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.planning.model_split import ModelSplit
from deepspeed.planning.request import PlanAnswer
from deepspeed.planning.step_time.calibration import load
from deepspeed.planning.step_time.hardware import NetworkSpec, device, network
from deepspeed.planning.step_time.layout_search import LayoutRanking, LayoutSearch, samples_of
from deepspeed.planning.step_time.options import TimeError
from deepspeed.planning.step_time.parallel import ParallelJob, ParallelLayout, seconds_of
from deepspeed.planning.step_time.shapes import is_shape
from deepspeed.planning.step_time.step import StepTime
from deepspeed.tools.calibrate import CalibrationRequest, calibrate

USUAL_SEQUENCE = 256
LOCAL = NetworkSpec(name="none", rate=1e12, source="one node")


def run_calibration(args: argparse.Namespace, config: Mapping[str, Any]) -> list[str]:
    """Run the calibration, write its file, and return lines that describe it."""
    folder = Path(args.calibrate).absolute().parent
    if not folder.is_dir():  # checked before the run, not after it
        raise TimeError(f"--calibrate {args.calibrate}: no such folder: {folder}")
    micro = config.get("train_micro_batch_size_per_gpu")
    request = CalibrationRequest(
        model=args.model,
        config=config,
        batch=args.batch,
        micro=args.micro_batch or (micro if isinstance(micro, int) else 1),
        sequence=args.sequence or (USUAL_SEQUENCE if is_shape(args.model) else 1),
    )
    found = calibrate(request)
    try:
        found.save(args.calibrate)
    except OSError as error:
        raise TimeError(f"--calibrate {args.calibrate}: {error.strerror or error}") from None
    return [*found.lines_of_text(), f"written: {args.calibrate}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimes:
    """Predicted step times of the given config and of the alternatives."""

    where: str
    step: StepTime
    samples: int
    choices: LayoutRanking | None = None

    def lines(self) -> list[str]:
        step = self.step
        waits = f", {step.exposed / step.seconds:.0%} of it waiting" if step.seconds else ""
        on = f", mostly for {step.reason}" if step.reason else ""
        lines = [f"a step on {self.where}: {step.seconds:.4g} s{waits}{on} (predicted)"]
        return lines if self.choices is None else [*lines, "", *self.choices.lines()]

    def as_json(self) -> dict[str, Any]:
        step = self.step
        result: dict[str, Any] = {
            "seconds": step.seconds,
            "compute": step.compute,
            "waits_for": step.waits_for,
            "samples": self.samples,
        }
        if self.choices is not None:
            best = self.choices.best
            result["choices"] = self.choices.as_json()
            result["fastest"] = str(best.layout) if best is not None else None
        return result


def times_of(
    args: argparse.Namespace, found: PlanAnswer, modules: Callable[[], Mapping[int, nn.Module]]
) -> PlanTimes:
    """Predict the step times. ``modules``: by number of ranks, the model with its experts spread over them. TimeError:
    the options do not describe the machine or the batch."""
    joined = network(args.network) if args.network is not None else LOCAL
    chosen = device(args.on) if args.on is not None else None
    measured = load(args.calibration) if args.calibration is not None else None
    if measured is not None and measured.device_type != found.request.device_type:
        raise TimeError(
            f"--calibration {args.calibration} was measured on {measured.device_type}, but the plan is for "
            f"{found.request.device_type}: give --device {measured.device_type}"
        )
    request = found.request
    if request.shape is not None and request.sequence is None:
        raise TimeError("the step time depends on the tokens per sample: give --sequence")
    job = ParallelJob(
        network=joined,
        ranks_per_node=args.gpus,
        device=chosen,
        calibration=measured,
        tokens=found.config.train_micro_batch_size_per_gpu * (request.sequence or 1),
        sequence=request.sequence or 0,
        shape=request.shape,
        item=(found.plan.precision.param or torch.float32).itemsize,
    )
    layout = ParallelLayout(tensor=request.split.tensor, sequence=request.ranks_per_sequence)
    step = seconds_of([found], job, layout)
    samples = samples_of(found)
    choices = None
    if args.choices:
        whole = replace(request, ranks=request.all_ranks, split=ModelSplit())
        choices = LayoutSearch(request=whole, job=job, samples=samples, modules=modules()).run()
    ranks = args.gpus * args.nodes
    name = chosen.name if chosen is not None else f"rank{'s' * (ranks > 1)} of machines as calibrated"
    link = f" over {joined.name}" if args.nodes > 1 else ""
    return PlanTimes(where=f"{ranks} {name}{link}", step=step, samples=samples, choices=choices)
