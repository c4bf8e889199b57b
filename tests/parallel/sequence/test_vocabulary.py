"""Losses and statistics of logits in parts against torch's own of whole logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.compat.module_inject.layers import VocabParallelLinear
from deepspeed.parallel.sequence.cross_entropy import (
    VocabParallelCausalLMLoss,
    configure_vocab_parallel_loss,
    vocab_parallel_cross_entropy,
    vocab_sequence_parallel_cross_entropy,
)
from deepspeed.parallel.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from deepspeed.parallel.sequence.vocab_parallel_ops import (
    vocab_parallel_entropy,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
)
from tests.pool import distributed

WORDS, PARTS = 11, {1: [11], 2: [7, 4], 3: [4, 1, 6]}
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def drawn(*shape: int) -> Tensor:
    """Equal on all ranks."""
    return torch.randn(shape, dtype=torch.float64) * 3


def own(whole: Tensor, dim: int = -1) -> Tensor:
    """This rank's words."""
    return whole.split(PARTS[dist.get_world_size()], dim)[dist.get_rank()].detach().clone().requires_grad_()


def bounds() -> dict[str, int]:
    sizes = PARTS[dist.get_world_size()]
    start = sum(sizes[: dist.get_rank()])
    return {"vocab_start_index": start, "vocab_end_index": start + sizes[dist.get_rank()]}


def same(found: Tensor, part: Tensor, wanted: Tensor, whole: Tensor, dim: int = -1) -> None:
    """Values, and gradients of the part and the whole."""
    torch.testing.assert_close(found, wanted, **CLOSE)
    weights = torch.linspace(0.5, 2, max(1, wanted.numel()), dtype=wanted.dtype).view(wanted.shape)
    (of_part,) = torch.autograd.grad((found * weights).sum(), part, retain_graph=True)
    (of_whole,) = torch.autograd.grad((wanted * weights).sum(), whole, retain_graph=True)
    torch.testing.assert_close(of_part, own(of_whole, dim).detach(), **CLOSE)


@pytest.mark.parametrize("given", [False, True], ids=["parts found", "parts given"])
@distributed(world_size=[1, 3])
def test_log_probabilities(world_size: int, given: bool) -> None:
    whole = drawn(2, 5, WORDS).requires_grad_()
    part, group = own(whole), dist.group.WORLD
    facts: dict[str, Any] = {**bounds(), "global_vocab_size": WORDS} if given else {}
    logs = whole.log_softmax(-1)
    index = torch.randint(WORDS, (2, 5))
    index[0, 1] = -100
    chosen = index != -100
    wanted = logs.gather(-1, index.clamp_min(0)[..., None]).squeeze(-1) * chosen
    same(vocab_parallel_logprobs(part, index, group, **facts), part, wanted, whole)
    several = torch.randint(WORDS, (2, 5, 4))
    several[..., 1] = several[..., 0]  # the same word twice
    several[1, 1] = -100
    wanted = logs.gather(-1, several.clamp_min(0)) * (several != -100)
    same(vocab_parallel_logprobs(part, several, group, **facts), part, wanted, whole)


@distributed(world_size=[1, 3])
def test_entropy_and_divergence(world_size: int) -> None:
    student, teacher = drawn(3, 4, WORDS).requires_grad_(), drawn(3, 4, WORDS).requires_grad_()
    group = dist.group.WORLD
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    part, other = own(student), own(teacher)
    same(vocab_parallel_entropy(part, group), part, entropy, student)
    forward = (log_q.exp() * (log_q - log_p)).sum(-1)
    backward = (log_p.exp() * (log_p - log_q)).sum(-1)
    for reverse, wanted in ((False, forward), (True, backward)):
        found = vocab_parallel_kl_div(part, other, reverse, group)
        same(found, part, wanted, student)
        same(found, other, wanted, teacher)


@distributed(world_size=2)
def test_words_that_are_excluded_and_rows_without_words() -> None:
    whole = drawn(4, WORDS)
    whole[0, 2:8], whole[1] = -torch.inf, -torch.inf
    whole[2] += 1e6  # the sum of exponentials would be lost in the highest
    part, group = own(whole), dist.group.WORLD
    entropy = vocab_parallel_entropy(part, group)
    rows = [0, 2, 3]
    torch.testing.assert_close(
        entropy[rows], torch.distributions.Categorical(logits=whole[rows]).entropy(), rtol=1e-6, atol=1e-9
    )
    assert entropy[1].isnan()
    logs = vocab_parallel_logprobs(part, torch.tensor([0, 0, 4, 9]), group)
    divergence = vocab_parallel_kl_div(part, part.detach(), False, group)
    torch.testing.assert_close(divergence[rows], torch.zeros(3, dtype=torch.float64))
    mask = torch.tensor([True, False, True, True])
    total = sum(torch.where(mask, each, 0).sum() for each in (entropy, logs, divergence))
    (grad,) = torch.autograd.grad(total, part)
    assert grad.isfinite().all() and not grad[1].any()
    full = whole.clone()
    full[0] = 1.0
    infinite = vocab_parallel_kl_div(part.detach(), own(full), False, group)
    assert infinite[0] == torch.inf and infinite[3] == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@distributed(world_size=[1, 2, 3])
