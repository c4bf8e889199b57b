"""Collectives on tensors of the host in a group whose backend has none for them: NCCL moves what is on GPUs only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.pending import Pending
from deepspeed.comm.transports.choice import Transport


def staged(transport: Transport) -> Transport:
    """Return ``transport``, which moves tensors of this process's accelerator, for tensors of the host."""
    operations = {field.name for field in dataclasses.fields(Transport)} - _WITHOUT_TENSORS
    through_device: dict[str, Any] = {name: _through_device(getattr(transport, name)) for name in operations}
    return dataclasses.replace(transport, name="staged", background=False, **through_device)


_WITHOUT_TENSORS = {"name", "background", "barrier", "close"}


def _through_device(operation: Callable[..., Pending]) -> Callable[..., Pending]:
    """Copy all operands to the accelerator, and the first one, which every operation writes, back."""

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
