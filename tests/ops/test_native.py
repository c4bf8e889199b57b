"""The native library itself: conversions, sums, reductions, and how it is found."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspeed.base.logging import logger
from deepspeed.ops import native
from deepspeed.ops.adam import FusedAdam
from tests.allocations import counted
from tests.ops.cases import DTYPES, same_bits

NARROW = [torch.bfloat16, torch.float16]


def _interesting_floats() -> torch.Tensor:
    """All sign and exponent values with mantissas at and around the rounding points of both 16-bit types."""
    mantissas = torch.tensor(
        [0, 1, 2, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF]
    )
    upper = torch.arange(512, dtype=torch.int64) << 23
    patterns = (upper[:, None] + mantissas[None, :]).reshape(-1)
    return torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)


def _equal_but_for_nan(left: torch.Tensor, right: torch.Tensor) -> bool:
    both_nan = left.isnan() & right.isnan()
    return same_bits(left.masked_fill(both_nan, 0), right.masked_fill(both_nan, 0))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rounding_is_to_nearest_even(dtype: torch.dtype, isa: str) -> None:
    values = _interesting_floats()
    out = torch.empty_like(values, dtype=dtype)
    native.scale_copy([out], [values])
    assert _equal_but_for_nan(out, values.to(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_widening_is_exact_for_every_value(dtype: torch.dtype, isa: str) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty(values.shape)
    native.scale_copy([out], [values])
    assert _equal_but_for_nan(out, values.float())
    native.scale_copy([back := torch.empty_like(values)], [out])
    assert _equal_but_for_nan(back, values)


@pytest.mark.parametrize("numel", [1000, 10 << 20])  # below and above the size that bypasses the cache
@pytest.mark.parametrize("use_library", [True, False])
def test_copies_of_bytes(numel: int, use_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every alignment; what lies between is left as it was."""
    if not use_library:
        monkeypatch.setattr(native, "library", lambda: None)
    source = torch.arange(numel, dtype=torch.int64).to(torch.uint8)
    target, expected = torch.zeros_like(source), torch.zeros_like(source)
    runs, place = [], 1
    for nbytes in (0, 1, 15, 16, 33, 129, 700, numel - 1000):
        runs.append((target.data_ptr() + place, source.data_ptr() + place // 2, max(nbytes, 0)))
        expected[place : place + nbytes] = source[place // 2 : place // 2 + nbytes]
        place += nbytes + 3
    native.copy_bytes(runs)
    assert torch.equal(target, expected)
    native.copy_bytes([])


@pytest.mark.parametrize("use_library", [True, False])
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_scale_copy(
    source: torch.dtype, target: torch.dtype, use_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not use_library:
        monkeypatch.setattr(native, "library", lambda: None)
    inputs = [torch.randn(n).to(source) for n in (1, 0, 1025, 100_003)]
    outputs = [torch.zeros_like(t, dtype=target) for t in inputs]
    native.scale_copy(outputs, inputs, 0.3)
    for out, value in zip(outputs, inputs, strict=True):
        assert same_bits(out, (value.float() * 0.3).to(target))
    own = inputs[2].clone()
    native.scale_copy([own], [own], 0.3)
    assert same_bits(own, (inputs[2].float() * 0.3).to(source))


@pytest.mark.parametrize("use_library", [True, False])
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_reduce_chunks(
    source: torch.dtype, target: torch.dtype, count: int, use_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not use_library:
        monkeypatch.setattr(native, "library", lambda: None)
    for numel in (0, 1, 1023, 70_001):
        inputs = [torch.randn(numel).to(source) for _ in range(count)]
        expected = inputs[0].float()
        for chunk in inputs[1:]:
            expected = expected + chunk.float()
        expected = (expected * 0.25).to(target)
        out = torch.empty(numel, dtype=target)
        native.reduce_chunks(out, inputs, 0.25)
        assert same_bits(out, expected)
        if source is target:  # in place, into each of the inputs
            for k in range(count):
                copies = [c.clone() for c in inputs]
                native.reduce_chunks(copies[k], copies, 0.25)
                assert same_bits(copies[k], expected)


def test_reduce_chunks_keeps_doubles_and_integers() -> None:
    doubles = [torch.tensor([1.0, 2.0**-60], dtype=torch.float64) for _ in range(3)]
    native.reduce_chunks(out := torch.empty(2, dtype=torch.float64), doubles)
    assert out.tolist() == [3.0, 3 * 2.0**-60]
    native.reduce_chunks(ints := torch.empty(2, dtype=torch.int64), [torch.tensor([2**53 + 1, 1])] * 2)
    assert ints.tolist() == [2**54 + 2, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_squares_is_exact_enough_for_fp32(dtype: torch.dtype, isa: str) -> None:
    values = (torch.randn(300_007) * 10 ** torch.empty(300_007).uniform_(-3, 3)).to(dtype)
    exact = math.fsum((values.double() ** 2).tolist())
    rounded = torch.tensor(exact).sqrt()
    for cuts in ([300_007], [1, 300_006], [7, 100_000, 200_000], [16] * 100 + [298_407]):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            total = native.sum_of_squares(list(values.split(cuts)))
            assert abs(total - exact) < 1e-13 * exact
            assert torch.tensor(total).sqrt() == rounded
    assert native.sum_of_squares([]) == 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_without_a_kernel_takes_bounded_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: fp64 copies of the whole tensor were 16 bytes per element."""
    values = torch.randn(3_000_001).to(dtype)
    exact = float(values.double().square().sum())
    monkeypatch.setattr(native, "library", lambda: None)
    roots = set()
    for piece in (1 << 16, 1 << 18, 1_000_001):
        monkeypatch.setattr(native, "HOST_PIECE", piece)
        with counted() as memory:
            total = native.sum_of_squares([values])
        assert memory.peak < 8 * piece + 16_384
        assert abs(total - exact) < 1e-13 * exact
        roots.add(torch.tensor(total).sqrt().item())
    assert len(roots) == 1


def test_sum_of_squares_has_the_same_bits_on_every_path() -> None:
    lib = native.library()
    if lib is None:
        pytest.skip("built without native kernels")
    values = [torch.randn(n) for n in (1, 15, 1024, 5003, 400_001)]
    before, totals = lib.ds_isa(), set()
    for isa in range(before + 1):
        for threads in (1, 2):
            lib.ds_set_isa(isa)
            torch.set_num_threads(threads)
            totals.add(tuple(native.sums_of_squares(values)))
    lib.ds_set_isa(before)
    assert len(totals) == 1


@pytest.mark.parametrize("use_library", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_sum_of_squares_shows_what_is_not_finite(
    bad: float, use_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not use_library:
        monkeypatch.setattr(native, "library", lambda: None)
    for dtype in DTYPES:
        largest = torch.full((4096,), torch.finfo(dtype).max, dtype=dtype)
        assert math.isfinite(native.sum_of_squares([largest]))
        largest[4095] = bad
        sums = native.sums_of_squares([torch.ones(3), largest])
        assert sums[0] == 3.0 and not math.isfinite(sums[1])


def test_missing_library_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.resources, "files", lambda _: tmp_path)
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    assert native.library.__wrapped__() is None
    (record,) = set(caplog.records)
    assert record.levelname == "WARNING" and "Native host kernels are not available" in record.message


def test_everything_runs_without_the_library(without_library: None) -> None:
    assert native.isa() is None
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    FusedAdam([p], lr=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.5))


@pytest.mark.parametrize("name", native.ISA_NAMES)
def test_environment_chooses_the_instruction_set(name: str) -> None:
    lib = native.library()
    if lib is None:
        pytest.skip("built without native kernels")
    best = native.isa()
    code = "from deepspeed.ops import native; print(native.isa())"
    environment = {**os.environ, "DS_NATIVE_ISA": name}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240
    )
    expected = min(native.ISA_NAMES.index(name), native.ISA_NAMES.index(best or "plain"))
    assert out.stdout.strip() == native.ISA_NAMES[expected], out.stderr


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_a_step_uses_as_many_threads_as_torch_may() -> None:
    if native.library() is None:
        pytest.skip("built without native kernels")
    code = """
        import os, torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        def threads(): return len(os.listdir("/proc/self/task"))
        allowed = torch.get_num_threads()
        torch.set_num_threads(1)
        param = torch.zeros(1 << 20)
        param.grad = torch.zeros(1 << 20)
        optimizer = DeepSpeedCPUAdam([param])
        optimizer.step()
        before = threads()
        torch.set_num_threads(allowed)
        optimizer.step()
        print(allowed, threads() - before)
    """
    for allowed in (1, 2):
        environment = {**os.environ, "OMP_NUM_THREADS": str(allowed)}
        command = [sys.executable, "-c", textwrap.dedent(code)]
        out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert out.stdout.split() == [str(allowed), str(allowed - 1)], out.stderr


def test_table_of_a_step_is_reused() -> None:
    """Counted, not timed: an unchanged list of tensors keeps its table, new gradients only move addresses."""
    params = [torch.randn(64) for _ in range(6)]
    grads = [torch.randn(64) for _ in params]
    optimizer = FusedAdam(params)
    group = optimizer.param_groups[0]
    optimizer.multi_tensor_step(group, params, grads)
    (table,) = optimizer._tables.values()
    for new in (list(grads), [g.clone() for g in grads]):
        optimizer.multi_tensor_step(group, params, new)
        assert list(optimizer._tables.values()) == [table]
    optimizer.multi_tensor_step(group, params, [g.double().bfloat16() for g in grads])
    assert list(optimizer._tables.values()) != [table]


def test_step_of_small_tensors_is_quick() -> None:
    """Measured against torch's plain loop in the same moments, which takes some ten times as long."""
    if native.library() is None:
        pytest.skip("built without native kernels")
    params, grads = [torch.randn(64, 64) for _ in range(6)], [torch.randn(64, 64) for _ in range(6)]
    optimizer = FusedAdam(params)
    group = optimizer.param_groups[0]
    plain = torch.optim.AdamW([param.clone().requires_grad_() for param in params], foreach=False)
    for param, grad in zip(plain.param_groups[0]["params"], grads, strict=True):
        param.grad = grad
    ours, torchs = float("inf"), float("inf")
    for _ in range(100):
        start = time.perf_counter()
        optimizer.multi_tensor_step(group, params, grads)
        ours = min(ours, time.perf_counter() - start)
        start = time.perf_counter()
        plain.step()
        torchs = min(torchs, time.perf_counter() - start)
    assert ours < torchs / 2


@pytest.mark.parametrize("native_library", [True, False])
def test_crc32_of_blocks_is_that_of_zlib(native_library, monkeypatch):
    if not native_library:
        monkeypatch.setattr(native, "library", lambda: None)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 70_000, dtype=np.uint8)
    for nbytes in [0, 1, 15, 16, 63, 64, 65, 79, 80, 127, 128, 1000, 4096, 4097, 69_000]:
        for start, block in ((0, 4096), (1, 100), (7, 64), (3, 16_384)):
            part = data[start : start + nbytes]
            expected = [zlib.crc32(part[at : at + block].tobytes()) for at in range(0, nbytes, block)]
            assert native.crc32_blocks(part.ctypes.data, nbytes, block).tolist() == expected
