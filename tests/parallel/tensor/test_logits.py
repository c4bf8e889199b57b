"""Vocabulary-parallel logits in place of the whole ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed.compat.module_inject import LinearLayer
from deepspeed.parallel.tensor.logits import VocabParallelLogits
from tests.parallel.tensor.threads import ThreadGroup, run_ranks

TOKENS, WIDTH = 11, 6
LABELS = torch.tensor([[3, 0, -100, 10, 7], [5, 5, 1, -100, 2]])


class Squares(torch.autograd.Function):
    """Torch functions do not see what it does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return 2 * grad * logits / logits.numel()


def usual(logits: Tensor) -> Tensor:
    logits = (logits * 0.5).float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, TOKENS), LABELS[:, 1:].reshape(-1), label_smoothing=0.1)


def capped_and_summed(logits: Tensor) -> Tensor:
    logits = (logits / 3).tanh_() * 3
    return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum") / 7


def by_hand(logits: Tensor) -> Tensor:
    return -logits.log_softmax(-1)[..., 3].mean()


def masked(logits: Tensor) -> Tensor:
    logits = logits * 2
    logits[..., 4] = -5.0
    return F.cross_entropy(logits.view(-1, TOKENS), LABELS.view(-1).masked_fill(LABELS.view(-1) == 4, 0))


def watched(logits: Tensor) -> Tensor:
    with torch.no_grad():
        assert logits.argmax(-1).shape == LABELS.shape
    return usual(logits) + logits.logsumexp(-1).mean()


def through_a_function(logits: Tensor) -> Tensor:
    return Squares.apply(logits)


@pytest.mark.parametrize(
    ("loss_of", "in_parts"),
    [
        (usual, True),
        (capped_and_summed, True),
        (by_hand, False),
        (masked, False),
        (watched, False),
        (through_a_function, False),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_and_gradients(loss_of: Callable[[Tensor], Tensor], in_parts: bool, ranks: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, TOKENS)
    hidden = torch.randn(2, 5, WIDTH)

    def run(layer: nn.Module) -> tuple[Tensor, Tensor]:
        inputs = hidden.clone().requires_grad_()
        loss = loss_of(layer(inputs))
        loss.backward()
        assert inputs.grad is not None
        return loss.detach(), inputs.grad

    def work(group: ThreadGroup) -> tuple[tuple[Tensor, Tensor], bool]:
        layer = LinearLayer(copy.deepcopy(head), group, stand_in=True)
        found = run(layer)
        gathered = group.collectives["all_gather"] > 0
        own = layer.cut.take(head.weight.grad, group.rank)
        torch.testing.assert_close(layer.weight.grad, own, rtol=1e-5, atol=1e-6)
        return found, gathered

    expected = run(head)
    for found, gathered in run_ranks(ranks, work):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert gathered is not in_parts


def test_whole_outside_of_training() -> None:
    head = nn.Linear(WIDTH, TOKENS)
    hidden = torch.randn(2, WIDTH)

    def work(group: ThreadGroup) -> None:
        layer = LinearLayer(copy.deepcopy(head), group, stand_in=True)
        assert isinstance(layer(hidden), VocabParallelLogits) and layer(hidden).shape == (2, TOKENS)
        with torch.no_grad():
            assert type(layer(hidden)) is Tensor
        torch.testing.assert_close(layer.eval()(hidden), head(hidden))

    run_ranks(2, work)


def test_what_was_written_in_place_is_not_mistaken() -> None:
    def work(group: ThreadGroup) -> None:
        layer = LinearLayer(nn.Linear(WIDTH, TOKENS), group, stand_in=True)
        logits = layer(torch.randn(2, WIDTH))
        logits[:, 1] = 0.0
        with pytest.raises(RuntimeError, match="written in place"):
            Squares.apply(logits).backward()
        Squares.apply(logits.clone()).backward()

    run_ranks(2, work)
