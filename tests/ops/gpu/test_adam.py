"""The kernel of `FusedAdam` on GPUs: the bits of the host's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed.ops.adam import FusedAdam
from tests.ops.cases import gradients, parameters, same_bits
from tests.ops.gpu.triton_kit import assembled, compiling, interpreted


class _OnDevice(FusedAdam):
    """Updates by the kernel of GPUs."""

    def _native_update(self, lib, launch, group, grad_scale):
        from deepspeed.ops.adam import triton_adam

        steps = [int(self.state[self.params[i]]["step"]) + 1 for i in launch.indices]
        triton_adam.step(launch, steps, group, decoupled=group["adam_w_mode"], grad_scale=grad_scale)
        for i in launch.indices:
            self.state[self.params[i]]["step"] += 1


def check(found: Tensor, wanted: Tensor) -> None:
    if found.dtype is torch.bfloat16:  # the interpreter truncates where the hardware rounds
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-5)
    else:
        assert same_bits(found, wanted), (found.float() - wanted.float()).abs().max()


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "low_dtype", "decoupled"),
    [
        (torch.float32, torch.float32, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, torch.float16, False),
        (torch.float16, torch.float16, torch.float32, True),
        (torch.float16, torch.bfloat16, torch.bfloat16, False),
    ],
    ids=str,
)
@interpreted
def test_same_arithmetic_as_the_host_kernel(
    dtype: torch.dtype, grad_dtype: torch.dtype, low_dtype: torch.dtype, decoupled: bool
) -> None:
    shapes = [(5003,), (64, 33), (3,), (0,), (4096,)]
    ours, theirs = ([p.detach() for p in parameters(dtype, shapes)] for _ in range(2))
    common = {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": decoupled}
    a, b = _OnDevice(ours, **common), FusedAdam(theirs, **common)
    lows = [
        [torch.zeros_like(p, dtype=low_dtype) if i != 2 else None for i, p in enumerate(params)]
        for params in (ours, theirs)
    ]
    for step in range(3):
        live = slice(0, 5 if step != 1 else 3)  # counts of steps differ
        grads = gradients(ours, step, grad_dtype)
        for optimizer, params, low in ((a, ours, lows[0]), (b, theirs, lows[1])):
            optimizer.params = params[live]
            optimizer.multi_tensor_step(
                optimizer.param_groups[0],
                params[live],
                grads[live],
                grad_scale=0.3,
                low_precision=low[live],
            )
    for p, q in zip(ours, theirs, strict=True):
        check(p, q)
        for name in ("exp_avg", "exp_avg_sq"):
            check(a.state[p][name], b.state[q][name])
    for p, q in zip(*lows, strict=True):
        if p is not None and q is not None:
            check(p, q)


@compiling
def test_compiles_without_fused_multiply_adds() -> None:
    def step() -> None:
        params = [torch.randn(700)]
        optimizer = _OnDevice(params, lr=1e-2)
        optimizer.params = params
        low = [torch.zeros(700, dtype=torch.bfloat16)]
        grads = [torch.randn(700, dtype=torch.bfloat16)]
        optimizer.multi_tensor_step(optimizer.param_groups[0], params, grads, low_precision=low)

    found = assembled(step)
    assert {name for name, _, _ in found} == {"_adam_kernel"} and len(found) == 3
    for _, _, ptx in found:
        assert "fma.rn.f32" not in ptx and "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_bits_on_a_gpu() -> None:
    shapes = [(5003,), (64, 33), (3,), (0,), (70_000,)]
    host = [p.detach() for p in parameters(shapes=shapes)]
    device = [p.cuda() for p in host]
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in device]
    a, b = FusedAdam(host, lr=1e-2, weight_decay=0.1), FusedAdam(device, lr=1e-2, weight_decay=0.1)
    for step in range(3):
        grads = gradients(host, step)
        a.multi_tensor_step(a.param_groups[0], host, grads)
        b.multi_tensor_step(b.param_groups[0], device, [g.cuda() for g in grads], low_precision=copies)
    for p, q, copied in zip(host, device, copies, strict=True):
        assert same_bits(p, q.cpu()) and same_bits(copied.cpu(), p.bfloat16())
