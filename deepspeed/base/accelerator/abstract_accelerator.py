"""The interface of every accelerator.

torch has a module with the same interface for each device type (``torch.cuda``, ``torch.xpu``, ``torch.npu``, ...).
The base class uses that module, so a concrete accelerator contains only the differences of its device.
"""

from __future__ import annotations

import functools
import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

OP_BUILDER_PACKAGE = "deepspeed.ops.op_builder"


def _tensor_constructor(dtype: torch.dtype) -> property:
    return property(lambda accelerator: accelerator._tensor_type(dtype))


class DeepSpeedAccelerator(ABC):
    """The device type of this process. Methods initialize the device only when they need it.

    Memory figures are in bytes. ``device_index=None`` means the current device.
    """

    supports_nvtx_domain = False

    def __init__(self, name: str = "", communication_backend: str = "gloo") -> None:
        self._name = name
        self._communication_backend_name = communication_backend
        self._compile_backend = "inductor"
        self._open_ranges = threading.local()

    @property
    def _runtime(self) -> Any:
        """Return torch's module for this device type."""
        return torch.get_device_module(self._name)

    # --- How the device runs relative to the host -------------------------------------------------

    def is_synchronized_device(self) -> bool:
        """Return whether operations are synchronous with the host."""
        return False

    def use_host_timers(self) -> bool:
        """Return whether host timers are accurate for device work."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Return whether tensors may cross streams without events."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Return whether the host is kept from running ahead of the device and accumulating allocations."""
        return self.is_synchronized_device()

    # --- Devices ----------------------------------------------------------------------------------

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this machine has such a device, without creating a context on it."""

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Return a context in which ``device_index`` is the current device."""
        return self._runtime.device(device_index)

    def set_device(self, device_index: int) -> None:
        self._runtime.set_device(device_index)

    def current_device(self) -> int:
        return self._runtime.current_device()

    def current_device_name(self) -> str:
        return f"{self._name}:{self.current_device()}"

    def device_count(self) -> int:
        return self._runtime.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        self._runtime.synchronize(device_index)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def communication_backend_version(self) -> tuple[int, ...] | None:
        """Return the version of the communication library, None if torch does not report it."""
        return None

    # --- Random numbers ---------------------------------------------------------------------------

    def random(self) -> Any:
        """Return torch's random module of this device type."""
        return self._runtime.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._runtime.set_rng_state(
            new_state, self.current_device() if device_index is None else device_index
        )

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the generator state, a uint8 tensor in host memory."""
        return self._runtime.get_rng_state(self.current_device() if device_index is None else device_index)

    def manual_seed(self, seed: int) -> None:
        self._runtime.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self._runtime.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return self._runtime.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        self._runtime.init()  # before that, the tuple of generators is empty
        return self._runtime.default_generators[device_index]

    # --- Streams and events -----------------------------------------------------------------------

    @property
    def Stream(self) -> type:
        return self._runtime.Stream

    @property
    def Event(self) -> type:
        return self._runtime.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which ``stream`` is the current stream; None changes nothing."""
        return self._runtime.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._runtime.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return self._runtime.default_stream(device_index)

    # --- Memory -----------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        self._runtime.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._runtime.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._runtime.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._runtime.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._runtime.max_memory_reserved(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return self._runtime.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._runtime.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        index = self.current_device() if device_index is None else device_index
        return self._runtime.get_device_properties(index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that can still be allocated: free on the device, or free in torch's cache."""
        cached = self.memory_reserved(device_index) - self.memory_allocated(device_index)
        free, _ = self._runtime.mem_get_info(device_index)
        return free + cached

    # Older names of the same allocator statistics, whose peaks are reset together.

    def memory_cached(self, device_index: int | None = None) -> int:
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return self.max_memory_reserved(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        self.reset_peak_memory_stats(device_index)

    # --- Host memory that the device reads directly -----------------------------------------------

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """Return a page-locked host tensor like ``tensor``.

        Args:
            make_copy: Copy the values; otherwise the result is uninitialized.
            match_shape: Keep the shape; otherwise the result is flat, ``[numel]``.
        """
        pinned = tensor
        if not (make_copy and tensor.is_pinned()):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            # Imported here to avoid an import cycle: the package imports accelerators.
            from deepspeed.base.accelerator.pin_memory_tracker import track_pinned_memory

            track_pinned_memory(pinned.nbytes)
            if make_copy:
                pinned.copy_(tensor.detach())
        return pinned if match_shape else pinned.view(-1)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Do nothing: torch's allocator reclaims page-locked memory when the tensor is freed."""
        return None

    # --- Data types -------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return torch.bfloat16 in self.supported_dtypes()

    def is_fp16_supported(self) -> bool:
        return torch.float16 in self.supported_dtypes()

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating-point dtypes in which models can be trained here."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def _tensor_type(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        """Return a constructor of tensors of a dtype on this device."""
        return functools.partial(torch.tensor, dtype=dtype, device=self._name)

    BFloat16Tensor = _tensor_constructor(torch.bfloat16)
    ByteTensor = _tensor_constructor(torch.uint8)
    DoubleTensor = _tensor_constructor(torch.float64)
    FloatTensor = _tensor_constructor(torch.float32)
    HalfTensor = _tensor_constructor(torch.float16)
    IntTensor = _tensor_constructor(torch.int32)
    LongTensor = _tensor_constructor(torch.int64)

    # --- Profiler ranges --------------------------------------------------------------------------

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a named range in torch's profiler, if one is running."""
        active = torch.autograd._profiler_enabled()
        span = torch.profiler.record_function(msg) if active else None
        if span is not None:
            span.__enter__()
        # Without a profiler a placeholder is pushed, so that pushes and pops stay paired.
        self._range_stack().append(span)

    def range_pop(self, domain: str | None = None) -> None:
        """Close the range most recently opened by this thread."""
        stack = self._range_stack()
        span = stack.pop() if stack else None
        if span is not None:
            span.__exit__(None, None, None)

    def _range_stack(self) -> list[Any]:
        if not hasattr(self._open_ranges, "stack"):
            self._open_ranges.stack = []
        return self._open_ranges.stack

    # --- Graphs of captured work ------------------------------------------------------------------

    def create_graph(self) -> Any:
        """Return an empty graph, or None if the device cannot capture."""
        return None

    def is_current_stream_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        return False

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        raise NotImplementedError(
            f"Device {self._name!r} cannot capture graphs; run the function itself instead."
        )

    # --- Compilers, kernels -----------------------------------------------------------------------

    def is_triton_supported(self) -> bool:
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """Return whether a Triton grouped matrix product is faster here than torch's."""
        return False

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set the backend for ``torch.compile``. ValueError: torch does not know it."""
        import torch._dynamo  # slow to import, and only compiled runs need it

        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"Compile backend {backend!r} is not known to torch; choose one of {known}.")
        self._compile_backend = backend

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Run ``callback`` once the device is initialised, or immediately where no initialisation is pending."""
        return callback()

    def op_builder_dir(self) -> str:
        """Return the import path of the package with the op builders."""
        return OP_BUILDER_PACKAGE

    def get_op_builder(self, class_name: str) -> type | None:
        """Return the builder class of that name, None if there is no such op."""
        # By name, at call time: ops are a layer above this package.
        return getattr(importlib.import_module(self.op_builder_dir()), class_name, None)

    def create_op_builder(self, class_name: str) -> Any:
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def build_extension(self) -> type:
        """Return the setuptools command class for building extensions."""
        from torch.utils.cpp_extension import BuildExtension  # pulls in setuptools

        return BuildExtension

    # --- Environment of launched ranks ------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Return the prefixes of environment variables that a launcher has to pass to other machines."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that select the visible devices of a process."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        for variable in self.visible_devices_envs():
            current_env[variable] = ",".join(map(str, local_accelerator_ids))
