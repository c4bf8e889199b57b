"""Behaviour common to all accelerators, tested with a fake device module of torch that records its calls."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.base.accelerator import DeepSpeedAccelerator, cuda_accelerator
from deepspeed.base.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.base.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.base.accelerator.torch_device import MPS_Accelerator, TorchDevice_Accelerator

DOCUMENTED = """
is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure device_name
device set_device current_device current_device_name device_count synchronize random set_rng_state
get_rng_state manual_seed manual_seed_all initial_seed default_generator Stream stream current_stream
default_stream Event empty_cache memory_allocated max_memory_allocated reset_max_memory_allocated
memory_cached max_memory_cached reset_max_memory_cached memory_stats reset_peak_memory_stats memory_reserved
max_memory_reserved total_memory available_memory is_bf16_supported is_fp16_supported supported_dtypes
is_available range_push range_pop lazy_call communication_backend_name is_triton_supported
prefer_triton_grouped_mm create_graph capture_to_graph replay_graph BFloat16Tensor ByteTensor DoubleTensor
FloatTensor HalfTensor IntTensor LongTensor pin_memory is_pinned unpin_memory on_accelerator op_builder_dir
create_op_builder get_op_builder build_extension export_envs visible_devices_envs set_visible_devices_envs
get_compile_backend set_compile_backend
""".split()


class Runtime:
    """A device module like ``torch.cuda``; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.generator = torch.Generator()
        self.default_generators = (self.generator,)
        self.Stream, self.Event = type("Stream", (), {}), type("Event", (), {})
        self.random = SimpleNamespace(name="random")

    def __getattr__(self, name: str) -> Any:
        answers = {
            "current_device": 1,
            "device_count": 4,
            "memory_allocated": 100,
            "max_memory_allocated": 150,
            "memory_reserved": 300,
            "max_memory_reserved": 350,
            "memory_stats": {"a": 1},
            "mem_get_info": (1000, 5000),
            "get_device_properties": SimpleNamespace(total_memory=5000),
            "initial_seed": 9,
            "is_available": True,
            "is_bf16_supported": False,
            "device": contextlib.nullcontext("device"),
            "stream": contextlib.nullcontext("stream"),
        }

        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            return answers.get(name)

        return call


class Some_Accelerator(DeepSpeedAccelerator):
    def __init__(self) -> None:
        super().__init__("some", "somecl")
        self.fake = Runtime()

    @property
    def _runtime(self) -> Any:
        return self.fake

    def is_available(self) -> bool:
        return True


@pytest.fixture
def some() -> Some_Accelerator:
    return Some_Accelerator()


@pytest.mark.parametrize("cls", [CPU_Accelerator, CUDA_Accelerator, TorchDevice_Accelerator, MPS_Accelerator])
def test_every_documented_method_is_there(cls: type) -> None:
    assert [name for name in DOCUMENTED if not hasattr(cls, name)] == []


def test_devices(some: Some_Accelerator) -> None:
    assert (some.device_name(), some.device_name(2), some.current_device_name()) == (
        "some",
        "some:2",
        "some:1",
    )
    assert some.device_count() == 4 and some.communication_backend_name() == "somecl"
    assert not some.is_synchronized_device() and not some.use_host_timers()
    with some.device(3) as inside:
        assert inside == "device"
    some.synchronize(2)
    some.set_device(3)
    assert some.fake.calls[-2:] == [("synchronize", (2,)), ("set_device", (3,))]
    assert not some.on_accelerator(torch.ones(1))


def test_memory(some: Some_Accelerator) -> None:
    assert some.memory_cached() == some.memory_reserved(0) == 300
    assert some.max_memory_cached() == some.max_memory_reserved() == 350
    assert some.memory_allocated() == 100 and some.max_memory_allocated() == 150
    assert some.total_memory() == 5000
    assert some.available_memory(2) == 1000 + (300 - 100)
    for reset in (
        some.reset_max_memory_allocated,
        some.reset_max_memory_cached,
        some.reset_peak_memory_stats,
    ):
        reset(3)
        assert some.fake.calls[-1] == ("reset_peak_memory_stats", (3,))


