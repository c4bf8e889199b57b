"""Log-probabilities, entropy and KL divergence of every token, of logits whose vocabulary is spread over ranks.

What policy gradients and distillation need of a language model whose head leaves its logits in parts: no rank ever
has whole logits. Two numbers per token are reduced over ranks for the softmax, one more for the result. All ranks get
the same results, and have to go on with the same loss: then backward needs no communication.

A row of which all logits are -inf has no distribution: its results are NaN, its gradients zero, so that a mask over
the results is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.untraced import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.sequence.exchange import communicator_of
from deepspeed.parallel.sequence.vocabulary import vocabulary_part
from deepspeed.parallel.tensor.cross_entropy import CHUNK_NUMEL, row_runs

__all__ = ["vocab_parallel_entropy", "vocab_parallel_kl_div", "vocab_parallel_logprobs"]


@untraced
def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor,
    index: Tensor,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The log-probabilities of given tokens.

    Args:
        vocab_parallel_logits: [.., own words].
        index: [..]: a token of each row, or [.., k]: several; equal on all ranks. ``ignore_index``: the result is 0.
        tp_group: the ranks that share the vocabulary. None: one rank.
        vocab_start_index, vocab_end_index: of the own words. By default, parts lie in rank order.
        global_vocab_size: with these: they are believed, which spares an exchange.

    Returns:
        Of the shape of ``index``, fp32 (fp64 for such logits). Collective.

    ValueError: shapes do not fit, parts are no partition, or an index is outside the vocabulary.
    """
    rows = vocab_parallel_logits.shape[:-1]
    if index.shape != rows and index.shape[:-1] != rows:
        raise ValueError(
            f"index {tuple(index.shape)} does not fit logits {tuple(vocab_parallel_logits.shape)}: it has their shape "
            "without the vocabulary, and perhaps one more dimension"
        )
    part = vocabulary_part(
        vocab_parallel_logits.shape[-1],
        tp_group,
        vocab_start_index,
        vocab_end_index,
        global_vocab_size,
        device=vocab_parallel_logits.device,
    )
    words = index.long()
    part.check(words, ignore_index, "index")
    flat = words.reshape(rows.numel(), -1)
    found: Tensor = _LogProbs.apply(  # pyright: ignore[reportAssignmentType]
        _flat(vocab_parallel_logits), flat, flat != ignore_index, part.group, part.first
    )
    return found.view(index.shape)


@untraced
def vocab_parallel_entropy(vocab_parallel_logits: Tensor, tp_group: Any = None) -> Tensor:
    """The entropy of each row of [.., own words] in nats: [..], fp32 (fp64 for such logits). Collective."""
    found: Tensor = _Entropy.apply(_flat(vocab_parallel_logits), communicator_of(tp_group))  # pyright: ignore
    return found.view(vocab_parallel_logits.shape[:-1])


