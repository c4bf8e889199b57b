"""Cross-entropy with vocabulary parallelism, sequence parallelism, or both.

Ranks of a tensor-parallel group split the words of the same tokens; ranks of a sequence-parallel group split the
tokens. The vocabulary-parallel losses are in `deepspeed.parallel.vocab_parallel`; this module adds the sequence and
the documented interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.logging import warning_once
from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import communicator_of
from deepspeed.parallel.sequence.exchange import join_shards
from deepspeed.parallel.vocab_parallel import REDUCTIONS, VocabularyPart, cross_entropy, vocabulary_part


@untraced
def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    gather_sequence_loss: bool = False,
    backend: str = "torch",
) -> Tensor:
    """Compute the cross-entropy of vocabulary-parallel logits.

    Args:
        vocab_parallel_logits: [own tokens, .., own words].
        target: [own tokens, ..], indices into the whole vocabulary, equal on the ranks of ``tp_group``. The loss is 0
            at ``ignore_index``.
        tp_group: the ranks that share the vocabulary. None: one rank.
        sp_group: the ranks that share the sequence: "mean" and "sum" are over the tokens of all of them, and a rank's
            gradient is that of its own tokens.
        vocab_start_index, vocab_end_index: bounds of this rank's words. By default, parts lie in rank order.
        global_vocab_size: vocabulary size; given with the bounds, it skips the exchange that would check them.
        reduction: "mean" (over targets that are not ignored), "sum" or "none".
        gather_sequence_loss: with "none": return the losses of all tokens of ``sp_group``, in rank order; backward sums
            over its ranks.
        backend: accepted; there is one implementation, which upcasts logits to fp32 a chunk of tokens at a time.

    Returns:
        fp32: a scalar, or the shape of ``target``. Collective.

    ValueError: invalid arguments, parts that do not partition the vocabulary, or a target outside it.
    """
    check_reduction(reduction, gather_sequence_loss)
    if gather_sequence_loss and sp_group is None:
        raise ValueError("gather_sequence_loss needs sp_group, the ranks that share the sequence")
    if backend not in ("torch", "liger"):
        raise ValueError(f"backend={backend!r}: must be 'torch' or 'liger'")
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits {tuple(vocab_parallel_logits.shape)} and target {tuple(target.shape)} do not match"
        )
    part = vocabulary_part(
        vocab_parallel_logits.shape[-1],
        tp_group,
        vocab_start_index,
        vocab_end_index,
        global_vocab_size,
        device=vocab_parallel_logits.device,
    )
    loss = _losses(vocab_parallel_logits, target, part, ignore_index)
    if gather_sequence_loss:
        return join_shards(loss, communicator_of(sp_group), dim=0)
    return reduced(loss, target != ignore_index, reduction, sp_group)


@untraced
def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    sp_group: Any,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "none",
    gather_sequence_loss: bool = True,
    backend: str = "torch",
) -> Tensor:
    """Return the loss of every token of the sequence, on every rank of ``sp_group``.

    Args:
        vocab_parallel_logits: [own tokens, batch, vocabulary]; shards may have different lengths.
        target: [own tokens, batch], int64. The loss is 0 at ``ignore_index``.
        gather_sequence_loss: False: only this rank's losses, or the mean or sum, as ``reduction`` says.

    Other arguments are those of ``vocab_parallel_cross_entropy``.

    Returns:
        [all tokens, batch], fp32. Backward sums the incoming gradients over ranks: if all ranks compute the same loss
        from the result, the mean of the ranks' gradients, which the engine takes, equals the gradient of one rank with
        the whole sequence.
    """
    return vocab_parallel_cross_entropy(
        vocab_parallel_logits,
        target,
        tp_group,
        sp_group,
        vocab_start_index,
        vocab_end_index,
        ignore_index=ignore_index,
        reduction=reduction,
        gather_sequence_loss=gather_sequence_loss,
        backend=backend,
    )


@dataclass(eq=False)
class VocabParallelCausalLMLoss:
    """The ``loss_function`` of a Transformers model with vocabulary-parallel logits.

    ``labels`` are shifted by one, unless ``shift_labels`` are given; the sum is divided by ``num_items_in_batch`` if
    given. The first call determines and checks the words of each rank; use one object per head.

    ``sp_group`` stays None under a DeepSpeed engine, which combines the means of its sequence-parallel ranks itself.
    ``otherwise``: the model's own loss function, used for whole logits (as in evaluation); to detect them, this rank's
    bounds must be given, or known from an earlier call with split logits.
    """

    tp_group: Any = None
    sp_group: Any = None
    vocab_start_index: int | None = None
    vocab_end_index: int | None = None
    ignore_index: int = -100
    backend: str = "torch"
    otherwise: Any | None = None

    def __post_init__(self) -> None:
        self._part: VocabularyPart | None = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if self.otherwise is not None and self._is_whole(logits):
            return self.otherwise(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                shift_labels=shift_labels,
                num_items_in_batch=num_items_in_batch,
                **kwargs,
            )
        if shift_labels is None:
            if labels is None:
                raise ValueError("a loss needs labels or shift_labels")
            logits, shift_labels = logits[..., :-1, :], labels[..., 1:]
        part = self._own_part(logits)
        if vocab_size not in (None, part.size):
            warning_once(
                f"the head has {part.size} rows, but the model's config has vocab_size={vocab_size}; "
                "using the head's size"
            )
        shift_labels = shift_labels.to(logits.device)
        loss = _losses(logits, shift_labels, part, self.ignore_index)
        reduction = "mean" if num_items_in_batch is None else "sum"
        total = reduced(loss, shift_labels != self.ignore_index, reduction, self.sp_group)
        if num_items_in_batch is None:
            return total
        return total / torch.as_tensor(num_items_in_batch, device=total.device).clamp_min(1)

    def _is_whole(self, logits: Tensor) -> bool:
        start, end = self.vocab_start_index, self.vocab_end_index
        return start is not None and end is not None and logits.shape[-1] > end - start

    def _own_part(self, logits: Tensor) -> VocabularyPart:
        if self._part is None:
            bounds = self.vocab_start_index, self.vocab_end_index
            self._part = vocabulary_part(logits.shape[-1], self.tp_group, *bounds, device=logits.device)
            self.vocab_start_index = self._part.first
            self.vocab_end_index = self._part.first + self._part.own
        part = self._part
        if (logits.shape[-1], self.vocab_start_index) != (part.own, part.first):
            raise RuntimeError(
                f"the first call had vocabulary [{part.first}, {part.first + part.own}), but this one has "
                f"{logits.shape[-1]} entries from {self.vocab_start_index}: create one "
                "VocabParallelCausalLMLoss per head"
            )
        return part


def configure_vocab_parallel_loss(
    model: Any,
    vocab_parallel_head: Any,
    sp_group: Any = None,
    ignore_index: int = -100,
    backend: str = "torch",
) -> Any:
    """Set the loss function of ``model`` to that of a vocabulary-parallel head; the original is kept in
    ``model._deepspeed_original_loss_function``.

    ``vocab_parallel_head``: has ``mp_group`` and optionally ``vocab_start_index`` and ``vocab_end_index``.
    ValueError: ``model`` has no ``loss_function`` that can be replaced.
    """
    loss = VocabParallelCausalLMLoss(
        vocab_parallel_head.mp_group,
        sp_group,
        getattr(vocab_parallel_head, "vocab_start_index", None),
        getattr(vocab_parallel_head, "vocab_end_index", None),
        ignore_index,
        backend,
    )
    original = _replaced(model, loss)
    if not hasattr(model, "_deepspeed_original_loss_function"):
        model._deepspeed_original_loss_function = original
    return model


def _replaced(model: Any, loss: VocabParallelCausalLMLoss) -> Any:
    """Set the model's loss function to ``loss`` and return the previous one."""
    remedy = "gather the logits of its head (gather_output=True)"
    if not hasattr(model, "loss_function"):
        raise ValueError(
            f"{type(model).__name__} has no loss_function that could take sharded logits: {remedy}"
        )
    original = model.loss_function
    registered = getattr(model, "_modules", {}).pop("loss_function", None)
    try:
        model.loss_function = loss
        taken = model.loss_function is loss
    except (AttributeError, TypeError):
        taken = False
    if not taken:
        if registered is not None:
            model.loss_function = registered
        raise ValueError(f"the loss_function of {type(model).__name__} cannot be replaced: {remedy}")
    return original


# ---------------------------------------------------------------------------------------------- losses and sums


def check_reduction(reduction: str, gathers: bool = False) -> None:
    """Raise ValueError for an unknown reduction, or one other than "none" when losses are gathered."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")
    if gathers and reduction != "none":
        raise ValueError(f"gather_sequence_loss needs reduction='none', not {reduction!r}")


def _losses(logits: Tensor, target: Tensor, part: VocabularyPart, ignore_index: int) -> Tensor:
    words = target.long()
    part.check(words, ignore_index)
    return cross_entropy(logits, words, part, ignore_index=ignore_index, reduction="none")


def reduced(losses: Tensor, chosen: Tensor, reduction: str, sp_group: Any) -> Tensor:
    """Sum ``losses`` over the ranks of ``sp_group`` (None: one rank), or average over those ``chosen``. A rank's
    gradient is that of its own losses. Collective, unless ``reduction`` is "none"."""
    if reduction == "none":
        return losses
    own, comm = losses.sum(), communicator_of(sp_group)
    both = torch.stack([own.detach(), chosen.sum().to(own.dtype)])
    comm.all_reduce(both).wait()
    total = own + (both[0] - own.detach()) if comm.size > 1 else own
    return total / both[1].clamp_min(1) if reduction == "mean" else total
