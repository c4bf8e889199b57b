"""Cross-entropy of logits in parts against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.sequence.cross_entropy import VocabParallelCausalLMLoss
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.vocab_parallel import VocabularyPart, cross_entropy, vocabulary_part
from tests.parallel.tensor.blocks import tensor_parallel
from tests.pool import distributed

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def whole(vocabulary: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(vocabulary, (3, 5))
    targets[1, 2] = -100
    return 4 * torch.randn(3, 5, vocabulary), targets


def torchs(logits: Tensor, targets: Tensor, smoothing: float, reduction: str) -> Tensor:
    loss = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, reduction=reduction
    )
    return loss.view(3, 5) if reduction == "none" else loss


@pytest.mark.parametrize("vocabulary", [11, 2])
@distributed(world_size=3)
def test_equals_torchs(vocabulary: int) -> None:
    """Uneven vocabularies, even one in which a rank has nothing; no rank sends logits."""
    group = tensor_parallel().communicator("tp")
    cut = Cut.even(-1, vocabulary, 3)
    for smoothing, reduction in ((0.0, "mean"), (0.2, "sum"), (0.2, "none")):
        logits, targets = whole(vocabulary)
        logits.requires_grad_()
        expected = torchs(logits, targets, smoothing, reduction)
        weights = torch.linspace(0.5, 2, expected.numel()).view_as(expected)
        (grad,) = torch.autograd.grad((weights * expected).sum(), logits)
        own = cut.take(logits.detach(), group.rank).clone().requires_grad_()
        group.reset_counters()
        part = VocabularyPart.of_cut(cut, group)
        found = cross_entropy(
            own, targets, part, label_smoothing=smoothing, reduction=reduction, chunk_numel=8
        )
        assert group.collectives == {"all_reduce_max": 1, "all_reduce": 1}
        assert group.bytes_sent <= 2 * 15 * 4 * 4  # four numbers per token
        (own_grad,) = torch.autograd.grad((weights * found).sum(), own)
        torch.testing.assert_close(found, expected, **CLOSE)
        torch.testing.assert_close(own_grad, cut.take(grad, group.rank), **CLOSE)


@distributed(world_size=2)
def test_causal_loss_and_16_bit() -> None:
    group = tensor_parallel().communicator("tp")
    logits, targets = whole(10)
    part = logits.chunk(2, -1)[group.rank].clone().bfloat16().requires_grad_()
    words = vocabulary_part(5, group.group, device=part.device)
    loss = cross_entropy(part, targets, words, label_smoothing=0.1)
    expected = torchs(logits.bfloat16().float(), targets, 0.1, "mean")
    torch.testing.assert_close(loss, expected, **CLOSE)
    (grad,) = torch.autograd.grad(loss, part)
    assert grad.dtype == torch.bfloat16

    causal = VocabParallelCausalLMLoss(group, otherwise=lambda logits, **_: logits.sum())
    shifted = functional.cross_entropy(
        logits.bfloat16().float()[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum"
    )
    found = causal(part, targets, vocab_size=10, num_items_in_batch=torch.tensor(7))
    torch.testing.assert_close(found, shifted / 7, **CLOSE)
    assert causal(logits, targets).item() == logits.sum().item()  # whole ones
    low = 5 * group.rank
    told = VocabParallelCausalLMLoss(
        group, vocab_start_index=low, vocab_end_index=low + 5, otherwise=causal.otherwise
    )
    assert told(logits, targets).item() == logits.sum().item()  # also at first


def test_mistakes_and_one_rank() -> None:
    logits, targets = whole(6)
    alone = VocabularyPart(Communicator(None), 0, 6, 6)
    torch.testing.assert_close(cross_entropy(logits, targets, alone), torchs(logits, targets, 0.0, "mean"))
    with pytest.raises(ValueError, match="reduction='max'"):
        cross_entropy(logits, targets, alone, reduction="max")
    with pytest.raises(ValueError, match="do not match"):
        cross_entropy(logits, targets[0], alone)
    with pytest.raises(ValueError, match="this rank has 6 entries"):
        cross_entropy(logits[..., :5], targets, alone)
    with pytest.raises(ValueError, match="one run of the vocabulary"):
        VocabularyPart.of_cut(Cut.even(-1, 6, 2), Communicator(None))
    with pytest.raises(IndexError, match="target 6 is outside the vocabulary of 6"):
        cross_entropy(logits, targets.clamp_min(6), alone)
