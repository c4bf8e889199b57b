"""Adam on many GPU tensors in one kernel launch, with the arithmetic of the host kernel and the PyTorch path.

Every operation is rounded individually: contraction to fused multiply-adds is disabled, division and square
root are correctly rounded. Each program updates one block of one tensor: a table of blocks identifies it, and the
table of pointers has the tensor's addresses (rows of `struct ds_segment`, see [Note: pointer tables]).
"""

# A kernel is Triton, not Python: its argument types mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepspeed.ops import native
from deepspeed.ops.gpu.types import FLOAT_OF_CODE
from deepspeed.ops.multi_tensor import Launch
from deepspeed.ops.segment_blocks import rounds
from deepspeed.ops.update import Group, corrections

BLOCK = 4096  # elements per program
_WORDS = tl.constexpr(native.SEGMENT_WORDS)


@triton.jit
def _adam_kernel(
    segments,  # [n, _WORDS] int64: param, grad, exp_avg, exp_avg_sq, low_precision, step, numel
    blocks,  # [programs, 2] int64: segment, first element
    grad_scale,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    l2,
    step_size,
    inv_correction2,
    DECOUPLED: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = segments + tl.load(blocks + 2 * program) * _WORDS
    offsets = tl.load(blocks + 2 * program + 1) + tl.arange(0, BLOCK)
    numel = tl.load(row + 6)
    inside = offsets < numel
    param_at = tl.load(row).to(tl.pointer_type(PARAM)) + offsets
    grad_at = tl.load(row + 1).to(tl.pointer_type(GRAD)) + offsets
    exp_avg_at = tl.load(row + 2).to(tl.pointer_type(STATE)) + offsets
    exp_avg_sq_at = tl.load(row + 3).to(tl.pointer_type(STATE)) + offsets
    low_address = tl.load(row + 4)

    p = tl.load(param_at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad_at, mask=inside, other=0.0).to(tl.float32) * grad_scale
    m = tl.load(exp_avg_at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq_at, mask=inside, other=0.0).to(tl.float32)
    if not DECOUPLED:
        g = g + l2 * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + (rest2 * g) * g
    denominator = tl.sqrt_rn(v) * inv_correction2 + eps
    p = p * decay - tl.div_rn(step_size * m, denominator)
    tl.store(exp_avg_at, m.to(STATE), mask=inside)
    tl.store(exp_avg_sq_at, v.to(STATE), mask=inside)
    tl.store(param_at, p.to(PARAM), mask=inside)
    low_at = low_address.to(tl.pointer_type(LOW)) + offsets
    tl.store(low_at, p.to(LOW), mask=offsets < tl.where(low_address != 0, numel, 0))


def step(launch: Launch, steps: list[int], group: Group, *, decoupled: bool, grad_scale: float) -> None:
    """Update all segments of `launch` once; `steps[i]` is the step count of segment i."""
    (beta1, beta2), weight_decay, storage = group["betas"], group["weight_decay"], launch.storage
    for part in rounds(launch, steps, BLOCK, native.SEGMENT_WORDS - 1):
        step_size, inv_correction2 = corrections(group, part.steps)
        with torch.cuda.device_of(part.segments):
            _adam_kernel[(len(part.blocks),)](
                part.segments,
                part.blocks,
                float(grad_scale),
                float(beta1),
                1.0 - beta1,
                float(beta2),
                1.0 - beta2,
                float(group["eps"]),
                1.0 - float(group["lr"]) * weight_decay if decoupled else 1.0,
                float(weight_decay),
                step_size,
                inv_correction2,
                DECOUPLED=bool(decoupled or weight_decay == 0),
                PARAM=FLOAT_OF_CODE[storage.param],
                GRAD=FLOAT_OF_CODE[storage.grad],
                STATE=FLOAT_OF_CODE[storage.state],
                LOW=FLOAT_OF_CODE[storage.low_precision],
                BLOCK=BLOCK,
                num_warps=8,
                enable_fp_fusion=False,
            )
