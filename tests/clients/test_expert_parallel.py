"""Mixture-of-experts models of Transformers, their experts spread over ranks by the config alone: as one process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.placement import placement_of
from deepspeed.tools.plan import main as plan
from deepspeed.utils import safe_get_full_grad
from tests.clients.kit import clean_clients
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

TOKENS = 64
SHAPE = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
SMALL = {**SHAPE, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
DEEPSEEK = {
    **SMALL, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {**SHAPE, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", {**SMALL, "num_experts": 4, "shared_expert_intermediate_size": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", {**SMALL, "num_experts": 8, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK),
    "gpt_oss": ("GptOssConfig", {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}


def make(name: str) -> nn.Module:
    kind, settings = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**settings, output_router_logits=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for param in model.parameters():
        nn.init.normal_(param, 0.7 if param.ndim == 1 else 0.0, 0.3)
    return model.train()


def batch(rank: int) -> Tensor:
    return torch.randint(TOKENS, (2, 7 + rank), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, rank: int) -> Tensor:
    tokens = batch(rank)
    outputs = model(input_ids=tokens)
    loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    aux = getattr(outputs, "aux_loss", None)
    return loss if aux is None else loss + 0.01 * aux


def own_part(whole: Tensor, param: Tensor) -> Tensor:
    boxes = placement_of(param).boxes
    return whole[tuple(slice(*side) for side in boxes[0])] if boxes else whole


@pytest.mark.parametrize(
    ("name", "size", "stage"),
    [
        ("mixtral", 1, 1), ("mixtral", 2, 0), ("mixtral", 2, 3), ("qwen2_moe", 2, 2), ("qwen3_moe", 2, 3),
        ("deepseek_v3", 2, 1), ("deepseek_v3", 2, 3), ("gpt_oss", 2, 2),
    ],
)  # fmt: skip
@distributed(world_size=2)
def test_loss_and_gradients_are_those_of_one_process(name: str, size: int, stage: int) -> None:
    assert_equals_one_process(name, size, stage)


@pytest.mark.parametrize(
    ("name", "size", "stage"),
    [("mixtral", 4, 0), ("qwen3_moe", 4, 1), ("deepseek_v3", 4, 2), ("mixtral", 4, 3), ("qwen2_moe", 2, 3)],
)
@distributed(world_size=4)
def test_four_ranks(name: str, size: int, stage: int) -> None:
    assert_equals_one_process(name, size, stage)


def assert_equals_one_process(name: str, size: int, stage: int) -> None:
    with clean_clients():
        model, rank, world = make(name), dist.get_rank(), dist.get_world_size()
        whole = copy.deepcopy(model)
        each = [loss_of(whole, r) for r in range(world)]
        (sum(each) / world).backward()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "expert_parallel": {"enabled": True, "autoep_size": size},
        }
        engine = deepspeed.initialize(model=model, config=config)[0]
        assert engine.has_moe_layers
        loss = loss_of(engine, rank)
        engine.backward(loss)
        torch.testing.assert_close(loss, each[rank], rtol=1e-5, atol=1e-6)
        wanted = dict(whole.named_parameters())
        total = float(nn.utils.get_total_norm([p.grad for p in wanted.values() if p.grad is not None]))
        spread = 0
        for key, param in engine.module.named_parameters():
            if wanted[key].grad is None:
                continue
            own = own_part(wanted[key].grad, param)
            spread += own.shape != wanted[key].shape
            error = float((safe_get_full_grad(param).view(own.shape) - own).norm())
            assert error <= max(1e-5 * float(own.norm()), 1e-7 * total), (key, error)
        assert spread >= (2 if size > 1 else 0)
        engine.step()
        torch.testing.assert_close(float(engine.get_global_grad_norm()), total, rtol=1e-5, atol=0.0)
        engine.destroy()


@pytest.mark.parametrize(("size", "ranks"), [(1, 2), (2, 2), (4, 8)])
def test_the_plan_of_memory_counts_the_experts_of_a_rank(
    size: int, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, settings = ARCHITECTURES["mixtral"]
    getattr(transformers, kind)(**settings, architectures=["MixtralForCausalLM"]).save_pretrained(tmp_path)
    section = {"enabled": True, "autoep_size": size}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "expert_parallel": section}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    plan(
        [
            str(tmp_path / "ds.json"),
            "--model",
            str(tmp_path),
            "--gpus",
            str(ranks),
            "--device",
            "cpu",
            "--json",
        ]
    )
    model = make("mixtral")
    spread = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    whole = sum(p.numel() for p in model.parameters())
    assert spread > 0
    assert json.loads(capsys.readouterr().out)["parameters"] == whole - spread + spread // size
