"""An autotuner trial: time some steps, write the result, and end the script."""

from __future__ import annotations

import json
import time
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import is_rank_zero, logger
from deepspeed.observe.flops.profiler import FlopsProfiler
from deepspeed.observe.timer import STEP_WAITS

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine
    from deepspeed.engine.observers.progress.wall_clock import WallClockBreakdown


class Trial:
    """Times the steps after ``start_profile_step`` up to ``end_profile_step`` and writes to ``metric_path``:

    - ``latency``: seconds per optimizer step;
    - ``throughput``: samples per second over all ranks;
    - ``flops``: floating-point operations per second and rank, of forward and backward, counted in the first step
      (only if that is the ``metric``);
    - ``samples``: samples per micro-batch that the model actually received;
    - ``breakdown``: milliseconds of a step by the names of `wall_clock_breakdown`, if enabled, and ``step_waits``:
      the part of ``exposed_comm`` within ``step``, if known.

    In a run that profiles the model, ``model_info_path`` also gets ``activation_mem_per_gpu``: bytes that the first
    forward saves for backward; and ``samples_per_rank`` of the data set, None if it is not the engine's or has no
    length.
    """

    def __init__(self, engine: Engine, clock: WallClockBreakdown | None = None) -> None:
        self.engine = engine
        self.clock = clock
        self.breakdown: dict[str, float] = {}
        self.config = engine._config.autotuning_config
        self.profiler = FlopsProfiler(engine.module) if self.config.metric == "flops" else None
        self.samples: int | None = None
        self.kept: dict[int, int] = {}
        self._hooks: Any = None
        self._timed_from: tuple[int, float] | None = None
        engine.events.on("before_forward", self.first_forward)
        engine.events.on("after_forward", self.end_of_first_forward)
        engine.events.on("after_update", self.step)

    def first_forward(self, *, inputs: Any, kwargs: Any, **_: Any) -> None:
        self.engine.events.off("before_forward", self.first_forward)
        tensors = (leaf for leaf in tree_leaves((inputs, kwargs)) if isinstance(leaf, Tensor))
        self.samples = next((each.shape[0] for each in tensors if each.dim()), None)
        if self.profiler is not None:
            self.profiler.start_profile()
        owned = {param.untyped_storage().data_ptr() for param in self.engine.module.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                self.kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        self._hooks.__enter__()

    def end_of_first_forward(self, **_: Any) -> None:
        if self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        self._hooks = None
        self.engine.events.off("after_forward", self.end_of_first_forward)
        info = self.config.model_info
        if self.config.model_info_path and info is not None and info.profile and is_rank_zero():
            path = Path(self.config.model_info_path)
            known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            known["activation_mem_per_gpu"] = sum(self.kept.values())
            known["micro_batch"] = self.samples
            known["samples_per_rank"] = self._samples_per_rank()
            path.write_text(json.dumps(known, indent=2), encoding="utf-8")

    def _samples_per_rank(self) -> int | None:
        data = getattr(self.engine.training_dataloader, "dataset", None)
        return len(data) // self.engine.mesh.size("dp") if isinstance(data, Sized) else None

    def step(self, **_: Any) -> None:
        done = self.engine.global_steps
        if self.profiler is not None and self.profiler.started:
            self.profiler.end_profile()
        if done < self.config.start_profile_step:
            return
        get_accelerator().synchronize()
        now = time.perf_counter()
        if self._timed_from is None:
            self._timed_from = done, now
            return
        first, began = self._timed_from
        if self.clock is not None:
            for name, ms in self.clock.elapsed_ms.items():
                self.breakdown[name] = self.breakdown.get(name, 0.0) + ms
            if self.clock.step_waits_ms is not None:
                self.breakdown[STEP_WAITS] = self.breakdown.get(STEP_WAITS, 0.0) + self.clock.step_waits_ms
        if done >= self.config.end_profile_step:
            self._finish((now - began) / (done - first), done - first)

    def _finish(self, seconds: float, steps: int) -> None:
        engine = self.engine
        if is_rank_zero():
            flops = 0
            if self.profiler is not None:
                totals = self.profiler.totals
                flops = totals.forward.flops + totals.backward.flops + totals.recomputed.flops
            result = {
                "latency": seconds,
                "throughput": engine._config.train_batch_size / seconds,
                "flops": flops / seconds,
                "samples": self.samples,
                "breakdown": {name: ms / steps for name, ms in self.breakdown.items()},
                "peak_memory": get_accelerator().max_memory_allocated(),
            }
            path = Path(str(self.config.metric_path))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=2), encoding="utf-8")
            logger.info("autotuning: %.4g s per step; trial finished", seconds)
        raise SystemExit(0)
