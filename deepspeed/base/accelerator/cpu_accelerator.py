"""The CPU as the accelerator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from deepspeed.base.accelerator import host_memory
from deepspeed.base.accelerator.abstract_accelerator import DeepSpeedAccelerator

NUMA_NODES = Path("/sys/devices/system/node")
LEGACY_TENSOR_TYPES = {
    torch.bfloat16: torch.BFloat16Tensor,
    torch.uint8: torch.ByteTensor,
    torch.float64: torch.DoubleTensor,
    torch.float32: torch.FloatTensor,
    torch.float16: torch.HalfTensor,
    torch.int32: torch.IntTensor,
    torch.int64: torch.LongTensor,
}


class HostEvent:
    """Event on a synchronous device: a point in time."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: earlier work is done already."""

    def synchronize(self) -> None:
        """Do nothing: earlier work is done already."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Return the milliseconds from this event to ``end_event``."""
        if self._recorded_s is None or end_event._recorded_s is None:
            raise RuntimeError("Record both events before calling elapsed_time().")
        return (end_event._recorded_s - self._recorded_s) * 1000.0


class CPU_Accelerator(DeepSpeedAccelerator):
    """The CPU: one memory, no streams. Each rank on this machine counts as one "device".

    Memory figures are per process: the resident set size is reported as allocated memory.
    """

    def __init__(self) -> None:
        super().__init__("cpu", "gloo")
        self._peak = host_memory.PeakMeter()

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return True

    # --- Devices ----------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"  # no index: torch has one CPU device, and "cpu:1" would compare unequal to it

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one CPU device; the launcher binds ranks to cores."""

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """Return the number of ranks on this machine if a launcher set it, else of NUMA nodes."""
        for variable in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            if os.environ.get(variable, "").isdigit():
                return int(os.environ[variable])
        return max(1, len(list(NUMA_NODES.glob("node[0-9]*"))))

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: operations are synchronous."""

    # --- Random numbers ---------------------------------------------------------------------------

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    # --- Streams and events -----------------------------------------------------------------------

    @property
    def Event(self) -> type:
        return HostEvent

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._runtime.current_stream()

    default_stream = current_stream

    # --- Memory -----------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Do nothing: the C library frees memory."""

    def get_rss(self) -> int:
        return self._peak.sample()

    def reset_rss(self) -> int:
        self._peak.reset()
        return self._peak.sample()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._peak.sample()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._peak.peak()

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        current, peak = self._peak.sample(), self._peak.peak()
        return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._peak.reset()

    def total_memory(self, device_index: int | None = None) -> int:
        return host_memory.machine_total_bytes()

    def available_memory(self, device_index: int | None = None) -> int:
        return host_memory.machine_available_bytes()

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """Return the tensor itself: the device is the host."""
        return tensor if match_shape else tensor.reshape(-1)

    def _tensor_type(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return LEGACY_TENSOR_TYPES[dtype]
