"""``activation_checkpointing.memory_budget`` on models of Transformers as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.runtime.activation_checkpointing.budget import budget_blocks

pytest.importorskip("transformers", reason="the clients extra is not installed")
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

MODELS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=64, use_cache=False)
    ),
}


@pytest.mark.parametrize("limit", [0.5, 0.8])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_gradients(name: str, limit: float) -> None:
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    model.train()
    tokens = torch.randint(64, (3, 40))
    found = []
    for attach in (False, True):
        budget = budget_blocks(model, limit, None) if attach else None
        for _ in range(2 if attach else 1):  # the first one is counted
            model.zero_grad()
            torch.manual_seed(1)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        if budget is not None:
            assert budget.choice is not None and 0 < budget.choice.extra_share < 0.34
            assert budget.choice.peak <= budget.choice.budget
    for got in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, found[0], strict=True))
    assert model.generate(tokens[:, :4], max_new_tokens=4, do_sample=False).shape == (3, 8)