def test_cross_entropy(world_size: int, reduction: str) -> None:
    whole = drawn(5, 2, WORDS).requires_grad_()
    target = torch.randint(WORDS, (5, 2))
    target[3, 1] = 77
    wanted = functional.cross_entropy(
        whole.flatten(0, 1), target.flatten(), ignore_index=77, reduction=reduction
    )
    wanted = wanted.view(5, 2) if reduction == "none" else wanted
    part, group = own(whole), dist.group.WORLD
    for known in (bounds(), {}):
        found = vocab_parallel_cross_entropy(
            part, target, group, ignore_index=77, reduction=reduction, **known
        )
        same(found, part, wanted, whole)


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 100])
@distributed(world_size=[1, 3])
def test_of_a_projection(world_size: int, chunk_size: int | None) -> None:
    hidden, weight, bias = drawn(3, 4, 6).requires_grad_(), drawn(WORDS, 6), drawn(WORDS)
    target = torch.randint(WORDS, (3, 4))
    target[1, 2] = -100
    w, b = weight.requires_grad_(), bias.requires_grad_()
    logits = functional.linear(hidden, w, b)
    group, own_hidden = dist.group.WORLD, hidden.detach().clone().requires_grad_()
    own_w, own_b = own(w, 0), own(b, 0)
    for reduction in ("mean", "sum", "none"):
        wanted = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
        wanted = wanted.view(3, 4) if reduction == "none" else wanted
        found = vocab_parallel_linear_cross_entropy(
            own_hidden, own_w, target, own_b, group, reduction=reduction, chunk_size=chunk_size
        )
        same(found, own_w, wanted, w, 0)
        same(found, own_b, wanted, b, 0)
        mine, theirs = (
            torch.autograd.grad(x.sum(), y, retain_graph=True)[0]
            for x, y in ((found, own_hidden), (wanted, hidden))
        )
        torch.testing.assert_close(mine, theirs, **CLOSE)


class _Largest(TorchDispatchMode):
    """The most elements that any operation made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_logits_are_made(dtype: torch.dtype) -> None:
    hidden = torch.randn(64, 16).to(dtype).requires_grad_()
    weight = (torch.randn(2000, 16) / 4).to(dtype).requires_grad_()
    target = torch.randint(2000, (64,))
    with _Largest() as largest:
        loss = vocab_parallel_linear_cross_entropy(hidden, weight, target)
        loss.backward()
    assert largest.most <= max(weight.numel(), 64 * 16) < 64 * 2000
    assert loss.dtype is torch.float32 and weight.grad.dtype is dtype
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = functional.cross_entropy(functional.linear(*exact), target)
    wanted.backward()
    error = {"rtol": 2e-2, "atol": 2e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    for found, other in ((loss, wanted), (hidden.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        torch.testing.assert_close(found.double(), other, **error)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = vocab_parallel_linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(mixed.double(), wanted, rtol=2e-2, atol=2e-2)


@distributed(world_size=2)
def test_with_a_sequence_in_shards() -> None:
    """Each rank has its tokens with all words: what the ranks' gradients sum to is that of one rank."""
    group, rank = dist.group.WORLD, dist.get_rank()
    whole, target = drawn(5, 2, WORDS).requires_grad_(), torch.randint(WORDS, (5, 2))
    target[4] = -100
    wanted = functional.cross_entropy(whole.flatten(0, 1), target.flatten())
    (of_whole,) = torch.autograd.grad(wanted, whole)
    shard, labels = whole.detach().split([3, 2])[rank].clone().requires_grad_(), target.split([3, 2])[rank]
    found = vocab_parallel_cross_entropy(shard, labels, sp_group=group)
    torch.testing.assert_close(found, wanted, **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(found, shard)[0], of_whole.split([3, 2])[rank], **CLOSE)
    mean = vocab_sequence_parallel_cross_entropy(
        shard, labels, group, reduction="mean", gather_sequence_loss=False
    )
    torch.testing.assert_close(mean, wanted, **CLOSE)
    every = vocab_parallel_cross_entropy(
        shard, labels, sp_group=group, reduction="none", gather_sequence_loss=True
    )
    losses = functional.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="none").view(5, 2)
    torch.testing.assert_close(every, losses, **CLOSE)


