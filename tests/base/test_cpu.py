from __future__ import annotations

import time

import psutil
import pytest
import torch

from deepspeed.base.accelerator.cpu_accelerator import CPU_Accelerator

MIB = 1024**2


@pytest.fixture
def cpu() -> CPU_Accelerator:
    return CPU_Accelerator()


def test_names_and_devices(cpu: CPU_Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.device_name() == cpu.device_name(3) == cpu.current_device_name() == cpu._name == "cpu"
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.is_available() and cpu.on_accelerator(torch.ones(1))
    with cpu.device(0):
        cpu.set_device(0)
        cpu.synchronize()
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert cpu.current_device() == 2
    monkeypatch.setenv("LOCAL_SIZE", "6")
    assert cpu.device_count() == 6
    monkeypatch.delenv("LOCAL_SIZE")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cpu.device_count() >= 1


def test_work_is_done_when_the_call_returns(cpu: CPU_Accelerator) -> None:
    assert cpu.is_synchronized_device() and cpu.use_host_timers()
    assert cpu.resolves_data_dependency() and cpu.handles_memory_backpressure()


def test_streams_and_events_can_be_used_like_those_of_a_gpu(cpu: CPU_Accelerator) -> None:
    start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="Record both events"):
        start.elapsed_time(end)
    before = time.perf_counter()
    with cpu.stream(cpu.Stream()), cpu.stream(None):
        start.record(cpu.current_stream())
        time.sleep(0.02)
        end.record(cpu.default_stream())
    end.synchronize()
    end.wait()
    whole_ms = 1000 * (time.perf_counter() - before)
    assert end.query() and 20 <= start.elapsed_time(end) <= whole_ms


def test_memory_is_that_of_the_process_and_its_peak_can_be_reset(cpu: CPU_Accelerator) -> None:
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    assert abs(before - psutil.Process().memory_info().rss) < 8 * MIB
    block = torch.ones(64 * MIB // 4)
    assert cpu.memory_allocated() - before > 56 * MIB
    del block
    cpu.empty_cache()
    # The peak was not sampled while the block lived twice: the kernel's own mark tells it.
    assert cpu.max_memory_allocated() - before > 56 * MIB
    assert cpu.max_memory_reserved() == cpu.max_memory_cached() >= cpu.memory_cached()
    stats = cpu.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
    cpu.reset_max_memory_allocated()
    assert cpu.max_memory_allocated() - before < 32 * MIB
    assert cpu.reset_rss() == pytest.approx(cpu.get_rss(), abs=8 * MIB)


def test_a_peak_between_two_questions_is_seen(cpu: CPU_Accelerator) -> None:
    cpu.reset_max_memory_cached()
    before = cpu.memory_reserved()
    torch.ones(64 * MIB // 4).sum()  # gone before anyone asks
    assert cpu.max_memory_reserved() - before > 56 * MIB


def test_memory_of_the_machine(cpu: CPU_Accelerator) -> None:
    assert 0 < cpu.available_memory() <= cpu.total_memory() == psutil.virtual_memory().total


def test_random_state(cpu: CPU_Accelerator) -> None:
    outside = cpu.get_rng_state()
    for seed in (cpu.manual_seed, cpu.manual_seed_all):
        seed(5)
        assert cpu.initial_seed() == cpu.default_generator(0).initial_seed() == 5
        state = cpu.get_rng_state(0)
        first = torch.rand(3)
        cpu.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
    assert cpu.random().initial_seed() == 5
    cpu.set_rng_state(outside)


def test_dtypes(cpu: CPU_Accelerator) -> None:
    assert cpu.is_fp16_supported() and cpu.is_bf16_supported()
    assert set(cpu.supported_dtypes()) == {torch.float32, torch.float16, torch.bfloat16}
    made = {
        torch.bfloat16: cpu.BFloat16Tensor,
        torch.uint8: cpu.ByteTensor,
        torch.float64: cpu.DoubleTensor,
        torch.float32: cpu.FloatTensor,
        torch.float16: cpu.HalfTensor,
        torch.int32: cpu.IntTensor,
        torch.int64: cpu.LongTensor,
    }
    for dtype, constructor in made.items():
        tensor = constructor([1, 2])
        assert tensor.dtype is dtype and tensor.device.type == "cpu" and tensor.tolist() == [1, 2]


def test_host_memory_needs_no_pinning(cpu: CPU_Accelerator) -> None:
    tensor = torch.arange(6).view(2, 3)
    assert cpu.pin_memory(tensor) is tensor
    assert cpu.pin_memory(tensor, match_shape=False).shape == (6,)
    assert cpu.is_pinned(tensor) is False
    cpu.unpin_memory(tensor)


def test_no_graphs(cpu: CPU_Accelerator) -> None:
    assert not cpu.is_current_stream_capturing()
    graph = cpu.create_graph()
    assert graph is None and not cpu.is_triton_supported()
    with cpu.capture_to_graph(graph):
        pass
    with pytest.raises(NotImplementedError, match="cpu"):
        cpu.replay_graph(graph)
