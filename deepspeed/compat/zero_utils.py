"""Documented helpers for ZeRO: whether a parameter is partitioned, and whether an optimizer can step on shards."""

from __future__ import annotations

from typing import Any

from deepspeed.base.sharded import is_zero_param
from deepspeed.optim.elementwise import is_elementwise
from deepspeed.zero.params import ZeRORuntimeException

__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Return whether this optimizer is known to be elementwise, and so can step on shards."""
    return is_elementwise(optimizer)
