"""Support any other device type of torch: built in (xpu, mps) or added by an extension (npu, hpu, mlu, ...)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed

from deepspeed.base.accelerator.abstract_accelerator import DeepSpeedAccelerator

VISIBLE_DEVICES = {
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "sdaa": "SDAA_VISIBLE_DEVICES",
    "supa": "SUPA_VISIBLE_DEVICES",
}


def _backend_for(name: str) -> str:
    try:
        return torch.distributed.get_default_backend_for_device(name)
    except (ValueError, RuntimeError):  # torch does not know the device, or no backend for it
        return "gloo"


class TorchDevice_Accelerator(DeepSpeedAccelerator):
    """Device whose torch module has the interface of ``torch.cuda``.

    ValueError: torch has no such module, because the vendor's extension is not installed.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, _backend_for(name))
        if getattr(torch, name, None) is None:
            raise ValueError(
                f"DS_ACCELERATOR={name}: this torch ({torch.__version__}) has no torch.{name}. Install the "
                f"vendor's torch extension for it, or unset DS_ACCELERATOR to use what torch finds."
            )

    def is_available(self) -> bool:
        return bool(self._runtime.is_available())

    def supported_dtypes(self) -> list[torch.dtype]:
        supported = [torch.float32, torch.float16]
        ask_bf16 = getattr(self._runtime, "is_bf16_supported", None)
        return [*supported, torch.bfloat16] if ask_bf16 is None or ask_bf16() else supported

    def is_triton_supported(self) -> bool:
        return self._name == "xpu"

    def visible_devices_envs(self) -> list[str]:
        return [VISIBLE_DEVICES.get(self._name, f"{self._name.upper()}_VISIBLE_DEVICES")]


class MPS_Accelerator(TorchDevice_Accelerator):
    """Apple's GPU: one device, one stream, memory shared with the host, and a shorter torch module than
    the others.
    """

    def __init__(self) -> None:
        super().__init__("mps")

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def current_device(self) -> int:
        return 0

    def synchronize(self, device_index: int | None = None) -> None:
        self._runtime.synchronize()

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._runtime.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return self._runtime.get_rng_state()

    def manual_seed_all(self, seed: int) -> None:
        self._runtime.manual_seed(seed)

    def initial_seed(self) -> int:
        return self.default_generator(0).initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return self._runtime._get_default_mps_generator()

    @property
    def Stream(self) -> Any:
        return torch.Stream

    @property
    def Event(self) -> Any:
        return self._runtime.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return None

    default_stream = current_stream

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._runtime.current_allocated_memory()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._runtime.driver_allocated_memory()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self.memory_allocated()  # torch keeps no peak for this device

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.memory_reserved()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "reserved_bytes.all.current": self.memory_reserved(),
        }

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Do nothing: torch keeps no peak for this device."""

    def total_memory(self, device_index: int | None = None) -> int:
        return self._runtime.recommended_max_memory()

    def available_memory(self, device_index: int | None = None) -> int:
        return self.total_memory() - self.memory_allocated()

    def visible_devices_envs(self) -> list[str]:
        return []
