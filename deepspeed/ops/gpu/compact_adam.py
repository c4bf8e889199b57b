"""CompactAdam's step on a GPU: 8-bit moments, stochastically rounded weights, many tensors per launch.

A program has a few blocks of 256 elements of one tensor: it decodes their moments, updates, and encodes them, with the
reference's operations (`deepspeed/ops/formats/blockwise.py`) in the same order, each rounded individually.
"""

# A kernel is Triton, not Python: its argument types mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from deepspeed.ops.formats import blockwise as state_codes
from deepspeed.ops.gpu.dropout import signed
from deepspeed.ops.gpu.types import FLOAT_OF_CODE
from deepspeed.ops.multi_tensor import Launch
from deepspeed.ops.segment_blocks import rounds
from deepspeed.ops.update import Group, corrections

WORDS = 10  # of a segment: param, grad, two moments, two scales, low_precision, step, numel, start
_WORDS = tl.constexpr(WORDS)
_BLOCK = tl.constexpr(state_codes.BLOCK)
_BLOCKS = 4  # per program
_CODED = 3  # storage type of coded moments: `enum ds_state_codes`

_OFFSET, _BASE = tl.constexpr(state_codes.OFFSET), tl.constexpr(state_codes.BASE)
_ABOVE, _TINY = tl.constexpr(state_codes.ABOVE), tl.constexpr(state_codes.TINY)
_SIGNED_LAST = tl.constexpr(state_codes.BASE + (state_codes.SIGNED.top << state_codes.SIGNED.shift))
_ROOT_LAST = tl.constexpr(state_codes.BASE + (state_codes.UNSIGNED.top << state_codes.UNSIGNED.shift))
_CODES_ELEMENT, _CODES_HIGH = (
    tl.constexpr(state_codes.CODE_DITHER.element),
    tl.constexpr(state_codes.CODE_DITHER.high),
)
_PARAMS_ELEMENT, _PARAMS_HIGH = (
    tl.constexpr(state_codes.PARAM_DITHER.element),
    tl.constexpr(state_codes.PARAM_DITHER.high),
)
_SIGNED_SPAN, _ROOT_SPAN = tl.constexpr(state_codes.SIGNED.span), tl.constexpr(state_codes.UNSIGNED.span)
_SIGNED_SHIFT, _ROOT_SHIFT = tl.constexpr(state_codes.SIGNED.shift), tl.constexpr(state_codes.UNSIGNED.shift)


@triton.jit
def _dither(update, index, ELEMENT: tl.constexpr, HIGH: tl.constexpr):
    low = index.to(tl.uint32) * tl.full((), ELEMENT, tl.uint32)
    return update.to(tl.uint32) + low + (index >> 32).to(tl.uint32) * tl.full((), HIGH, tl.uint32)


@triton.jit
def _decoded(codes, factor, SHIFT: tl.constexpr):
    shifted = ((codes << SHIFT) | _BASE).to(tl.float32, bitcast=True)
    return (shifted - _OFFSET) * factor


