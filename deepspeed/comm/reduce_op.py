"""Reduction operators of `deepspeed.comm`."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch.distributed as dist


class ReduceOp(Enum):
    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


_TO_TORCH = {op: getattr(dist.ReduceOp, op.name) for op in ReduceOp if op is not ReduceOp.UNUSED}


def to_torch(op: Any) -> Any:
    """Return torch's operator for one of ours; torch's own (including `_make_nccl_premul_sum`) pass through."""
    return _TO_TORCH[op] if isinstance(op, ReduceOp) else op
