"""Checkpoints of pipelines: any cut into stages loads any other, and files of single layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed.engine.pipeline.engine import PipelineEngine
from deepspeed.parallel.pipeline import PipelineModule
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.parallel.pipeline.test_engine import Plain, batches, layers, loss_of, make_engine
from tests.pool import distributed


def engine_of(stages: int, stage: int, **more: Any) -> PipelineEngine:
    topology = PipeDataParallelTopology(stages, dist.get_world_size() // stages)
    module = PipelineModule(layers(tied=True), topology=topology, loss_fn=loss_of, **more)
    return make_engine(module, stage, clip=0.1)


def train(engine: PipelineEngine, steps: int, data: Any) -> list[float]:
    return [engine.train_batch(data).item() for _ in range(steps)]


@pytest.mark.parametrize(("stage", "then"), [(0, 1), (1, 0), (1, 2), (2, 3), (3, 1)])
@distributed(world_size=4)
def test_stages_and_replicas_may_change(stage: int, then: int, tmp_path: Path) -> None:
    """Saved by 2 stages x 2 replicas; resumed by the same, by other layers per stage, and by 4 stages."""
    first = engine_of(2, stage)
    data = batches(0)  # replicas read the same: their number may change
    train(first, 2, data)
    first.save_checkpoint(tmp_path)
    expected = train(first, 2, data)
    norm = first.get_global_grad_norm()
    first.destroy()
    for stages, zero, method in ((2, stage, "parameters"), (2, then, "uniform"), (4, then, "uniform")):
        second = engine_of(stages, zero, partition_method=method)
        for group in second.basic_optimizer.param_groups:  # type: ignore[union-attr]
            group["lr"] = 5.0
        folder, _ = second.load_checkpoint(tmp_path)
        assert folder is not None and second.get_lr() == [0.01] and second.global_steps == 2
        again = batches(0)
        for _ in range(2 * second.clock.steps):
            next(again)
        assert train(second, 2, again) == pytest.approx(expected, rel=1e-5)
        assert second.get_global_grad_norm() == pytest.approx(norm, rel=1e-4)
        second.destroy()


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_a_plain_module_loads_a_pipeline(stage: int, tmp_path: Path) -> None:
    engine = engine_of(2, stage)
    train(engine, 1, batches(0))
    engine.save_checkpoint(tmp_path)
    own = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    if stage:
        whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        assert all(torch.equal(whole[name], value) for name, value in own.items())
        assert set(whole) == set(Plain(layers(tied=True), lr=0.1).params)
    folder = tmp_path / "global_step1"
    saved = sorted(path.name for path in folder.glob("layer_*"))
    assert saved == [f"layer_{number:02d}-model_states.pt" for number in range(5)]  # the tie has one
    plain = Plain(layers(tied=True), lr=0.1)
    names = {0: "tied_modules.embed", **{number: str(number) for number in range(1, 5)}}
    for number, name in names.items():
        state = torch.load(folder / f"layer_{number:02d}-model_states.pt", weights_only=True)
        plain.modules[name].load_state_dict(state)
    for name, value in own.items():
        torch.testing.assert_close(plain.params[name].detach(), value, rtol=0, atol=0)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for param in engine.module.parameters():
            nn.init.zeros_(param)
    engine.module.load_state_dir(folder, engine.checkpoint_engine)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, param in engine.module.named_parameters():
            torch.testing.assert_close(param.detach(), own[name], rtol=0, atol=0)
    engine.destroy()


@pytest.mark.parametrize(("stages", "stage"), [(2, 0), (2, 3), (4, 1)])
@distributed(world_size=4)
def test_one_file_of_all_stages(stages: int, stage: int, tmp_path: Path) -> None:
    """A tie, which lies on the first stage and the last one, is there once."""
    engine = engine_of(stages, stage)
    train(engine, 1, batches(0))
    own = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, own)
    expected = {name: value for each in everyone for name, value in each.items()}
    engine._config.zero_config.gather_16bit_weights_on_model_save = True
    assert engine.save_16bit_model(str(tmp_path), "whole.bin")
    dist.barrier()
    found = torch.load(tmp_path / "whole.bin", weights_only=True)
    assert found.keys() == expected.keys() == set(Plain(layers(tied=True), lr=0.1).params)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    engine.destroy()


@distributed(world_size=4)
def test_names_of_files(tmp_path: Path) -> None:
    module = PipelineModule(
        layers(), topology=PipeModelDataParallelTopology(2, 2, 1), partition_method="uniform"
    )
    stage, model = dist.get_rank() // 2, dist.get_rank() % 2
    assert module.ckpt_prefix("/a", "tag") == f"/a/tag/pipe_{stage:02d}-model_{model:02d}"
    number = module.partitions()[stage] + 1
    assert module.ckpt_layer_path("/a", 1) == f"/a/layer_{number:02d}-model_{model:02d}-model_states.pt"
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    parts = [str(folder / f"layer_{number:02d}-model_{part:02d}-model_states.pt") for part in range(101)]
    for part in parts:
        Path(part).touch()
    assert module.ckpt_layer_path_list(str(folder), 1) == parts
    assert module.stage_owner(0) == 0 and module.stage_owner(5) == 1
    with pytest.raises(FileNotFoundError, match=f"layer_{number - 1:02d}"):
        module.load_state_dir("/nowhere", None)
