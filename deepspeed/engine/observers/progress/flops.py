"""The section ``flops_profiler``: profile one step and print it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import comm as dist
from deepspeed.base.accelerator import synchronize_stream
from deepspeed.base.logging import is_rank_zero, logger
from deepspeed.observe.flops.counting import load_dispatch
from deepspeed.observe.flops.profiler import FlopsProfiler
from deepspeed.observe.flops.report import ModuleTimes, RankCounts

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


class FlopsOfOneStep:
    """Profiles step ``profile_step`` on every rank; counts and times are means over its micro-batches. Rank 0 prints.
    Before that step the cost is one call per forward, after it nothing."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config = engine._config.flops_profiler_config
        load_dispatch()  # now, not within a timed step
        self.profiler = FlopsProfiler(engine.module, engine, self.config.recompute_fwd_factor)
        self._began: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._during = (
            ("after_forward", self.after_forward),
            ("before_backward", lambda **_: self._begin("backward")),
            ("after_backward", lambda **_: self._end("backward")),
            ("at_boundary", self.stop),
            ("after_step", self.report),
            ("on_error", self.give_up),
            ("on_destroy", self.give_up),
        )
        engine.events.on("before_forward", self.before_forward)

    def before_forward(self, **_: Any) -> None:
        engine = self.engine
        if not self._seconds:
            trains = torch.is_grad_enabled() and engine.module.training
            if engine.global_steps < self.config.profile_step or not (trains or engine.core is None):
                return
            self._seconds = dict.fromkeys(("forward", "backward", "step"), 0.0)
            for event, subscriber in self._during:
                engine.events.on(event, subscriber)
            self.profiler.start_profile()
        self._begin("forward")

    def after_forward(self, **_: Any) -> None:
        self._end("forward")
        if self.engine.core is None:
            self.profiler.stop_profile()
            self._print()

    def stop(self, **_: Any) -> None:
        """Stop counting before the update, which is only timed."""
        self.profiler.stop_profile(self.engine._config.gradient_accumulation_steps)
        self._begin("step")

    def report(self, **_: Any) -> None:
        if self.profiler.started:  # not a boundary
            return
        self._end("step")
        passes = self.engine._config.gradient_accumulation_steps
        seconds = self._seconds
        self.profiler.times = ModuleTimes(
            seconds["forward"] / passes, seconds["backward"] / passes, seconds["step"]
        )
        self._print()

    def give_up(self, **_: Any) -> None:
        """End the profile, also after an exception, when the next batch is profiled instead."""
        self.profiler.end_profile()
        self._seconds, self._began = {}, {}
        for event, subscriber in self._during:
            self.engine.events.off(event, subscriber)

    def _begin(self, what: str) -> None:
        synchronize_stream()
        self._began[what] = time.perf_counter()

    def _end(self, what: str) -> None:
        if what in self._began:
            synchronize_stream()
            self._seconds[what] += time.perf_counter() - self._began.pop(what)

    def _print(self) -> None:
        engine, config = self.engine, self.config
        by_rank = self._all_ranks()
        self.profiler.ranks = RankCounts(
            engine.world_size,
            engine.dp_world_size,
            engine.mp_world_size,
            engine._config.train_micro_batch_size_per_gpu,
            sum(row[1] for row in by_rank),
            by_rank,
            engine.mesh.size("dp"),
        )
        if is_rank_zero():
            what = engine.global_steps, config.module_depth, config.top_modules, config.detailed
            try:
                self.profiler.print_model_profile(*what, config.output_file)
            except OSError as error:  # must not end the training
                if config.output_file is None:
                    raise
                logger.error(
                    "flops_profiler.output_file %s cannot be written (%s): printing the profile instead",
                    config.output_file,
                    error.strerror or error,
                )
                self.profiler.print_model_profile(*what)
        engine.events.off("before_forward", self.before_forward)
        self.give_up()

    def _all_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the parameter, FLOP and memory counts of each rank. Collective."""
        done = self.profiler.totals
        own = (
            done.params,
            done.forward.flops,
            done.backward.flops,
            done.recomputed.flops,
            done.held,
            done.peak,
        )
        ranks = self.engine.world_size
        if ranks == 1:
            return (own,)
        mine = torch.tensor(own, dtype=torch.int64, device=self.engine.device)
        every = mine.new_empty(ranks * len(own))
        dist.all_gather_into_tensor(every, mine)
        return tuple(tuple(row) for row in every.view(ranks, len(own)).tolist())
