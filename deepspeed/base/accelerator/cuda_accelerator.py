"""GPUs behind ``torch.cuda``: NVIDIA, and AMD through ROCm."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed

from deepspeed.base.accelerator.abstract_accelerator import DeepSpeedAccelerator

try:
    import nvtx  # ranges with domains, which torch's lack
except ImportError:
    nvtx: Any = None

VOLTA = 7  # the first compute capability with fp16 matrix units, and the minimum for Triton's kernels


class CUDA_Accelerator(DeepSpeedAccelerator):
    supports_nvtx_domain = True

    def __init__(self) -> None:
        super().__init__("cuda", "nccl")
        self._nvtx_domains: dict[str, Any] = {}

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def communication_backend_version(self) -> tuple[int, ...] | None:
        if not torch.distributed.is_nccl_available():
            return None
        from torch.cuda import nccl

        return tuple(int(part) for part in nccl.version()[:3])  # a suffix may follow

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return self._is_volta_or_newer()

    def supported_dtypes(self) -> list[torch.dtype]:
        dtypes = [torch.float32]
        if self.is_fp16_supported():
            dtypes.append(torch.float16)
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    def is_triton_supported(self) -> bool:
        return importlib.util.find_spec("triton") is not None and self._is_volta_or_newer()

    @staticmethod
    def _is_volta_or_newer() -> bool:
        if not torch.cuda.is_available():
            return False
        return torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= VOLTA

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return torch.cuda._lazy_call(callback)

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Open a range, in ``domain`` if the package nvtx is installed."""
        found = self._nvtx_domain(domain)
        if found is None:
            return torch.cuda.nvtx.range_push(msg)
        return found.push_range(message=msg, category=category)

    def range_pop(self, domain: str | None = None) -> Any:
        found = self._nvtx_domain(domain)
        return torch.cuda.nvtx.range_pop() if found is None else found.pop_range()

    def _nvtx_domain(self, name: str | None) -> Any:
        if nvtx is None or name is None:
            return None
        if name not in self._nvtx_domains:
            self._nvtx_domains[name] = nvtx.get_domain(name)
        return self._nvtx_domains[name]

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool=pool, stream=stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY_PATH", "PATH"]
