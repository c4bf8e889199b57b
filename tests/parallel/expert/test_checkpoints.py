"""Checkpoints and exports of models with experts do not depend on how ranks shared them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.parallel.expert.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.parallel.expert.models import Model, batch, config, start
from tests.pool import distributed


def run(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("stage", "ep_size", "later_stage", "later_size"),
    [
        (0, 2, 0, 1),
        (1, 1, 2, 2),
        (1, 2, 1, 2),
        (2, 4, 3, 2),
        (3, 2, 0, 4),
        (3, 4, 3, 1),
        (3, 1, 3, 4),
        (2, 2, 2, 4),
    ],
)
@distributed(world_size=4)
def test_resumes_however_experts_are_shared(
    stage: int, ep_size: int, later_stage: int, later_size: int, tmp_path: Path
) -> None:
    first = start(config(stage), ep_size)
    run(first, range(2))
    first.save_checkpoint(tmp_path)
    expected = run(first, range(2, 4))
    first.destroy()
    second = start(config(later_stage), later_size)
    second.load_checkpoint(tmp_path)
    torch.testing.assert_close(run(second, range(2, 4)), expected, rtol=1e-5, atol=1e-6)
    second.load_checkpoint(tmp_path, load_module_only=True)
    torch.testing.assert_close(run(second, range(2, 3)), expected[:1], rtol=1e-5, atol=1e-6)
    second.destroy()


@pytest.mark.parametrize(("stage", "ep_size"), [(0, 2), (1, 4), (3, 2)])
@distributed(world_size=4)
def test_exports_are_those_of_one_process(stage: int, ep_size: int, tmp_path: Path) -> None:
    engine = start(config(stage, zero={"stage3_gather_16bit_weights_on_model_save": True}), ep_size)
    engine.save_16bit_model(tmp_path)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    if dist.get_rank() == 0:
        wanted = Model(1).state_dict()
        for found in (
            torch.load(tmp_path / "pytorch_model.bin"),
            get_fp32_state_dict_from_zero_checkpoint(tmp_path),
        ):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], value) for name, value in wanted.items())


@distributed(world_size=2)
def test_weights_of_one_process_load_into_shared_experts() -> None:
    engine = start(config(1), 2)
    weights = {name: torch.full_like(value, 0.5) for name, value in Model(1).state_dict().items()}
    engine.module.load_state_dict(weights)
    assert all(bool((param == 0.5).all()) for param in engine.module.parameters())
    with pytest.raises(RuntimeError, match=r"deepspeed_experts\.4"):
        engine.module.load_state_dict(
            {**weights, "blocks.0.moe.deepspeed_moe.experts.deepspeed_experts.4.0.weight": torch.zeros(1)}
        )
    engine.destroy()


@distributed(world_size=4)
def test_groups_of_experts_keep_their_hyperparameters(tmp_path: Path) -> None:
    """Also on ranks whose experts the first file does not name."""

    def begin(ep_size: int, lr: float) -> Any:
        model = Model(ep_size)
        groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters())})
        groups[1]["lr"] = lr
        return deepspeed.initialize(model=model, model_parameters=groups, config=config(1))[0]

    first = begin(4, 0.5)
    run(first, range(1))
    first.save_checkpoint(tmp_path)
    first.destroy()
    for ep_size in (1, 2):
        second = begin(ep_size, 0.1)
        second.load_checkpoint(tmp_path)
        assert second.get_lr() == [1e-2, 0.5]
        second.destroy()


@distributed(world_size=4)
def test_each_expert_has_its_documented_file(tmp_path: Path) -> None:
    engine = start(config(1), 2)
    engine.save_checkpoint(tmp_path, tag="here")
    if dist.get_rank() == 0:
        wanted = Model(1).state_dict()
        found: dict[str, Any] = {}
        for layer in range(2):
            for expert in range(4):
                path = tmp_path / f"here/layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
                held = torch.load(path)
                assert all(f"blocks.{layer}." in name and f"_experts.{expert}." in name for name in held)
                found |= held
        assert found.keys() == {name for name in wanted if "deepspeed_experts" in name}
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    engine.destroy()


@distributed(world_size=2)
def test_ranks_save_in_the_background_into_folders_of_their_own(tmp_path: Path) -> None:
    """Files of experts are written before the thread begins, into the folder that the thread commits."""
    engine = start({**config(0), "checkpoint": {"writer": {"decoupled": True}}}, 2)
    run(engine, range(2))
    for _ in range(2):
        engine.save_checkpoint(tmp_path / f"worker{dist.get_rank()}", tag="t")
    engine.background_writer.wait()
    expected = run(engine, range(2, 4))
    engine.destroy()
    if dist.get_rank() == 0:
        for worker in ("worker0", "worker1"):
            assert not [each for each in (tmp_path / worker).iterdir() if each.name.startswith(".")]
            shutil.copytree(tmp_path / worker, tmp_path / "together", dirs_exist_ok=True)
    dist.barrier()
    again = start(config(0), 2)
    again.load_checkpoint(tmp_path / "together")
    torch.testing.assert_close(run(again, range(2, 4)), expected, rtol=1e-5, atol=1e-6)
    again.destroy()
