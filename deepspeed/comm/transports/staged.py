"""Operations on tensors of the host in a group whose backend has none for them: NCCL moves what is on GPUs only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.pending import Pending


def through_device(operation: Callable[..., Pending]) -> Callable[..., Pending]:
    """Return ``operation``, for tensors of this process's accelerator, for tensors of the host: all are copied to the
    accelerator, and the first, which every operation writes, back."""

    def call(written: Tensor, *args: Any, **kwargs: Any) -> Pending:
        device = get_accelerator().current_device_name()
        result = written.to(device)
        others = (arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)
        pending = operation(result, *others, **kwargs)

        def finish() -> None:
            pending.wait()
            written.copy_(result)

        return Pending(finish)

    return call