@untraced
def vocab_parallel_kl_div(
    student_logits: Tensor, teacher_logits: Tensor, reverse: bool = False, tp_group: Any = None
) -> Tensor:
    """KL(teacher || student) of each row of [.., own words], or KL(student || teacher) if ``reverse``: [..].

    Both have the same parts of the same vocabulary. fp32 (fp64 for such logits), with gradients of both. A word that
    the second distribution excludes (-inf) and the first does not makes the divergence infinite. Collective.

    ValueError: the shapes differ.
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)} and teacher_logits {tuple(teacher_logits.shape)} must have "
            "the same shape, of the same parts of a vocabulary"
        )
    first, second = (student_logits, teacher_logits) if reverse else (teacher_logits, student_logits)
    found: Tensor = _Divergence.apply(  # pyright: ignore[reportAssignmentType]
        _flat(first), _flat(second), communicator_of(tp_group)
    )
    return found.view(student_logits.shape[:-1])


@dataclass(frozen=True)
class _Softmax:
    """Of logits [rows, own]: the highest of each row and the logarithm of the sum of exponentials relative to it.
    (Their sum would lose the second where the first is large.)"""

    logits: Tensor
    top: Tensor
    log_total: Tensor

    def logs(self, part: slice) -> Tensor:
        """Log-probabilities of these rows, [.., own]: new memory."""
        wide = self.logits[part].to(self.top.dtype) - self.top[part, None]
        return wide.sub_(self.log_total[part, None])

    def parts(self) -> Iterator[slice]:
        """Rows that are worked on at a time."""
        rows, own = self.logits.shape
        return iter(row_runs(rows, max(1, CHUNK_NUMEL // max(1, own))) if own else ())

    def undefined(self) -> Tensor:
        return self.top == -torch.inf


def _softmaxes(group: Communicator, *all_logits: Tensor) -> list[_Softmax]:
    """Of logits of equal shape, in two collectives."""
    dtype = torch.promote_types(all_logits[0].dtype, torch.float32)
    tops = torch.full(
        (len(all_logits), len(all_logits[0])), -torch.inf, dtype=dtype, device=all_logits[0].device
    )
    for top, logits in zip(tops, all_logits, strict=True):
        if logits.shape[1]:
            top.copy_(logits.amax(-1))
    group.all_reduce_max(tops).wait()
    totals = torch.zeros_like(tops)
    for top, total, logits in zip(tops, totals, all_logits, strict=True):
        softmax = _Softmax(logits, top, total)
        for part in softmax.parts():
            total[part] = (logits[part].to(dtype) - top[part, None]).exp_().sum(-1)
    group.all_reduce(totals).wait()
    return [_Softmax(*each) for each in zip(all_logits, tops, totals.log(), strict=True)]


def _weighted(logs: Tensor, values: Tensor) -> Tensor:
    """``exp(logs) * values``, and 0 for words that are excluded, whatever their value."""
    return (logs.exp() * values).masked_fill_(logs == -torch.inf, 0.0)


class _LogProbs(torch.autograd.Function):
    """[rows, own], [rows, k] -> [rows, k]"""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, words: Tensor, chosen: Tensor, group: Communicator, first: int
    ) -> Tensor:
        (softmax,) = _softmaxes(group, logits)
        inside = chosen & (words >= first) & (words < first + logits.shape[1])
        column = torch.where(inside, words - first, 0)
        found = torch.zeros(words.shape, dtype=softmax.top.dtype, device=logits.device)
        if logits.shape[1]:
            found += logits.gather(1, column)
            found = torch.where(inside, found - softmax.top[:, None], 0)
        group.all_reduce(found).wait()
        ctx.save_for_backward(logits, softmax.top, softmax.log_total, column, inside, chosen)
        return torch.where(chosen, found - softmax.log_total[:, None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, top, log_total, column, inside, chosen = ctx.saved_tensors
        softmax = _Softmax(logits, top, log_total)
        grad = torch.where(chosen, grads[0], 0)
        constant = softmax.undefined() | ~chosen.any(-1)
        result = torch.empty_like(logits)
        for part in softmax.parts():
            wide = softmax.logs(part).exp_().mul_(-grad[part].sum(-1, keepdim=True))
            wide.scatter_add_(1, column[part], torch.where(inside[part], grad[part], 0))
            result[part] = wide.masked_fill_(constant[part, None], 0.0)
        return result, None, None, None, None


class _Entropy(torch.autograd.Function):
    """[rows, own] -> [rows]"""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Communicator) -> Tensor:
        (softmax,) = _softmaxes(group, logits)
        entropy = torch.zeros_like(softmax.top)
        for part in softmax.parts():
            logs = softmax.logs(part)
            entropy[part] = -_weighted(logs, logs).sum(-1)
        group.all_reduce(entropy).wait()
        ctx.save_for_backward(logits, softmax.top, softmax.log_total, entropy)
        return entropy.clone()  # masked in place by some

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, top, log_total, entropy = ctx.saved_tensors
        softmax = _Softmax(logits, top, log_total)
        result = torch.empty_like(logits)
        for part in softmax.parts():
            logs = softmax.logs(part)
            wide = _weighted(logs, logs + entropy[part, None]).mul_(-grads[0][part, None])
            result[part] = wide.masked_fill_(softmax.undefined()[part, None], 0.0)
        return result, None


class _Divergence(torch.autograd.Function):
    """KL(p || q): [rows, own] twice -> [rows]"""

    @staticmethod
    def forward(ctx: Any, of_p: Tensor, of_q: Tensor, group: Communicator) -> Tensor:
        p, q = _softmaxes(group, of_p, of_q)
        divergence = torch.zeros_like(p.top)
        for part in p.parts():
            log_p, log_q = p.logs(part), q.logs(part)
            terms = _weighted(log_p, log_p - log_q)
            terms.masked_fill_((log_q == -torch.inf) & (log_p != -torch.inf), torch.inf)
            divergence[part] = terms.sum(-1)
        group.all_reduce(divergence).wait()
        ctx.save_for_backward(of_p, of_q, p.top, q.top, p.log_total, q.log_total, divergence)
        return divergence.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of p: p (log p - log q - KL); of q: q - p."""
        of_p, of_q, *statistics, divergence = ctx.saved_tensors
        p, q = _Softmax(of_p, *statistics[::2]), _Softmax(of_q, *statistics[1::2])
        needed = ctx.needs_input_grad
        results = [torch.empty_like(x) if needed[i] else None for i, x in enumerate((of_p, of_q))]
        undefined = p.undefined() | q.undefined()
        for part in p.parts():
            log_p, log_q, grad = p.logs(part), q.logs(part), grads[0][part, None]
            if results[0] is not None:
                wide = _weighted(log_p, log_p - log_q - divergence[part, None]).mul_(grad)
                results[0][part] = wide.masked_fill_(undefined[part, None], 0.0)
            if results[1] is not None:
                wide = (log_q.exp_() - log_p.exp_()).mul_(grad)
                results[1][part] = wide.masked_fill_(undefined[part, None], 0.0)
        return *results, None


def _flat(logits: Tensor) -> Tensor:
    return logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])
