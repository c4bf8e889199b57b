"""The GPU kernel in Triton's interpreter, on CPU tensors, and its compilation for real targets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

# The interpreter has to be chosen before triton is imported, so each check runs in a process of its own.
_PARITY = """
import sys, torch
from tests.ops.cases import gradients, parameters, same_bits
from deepspeed.ops.adam import FusedAdam, triton_adam
from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam

dtype, grad_dtype, low_dtype = (getattr(torch, name) for name in sys.argv[1:4])
decoupled = sys.argv[4] == "decoupled"
shapes = [(5003,), (64, 33), (3,), (0,), (4096,)]
arguments = dict(lr=1e-2, weight_decay=0.1, adam_w_mode=decoupled)

class OnDevice(FusedAdam):
    def _native_update(self, lib, launch, group, grad_scale):
        steps = [int(self.state[self.params[i]]["step"]) + 1 for i in launch.indices]
        triton_adam.step(launch, steps, group, decoupled=group["adam_w_mode"], grad_scale=grad_scale)
        for i in launch.indices:
            self.state[self.params[i]]["step"] += 1

ours, reference = ([p.detach() for p in parameters(dtype, shapes)] for _ in range(2))
a, b = OnDevice(ours, **arguments), FusedAdam(reference, **arguments)
a.params = ours

def copies(params):
    return [torch.zeros_like(p, dtype=low_dtype) if i != 2 else None for i, p in enumerate(params)]

lows = [copies(ours), copies(reference)]
for step in range(3):
    live = slice(0, 5 if step != 1 else 3)  # counts of steps differ
    grads = gradients(ours, step, grad_dtype)
    for optimizer, ps, low in ((a, ours, lows[0]), (b, reference, lows[1])):
        optimizer.params = ps[live]
        optimizer.multi_tensor_step(
            optimizer.param_groups[0], ps[live], grads[live], grad_scale=0.3, low_precision=low[live]
        )
a.params = ours

def check(x, y):
    if x.dtype is torch.bfloat16:  # the interpreter truncates where the hardware rounds
        torch.testing.assert_close(x, y, rtol=2**-7, atol=1e-5)
    else:
        assert same_bits(x, y), (x.float() - y.float()).abs().max()

for p, q in zip(ours, reference):
    check(p, q)
    for name in ("exp_avg", "exp_avg_sq"):
        check(a.state[p][name], b.state[q][name])
for p, q in zip(*lows):
    if p is not None:
        check(p, q)
"""

_COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deepspeed.ops.adam import triton_adam as t

kernel = t._adam_kernel
scalars = "grad_scale beta1 rest1 beta2 rest2 eps decay l2 step_size inv_correction2".split()
signature = {"segments": "*i64", "blocks": "*i64", **{name: "fp32" for name in scalars}}
fp32, bf16 = t._DTYPES[0], t._DTYPES[1]
constants = {"DECOUPLED": True, "PARAM": fp32, "GRAD": bf16, "STATE": fp32, "LOW": bf16, "BLOCK": t.BLOCK}
signature |= {name: "constexpr" for name in constants}
for capability in (80, 90):
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8, "enable_fp_fusion": False}
    )
    assert "fma.rn.f32" not in compiled.asm["ptx"] and "div.rn.f32" in compiled.asm["ptx"]
    assert "sqrt.rn.f32" in compiled.asm["ptx"]
"""


def _run(code: str, *arguments: str, interpret: bool) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "types",
    [
        ("float32", "float32", "bfloat16", "decoupled"),
        ("float32", "bfloat16", "float16", "l2"),
        ("float16", "float16", "float32", "decoupled"),
        ("float16", "bfloat16", "bfloat16", "l2"),
    ],
    ids="-".join,
)
def test_same_arithmetic_as_the_host_kernel(types: tuple[str, ...]) -> None:
    _run(_PARITY, *types, interpret=True)


def test_compiles_for_gpus_without_fused_multiply_adds() -> None:
    _run(_COMPILE, interpret=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_bits_on_a_gpu() -> None:
    from deepspeed.ops.adam import FusedAdam
    from tests.ops.cases import gradients, parameters, same_bits

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
