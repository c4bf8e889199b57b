"""Sampling of tokens from logits: temperature, top-k, top-p, min-p and the draw, one program per row.

Nothing is sorted. Scores are compared by their bits, mapped to integers of the same order. The k-th largest score, and
the score above which the most probable tokens of a given mass lie, are found by bisection in 32 passes over the row,
which stays in cache. Equal scores are kept or dropped together. The draw is an exponential race: the first of clocks
with these rates is a sample with these probabilities. A clock is a function of a seed, the number of tokens drawn
before, and the token, so the rest of the batch has no influence.
"""

# Kernels are Triton, not Python: the types of their arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.gpu.dropout import mixed
from deepspeed.ops.gpu.types import FLOATS

_MIN_INT32 = tl.constexpr(-(2**31))


@triton.jit
def _score(logits, at, inside, factor):
    return tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32) * factor


@triton.jit
def _ordered(score):
    """Return int32 values in the order of the scores."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(logits, size, factor, most, least, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bound at or above ``least`` such that ``wanted`` scores are at or above it (COUNT), or such that the
    scores at or below it have more than the fraction ``wanted`` of the mass. Scores are mapped by ``_ordered``."""
    low, high = tl.cast(least, tl.int64), tl.cast(_ordered(most), tl.int64)
    total = 0.0
    if not COUNT:
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            score = _score(logits, at, at < size, factor)
            total += tl.sum(tl.where(_ordered(score) >= least, tl.exp(score - most), 0.0), 0)
    for _ in range(32):
        middle = (low + high + 1) >> 1 if COUNT else (low + high) >> 1
        found = 0.0
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < size
            score = _score(logits, at, inside, factor)
            key = _ordered(score)
            if COUNT:
                found += tl.sum(((key >= middle) & inside).to(tl.float32), 0)
            else:
                taken = (key >= least) & (key <= middle)
                found += tl.sum(tl.where(taken, tl.exp(score - most), 0.0), 0)
        if COUNT:
            enough = found >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        else:
            enough = found > wanted * total
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle + 1)
        low = tl.minimum(low, high)
    return high.to(tl.int32) if not COUNT else low.to(tl.int32)


@triton.jit
def _draw_kernel(
    logits,  # [rows, size]
    temperatures,  # [rows] fp32; 0: greedy
    counts,  # [rows] int32, top-k; 0: all
    masses,  # [rows] fp32, top-p
    leasts,  # [rows] fp32, min-p
    seeds,  # [rows] int64
    drawn,  # [rows] int32, tokens drawn before
    out,  # [rows] int64; -1: the logits are not finite
    size,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    temperature = tl.load(temperatures + row)
    is_greedy = temperature == 0
    factor = tl.where(is_greedy, 1.0, 1.0 / tl.where(is_greedy, 1.0, temperature))
    most, wrong = float("-inf"), 0
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        score = _score(logits, at, at < size, factor)
        most = tl.maximum(most, tl.max(score, 0))
        wrong += tl.sum(((score != score) | (score == float("inf"))).to(tl.int32), 0)
    least = tl.cast(_MIN_INT32, tl.int32)
    count = tl.load(counts + row)
    if (count > 0) & (count < size) & (wrong == 0):
        least = _above(logits, size, factor, most, least, count, True, BLOCK)
    mass = tl.load(masses + row)
    if (mass < 1) & (wrong == 0):
        least = _above(logits, size, factor, most, least, 1.0 - mass, False, BLOCK)
    floor = tl.load(leasts + row)
    seed = tl.load(seeds + row)
    key = mixed(
        seed.to(tl.uint32) + mixed((seed >> 32).to(tl.uint32) + mixed(tl.load(drawn + row).to(tl.uint32)))
    )
    best, place = float("-inf"), tl.cast(0, tl.int64)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        score = _score(logits, at, at < size, factor)
        kept = (_ordered(score) >= least) & (tl.exp(score - most) >= floor) & (score > float("-inf"))
        word = mixed(at.to(tl.uint32) ^ key) >> 9
        uniform = (word.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
        clock = tl.where(is_greedy, score, score - tl.log(-tl.log(uniform)))
        clock = tl.where(kept, clock, float("-inf"))
        here = tl.max(clock, 0)
        where = first + tl.argmax(clock, 0)
        place = tl.where(here > best, where.to(tl.int64), place)
        best = tl.maximum(best, here)
    wrong += tl.where(best == float("-inf"), 1, 0)
    tl.store(out + row, tl.where(wrong > 0, tl.cast(-1, tl.int64), place))


def supports(logits: Tensor) -> bool:
    """Return whether there is a kernel for these logits."""
    return logits.dtype in FLOATS and logits.dim() == 2 and logits.stride(1) == 1


def draw(
    logits: Tensor,
    *,
    temperatures: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    seeds: Sequence[int],
    drawn: Sequence[int],
) -> list[int]:
    """Sample a token from each row of ``logits`` [rows, vocabulary]; -1 for rows with non-finite logits. Each sequence
    has one entry per row; temperature 0 is greedy; ``drawn``: number of tokens drawn with the seed before."""
    device, size = logits.device, logits.shape[1]
    floats = torch.tensor([temperatures, top_p, min_p], dtype=torch.float32).to(device)
    whole = torch.tensor([top_k, drawn], dtype=torch.int32).to(device)
    out = torch.empty(len(logits), dtype=torch.int64, device=device)
    if len(logits):
        with torch.cuda.device_of(logits):
            _draw_kernel[(len(logits),)](
                logits,
                floats[0],
                whole[0],
                floats[1],
                floats[2],
                torch.tensor(seeds, dtype=torch.int64).to(device),
                whole[1],
                out,
                size,
                logits.stride(0),
                BLOCK=min(4096, triton.next_power_of_2(size)),
                num_warps=8,
            )
    return out.tolist()
