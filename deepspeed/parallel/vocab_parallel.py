"""Vocabulary-parallel softmax and losses: the arithmetic behind every interface to them.

No rank holds whole logits: each token's maximum, sum of exponentials and target logit are reduced over ranks (Shoeybi
et al.: Megatron-LM, 2019, section 3). Local logits are upcast to fp32 a chunk of tokens at a time, in forward and in
backward. All ranks get the same results. They must backpropagate the same loss: backward then needs no communication.

`deepspeed.parallel.tensor.logits` substitutes ``cross_entropy`` for torch's; the documented functions are in
`deepspeed.parallel.sequence`: `cross_entropy`, `vocab_parallel_ops`, and `linear_cross_entropy`, which has its own
algorithm because it never materializes the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator, communicator_of
from deepspeed.parallel.tensor.cuts import Cut

CHUNK_NUMEL = 1 << 22
"""Number of logits upcast to fp32 at a time: 16 MiB."""
REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's words ``[first, first + own)`` of a vocabulary of ``size`` split over ``group``."""

    group: Communicator
    first: int
    own: int
    size: int

    @classmethod
    def of_cut(cls, cut: Cut, group: Communicator) -> VocabularyPart:
        """Return this rank's part under ``cut``, which may leave a rank without words. ValueError: the parts are not
        one run of words per rank, in rank order."""
        if not cut.is_plain or cut.ranks != group.size:
            raise ValueError("each rank holds one run of the vocabulary, in rank order")
        return cls(group, sum(cut.extents[: group.rank]), cut.extents[group.rank], cut.size)

    def columns(
        self, words: Tensor, chosen: Tensor | None = None, run: slice | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a mask of the ``words`` (those ``chosen``) in this rank's part, or in a ``run`` of it, and their
        columns in its logits (0 for others)."""
        run = run or slice(0, self.own)
        column = words - (self.first + run.start)
        inside = (column >= 0) & (column < run.stop - run.start)
        if chosen is not None:
            inside &= chosen
        return inside, torch.where(inside, column, 0)

    def check(self, words: Tensor, ignored: int, what: str = "target") -> None:
        """Raise ValueError for a word outside the vocabulary. Synchronizes with the device."""
        wrong = (words != ignored) & ((words < 0) | (words >= self.size))
        if bool(wrong.any()):
            raise ValueError(
                f"{what} {int(words[wrong][0])} is out of range for vocabulary size {self.size} "
                f"(ignore_index is {ignored})"
            )


@untraced
def vocabulary_part(
    own: int,
    group: Any,
    start: int | None = None,
    end: int | None = None,
    size: int | None = None,
    *,
    device: torch.device,
) -> VocabularyPart:
    """Return the part of this rank, which has ``own`` words. Collective unless ``size`` is given or there is one rank.

    Args:
        group: the ranks that share the vocabulary; None: one rank.
        start, end: bounds of this rank's part; both or neither. Without them parts lie in rank order.
        size: size of the whole vocabulary; if given, ``start`` and ``end`` are not checked.

    ValueError, on every rank: the parts do not partition a vocabulary in rank order.
    """
    if (start is None) != (end is None):
        raise ValueError("pass both vocab_start_index and vocab_end_index, or neither")
    comm = communicator_of(group)
    if size is not None:
        if start is None:
            raise ValueError("global_vocab_size needs vocab_start_index and vocab_end_index as well")
        return VocabularyPart(comm, start, own, size)
    everyone = _gather_tuples(comm, (own, -1 if start is None else start, -1 if end is None else end), device)
    first = 0
    for rank, (words, its_start, its_end) in enumerate(everyone):
        if not words:
            raise ValueError(f"rank {rank} of the group has no vocabulary entry: use fewer ranks")
        if its_start >= 0 and (its_start, its_end) != (first, first + words):
            raise ValueError(
                f"rank {rank} of the group claims entries [{its_start}, {its_end}), but contiguous parts in rank "
                f"order give it [{first}, {first + words}): correct vocab_start_index and vocab_end_index"
            )
        first += words
    return VocabularyPart(comm, sum(words for words, _, _ in everyone[: comm.rank]), own, first)


def _gather_tuples(comm: Communicator, mine: tuple[int, ...], device: torch.device) -> list[list[int]]:
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    if comm.size == 1:
        return [list(mine)]
    everyone = torch.empty(comm.size, len(mine), dtype=torch.int64, device=device)
    comm.all_gather(everyone, own).wait()
    return everyone.tolist()


@untraced
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    part: VocabularyPart,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_numel: int = CHUNK_NUMEL,
) -> Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` of vocabulary-parallel logits. Collective: two small all-reduces in
    forward, none in backward.

    Args:
        logits: [.., this rank's words], any float dtype.
        target: [..], indices into the whole vocabulary, equal on all ranks.
        reduction: "mean" (over the targets that are not ignored; NaN without any), "sum" or "none".
        chunk_numel: maximum number of local logits in fp32 at a time.

    Returns:
        fp32 (fp64 for fp64 logits): a scalar, or [..] with "none". The gradient has the logits' dtype.

    Raises:
        ValueError: shapes do not match, or an unknown ``reduction``.
        IndexError: a target outside the vocabulary (checked for host tensors only: on a device it would synchronize).
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)} do not match")
    if logits.shape[-1] != part.own:
        raise ValueError(f"this rank has {part.own} entries, but got logits of width {logits.shape[-1]}")
    flat, labels = logits.reshape(target.numel(), part.own), target.reshape(-1).long()
    chosen = labels != ignore_index
    if labels.device.type == "cpu":
        wrong = labels[chosen & ((labels < 0) | (labels >= part.size))]
        if wrong.numel():
            raise IndexError(f"target {int(wrong[0])} is outside the vocabulary of {part.size}")
    rows = max(1, chunk_numel // max(1, part.own))
    losses: Tensor = _CrossEntropy.apply(flat, labels, chosen, part, label_smoothing, rows)  # pyright: ignore
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / chosen.sum() if reduction == "mean" else losses.sum()


@untraced
def log_probabilities(
    logits: Tensor, words: Tensor, part: VocabularyPart, ignore_index: int = -100
) -> Tensor:
    """Return the log-probabilities of ``words`` [rows, k] under ``logits`` [rows, own], fp32 or fp64, 0 where
    ``ignore_index``. Collective.
    """
    found: Tensor = _LogProbs.apply(logits, words, words != ignore_index, part)  # pyright: ignore
    return found


@untraced
def entropy(logits: Tensor, group: Communicator) -> Tensor:
    """Return the entropy of each row of ``logits`` [rows, own] in nats. Collective."""
    found: Tensor = _Entropy.apply(logits, group)  # pyright: ignore[reportAssignmentType]
    return found


@untraced
def divergence(p_logits: Tensor, q_logits: Tensor, group: Communicator) -> Tensor:
    """Return KL(p || q) of each row of logits [rows, own]. Collective."""
    found: Tensor = _Divergence.apply(p_logits, q_logits, group)  # pyright: ignore[reportAssignmentType]
    return found


# ------------------------------------------------------------------------------------------------ the softmax


def row_runs(count: int, rows: int) -> list[slice]:
    """Divide ``count`` rows into slices of at most ``rows``."""
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


@dataclass(frozen=True)
class _Softmax:
    """Normalizer of logits [rows, own]: the maximum of each row and the logarithm of the sum of exponentials relative
    to it. (Adding the two would round the second away where the first is large.)"""

    logits: Tensor
    top: Tensor
    log_total: Tensor

    def logs(self, part: slice) -> Tensor:
        """Return the log-probabilities of these rows, [.., own], in a new tensor."""
        wide = self.logits[part].to(self.top.dtype) - self.top[part, None]
        return wide.sub_(self.log_total[part, None])

    def runs(self) -> Iterator[slice]:
        """Yield slices of rows to be processed at a time."""
        rows, own = self.logits.shape
        return iter(row_runs(rows, max(1, CHUNK_NUMEL // max(1, own))) if own else ())

    def undefined(self) -> Tensor:
        return self.top == -torch.inf


def _row_maxima(group: Communicator, *all_logits: Tensor) -> Tensor:
    """Return the maximum of each row over all ranks, [logits, rows], fp32 or fp64."""
    first = all_logits[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    tops = torch.full((len(all_logits), len(first)), -torch.inf, dtype=dtype, device=first.device)
    for top, logits in zip(tops, all_logits, strict=True):
        if logits.shape[1]:
            top.copy_(logits.detach().amax(-1))
    group.all_reduce_max(tops).wait()
    return tops


def _softmaxes(group: Communicator, *all_logits: Tensor) -> list[_Softmax]:
    """Return the normalizers of logits of equal shape, in two collectives."""
    tops = _row_maxima(group, *all_logits)
    dtype = tops.dtype
    totals = torch.zeros_like(tops)
    for top, total, logits in zip(tops, totals, all_logits, strict=True):
        softmax = _Softmax(logits, top, total)
        for part in softmax.runs():
            total[part] = (logits[part].to(dtype) - top[part, None]).exp_().sum(-1)
    group.all_reduce(totals).wait()
    return [_Softmax(*each) for each in zip(all_logits, tops, totals.log(), strict=True)]


def _weighted(logs: Tensor, values: Tensor) -> Tensor:
    """Return ``exp(logs) * values``, and 0 for excluded words (log-probability -inf), whatever their value."""
    return (logs.exp() * values).masked_fill_(logs == -torch.inf, 0.0)


def _reduced(
    group: Communicator, logits: Tensor, inside: Tensor, column: Tensor, sums_all: bool, rows: int
) -> tuple[Tensor, Tensor]:
    """Return the maximum logit of each row, and [1 + k (+ 1), rows]: the sum of exponentials, the logits at ``column``
    [rows, k] where ``inside``, and the sum of all logits if ``sums_all``; relative to the maximum and summed over all
    ranks, in two collectives."""
    count, k = column.shape
    (top,) = _row_maxima(group, logits)
    sums = torch.zeros(k + 2 if sums_all else k + 1, count, dtype=top.dtype, device=logits.device)
    for run in row_runs(count, rows) if logits.shape[1] else ():
        wide = logits[run].to(top.dtype) - top[run, None]
        found = torch.where(inside[run], wide.gather(1, column[run]), 0)
        sums[1 : k + 1, run] = found.T
        if sums_all:
            sums[k + 1, run] = wide.sum(-1)
        sums[0, run] = wide.exp_().sum(-1)
    group.all_reduce(sums).wait()
    return top, sums


class _CrossEntropy(torch.autograd.Function):
    """Losses [n] of logits [n, own], fp32 or fp64, 0 where not ``chosen``; ``rows``: tokens upcast at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        chosen: Tensor,
        part: VocabularyPart,
        smoothing: float,
        rows: int,
    ) -> Tensor:
        inside, column = part.columns(labels, chosen)
        top, sums = _reduced(part.group, logits, inside[:, None], column[:, None], bool(smoothing), rows)
        log_sum = sums[0].log()
        losses = log_sum - (1 - smoothing) * sums[1]
        if smoothing:
            losses -= smoothing / part.size * sums[2]
        ctx.save_for_backward(logits, column, inside, chosen, top + log_sum)
        ctx.settings = part.size, smoothing, rows
        return losses.masked_fill_(~chosen, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, inside, chosen, normalizer = ctx.saved_tensors
        size, smoothing, rows = ctx.settings
        grad = torch.where(chosen, grad, 0)
        result = torch.empty_like(logits)
        for run in row_runs(logits.shape[0], rows) if logits.shape[1] else ():
            wide = (logits[run].to(normalizer.dtype) - normalizer[run, None]).exp_()
            if smoothing:
                wide -= smoothing / size
            at_target = torch.where(inside[run], smoothing - 1.0, 0.0).to(wide.dtype)
            wide.scatter_add_(1, column[run, None], at_target[:, None])
            result[run] = wide.mul_(grad[run, None])
        return (result, *[None] * 5)


class _LogProbs(torch.autograd.Function):
    """Log-probabilities: [rows, own], [rows, k] -> [rows, k]. Backward stays exact where adding the log-sum to a large
    maximum would round it away, at the cost of one more pass over memory than `_CrossEntropy`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, words: Tensor, chosen: Tensor, part: VocabularyPart) -> Tensor:
        inside, column = part.columns(words, chosen)
        rows = max(1, CHUNK_NUMEL // max(1, part.own))
        top, sums = _reduced(part.group, logits, inside, column, False, rows)
        log_total = sums[0].log()
        ctx.save_for_backward(logits, top, log_total, column, inside, chosen)
        return torch.where(chosen, sums[1:].T - log_total[:, None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, top, log_total, column, inside, chosen = ctx.saved_tensors
        softmax = _Softmax(logits, top, log_total)
        grad = torch.where(chosen, grads[0], 0)
        constant = softmax.undefined() | ~chosen.any(-1)
        result = torch.empty_like(logits)
        for part in softmax.runs():
            wide = softmax.logs(part).exp_().mul_(-grad[part].sum(-1, keepdim=True))
            wide.scatter_add_(1, column[part], torch.where(inside[part], grad[part], 0))
            result[part] = wide.masked_fill_(constant[part, None], 0.0)
        return result, None, None, None


class _Entropy(torch.autograd.Function):
    """Entropy in nats: [rows, own] -> [rows]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Communicator) -> Tensor:
        (softmax,) = _softmaxes(group, logits)
        entropy = torch.zeros_like(softmax.top)
        for part in softmax.runs():
            logs = softmax.logs(part)
            entropy[part] = -_weighted(logs, logs).sum(-1)
        group.all_reduce(entropy).wait()
        ctx.save_for_backward(logits, softmax.top, softmax.log_total, entropy)
        return entropy.clone()  # callers may mask it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, top, log_total, entropy = ctx.saved_tensors
        softmax = _Softmax(logits, top, log_total)
        result = torch.empty_like(logits)
        for part in softmax.runs():
            logs = softmax.logs(part)
            wide = _weighted(logs, logs + entropy[part, None]).mul_(-grads[0][part, None])
            result[part] = wide.masked_fill_(softmax.undefined()[part, None], 0.0)
        return result, None


