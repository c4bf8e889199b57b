"""Cross-entropy of a vocabulary-parallel projection, without materializing the logits.

Logits exist for a block of this rank's words at a time, in forward and again in backward. Forward maintains a running
maximum and sum of exponentials of every token (M. Milakov, N. Gimelshein: Online normalizer calculation for softmax,
2018), and reduces them over ranks once at the end, as in Megatron-LM (Shoeybi et al., 2019, section 3). Backward
computes the weight gradient of a block of words in one product over all tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from deepspeed.base.tracing import untraced
from deepspeed.parallel.sequence.cross_entropy import check_reduction, reduced
from deepspeed.parallel.vocab_parallel import VocabularyPart, row_runs, vocabulary_part


@untraced
def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Compute the cross-entropy of ``hidden @ weight.T + bias`` and ``target``.

    Args:
        hidden: [.., hidden], equal on the ranks of ``tp_group``; backward sums its gradient over these.
        weight: [own words, hidden]; ``bias``: [own words], or None.
        target: [..], indices into the whole vocabulary. The loss is 0 at ``ignore_index``.
        tp_group: the ranks that share the vocabulary. None: one rank.
        sp_group: the ranks that share the sequence, over which "mean" and "sum" are taken.
        vocab_start_index, vocab_end_index: bounds of this rank's words. By default, parts lie in rank order.
        reduction: "mean" (over targets that are not ignored), "sum" or "none".
        chunk_size: bounds the logits alive at a time to ``chunk_size`` x this rank's words; by default about the number
            of elements of ``hidden``.

    Returns:
        fp32 (fp64 for fp64 inputs): a scalar, or [..] with "none". Products use the promoted dtype of ``hidden`` and
        ``weight``, or that of autocast. Collective.

    ValueError: shapes do not match, parts do not partition the vocabulary, or a target is outside it.
    """
    check_reduction(reduction)
    if hidden.shape[:-1] != target.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and target {tuple(target.shape)} do not match")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be [own words, {hidden.shape[-1]}], as hidden is"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1")
    part = vocabulary_part(len(weight), tp_group, vocab_start_index, vocab_end_index, device=hidden.device)
    labels = target.reshape(-1).long()
    part.check(labels, ignore_index)
    tokens = labels.numel()
    words = hidden.shape[-1] if chunk_size is None else part.own * chunk_size // max(1, tokens)
    task = _BlockwiseLogits(part, max(1, words), _product_dtype(hidden, weight))
    with torch.autocast(hidden.device.type, enabled=False):
        losses: Tensor = _LinearCrossEntropy.apply(  # pyright: ignore[reportAssignmentType]
            hidden.reshape(tokens, hidden.shape[-1]), weight, bias, labels, labels != ignore_index, task
        )
    return reduced(losses.view(target.shape), labels != ignore_index, reduction, sp_group)


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


class _BlockwiseLogits(NamedTuple):
    part: VocabularyPart
    words: int
    """Maximum number of words with logits at a time."""
    dtype: torch.dtype
    """Dtype of the products; everything computed from them is in fp32 (fp64)."""

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the logits [tokens, words], in a new tensor."""
        bias = None if bias is None else bias.to(self.dtype)
        made = linear(hidden, weight.to(self.dtype), bias)
        return made.to(self.wide)


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses [tokens], 0 where not ``chosen``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chosen: Tensor,
        task: _BlockwiseLogits,
    ) -> Tensor:
        inputs = hidden.to(task.dtype)
        top = torch.full((len(hidden),), -torch.inf, dtype=task.wide, device=hidden.device)
        total, own = torch.zeros_like(top), torch.zeros_like(top)
        for part in row_runs(len(weight), task.words):
            logits = task.logits(inputs, weight[part], None if bias is None else bias[part])
            higher = torch.maximum(top, logits.amax(-1))
            inside, place = task.part.columns(labels, run=part)
            own = torch.where(inside, logits.gather(1, place[:, None]).squeeze(1), own)
            origin = higher.masked_fill(higher == -torch.inf, 0)  # only excluded words so far
            total = total * (top - origin).exp() + logits.sub_(origin[:, None]).exp_().sum(-1)
            top = higher
        highest = top.clone()
        task.part.group.all_reduce_max(highest).wait()
        among, _ = task.part.columns(labels)
        sums = torch.stack([total * (top - highest).exp(), torch.where(among, own - highest, 0)])
        task.part.group.all_reduce(sums).wait()
        log_total = sums[0].log()
        ctx.save_for_backward(hidden, weight, bias, labels, chosen, highest, log_total)
        ctx.task = task
        return torch.where(chosen, log_total - sums[1], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, chosen, highest, log_total = ctx.saved_tensors
        task: _BlockwiseLogits = ctx.task
        inputs, grad = hidden.to(task.dtype), torch.where(chosen, grads[0], 0)[:, None]
        grad_hidden = torch.zeros(hidden.shape, dtype=task.wide, device=hidden.device)
        grad_weight, grad_bias = (
            torch.empty_like(x) if x is not None and needed else None
            for x, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        for part in row_runs(len(weight), task.words):
            logits = task.logits(inputs, weight[part], None if bias is None else bias[part])
            wide = logits.sub_(highest[:, None]).sub_(log_total[:, None]).exp_().mul_(grad)
            wide.masked_fill_(~chosen[:, None], 0.0)  # a token with only excluded words has NaN probabilities
            inside, place = task.part.columns(labels, run=part)
            wide.scatter_add_(1, place[:, None], torch.where(inside[:, None], -grad, 0))
            if grad_bias is not None:
                grad_bias[part] = wide.sum(0)
            narrow = wide.to(task.dtype)
            if grad_weight is not None:
                grad_weight[part] = narrow.T @ inputs
            if ctx.needs_input_grad[0]:
                grad_hidden += narrow @ weight[part].to(task.dtype)  # summed in fp32
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, None, None, None
        task.part.group.all_reduce(grad_hidden).wait()
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None
