"""Optimizers that read whole tensors, where experts or layers are split over ranks, against ranks that hold all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepspeed
from deepspeed import comm as dist
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.zero.placements import whole_tensor
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.kit import llama  # noqa: E402 - needs the extra
from tests.clients.test_expert_parallel import loss_of, make  # noqa: E402 - needs the extra
from tests.clients.test_split_models import split  # noqa: E402 - needs the extra

SECTIONS: dict[str, Any] = {
    "Muon": {"type": "Muon", "params": {"lr": 0.02}},
    "Lamb": {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1}},
}

LAYERS: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}


def config(stage: int, size: int | None) -> dict[str, Any]:
    experts = {} if size is None else {"expert_parallel": {"enabled": True, "autoep_size": size}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **experts}


def trained(name: str, optimizer: str, stage: int, size: int | None) -> dict[str, Tensor]:
    """Whole weights after three steps."""
    model = make(name)
    section = {"optimizer": SECTIONS[optimizer]}
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={**config(stage, size), **section}
    )[0]
    for _ in range(3):
        engine.backward(loss_of(engine, dist.get_rank()))
        engine.step()
    weights = {
        name: whole_tensor(safe_get_full_fp32_param(p), engine.replica_groups, of=p).clone()
        for name, p in engine.module.named_parameters()
    }
    engine.destroy()
    return weights


@pytest.mark.parametrize("optimizer", ["Muon", "Lamb"])
@pytest.mark.parametrize(("name", "stages"), [("mixtral", (0, 1, 3)), ("gpt_oss", (2,))])
@distributed(world_size=2)
def test_experts_on_two_ranks(name: str, stages: tuple[int, ...], optimizer: str) -> None:
    expected = trained(name, optimizer, 0, None)
    for stage in stages:
        for key, value in trained(name, optimizer, stage, 2).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4, msg=f"{stage} {key}")


@pytest.mark.parametrize("split", ["experts", "layers"])
@distributed(world_size=2)
def test_what_cannot_be_right_is_refused_at_stage_0(split: str) -> None:
    def adafactor(params: Any) -> Any:
        return transformers.Adafactor(params, scale_parameter=True, relative_step=False, lr=0.01)

    model, part = (
        (make("mixtral"), r"layers\.0\.mlp\.experts") if split == "experts" else (llama(), "embed_tokens")
    )
    chosen = config(0, 2) if split == "experts" else {**config(0, None), **LAYERS}
    with pytest.raises(DeepSpeedConfigError, match=rf"Adafactor .* such as model\.{part}"):
        deepspeed.initialize(
            model=model, model_parameters=model.parameters(), optimizer=adafactor, config=chosen
        )


def trained_by_heads(stage: int, shared: dict[str, Any]) -> dict[str, Tensor]:
    """Whole weights after two steps of Muon on the heads of attention, and Adam on all others."""
    model = llama()
    heads = [p for name, p in model.named_parameters() if name.rpartition("_proj")[0][-1:] in ("q", "k", "v")]
    others = [p for p in model.parameters() if all(p is not head for head in heads)]
    engine = deepspeed.initialize(
        model=model,
        model_parameters=[{"params": heads, "use_muon": True}, {"params": others, "use_muon": False}],
        config={
            **config(stage, None),
            **shared,
            "optimizer": {"type": "Muon", "params": {"lr": 0.01, "per_head_muon": True}},
        },
    )[0]
    tokens = torch.arange(24).view(2, 12)
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    weights = {
        name: whole_tensor(safe_get_full_fp32_param(p), engine.replica_groups, of=p).clone()
        for name, p in engine.module.named_parameters()
    }
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_heads_that_ranks_share_are_matrices_of_their_own(stage: int) -> None:
    expected = trained_by_heads(0, {})
    for key, value in trained_by_heads(stage, LAYERS).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_torchs_muon_is_refused_where_ranks_share_matrices(stage: int) -> None:
    model = llama()
    matrices = [param for name, param in model.named_parameters() if "proj" in name]
    with pytest.raises(DeepSpeedConfigError, match="Muon .* such as model.layers.0.self_attn.q_proj"):
        deepspeed.initialize(
            model=model,
            model_parameters=matrices,
            optimizer=lambda params: torch.optim.Muon(params, lr=0.01),
            config={**config(stage, None), **LAYERS},
        )


@distributed(world_size=2)
def test_an_author_s_plan_splits_tensors_too(tmp_path: Path) -> None:
    model = split("llama", tmp_path)
    with pytest.raises(DeepSpeedConfigError, match="Adafactor .* such as model.embed_tokens"):
        deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=lambda params: transformers.Adafactor(
                params, scale_parameter=True, relative_step=False
            ),
            config=config(0, None),
        )


@pytest.mark.parametrize("stage", [0, 1])
@distributed(world_size=2)
def test_lamb_is_refused_where_ranks_hold_heads_twice(stage: int) -> None:
    """Both need the one head of keys and values, rows of a fused projection that only one of them counts."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, multi_query=True))
    chosen = {**config(stage, None), **LAYERS, "optimizer": SECTIONS["Lamb"]}
    with pytest.raises(DeepSpeedConfigError, match="LAMB sums over whole weights"):
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=chosen)


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_a_state_that_the_optimizer_lacks_is_an_error_on_every_rank(stage: int) -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    section = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={**config(stage, None), **section}
    )[0]
    with pytest.raises(KeyError, match="has no per-element state 'momentum' for weight"):
        safe_get_full_optimizer_state(model.weight, "momentum")
    assert safe_get_full_optimizer_state(model.weight, "exp_avg").shape == (1, 3)
    engine.destroy()