class Model(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss_function = loss


class Stubborn(nn.Module):
    @property
    def loss_function(self) -> None:
        return None


@distributed(world_size=2)
def test_losses_of_causal_models() -> None:
    group = dist.group.WORLD
    whole, labels = drawn(2, 6, WORDS).requires_grad_(), torch.randint(WORDS, (2, 6))
    wanted = functional.cross_entropy(whole[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    part = own(whole)
    for original in (print, nn.CrossEntropyLoss()):
        model = Model(original)
        head = SimpleNamespace(mp_group=group, **bounds())
        assert configure_vocab_parallel_loss(model, head) is model
        assert model._deepspeed_original_loss_function is original
        same(model.loss_function(part, labels, vocab_size=WORDS), part, wanted / 10, whole)
        found = model.loss_function(part, labels, num_items_in_batch=torch.tensor(7))
        same(found, part, wanted / 7, whole)
        shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:]
        same(model.loss_function(part, shift_labels=shifted), part, wanted / 10, whole)
        with pytest.raises(RuntimeError, match="per head"):
            model.loss_function(part[..., :1], labels)
    for model in (nn.Linear(1, 1), Stubborn()):
        with pytest.raises(ValueError, match="gather_output=True"):
            configure_vocab_parallel_loss(model, SimpleNamespace(mp_group=group, **bounds()))


@distributed(world_size=2)
def test_a_head_in_parts_and_its_loss() -> None:
    hidden, labels = drawn(2, 6, 8), torch.randint(WORDS, (2, 6))
    inputs, whole = (hidden.clone().requires_grad_() for _ in range(2)), nn.Linear(8, WORDS).double()
    mine, theirs = inputs
    wanted = functional.cross_entropy(whole(theirs)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    head = VocabParallelLinear(whole, dist.group.WORLD)
    assert (head.vocab_size, head.vocab_end_index - head.vocab_start_index) == (WORDS, len(head.weight))
    found = configure_vocab_parallel_loss(Model(None), head).loss_function(head(mine), labels)
    torch.testing.assert_close(found, wanted, **CLOSE)
    gradients = (torch.autograd.grad(*each)[0] for each in ((found, mine), (wanted, theirs)))
    torch.testing.assert_close(*gradients, **CLOSE)
    with pytest.raises(ValueError, match="1 vocabulary entries cannot be split over 2 ranks"):
        VocabParallelLinear(nn.Linear(8, 1), dist.group.WORLD)


@distributed(world_size=2)
def test_parts_that_are_none_are_refused_on_every_rank() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    logits, target = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"rank 1 .* \[5, 9\).* give it \[4, 8\)"):
        vocab_parallel_cross_entropy(logits, target, group, None, 5 * rank, 5 * rank + 4)
    with pytest.raises(ValueError, match="rank 1 of the group has no vocabulary entry"):
        vocab_parallel_cross_entropy(logits[:, : 4 * (1 - rank)], target, group)
    with pytest.raises(ValueError, match="target 8 is out of range for vocabulary size 8"):
        vocab_parallel_cross_entropy(logits, target + 8, group)
    with pytest.raises(ValueError, match="index 9 is out of range"):
        vocab_parallel_logprobs(logits, target + 9, group)


def test_mistakes() -> None:
    logits, target = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    for message, given in (
        ("pass both vocab_start_index", {"vocab_start_index": 0}),
        ("needs vocab_start_index", {"global_vocab_size": 4}),
        ("reduction='max'", {"reduction": "max"}),
        ("needs reduction='none'", {"gather_sequence_loss": True}),
        ("needs sp_group", {"gather_sequence_loss": True, "reduction": "none"}),
        ("backend='x'", {"backend": "x"}),
    ):
        with pytest.raises(ValueError, match=message):
            vocab_parallel_cross_entropy(logits, target, **given)
    with pytest.raises(ValueError, match="labels or shift_labels"):
        VocabParallelCausalLMLoss()(logits)
    with pytest.raises(ValueError, match="same shape"):
        vocab_parallel_kl_div(logits, logits[1:])
    with pytest.raises(ValueError, match="does not match logits"):
        vocab_parallel_logprobs(logits, target[:2])
    with pytest.raises(ValueError, match="chunk_size=0"):
        vocab_parallel_linear_cross_entropy(logits, torch.randn(9, 4), target, chunk_size=0)
    with pytest.raises(ValueError, match="must be .own words, 4"):
        vocab_parallel_linear_cross_entropy(logits, torch.randn(9, 5), target)
