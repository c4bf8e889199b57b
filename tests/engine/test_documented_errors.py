"""Errors that are documented as one type and are of our own as well; gradients inside `no_sync`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.zero import TiledLinear
from deepspeed.zero.tensor_fragment import safe_get_full_grad
from tests.pool import distributed

OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


@distributed(world_size=2)
def test_unused_parameters_that_are_not_allowed() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
    config = OPTIMIZER | {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "ignore_unused_parameters": False},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine.module["used"](torch.ones(1, 3)).sum())
    for kind in (AssertionError, RuntimeError):
        with pytest.raises(kind, match="unused.weight"):
            engine.step()


@distributed(world_size=2)
def test_tags_that_differ(tmp_path: Path) -> None:
    config = OPTIMIZER | {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"tag_validation": "Fail"}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(3, 3), config=config)
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match="ranks save under different tags"):
            engine.save_checkpoint(str(tmp_path), tag=f"tag{dist.get_rank()}")


@pytest.mark.parametrize("splits", [{"in_splits": 0}, {"in_splits": 5}, {"out_splits": 9}])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_splits_that_do_not_fit(splits: dict[str, int], kind: type[Exception]) -> None:
    with pytest.raises(kind, match="_splits="):
        TiledLinear(4, 8, **splits)


@pytest.mark.parametrize("op", ["mean", "MEAN", "Sum", "sum"])
def test_the_word_for_the_reduction_in_any_case(op: str) -> None:
    report = deepspeed.check_config({"train_batch_size": 1, "gradient_allreduce_op": op})
    assert report.ok and report.config is not None and report.config.gradient_allreduce_op == op.lower()


def test_leaf_modules_as_one_text() -> None:
    report = deepspeed.check_config(
        {"train_batch_size": 1, "zero_optimization": {"leaf_module": {"classes": "my.Block", "names": "a.b"}}}
    )
    assert report.ok and report.config is not None
    leaves = report.config.zero_optimization.leaf_module
    assert (leaves.classes, leaves.names, leaves.name_suffixes) == (["my.Block"], ["a.b"], [])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_the_gradient_inside_no_sync_is_this_ranks(stage: int) -> None:
    torch.manual_seed(0)
    model, alone = nn.Linear(3, 2), nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    config = OPTIMIZER | {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    weight = engine.module.weight
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    assert safe_get_full_grad(weight) is None
    with engine.no_sync():
        assert safe_get_full_grad(weight) is None
        for micro in range(2):
            engine.backward(engine(x * (micro + 1)).square().sum())
            alone(x * (micro + 1)).square().sum().backward()
            torch.testing.assert_close(safe_get_full_grad(weight), alone.weight.grad)
    engine.allreduce_gradients()
    assert alone.weight.grad is not None
    dist.all_reduce(alone.weight.grad)
    torch.testing.assert_close(safe_get_full_grad(weight), alone.weight.grad / 2)


@distributed(world_size=1)
def test_what_is_said_inside_no_sync() -> None:
    config = OPTIMIZER | {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    with engine.no_sync():
        with pytest.raises(AssertionError, match=r"illegal to call Engine.step\(\) inside no_sync"):
            engine.step()
        with pytest.raises(AssertionError, match="no_sync context manager reentry"), engine.no_sync():
            pass


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", [AssertionError, ValueError])
def test_gathers_of_an_odd_size(stage: int, kind: type[Exception]) -> None:
    section = {"stage": stage, "allgather_bucket_size": 1001}
    with pytest.raises(kind, match="allgather_bucket_size must be a multiple of nccl_start_alignment_factor"):
        DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": section})
    DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": section | {"stage": 3}})
