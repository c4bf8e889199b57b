"""Packed documents in models of Transformers: the loss of each document alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deepspeed.data.packing import PackingCollator

transformers = pytest.importorskip("transformers")

NUMBERS = random.Random(1)
DOCUMENTS = [[NUMBERS.randrange(1, 60) for _ in range(NUMBERS.randrange(2, 25))] for _ in range(12)]


def llama(attention: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(attention: str) -> Any:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_implementation=attention
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(("attention", "mask"), [("sdpa", False), ("eager", False), ("sdpa", True)])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_loss_is_that_of_documents_alone(make: Any, attention: str, mask: bool) -> None:
    torch.manual_seed(0)
    model = make(attention).eval()
    collator = PackingCollator(32, mask=mask)
    batch = collator(DOCUMENTS)
    assert len(batch["input_ids"]) < len(DOCUMENTS) and collator.padding > 0
    loss = model(**batch).loss
    loss.backward()
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    total, predicted = torch.zeros(()), 0
    for document in DOCUMENTS:
        ids = torch.tensor([document])
        total = total + model(input_ids=ids, labels=ids).loss * (len(document) - 1)
        predicted += len(document) - 1
    (total / predicted).backward()
    assert abs(float(loss.detach()) - float(total.detach()) / predicted) <= 1e-5
    for param, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, param.grad, rtol=1e-3, atol=1e-5)