def test_random(some: Some_Accelerator) -> None:
    state = torch.zeros(1)
    some.set_rng_state(state)
    some.get_rng_state(2)
    some.manual_seed_all(4)
    assert some.fake.calls[-3:] == [
        ("set_rng_state", (state, 1)),
        ("get_rng_state", (2,)),
        ("manual_seed_all", (4,)),
    ]
    assert some.default_generator(0) is some.fake.generator and some.fake.calls[-1] == ("init", ())


def test_compile_backend(some: Some_Accelerator) -> None:
    assert some.get_compile_backend() == "inductor"
    some.set_compile_backend("eager")
    assert some.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match=r"'nope'.*eager"):
        some.set_compile_backend("nope")


def test_environment(some: Some_Accelerator) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    some.set_visible_devices_envs(environment, [1, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert some.export_envs() == []
    assert some.lazy_call(lambda: 7) == 7
    assert some.build_extension().__name__ == "BuildExtension"


def test_ranges_show_in_the_profiler(some: Some_Accelerator) -> None:
    some.range_push("before")
    with torch.profiler.profile() as profile:
        some.range_push("outer")
        some.range_push("inner")
        torch.ones(3).sum()
        some.range_pop()
        some.range_pop()
        some.range_pop()  # "before": opened while nothing was recorded
        some.range_pop()  # one too many does no harm
    names = [event.key for event in profile.key_averages()]
    assert "outer" in names and "inner" in names and "before" not in names


def test_other_torch_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Runtime()
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda name: getattr(torch, name))
    npu = TorchDevice_Accelerator("npu")
    assert npu.device_name(1) == "npu:1" and npu.is_available() and npu.memory_allocated() == 100
    assert npu.supported_dtypes() == [torch.float32, torch.float16] and not npu.is_bf16_supported()
    assert npu.visible_devices_envs() == ["ASCEND_RT_VISIBLE_DEVICES"]
    assert npu.communication_backend_name() == "gloo"  # the extension that registers another one is not there
    assert TorchDevice_Accelerator("xpu").communication_backend_name() == "xccl"
    with pytest.raises(ValueError, match="no torch.mlu"):
        TorchDevice_Accelerator("mlu")


def test_mps_speaks_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"current_allocated_memory": 10, "driver_allocated_memory": 30, "recommended_max_memory": 100}
    fake = SimpleNamespace(**{name: lambda value=value: value for name, value in answers.items()})
    fake.synchronize = lambda: None
    mps = MPS_Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda name: fake)
    assert mps.memory_allocated() == mps.max_memory_allocated() == 10
    assert mps.memory_cached() == 30 and mps.total_memory() == 100 and mps.available_memory() == 90
    assert mps.current_device_name() == "mps:0" and mps.communication_backend_name() == "gloo"
    mps.synchronize()
    with mps.device(0), mps.stream(None):
        assert mps.memory_stats()["reserved_bytes.all.current"] == 30


def test_ranges_of_cuda_have_domains_where_nvtx_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def domain(name: str) -> SimpleNamespace:
        calls.append(("domain", name))
        return SimpleNamespace(
            push_range=lambda message, category: calls.append((message, category)),
            pop_range=lambda: calls.append(("pop",)),
        )

    cuda = CUDA_Accelerator()
    monkeypatch.setattr(cuda_accelerator, "nvtx", SimpleNamespace(get_domain=domain))
    for name in "ab":
        cuda.range_push(name, domain="DeepSpeed", category="zero")
        cuda.range_pop(domain="DeepSpeed")
    assert calls == [("domain", "DeepSpeed"), ("a", "zero"), ("pop",), ("b", "zero"), ("pop",)]
    plain = SimpleNamespace(range_push=calls.append, range_pop=lambda: calls.append(("popped",)))
    monkeypatch.setattr(torch.cuda, "nvtx", plain)
    calls.clear()
    monkeypatch.setattr(cuda_accelerator, "nvtx", None)
    cuda.range_push("c", domain="DeepSpeed")
    cuda.range_pop(domain="DeepSpeed")
    assert calls == ["c", ("popped",)]


def test_cuda_without_a_gpu() -> None:
    cuda = CUDA_Accelerator()
    assert cuda.device_name() == "cuda" and cuda.device_name(1) == "cuda:1"
    assert cuda.communication_backend_name() == "nccl" and cuda.supports_nvtx_domain
    assert "NCCL" in cuda.export_envs()
    if not torch.cuda.is_available():
        assert not cuda.is_available() and cuda.device_count() == 0
        assert not torch.cuda.is_initialized()
