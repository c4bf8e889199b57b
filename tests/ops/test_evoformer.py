"""The Evoformer's attention against plain PyTorch, with the gradients of all five inputs in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention, evoformer_attn
from tests.allocations import counted

BATCH, SEQUENCES, TOKENS, HEADS, SIZE = 2, 5, 7, 3, 4


def plain(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    for bias in biases:
        scores = scores if bias is None else scores + bias
    return (torch.softmax(scores, -1) @ v).transpose(2, 3)


def inputs(dtype: torch.dtype = torch.float64, keys: int = TOKENS) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    main = [
        torch.randn(BATCH, SEQUENCES, tokens, HEADS, SIZE, dtype=dtype, requires_grad=True)
        for tokens in (TOKENS, keys, keys)
    ]
    shapes = ((BATCH, SEQUENCES, 1, 1, keys), (BATCH, 1, HEADS, TOKENS, keys))
    return main, [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("chunk", [1, 350, 1 << 22])
@pytest.mark.parametrize("used", [(), (0,), (0, 1), (1,)])
@pytest.mark.parametrize("keys", [TOKENS, 9])
def test_values_and_gradients(
    used: tuple[int, ...], keys: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evoformer_attn, "_CHUNK", chunk)
    main, biases = inputs(keys=keys)
    given = [bias if number in used else None for number, bias in enumerate(biases)]
    given = given[: max(used) + 1] if used else []
    of = [*main, *(bias for bias in given if bias is not None)]
    found, expected = DS4Sci_EvoformerAttention(*main, given), plain(*main, *given)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, of, grad), torch.autograd.grad(expected, of, grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_mask_without_gradient_and_bf16() -> None:
    main, biases = inputs(torch.bfloat16)
    mask = torch.zeros_like(biases[0]).detach()
    mask[:, :, ..., 5:] = -torch.inf
    mask[0, 0] = -torch.inf  # this sequence sees nothing
    out = DS4Sci_EvoformerAttention(*main, [mask, biases[1]])
    assert out.dtype == torch.bfloat16 and not out[0, 0].any()
    expected = plain(*(x.double() for x in main), mask.double(), biases[1].double())
    torch.testing.assert_close(out[1].double(), expected[1], rtol=2e-2, atol=2e-2)
    out.sum().backward()
    assert biases[1].grad is not None and biases[1].grad.isfinite().all()
    assert mask.grad is None and all(x.grad is not None and x.grad.isfinite().all() for x in main)


def test_memory_does_not_hold_the_scores_of_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evoformer_attn, "_CHUNK", 1)
    sequences, tokens = 64, 64
    main = [torch.randn(1, sequences, tokens, 2, 4, requires_grad=True) for _ in range(3)]
    pairs = torch.randn(1, 1, 2, tokens, tokens, requires_grad=True)
    with counted() as memory:
        DS4Sci_EvoformerAttention(*main, [None, pairs]).sum().backward()
    assert memory.peak < sequences * 2 * tokens * tokens * 4 / 2


def test_what_does_not_fit_is_refused() -> None:
    main, biases = inputs()
    with pytest.raises(ValueError, match="at most two biases"):
        DS4Sci_EvoformerAttention(*main, [*biases, biases[0]])
    with pytest.raises(ValueError, match="bias 1 has shape"):
        DS4Sci_EvoformerAttention(*main, biases[::-1])
    with pytest.raises(ValueError, match="head size"):
        DS4Sci_EvoformerAttention(main[0][0], *main[1:], [])
