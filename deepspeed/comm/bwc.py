"""Sizes, ranks and groups of a model-parallel unit, whichever generation of method names the unit has.

Megatron's units have called the same thing `model_parallel`, `tensor_model_parallel` and (for stages)
`pipe_parallel`, `pipeline_model_parallel`. Without a unit there is one rank, and no group.
"""

from __future__ import annotations

from typing import Any

TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")
PIPELINE = ("pipeline_model_parallel", "pipe_parallel")


def _ask(mpu: Any, kinds: tuple[str, ...], what: str, otherwise: Any) -> Any:
    for kind in kinds:
        method = getattr(mpu, f"get_{kind}_{what}", None)
        if method is not None:
            return method()
    return otherwise


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    return _ask(mpu, TENSOR, "rank", 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    return _ask(mpu, TENSOR, "world_size", 1)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    return _ask(mpu, PIPELINE, "world_size", 1)
