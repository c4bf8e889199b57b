"""Models of Transformers train with progressive layer dropping as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.runtime.progressive_layer_drop import DroppedBlock, find_blocks
from tests.pool import distributed

transformers = pytest.importorskip("transformers")

SIZES = {
    "gpt2": {"n_layer": 4, "n_embd": 16, "n_head": 2},
    "llama": {
        "num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}  # fmt: skip


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(
        kind, vocab_size=32, bos_token_id=0, eos_token_id=1, pad_token_id=2, **SIZES[kind]
    )
    return transformers.AutoModelForCausalLM.from_config(settings)


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 1.0},
    }


@distributed(world_size=2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", SIZES)
def test_blocks_are_skipped(kind: str, checkpointing: bool) -> None:
    model = model_of(kind)
    if checkpointing:
        model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, config=config(3))
    blocks = find_blocks(engine.module)
    assert blocks is not None and len(blocks) == 4
    assert all(isinstance(block.forward, DroppedBlock) for block in blocks)
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    losses, dropped = [], 0
    for _ in range(12):
        loss = engine(input_ids=tokens, labels=tokens).loss
        dropped += sum(block.forward.dropped for block in blocks)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert dropped > 8
    engine.eval()
    with torch.no_grad():
        assert engine(input_ids=tokens, labels=tokens).loss < losses[0]


@distributed(world_size=1)
def test_post_norm_models_are_refused() -> None:
    settings = transformers.AutoConfig.for_model(
        "bert", num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2
    )
    model = transformers.AutoModelForSequenceClassification.from_config(settings)
    with pytest.raises(RuntimeError, match="pre-norm"):
        deepspeed.initialize(model=model, config=config(0))