@triton.jit
def _scale_of(values, inside):
    """Return the largest magnitude of each block [blocks, 1]; a NaN counts as largest; 0 below ``_TINY``."""
    bits = tl.where(inside, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    found = tl.max(bits, 1).to(tl.float32, bitcast=True)
    return tl.where(found < _TINY, 0.0, found)[:, None]


@triton.jit
def _encoded(magnitude, scale, dither, SPAN: tl.constexpr, SHIFT: tl.constexpr, LAST: tl.constexpr):
    span = tl.full(scale.shape, SPAN, tl.float32)
    factor = tl.where(scale == 0, 0.0, tl.div_rn(span, tl.where(scale == 0, 1.0, scale)) * _ABOVE)
    # Never negative; the bits of a NaN without its sign exceed all others, so it gets the last code.
    bits = (magnitude * factor + _OFFSET).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return ((tl.minimum(bits, LAST) + (dither >> (32 - SHIFT)).to(tl.int32)) >> SHIFT) & 0xFF


@triton.jit
def _decoded_signed(codes, factor):
    found = _decoded(codes & 127, factor, _SIGNED_SHIFT)
    return tl.where(codes >= 128, -found, found)


@triton.jit
def _encoded_signed(values, scale, dither):
    codes = _encoded(tl.abs(values), scale, dither, _SIGNED_SPAN, _SIGNED_SHIFT, _SIGNED_LAST)
    return codes | tl.where(values == values, (values.to(tl.int32, bitcast=True) >> 24) & 128, 0)


@triton.jit
def _encoded_root(root, scale, dither):
    """Encode roots. Only zero becomes code 0: a parameter would leap if the root under a non-zero first moment did."""
    codes = _encoded(root, scale, dither, _ROOT_SPAN, _ROOT_SHIFT, _ROOT_LAST)
    return tl.maximum(codes, ((root > 0) & (scale > 0)).to(tl.int32))


@triton.jit
def _rounded(values, dither):
    """Round stochastically to bf16; NaNs become the canonical one."""
    rounded = (values.to(tl.uint32, bitcast=True) + (dither >> 16)) >> 16
    rounded = tl.where(values != values, 0x7FC0, rounded.to(tl.int32))
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _stored_codes(codes1_at, codes2_at, scale1_at, scale2_at, m, root, dither, inside, is_block):
    """Store both moments in 8 bits, with one scale per block."""
    scale1, scale2 = _scale_of(m, inside), _scale_of(root, inside)
    tl.store(scale1_at, scale1, mask=is_block)
    tl.store(scale2_at, scale2, mask=is_block)
    tl.store(codes1_at, _encoded_signed(m, scale1, dither).to(tl.uint8), mask=inside)
    tl.store(codes2_at, _encoded_root(root, scale2, dither).to(tl.uint8), mask=inside)


@triton.jit
def _stored_params(param_at, p, params_offset, index, inside, PARAM: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Store the parameters in their dtype, rounded to nearest or stochastically."""
    if STOCHASTIC:
        dither = _dither(params_offset, index, _PARAMS_ELEMENT, _PARAMS_HIGH)
        tl.store(param_at, _rounded(p, dither), mask=inside)
    else:
        tl.store(param_at, p.to(PARAM), mask=inside)


@triton.jit(
    do_not_specialize=["codes_offset", "params_offset", "grad_scale", "step_size", "inv_correction2", "decay"]
)
def _compact_kernel(
    segments,  # [n, _WORDS] int64
    blocks,  # [programs, 2] int64: segment, first element
    codes_offset,  # offset of this step in the dither sequence; likewise params_offset
    params_offset,
    grad_scale,
    beta1,
    rest1,
    beta2,
    rest2,
    keep1,  # factor on a block's scale in decoding: beta1 and the root of beta2, over a code's span
    keep2,
    eps,
    decay,
    l2,
    step_size,
    inv_correction2,
    DECOUPLED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CODED: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    LOW: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = segments + tl.load(blocks + 2 * tl.program_id(0)) * _WORDS
    first = tl.load(blocks + 2 * tl.program_id(0) + 1)
    numel = tl.load(row + 8)
    block = first // _BLOCK + tl.arange(0, BLOCKS)[:, None]
    at = block * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside, is_block = at < numel, block * _BLOCK < numel
    param_at = tl.load(row).to(tl.pointer_type(PARAM)) + at
    p = tl.load(param_at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(tl.load(row + 1).to(tl.pointer_type(GRAD)) + at, mask=inside, other=0.0)
    g = grad.to(tl.float32) * grad_scale
    index = tl.load(row + 9) + at
    scale1_at = tl.load(row + 4).to(tl.pointer_type(tl.float32)) + block
    scale2_at = tl.load(row + 5).to(tl.pointer_type(tl.float32)) + block
    if CODED:
        codes1_at = tl.load(row + 2).to(tl.pointer_type(tl.uint8)) + at
        codes2_at = tl.load(row + 3).to(tl.pointer_type(tl.uint8)) + at
        codes1 = tl.load(codes1_at, mask=inside, other=0).to(tl.int32)
        codes2 = tl.load(codes2_at, mask=inside, other=0).to(tl.int32)
        scale1 = tl.load(scale1_at, mask=is_block, other=0.0)
        scale2 = tl.load(scale2_at, mask=is_block, other=0.0)
        m = _decoded_signed(codes1, scale1 * keep1)
        root = _decoded(codes2, scale2 * keep2, _ROOT_SHIFT)
        v = root * root
    else:
        m_at = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + at
        v_at = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + at
        m = beta1 * tl.load(m_at, mask=inside, other=0.0)
        v = beta2 * tl.load(v_at, mask=inside, other=0.0)
    if not DECOUPLED:
        g = g + l2 * p
    m = m + rest1 * g
    v = v + (rest2 * g) * g
    root = tl.sqrt_rn(v)
    p = p * decay - tl.div_rn(step_size * m, root * inv_correction2 + eps)
    if CODED:
        dither = _dither(codes_offset, index, _CODES_ELEMENT, _CODES_HIGH)
        _stored_codes(codes1_at, codes2_at, scale1_at, scale2_at, m, root, dither, inside, is_block)
    else:
        tl.store(m_at, m, mask=inside)
        tl.store(v_at, v, mask=inside)
    _stored_params(param_at, p, params_offset, index, inside, PARAM, STOCHASTIC)
    low = tl.load(row + 6)
    tl.store(low.to(tl.pointer_type(LOW)) + at, p.to(LOW), mask=at < tl.where(low != 0, numel, 0))


def step(launch: Launch, steps: Sequence[int], group: Group, *, decoupled: bool, grad_scale: float) -> None:
    """Update all segments of ``launch`` once; ``steps[i]`` is the step count of segment i."""
    (beta1, beta2), weight_decay, storage = group["betas"], group["weight_decay"], launch.storage
    for part in rounds(launch, steps, _BLOCKS * state_codes.BLOCK, WORDS - 2):
        step_size, inv_correction2 = corrections(group, part.steps)
        codes_offset, params_offset = (
            signed(part.steps * sequence.update)
            for sequence in (state_codes.CODE_DITHER, state_codes.PARAM_DITHER)
        )
        with torch.cuda.device_of(part.segments):
            _compact_kernel[(len(part.blocks),)](
                part.segments,
                part.blocks,
                codes_offset,
                params_offset,
                float(grad_scale),
                float(beta1),
                1.0 - beta1,
                float(beta2),
                1.0 - beta2,
                beta1 / state_codes.SIGNED.span,
                math.sqrt(beta2) / state_codes.UNSIGNED.span,
                float(group["eps"]),
                1.0 - float(group["lr"]) * weight_decay if decoupled else 1.0,
                float(weight_decay),
                step_size,
                inv_correction2,
                DECOUPLED=bool(decoupled or weight_decay == 0),
                STOCHASTIC=bool(group["stochastic_rounding"]) and FLOAT_OF_CODE[storage.param] is tl.bfloat16,
                CODED=storage.state == _CODED,
                PARAM=FLOAT_OF_CODE[storage.param],
                GRAD=FLOAT_OF_CODE[storage.grad],
                LOW=FLOAT_OF_CODE[storage.low_precision],
                BLOCKS=_BLOCKS,
                num_warps=4,
                enable_fp_fusion=False,
            )
