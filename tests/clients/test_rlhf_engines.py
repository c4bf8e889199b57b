"""Engines of reinforcement learning from human feedback: several in one process, each with its own config; rollouts
whose log-probabilities are those of training; and the calls that the scripts of DeepSpeed-Chat make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.rollout import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
)
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tests.clients.kit import assert_same_weights, clean_clients, llama, whole_weights
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")


def config(stage: int, *, trains: bool = True, hybrid: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if trains:
        found["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    if hybrid:
        found["hybrid_engine"] = {"enabled": True}
    return found


def engine_of(model: nn.Module, stage: int, **options: Any) -> Any:
    return deepspeed.initialize(model=model, config=config(stage, **options))[0]


def padded_prompts() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, :3] = 0
    return torch.randint(3, 60, (2, 6), generator=draw) * mask, mask


def log_probs_of(engine: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the log-probabilities of each token but the first, as training computes them."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = engine(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits[:, :-1].float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_log_probs_of_rollouts_are_those_of_training(stage: int) -> None:
    with clean_clients(deepspeed_state=False):
        engine = engine_of(llama(), stage, hybrid=True)
        engine.module.generation_config.eos_token_id = list(range(2, 64, 5))
        rollout = build_rollout(RolloutConfig(), engine)
        sampling = SamplingConfig(8, temperature=0.7, top_k=20, n_samples_per_prompt=2, log_probs=True)
        batch = rollout.generate(RolloutRequest(*padded_prompts()), sampling)
        assert engine.training and batch.batch_size == 4 and batch.seq_len <= 14
        assert batch.response_start_idx.tolist() == [6] * 4
        answers, mask = batch.input_ids[:, 6:], batch.attention_mask[:, 6:]
        for row, kept in zip(answers.tolist(), mask.tolist(), strict=True):  # a plain loop
            ended = False
            for token, bit in zip(row, kept, strict=True):
                assert bit == (not ended)
                ended = ended or token % 5 == 2
        found = log_probs_of(engine, batch.input_ids, batch.attention_mask)[:, 5:] * mask
        assert batch.log_probs is not None
        assert (batch.log_probs - found).abs().max() <= 1e-5
        plain = rollout.generate(RolloutRequest(*padded_prompts()), SamplingConfig(3, temperature=0))
        assert plain.log_probs is None and plain.batch_size == 2
        assert rollout.get_last_profile() is None
        timed = HybridEngineRollout(engine, None, HybridEngineRolloutConfig(enable_profiling=True))
        answers = timed.generate(RolloutRequest(*padded_prompts()), SamplingConfig(3, temperature=0))
        assert torch.equal(answers.input_ids, plain.input_ids)
        found_times = timed.get_last_profile()
        parts = [found_times[f"{part}_ms"] for part in ("prompt_expansion", "generation", "post_processing")]
        assert min(parts) > 0 and found_times["total_ms"] == pytest.approx(sum(parts))
        assert found_times["response_length"] == answers.input_ids.shape[1] - 6
        assert found_times["tokens_per_second"] > 0


@distributed(world_size=1)
def test_what_a_rollout_engine_needs() -> None:
    with pytest.raises(ValueError, match="'vllm': use 'hybrid_engine'"):
        build_rollout(RolloutConfig(engine="vllm"))
    with pytest.raises(ValueError, match="student_engine"):
        build_rollout(RolloutConfig())
    captured = HybridEngineRolloutConfig(use_graph_capture=True)
    assert HybridEngineRollout(None, None, captured).use_graph_capture
    assert not HybridEngineRollout(None, None).use_graph_capture
    tokens = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="prompt_ids must be 2-D"):
        RolloutRequest(tokens[0], tokens[0])
    with pytest.raises(ValueError, match="prompt_attention_mask of shape .2, 3. does not match"):
        RolloutRequest(tokens, tokens[:, :3])
    with pytest.raises(ValueError, match="response_start_idx must be 1-D of length 2"):
        RolloutBatch(tokens, tokens, torch.tensor([4]))


class Valued(nn.Module):
    """A model with a number for each token, as reward and value models have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.base = llama(seed).model
        self.head = nn.Linear(16, 1, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.base(tokens, attention_mask=mask, use_cache=False).last_hidden_state)[..., 0]


