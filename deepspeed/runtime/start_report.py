"""The few lines that an engine logs when it starts, on rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspeed import version
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.runtime.precision import precision_table
from deepspeed.runtime.zero.params import full_numel
from deepspeed.runtime.zero.tiers import OffloadedTier
from deepspeed.utils.logging import log_dist

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def precision_rows(engine: DeepSpeedEngine) -> list[tuple[str, set[torch.dtype]]]:
    """Kinds of tensors and the dtypes they really have, or (state, before the first step) will have."""
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
    """torch's optimizers keep state in the dtype of what they update, ours in fp32 unless a group says otherwise."""
    wide = isinstance(optimizer, MultiTensorOptimizer) and all(
        group.get("fp32_optimizer_states", True) for group in optimizer.param_groups
    )
    return {torch.float32 if wide and dtype.itemsize < 4 else dtype for dtype in masters}


def log_start(engine: DeepSpeedEngine) -> None:
    zero = engine.plan.zero
    log_dist(
        f"DeepSpeed info: version={version}, torch={torch.__version__}, ranks={engine.world_size}, "
        f"device={engine.device}, ZeRO stage={zero.stage}, precision={engine.plan.precision.name}, "
        f"batch={engine.train_batch_size()} = {engine.train_micro_batch_size_per_gpu()} per rank x "
        f"{engine.gradient_accumulation_steps()} micro-batches x {engine.dp_world_size} data-parallel ranks",
        ranks=[0],
    )
    core = engine.core
    if core is not None:
        trained = sum(full_numel(p) for p in core.trained.params)
        frozen = sum(full_numel(p) for p in engine.module.parameters()) - trained
        log_dist(
            f"{trained:,} trained parameters in {len(core.param_buckets)} buckets, {max(0, frozen):,} frozen; "
            f"optimizer {type(core.store.optimizer).__name__}",
            ranks=[0],
        )
        if isinstance(core.store.tier, OffloadedTier):
            native = hasattr(core.store.optimizer, "multi_tensor_step")
            note = "" if native else "; torch's own update is slower there than an optimizer of this package"
            log_dist(core.store.tier.describe() + note, ranks=[0])
    log_dist("dtypes:\n" + precision_table(precision_rows(engine)), ranks=[0])
