"""TRL's PPO trainer, which its releases since 1.0 no longer have: needs trl==0.21.0 and transformers==4.55.4."""

from __future__ import annotations

import copy
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="the clients extra is not installed")
pytest.importorskip("datasets", reason="the clients extra is not installed")

import deepspeed
from tests.clients.kit import VOCAB, clean_clients, llama, llama_config
from tests.clients.test_trl import options, tokenizer
from tests.pool import distributed

trl: Any = importlib.import_module("trl")  # by name: types are checked with another release
pytestmark = pytest.mark.skipif(
    not hasattr(trl, "PPOTrainer"), reason="this release of TRL has no PPO trainer"
)

SHOWN = ("objective/kl", "objective/scores", "loss/policy_avg", "loss/value_avg")


def curve(folder: Path, stage: int) -> list[list[float]]:
    """Return the trainer's logs for each batch of answers, with Accelerate's plugin at this stage."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    draw = torch.Generator().manual_seed(3)
    prompts = torch.randint(4, VOCAB // 3, (32, 8), generator=draw).tolist()
    scored = copy.deepcopy(llama_config())
    scored.num_labels = 1
    torch.manual_seed(1)
    value, reward = (LlamaForSequenceClassification(scored) for _ in range(2))
    with clean_clients():
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
        words = tokenizer()
        words.padding_side = "left"
        run = trl.PPOTrainer(
            args=trl.PPOConfig(
                **options(folder, stage, deepspeed=None, per_device_train_batch_size=4, learning_rate=1e-3),
                num_ppo_epochs=2,
                num_mini_batches=1,
                local_rollout_forward_batch_size=4,
                response_length=8,
                total_episodes=32,
                num_sample_generations=2,
            ),
            processing_class=words,
            model=llama(),
            ref_model=llama(),
            reward_model=reward,
            value_model=value,
            train_dataset=Dataset.from_dict({"input_ids": prompts}),
            eval_dataset=Dataset.from_dict({"input_ids": prompts[:8]}),
        )
        run.train()
        save(run, stage, folder / "policy")
        assert LlamaForCausalLM.from_pretrained(folder / "policy").config.vocab_size == VOCAB
        return [[entry[key] for key in SHOWN] for entry in run.state.log_history if SHOWN[0] in entry]


def save(run: Any, stage: int, folder: Path) -> None:
    """The policy. At stage 3 the trainer hands it to Accelerate in place of the engine, which Accelerate refuses."""
    if stage < 3:
        run.save_model(str(folder))
    else:
        policy = run.model.policy
        with deepspeed.zero.GatheredParameters(list(policy.parameters())):
            if run.accelerator.is_main_process:
                policy.save_pretrained(folder)
    run.accelerator.wait_for_everyone()


@distributed(world_size=2)
def test_the_same_curve_at_every_stage(tmp_path: Path) -> None:
    expected = curve(tmp_path / "0", 0)
    assert len(expected) == 4 and max(map(max, expected)) > 0
    for stage in (1, 2, 3):
        torch.testing.assert_close(
            torch.tensor(curve(tmp_path / str(stage), stage)), torch.tensor(expected), rtol=1e-3, atol=1e-5
        )
