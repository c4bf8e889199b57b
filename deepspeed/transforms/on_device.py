"""Construction of a model on another device and in another precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FACTORIES: frozenset[Callable[..., Any]] = frozenset({torch.empty, torch.full, torch.ones, torch.zeros})


class _Factories(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._dtype = dtype
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in FACTORIES:
            return func(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs["device"] = self._device
        asked = kwargs.get("dtype")
        if asked is not None:
            floats = asked.is_floating_point if isinstance(asked, torch.dtype) else asked is float
            kwargs["dtype"] = self._dtype if floats else asked
            return func(*args, **kwargs)
        made = func(*args, **kwargs)  # torch.full takes its dtype from the value
        return made.to(self._dtype) if made.is_floating_point() else made


class OnDevice:
    """Inside the context, ``torch.empty``, ``full``, ``ones`` and ``zeros`` create tensors on ``device``.

    Floating-point tensors get ``dtype`` whatever was requested; a device that the caller names is kept.
    Layers create their parameters with these functions, so a model is built without host memory on the
    default ``meta`` device::

        with OnDevice(dtype=torch.bfloat16, device="meta"):
            model = Model(config)

    Only this thread is affected.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.enabled = enabled
        self._modes: list[_Factories] = []

    def __enter__(self) -> OnDevice:
        if self.enabled:
            mode = _Factories(self.dtype, self.device)
            mode.__enter__()
            self._modes.append(mode)
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self.enabled:
            self._modes.pop().__exit__(exc_type, exc_value, traceback)
