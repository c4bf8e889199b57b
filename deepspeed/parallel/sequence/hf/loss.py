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

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator, communicator_of
from deepspeed.parallel.tensor.mappings import mapped


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
    return _weighted(loss, count, communicator_of(group), mean=True)


@untraced
def token_sum(loss: Tensor, group: Any) -> Tensor:
    """Return the sum of the ranks' losses, which are already divided by the total number of tokens. Collective."""
    count = torch.ones((), dtype=torch.float64, device=loss.device)
    return _weighted(loss, count, communicator_of(group), mean=False)


def _weighted(loss: Tensor, count: Tensor, comm: Communicator, *, mean: bool) -> Tensor:
    sums = torch.stack([torch.where(count > 0, loss.detach().double() * count, 0.0), count])
    comm.all_reduce(sums).wait()
    total = sums[1].clamp(min=1.0) if mean else torch.ones_like(count)
    result, weight = (sums[0] / total).to(loss.dtype), comm.size * count / total
    return mapped(loss, lambda _: result, lambda grad: (grad * weight).to(loss.dtype))
