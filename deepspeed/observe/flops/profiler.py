"""The documented profiler of a model's forward; it also counts backwards that run before it is stopped."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.observe.flops import counting, report
from deepspeed.observe.flops.counting import OpCounter, forget, running_counter, total_work
from deepspeed.observe.flops.counting import get_module_duration as get_module_duration
from deepspeed.observe.flops.counting import get_module_flops as get_module_flops
from deepspeed.observe.flops.counting import get_module_macs as get_module_macs
from deepspeed.observe.flops.formulas import OpWork
from deepspeed.observe.flops.report import DEFAULT_PRECISION as DEFAULT_PRECISION
from deepspeed.observe.flops.report import (
    FlopsTotals,
    ModuleTimes,
    RankCounts,
    duration_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from deepspeed.observe.flops.report import bytes_to_string as bytes_to_string
from deepspeed.observe.flops.report import flops_to_string as flops_to_string

MODES = ("forward", "generate")


def _shown(value: Any, as_string: bool, text_of: Callable[[float], str]) -> Any:
    return text_of(value) if as_string else value


class FlopsProfiler:
    """Flops, MACs, parameters and time of a model and of every module in it.

    Every operation that torch dispatches between ``start_profile`` and ``stop_profile`` is counted, including those of
    functionals, custom autograd functions and attention kernels. The forward is the profile; backward, and the
    recomputation of activation checkpointing in it, are counted separately (``get_total_backward_flops``,
    ``get_total_recomputed_flops``). Tensors may be on the meta device.

    Args:
        model: Any module.
        ds_engine: The model's engine, whose ranks the printed profile then shows.
        recompute_fwd_factor: The share of the forward that checkpointing recomputes, for the estimated FLOPS of the
            backward.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.times: ModuleTimes | None = None
        self.ranks: RankCounts | None = None
        self._counter: OpCounter | None = None
        self._totals: FlopsTotals | None = None

    # Start and stop -------------------------------------------------------------------------------------------

    def start_profile(self, ignore_list: Collection[type] | None = None) -> None:
        """Reset all counts and start counting. Operations of modules of the types in ``ignore_list`` count for the
        module that calls them."""
        if self.started:
            self.stop_profile()
        self.started, self._totals = True, None
        self._counter = OpCounter(self.model, tuple(ignore_list or ()))
        self._counter.begin()

    def stop_profile(self, passes: int = 1) -> None:
        """Stop counting. The numbers are kept, averaged over ``passes`` forwards."""
        if self._counter is None:
            return
        self._counter.end()
        self._counter = None
        self.started = False
        counting.average(self.model, passes)
        self._totals = self._sum()

    def reset_profile(self) -> None:
        """Reset all counts; a running profile keeps counting."""
        for record in counting.records_in(self.model):
            record.reset()
        if self._counter is not None:
            self._counter.clear()
        self._totals = None

    def end_profile(self) -> None:
        """Stop, and remove the records from the model's modules. The totals remain available."""
        self.stop_profile()
        forget(self.model)

    def _sum(self) -> FlopsTotals:
        return FlopsTotals(
            counting.params_of(self.model),
            total_work(self.model, "forward"),
            total_work(self.model, "backward"),
            total_work(self.model, "recomputed"),
            get_module_duration(self.model),
            counting.weight_bytes(self.model),
            counting.held_bytes(self.model),
            counting.peak_bytes(self.model),
        )

    @property
    def totals(self) -> FlopsTotals:
        """Totals of the whole model: up to now while counting, else of the last profile."""
        return self._totals if self._totals is not None else self._sum()

    # Totals ---------------------------------------------------------------------------------------------------

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the flops of the forward; as a string ``"9.28 M"``."""
        return _shown(self.totals.forward.flops, as_string, number_to_string)

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the MACs of the forward; as a string ``"4.6 MMACs"``."""
        return _shown(self.totals.forward.macs, as_string, macs_to_string)

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds of the forward; as a string ``"76.39 ms"``."""
        return _shown(self.totals.seconds, as_string, duration_to_string)

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the parameters on this rank, partitioned ones in full; as a string ``"336.23 M"``."""
        return _shown(self.totals.params, as_string, params_to_string)

    def get_total_backward_flops(self, as_string: bool = False) -> int | str:
        """Return the flops of the counted backwards, without recomputed forwards."""
        return _shown(self.totals.backward.flops, as_string, number_to_string)

    def get_total_recomputed_flops(self, as_string: bool = False) -> int | str:
        """Return the flops of forwards that checkpointing recomputed in those backwards."""
        return _shown(self.totals.recomputed.flops, as_string, number_to_string)

    def get_total_held_memory(self, as_string: bool = False) -> int | str:
        """Return the bytes that the forward allocated and left alive: outputs, and tensors saved for backward."""
        return _shown(self.totals.held, as_string, bytes_to_string)

    def get_total_peak_memory(self, as_string: bool = False) -> int | str:
        """Return the peak bytes that the forward allocated, without weights."""
        return _shown(self.totals.peak, as_string, bytes_to_string)

    flops = property(attrgetter("totals.forward.flops"))
    macs = property(attrgetter("totals.forward.macs"))
    params = property(attrgetter("totals.params"))

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        """Tell whether experts are split over tensor-parallel ranks."""
        return any(
            getattr(module, "enable_expert_tensor_parallelism", False) for module in self.model.modules()
        )

    # Report ---------------------------------------------------------------------------------------------------

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the profile, or write it to a file; call it before ``end_profile``.

        Args:
            profile_step: Step number for the title.
            module_depth: Number of tree levels in the aggregated profile; -1: all but the innermost.
            top_modules: Number of module classes per level.
            detailed: Also print the full module tree.
            output_file: Path of a file, whose folder is created; None prints to standard output.
        """
        totals = self.totals
        ranks = self.ranks
        if ranks is None and self.ds_engine is not None:
            ranks = report.ranks_of(self.ds_engine, totals)
        lines = report.summary(totals, profile_step, self.recompute_fwd_factor, self.times, ranks)
        lines += ["", report.AGGREGATED, *report.aggregated(self.model, module_depth, top_modules)]
        if detailed:
            lines += ["", report.DETAILED, *report.detailed(self.model, totals)]
            lines += ["", report.MEMORY, *report.memory(self.model)]
        lines.append(report.END)
        if output_file is None:
            report.write(lines, sys.stdout)
            return
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            report.write(lines, file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the module classes with the most parameters, MACs and time at each level of the tree."""
        report.write(report.aggregated(self.model, module_depth, top_modules), sys.stdout)


