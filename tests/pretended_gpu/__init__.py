"""A pretended GPU (``device.cpp``), and what Python's side of torch has to believe of it.

It shows what a machine without GPUs can show of the paths for them: that tensors, collectives, pinned memory and random
numbers are on the device where they have to be, and that the numbers are the host's. It has one stream, so that it
shows nothing about what has to wait for what.

Import this before torch, which asks as it is imported what devices there are; then ``install()``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sysconfig
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIBRARY_VARIABLE = "PRETENDED_GPU_LIBRARY"


def build(folder: Path) -> Path:
    """Compile the device for the torch that is installed; in about ten seconds."""
    torch_folder, target = _torch_folder(), folder / "pretended_gpu.so"
    include = torch_folder / "include"
    command = [
        *(os.environ.get("CXX") or "c++").split(),
        *("-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(target)),
        *(
            f"-I{path}"
            for path in (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])
        ),
        str(Path(__file__).with_name("device.cpp")),
        *(f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]
    subprocess.run(command, check=True)
    return target


def _torch_folder() -> Path:
    """Found without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _load() -> ctypes.CDLL | None:
    library = os.environ.get(LIBRARY_VARIABLE)
    if library is None:
        return None
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(library)


_LIBRARY = _load()
import torch  # noqa: E402
import torch.cuda.nccl  # noqa: E402


class Stream(torch.Stream):
    """Work is done immediately, so there is nothing to wait for."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        return super().__new__(cls, device="cuda:0")

    cuda_stream = 0

    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class Event:
    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.timed, self.at = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if not (self.timed and end.timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return (end.at - self.at) * 1e3


_PROPERTIES = types.SimpleNamespace(
    name="Pretended GPU",
    total_memory=80 << 30,
    multi_processor_count=132,
    major=9,
    minor=0,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
    is_integrated=0,
)


_NOTHING = """_lazy_init init set_device synchronize set_stream empty_cache reset_peak_memory_stats
    reset_max_memory_allocated reset_max_memory_cached manual_seed manual_seed_all seed set_rng_state_all ipc_collect"""
_NO_BYTES = """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached
    max_memory_cached"""


def _answers() -> dict[str, Any]:
    stream = Stream()
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": contextlib.nullcontext,
        "device_of": contextlib.nullcontext,
        "can_device_access_peer": lambda device, peer: True,
        "get_device_name": lambda device=None: _PROPERTIES.name,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
        "is_bf16_supported": lambda including_emulation=True: True,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": contextlib.nullcontext,
        "StreamContext": contextlib.nullcontext,
        "is_current_stream_capturing": lambda: False,
        "memory_stats": lambda device=None: {},
        "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
    }


def install() -> None:
    """From now on this process has a GPU, in the library that ``PRETENDED_GPU_LIBRARY`` names."""
    assert _LIBRARY is not None
    resize = _LIBRARY.pretended_gpu_resize
    resize.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    of_host = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return of_host(self, size)
        resize(self._cdata, size)
        return self

    torch.UntypedStorage.resize_ = resize_
    for name in _NOTHING.split():
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in _NO_BYTES.split():
        setattr(torch.cuda, name, lambda device=None: 0)
    for name, value in _answers().items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "12.8"
    torch._C._cuda_getDevice = lambda: 0
    _use_gloo_for_nccl()


_COLLECTIVES = (
    "allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced allreduce allreduce_coalesced "
    "alltoall alltoall_base broadcast gather reduce reduce_scatter _reduce_scatter_base "
    "reduce_scatter_tensor_coalesced scatter"
)


class _Transfer:
    """Returned by ``send`` and ``recv``: the future of a transfer."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        self._future.result()
        return True

    def is_completed(self) -> bool:
        return self._future.done()


BOTH = "cpu:gloo,cuda:gloo"


def _use_gloo_for_nccl() -> None:
    """Carry NCCL's groups by gloo, within NCCL's limits: they have no backend for tensors of the host."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.utils._pytree import tree_leaves

    make, make_more = dist.init_process_group, dist.new_group
    backend_of, device_of_objects = dist.ProcessGroup._get_backend, distributed_c10d._get_object_coll_device
    of_nccl: set[str] = set()

    def init_process_group(
        backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any
    ) -> None:
        make(BOTH if backend == "nccl" else _by_gloo(backend), *args, **kwargs)
        if backend == "nccl":
            of_nccl.add(distributed_c10d._get_default_group().group_name)

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("device_id", None)
        default = distributed_c10d._get_default_group().group_name
        limited = backend == "nccl" or (backend is None and default in of_nccl)
        group = make_more(ranks, timeout, BOTH if limited else _by_gloo(backend), *args, **kwargs)
        if limited and isinstance(group, dist.ProcessGroup):
            of_nccl.add(group.group_name)
        return group

    def refuse_host(group: Any, device: str) -> None:
        if device == "cpu" and group.group_name in of_nccl:
            raise RuntimeError("No backend type associated with device type cpu")

    def _get_backend(group: Any, device: torch.device) -> Any:
        refuse_host(group, device.type)
        return backend_of(group, device)

    def _get_object_coll_device(group: Any = None) -> str:
        group = group or distributed_c10d._get_default_group()
        return "cuda" if group.group_name in of_nccl else device_of_objects(group)

    def limited(collective: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    refuse_host(group, leaf.device.type)
            return collective(group, *args, **kwargs)

        return call

    pairs: dict[tuple[str, int], ThreadPoolExecutor] = {}

    def in_order(transfer: Any) -> Any:
        """Tags mean nothing, and a transfer begins when those before it, with the same rank in the same group, in
        either direction, have ended: they share a stream."""

        def call(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            if group.group_name not in of_nccl:
                return transfer(group, tensors, peer, tag)
            refuse_host(group, tensors[0].device.type)
            stream = pairs.setdefault((group.group_name, peer), ThreadPoolExecutor(1))
            return _Transfer(stream.submit(lambda: transfer(group, tensors, peer, 0).wait()))

        return call

    destroy = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        for key, stream in list(pairs.items()):
            if group is None or key[0] == group.group_name:
                pairs.pop(key)
                stream.shutdown()
        destroy(group)

    for module in (dist, distributed_c10d):
        module.destroy_process_group = destroy_process_group
        module.init_process_group, module.new_group = init_process_group, new_group
        module.is_nccl_available = lambda: True
    distributed_c10d._get_object_coll_device = _get_object_coll_device
    dist.ProcessGroup._get_backend = _get_backend
    dist.ProcessGroup.send = in_order(dist.ProcessGroup.send)
    dist.ProcessGroup.recv = in_order(dist.ProcessGroup.recv)
    for name in _COLLECTIVES.split():
        setattr(dist.ProcessGroup, name, limited(getattr(dist.ProcessGroup, name)))
    distributed_c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {})
    torch.cuda.nccl.version = lambda: (2, 27, 5)


def _by_gloo(backend: str | None) -> str | None:
    return backend.replace("nccl", "gloo") if backend is not None else None
