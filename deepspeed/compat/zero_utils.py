"""Documented helpers around ZeRO: what is sharded, and which optimizers may step on shards."""

from __future__ import annotations

from typing import Any

from deepspeed.base.sharded import is_zero_param
from deepspeed.optim.elementwise import is_elementwise
from deepspeed.zero.params import ZeRORuntimeException

__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Return whether ZeRO knows that this optimizer is elementwise, so that it can step on shards."""
    return is_elementwise(optimizer)