def wrapFunc(func: Callable[..., Any], funcFlopCompute: Callable[..., tuple[int, int]]) -> Callable[..., Any]:
    """Wrap ``func`` so that a running profile counts it by a formula of its arguments.

    Args:
        func: A function that bypasses torch's dispatcher, such as a kernel called through ctypes.
        funcFlopCompute: Returns (flops, MACs) for the same arguments.
    """

    @functools.wraps(func)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counter = running_counter()
        if counter is None:
            return func(*args, **kwargs)
        flops, macs = funcFlopCompute(*args, **kwargs)
        return counter.counted_as(OpWork(macs, flops), lambda: func(*args, **kwargs))

    return counted


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Any = [],  # noqa: B006 - the documented default, never written to
    kwargs: Any = {},  # noqa: B006
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Run the model once, in evaluation mode, and return its flops, MACs and parameters.

    Args:
        model: Any module.
        input_shape: Shape of a random tensor to pass as the first positional argument.
        args: Positional arguments.
        kwargs: Keyword arguments.
        print_profile: Print the profile.
        detailed: Also print the full module tree.
        module_depth: Number of tree levels in the aggregated profile; -1: all but the innermost.
        top_modules: Number of module classes per level.
        warm_up: Number of runs before the measured one.
        as_string: Return ``("9.28 M", "4.6 MMACs", "79.24 K")`` instead of numbers.
        output_file: File for the profile; None prints to standard output.
        ignore_modules: Module types whose operations count for the module that calls them.
        mode: "forward" calls the model, "generate" its ``generate``.

    Raises:
        ValueError: There are no inputs, or the mode is unknown.
    """
    given = _inputs(model, input_shape, args, kwargs)
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: must be one of {', '.join(map(repr, MODES))}")
    run: Callable[..., Any] = model if mode == "forward" else getattr(model, "generate")  # noqa: B009
    profiler = FlopsProfiler(model)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        for _ in range(warm_up):
            run(*given, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        run(*given, **(kwargs or {}))
        profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    finally:
        profiler.end_profile()
        for module in training:
            module.training = True
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def _inputs(model: nn.Module, shape: tuple[int, ...] | None, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the positional arguments."""
    if shape is None:
        if not args and not kwargs:
            raise ValueError("get_model_profile needs input_shape, args or kwargs to call the model with")
        return tuple(args or ())
    if not isinstance(shape, (tuple, list)) or not shape:
        raise ValueError(f"input_shape={shape!r}: expected a tuple of sizes, starting with the batch size")
    like = next((param for param in model.parameters() if param.is_floating_point()), None)
    alike = {} if like is None else {"device": like.device, "dtype": like.dtype}
    return (torch.randn(tuple(shape), **alike), *(args or ()))
