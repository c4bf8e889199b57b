"""The lines that an engine logs at start, on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import version
from deepspeed.base.logging import is_rank_zero, log_dist, log_dist_once, logger, report, wants_reports
from deepspeed.base.sharded import full_numel
from deepspeed.config.plan import PrecisionPlan
from deepspeed.engine.observers.progress.display import VARIABLE, LineFormat, asked_form, made_by_client
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.zero.precision import precision_table

if TYPE_CHECKING:
    from deepspeed.engine.assembly import TrainingCore
    from deepspeed.engine.interface import Engine


def precision_rows(engine: Engine) -> list[tuple[str, set[torch.dtype]]]:
    """Return kinds of tensors with the dtypes that they have, or (state, before the first step) will have."""
    rows = [("parameters", {p.dtype for p in engine.module.parameters()})]
    core = engine.core
    if core is None:
        return rows
    states = {
        value.dtype
        for owned in core.store.fragments
        for value in core.store.state_of(owned).values()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    masters = {owned.master.dtype for owned in core.store.fragments}
    return [
        *rows,
        ("master weights", masters),
        ("gradients", {bucket.dtype for bucket in core.reducer.buckets}),
        ("reduction (wire)", {bucket.layout.wire_dtype for bucket in core.reducer.buckets}),
        ("optimizer state", states or _coming_states(core.store.optimizer, masters)),
    ]


def _coming_states(optimizer: torch.optim.Optimizer, masters: set[torch.dtype]) -> set[torch.dtype]:
    """Return the dtypes of future optimizer state: torch's optimizers use that of the updated tensors, ours fp32 unless
    a group sets another."""
    wide = isinstance(optimizer, MultiTensorOptimizer) and all(
        group.get("fp32_optimizer_states", True) for group in optimizer.param_groups
    )
    return {torch.float32 if wide and dtype.itemsize < 4 else dtype for dtype in masters}


def log_start(engine: Engine) -> None:
    """Log three lines on what was decided, on rank 0, unless disabled; details at INFO, a slow dtype as a warning."""
    say = reporter(engine)
    zero = engine.plan.zero
    say(
        f"DeepSpeed info: version={version}, torch={torch.__version__}, ranks={engine.world_size}, "
        f"device={engine.device}, ZeRO stage={zero.stage}, precision={engine.plan.precision.name}, "
        f"batch={engine._config.train_batch_size} = {engine._config.train_micro_batch_size_per_gpu} per rank x "
        f"{engine._config.gradient_accumulation_steps} micro-batches x {engine.dp_world_size} data-parallel ranks"
    )
    for transformed in engine.module_transforms.reports:
        say(transformed.line())
    if is_rank_zero() and (warning := slow_dtype_warning(engine.plan.precision, engine.device)):
        log_dist_once(warning, ranks=[0], level=logging.WARNING)
    core = engine.core
    if core is None:
        return
    connections = _connections(engine)  # on every rank: choosing a transport is collective
    # Only if someone reads it: a plan takes a few milliseconds.
    if is_rank_zero() and (say is report or logger.isEnabledFor(logging.INFO)):
        say(_parameters(engine, core) + _memory(engine))
        say(connections)
    if engine.live_page is not None and is_rank_zero():  # the user asked for it: also under a client
        (report if _wanted(engine) else say)(engine.live_page.line())
    if kept := core.store.tier.describe():
        native = core.store.traits.fused
        note = "" if native else "; torch's update is slower there than this package's optimizers"
        log_dist(kept + note, ranks=[0])
    log_dist("dtypes:\n" + precision_table(precision_rows(engine)), ranks=[0])


def reporter(engine: Engine) -> Callable[[str], None]:
    """Return ``report``, or the log at INFO if a client has its own report or the lines are disabled."""
    if _wanted(engine) and (asked_form() is not None or not made_by_client()):
        return report
    return lambda text: log_dist(text, ranks=[0])


def _wanted(engine: Engine) -> bool:
    """Return whether the start lines are enabled, by the environment and the log level."""
    return asked_form() is not LineFormat.NONE and wants_reports(engine._config.log_level)


def _parameters(engine: Engine, core: TrainingCore) -> str:
    trained = sum(full_numel(p) for p in core.trained.params)
    frozen = sum(full_numel(p) for p in engine.module.parameters()) - trained
    buckets = len(core.param_buckets)
    return (
        f"{trained:,} trained parameters in {buckets} bucket{'s' if buckets != 1 else ''}, {max(0, frozen):,} frozen; "
        f"optimizer {type(core.store.optimizer).__name__}"
    )


def _memory(engine: Engine) -> str:
    """Describe what this rank holds now, and what the plan predicts: for now, and the peak without activations."""
    # Imports the planner, only if these lines are logged.
    from deepspeed.engine.observers.planned_memory import ledger_of, now_and_most, size

    text = ""
    try:
        text = f"; this rank holds {size(held_bytes(engine))}"
        now, most = now_and_most(ledger_of(engine))
    except Exception as error:  # tensors without storage, an impossible plan: no reason to stop a run
        logger.debug(f"cannot plan the memory of this run: {error}")
        return text
    return f"{text} (planned {size(now)}; {size(most)} in training, without activations)"


def held_bytes(engine: Engine) -> int:
    """Memory of this rank's parameters, buffers, master weights, gradients and optimizer state, each counted once."""
    tensors: list[Any] = [*engine.module.parameters(), *engine.module.buffers()]
    if engine.sharded is not None:
        tensors += [bucket.shard for bucket in engine.sharded.buckets]
    if engine.core is not None:
        tensors += [bucket.full for bucket in engine.core.param_buckets]
        tensors += [bucket.reduced for bucket in engine.core.reducer.buckets]
        for owned in engine.core.store.fragments:
            tensors += [owned.master, *engine.core.store.state_of(owned).values()]
    sizes = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _connections(engine: Engine) -> str:
    """Describe how gradients are communicated, and where the user can watch the progress."""
    communicator = engine.mesh.communicator("dp", "sp")
    if communicator.size == 1:
        transport = "single rank, no communication"
    else:
        name = communicator.transport_name(engine.device.type)
        transport = (
            f"transport {torch.distributed.get_backend(communicator.group) if name == 'native' else name}"
        )
    wanted = engine._config.monitor_config.enabled
    monitors = [backend.key for backend in engine.monitor.backends] if wanted else []
    if engine.live_page is not None:
        monitors.append("the live page")
    curves = f"curves in {', '.join(monitors)}" if monitors else "no monitor enabled"
    return f"{transport}; {curves}; {VARIABLE}=0 silences these lines and the progress"


