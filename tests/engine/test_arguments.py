"""Every documented argument of `initialize`, alone and against its neighbours."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.config.deepspeed_config import DeepSpeedConfigError
from deepspeed.optim.lr_schedules import WarmupLR
from tests.engine.test_engine import WIDTH, data, make_config, make_model, same, weights
from tests.pool import distributed


def run(engine: Any, steps: int = 2) -> list[torch.Tensor]:
    for step in range(steps):
        engine.backward(engine(data(step)).square().mean())
        engine.step()
    result = weights(engine)
    engine.destroy()
    return result


@distributed(world_size=1)
def test_the_four_results_are_the_engines_own() -> None:
    config = make_config(1, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}})
    result = deepspeed.initialize(model=make_model(), config=config, training_data=list(torch.eye(WIDTH)))
    engine = result[0]
    assert type(engine) is deepspeed.DeepSpeedEngine
    assert result == (engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler)
    assert engine.config is config
    engine.destroy()


@pytest.mark.parametrize("how", ["dict", "json", "hjson", "base64", "config_params", "args"])
@distributed(world_size=1)
def test_a_config_may_come_in_many_ways(tmp_path: Path, how: str) -> None:
    config, path = make_config(2), tmp_path / "ds_config.json"
    text = json.dumps(config)
    path.write_text(text if how != "hjson" else text.replace("{", "{ # a comment\n", 1))
    given: dict[str, Any] = {
        "dict": {"config": config},
        "json": {"config": str(path)},
        "hjson": {"config": str(path)},
        "base64": {"config": base64.urlsafe_b64encode(text.encode()).decode()},
        "config_params": {"config_params": config},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)},
    }[how]
    engine, *_ = deepspeed.initialize(model=make_model(), **given)
    assert engine.zero_optimization_stage() == 2 and engine.train_micro_batch_size_per_gpu() == 4
    engine.destroy()


@distributed(world_size=1)
def test_config_wins_over_its_old_name_and_excludes_the_arguments(tmp_path: Path) -> None:
    engine, *_ = deepspeed.initialize(model=make_model(), config=make_config(1), config_params=make_config(2))
    assert engine.zero_optimization_stage() == 1
    engine.destroy()
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(make_config(1)))
    args = argparse.Namespace(deepspeed_config=str(path))
    with pytest.raises(AssertionError, match="given twice"):
        deepspeed.initialize(args=args, model=make_model(), config=make_config(1))
    with pytest.raises(AssertionError, match="requires a config"):
        deepspeed.initialize(args=argparse.Namespace(deepspeed_config=None), model=make_model())
    with pytest.raises(AssertionError, match="requires a model"):
        deepspeed.initialize(config=make_config(1))


@distributed(world_size=1)
def test_local_rank_is_that_of_the_arguments_or_of_the_environment() -> None:
    for args, expected in (
        (argparse.Namespace(local_rank=5), 5),
        (argparse.Namespace(local_rank=-1), 0),
        (argparse.Namespace(local_rank=None), 0),
        (None, 0),
    ):
        engine, *_ = deepspeed.initialize(args=args, model=make_model(), config=make_config(0))
        assert engine.local_rank == expected
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=1)
def test_an_optimizer_may_be_named_given_or_made_by_a_callable(stage: int) -> None:
    bare = {key: value for key, value in make_config(stage).items() if key != "optimizer"}
    options = {"lr": 1e-2, "weight_decay": 0.0}

    def named() -> Any:
        return deepspeed.initialize(model=make_model(), config=make_config(stage))

    def given() -> Any:
        model = make_model()
        return deepspeed.initialize(
            model=model, config=bare, optimizer=deepspeed.ops.adam.FusedAdam(model.parameters(), **options)
        )

    def made() -> Any:
        return deepspeed.initialize(
            model=make_model(),
            config=bare,
            optimizer=lambda params: deepspeed.ops.adam.FusedAdam(params, **options),
        )

    results = [run(make()[0]) for make in (named, given, made)]
    assert same(results[0], results[1]) and same(results[0], results[2])
    with pytest.raises(TypeError, match="torch.optim.Optimizer or a callable, not str"):
        deepspeed.initialize(model=make_model(), config=bare, optimizer="adam")  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_model_parameters_choose_what_is_trained_and_how(stage: int) -> None:
    """Bare parameters, a generator, and group dicts with their own rates; the rest of the model is unchanged."""
    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        config=make_config(stage),
        model_parameters=[{"params": list(model[0].parameters()), "lr": 0.0}, {"params": [model[2].weight]}],
    )
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        before = weights(engine)
    assert engine.get_lr() == [0.0, 1e-2]
    engine.backward(engine(data(0, dist.get_rank())).square().mean())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        moved = [not torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True)]
    assert moved == [False, False, True, False]  # a rate of 0; the last bias is in no group
    engine.destroy()


@distributed(world_size=1)
def test_a_scheduler_may_be_named_given_or_made_by_a_callable() -> None:
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}

    def rates(**given: Any) -> list[float]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = {key: value for key, value in make_config(1).items() if key != "optimizer"} | given.pop(
            "more", {}
        )
        if "build" in given:
            given = {"lr_scheduler": given["build"](optimizer)}
        engine, _, _, scheduler = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, **given
        )
        assert scheduler is engine.lr_scheduler and isinstance(scheduler, WarmupLR)
        seen = []
        for step in range(5):
            seen += engine.get_lr()
            engine.backward(engine(data(step)).square().mean())
            engine.step()
        engine.destroy()
        return seen

    named = rates(more={"scheduler": {"type": "WarmupLR", "params": params}})
    assert named == rates(build=lambda optimizer: WarmupLR(optimizer, **params))
    assert named == rates(lr_scheduler=lambda optimizer: WarmupLR(optimizer, **params))
    assert named[-1] == pytest.approx(1e-2 * torch.tensor(4.0).log().item() / torch.tensor(4.0).log().item())


@distributed(world_size=2)
def test_training_data_and_collate_fn_make_a_loader_for_this_rank() -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) + 100

    engine, _, loader, _ = deepspeed.initialize(
        model=make_model(), config=make_config(1), training_data=list(range(16)), collate_fn=collate
    )
    assert loader is engine.training_dataloader and len(loader) == 2
    mine = torch.cat(list(loader))
    everyone = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everyone, mine)
    assert sorted(torch.cat(everyone).tolist()) == list(range(100, 116))
    engine.destroy()


class Unit:
    """A Megatron-style model-parallel unit: two ranks, both model-parallel, and no replica."""

    def __init__(self) -> None:
        self.group = dist.new_group(list(range(dist.get_world_size())))
        self.alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def get_model_parallel_group(self) -> Any:
        return self.group

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_data_parallel_group(self) -> Any:
        return self.alone

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0


@distributed(world_size=2)
def test_mpu_says_which_ranks_are_replicas() -> None:
    """Ranks of one model-parallel group train different weights, and exchange no gradient."""
    rank = dist.get_rank()
    engine, *_ = deepspeed.initialize(model=make_model(rank), config=make_config(1), mpu=Unit())
    assert (engine.dp_world_size, engine.mp_world_size, engine.train_batch_size()) == (1, 2, 4)
    assert (engine.get_model_parallel_rank(), engine.get_model_parallel_world_size()) == (rank, 2)
    assert (engine.get_data_parallel_rank(), engine.get_data_parallel_world_size()) == (0, 1)
    reference, *_ = deepspeed.initialize(model=make_model(rank), config=make_config(1), mpu=Unit())
    assert not torch.equal(weights(engine)[0], weights(reference)[0] + 1)
    engine.backward(engine(data(rank)).square().mean())
    engine.step()
    both = [torch.empty(WIDTH, WIDTH) for _ in range(2)]
    dist.all_gather(both, weights(engine)[0])
    assert not torch.equal(both[0], both[1])
    engine.destroy(), reference.destroy()


@distributed(world_size=1)
def test_dist_init_required_and_distributed_port() -> None:
    """With a group in place both are content; `distributed_port` would only be used to make one."""
    engine, *_ = deepspeed.initialize(
        model=make_model(), config=make_config(0), dist_init_required=False, distributed_port=1
    )
    engine.destroy()


@distributed(world_size=1)
def test_mesh_param_must_fit_the_ranks_and_the_config() -> None:
    """Each with the other errors of the config."""
    config = {**make_config(0), "gradient_clipping": "much"}
    for mesh_param, more, said in (
        ((2, 2), {}, "sequence_parallel_size 2 does not divide the job's 1 rank"),
        ((2, 1), {}, "data_parallel_size 2 = 2 does not match the job's 1 rank"),
        ((1, 1), {"sequence_parallel_size": 2}, "mesh_param: (1, 1) asks for sequence_parallel_size 1, but"),
        (4, {}, "mesh_param: 4: expected the mesh sizes"),
    ):
        with pytest.raises(DeepSpeedConfigError) as caught:
            deepspeed.initialize(model=make_model(), config={**config, **more}, mesh_param=mesh_param)
        assert said in str(caught.value) and "gradient_clipping" in str(caught.value)
    engine, *_ = deepspeed.initialize(model=make_model(), config=make_config(0), mesh_param=(1, 1))
    engine.destroy()


@distributed(world_size=1)
def test_errors_come_together_and_before_anything_is_made() -> None:
    config = make_config(7, gradient_clipping=-1.0, optimizer={"type": "AdamV", "params": {}})
    model = make_model()
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(DeepSpeedConfigError) as caught:
        deepspeed.initialize(model=model, config=config)
    for key in ("zero_optimization.stage", "gradient_clipping"):
        assert key in str(caught.value)
    assert [p.data_ptr() for p in model.parameters()] == before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    with pytest.raises(DeepSpeedConfigError, match="did you mean .adam"):
        deepspeed.initialize(model=model, config=make_config(1, optimizer={"type": "AdamV"}))
    with pytest.raises(DeepSpeedConfigError, match="scheduler"):
        deepspeed.initialize(model=model, config=make_config(1, scheduler={"type": "WarmupLr2"}))


@distributed(world_size=1)
def test_a_model_without_parameters_runs_at_stage_0() -> None:
    config = {"train_micro_batch_size_per_gpu": 1}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Tanh(), config=config)
    assert optimizer is None and torch.equal(engine(torch.zeros(2)), torch.zeros(2))
    engine.destroy()


def _odd_model(kind: str) -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    if kind == "lazy":
        model[1] = nn.LazyLinear(2)
    elif kind == "meta":
        model[1] = nn.Linear(WIDTH, 2, device="meta")
    elif kind == "complex":
        model[1].weight = nn.Parameter(torch.zeros(2, WIDTH, dtype=torch.complex64))
    elif kind == "sparse":
        model[1].weight = nn.Parameter(torch.eye(2, WIDTH).to_sparse())
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[1], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["lazy", "meta", "complex", "sparse", "DTensor"])
@distributed(world_size=1)
def test_parameters_that_cannot_be_trained_are_named(kind: str, stage: int) -> None:
    with pytest.raises(
        (ValueError, NotImplementedError), match=rf"parameters 1\.weight.* {kind}|no shape yet"
    ):
        deepspeed.initialize(model=_odd_model(kind), config=make_config(stage))


@distributed(world_size=1)
def test_a_model_must_be_a_module() -> None:
    with pytest.raises(TypeError, match="torch.nn.Module, not function"):
        deepspeed.initialize(model=lambda x: x, config=make_config(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_parameters_that_are_views_of_other_memory(stage: int) -> None:
    """Transposed, expanded and channels-last parameters train like plain ones."""

    def build(views: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 4))
        nn.init.zeros_(model[2].bias)
        if views:
            model[0].to(memory_format=torch.channels_last)
            model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
            model[2].bias = nn.Parameter(torch.zeros(1).expand(4))
        return model

    results = []
    for views in (False, True):
        engine, *_ = deepspeed.initialize(model=build(views), config=make_config(stage))
        for step in range(2):
            x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
            engine.backward(engine(x).square().mean())
            engine.step()
        module = engine.module
        engine.destroy()
        results.append([p.detach().clone() for p in module.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=1)
def test_a_frozen_model_only_runs_forward(stage: int) -> None:
    model = make_model().requires_grad_(False)
    if stage in (1, 2):
        with pytest.raises(DeepSpeedConfigError, match="stage"):
            deepspeed.initialize(model=model, config=make_config(stage))
        return
    engine, *_ = deepspeed.initialize(model=model, config=make_config(stage))
    with pytest.raises(RuntimeError, match="trainable parameters"):
        engine.backward(engine(data(0)).sum())
    engine.destroy()
