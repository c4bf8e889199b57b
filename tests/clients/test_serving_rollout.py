"""Rollouts by continuous batching, over the weights that are trained, and one step ahead over a copy of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.runtime.rollout import (
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
    importance_weights,
    rollout_mismatch,
)
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.kit import assert_same_weights, clean_clients, llama, lora, whole_weights
from tests.clients.test_rlhf_engines import actor_step, config, engine_of, log_probs_of, padded_prompts
from tests.pool import distributed

GREEDY = SamplingConfig(6, temperature=0)


def ending(engine: Any) -> Any:
    """``engine``, with answers of several lengths."""
    engine.module.generation_config.eos_token_id = list(range(2, 64, 5))
    return engine


def alone(weights: dict[str, torch.Tensor], request: RolloutRequest, count: int) -> torch.Tensor:
    """Return the greedy answers of a plain model with ``weights``, padded as by its ``generate``."""
    plain = llama()
    plain.load_state_dict(weights)
    return plain.eval().generate(
        request.prompt_ids,
        attention_mask=request.prompt_attention_mask,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(range(2, 64, 5)),
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_answers_are_those_of_the_model(stage: int) -> None:
    with clean_clients(deepspeed_state=False):
        engine = ending(engine_of(llama(), stage, hybrid=stage == 2))
        rollout, request = build_rollout(RolloutConfig("serving"), engine), RolloutRequest(*padded_prompts())
        for _ in range(2):
            made = rollout.generate(request, GREEDY)
            assert torch.equal(made.input_ids, alone(whole_weights(engine), request, 6))
            assert engine.training and made.log_probs is None and made.response_start_idx.tolist() == [6, 6]
            actor_step(engine, made.input_ids, made.attention_mask)
        sampling = SamplingConfig(8, temperature=0.7, n_samples_per_prompt=3, log_probs=True)
        made = rollout.generate(request, sampling)
        answers, mask = made.input_ids[:, 6:], made.attention_mask[:, 6:]
        ended = torch.isin(answers, torch.arange(2, 64, 5)).int()
        assert torch.equal(mask, (ended.cumsum(1) - ended == 0).to(mask.dtype))
        found = log_probs_of(engine, made.input_ids, made.attention_mask)[:, 5:] * mask
        assert made.log_probs is not None and (made.log_probs - found).abs().max() <= 1e-5


@distributed(world_size=2)
def test_a_row_depends_on_its_seed_only() -> None:
    """Independent of the rank, the other rows, the order, and the number of concurrent requests."""
    with clean_clients(deepspeed_state=False):
        engine = ending(engine_of(llama(), 3))
        rank = torch.distributed.get_rank()
        draw = torch.Generator().manual_seed(0)
        ids, mask = torch.randint(3, 60, (4, 6), generator=draw), torch.ones(4, 6, dtype=torch.int64)
        sampling = SamplingConfig(8, log_probs=True)
        rollout = build_rollout(RolloutConfig("serving"), engine)
        every = rollout.generate(RolloutRequest(ids, mask, range(4)), sampling)
        few: Any = build_rollout(RolloutConfig("serving"), engine, max_sequences=1, token_budget=4)
        mine = [3 - rank, rank]  # other rows on each rank
        part = few.generate(RolloutRequest(ids[mine], mask[mine], mine), sampling)
        for row, number in enumerate(mine):
            length = int(part.attention_mask[row].sum())
            assert torch.equal(part.input_ids[row, :length], every.input_ids[number, :length])
        assert every.input_ids[:, 6].unique().numel() > 1


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_no_second_copy_of_the_weights(stage: int) -> None:
    """The forwards of a rollout find the storage that is trained, or at stage 3 what was gathered, once, for all."""
    with clean_clients(deepspeed_state=False):
        settings = config(stage)
        settings["zero_optimization"]["stage3_max_live_parameters"] = 0
        engine: Any = deepspeed.initialize(model=llama(), config=settings)[0]
        params, seen = list(engine.module.parameters()), []
        before = [param.data_ptr() for param in params]
        rollout, request = build_rollout(RolloutConfig("serving"), engine), RolloutRequest(*padded_prompts())
        rollout.generate(request, GREEDY)  # the first tries the model
        engine.module.register_forward_pre_hook(
            lambda *_: seen.append((sum(param.nbytes for param in params), [p.data_ptr() for p in params]))
        )
        rollout.generate(request, GREEDY)
        whole = sum(each.nbytes for each in whole_weights(engine).values())
        assert seen and all(each == (whole, seen[0][1]) for each in seen)
        if stage == 3:
            assert all(param.ds_status == ZeroParamStatus.NOT_AVAILABLE for param in params)
        else:
            assert seen[0][1] == before


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_adapters_are_fused_meanwhile(stage: int) -> None:
    pytest.importorskip("peft", reason="the clients extra is not installed")
    with clean_clients(deepspeed_state=False):
        model = lora(llama())
        for name, param in model.named_parameters():
            if "lora_B" in name:  # they begin at zero
                torch.nn.init.normal_(param, 0, 0.3)
        engine = ending(engine_of(model, stage, hybrid=True))
        before = whole_weights(engine)
        made = build_rollout(RolloutConfig("serving"), engine).generate(
            RolloutRequest(*padded_prompts()), SamplingConfig(6, temperature=0, log_probs=True)
        )
        assert_same_weights(whole_weights(engine), before)
        positions = (made.attention_mask.cumsum(1) - 1).clamp(min=0)
        logits = engine(
            input_ids=made.input_ids, attention_mask=made.attention_mask, position_ids=positions
        ).logits
        found = logits[:, :-1].log_softmax(-1).gather(2, made.input_ids[:, 1:, None])[:, 5:, 0]
        assert made.log_probs is not None
        assert ((made.log_probs - found) * made.attention_mask[:, 6:]).abs().max() <= 1e-5


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_ahead_answers_with_the_weights_of_the_last_synchronization(stage: int) -> None:
    with clean_clients(deepspeed_state=False):
        engine = ending(engine_of(llama(), stage))
        rollout: Any = build_rollout(RolloutConfig("serving_ahead"), engine)
        assert rollout.weight_bytes == sum(each.nbytes for each in whole_weights(engine).values())
        request, weights = RolloutRequest(*padded_prompts()), whole_weights(engine)
        with pytest.raises(RuntimeError, match=r"call begin\(\) first"):
            rollout.finish()
        for step in range(3):
            rollout.begin(request, GREEDY)
            assert rollout.in_progress
            with pytest.raises(RuntimeError, match="collect its answers"):
                rollout.begin(request, GREEDY)
            actor_step(engine, request.prompt_ids, request.prompt_attention_mask)
            if step == 1:  # also while it is in progress
                rollout.sync_weights(step)
            made = rollout.finish()
            assert torch.equal(made.input_ids, alone(weights, request, 6))
            if step != 1:
                rollout.sync_weights(step)
            weights = whole_weights(engine)
            assert rollout.step == step
        assert torch.equal(rollout.generate(request, GREEDY).input_ids, alone(weights, request, 6))
        rollout.shutdown()
        assert rollout.weight_bytes == 0


def test_importance_weights_against_a_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    now, then = -torch.rand(3, 4, generator=draw) * 3, -torch.rand(3, 4, generator=draw) * 3
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    now[mask == 0], then[0, 3] = -torch.inf, torch.nan  # of padding
    for level in ("token", "sequence"):
        found = importance_weights(now.requires_grad_(), then, mask, cap=1.5, level=level)
        assert not found.requires_grad
        for row in range(3):
            apart = [now[row, at].item() - then[row, at].item() if mask[row, at] else 0 for at in range(4)]
            for at in range(4):
                exponent = apart[at] if level == "token" else sum(apart)
                wanted = min(1.5, math.exp(exponent)) if mask[row, at] else 0
                assert found[row, at].item() == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(ValueError, match="level='row'"):
        importance_weights(now, then, mask, level="row")
    with pytest.raises(ValueError, match="cap=0"):
        importance_weights(now, then, mask, cap=0)


def test_mismatch_against_a_loop() -> None:
    source = torch.Generator().manual_seed(6)
    training, rollout = (-torch.rand(3, 5, generator=source) for _ in range(2))
    mask = (torch.rand(3, 5, generator=source) < 0.6).long()
    apart = [
        rollout[row, at].item() - training[row, at].item()
        for row in range(3)
        for at in range(5)
        if mask[row, at]
    ]
    assert rollout_mismatch(training, rollout, mask) == pytest.approx(
        {
            "largest": max(map(abs, apart)),
            "mean": sum(map(abs, apart)) / len(apart),
            "kl": sum(apart) / len(apart),
        }
    )
    assert rollout_mismatch(training, rollout, mask * 0) == {"largest": 0.0, "mean": 0.0, "kl": 0.0}


@distributed(world_size=1)
def test_what_a_serving_rollout_needs() -> None:
    with clean_clients(deepspeed_state=False):
        engine = engine_of(llama(), 0, hybrid=True)
        tokens = torch.ones(2, 4, dtype=torch.long)
        rollout = build_rollout(RolloutConfig("serving"), engine)
        with pytest.raises(ValueError, match="3 of them for 4 answers"):
            rollout.generate(
                RolloutRequest(tokens, tokens, [1, 2, 3]), SamplingConfig(2, n_samples_per_prompt=2)
            )
        with pytest.raises(ValueError, match=r"use RolloutConfig\(engine='serving'\)"):
            build_rollout(RolloutConfig(), engine).generate(
                RolloutRequest(tokens, tokens, [1, 2]), SamplingConfig(2)
            )
        with pytest.raises(ValueError, match="needs both student_engine"):
            build_rollout(RolloutConfig("serving_ahead"))