# A warning if the processor has no instructions for the 16-bit matrix products of a run.

WIDTH = 192
"""Rows, columns and depth of the measured product: 0.1 ms with such instructions, 5 ms without."""
SLOWER = 3.0
"""Smaller factors are noise, or offset by moving half the bytes."""


def slow_dtype_warning(precision: PrecisionPlan, device: torch.device) -> str | None:
    """Return a warning if 16-bit products take much longer than fp32 ones on this host; None otherwise."""
    dtype = precision.products
    if device.type != "cpu" or dtype is None or dtype.itemsize != 2:
        return None
    factor = slowdown(dtype)
    if factor < SLOWER:
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"a matrix product in {name} takes {factor:.0f} times as long as in float32 on this processor, which lacks "
        "instructions for it: steps are faster without the sections bf16, fp16 and torch_autocast (float32)"
    )


@cache
def slowdown(dtype: torch.dtype) -> float:
    """Return the ratio of the time of a product in ``dtype`` on the host to that in fp32. Takes milliseconds, or 0.1 s
    where it seems large: a busy host interrupts short measurements."""
    from deepspeed.observe.op_speed import seconds_of  # only for 16-bit training on a host

    def seconds(kind: torch.dtype, span: float) -> float:
        matrix = torch.ones(WIDTH, WIDTH, dtype=kind)
        return seconds_of(lambda: torch.mm(matrix, matrix), span=span)

    def ratio(span: float) -> float:
        return seconds(dtype, span) / seconds(torch.float32, span)

    factor = ratio(0.0)
    return factor if factor < SLOWER else min(factor, ratio(0.05))