class _Divergence(torch.autograd.Function):
    """KL(p || q): [rows, own] twice -> [rows]"""

    @staticmethod
    def forward(ctx: Any, p_logits: Tensor, q_logits: Tensor, group: Communicator) -> Tensor:
        p, q = _softmaxes(group, p_logits, q_logits)
        divergence = torch.zeros_like(p.top)
        for part in p.runs():
            log_p, log_q = p.logs(part), q.logs(part)
            terms = _weighted(log_p, log_p - log_q)
            terms.masked_fill_((log_q == -torch.inf) & (log_p != -torch.inf), torch.inf)
            divergence[part] = terms.sum(-1)
        group.all_reduce(divergence).wait()
        ctx.save_for_backward(p_logits, q_logits, p.top, q.top, p.log_total, q.log_total, divergence)
        return divergence.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of p: p (log p - log q - KL), and of q: q - p."""
        p_logits, q_logits, *statistics, divergence = ctx.saved_tensors
        p, q = _Softmax(p_logits, *statistics[::2]), _Softmax(q_logits, *statistics[1::2])
        needed = ctx.needs_input_grad
        results = [torch.empty_like(x) if needed[i] else None for i, x in enumerate((p_logits, q_logits))]
        undefined = p.undefined() | q.undefined()
        for part in p.runs():
            log_p, log_q, grad = p.logs(part), q.logs(part), grads[0][part, None]
            if results[0] is not None:
                wide = _weighted(log_p, log_p - log_q - divergence[part, None]).mul_(grad)
                results[0][part] = wide.masked_fill_(undefined[part, None], 0.0)
            if results[1] is not None:
                wide = (log_q.exp_() - log_p.exp_()).mul_(grad)
                results[1][part] = wide.masked_fill_(undefined[part, None], 0.0)
        return *results, None
