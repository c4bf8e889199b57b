"""Continue variances on ranks that know only their local gradients, with rare averaging.

The local gradient is the mean gradient plus noise, so its squares are too large: by nearly the same factor
everywhere, and by exactly that factor where a gradient is mostly noise. The factor is estimated from sums with random
signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator
from deepspeed.comm.compressed import Concatenated, compressed_mean, part_numel
from deepspeed.ops.formats.codecs import RootCodec
from deepspeed.optim.one_bit import pieces

OWN_VARIANCE = "own_variance"
"""State entry of a tensor: its variance, continued with this rank's gradients."""
SUMS = 4096
"""Length of the sketch: runs of this many elements are added up, each run with one random sign."""


def share_of_mean(grads: Sequence[Tensor], ranks: Communicator, seed: int) -> float:
    """Estimate the squared norm of the mean gradient of ``ranks``, divided by the mean of their squared norms. At
    most 1; the same on all of ``ranks``. Collective."""
    if ranks.size == 1:
        return 1.0
    own = random_sums(grads, seed).double()
    square = own.square().sum().reshape(1)
    found = torch.cat([own, square])
    ranks.all_reduce(found, scale=1.0 / ranks.size).wait()
    of_mean, mean = float(found[:-1].square().sum()), float(found[-1])
    return min(max(of_mean / mean, 0.5 / ranks.size), 1.0) if mean > 0 else 1.0


def random_sums(grads: Sequence[Tensor], seed: int) -> Tensor:
    """Return a linear sketch of ``grads``, fp32 [SUMS], whose expected squared norm over seeds is theirs."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(SUMS, device=grads[0].device)
    for grad in grads:
        flat = grad.detach().reshape(-1)
        runs = -(-flat.numel() // SUMS)
        signs = (
            torch.randint(0, 2, (runs,), generator=generator).mul_(2).sub_(1).to(flat.device, torch.float32)
        )
        whole = flat.numel() // SUMS
        for first in range(0, whole, SUMS):
            some = flat[first * SUMS : min(first + SUMS, whole) * SUMS].view(-1, SUMS).float()
            total += signs[first : first + len(some)] @ some
        if rest := flat.numel() % SUMS:
            total[:rest] += signs[-1] * flat[-rest:].float()
    return total


def continue_variances(own: Sequence[Tensor], grads: Sequence[Tensor], scale: float, beta2: float) -> None:
    """Compute ``own`` = beta2 * own + (1 - beta2) * scale * grads^2 in place."""
    for whole, source in zip(own, grads, strict=True):
        for variance, grad in pieces(whole, source):
            wide = grad.float()
            variance.mul_(beta2).addcmul_(wide, wide, value=(1.0 - beta2) * scale)


def average_variances(own: Sequence[Tensor], variances: Sequence[Tensor], ranks: Communicator) -> None:
    """Set ``variances`` to the mean of ``own`` over ``ranks``, the same on all of them. Collective."""
    torch._foreach_copy_(list(variances), list(own))
    if ranks.size == 1:
        return
    flat = [variance.contiguous() for variance in variances]
    ends = list(accumulate(variance.numel() for variance in flat))
    part = part_numel(ends[-1], ranks.size)
    compressed_mean(Concatenated(flat, [0, *ends[:-1]]), None, None, part, ranks, RootCodec())
    for variance, copy in zip(variances, flat, strict=True):
        if copy is not variance:
            variance.copy_(copy)
