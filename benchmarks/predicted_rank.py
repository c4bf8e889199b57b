"""A rank whose steps were predicted: trains a shape at several stages."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.tools.calibration_rank import TimedModel


def at_stage(config: dict[str, Any], stage: int) -> dict[str, Any]:
    return {**config, "zero_optimization": {**config["zero_optimization"], "stage": stage}}


class PredictedRank:
    """``model``: a shape (``deepspeed/planning/step_time/shapes.py``)."""

    def __init__(self, model: str, micro: int, sequence: int, config: dict[str, Any]) -> None:
        self.model = model
        self.micro, self.sequence, self.config = micro, sequence, config
        self.trained: dict[int, TimedModel] = {}
        os.environ["DS_SHM"] = "0"
        deepspeed.init_distributed("gloo")

    def prepare(self, stages: list[int], warmup: int) -> None:
        """An engine of each stage, to be taken in turn."""
        for stage in stages:
            config = at_stage(self.config, stage)
            trained = self.trained[stage] = TimedModel(self.model, None, config, self.micro, self.sequence)
            for _ in range(warmup):
                trained.step()

    def run(self, stage: int, steps: int) -> list[float]:
        """Seconds of each step; all ranks begin together."""
        dist.barrier()
        found = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.trained[stage].step()
            found.append(time.perf_counter() - begin)
        return found

    def memory(self, stage: int, sequence: int) -> int:
        """Most bytes that torch's allocator has handed out in a step, from the making of the model on."""
        from tests.planning.memory.counting import Allocations

        config = at_stage(self.config, stage)
        with Allocations() as allocations:
            trained = TimedModel(self.model, None, config, 1, sequence)
            trained.step()
            with allocations.span("steady"):
                trained.step()
                trained.step()
        trained.close()
        return allocations.peak("steady")

    def describe(self) -> dict[str, Any]:
        return {"version": f"deepspeed {deepspeed.__version__}, torch {torch.__version__}"}
