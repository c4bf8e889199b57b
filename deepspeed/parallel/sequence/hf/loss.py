"""The loss of a sequence sharded over ranks.

A rank's loss is the mean over the counted tokens of its shard. Shards have different numbers of these (prompts and
padding do not count), so the sequence's loss is the mean of the ranks' losses weighted by their tokens. The engine
averages gradients over all ranks of its group, including those of one sequence, at every ZeRO stage; the weights here
account for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator, communicator_of


@untraced
def token_mean(loss: Tensor, tokens: Tensor | int, group: Any) -> Tensor:
    """Return the mean over the tokens of all ranks of ``group``, given each rank's mean. Collective.

    Args:
        loss: scalar; any value, including NaN, if ``tokens`` is 0.
        tokens: number of counted tokens on this rank.
        group: the ranks that share a sequence (``groups._get_sequence_parallel_group()``), or all ranks with the same
            weights (``groups._get_sequence_data_parallel_group()``) for a mean over the tokens of all sequences.

    Returns:
        The same value on every rank. Backward scales each rank's gradient such that the mean over ranks, which the
        engine takes, is the gradient of this value.
    """
    count = torch.as_tensor(tokens, dtype=torch.float64, device=loss.device)
    result: Tensor = _Weighted.apply(loss, count, communicator_of(group), True)  # pyright: ignore[reportAssignmentType]
    return result


@untraced
def token_sum(loss: Tensor, group: Any) -> Tensor:
    """Return the sum of the ranks' losses, which are already divided by the total number of tokens. Collective."""
    count = torch.ones((), dtype=torch.float64, device=loss.device)
    result: Tensor = _Weighted.apply(loss, count, communicator_of(group), False)  # pyright: ignore[reportAssignmentType]
    return result


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: Tensor, comm: Communicator, mean: bool) -> Tensor:
        weighted = torch.where(count > 0, loss.double() * count, 0.0)
        sums = torch.stack([weighted, count])
        comm.all_reduce(sums).wait()
        total = sums[1].clamp(min=1.0) if mean else torch.ones_like(count)
        ctx.weight, ctx.dtype = comm.size * count / total, loss.dtype
        return (sums[0] / total).to(loss.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (grads[0] * ctx.weight).to(ctx.dtype), None, None, None
