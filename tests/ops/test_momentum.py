"""Updates over a frozen variance in one pass: the same as in PyTorch, and the same bits on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed.ops import momentum, native
from tests.ops.cases import DTYPES, same_bits

SCALARS = {"variance_correction": 0.7, "eps": 1e-3, "rate": 0.02, "decay": 0.99}


def tensors(numel: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "threads"), [(0, 1), (7, 1), (3001, 1), (200_003, 3)])
def test_follow(numel: int, threads: int, dtype: torch.dtype, isa: str) -> None:
    torch.set_num_threads(threads)
    m, g = tensors(numel, 2)
    grad = g.to(dtype)
    expected = m * 0.9 + (grad.float() * 3.0) * (1.0 - 0.9)
    assert momentum.update(m, grad, 3.0, 0.9)
    assert same_bits(m, expected)


def step_of(m: Tensor, v: Tensor) -> Tensor:
    return m / ((v / 0.7).sqrt() + 1e-3) * 0.02


@pytest.mark.parametrize("low", [None, *DTYPES])
@pytest.mark.parametrize(("numel", "threads"), [(0, 1), (7, 1), (3001, 1), (200_003, 3)])
def test_frozen_step(numel: int, threads: int, low: torch.dtype | None, isa: str) -> None:
    torch.set_num_threads(threads)
    w, m, v = tensors(numel, 3)
    v.square_()
    rounded = None if low is None else torch.zeros(numel, dtype=low)
    expected = w * 0.99 - step_of(m, v)
    assert momentum.frozen_step(w, m, v, rounded, **SCALARS)
    torch.testing.assert_close(w, expected, rtol=1e-6, atol=1e-6)
    if rounded is not None:
        assert same_bits(rounded, w.to(rounded.dtype))


@pytest.mark.parametrize("keeps_param", [False, True])
def test_local_step(keeps_param: bool, isa: str) -> None:
    w, m, v, agreed, local = tensors(3001, 5)
    v.square_()
    before, rounded = w.clone(), torch.zeros(3001, dtype=torch.bfloat16)
    expected = (agreed * 0.99, local + step_of(m, v))
    assert momentum.frozen_step(w, m, v, rounded, **SCALARS, local=(agreed, local), keeps_param=keeps_param)
    torch.testing.assert_close((agreed, local), expected, rtol=1e-6, atol=1e-6)
    if keeps_param:
        assert same_bits(w, before) and not rounded.any()
    else:
        assert same_bits(w, agreed - local) and same_bits(rounded, w.bfloat16())


def test_same_bits_on_every_instruction_set() -> None:
    lib = native.library()
    if lib is None:
        pytest.skip("built without native kernels")
    before, found = lib.ds_isa(), []
    try:
        for isa in range(before + 1):
            lib.ds_set_isa(isa)
            w, m, v, agreed, local = tensors(5001, 5)
            momentum.frozen_step(w, m, v.square_(), None, **SCALARS)
            momentum.frozen_step(agreed.clone(), m, v, None, **SCALARS, local=(agreed, local))
            found.append(torch.cat([w, agreed, local]))
    finally:
        lib.ds_set_isa(before)
    assert all(same_bits(found[0], other) for other in found)


def test_what_the_library_leaves_to_torch() -> None:
    w, m, v = tensors(64, 3)
    assert not momentum.update(m.view(8, 8).t(), w.view(8, 8), 1.0, 0.9)
    assert not momentum.frozen_step(w.bfloat16(), m, v, None, **SCALARS)


@pytest.mark.usefixtures("without_library")
def test_without_the_library() -> None:
    w, m, v = tensors(64, 3)
    assert not momentum.update(m, w, 1.0, 0.9) and not momentum.frozen_step(w, m, v, None, **SCALARS)
