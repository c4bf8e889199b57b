"""``activation_checkpointing.memory_budget`` on models of Transformers as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.planning.activations import shape_of
from deepspeed.planning.ledger import MemoryKind, MemoryPhase
from deepspeed.planning.request import PlanAnswer, PlanRequest, answer
from deepspeed.transforms.recompute.budget import budget_blocks, report

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


def planned(model: Any, limit: float, **more: Any) -> PlanAnswer:
    config = {"activation_checkpointing": {"memory_budget": limit}, **more}
    return answer(
        PlanRequest(
            module=model,
            config=config,
            ranks=1,
            device_type="cpu",
            shape=shape_of(model.config),
            micro_batch=3,
            sequence=40,
        )
    )


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_shows_what_the_first_forward_chooses(name: str, bf16: bool) -> None:
    """With fake tensors, before anything is allocated."""
    with torch.device("meta"):
        empty: Any = MODELS[name]()
    found = planned(empty, 0.6, bf16={"enabled": bf16})
    model: Any = MODELS[name]().train()
    if bf16:
        model.bfloat16()
    budget = budget_blocks(model, 0.6, None)
    tokens = torch.zeros(3, 40, dtype=torch.int64)
    model(input_ids=tokens, labels=tokens)
    assert budget.choice is not None
    place, entries = found.setting.near, found.ledger.entries
    assert entries[MemoryPhase.FORWARD, place, MemoryKind.COUNTED_ACTIVATIONS] == budget.choice.peak
    assert entries[MemoryPhase.FORWARD, place, MemoryKind.ACTIVATIONS] == 0
    told = next(note for note in found.ledger.notes if note.startswith("memory budget: "))
    assert len(told.splitlines()) == len(report(budget.choice).splitlines())


def test_a_plan_of_a_budget_that_cannot_be_held() -> None:
    with torch.device("meta"):
        empty: Any = MODELS["llama"]()
    with pytest.raises(DeepSpeedConfigError, match="memory_budget=0.01: .* cannot be met"):
        planned(empty, 0.01)


def test_a_forward_that_does_not_run_on_fake_tensors_is_estimated() -> None:
    with torch.device("meta"):
        empty: Any = MODELS["gpt2"]()
    empty.register_forward_pre_hook(lambda *_: torch.ones(1).to(empty.lm_head.weight.device)[0].item() / 0)
    found = planned(empty, 0.6)
    assert found.ledger.entries[MemoryPhase.FORWARD, found.setting.near, MemoryKind.ACTIVATIONS] > 0
    assert any("does not run on fake tensors" in note for note in found.ledger.notes)
