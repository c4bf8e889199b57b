"""An engine whose batch is decided by the `elasticity` section."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.config.deepspeed_config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.config.sections.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from tests.pool import distributed

SECTION: dict[str, Any] = {
    "enabled": True,
    "max_train_batch_size": 12,
    "micro_batch_sizes": [1, 2, 3, 4],
    "min_gpus": 1,
    "max_gpus": 4,
    "min_time": 20,
    "version": 0.1,
}
CONFIG: dict[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "elasticity": SECTION,
}


def started(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]


@distributed(world_size=2)
def test_batch_sizes_of_two_ranks() -> None:
    engine = started(CONFIG)
    assert engine.train_batch_size() == 12
    assert engine.train_micro_batch_size_per_gpu() == 3
    assert engine.gradient_accumulation_steps() == 2
    assert engine.elasticity_enabled()
    assert not engine.is_elastic_model_parallel_supported()
    for _ in range(2):
        engine.backward(engine(torch.ones(3, 4)).sum())
        engine.step()
    assert engine.global_steps == 1


@distributed(world_size=2)
def test_the_update_is_that_of_the_same_batch_on_any_number_of_ranks() -> None:
    section = SECTION | {"max_train_batch_size": 12, "micro_batch_sizes": [2]}
    engine = started(CONFIG | {"elasticity": section})
    assert engine.train_batch_size() == 12
    data = torch.linspace(-1, 1, 48).view(12, 4)
    mine = data.view(-1, 2, 2, 4)[:, torch.distributed.get_rank()]  # micro-batches, dealt out in turn
    for batch in mine:
        engine.backward(engine(batch).square().mean())
        engine.step()
    torch.manual_seed(0)
    oracle = torch.nn.Linear(4, 4)
    oracle(data).square().mean().backward()
    torch.optim.SGD(oracle.parameters(), lr=0.1).step()
    torch.testing.assert_close(engine.module.weight, oracle.weight, rtol=1e-5, atol=1e-6)


def test_other_batch_keys_are_refused_or_ignored() -> None:
    keys = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 42}
    with pytest.raises(
        ElasticityConfigError, match="train_micro_batch_size_per_gpu: is decided by"
    ) as refusal:
        DeepSpeedConfig(CONFIG | keys)
    assert isinstance(refusal.value, (ElasticityError, DeepSpeedConfigError))
    assert len(refusal.value.problems) == 3
    config = DeepSpeedConfig(
        CONFIG | keys | {"elasticity": SECTION | {"ignore_non_elastic_batch_info": True}}
    )
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (12, 4)


def test_a_wrong_section_is_a_config_error_of_elasticity() -> None:
    with pytest.raises(ElasticityConfigError, match="elasticity.max_gpus: 1 is below min_gpus"):
        DeepSpeedConfig(CONFIG | {"elasticity": SECTION | {"min_gpus": 3, "max_gpus": 1}})
    with pytest.raises(ElasticityConfigError, match="elasticity.micro_batch_sizes"):
        DeepSpeedConfig(CONFIG | {"elasticity": SECTION | {"micro_batch_sizes": [-1]}})


def test_a_number_of_ranks_that_the_section_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="3 data-parallel ranks cannot share"):
        DeepSpeedConfig(
            CONFIG | {"elasticity": SECTION | {"max_train_batch_size": 4, "micro_batch_sizes": [2]}}
        )
    config = DeepSpeedConfig(
        CONFIG
        | {"elasticity": SECTION | {"max_train_batch_size": 4, "micro_batch_sizes": [1], "version": 0.2}}
    )
    assert config.train_batch_size == 3


def test_the_schedulers_section_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(SECTION | {"max_train_batch_size": 27}))
    with pytest.raises(ElasticityError, match="scheduler"):
        DeepSpeedConfig(CONFIG)


def test_ranks_that_share_a_batch_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    split = {"tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(ElasticityConfigError, match="model_parallel_size"):
        DeepSpeedConfig(CONFIG | split)
    section = SECTION | {"version": 0.2, "model_parallel_size": 2, "num_gpus_per_node": 4}
    config = DeepSpeedConfig(CONFIG | split | {"elasticity": section})
    assert (config.world_size, config.train_batch_size) == (2, 12)
