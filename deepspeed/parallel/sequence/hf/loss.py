"""The loss of a sequence whose tokens lie on several ranks.

A rank's loss is the mean over the tokens of its shard that count. Shards have different numbers of these (prompts and
padding do not count), so the mean of the ranks' losses is not the loss of the sequence: each has to weigh as much as
its tokens. The engine averages gradients over all ranks of its group, those of one sequence included, at every ZeRO
stage; the weights here are made for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.sequence.exchange import communicator_of


@untraced
def token_mean(loss: Tensor, tokens: Tensor | int, group: Any) -> Tensor:
    """The mean over the tokens of all ranks of ``group``, from each rank's mean over its own. Collective.

    Args:
        loss: scalar; anything, NaN included, where ``tokens`` is 0.
        tokens: how many tokens of this rank count.
        group: the ranks that share a sequence (``groups._get_sequence_parallel_group()``), or all ranks with the same
            weights (``groups._get_sequence_data_parallel_group()``) for a mean over the tokens of all sequences.

    Returns:
        The same number on every rank. Backward gives each rank's loss the weight with which the mean of the ranks'
        gradients, which the engine takes, is the gradient of this number.
    """
    count = torch.as_tensor(tokens, dtype=torch.float64, device=loss.device)
    result: Tensor = _Weighted.apply(loss, count, communicator_of(group), True)  # pyright: ignore[reportAssignmentType]
    return result


@untraced
def token_sum(loss: Tensor, group: Any) -> Tensor:
    """The sum of the ranks' losses, for losses that are divided by the number of all tokens already."""
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
