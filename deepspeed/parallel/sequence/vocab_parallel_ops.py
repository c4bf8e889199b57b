"""Per-token log-probabilities, entropy and KL divergence of vocabulary-parallel logits.

For policy gradients and distillation with a vocabulary-parallel head: no rank ever has whole logits
(`deepspeed.parallel.vocab_parallel` has the arithmetic).

A row whose logits are all -inf has no distribution: its results are NaN and its gradients zero, so masking the results
is enough.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import communicator_of
from deepspeed.parallel.vocab_parallel import divergence, entropy, log_probabilities, vocabulary_part


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
    """Return the log-probabilities of given tokens.

    Args:
        vocab_parallel_logits: [.., own words].
        index: one token per row [..], or several [.., k]; equal on all ranks. The result is 0 at ``ignore_index``.
        tp_group: the ranks that share the vocabulary. None: one rank.
        vocab_start_index, vocab_end_index: bounds of this rank's words. By default, parts lie in rank order.
        global_vocab_size: vocabulary size; given with the bounds, it skips the exchange that would check them.

    Returns:
        The shape of ``index``, fp32 (fp64 for fp64 logits). Collective.

    ValueError: shapes do not match, parts do not partition the vocabulary, or an index is outside it.
    """
    rows = vocab_parallel_logits.shape[:-1]
    if index.shape != rows and index.shape[:-1] != rows:
        raise ValueError(
            f"index {tuple(index.shape)} does not match logits {tuple(vocab_parallel_logits.shape)}: "
            "expected their shape without the vocabulary, plus at most one more dimension"
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
    return log_probabilities(_flat(vocab_parallel_logits), flat, part, ignore_index).view(index.shape)


@untraced
def vocab_parallel_entropy(vocab_parallel_logits: Tensor, tp_group: Any = None) -> Tensor:
    """Return the entropy of each row of [.., own words] in nats: [..], fp32 (fp64 for fp64 logits). Collective."""
    found = entropy(_flat(vocab_parallel_logits), communicator_of(tp_group))
    return found.view(vocab_parallel_logits.shape[:-1])


@untraced
def vocab_parallel_kl_div(
    student_logits: Tensor, teacher_logits: Tensor, reverse: bool = False, tp_group: Any = None
) -> Tensor:
    """Return KL(teacher || student) of each row of [.., own words], or KL(student || teacher) if ``reverse``: [..].

    Both have the same parts of the same vocabulary. fp32 (fp64 for fp64 logits), with gradients of both. A word that
    the second distribution excludes (-inf) and the first does not makes the divergence infinite. Collective.

    ValueError: the shapes differ.
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)} and teacher_logits {tuple(teacher_logits.shape)} must have "
            "the same shape, of the same parts of a vocabulary"
        )
    first, second = (student_logits, teacher_logits) if reverse else (teacher_logits, student_logits)
    found = divergence(_flat(first), _flat(second), communicator_of(tp_group))
    return found.view(student_logits.shape[:-1])


def _flat(logits: Tensor) -> Tensor:
    return logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])
