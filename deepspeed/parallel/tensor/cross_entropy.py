"""Cross-entropy of logits whose vocabulary is spread over the tensor-parallel ranks.

No rank holds whole logits: the maximum, the sum of exponentials and the target's logit of every token are reduced over
ranks (Shoeybi et al.: Megatron-LM, 2019, section 3). Local logits are widened to fp32 some tokens at a time, in forward
and in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from deepspeed.base.untraced import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.ranks import communicator_of

__all__ = ["VocabParallelCausalLMLoss", "VocabParallelCrossEntropy", "vocab_parallel_cross_entropy"]

CHUNK_NUMEL = 1 << 22
"""Logits that are widened to fp32 at a time: 16 MiB."""


@untraced
def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: Communicator | ProcessGroup | None,
    *,
    cut: Cut | None = None,
    run: tuple[int, int] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    divisor: float | Tensor | None = None,
    chunk_numel: int = CHUNK_NUMEL,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` of logits in parts. Collective: two small all-reduces, none in backward.

    Args:
        logits: [.., this rank's vocabulary], any float dtype.
        targets: [..] of the whole vocabulary, equal on all ranks.
        cut: of the vocabulary; by default as even as the ranks allow, which needs another small exchange.
        run: the first word of this rank and the size of the vocabulary, for callers that have no ``cut``: ranks hold
            consecutive runs.
        reduction: "mean" (over the targets that are not ignored), "sum" or "none".
        divisor: with "sum": divide by it (such as the number of tokens of several micro-batches).
        chunk_numel: at most so many local logits are in fp32 at a time.

    Returns:
        fp32 (fp64 for such logits): a scalar, or [..] with "none". The gradient has the logits' dtype.

    Raises:
        ValueError: shapes or ``reduction`` do not fit.
        IndexError: a target outside the vocabulary.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} do not fit")
    communicator = communicator_of(group)
    first, size = run or _own_run(logits, communicator, cut)
    flat, labels = logits.reshape(targets.numel(), logits.shape[-1]), targets.reshape(-1)
    chosen = labels != ignore_index
    _check_targets(labels, chosen, size)
    rows = max(1, chunk_numel // max(1, flat.shape[1]))
    losses = _CrossEntropy.apply(flat, labels, chosen, communicator, first, size, label_smoothing, rows)
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    if reduction == "mean":
        return total / chosen.sum()
    return total if divisor is None else total / divisor


def _own_run(logits: Tensor, group: Communicator, cut: Cut | None) -> tuple[int, int]:
    """Where this rank's vocabulary starts, and the size of the whole."""
    own = logits.shape[-1]
    if cut is None:
        extents = [own]
        if group.size > 1:
            every = torch.empty(group.size, dtype=torch.int64, device=logits.device)
            group.all_gather(every, torch.tensor([own], dtype=torch.int64, device=logits.device)).wait()
            extents = every.tolist()
    elif cut.is_plain and cut.ranks == group.size:
        extents = list(cut.extents)
    else:
        raise ValueError("each rank holds one run of the vocabulary, in rank order")
    if extents[group.rank] != own:
        raise ValueError(f"this rank has logits of {extents[group.rank]} tokens by the cut, and got {own}")
    return sum(extents[: group.rank]), sum(extents)


def _check_targets(labels: Tensor, chosen: Tensor, size: int) -> None:
    if labels.device.type != "cpu":  # a look at them would wait for the device
        return
    wrong = labels[chosen & ((labels < 0) | (labels >= size))]
    if wrong.numel():
        raise IndexError(f"target {int(wrong[0])} is outside the vocabulary of {size}")


class _CrossEntropy(torch.autograd.Function):
    """Losses [n] of logits [n, local], fp32 or fp64, 0 where not ``chosen``; ``rows``: tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        chosen: Tensor,
        group: Communicator,
        first: int,
        size: int,
        smoothing: float,
        rows: int,
    ) -> Tensor:
        count, local = logits.shape
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if local:
            highest = logits.detach().amax(-1).to(dtype)
        else:
            highest = torch.full((count,), -torch.inf, dtype=dtype, device=logits.device)
        group.all_reduce_max(highest).wait()
        inside = chosen & (labels >= first) & (labels < first + local)
        column = torch.where(inside, labels - first, 0)
        sums = torch.zeros(3, count, dtype=dtype, device=logits.device)
        for part in row_runs(count, rows) if local else ():
            wide = logits[part].to(dtype) - highest[part, None]
            found = wide.gather(1, column[part, None]).squeeze(1)
            sums[1, part] = torch.where(inside[part], found, 0)
            if smoothing:
                sums[2, part] = wide.sum(-1)
            sums[0, part] = wide.exp_().sum(-1)
        group.all_reduce(sums[: 3 if smoothing else 2]).wait()
        log_sum, own, every = sums[0].log(), sums[1], sums[2]
        losses = log_sum - (1 - smoothing) * own - smoothing / size * every
        ctx.save_for_backward(logits, column, inside, chosen, highest + log_sum)
        ctx.facts = size, smoothing, rows
        return losses.masked_fill_(~chosen, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, inside, chosen, normalizer = ctx.saved_tensors
        size, smoothing, rows = ctx.facts
        grad = torch.where(chosen, grad, 0)
        result = torch.empty_like(logits)
        for part in row_runs(logits.shape[0], rows) if logits.shape[1] else ():
            wide = (logits[part].to(normalizer.dtype) - normalizer[part, None]).exp_()
            if smoothing:
                wide -= smoothing / size
            at_target = torch.where(inside[part], smoothing - 1.0, 0.0).to(wide.dtype)
            wide.scatter_add_(1, column[part, None], at_target[:, None])
            result[part] = wide.mul_(grad[part, None])
        return (result, *[None] * 7)


def row_runs(count: int, rows: int) -> list[slice]:
    """``count`` rows, at most ``rows`` at a time."""
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


class VocabParallelCrossEntropy(nn.Module):
    """``torch.nn.CrossEntropyLoss`` of logits in parts; arguments as those of ``vocab_parallel_cross_entropy``."""

    def __init__(
        self,
        group: Communicator | ProcessGroup | None,
        *,
        cut: Cut | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.group = communicator_of(group)
        self.cut = cut
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits,
            targets,
            self.group,
            cut=self.cut,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        )


class VocabParallelCausalLMLoss:
    """The ``loss_function`` of a Transformers model whose head leaves the logits in parts.

    Computes what Transformers' ``ForCausalLMLoss`` does: labels are shifted by one unless ``shift_labels`` is given,
    the mean is over ``num_items_in_batch`` if that is given.

    ``otherwise``: the model's own loss function, for logits that are whole after all (an evaluation).
    """

    def __init__(
        self, group: Communicator | ProcessGroup | None, cut: Cut, otherwise: Any | None = None
    ) -> None:
        self.group = communicator_of(group)
        self.cut = cut
        self.otherwise = otherwise

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if self.otherwise is not None and logits.shape[-1] == self.cut.size:
            return self.otherwise(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **others,
            )
        if shift_labels is None:
            if labels is None:
                raise ValueError("a loss needs labels or shift_labels")
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        divisor = num_items_in_batch
        if isinstance(divisor, Tensor):
            divisor = divisor.to(logits.device)
        return vocab_parallel_cross_entropy(
            logits,
            shift_labels.to(logits.device),
            self.group,
            cut=self.cut,
            ignore_index=ignore_index,
            reduction="mean" if divisor is None else "sum",
            divisor=divisor,
        )