def actor_step(actor: Any, tokens: Tensor, mask: Tensor) -> None:
    actor.backward(-log_probs_of(actor, tokens, mask).mean())
    actor.step()


def critic_step(critic: Any, tokens: Tensor, mask: Tensor) -> None:
    critic.backward(critic(tokens, mask).square().mean())
    critic.step()


def follow(average: nn.Module, model: nn.Module, beta: float) -> None:
    """``average = lerp(model, average, beta)``, whatever is partitioned."""
    pairs = list(zip(average.parameters(), model.parameters(), strict=True))
    with deepspeed.zero.GatheredParameters([each for pair in pairs for each in pair], modifier_rank=0):
        for kept, param in pairs:
            kept.data.copy_(torch.lerp(param.data, kept.data, beta))


@pytest.mark.parametrize(("stages"), [(3, 2, 3, 0), (1, 3, 0, 3)])
@distributed(world_size=2)
def test_four_engines_and_an_average_in_one_process(stages: tuple[int, int, int, int]) -> None:
    """None disturbs another: actor and critic end with the bits that each has when it trains alone."""
    with clean_clients(deepspeed_state=False):
        actor = engine_of(llama(), stages[0], hybrid=True)
        critic = engine_of(Valued(1), stages[1])
        reference = engine_of(llama(), stages[2], trains=False).eval()
        reward = engine_of(Valued(2), stages[3], trains=False).eval()
        average = engine_of(llama(), stages[2], trains=False).eval()
        wanted_average, batches = whole_weights(actor), []
        before = whole_weights(reference), whole_weights(reward)
        for _ in range(3):
            rolled = build_rollout(RolloutConfig(), actor).generate(
                RolloutRequest(*padded_prompts()), SamplingConfig(4, temperature=0)
            )
            tokens, mask = rolled.input_ids, rolled.attention_mask
            with torch.no_grad():
                assert log_probs_of(reference, tokens, mask).isfinite().all()
                assert reward(tokens, mask).isfinite().all()
            actor_step(actor, tokens, mask)
            critic_step(critic, tokens, mask)
            follow(average.module, actor.module, 0.9)
            batches.append((tokens, mask))
            now = whole_weights(actor)
            wanted_average = {name: torch.lerp(now[name], kept, 0.9) for name, kept in wanted_average.items()}
        assert_same_weights(whole_weights(average), wanted_average)
        assert_same_weights(whole_weights(reference), before[0])
        assert_same_weights(whole_weights(reward), before[1])
        for engine, step, alone in (
            (actor, actor_step, engine_of(llama(), stages[0])),
            (critic, critic_step, engine_of(Valued(1), stages[1])),
        ):
            for batch in batches:
                step(alone, *batch)
            assert_same_weights(whole_weights(engine), whole_weights(alone))


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_states_are_elsewhere_while_the_actor_generates(stage: int) -> None:
    with clean_clients(deepspeed_state=False):
        moved, stayed = engine_of(llama(), stage, hybrid=True), engine_of(llama(), stage, hybrid=True)
        tokens, mask = padded_prompts()
        for _ in range(2):
            moved.offload_states(include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params])
            made = [
                each.eval().generate(input_ids=tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)
                for each in (moved, stayed)
            ]
            assert torch.equal(*made)
            moved.reload_states()
            for each in (moved, stayed):
                actor_step(each.train(), tokens, mask)
        assert_same_weights(whole_weights(moved), whole_weights(stayed))


