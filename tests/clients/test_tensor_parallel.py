"""Models of Transformers, split by their graphs over the ranks: loss and every gradient as on one rank."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_grad
from tests.clients.kit import clean_clients
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import batch, loss_of, make, never_whole, own_part

NAMES = ("llama", "qwen2", "qwen3", "gemma", "phi3", "gpt2", "gpt_neox", "mixtral", "bert", "t5")


def assert_parity(name: str, tp: int, stage: int, **more: Any) -> str:
    """Returns the line at the start."""
    model = make(name, **more)
    whole, inputs = copy.deepcopy(model), batch(model)
    expected = loss_of(whole(**inputs))
    expected.backward()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": tp},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    loss = loss_of(engine(**inputs))
    engine.backward(loss)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    wanted = dict(whole.named_parameters())
    total = float(nn.utils.get_total_norm([p.grad for p in wanted.values() if p.grad is not None]))
    for key, param in engine.module.named_parameters():
        grad = wanted[key].grad
        if grad is None:
            continue
        own, scale = own_part(grad, param), float(grad.norm())
        error = float((safe_get_full_grad(param).view(own.shape) - own).norm())
        # Gradients of biases of keys cancel to zero: what is left of them is rounding of the terms.
        allowed = max(1e-5 * max(float(own.norm()), 1e-3 * scale), 1e-7 * total)
        assert error <= allowed, (name, key, error, scale)
    line = engine.module_transforms.reports[0].line()
    engine.destroy()
    return line


def assert_all(names: Iterable[str], tp: int) -> None:
    with clean_clients():
        for name in names:
            line = assert_parity(name, tp, 0)
            assert "row" in line, (name, line)


@distributed(world_size=2)
def test_fused_shared_and_transposed_projections_have_one_rank_s_gradients() -> None:
    assert_all(("gemma", "phi3", "gpt2"), 2)


@pytest.mark.slow
@distributed(world_size=2)
def test_every_architecture_has_one_rank_s_gradients() -> None:
    assert_all(NAMES, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_llama_under_every_stage(stage: int) -> None:
    with clean_clients():
        assert_parity("llama", 2, stage)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@distributed(world_size=2)
def test_embedding_head_and_loss_are_spread_by_the_vocabulary(name: str, tmp_path: Path) -> None:
    """97 tokens; GPT-2's head has the weight of its embedding."""
    with clean_clients():
        model = make(name, vocab_size=97)
        whole, inputs = copy.deepcopy(model), batch(model)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True},
        }
        engine = deepspeed.initialize(model=model, config=config)[0]
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
        for _ in range(3):
            expected, found = whole(**inputs, labels=labels), engine(**inputs, labels=labels)
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
            assert found.logits.shape == expected.logits.shape and never_whole(found)
            expected.loss.backward(), engine.backward(found.loss)
            optimizer.step(), engine.step()
            optimizer.zero_grad()
        assert engine.module.get_input_embeddings().weight.shape[0] in (48, 49)
        assert "vocabulary of 97 tokens" in engine.module_transforms.reports[0].line()

        engine.eval(), whole.eval()
        with torch.no_grad():
            logits = engine(**inputs).logits
        torch.testing.assert_close(logits, whole(**inputs).logits, rtol=1e-4, atol=1e-4)
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        tokens = inputs["input_ids"][:1, :4]
        assert torch.equal(engine.module.generate(tokens, **settings), whole.generate(tokens, **settings))
        engine.save_16bit_model(tmp_path)
        saved = torch.load(tmp_path / "pytorch_model.bin")
        for key, value in whole.named_parameters():
            torch.testing.assert_close(saved[key], value.detach(), rtol=1e-4, atol=1e-5, msg=key)
        engine.destroy()


@pytest.mark.slow
@distributed(world_size=3)
def test_heads_that_do_not_divide() -> None:
    assert_all(("llama", "gpt2", "phi3", "t5"), 3)


@distributed(world_size=2)
def test_tp_model_init_takes_the_group_that_shares_layers() -> None:
    both, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with clean_clients():
        model = copy.deepcopy(deepspeed.tp_model_init(make("llama"), 2, torch.float32, tp_group=both))
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine = deepspeed.initialize(model=model, config=config)[0]
        assert engine.mp_world_size == 2
        engine.backward(loss_of(engine(**batch(model))))
        engine.step()
        with pytest.raises(ValueError, match="tp_group has the ranks .* neighbouring ranks"):
            deepspeed.tp_model_init(make("llama"), 2, torch.float32, tp_group=alone)
