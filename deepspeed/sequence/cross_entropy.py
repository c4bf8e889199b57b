"""Cross-entropy where each rank has the logits of its own tokens, and all ranks need the losses of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from deepspeed.comm.collectives import Communicator
from deepspeed.utils.untraced import untraced

from .exchange import communicator_of, gather_lengths


@untraced
def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, sp_group: Any
) -> Tensor:
    """The loss of every token of the sequence, on every rank of ``sp_group``.

    Args:
        vocab_parallel_logits: [own tokens, batch, vocabulary]; shards may have different lengths.
        target: [own tokens, batch], int64. -100: the token has loss 0.

    Returns:
        [all tokens, batch], fp32 (fp64 for such logits). In backward the gradients that arrive on the ranks are summed:
        with a loss that all ranks compute of the result, the mean of the ranks' gradients, which the engine takes, is
        that of one rank with the whole sequence.
    """
    wide = torch.promote_types(vocab_parallel_logits.dtype, torch.float32)
    loss = cross_entropy(
        vocab_parallel_logits.to(wide).flatten(0, 1), target.flatten(), reduction="none"
    ).view(target.shape)
    return losses_of_all_tokens(loss, communicator_of(sp_group))


def losses_of_all_tokens(own: Tensor, comm: Communicator) -> Tensor:
    """[own tokens, batch] of every rank, one after another: [all tokens, batch]; backward sums over ranks."""
    result: Tensor = _AllTokens.apply(own, comm)  # pyright: ignore[reportAssignmentType]
    return result


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, comm: Communicator) -> Tensor:
        lengths = gather_lengths(loss.shape[0], comm, loss.device)
        start = sum(lengths[: comm.rank])
        ctx.own, ctx.comm = slice(start, start + lengths[comm.rank]), comm
        longest, batch = max(lengths), loss.shape[1]
        padded = loss.new_zeros(longest, batch)
        padded[: len(loss)] = loss
        everyone = loss.new_empty(comm.size, longest, batch)
        comm.all_gather(everyone, padded).wait()
        return torch.cat([part[:length] for part, length in zip(everyone, lengths, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(total).wait()
        return total[ctx.own], None