class LowRank(nn.Module):
    """A linear layer with an adapter, with the names of DeepSpeed-Chat's layer."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_right_weight = nn.Parameter(torch.randn(layer.in_features, rank) * 0.1)
        self.lora_left_weight = nn.Parameter(torch.randn(rank, layer.out_features) * 0.1)
        self.weight.requires_grad_(False)
        self.fuse_lora = False

    def _product(self) -> Tensor:
        return (self.lora_right_weight @ self.lora_left_weight).T

    def fuse_lora_weight(self) -> None:
        if not self.fuse_lora:
            self.weight.data += self._product()
        self.fuse_lora = True

    def unfuse_lora_weight(self) -> None:
        if self.fuse_lora:
            self.weight.data -= self._product()
        self.fuse_lora = False

    def forward(self, inputs: Tensor) -> Tensor:
        plain = nn.functional.linear(inputs, self.weight, self.bias)
        return plain if self.fuse_lora else plain + inputs @ self.lora_right_weight @ self.lora_left_weight


def with_adapters(model: nn.Module) -> nn.Module:
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr

    torch.manual_seed(3)
    names = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "_proj" in name
    ]
    for name in names:
        recursive_setattr(model, name, LowRank(recursive_getattr(model, name)))
    return model


def absent(params: list[Any]) -> list[Any]:
    return [
        each for each in params if hasattr(each, "ds_id") and each.ds_status == ZeroParamStatus.NOT_AVAILABLE
    ]


def saved(model: nn.Module, stage: int) -> dict[str, Tensor]:
    """As DeepSpeed-Chat saves a partitioned model: one tensor at a time, adapters left out."""
    found = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters(absent([param]), enabled=stage == 3):
            if "lora" not in name:
                found[name] = param.data.cpu().clone()
    return found


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_calls_of_deepspeed_chat(stage: int, tmp_path: Path) -> None:
    with clean_clients(deepspeed_state=False):
        actor = engine_of(with_adapters(llama()), stage, hybrid=True)
        assert len(actor.adapters) == 14
        tokens, mask = padded_prompts()
        base = saved(actor.module, stage)
        actor.eval()
        before = log_probs_of(actor, tokens, mask)
        with torch.no_grad():
            made = actor.module.generate(
                tokens,
                attention_mask=mask,
                max_length=10,
                pad_token_id=0,
                synced_gpus=stage == 3,
                do_sample=False,
            )
        assert made.shape[0] == 2 and 6 < made.shape[1] <= 10
        assert torch.equal(before, log_probs_of(actor, tokens, mask))
        actor.train()
        actor_step(actor, tokens, mask)
        assert not actor.optimizer.overflow and not actor.optimizer.check_overflow(external=True)
        actor.optimizer.skip_step = False
        actor.tput_timer.update_epoch_count()
        assert actor.get_lr()[0] == 1e-2
        assert actor.train_batch_size() == 4
        now = saved(actor.module, stage)
        frozen = [name for name in base if "_proj" in name]
        assert len(frozen) == 14 and all(torch.equal(now[name], base[name]) for name in frozen)
        assert not torch.equal(now["lm_head.weight"], base["lm_head.weight"])
        if stage == 3:
            with pytest.raises(RuntimeError, match="here the weights are sharded"):
                actor.fuse_lora_weight()
        else:
            tuned = log_probs_of(actor, tokens, mask)
            actor.fuse_lora_weight()
            torch.testing.assert_close(log_probs_of(actor, tokens, mask), tuned, rtol=1e-4, atol=1e-5)
            actor.unfuse_lora_weight()
            torch.testing.assert_close(saved(actor.module, stage), now)  # the layer's own subtraction rounds
        average = engine_of(with_adapters(llama()), 0, trains=False).eval()
        with torch.no_grad():
            for param, kept in zip(actor.module.parameters(), average.module.parameters(), strict=True):
                fetched = absent([param, kept]) if stage == 3 else []
                with deepspeed.zero.GatheredParameters(fetched, enabled=len(fetched) > 0):
                    kept.data.copy_(torch.lerp(param.data.to(kept.device), kept.data, 0.5))
        moved = whole_weights(average)
        assert not all(torch.equal(moved[name], each) for name, each in whole_weights(actor).items())
        actor.save_checkpoint(str(tmp_path), tag="actor")
